//! Facts about a run before its first step.

use crate::pass_rule::PassRule;
use grpo_data::DataReport;
use grpo_models::MemoryTable;

/// Facts about a run that its configuration does not contain.
#[derive(Clone, Debug)]
pub struct Overview {
    /// The number of weights of the model.
    pub weights: u64,
    /// The number of trained weights: all weights of the model, or the adapters' weights.
    pub trained_weights: u64,
    /// The largest number of tokens of a sequence.
    pub context: usize,
    /// The number of tokens of the longest of some prompts.
    pub longest_prompt: usize,
    /// `true` if the chat template of the model renders prompts; `None` without prompts.
    pub renders_template: Option<bool>,
    /// `true` if the chat template rewrites earlier turns: conversations are rendered anew, and have several rows.
    pub rewrites_history: bool,
    /// The counts of used and dropped rows of files; `None` if tasks make the problems.
    pub rows: Option<DataReport>,
    /// The number of rows of an evaluation; 0 where evaluation is off.
    pub held_out: usize,
    /// The reward functions with their weights.
    pub rewards: Vec<(String, f32)>,
    /// The completions that count as passed in pass@1.
    pub pass_rule: PassRule,
    /// The memory that the training needs, by part.
    pub memory: MemoryTable,
    /// The available memory in bytes, if the system or the device reports it.
    pub available_memory: Option<u64>,
}
