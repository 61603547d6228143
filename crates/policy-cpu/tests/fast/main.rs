//! The CPU policy against results of transformers and torch.

#[path = "../../../../tests/checkpoints/checkpoint.rs"]
mod checkpoint;
mod families;
mod lora;
#[path = "../../../../tests/checkpoints/ppo.rs"]
mod ppo_of_torch;
mod quantization;
mod routers;
mod value_head;
