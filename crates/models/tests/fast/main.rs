//! Model folders that these tests write, whole and damaged.

mod folder;
mod support;
mod weights;
