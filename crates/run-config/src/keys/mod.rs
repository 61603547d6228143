//! Every key of a run's configuration with its meaning.
//!
//! `keys.txt` has a line per key, generated from the documentation of the configuration's structs. A test compares the file with the
//! documentation and with the serialised configuration. `UPDATE_DOCS=1 cargo test -p grpo-run-config --lib keys` writes the file.

mod trl;

use crate::TrainConfig;
use std::sync::OnceLock;

/// A key of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The dotted path. Where the user names the entries of a section, as in `rewards.programs`, the path has `*` for a name.
    pub path: &'static str,
    /// The meaning, one sentence without a full stop.
    pub meaning: &'static str,
}

/// Returns all keys, a section before its keys, in the order of `--print-config`.
pub fn keys() -> &'static [Key] {
    static KEYS: OnceLock<Vec<Key>> = OnceLock::new();
    KEYS.get_or_init(|| {
        let lines = include_str!("../keys.txt").lines();
        lines.filter_map(|line| line.split_once('\t')).map(|(path, meaning)| Key { path, meaning }).collect()
    })
}

impl grpo_files::Configuration for TrainConfig {
    fn keys() -> Vec<&'static str> {
        keys().iter().map(|key| key.path).collect()
    }

    fn successor(removed: &str) -> Option<&'static str> {
        match removed {
            "grpo.backend" => Some("policy.device"),
            // Other rewards have a weight.
            "rewards.soft_overlong_punishment.weight" => Some("rewards.soft_overlong_punishment.penalty_factor"),
            _ => None,
        }
    }

    fn hint(name: &str) -> Option<String> {
        if trl::is_key(name) { None } else { trl::hint(name) }
    }
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
