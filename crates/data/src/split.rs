//! Which prompts are held out.

use rng::stable_hash;

/// A number that stands for a prompt, the same on every machine: [`stable_hash`] with its bits mixed.
pub(crate) fn prompt_hash(prompt: &str) -> u64 {
    stable_hash(prompt).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Whether a prompt of this hash belongs to the held-out share of all prompts.
pub(crate) fn is_held_out(hash: u64, fraction: f64) -> bool {
    // The top 53 bits as a number in [0, 1).
    ((hash >> 11) as f64) / ((1u64 << 53) as f64) < fraction
}
