//! Data of the optimizer step that a batch belongs to: truncated and positive sequences, counts over all processes, and coefficients that
//! change from step to step.

use crate::config::checks::positive;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ops::Range;

/// Data of the optimizer step that a batch belongs to. A batch file stores these keys next to the keys of the loss.
///
/// ```
/// use grpo_core::batch::{Rows, StepData};
/// use grpo_core::TokenBatch;
///
/// // The second sequence was truncated at the length limit; all processes together have 512 tokens.
/// let step = StepData { truncated_rows: Rows::Indices(vec![1]), num_items_in_batch: Some(512.0), ..StepData::default() };
/// let batch = TokenBatch::packed(vec![3, 7, 1], vec![0, 2, 3])?.with_step(step)?;
/// assert_eq!(batch.step().truncated_rows.indices(), [1]);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StepData {
    /// Sequences that were truncated at the length limit; `mask_truncated_completions` masks them.
    pub truncated_rows: Rows,
    /// Sequences with a reward above 0, to which `positive_example_nll_weight` applies.
    pub positive_rows: Rows,
    /// Normaliser of dapo, cispo and vespo, in tokens: the active tokens of the generation batch on all processes. `None`
    /// counts the tokens of the batch (see [`crate::aggregate`]). Set it if the batch is only a part of the step.
    pub num_items_in_batch: Option<f64>,
    /// verl: active tokens on all processes; `None` counts the tokens of the batch.
    pub batch_num_tokens: Option<f64>,
    /// verl: sequences on all processes; `None` counts the sequences of the batch.
    pub global_batch_size: Option<f64>,
    /// Coefficient of the entropy bonus in this step. It replaces the configuration's, which must not be 0.
    #[serde(skip)]
    pub entropy_coef: Option<f64>,
}

impl StepData {
    /// Keys that a batch file may contain in addition to the keys of the loss.
    pub const KEYS: [&'static str; 5] =
        ["truncated_rows", "positive_rows", "num_items_in_batch", "batch_num_tokens", "global_batch_size"];

    /// Checks the numbers, and the rows against a batch of `sequences`.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key.
    pub(super) fn check(&self, sequences: usize) -> Result<()> {
        self.truncated_rows.check("truncated_rows", sequences)?;
        self.positive_rows.check("positive_rows", sequences)?;
        positive("batch_num_tokens", self.batch_num_tokens)?;
        positive("global_batch_size", self.global_batch_size)?;
        crate::config::checks::finite("entropy_coef", self.entropy_coef)?;
        match self.num_items_in_batch.filter(|n| !(*n >= 0.0 && n.is_finite())) {
            Some(items) => Err(Error::Config(format!(
                "num_items_in_batch counts tokens: expected a finite number of at least 0, got {items}"
            ))),
            None => Ok(()),
        }
    }

    /// Returns the data that belongs to the sequences `range`.
    pub(super) fn select(&self, range: &Range<usize>) -> Self {
        Self {
            truncated_rows: self.truncated_rows.select(range),
            positive_rows: self.positive_rows.select(range),
            ..self.clone()
        }
    }
}

/// A set of sequences of a batch, as indices or as one flag per sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub enum Rows {
    /// Indices of the sequences.
    Indices(Vec<usize>),
    /// `true` for each sequence of the set.
    Flags(Vec<bool>),
}

impl Default for Rows {
    fn default() -> Self {
        Self::Indices(vec![])
    }
}

impl Rows {
    /// Returns `true` if the set is empty.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Indices(indices) => indices.is_empty(),
            Self::Flags(flags) => !flags.contains(&true),
        }
    }

    /// Returns the indices.
    pub fn indices(&self) -> Vec<usize> {
        match self {
            Self::Indices(indices) => indices.clone(),
            Self::Flags(flags) => (0..flags.len()).filter(|index| flags[*index]).collect(),
        }
    }

    /// Checks that the set fits a batch of `sequences`.
    ///
    /// # Errors
    /// [`Error::Config`] that names `key`.
    fn check(&self, key: &str, sequences: usize) -> Result<()> {
        let wrong = match self {
            Self::Indices(indices) => indices
                .iter()
                .find(|index| **index >= sequences)
                .map(|index| format!("names sequence {index}, but the batch has {sequences}")),
            Self::Flags(flags) => (flags.len() != sequences)
                .then(|| format!("has {} flags, but the batch has {sequences} sequences", flags.len())),
        };
        wrong.map_or(Ok(()), |wrong| Err(Error::Config(format!("{key} {wrong}"))))
    }

    /// Returns the part of the set within `range`, relative to its start.
    fn select(&self, range: &Range<usize>) -> Self {
        let within = self.indices().into_iter().filter(|index| range.contains(index));
        Self::Indices(within.map(|index| index - range.start).collect())
    }
}

impl TryFrom<Value> for Rows {
    type Error = String;
    fn try_from(value: Value) -> std::result::Result<Self, String> {
        let wrong = || format!("expected a list of indices, or of one true or false per sequence, got {value}");
        let list = value.as_array().ok_or_else(wrong)?;
        if !list.is_empty() && list.iter().all(Value::is_boolean) {
            return Ok(Self::Flags(list.iter().map(|flag| *flag == Value::Bool(true)).collect()));
        }
        let index = |v: &Value| v.as_u64().and_then(|i| usize::try_from(i).ok()).ok_or_else(wrong);
        let indices = list.iter().map(index).collect::<std::result::Result<Vec<_>, _>>()?;
        match indices.iter().enumerate().find(|(i, index)| indices[..*i].contains(index)) {
            Some((_, index)) => Err(format!("sequence {index} is there twice; flags are written true and false")),
            None => Ok(Self::Indices(indices)),
        }
    }
}

impl From<Rows> for Value {
    fn from(rows: Rows) -> Self {
        match rows {
            Rows::Indices(indices) => indices.into(),
            Rows::Flags(flags) => flags.into(),
        }
    }
}
