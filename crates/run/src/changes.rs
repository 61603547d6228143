//! Changes to the configuration of a run when it is resumed.
//!
//! A resumed run may use new values for [safe keys](SAFE), from `config.yaml` or `--set`: learning rates, limits, logging, evaluation,
//! checkpoints. Weights, AdamW moments and counters are kept. A change of any other key would make it a different run and is refused
//! with the name of the key. Checkpoints store a hash of all other keys, so all checkpoints of a run have the same hash.

use super::checkpoint::CheckpointId;
use super::digest::sha256;
use super::dir::RunDir;
use crate::error::{Error, Result};
use grpo_files::{redact_at, sync_folder};
use grpo_run_config::TrainConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;

/// Keys, and sections with all their keys, that may change when a run is resumed; `*` stands for any name. The connection to an
/// external reward may change, its weight may not.
pub const SAFE: &[&str] = &[
    "run",
    "policy",
    "logging",
    "wandb",
    "eval",
    "export",
    "rollout.mesh",
    "rollout.server",
    "rollout.endpoint",
    "rollout.endpoint_strict",
    "distributed",
    "optimizer.learning_rate",
    "optimizer.warmup_ratio",
    "optimizer.warmup_steps",
    "optimizer.lr_scheduler_type",
    "optimizer.lr_scheduler_kwargs",
    "optimizer.min_lr_ratio",
    "optimizer.max_grad_norm",
    "optimizer.skip_grad_norm",
    "optimizer.max_consecutive_skips",
    "warmup.optimizer.learning_rate",
    "warmup.optimizer.warmup_ratio",
    "warmup.optimizer.warmup_steps",
    "warmup.optimizer.lr_scheduler_type",
    "warmup.optimizer.lr_scheduler_kwargs",
    "warmup.optimizer.min_lr_ratio",
    "warmup.optimizer.max_grad_norm",
    "warmup.optimizer.skip_grad_norm",
    "warmup.optimizer.max_consecutive_skips",
    "grpo.max_steps",
    "grpo.filter_groups.max_num_gen_batches",
    "environments.*.command",
    "environments.*.agent",
    "environments.*.url",
    "environments.*.workers",
    "environments.*.timeout",
    "environments.*.env",
    "environments.*.headers",
    "rewards.max_consecutive_failures",
    "rewards.programs.*.command",
    "rewards.programs.*.batch_size",
    "rewards.programs.*.timeout",
    "rewards.programs.*.workers",
    "rewards.programs.*.env",
    "rewards.http.*.url",
    "rewards.http.*.batch_size",
    "rewards.http.*.timeout",
    "rewards.http.*.retries",
    "rewards.http.*.concurrency",
    "rewards.http.*.headers",
];

/// The keys of safe sections that are not safe: they decide what is optimised.
const UNSAFE: [&str; 4] =
    ["policy.quantization", "policy.freeze_router", "policy.router_aux_loss_coef", "policy.replay_routing"];

/// The keys that are always part of the hash, one per line. Keys added later are left out of the hash while they have their default, so
/// older checkpoints still match their run.
const FIRST: &str = include_str!("first_keys.txt");

/// A key whose value changed, with both values. Also a row of `changes.jsonl`, where the checkpoint is added.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// The dotted path of the key.
    pub key: String,
    /// The value before the change.
    pub from: Value,
    /// The value after the change.
    pub to: Value,
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (from {} to {})", self.key, self.from, self.to)
    }
}

/// A row of `changes.jsonl`.
#[derive(Serialize)]
struct ChangeRow<'a> {
    /// The checkpoint from which the change applies; null if the run starts over.
    checkpoint: Option<String>,
    #[serde(flatten)]
    change: &'a Change,
}

