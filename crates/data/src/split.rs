//! Selects held-out prompts.

use rng::stable_hash;

/// Returns a hash of a prompt that is the same on every machine: [`stable_hash`] with its bits mixed.
pub(crate) fn prompt_hash(prompt: &str) -> u64 {
    stable_hash(prompt).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Returns `true` if a prompt with this hash is held out.
pub(crate) fn is_held_out(hash: u64, fraction: f64) -> bool {
    // The top 53 bits, scaled to [0, 1).
    ((hash >> 11) as f64) / ((1u64 << 53) as f64) < fraction
}
