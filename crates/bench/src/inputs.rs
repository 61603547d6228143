//! Realistic inputs, created once from a seed and bit-identical for all compared programs.
//!
//! Logits have a standard deviation of about 2, and targets are uniform. The old policy's log-probabilities are the
//! current ones with noise, so that ratios lie on both sides of both clip bounds, and advantages have both signs: no gradient is
//! zero and every branch is taken.
//!
//! Legend: B sequences, N tokens, V vocabulary, H hidden size.

use super::tensor_file::TensorFile;
use crate::config::{BenchConfig, ShapeConfig};
use crate::error::{Error, Result};
use grpo_core::batch::{Advantages, SamplingMask, TokenBatch};
use grpo_core::{Dtype, HeadLayout, PolicyOutput, Tensor};
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use std::collections::BTreeMap;
use std::path::Path;

const BIAS_STD: f64 = 0.1;

/// Files of the inputs by tensor name.
pub type Files = BTreeMap<String, TensorFile>;

/// Inputs of a benchmark in a worker's memory.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The policy's output: logits `[N, V]`, or hidden states `[N, H]`, a head `[V, H]` or `[H, V]`, and always a bias
    /// `[V]`, which a variant may ignore.
    pub policy: PolicyOutput<Tensor>,
    /// Targets, advantages, and log-probabilities of other policies if the files contain them.
    pub batch: TokenBatch,
}

impl Inputs {
    /// Reads `files`, which were created for `config`.
    ///
    /// # Errors
    /// [`Error::File`] for a file that cannot be read; the errors of [`TokenBatch`].
    pub fn load(config: &BenchConfig, files: &Files) -> Result<Self> {
        let file = |name: &str| {
            files.get(name).ok_or_else(|| Error::argument("read the inputs", format!("a tensor `{name}`"), "none"))
        };
        let policy = match config.shape.hidden {
            None => PolicyOutput::Logits(file("logits")?.load()?),
            Some(_) => PolicyOutput::Hidden {
                hidden: file("hidden")?.load()?,
                lm_head: file("lm_head")?.load()?,
                bias: Some(file("bias")?.load()?),
            },
        };
        let advantages = file("advantages")?;
        let advantages: Vec<f32> = advantages.read()?;
        let per_sequence = advantages.len() == config.shape.batch;
        let advantages =
            if per_sequence { Advantages::PerSequence(advantages) } else { Advantages::PerToken(advantages) };
        let ShapeConfig { batch: b, tokens: t, .. } = config.shape;
        let offsets = (0..=b).map(|sequence| sequence * t).collect();
        let targets: Vec<i64> = file("targets")?.read()?;
        let mut batch = TokenBatch::packed(targets, offsets)?.with_advantages(advantages)?;
        if let Some(kept) = files.get("kept_ids") {
            let ids: Vec<u32> = kept.read()?;
            let offsets: Vec<usize> = (0..=b * t).map(|row| row * config.inputs.kept_ids).collect();
            batch = batch.with_sampling_mask(SamplingMask::new(&offsets, &ids)?)?;
        }
        if let Some(old) = files.get("old_logp") {
            batch = batch.with_old_logp(old.read()?)?;
        }
        if let Some(reference) = files.get("ref_logp") {
            batch = batch.with_ref_logp(reference.read()?)?;
        }
        Ok(Self { policy, batch })
    }
}

/// Writes the policy's output in `config.dtype` to `folder`. Files of two dtypes hold the same numbers up to rounding.
///
/// # Errors
/// [`Error::File`].
pub fn write_policy(config: &BenchConfig, folder: &Path) -> Result<Files> {
    let ShapeConfig { hidden, vocab: v, .. } = config.shape;
    let (n, std) = (config.shape.rows(), config.inputs.logit_std);
    let mut files = Files::new();
    let mut save = |name: &str, stream: u64, shape: Vec<usize>, std: f64| -> Result<()> {
        let tensor = draw(config.inputs.seed, stream, shape.iter().product(), std, config.dtype);
        files.insert(name.to_owned(), TensorFile::save(folder, name, shape, &tensor)?);
        Ok(())
    };
    match hidden {
        None => save("logits", 0, vec![n, v], std)?,
        // Each logit is a sum of H products: its standard deviation is the product of both factors' times the square root of H.
        Some(h) => {
            let head = match config.layout {
                HeadLayout::VocabHidden => vec![v, h],
                HeadLayout::HiddenVocab => vec![h, v],
            };
            save("hidden", 1, vec![n, h], 1.0)?;
            save("lm_head", 2, head, std / (h as f64).sqrt())?;
            save("bias", 3, vec![v], BIAS_STD)?;
        }
    }
    Ok(files)
}

