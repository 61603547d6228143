//! Realistic inputs, made from a seed, the same for everything that is compared.
//!
//! Logits have a standard deviation of about 2 and targets are drawn evenly. The old policy's log-probabilities are the
//! true ones with noise, so that ratios lie on both sides of either clip, and advantages have both signs: no gradient is
//! zero, no branch is idle.
//!
//! Legend: N tokens, V vocabulary, H hidden size.

use crate::bench_config::{BenchConfig, ShapeConfig};
use crate::error::Result;
use grpo_core::batch::{Advantages, TokenBatch};
use grpo_core::{Dtype, TensorRef};
use half::bf16;

/// Standard deviation of logits, in nats.
pub const LOGIT_STD: f64 = 2.0;
/// Standard deviation of the noise on old log-probabilities: about every fifth ratio is outside of 1 +- 0.2.
pub const RATIO_STD: f64 = 0.15;
/// That on reference log-probabilities, where the loss has a KL.
const REFERENCE_STD: f64 = 0.1;
const BIAS_STD: f64 = 0.1;

/// A tensor on the host.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTensor {
    /// In f32.
    F32(Vec<f32>),
    /// In bf16.
    Bf16(Vec<bf16>),
}

impl HostTensor {
    /// As the seam takes it.
    pub fn as_ref(&self) -> TensorRef<'_> {
        match self {
            Self::F32(values) => TensorRef::F32(values),
            Self::Bf16(values) => TensorRef::Bf16(values),
        }
    }
}

/// What the policy hands over.
#[derive(Clone, Debug, PartialEq)]
pub enum PolicyTensors {
    /// Logits `[N, V]`.
    Logits(HostTensor),
    /// Hidden states and the head.
    Hidden {
        /// `[N, H]`.
        hidden: HostTensor,
        /// `[V, H]` or `[H, V]`.
        lm_head: HostTensor,
        /// `[V]`.
        bias: HostTensor,
    },
}

/// Inputs of a benchmark.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// What the policy hands over.
    pub policy: PolicyTensors,
    /// Targets and advantages; without log-probabilities of other policies until [`Inputs::set_old_policy`].
    pub batch: TokenBatch,
    seed: u64,
}

impl Inputs {
    /// Makes them. The same configuration and seed give the same bits on every machine.
    ///
    /// # Errors
    /// Those of [`TokenBatch`], for sizes that have no batch.
    pub fn new(config: &BenchConfig, seed: u64) -> Result<Self> {
        let ShapeConfig { batch: b, tokens: t, hidden, vocab: v } = config.shape;
        let n = b * t;
        let draw = |stream: u64, elements: usize, std: f64| draw(seed, stream, elements, std, config.dtype);
        let policy = match hidden {
            None => PolicyTensors::Logits(draw(0, n * v, LOGIT_STD)),
            // Products of H terms: standard deviations multiply, and grow with the root of H.
            Some(h) => PolicyTensors::Hidden {
                hidden: draw(1, n * h, 1.0),
                lm_head: draw(2, v * h, LOGIT_STD / (h as f64).sqrt()),
                bias: draw(3, v, BIAS_STD),
            },
        };
        let mut targets = Random::new(seed, 4);
        let targets = (0..n).map(|_| (targets.next() % v as u64) as i64).collect();
        let batch = TokenBatch::packed(targets, (0..=b).map(|sequence| sequence * t).collect())?;
        let batch = batch.with_advantages(Advantages::PerToken(normals(seed, 5, n, 1.0)))?;
        Ok(Self { policy, batch, seed })
    }

    /// Gives the batch an old policy, and a reference policy where the loss has a KL, near the present one, whose
    /// log-probabilities are `logp [N]`.
    ///
    /// # Errors
    /// [`grpo_core::Error::Shape`] when there are not N of them.
    pub fn set_old_policy(&mut self, logp: &[f32], has_reference: bool) -> Result<()> {
        let near = |stream, std| {
            let noise = normals(self.seed, stream, logp.len(), std);
            // What lies above 0 would be no log-probability.
            logp.iter().zip(noise).map(|(logp, noise)| (logp + noise).min(0.0)).collect()
        };
        self.batch = self.batch.clone().with_old_logp(near(6, RATIO_STD))?;
        if has_reference {
            self.batch = self.batch.clone().with_ref_logp(near(7, REFERENCE_STD))?;
        }
        Ok(())
    }
}

