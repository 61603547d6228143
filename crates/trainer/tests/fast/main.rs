//! The loop with other parts than its own.

mod own_policy;
mod ppo;
mod rollout;