/// Writes targets `[N]` and advantages to `folder`: one advantage per sequence with alternating signs, or, for a single sequence, one
/// per token; and, if `inputs.kept_ids` is not 0, that many ids per token that it was sampled from, spread over the vocabulary.
///
/// # Errors
/// [`Error::File`].
pub fn write_batch(config: &BenchConfig, folder: &Path) -> Result<Files> {
    let (seed, b, n) = (config.inputs.seed, config.shape.batch, config.shape.rows());
    let mut random = Random::new(seed, 4);
    let targets: Vec<i64> = (0..n).map(|_| (random.next() % config.shape.vocab as u64) as i64).collect();
    let advantages: Vec<f32> = if b > 1 {
        let sizes = normals(seed, 5, b, 1.0).into_iter().map(|size| size.abs().max(0.1));
        sizes.enumerate().map(|(sequence, size)| if sequence % 2 == 0 { size } else { -size }).collect()
    } else {
        normals(seed, 5, n, 1.0)
    };
    let mut files = Files::new();
    let kept = config.inputs.kept_ids;
    // One id of each of so many parts of the vocabulary, so that they differ.
    if let Some(part) = config.shape.vocab.checked_div(kept) {
        let mut random = Random::new(seed, 8);
        let mut ids = Vec::with_capacity(n * kept);
        for target in &targets {
            let target = *target as usize;
            let part_ids = (0..kept).map(|i| (i * part + random.next() as usize % part) as u32);
            ids.extend(part_ids);
            let row = ids.len() - kept;
            ids[row + (target / part).min(kept - 1)] = target as u32;
        }
        let path = folder.join("kept_ids.u32");
        files.insert("kept_ids".to_owned(), TensorFile::write(path, "u32", vec![n, kept], &ids)?);
    }
    let targets = TensorFile::write(folder.join("targets.i64"), "i64", vec![n], &targets)?;
    let shape = vec![advantages.len()];
    let advantages = TensorFile::write(folder.join("advantages.f32"), "f32", shape, &advantages)?;
    files.extend([("targets".to_owned(), targets), ("advantages".to_owned(), advantages)]);
    Ok(files)
}

/// Writes log-probabilities of an old policy and, if the loss has a KL term, of a reference policy, both close to the current policy's
/// `logp [N]`. On-policy, there is no old policy.
///
/// # Errors
/// [`Error::File`].
pub fn write_other_policies(config: &BenchConfig, logp: &[f32], folder: &Path) -> Result<Files> {
    let inputs = config.inputs;
    let near = |name: &str, stream, std| -> Result<(String, TensorFile)> {
        let noise = normals(inputs.seed, stream, logp.len(), std);
        // A log-probability is at most 0.
        let values: Vec<f32> = logp.iter().zip(noise).map(|(logp, noise)| (logp + noise).min(0.0)).collect();
        let path = folder.join(format!("{name}.f32"));
        Ok((name.to_owned(), TensorFile::write(path, "f32", vec![values.len()], &values)?))
    };
    let mut files = Files::new();
    if !inputs.on_policy {
        files.extend([near("old_logp", 6, inputs.old_logp_noise)?]);
    }
    if config.loss.needs_ref_logp() {
        files.extend([near("ref_logp", 7, inputs.ref_logp_noise)?]);
    }
    Ok(files)
}

/// Returns `true` if [`write_other_policies`] writes any file.
pub fn has_other_policies(config: &BenchConfig) -> bool {
    !config.inputs.on_policy || config.loss.needs_ref_logp()
}

fn draw(seed: u64, stream: u64, elements: usize, std: f64, dtype: Dtype) -> Tensor {
    match dtype {
        Dtype::F32 => Tensor::F32(normals(seed, stream, elements, std)),
        Dtype::Bf16 => Tensor::Bf16(from_table(seed, stream, elements, &table(std).map(bf16::from_f32))),
    }
}

fn normals(seed: u64, stream: u64, elements: usize, std: f64) -> Vec<f32> {
    from_table(seed, stream, elements, &table(std))
}

const TABLE: usize = 1 << 16;

/// Draws from `table`, four numbers at a time: 600 million numbers take about a second.
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

/// Creates independent numbers of a normal distribution with mean 0, equal in every run.
fn table(std: f64) -> Box<[f32; TABLE]> {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut values = Box::new([0.0; TABLE]);
    for value in values.iter_mut() {
        let standard: f64 = StandardNormal.sample(&mut rng);
        *value = (std * standard) as f32;
    }
    values
}

