//! The request about a model, and its reply. [`crate::protocol`] describes their transport.

use grpo_core::Dtype;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// One measurement of a model. A process may keep the loaded model for later jobs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelJob {
    /// The Hugging Face model folder.
    pub model: PathBuf,
    /// The dtype of the products.
    pub dtype: Dtype,
    /// The number of threads; 0 is one per core.
    pub threads: usize,
    /// The work to measure.
    pub task: Task,
    /// The number of sequences of the largest job that this process gets.
    pub most_rows: usize,
    /// The number of tokens of the longest sequence of all jobs that this process gets.
    pub longest: usize,
}

/// Work with its token ids.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Continue every prompt by 2 tokens, which is not measured, then by all tokens, from the prompts each time.
    Generate {
        /// Prompts `[B]`, of equal length.
        prompts: Vec<Vec<u32>>,
        /// Tokens of each completion.
        tokens: usize,
    },
    /// Take two optimizer steps, which are not measured, and another one.
    Update {
        /// Prompts `[B]`, of equal length.
        prompts: Vec<Vec<u32>>,
        /// Completions `[B]`, of equal length.
        completions: Vec<Vec<u32>>,
        /// Advantages `[B]`.
        advantages: Vec<f32>,
        /// The number of micro-batches.
        micro_batches: usize,
        /// The learning rate of the steps.
        learning_rate: f64,
    },
}

/// The measurement of a [`ModelJob`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelTimes {
    /// The time until every sequence has its first token; none for an update.
    pub first_token: Option<Time>,
    /// The time after that until the first sequence is complete.
    pub decode: Time,
    /// The number of tokens in that time.
    pub decoded: usize,
    /// The time of all tokens, or of the step.
    pub whole: Time,
    /// Digest of the sampled tokens, if they depend on the seed alone.
    pub digest: Option<String>,
    /// 2-norm of the gradient of the first step.
    pub grad_norm: Option<f64>,
    /// Peak of resident bytes after loading, without file-backed pages.
    pub peak_bytes: Option<u64>,
    /// Versions of the measured software.
    pub version: Option<String>,
}

/// A duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Time {
    /// Wall time in seconds.
    pub seconds: f64,
    /// User and system time of all threads in seconds.
    pub processor: f64,
}