/// Returns the differences between two configurations, sorted by key, without secrets: if only a secret differs, `from` equals `to`.
///
/// # Errors
/// [`Error::Text`] if a configuration cannot be serialised.
pub fn between(before: &TrainConfig, after: &TrainConfig) -> Result<Vec<Change>> {
    let mut changes = differences(&leaves(before)?, &leaves(after)?);
    for Change { key, from, to } in &mut changes {
        redact_at(key, from);
        redact_at(key, to);
    }
    changes.sort_by(|a, b| a.key.cmp(&b.key));
    Ok(changes)
}

/// Returns the differences by name; a missing name equals null.
pub(super) fn differences(before: &BTreeMap<String, Value>, after: &BTreeMap<String, Value>) -> Vec<Change> {
    let names = before.keys().chain(after.keys().filter(|name| !before.contains_key(*name)));
    let value = |map: &BTreeMap<String, Value>, name: &String| map.get(name).cloned().unwrap_or_default();
    let change = |name: &String| Change { key: name.clone(), from: value(before, name), to: value(after, name) };
    names.map(change).filter(|change| change.from != change.to).collect()
}

/// Returns the changes from the recorded configuration of `dir` to `config`. The record holds no secrets, so changed secrets are found
/// by comparing with config.yaml.
///
/// # Errors
/// [`Error::RunDir`] with the keys that may not change and the reason; the errors of [`RunDir::recorded_config`].
pub(super) fn safe_changes(dir: &RunDir, config: &TrainConfig) -> Result<Vec<Change>> {
    let mut changes = between(&dir.recorded_config()?, config)?;
    changes.retain(|change| change.from != change.to);
    let secret_changes = between(&dir.config(&[])?, config)?.into_iter().filter(|change| change.from == change.to);
    changes.extend(secret_changes);
    let refused: Vec<&Change> = changes.iter().filter(|change| !is_safe(&change.key)).collect();
    let Some(first) = refused.first() else { return Ok(changes) };
    let list: Vec<String> = refused.iter().map(|change| change.to_string()).collect();
    let reason = format!(
        "the configuration has changed in {}, and a run goes on with the value it was begun with: {}; restore it in \
         config.yaml, or start a new run with it; what may change is {}",
        list.join(", "),
        reason(&first.key),
        SAFE.join(", ")
    );
    Err(Error::run_dir(dir.root(), reason))
}

/// Writes `config` as the run's configuration and logs the changes; the run continues from `position`.
pub(super) fn record(
    dir: &RunDir,
    config: &TrainConfig,
    changes: &[Change],
    position: Option<CheckpointId>,
) -> Result<()> {
    if changes.is_empty() {
        return Ok(());
    }
    let path = dir.changes_path();
    let mut lines = Vec::new();
    for change in changes {
        let row = ChangeRow { checkpoint: position.map(|position| position.to_string()), change };
        serde_json::to_writer(&mut lines, &row).map_err(|e| Error::Text(format!("a row of changes.jsonl: {e}")))?;
        lines.push(b'\n');
    }
    let append = || {
        let mut file = OpenOptions::new().append(true).create(true).open(&path)?;
        file.write_all(&lines)?;
        file.sync_all()?;
        sync_folder(dir.root())
    };
    append().map_err(|e| Error::io("append to", &path, e))?;
    dir.write_config(config)
}

/// Returns the hash of all keys that may not change.
pub(super) fn config_hash(config: &TrainConfig) -> Result<String> {
    let (mut settings, defaults) = (leaves(config)?, leaves(&TrainConfig::default())?);
    let unused = |key: &String, value: &Value| !is_first(key) && defaults.get(key) == Some(value);
    // The section `lora` as a whole is null by default.
    let is_fresh = |key: &String, value: &Value| key == "lora.adapter" && value.is_null();
    settings.retain(|key, value| !(is_safe(key) || unused(key, value) || is_fresh(key, value)));
    serde_json::to_vec(&settings).map(|bytes| sha256(&bytes)).map_err(|e| Error::Text(format!("configuration: {e}")))
}

