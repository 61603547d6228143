//! The CPU policy against results of transformers and torch.

// Each test binary uses some of it.
#[allow(dead_code)]
#[path = "../../../../tests/checkpoints/checkpoint.rs"]
mod checkpoint;
mod families;
#[path = "../../../../tests/checkpoints/ppo.rs"]
mod ppo_of_torch;
mod routers;
#[path = "../support/mod.rs"]
mod support;
