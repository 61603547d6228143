//! The policy on the host, against what transformers and torch compute.

mod checkpoint;
mod families;
mod lora;
mod ppo;
mod value_head;
