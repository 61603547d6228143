//! Terms of rewards: the length penalty and the KL to the reference policy.

mod kl;
mod overlong;

pub use kl::{KlRewards, kl_in_reward};
pub use overlong::SoftOverlong;
