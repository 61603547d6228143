//! The decoder, its rollout and its training on XLA's CPU plugin.

mod adamw;
mod attention;
mod bounds;
#[path = "../../../../tests/checkpoints/checkpoint.rs"]
mod checkpoint;
mod delta_net;
mod eight_bit;
mod families;
mod faults;
mod gradients;
mod long_rollout;
mod lora;
mod losses;
mod mesh;
mod mesh_memory;
mod mesh_models;
mod mesh_policy;
mod mesh_rows;
mod mesh_support;
mod mesh_training;
mod optimizers;
mod packing;
#[path = "../../../../tests/checkpoints/ppo.rs"]
mod ppo_of_torch;
mod prefill;
mod prefills;
mod processes;
mod quantization;
mod quantized_meshes;
mod remainders;
mod rollout;
mod routers;
mod split;
mod step;
mod support;
mod training;
mod turns;
mod value_head;

grpo_testkit::tiers!();
