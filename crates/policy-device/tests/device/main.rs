//! The decoder and its rollout on XLA's CPU.

mod checkpoint;
mod families;
mod rollout;
mod support;
