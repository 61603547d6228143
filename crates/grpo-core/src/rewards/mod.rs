//! What rewards are made of before they become advantages: the penalty for length and the KL to the reference.

mod kl;
mod overlong;

pub use kl::{KlRewards, kl_in_reward};
pub use overlong::SoftOverlong;