fn is_safe(key: &str) -> bool {
    let is_in = |safe: &&str| {
        let mut parts = key.split('.');
        safe.split('.').all(|safe| parts.next().is_some_and(|part| safe == "*" || safe == part))
    };
    !UNSAFE.contains(&key) && SAFE.iter().any(is_in)
}

fn is_first(key: &str) -> bool {
    FIRST.lines().any(|first| first == key)
}

/// Returns the reason why a key may not change.
fn reason(key: &str) -> &'static str {
    let section = key.split('.').next().unwrap_or_default();
    match (section, key) {
        ("seed" | "data", _) => "it decides which problems and samples come next",
        ("model", _) => "the checkpoints hold the weights of another model",
        ("loss" | "rewards" | "policy", _) => "it decides what is optimised",
        (_, "grpo.implementation") => "it names the code that computes the loss",
        (_, key) if key.contains("optimizer.") => "the moments of the optimizer belong to it",
        _ => "the numbers of its steps depend on it",
    }
}

/// Returns all values that are not maps, by dotted path.
pub(super) fn leaves(config: &TrainConfig) -> Result<BTreeMap<String, Value>> {
    fn collect(path: String, value: Value, leaves: &mut BTreeMap<String, Value>) {
        match value {
            Value::Object(map) if !map.is_empty() => {
                for (key, value) in map {
                    let path = if path.is_empty() { key } else { format!("{path}.{key}") };
                    collect(path, value, leaves);
                }
            }
            leaf => {
                leaves.insert(path, leaf);
            }
        }
    }
    let value = serde_json::to_value(config).map_err(|e| Error::Text(format!("configuration: {e}")))?;
    let mut found = BTreeMap::new();
    collect(String::new(), value, &mut found);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_safe_key_exists() {
        let leaves = leaves(&TrainConfig::default()).unwrap();
        for safe in SAFE.iter().map(|safe| safe.split(".*").next().unwrap()) {
            assert!(leaves.keys().any(|key| key == safe || key.starts_with(&format!("{safe}."))), "{safe}");
        }
        assert!(is_safe("rewards.programs.judge.timeout") && !is_safe("rewards.programs.judge.weight"));
        assert!(!is_safe("runs.name") && !is_safe("optimizer.adam_beta1") && is_safe("run.name"));
    }

    #[test]
    fn the_configuration_hash_ignores_safe_keys() {
        let config = TrainConfig::default();
        let hash = config_hash(&config).unwrap();
        let mut changed = config.clone();
        changed.optimizer.learning_rate = 1.0;
        changed.optimizer.settings.skip_grad_norm = Some(3.0);
        changed.eval.num_problems = Some(1);
        changed.run.save_steps += 1;
        assert_eq!(config_hash(&changed).unwrap(), hash);
        let keys: Vec<_> = between(&config, &changed).unwrap().into_iter().map(|change| change.key).collect();
        let expected = ["eval.num_problems", "optimizer.learning_rate", "optimizer.skip_grad_norm", "run.save_steps"];
        assert_eq!(keys, expected);
        changed.optimizer.settings.adam_beta2 = 0.5;
        assert_ne!(config_hash(&changed).unwrap(), hash);
    }

    #[test]
    fn keys_added_later_keep_the_hash_while_at_their_default() {
        let config = TrainConfig::default();
        let mut before = leaves(&config).unwrap();
        for first in FIRST.lines() {
            assert!(
                before.contains_key(first),
                "{first} is no key any more: checkpoints of runs that had it fit no run"
            );
            assert!(!is_safe(first), "{first} is in no hash");
        }
        before.retain(|key, _| is_first(key));
        assert_eq!(config_hash(&config).unwrap(), sha256(&serde_json::to_vec(&before).unwrap()));
        assert!(!before.contains_key("model.head_dim"));
        let mut used = config.clone();
        used.model.shape_mut().head_dim = Some(16);
        assert_ne!(config_hash(&used).unwrap(), config_hash(&config).unwrap());
    }
}
