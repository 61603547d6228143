//! Model folders that these tests write, whole and damaged.

mod chat;
mod export;
mod folder;
#[cfg(feature = "hub")]
mod hub;
mod lora;
mod support;
mod tokenizer;
mod weights;
