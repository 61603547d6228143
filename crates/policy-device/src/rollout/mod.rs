//! Sampling completions on a device, over a cache of keys and values.
//!
//! Three programs make a rollout: the prefill of a few prompts, the admission of samples into slots that are free, and the decode loop.
//! [`DeviceRollout`] runs them until every sample of a request has ended, and refills slots as they become free.

mod decode;
mod engine;
mod follow;
mod prefill;
mod sampling;
mod sizes;
mod slots;
mod state;
pub(crate) mod threefry;

pub use engine::{DeviceRollout, RolloutOptions};
pub(crate) use follow::check_sequences;
pub(crate) use sizes::cache_shape;
pub use sizes::{RolloutModules, RolloutSizes};
