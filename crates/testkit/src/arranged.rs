//! Other arrangements of the same sequences.

use crate::{Case, Tensor};
use grpo_core::batch::{SamplingMask, TokenFactors, TokenWeights};
use grpo_core::{Advantages, Result, TokenBatch};

/// Returns the entries of `rows`, and `padding` for `None`.
fn taken<T: Copy>(list: &[T], rows: &[Option<usize>], padding: T) -> Vec<T> {
    rows.iter().map(|row| row.map_or(padding, |row| list[row])).collect()
}

impl Case {
    /// Returns the sequences `order`, in this order and with repetitions, with all their data. With `width`, sequences are padded to that
    /// many tokens with values that must not be read; else they are packed.
    pub fn arranged(&self, order: &[usize], width: Option<usize>) -> Self {
        let (batch, h) = (&self.batch, self.h);
        let (mut rows, mut offsets) = (Vec::new(), vec![0]);
        for sequence in order {
            let start = rows.len();
            rows.extend(batch.range(*sequence).map(Some));
            rows.resize(width.map_or(rows.len(), |width| start + width), None);
            offsets.push(rows.len());
        }
        let hidden = rows.iter().flat_map(|row| match row {
            Some(i) => self.hidden[i * h..(i + 1) * h].to_vec(),
            None => vec![f32::NAN; h],
        });
        let advantages = match batch.advantages() {
            Advantages::PerSequence(list) => Advantages::PerSequence(order.iter().map(|b| list[*b]).collect()),
            Advantages::PerToken(list) => Advantages::PerToken(taken(list, &rows, f32::NAN)),
        };
        let mut arranged = TokenBatch::packed(taken(batch.targets(), &rows, -7), offsets)
            .and_then(|arranged| arranged.with_mask(&taken(&batch.mask(), &rows, 0.0)))
            .and_then(|arranged| arranged.with_advantages(advantages))
            .unwrap();
        type Set = fn(TokenBatch, Vec<f32>) -> Result<TokenBatch>;
        let lists: [(_, Set); 4] = [
            (batch.old_logp(), TokenBatch::with_old_logp),
            (batch.ref_logp(), TokenBatch::with_ref_logp),
            (batch.sampler_logp(), TokenBatch::with_sampler_logp),
            (batch.temperatures(), TokenBatch::with_temperatures),
        ];
        for (list, set) in lists {
            if let Some(list) = list {
                arranged = set(arranged, taken(list, &rows, f32::NAN)).unwrap();
            }
        }
        if batch.sampling_mask().is_some() {
            let mut mask = SamplingMask::default();
            rows.iter()
                .for_each(|row| mask.push(row.map_or(&[5, u32::MAX], |row| batch.kept(row).unwrap_or_default())));
            arranged = arranged.with_sampling_mask(mask).unwrap();
        }
        let of = |list: &[f64]| taken(list, &rows, f64::NAN);
        if let Some(weights) = batch.weights() {
            let weights = TokenWeights {
                policy: of(&weights.policy),
                kl: of(&weights.kl),
                entropy: of(&weights.entropy),
                nll: of(&weights.nll),
            };
            arranged = arranged.with_weights(weights).unwrap();
        }
        if let Some(factors) = batch.factors() {
            let factors = TokenFactors {
                policy: of(&factors.policy),
                entropy: of(&factors.entropy),
                log_ratio_scale: of(&factors.log_ratio_scale),
                kl_cov_mask: of(&factors.kl_cov_mask),
                log_ratio_bias: of(&factors.log_ratio_bias),
                metrics: factors.metrics.clone(),
            };
            arranged = arranged.with_factors(factors).unwrap();
        }
        Self { hidden: Tensor::new(hidden.collect(), self.dtype()), batch: arranged, ..self.clone() }
    }
}
