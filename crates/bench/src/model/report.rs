//! The results of a model's benchmark.

use crate::measure::Spread;
use crate::report::Outcome;
use grpo_core::Dtype;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// One problem with the results of all systems.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelCase {
    /// The name, composed of the names of configuration, dtype and sizes.
    pub name: String,
    /// The dtype of the products.
    pub dtype: Dtype,
    /// The measured work and its sizes.
    #[serde(flatten)]
    pub work: Work,
    /// Times and rates of a program that reads every weight once in the dtype and multiplies at the peak, under the names of
    /// [`ModelMeasured::numbers`], and the measured rates behind them: `bytes_per_s` of memory and `flops_per_s` of multiply-adds.
    pub floor: BTreeMap<&'static str, Spread>,
    /// The systems by name: `grpo`, `transformers`, `vllm`.
    pub variants: BTreeMap<String, Outcome<ModelMeasured>>,
}

/// Work on a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "work", rename_all = "snake_case")]
pub enum Work {
    /// Sampling at temperature 1 from the whole vocabulary, without stop ids.
    Generation {
        /// Sequences that decode together.
        rows: usize,
        /// Tokens of a prompt.
        prompt: usize,
        /// Tokens of a completion.
        tokens: usize,
    },
    /// An optimizer step on all weights: forward and backward pass, clipping, AdamW.
    Update {
        /// The number of sequences.
        rows: usize,
        /// Tokens of a prompt.
        prompt: usize,
        /// Tokens of a completion.
        completion: usize,
        /// The number of micro-batches of the step.
        micro_batches: usize,
    },
}

/// The measurements of a system, one per round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelMeasured {
    /// Versions, if reported.
    pub version: Option<String>,
    /// Digests of the samples; one if all rounds sampled the same tokens, none for systems that report none.
    pub digests: BTreeSet<String>,
    /// 2-norm of the gradient of an update from the weights of the folder; equal for all systems up to rounding.
    pub grad_norm: Option<f64>,
    /// Seconds, rates and bytes.
    ///
    /// * Generation: `first_token_s` and `first_token_processor_s` until all rows have their first token; `all_tokens_s` of all tokens;
    ///   `tokens_per_s` and `tokens_per_processor_s` of the tokens after that, while no row is complete.
    /// * Update: `step_s` and `processor_s` of a step; `tokens_per_s` of prompts and completions; `mfu`, the useful flops over the peak of
    ///   multiply-adds in that time, as in the metric of runs.
    /// * Both: `peak_bytes`, the peak of resident memory after loading, without file-backed pages.
    ///
    /// Processor seconds are user and system time of all threads.
    #[serde(flatten)]
    pub numbers: BTreeMap<&'static str, Spread>,
}
