//! What programs look like, and what cannot be built. No compiler is asked.

mod errors;
mod mosaic;
mod reverse;
mod text;