/// SplitMix64: as fast as memory, and random enough for numbers that are only multiplied.
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
    use crate::config::InputsConfig;

    fn moments(values: &[f32]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let variance = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
        (mean, variance.sqrt())
    }

    fn config() -> BenchConfig {
        let shape = ShapeConfig { batch: 2, tokens: 500, hidden: Some(16), vocab: 300 };
        let inputs = InputsConfig { seed: 3, ..InputsConfig::default() };
        BenchConfig { shape, inputs, dtype: Dtype::F32, ..BenchConfig::default() }
    }

    /// Writes and loads the inputs as a run does.
    fn make(config: &BenchConfig, logp: &[f32]) -> Inputs {
        let folder = tempfile::tempdir().expect("a folder");
        let mut files = write_policy(config, folder.path()).expect("written");
        files.extend(write_batch(config, folder.path()).expect("written"));
        files.extend(write_other_policies(config, logp, folder.path()).expect("written"));
        Inputs::load(config, &files).expect("read")
    }

    #[test]
    fn logits_have_the_spread_of_a_real_model() {
        let inputs = make(&config(), &[-5.0; 1000]);
        let PolicyOutput::Hidden { hidden: Tensor::F32(x), lm_head: Tensor::F32(w), .. } = inputs.policy else {
            panic!("hidden states in f32");
        };
        let dot = |row: usize, entry: usize| (0..16).map(|i| x[row * 16 + i] * w[entry * 16 + i]).sum();
        let logits: Vec<f32> = (0..300).flat_map(|e| (0..1000).map(move |r| (r, e))).map(|(r, e)| dot(r, e)).collect();
        let (mean, std) = moments(&logits);
        assert!(mean.abs() < 0.1 && (std - 2.0).abs() < 0.2, "{mean} {std}");
    }

    #[test]
    fn ratios_lie_on_both_sides_of_either_clip_and_advantages_have_both_signs() {
        let logp = vec![-5.0; 1000];
        let mut config = config();
        config.loss.beta = 0.1;
        for (batch, tokens) in [(2, 500), (1, 1000)] {
            config.shape = ShapeConfig { batch, tokens, ..config.shape };
            let inputs = make(&config, &logp);
            let old = inputs.batch.old_logp().expect("just set");
            let ratios: Vec<f32> = logp.iter().zip(old).map(|(new, old)| (new - old).exp()).collect();
            let advantage = |row: &usize| inputs.batch.advantage(row / tokens, *row);
            for (clip, share) in [
                ("low", ratios.iter().filter(|r| **r < 0.8).count()),
                ("none", ratios.iter().filter(|r| (0.8..=1.2).contains(*r)).count()),
                ("high", ratios.iter().filter(|r| **r > 1.2).count()),
                ("positive", (0..1000).filter(|row| advantage(row) > 0.0).count()),
                ("negative", (0..1000).filter(|row| advantage(row) < 0.0).count()),
            ] {
                assert!(share > 40, "{clip}: {share} of 1000");
            }
            assert!(inputs.batch.ref_logp().is_some_and(|reference| reference != old));
        }
    }

    #[test]
    fn tokens_are_sampled_from_as_many_ids_as_the_configuration_says() {
        let mut config = config();
        config.inputs.kept_ids = 7;
        let inputs = make(&config, &[-5.0; 1000]);
        let mask = inputs.batch.sampling_mask().expect("just set");
        assert!((0..1000).all(|row| mask.kept(row).is_some_and(|ids| ids.len() == 7)));
        assert_eq!(make(&super::tests::config(), &[-5.0; 1000]).batch.sampling_mask(), None);
    }

    #[test]
    fn old_policy_equals_the_current_one_without_noise_and_is_absent_on_policy() {
        let logp: Vec<f32> = (0..1000).map(|row| -0.01 * row as f32).collect();
        let mut config = config();
        config.inputs.old_logp_noise = 0.0;
        assert_eq!(make(&config, &logp).batch.old_logp(), Some(logp.as_slice()));
        config.inputs.on_policy = true;
        assert_eq!(make(&config, &logp).batch.old_logp(), None);
        assert!(!has_other_policies(&config));
    }

    #[test]
    fn inputs_depend_on_the_seed_and_dtypes_differ_by_rounding() {
        let with = |seed, dtype| {
            let inputs = InputsConfig { seed, ..InputsConfig::default() };
            make(&BenchConfig { inputs, dtype, ..config() }, &[-5.0; 1000])
        };
        let (one, same, other) = (with(1, Dtype::F32), with(1, Dtype::F32), with(2, Dtype::F32));
        assert_eq!((&one.policy, &one.batch), (&same.policy, &same.batch));
        assert_ne!(one.policy, other.policy);
        assert_ne!(one.batch, other.batch);
        let (PolicyOutput::Hidden { hidden: Tensor::F32(wide), .. }, PolicyOutput::Hidden { hidden, .. }) =
            (one.policy, with(1, Dtype::Bf16).policy)
        else {
            panic!("hidden states")
        };
        assert_eq!(hidden, Tensor::Bf16(wide.into_iter().map(bf16::from_f32).collect()));
    }
}
