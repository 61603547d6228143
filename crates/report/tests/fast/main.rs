//! Pages of small run folders.

mod axis;
mod folders;
mod pages;
mod sample;
mod support;
