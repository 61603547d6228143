//! Tests with generated model folders, valid and damaged.

mod ambiguous;
mod chat;
mod export;
mod families;
mod folder;
#[cfg(feature = "hub")]
mod hub;
#[cfg(all(unix, feature = "hub"))]
mod hub_dataset;
#[cfg(feature = "hub")]
mod hub_server;
mod lora;
mod numbers;
mod quantization;
mod support;
mod tokenizer;
mod turns;
mod weights;
mod wrapper;
