//! Model folders that these tests write, whole and damaged.

mod chat;
mod export;
mod folder;
mod support;
mod weights;
