//! Checkpoints: folders that are either complete or absent, and are verified before use.
//!
//! | file | what |
//! |---|---|
//! | `model.safetensors` | weights of the policy, f32, by the names of `transformers` (adapters: PEFT) |
//! | `optimizer.safetensors` | AdamW's moments `exp_avg.NAME` and `exp_avg_sq.NAME`; 8-bit moments: `exp_avg_codes.NAME`, `exp_avg_scales.NAME` and those of `exp_avg_sq` |
//! | `reference.safetensors` | weights of the reference policy, when the loss or the reward has a KL to it |
//! | `state.json` | counters, adaptive coefficients, seed, hash of the configuration, lengths of the logs |
//! | `SHA256SUMS` | digests of the other files, in the format of `sha256sum -c` |
//!
//! A checkpoint is written under a temporary name, synced file by file and then renamed, so a crash leaves the previous checkpoint
//! intact. Names sort in the order of a run: `warmup-000050` < `step-000000` < `step-000050`.

mod id;
mod tensors;

pub use id::CheckpointId;

use super::best::Best;
use super::digest::{hex, sha256};
use super::dir::set_aside;
use crate::error::{Error, Result};
use grpo_files::{read_regular, sync_folder};
use grpo_policy::{StateGroup, Weights};
use grpo_trainer::coefficients::CoefficientState;
use grpo_trainer::{Counters, TrainState};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::fs::File;
use std::path::{Path, PathBuf};
use tensors::Layout;
pub use tensors::{Export, StoredTensors};

/// The name and version of the format.
pub const FORMAT: &str = "grpo-checkpoint/4";
const STATE: &str = "state.json";
const SUMS: &str = "SHA256SUMS";
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const REF_POLICY: &str = "reference.safetensors";
/// The groups of tensors, with their file and their name in errors.
const GROUPS: [(&str, StateGroup, &str); 3] = [
    (MODEL, StateGroup::Weights(Weights::Policy), "the weights"),
    (OPTIMIZER, StateGroup::Optimizer, "the optimizer's moments"),
    (REF_POLICY, StateGroup::Weights(Weights::RefPolicy), "the weights of the reference"),
];
/// The prefix of folders that are being written or removed. They are never read.
const TEMPORARY: &str = ".tmp-";
/// The largest size of state.json and SHA256SUMS in bytes; real ones are far below 4 KiB.
const MAX_TEXT_BYTES: u64 = 1 << 16;

/// The content of state.json: all state of a run other than tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedState {
    /// The name and version of the format, [`FORMAT`].
    pub format: String,
    /// The name of the checkpoint.
    pub position: String,
    /// The progress of the run. With the seed, it determines every random number.
    pub counters: Counters,
    /// The coefficients that adapt to measurements.
    pub coefficients: CoefficientState,
    /// The seed of the run.
    pub seed: u64,
    /// The SHA-256 of the configuration, without the keys that may change on resume ([`super::changes::SAFE`]).
    pub config_sha256: String,
    /// The number of computing threads; a different number may change rounding.
    pub threads: usize,
    /// The elapsed time of the run in seconds.
    pub seconds: f64,
    /// The length of metrics.jsonl in bytes.
    pub metrics_bytes: u64,
    /// The length of completions.jsonl in bytes.
    pub completions_bytes: u64,
    /// The best evaluation so far, with `run.metric_for_best_model`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
}

/// The checkpoints of a run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

impl Checkpoints {
    /// Returns the checkpoints in `folder`, which need not exist yet.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Returns the folder of the checkpoint at `position`.
    pub fn path(&self, position: CheckpointId) -> PathBuf {
        self.folder.join(position.to_string())
    }

