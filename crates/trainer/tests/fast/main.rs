//! The loop with other parts than its own.

mod documents;
mod own_policy;
mod ppo;
mod programs;
mod rollout;
