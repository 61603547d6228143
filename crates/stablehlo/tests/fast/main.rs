//! Texts of programs, interpretation, derivatives, and errors; without a compiler.

mod errors;
mod interpret;
mod mosaic;
mod reverse;
mod sharding;
mod text;
