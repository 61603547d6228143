//! What programs look like, and what cannot be built. No compiler is asked.

mod errors;
mod interpret;
mod mosaic;
mod reverse;
mod sharding;
mod text;
