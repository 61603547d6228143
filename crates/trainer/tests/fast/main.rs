//! The training loop with custom parts.

mod documents;
mod losses;
mod own_policy;
mod ppo;
mod rollout;
mod steps;
mod stop_tokens;
