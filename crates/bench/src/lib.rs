#![doc = include_str!("../README.md")]
//! A [`BenchConfig`] lists the variants. Each variant has its own process, so that its memory is measured separately and a crash affects no
//! other variant. Devices that one process has exclusively (TPUs, GPUs) have all of their variants in one process. [`run`] writes [`inputs`]
//! once to files that every process reads, starts a process per variant, and requests one step after another while the other processes sleep.
//! A [`model::ModelBenchConfig`] measures generation and optimizer steps of a model folder instead ([`model::run`]).
//! [`protocol`] defines requests and replies, [`worker`] answers them in a variant's process, [`floor`] computes lower
//! bounds, [`report`] defines the results, and [`log`] writes them to metrics sinks.
//!
//! ```
//! use grpo_bench::config::BenchConfig;
//! use grpo_files::Layers;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let text = "{shape: {batch: 2, tokens: 8, hidden: 4, vocab: 32}, variants: {plain: {implementation: logits}, fused: {}}}";
//! let config: BenchConfig = Layers::new().text("here", text)?.resolve()?;
//! config.validate()?;
//! assert_eq!(config.names(), ["fused", "plain"]);
//! # Ok(())
//! # }
//! ```
//!
//! To add a backend, implement `runner::Runner`, as `cpu` and `pjrt` do; to add a program in another language, implement the protocol,
//! as [`peers`] do.

#![forbid(unsafe_code)]

pub mod assertion;
mod case;
pub mod comparison;
pub mod config;
pub mod cpu;
mod error;
pub mod floor;
pub mod inputs;
pub mod log;
pub mod measure;
mod memory;
pub mod model;
mod options;
mod outcome;
pub mod peers;
pub mod pjrt;
pub mod plot;
mod probe;
mod process;
pub mod protocol;
pub mod report;
mod runner;
mod tensor_file;
pub mod worker;

pub use error::{Error, Result};
pub use options::Options;
pub use tensor_file::TensorFile;

use assertion::Assertion;
use config::BenchConfig;
use report::{Claim, Document, Machine, Outcome, utc};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Measures every problem of `configs`. `progress` is called with a line before each stage and may stop the benchmark with
/// an error; no files remain then.
///
/// # Errors
/// [`Error::Config`] for an illegal configuration; [`Error::Argument`] for a variant or assertion that fits no problem;
/// the errors of the backend if it cannot score the inputs. A variant that fails is an [`report::Outcome::Failed`].
pub fn run(
    configs: &[BenchConfig],
    options: &Options,
    mut progress: impl FnMut(&str) -> Result<()>,
) -> Result<Document> {
    let date = utc(jiff::Timestamp::now());
    let mut cases = vec![];
    for config in configs {
        config.validate()?;
        cases.extend(config.cases());
    }
    let peers: Vec<&str> = peers::names().filter(|_| options.peers_venv.is_some()).collect();
    let names = cases.iter().map(|(name, config)| (name.as_str(), [config.names(), peers.clone()].concat()));
    check_names(&names.collect::<Vec<_>>(), options)?;
    let cases = cases.iter().map(|(name, config)| case::measure(name, config, options, &mut progress));
    let cases = cases.collect::<Result<Vec<_>>>()?;
    let assertions = claims(cases.iter().map(|case| (case.name.as_str(), &case.variants)), &options.assertions)?;
    Ok(Document { version: env!("CARGO_PKG_VERSION").into(), date, machine: Machine::here(), cases, assertions })
}

/// Checks the names of the command line before the first measurement: `cases` are problems with the names of their variants.
fn check_names(cases: &[(&str, Vec<&str>)], options: &Options) -> Result<()> {
    let mut names: Vec<&str> = cases.iter().flat_map(|(_, variants)| variants.iter().copied()).collect();
    names.sort_unstable();
    names.dedup();
    let known = |name: &str| names.contains(&name);
    if let Some(unknown) = options.variants.iter().find(|name| !known(name)) {
        let expected = format!("one of {}", names.join(", "));
        return Err(Error::argument("variants", expected, format!("`{unknown}`")));
    }
    for name in options.assertions.iter().flat_map(Assertion::variants) {
        let variant = name.rsplit_once('/').map_or(name, |(_, variant)| variant);
        let case = name.rsplit_once('/').map(|(case, _)| case);
        let is_measured = options.variants.is_empty() || options.variants.iter().any(|chosen| chosen == variant);
        if !known(variant) || !is_measured || case.is_some_and(|case| cases.iter().all(|(name, _)| *name != case)) {
            let expected = format!("a variant that is measured ({}), or PROBLEM/VARIANT", names.join(", "));
            return Err(Error::argument("assert", expected, format!("`{name}`")));
        }
    }
    for (i, (name, _)) in cases.iter().enumerate() {
        if cases[..i].iter().any(|(other, _)| other == name) {
            return Err(Error::argument("bench", "problems with different names", format!("`{name}` twice")));
        }
    }
    Ok(())
}

/// Evaluates the assertions on problems with their variants: once if an assertion names a problem, else in every problem that has its
/// variants.
fn claims<'a, M: Serialize + 'a>(
    cases: impl Iterator<Item = (&'a str, &'a BTreeMap<String, Outcome<M>>)>,
    assertions: &[Assertion],
) -> Result<Vec<Claim>> {
    let variants = |variants| match serde_json::to_value(variants) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    };
    let cases: Vec<(&str, Map<String, Value>)> = cases.map(|(name, of)| (name, variants(of))).collect();
    let everywhere = cases
        .iter()
        .flat_map(|(case, variants)| variants.iter().map(move |(name, of)| (format!("{case}/{name}"), of.clone())));
    let everywhere = Value::Object(everywhere.collect());
    let mut claims = vec![];
    for assertion in assertions {
        if assertion.variants().any(|name| name.contains('/')) {
            claims.push(Claim { case: None, checked: assertion.check(&everywhere)? });
            continue;
        }
        let before = claims.len();
        for (case, variants) in &cases {
            if assertion.variants().all(|name| variants.contains_key(name)) {
                let checked = assertion.check(&Value::Object(variants.clone()))?;
                claims.push(Claim { case: Some((*case).to_owned()), checked });
            }
        }
        if claims.len() == before {
            let names = assertion.variants().collect::<Vec<_>>().join(" and ");
            return Err(Error::argument("assert", "variants of one problem", names));
        }
    }
    Ok(claims)
}
