//! What is known of the optimizer step that a batch belongs to, beside its tokens: which of its sequences were cut off or
//! right, what all processes count, and the coefficients that move from step to step.

use crate::config::checks::positive;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ops::Range;

/// What is known of the optimizer step that a batch belongs to. A batch file has these keys beside those of the loss.
///
/// ```
/// use grpo_core::batch::{Rows, StepData};
/// use grpo_core::TokenBatch;
///
/// // The second sequence ended at the length limit; all processes together have 512 tokens.
/// let step = StepData { truncated_rows: Rows::Indices(vec![1]), num_items_in_batch: Some(512.0), ..StepData::default() };
/// let batch = TokenBatch::packed(vec![3, 7, 1], vec![0, 2, 3])?.with_step(step)?;
/// assert_eq!(batch.step().truncated_rows.indices(), [1]);
/// # Ok::<(), grpo_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StepData {
    /// Sequences of the batch that ended at the length limit: `mask_truncated_completions` leaves them out.
    pub truncated_rows: Rows,
    /// Sequences of the batch to imitate, those with a reward above 0: `positive_example_nll_weight` acts on them.
    pub positive_rows: Rows,
    /// Normaliser of dapo, cispo and vespo, in tokens: the active ones of the generation batch on all processes. `None`
    /// counts those of the batch (see [`crate::aggregate`]). Give it when one step's batch is only a part.
    pub num_items_in_batch: Option<f64>,
    /// verl: active tokens on all processes; `None` counts.
    pub batch_num_tokens: Option<f64>,
    /// verl: sequences on all processes; `None` counts.
    pub global_batch_size: Option<f64>,
    /// Coefficient of the entropy bonus in this step, in place of the configuration's, which must not be 0.
    #[serde(skip)]
    pub entropy_coef: Option<f64>,
}

impl StepData {
    /// Names of the keys that a batch file may have beside those of the loss.
    pub const KEYS: [&'static str; 5] =
        ["truncated_rows", "positive_rows", "num_items_in_batch", "batch_num_tokens", "global_batch_size"];

    /// Checks numbers, and rows against a batch of `sequences`.
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

    /// What of it belongs to the sequences `range`.
    pub(super) fn select(&self, range: &Range<usize>) -> Self {
        Self {
            truncated_rows: self.truncated_rows.select(range),
            positive_rows: self.positive_rows.select(range),
            ..self.clone()
        }
    }
}

/// Sequences of a batch: their indices, or one flag for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub enum Rows {
    /// Their indices.
    Indices(Vec<usize>),
    /// Whether each is one of them.
    Flags(Vec<bool>),
}

impl Default for Rows {
    fn default() -> Self {
        Self::Indices(vec![])
    }
}

impl Rows {
    /// Whether none is named.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Indices(indices) => indices.is_empty(),
            Self::Flags(flags) => !flags.contains(&true),
        }
    }

    /// Their indices.
    pub fn indices(&self) -> Vec<usize> {
        match self {
            Self::Indices(indices) => indices.clone(),
            Self::Flags(flags) => (0..flags.len()).filter(|index| flags[*index]).collect(),
        }
    }

    /// Checks that they are sequences of a batch of `sequences`.
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

    /// Those of the sequences `range`, counted from its start.
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
