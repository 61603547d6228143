//! Writes a benchmark's numbers to the metrics sinks of runs: metrics.jsonl, TensorBoard and Weights & Biases, one run per variant.
//!
//! `FOLDER/PROBLEM/VARIANT/` has the layout of a run's folder. Each timed step has `bench/step_s`, and the last step has all other
//! numbers, under the names of MLLM-JAX's benchmark (`bench/...`, `mem/...`) if it has one.

use super::report::{Document, Measured, Outcome};
use crate::error::{Error, Result};
use crate::model::{ModelBenchConfig, ModelCase, ModelMeasured};
use grpo_files::JsonLines;
use grpo_sinks::{About, LoggingConfig, Sinks, WandbConfig};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Creates the folder, which must be new or empty. Called before the first measurement.
///
/// # Errors
/// [`Error::File`]; [`Error::LogFolder`] for a folder that is not empty.
pub fn make_folder(folder: &Path) -> Result<()> {
    grpo_files::make_folder(folder)?;
    let mut entries = std::fs::read_dir(folder).map_err(|e| Error::io("read", folder, e))?;
    match entries.next() {
        None => Ok(()),
        Some(_) => Err(Error::LogFolder { path: folder.to_owned() }),
    }
}

/// Writes the results to `folder`. `note` is called with lines about the location and the uploads.
///
/// # Errors
/// [`Error::File`]; [`Error::Sink`] if a sink cannot be opened.
pub fn write(document: &Document, folder: &Path, mut note: impl FnMut(&str)) -> Result<()> {
    for case in &document.cases {
        for (name, outcome) in &case.variants {
            let Outcome::Measured(measured) = outcome else { continue };
            let config = json!({
                "problem": case.name, "variant": name, "bench": case.config, "machine": document.machine,
                "date": document.date, "version": document.version,
            });
            let log = Log { case: &case.name, name, config, logging: &case.config.logging, wandb: &case.config.wandb };
            log.write(folder, rows(measured), &mut note)?;
        }
    }
    Ok(())
}

/// Writes the results of a model's benchmark to `folder`, a row per round.
///
/// # Errors
/// See [`write()`].
pub fn write_model(
    document: &Document<ModelCase>,
    config: &ModelBenchConfig,
    folder: &Path,
    mut note: impl FnMut(&str),
) -> Result<()> {
    for case in &document.cases {
        for (name, outcome) in &case.variants {
            let Outcome::Measured(measured) = outcome else { continue };
            let described = json!({
                "problem": case.name, "variant": name, "bench": config, "machine": document.machine,
                "date": document.date, "version": document.version,
            });
            let log = Log { case: &case.name, name, config: described, logging: &config.logging, wandb: &config.wandb };
            log.write(folder, rounds(measured), &mut note)?;
        }
    }
    Ok(())
}

/// A variant of a problem, which is logged as a run.
struct Log<'a> {
    case: &'a str,
    name: &'a str,
    config: Value,
    logging: &'a LoggingConfig,
    wandb: &'a WandbConfig,
}

impl Log<'_> {
    fn write(&self, folder: &Path, rows: Vec<Row>, note: &mut dyn FnMut(&str)) -> Result<()> {
        let root = folder.join(file_name(self.case)).join(self.name);
        std::fs::create_dir_all(&root).map_err(|e| Error::io("create", &root, e))?;
        let about = About { root: &root, name: &format!("{}/{}", self.case, self.name), config: &self.config };
        let mut sinks = Sinks::open(&about, self.logging, self.wandb)?;
        sinks.notes().for_each(&mut *note);
        let mut file = JsonLines::create(&root.join("metrics.jsonl"))?;
        for (step, row) in (1..).zip(rows) {
            let mut line = Map::from_iter([("step".to_owned(), json!(step))]);
            for (series, values) in &row {
                line.extend(values.iter().map(|(name, value)| (format!("{series}/{name}"), json!(value))));
                let values: Vec<_> = values.iter().map(|(name, value)| (name.as_str(), *value)).collect();
                sinks.log(series, step, &values);
            }
            file.append(&Value::Object(line))?;
        }
        file.sync()?;
        sinks.finish(true, note);
        Ok(())
    }
}

/// A row: names and numbers by series.
type Row = BTreeMap<String, Vec<(String, f64)>>;

/// Returns one row per timed step, of which the last has all numbers; one row if no step was timed.
fn rows(measured: &Measured) -> Vec<Row> {
    let bench = |values: Vec<(String, f64)>| Row::from([("bench".to_owned(), values)]);
    let steps = measured.step_ms.as_ref().map_or(&[][..], |timing| &timing.all);
    let mut rows: Vec<Row> = steps.iter().map(|ms| bench(vec![("step_s".to_owned(), ms / 1e3)])).collect();
    let mut last = rows.pop().unwrap_or_default();
    let values = [
        ("tokens_per_second", measured.tokens_per_second),
        ("useful_flops_per_second", measured.useful_flops_per_second),
        ("share_of_floor", measured.share_of_floor),
        ("times_floor", measured.times_floor),
    ];
    let values = values.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    let seed = measured.seed.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?)));
    for (name, value) in values.chain(seed) {
        let (series, name) = name.split_once('/').unwrap_or(("bench", &name));
        last.entry(series.to_owned()).or_default().push((name.to_owned(), value));
    }
    rows.push(last);
    rows
}

/// Returns one row per round of a model's benchmark.
fn rounds(measured: &ModelMeasured) -> Vec<Row> {
    let count = measured.numbers.values().map(|spread| spread.all.len()).max().unwrap_or(0);
    let row = |round: usize| {
        // The rounds of a number that some of them lack are not known.
        let numbers = measured.numbers.iter().filter(|(_, spread)| spread.all.len() == count);
        let numbers = numbers.map(|(name, spread)| ((*name).to_owned(), spread.all[round]));
        Row::from([("bench".to_owned(), numbers.collect())])
    };
    (0..count).map(row).collect()
}

/// Replaces the characters of `name` that do not belong in a file name.
fn file_name(name: &str) -> String {
    name.chars().map(|c| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect()
}
