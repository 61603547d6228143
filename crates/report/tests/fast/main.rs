//! Pages of small run folders.

mod folders;
mod pages;
mod support;