    /// Returns all checkpoints, oldest first.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn list(&self) -> Result<Vec<CheckpointId>> {
        let mut positions: Vec<_> = self.names()?.iter().filter_map(|name| CheckpointId::from_name(name)).collect();
        positions.sort_unstable();
        Ok(positions)
    }

    /// Saves a checkpoint of the tensors that `export` exports, replacing an existing one at the same position. `agree` gets the lines of
    /// `SHA256SUMS` for the tensors; if it fails, no checkpoint is saved.
    ///
    /// # Errors
    /// [`grpo_policy::Error::NotFinite`] if a tensor has a non-finite value; [`Error::File`], also if the parent of the checkpoints' folder is
    /// gone. Existing checkpoints are kept on errors.
    pub fn write(
        &self,
        position: CheckpointId,
        saved: &SavedState,
        export: &Export<'_>,
        agree: impl FnOnce(&str) -> Result<()>,
    ) -> Result<PathBuf> {
        // Checked before anything is written.
        let layouts = layouts(saved.counters.optimizer_steps, export)?;
        let (target, temporary) = (self.path(position), self.folder.join(format!("{TEMPORARY}{position}")));
        let io = |action, path: &Path| {
            let path = path.to_owned();
            move |e| Error::io(action, &path, e)
        };
        // Creates only this folder: a run folder that was removed is not recreated.
        match std::fs::create_dir(&self.folder) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(io("create", &self.folder)(e)),
            _ => {}
        }
        remove_if_there(&temporary)?;
        std::fs::create_dir(&temporary).map_err(io("create", &temporary))?;

        let json = serde_json::to_vec_pretty(saved).map_err(|e| Error::Text(format!("{STATE}: {e}")))?;
        let mut sums = sums_of(&layouts, |name, layout| layout.write(export, &temporary.join(name)))?;
        agree(&sums)?;
        let _ = writeln!(sums, "{}  {STATE}", sha256(&json));
        for (name, bytes) in [(STATE, json), (SUMS, sums.into_bytes())] {
            let path = temporary.join(name);
            File::create(&path)
                .and_then(|mut file| std::io::Write::write_all(&mut file, &bytes).and_then(|()| file.sync_all()))
                .map_err(io("write", &path))?;
        }
        sync_folder(&temporary).map_err(io("sync", &temporary))?;
        set_aside(&target)?;
        std::fs::rename(&temporary, &target).map_err(io("rename to", &target))?;
        sync_folder(&self.folder).map_err(io("sync", &self.folder))?;
        Ok(target)
    }

    /// Maps and verifies a checkpoint. Tensors stay in their mapped files and are read once for verification.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] with the file and the defect.
    pub fn read(&self, position: CheckpointId) -> Result<(SavedState, TrainState<StoredTensors>)> {
        let path = self.path(position);
        let text = |name: &str| {
            let path = path.join(name);
            read_regular(&path, MAX_TEXT_BYTES).map_err(|e| match e.kind() {
                std::io::ErrorKind::NotFound => damaged(&path, "the file is missing"),
                _ => damaged(&path, format!("it cannot be read: {e}")),
            })
        };
        let sums_path = path.join(SUMS);
        let sums = parse_sums(&text(SUMS)?).map_err(|reason| damaged(&sums_path, reason))?;
        let prove = |name: &str, length: usize, found: &str| {
            let Some((_, expected)) = sums.iter().find(|(n, _)| n == name) else {
                return Err(damaged(&sums_path, format!("it has no line for {name}")));
            };
            if found != expected {
                let reason = format!("its {length} bytes have SHA-256 {found}, but {SUMS} says {expected}");
                return Err(damaged(&path.join(name), reason));
            }
            Ok(())
        };
        let json = text(STATE)?;
        prove(STATE, json.len(), &sha256(&json))?;
        let saved = parse_state(&json).map_err(|r| damaged(&path.join(STATE), r))?;
        if saved.position != position.to_string() {
            let reason = format!("it was taken at {}: the folder was renamed", saved.position);
            return Err(damaged(&path.join(STATE), reason));
        }
        let tensors = |name: &str| {
            let file = StoredTensors::open(&path.join(name));
            let (tensors, length, sum) = file.map_err(|reason| damaged(&path.join(name), reason))?;
            prove(name, length, &hex(&sum)).map(|()| tensors)
        };
        let has_ref_policy = sums.iter().any(|(name, _)| name == REF_POLICY);
        let [policy, optimizer] = [tensors(MODEL)?, tensors(OPTIMIZER)?];
        let ref_policy = if has_ref_policy { tensors(REF_POLICY)? } else { StoredTensors::default() };
        for ((_, _, what), tensors) in GROUPS.iter().zip([&policy, &optimizer, &ref_policy]) {
            if let Some(name) = tensors.not_finite() {
                return Err(damaged(&path, format!("{what} are not finite in `{name}`")));
            }
        }
        let (counters, coefficients) = (saved.counters, saved.coefficients.clone());
        Ok((saved, TrainState { counters, policy, optimizer, ref_policy, coefficients }))
    }

    /// Returns the newest valid checkpoint other than the damaged one at `position`.
    pub fn last_good(&self, position: CheckpointId) -> Option<CheckpointId> {
        let mut others = self.list().unwrap_or_default().into_iter().rev().filter(|p| *p != position);
        others.find(|p| self.read(*p).is_ok())
    }

    /// Removes the oldest checkpoints until `limit` remain in addition to `best`; 0 keeps all.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn prune(&self, limit: usize, best: Option<CheckpointId>) -> Result<()> {
        let positions = self.list()?;
        if limit == 0 || positions.len() <= limit {
            return Ok(());
        }
        for position in positions[..positions.len() - limit].iter().filter(|position| Some(**position) != best) {
            // Renamed first, so that an interrupted removal does not look like a damaged checkpoint.
            let (path, temporary) = (self.path(*position), self.folder.join(format!("{TEMPORARY}removing")));
            remove_if_there(&temporary)?;
            std::fs::rename(&path, &temporary).map_err(|e| Error::io("remove", &path, e))?;
            remove_if_there(&temporary)?;
        }
        Ok(())
    }

    /// Renames every checkpoint after `position`, from which the run continues. Returns the new names.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn set_aside_after(&self, position: Option<CheckpointId>) -> Result<Vec<PathBuf>> {
        let later = self.list()?.into_iter().filter(|p| position.is_none_or(|position| *p > position));
        later.filter_map(|p| set_aside(&self.path(p)).transpose()).collect()
    }

    /// Removes leftovers of an interrupted write or removal.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn clean(&self) -> Result<()> {
        let names = self.names()?;
        names.iter().filter(|n| n.starts_with(TEMPORARY)).try_for_each(|n| remove_if_there(&self.folder.join(n)))
    }

    fn names(&self) -> Result<Vec<String>> {
        let io = |e| Error::io("list", &self.folder, e);
        if !self.folder.exists() {
            return Ok(Vec::new());
        }
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.folder).map_err(io)? {
            names.extend(entry.map_err(io)?.file_name().into_string());
        }
        Ok(names)
    }
}

