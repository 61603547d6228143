//! Estimates the memory of a training before anything is loaded.

use crate::config::ModelConfig;
use crate::optimizer::OptimizerName;
use crate::quantization::QuantizedMemory;
use crate::weights::Dtype;
use grpo_core::readable_bytes;
use std::fmt;

/// Memory by part in bytes: permanent parts, and parts of consecutive phases.
///
/// ```
/// use grpo_models::{Dtype, MemoryTable, ModelConfig, TrainingMemory};
///
/// let config = ModelConfig::default();
/// let mut table = TrainingMemory::full(&config, Dtype::F32).table();
/// table.push_in("updates", "activations", 1 << 20);
/// table.push_in("sampling", "keys and values", 1 << 10); // when the activations and gradients are not there
/// assert_eq!(table.total(), config.parameter_count() * 4 * 4 + (1 << 20));
/// assert!(table.to_string().contains("during updates: activations"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryTable {
    rows: Vec<(String, u64)>,
    phases: Vec<(String, Vec<(String, u64)>)>,
}

impl MemoryTable {
    /// Returns an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a permanent part, unless it has 0 bytes.
    pub fn push(&mut self, label: impl Into<String>, bytes: u64) {
        if bytes > 0 {
            self.rows.push((label.into(), bytes));
        }
    }

    /// Adds a part of one phase, unless it has 0 bytes.
    pub fn push_in(&mut self, phase: &str, label: impl Into<String>, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let row = (label.into(), bytes);
        match self.phases.iter_mut().find(|(name, _)| name == phase) {
            Some((_, rows)) => rows.push(row),
            None => self.phases.push((phase.to_owned(), vec![row])),
        }
    }

    /// Returns the permanent parts with their bytes, in the order of addition.
    pub fn rows(&self) -> &[(String, u64)] {
        &self.rows
    }

    /// Returns the phases with their own parts.
    pub fn phases(&self) -> &[(String, Vec<(String, u64)>)] {
        &self.phases
    }

    /// Returns the bytes of the permanent parts and of the largest phase.
    pub fn total(&self) -> u64 {
        sum(&self.rows).saturating_add(self.largest().map_or(0, |(_, rows)| sum(rows)))
    }

    fn largest(&self) -> Option<&(String, Vec<(String, u64)>)> {
        self.phases.iter().max_by_key(|(_, rows)| sum(rows))
    }
}

fn sum(rows: &[(String, u64)]) -> u64 {
    rows.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
}

/// Writes a line per part and one for the total, with sizes in MB or GB.
impl fmt::Display for MemoryTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_phases = self.phases.iter().flat_map(|(phase, rows)| {
            rows.iter().map(move |(label, bytes)| (format!("during {phase}: {label}"), *bytes))
        });
        let largest = self.largest().map_or_else(String::new, |(phase, _)| format!(" (during {phase})"));
        let rows: Vec<_> =
            self.rows.iter().cloned().chain(of_phases).chain([(format!("total{largest}"), self.total())]).collect();
        let width = rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
        for (place, (label, bytes)) in rows.iter().enumerate() {
            let line = if place == 0 { "" } else { "\n" };
            write!(f, "{line}  {label:width$}  {:>10}", readable_bytes(*bytes))?;
        }
        Ok(())
    }
}

/// The phase in which gradients exist.
pub const UPDATES: &str = "updates";

/// The state of a training. Policies add activations, caches and workspaces to its table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingMemory {
    /// The number of weights of the model.
    pub weights: u64,
    /// The dtype of the weights in computations.
    pub dtype: Dtype,
    /// The number and the bytes of the quantised weights; `None` without quantisation.
    pub quantized: Option<QuantizedMemory>,
    /// The trained weights: all of them, or the adapters'.
    pub trained: Trained,
    /// The optimizer.
    pub optimizer: OptimizerName,
    /// The dtype of a separate copy of the weights for the reference policy, if there is one.
    pub reference: Option<Dtype>,
}

/// The trained weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trained {
    /// All weights of the model.
    All,
    /// Adapters, f32.
    Adapters {
        /// The number of weights of all adapters, including adapters of experts.
        weights: u64,
        /// The number of weights of adapters of experts, which devices of a mesh share like the experts.
        of_experts: u64,
    },
}

impl TrainingMemory {
    /// Returns the memory of training all weights with `adamw`, without a reference policy.
    pub fn full(config: &ModelConfig, dtype: Dtype) -> Self {
        let (trained, optimizer) = (Trained::All, OptimizerName::AdamW);
        Self { weights: config.parameter_count(), dtype, quantized: None, trained, optimizer, reference: None }
    }

    /// Returns the number of trained weights.
    pub fn trained_weights(&self) -> u64 {
        match self.trained {
            Trained::All => self.weights,
            Trained::Adapters { weights, .. } => weights,
        }
    }

    /// Returns the bytes of weights, gradients, the optimizer's moments, and of the reference policy. Trained weights have moments, gradients
    /// during updates and, if they are stored in 16 bits, the remaining bits of their f32 values.
    pub fn table(&self) -> MemoryTable {
        let of_weights = |dtype: Dtype| self.weights.saturating_mul(dtype.size() as u64);
        let TrainedMemory { weights, moments, gradients, .. } =
            TrainedMemory::of(self.trained_weights(), self.optimizer);
        let plain = self.weights.saturating_sub(self.quantized.map_or(0, |quantized| quantized.values));
        let stored = plain.saturating_mul(self.dtype.size() as u64);
        let mut table = MemoryTable::new();
        table.push(format!("weights ({})", self.dtype), stored);
        if let Some(QuantizedMemory { quantization, bytes, .. }) = self.quantized {
            table.push(format!("quantised weights ({})", quantization.name()), bytes);
        }
        match self.trained {
            Trained::Adapters { .. } => table.push("adapters (float32)", weights),
            Trained::All => table.push("remainders of weights (16 bits)", weights.saturating_sub(stored)),
        }
        let parts = self.optimizer.moments();
        for part in parts {
            table.push(format!("{part} ({})", self.optimizer.moment_label()), moments / parts.len() as u64);
        }
        if let Some(dtype) = self.reference {
            table.push(format!("reference policy ({dtype})"), of_weights(dtype));
        }
        table.push_in(UPDATES, "gradients (float32)", gradients);
        table
    }
}

/// The memory of trained weights in bytes. Weights and gradients are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainedMemory {
    /// The weights.
    pub weights: u64,
    /// The optimizer's moments.
    pub moments: u64,
    /// The gradient accumulators.
    pub gradients: u64,
    /// The weights and moments from before a step, which a failed step restores.
    pub roll_back: u64,
}

impl TrainedMemory {
    /// Returns the memory of this number of weights.
    pub fn of(count: u64, optimizer: OptimizerName) -> Self {
        let weights = count.saturating_mul(Dtype::F32.size() as u64);
        let moments = optimizer.moment_bytes(count).saturating_mul(optimizer.moments().len() as u64);
        Self { weights, moments, gradients: weights, roll_back: weights.saturating_add(moments) }
    }
}
