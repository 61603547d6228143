//! What a run is about to do, known before its weights are read.

use crate::eval::PassRule;
use data::DataReport;
use models::MemoryTable;

/// The facts of a run that its configuration alone does not tell.
#[derive(Clone, Debug)]
pub struct Overview {
    /// The number of weights of the model.
    pub weights: u64,
    /// The number of weights that are trained: those of the model, or those of its adapters.
    pub trained_weights: u64,
    /// The largest number of tokens of a sequence.
    pub context: usize,
    /// The number of tokens of the longest of some prompts.
    pub longest_prompt: usize,
    /// Whether the chat template of the model renders prompts; `None` without prompts.
    pub renders_template: Option<bool>,
    /// What became of the rows of files; `None` where problems are made by tasks.
    pub rows: Option<DataReport>,
    /// The number of rows of an evaluation; 0 where evaluation is off.
    pub held_out: usize,
    /// The reward functions with their weights.
    pub rewards: Vec<(String, f32)>,
    /// What pass@1 counts.
    pub pass_rule: PassRule,
    /// The memory that the training takes, part by part.
    pub memory: MemoryTable,
    /// The bytes of memory that there are, where the system or the device tells.
    pub available_memory: Option<u64>,
}