/// Returns the layouts of all groups, by file, and checks that all values are finite.
fn layouts(optimizer_steps: u64, export: &Export<'_>) -> Result<Vec<(&'static str, Layout)>> {
    let layout = |(name, group, what)| Ok((name, Layout::new(export, group, what, optimizer_steps)?));
    GROUPS.into_iter().map(layout).collect()
}

/// Returns the lines of `SHA256SUMS` for the tensors, with the digests that `digest` returns.
fn sums_of(layouts: &[(&str, Layout)], digest: impl Fn(&str, &Layout) -> Result<[u8; 32]>) -> Result<String> {
    let mut sums = String::new();
    for (name, layout) in layouts.iter().filter(|(name, layout)| *name != REF_POLICY || !layout.is_empty()) {
        let _ = writeln!(sums, "{}  {name}", hex(&digest(name, layout)?));
    }
    Ok(sums)
}

/// Returns the lines of `SHA256SUMS` for the tensors of a checkpoint that is not written. Calls `export` as often as [`Checkpoints::write`].
///
/// # Errors
/// [`grpo_policy::Error::NotFinite`]; the errors of `export`.
pub(crate) fn digests(optimizer_steps: u64, export: &Export<'_>) -> Result<String> {
    sums_of(&layouts(optimizer_steps, export)?, |_, layout| layout.digest(export))
}

/// Returns the name of the barrier at which the processes of a run compare the weights of a checkpoint.
pub(crate) fn weights_of(checkpoint: &str) -> String {
    format!("the weights at {checkpoint}")
}

fn damaged(path: &Path, reason: impl Into<String>) -> Error {
    Error::Checkpoint { path: path.to_owned(), reason: reason.into(), advice: String::new() }
}

fn remove_if_there(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// Parses lines `<hex>  <name>`.
fn parse_sums(bytes: &[u8]) -> Result<Vec<(String, String)>, String> {
    let text = std::str::from_utf8(bytes).map_err(|e| format!("it is not text: {e}"))?;
    let mut sums = Vec::new();
    for (number, line) in text.lines().enumerate() {
        match line.split_once("  ") {
            Some((sum, name)) if sum.len() == 64 => sums.push((name.to_owned(), sum.to_owned())),
            _ => return Err(format!("line {} is not `<sha256>  <file>`", number + 1)),
        }
    }
    Ok(sums)
}

fn parse_state(bytes: &[u8]) -> Result<SavedState, String> {
    let value: serde_json::Value = serde_json::from_slice(bytes).map_err(|e| format!("it is not JSON: {e}"))?;
    match value.get("format").and_then(serde_json::Value::as_str) {
        Some(FORMAT) => {}
        Some(other) => return Err(format!("it has format `{other}`, this program reads `{FORMAT}`")),
        None => return Err(format!("it has no key `format` with `{FORMAT}`")),
    }
    serde_path_to_error::deserialize(value).map_err(|e| format!("key `{}`: {}", e.path(), e.inner()))
}

#[cfg(test)]
pub(crate) mod tests;
