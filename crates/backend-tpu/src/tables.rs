//! The tokens of a batch as the small tables that programs read.

use crate::plan::Devices;
use crate::program::{IDS, NUMBERS, Role, Spec};
use crate::shard::Layout;
use crate::tensor::send;
use grpo_core::batch::TokenBatch;
use grpo_core::error::Result;
use grpo_core::evaluate::Evaluator;
use grpo_core::{LossConfig, TemperatureFactors};
use pjrt::Buffer;
use std::collections::HashMap;

/// Host side of [`Role::TokenIds`], [`Role::TokenNumbers`] and [`Role::OnPolicy`]. Masked tokens and padding have target -1
/// and zeros, whatever the batch holds there.
pub(crate) struct Tables {
    ids: Vec<i32>,
    numbers: Vec<f32>,
    on_policy: bool,
}

impl Tables {
    /// `evaluator`: of the loss of `batch`; `None` when scoring.
    pub(crate) fn new(spec: &Spec, batch: &TokenBatch, evaluator: Option<&Evaluator>) -> Self {
        let g = spec.padded_tokens();
        let weights = evaluator.map(Evaluator::weights);
        let shares_clip = evaluator.is_some_and(Evaluator::shares_clip);
        let (beta, nll, factors) = (spec.loss.beta, spec.loss.positive_example_nll_weight, batch.factors());
        let (mut ids, mut numbers) = (vec![-1; IDS * g], vec![0.0; NUMBERS * g]);
        for sequence in 0..batch.sequences() {
            let share = 1.0 / batch.active_in(sequence).max(1) as f32;
            for row in batch.range(sequence).filter(|row| batch.is_active(*row)) {
                // Checked to be an index of the vocabulary; a program counts in i32.
                ids[row] = batch.targets()[row] as i32;
                ids[g + row] = sequence as i32;
                let of = |list: Option<&[f32]>| list.map_or(0.0, |list| list[row]);
                let entries: [f32; NUMBERS] = [
                    evaluator.map_or(0.0, |e| e.advantage(sequence, row) as f32),
                    weights.map_or(0.0, |w| w.policy[row] as f32),
                    weights.map_or(0.0, |w| (beta * w.kl[row]) as f32),
                    evaluator.map_or(0.0, |e| e.entropy_weight(row) as f32),
                    weights.map_or(0.0, |w| (nll * w.nll[row]) as f32),
                    share,
                    of(batch.old_logp()),
                    of(batch.ref_logp()),
                    if shares_clip { share } else { 1.0 },
                    batch.advantage(sequence, row),
                    factors.map_or(1.0, |f| f.policy[row] as f32),
                    factors.map_or(1.0, |f| f.part[row] as f32),
                    factors.map_or(0.0, |f| f.penalised[row] as f32),
                    factors.map_or(0.0, |f| f.shift[row] as f32),
                    of(batch.sampler_logp()),
                    reciprocal_temperature(&spec.loss, batch, row),
                ];
                for (i, entry) in entries.into_iter().enumerate() {
                    numbers[i * g + row] = entry;
                }
            }
        }
        Self { ids, numbers, on_policy: batch.old_logp().is_none() }
    }

    /// The tables on every device.
    pub(crate) fn upload(&self, spec: &Spec, devices: &Devices) -> Result<HashMap<Role, Vec<Buffer>>> {
        let place = |role| (Layout::new(spec, role, 0), spec.type_of(role).shape);
        let (ids, numbers, flag) = (place(Role::TokenIds), place(Role::TokenNumbers), place(Role::OnPolicy));
        Ok(HashMap::from([
            (Role::TokenIds, send(devices, &ids.0, &ids.1, &self.ids)?),
            (Role::TokenNumbers, send(devices, &numbers.0, &numbers.1, &self.numbers)?),
            (Role::OnPolicy, send(devices, &flag.0, &flag.1, &[self.on_policy])?),
        ]))
    }
}

/// 1/T of a token, rounded the same for scores and losses.
fn reciprocal_temperature(loss: &LossConfig, batch: &TokenBatch, row: usize) -> f32 {
    let TemperatureFactors { logits, logp } = loss.temperature_factors(batch.temperature(row));
    // One of them is 1.
    (logits * logp) as f32
}
