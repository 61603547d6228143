//! The loop with other parts than its own.

mod documents;
mod losses;
mod own_policy;
mod ppo;
mod programs;
mod rollout;
mod stop_tokens;
