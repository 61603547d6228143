//! Sampling of completions on a device, with a KV cache.
//!
//! A rollout has three programs: the prefill of a few prompts, the admission of samples into free slots, and the decode loop (continuous
//! batching). [`DeviceRollout`] runs them until every sample of a request is finished, and refills slots as they become free. For the next turn
//! of a conversation, two more programs continue with the KV cache of its slot.

mod cache;
mod check;
mod columns;
mod decode;
mod engine;
mod extend;
mod follow;
mod layers;
mod memory;
mod options;
mod parts;
mod prefill;
mod routed;
mod sampling;
mod sizes;
mod slots;
mod state;
mod threefry;
mod window;

pub(crate) use check::{check_ids, check_sequences};
pub use engine::DeviceRollout;
pub use options::{RequestOptions, RolloutOptions};
pub use sizes::{RolloutPrograms, RolloutSizes};
