//! The decoder and its rollout on XLA's CPU.

mod attention;
mod checkpoint;
mod derivative;
mod families;
mod faults;
mod gradients;
mod lora;
mod remainders;
mod rollout;
mod support;
mod training;
mod value_head;
mod weights;