fn draw(seed: u64, stream: u64, elements: usize, std: f64, dtype: Dtype) -> HostTensor {
    match dtype {
        Dtype::F32 => HostTensor::F32(normals(seed, stream, elements, std)),
        Dtype::Bf16 => HostTensor::Bf16(from_table(seed, stream, elements, &table(std).map(bf16::from_f32))),
    }
}

fn normals(seed: u64, stream: u64, elements: usize, std: f64) -> Vec<f32> {
    from_table(seed, stream, elements, &table(std))
}

const TABLE: usize = 1 << 16;

/// Draws from `table`, four at a time: 600 million numbers take about a second.
fn from_table<T: Copy>(seed: u64, stream: u64, elements: usize, table: &[T; TABLE]) -> Vec<T> {
    let mut random = Random::new(seed, stream);
    let mut values = Vec::with_capacity(elements + 3);
    while values.len() < elements {
        let bits = random.next();
        values.extend([0, 16, 32, 48].map(|shift| table[(bits >> shift) as usize & (TABLE - 1)]));
    }
    values.truncate(elements);
    values
}

/// Normally distributed numbers, by Box and Muller.
fn table(std: f64) -> Box<[f32; TABLE]> {
    let mut random = Random::new(0, u64::MAX);
    let mut unit = || (random.next() >> 11) as f64 / (1_u64 << 53) as f64;
    let mut values = Box::new([0.0; TABLE]);
    for value in values.iter_mut() {
        let radius = (-2.0 * (1.0 - unit()).ln()).sqrt();
        *value = (std * radius * (std::f64::consts::TAU * unit()).cos()) as f32;
    }
    values
}

/// SplitMix64: as fast as memory, and good enough for numbers that are only multiplied.
struct Random(u64);

impl Random {
    fn new(seed: u64, stream: u64) -> Self {
        let mut random = Self(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(values: &[f32]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let variance = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
        (mean, variance.sqrt())
    }

    fn config() -> BenchConfig {
        let shape = ShapeConfig { batch: 2, tokens: 500, hidden: Some(16), vocab: 300 };
        BenchConfig { shape, dtype: Dtype::F32, ..BenchConfig::default() }
    }

    #[test]
    fn logits_have_the_spread_of_a_real_model() {
        let inputs = Inputs::new(&config(), 3).expect("legal");
        let PolicyTensors::Hidden { hidden: HostTensor::F32(x), lm_head: HostTensor::F32(w), .. } = inputs.policy
        else {
            panic!("hidden states in f32");
        };
        let dot = |row: usize, entry: usize| (0..16).map(|i| x[row * 16 + i] * w[entry * 16 + i]).sum();
        let logits: Vec<f32> = (0..300).flat_map(|e| (0..1000).map(move |r| (r, e))).map(|(r, e)| dot(r, e)).collect();
        let (mean, std) = moments(&logits);
        assert!(mean.abs() < 0.1 && (std - LOGIT_STD).abs() < 0.2, "{mean} {std}");
    }

    #[test]
    fn ratios_lie_on_both_sides_of_either_clip_and_advantages_have_both_signs() {
        let mut inputs = Inputs::new(&config(), 3).expect("legal");
        let logp = vec![-5.0; 1000];
        inputs.set_old_policy(&logp, true).expect("as many as tokens");
        let old = inputs.batch.old_logp().expect("just set");
        let ratios: Vec<f32> = logp.iter().zip(old).map(|(new, old)| (new - old).exp()).collect();
        for (clip, share) in [
            ("low", ratios.iter().filter(|r| **r < 0.8).count()),
            ("none", ratios.iter().filter(|r| (0.8..=1.2).contains(*r)).count()),
            ("high", ratios.iter().filter(|r| **r > 1.2).count()),
            ("positive", (0..1000).filter(|row| inputs.batch.advantage(row / 500, *row) > 0.0).count()),
            ("negative", (0..1000).filter(|row| inputs.batch.advantage(row / 500, *row) < 0.0).count()),
        ] {
            assert!(share > 40, "{clip}: {share} of 1000");
        }
        assert!(inputs.batch.ref_logp().is_some_and(|reference| reference != old));
    }

    #[test]
    fn a_seed_is_all_that_decides() {
        let make = |seed| Inputs::new(&config(), seed).expect("legal");
        assert_eq!((make(1).policy, make(1).batch), (make(1).policy, make(1).batch));
        assert_ne!(make(1).policy, make(2).policy);
        assert_ne!(make(1).batch, make(2).batch);
    }
}
