//! The index of the rows of a run's data files, `rows.json` in its folder. With it, a resumed run does not read all rows again.
//!
//! The index is valid only for the same fingerprint of tokenizer, chat template and data files, the same section `data`, and the same
//! lengths that decide which rows are dropped. If one of them has changed, or the file is damaged, the rows are read again.

use super::digest::sha256;
use super::dir::RunDir;
use super::fingerprint::Fingerprint;
use crate::error::{Error, Result};
use grpo_data::{Dataset, RowIndex};
use grpo_files::{read_regular, write_atomically};
use grpo_run_config::TrainConfig;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The maximum size of an index in bytes; a row takes about 25.
const LIMIT: u64 = 1 << 32;

#[derive(Serialize, Deserialize)]
struct Stored {
    /// The SHA-256 of everything that the index depends on.
    key: String,
    index: RowIndex,
}

/// Returns the index in a run's folder, if it is valid for this configuration and these files.
pub(super) fn read(dir: &RunDir, config: &TrainConfig, fingerprint: &Fingerprint) -> Option<RowIndex> {
    let bytes = read_regular(&dir.rows_path(), LIMIT).ok()?;
    let stored: Stored = serde_json::from_slice(&bytes).ok()?;
    (stored.key == key(config, fingerprint).ok()?).then_some(stored.index)
}

/// Writes the index of a data set that was read from files.
///
/// # Errors
/// [`Error::File`].
pub(super) fn write(
    dir: &RunDir,
    config: &TrainConfig,
    fingerprint: &Fingerprint,
    dataset: &dyn Dataset,
) -> Result<()> {
    let Some(index) = dataset.index() else { return Ok(()) };
    let stored = Stored { key: key(config, fingerprint)?, index };
    let json = serde_json::to_vec(&stored).map_err(|e| Error::Text(format!("rows.json: {e}")))?;
    Ok(write_atomically(&dir.rows_path(), &json)?)
}

fn key(config: &TrainConfig, fingerprint: &Fingerprint) -> Result<String> {
    let parts = json!([
        "grpo-rows/2",
        env!("CARGO_PKG_VERSION"),
        config.data,
        config.model,
        config.rollout.max_completion_length(),
        fingerprint.of_prompts(),
    ]);
    Ok(sha256(parts.to_string().as_bytes()))
}
