//! Aggregation: the weight of each token in the loss of a step.
//!
//! Every average is a sum over tokens of weight x token loss. The weights are computed on the host once per optimizer step and stay with
//! the batch through any split into micro-batches, packing or data parallelism; kernels only sum. The accumulated gradients therefore do
//! not depend on the split.
//!
//! For a batch that is itself one part of a step, as in TRL or verl, set `gradient_accumulation_steps`, `dp_size`
//! and the related keys: its loss is then the loss that TRL or verl computes for that part.

use crate::batch::{StepData, TokenBatch, TokenWeights};
use crate::config::{LossAggMode, LossConfig, Semantics};
use crate::error::{Error, Result};
use crate::objective::{Average, OwnAverage};
use std::borrow::Cow;

/// Divisors of averages that are the same for all tokens.
struct Counts {
    /// Active tokens of each sequence.
    lengths: Vec<usize>,
    /// `true` if sequences without active tokens count.
    empty_count: bool,
    /// Active tokens of the batch.
    active: f64,
    /// Rows of the longest sequence, which is the width of a padded batch.
    width: f64,
    /// Other data of the step.
    step: StepData,
}

/// The share of a token in the weight of its sequence.
#[derive(Clone, Copy)]
enum Share {
    /// The whole weight.
    Sum,
    /// 1 / active tokens of the sequence.
    Mean,
    /// 1 / active tokens of its group of this many sequences.
    MeanOfGroup(usize),
}

impl Counts {
    fn of(config: &LossConfig, batch: &TokenBatch) -> Self {
        Self {
            lengths: (0..batch.sequences()).map(|sequence| batch.active_in(sequence)).collect(),
            empty_count: config.counts_masked_rows(),
            active: batch.active_tokens() as f64,
            step: batch.step().clone(),
            width: (0..batch.sequences()).map(|sequence| batch.range(sequence).len()).max().unwrap_or(1).max(1) as f64,
        }
    }

    /// Returns the number of groups of `size` sequences that count, at least 1.
    fn groups(&self, size: usize) -> f64 {
        let counts = |group: &&[usize]| self.empty_count || group.iter().any(|length| *length > 0);
        (self.lengths.chunks(size).filter(counts).count() as f64).max(1.0)
    }

    /// Returns the number of sequences that count, at least 1.
    fn sequences(&self) -> f64 {
        self.groups(1)
    }

    /// Returns the factor of a token in the weight of its sequence.
    fn share(&self, sequence: usize, share: Share) -> f64 {
        let size = match share {
            Share::Sum => return 1.0,
            Share::Mean => 1,
            Share::MeanOfGroup(size) => size,
        };
        let first = sequence / size * size;
        let group = &self.lengths[first..(first + size).min(self.lengths.len())];
        1.0 / group.iter().sum::<usize>().max(1) as f64
    }
}

/// Computes the weights of `batch` as one whole optimizer step.
///
/// # Errors
/// [`Error::Config`] if `num_generations` or `micro_batch_size` do not divide the batch, or if a count of the step that the average needs
/// is missing.
pub fn token_weights(config: &LossConfig, batch: &TokenBatch) -> Result<TokenWeights> {
    let counts = Counts::of(config, batch);
    check_counts(config, &counts.step)?;
    let steps = config.gradient_accumulation_steps as f64;
    let of_terms = match config.agg_mode() {
        Some(mode) => of_mode(config, mode, &counts)?,
        None => of_loss(config, &counts),
    };
    let of_kl = config.kl_agg_mode.map_or(Ok(of_terms), |mode| of_mode(config, mode, &counts))?;
    let of_policy = match config.verl_average() {
        Some(OwnAverage::Mode(mode)) => of_mode(config, mode, &counts)?,
        Some(OwnAverage::AllRows) => (1.0 / (batch.sequences() as f64).max(1.0), Share::Mean),
        None => of_terms,
    };
    let of_entropy = match config.semantics {
        Semantics::Verl => of_terms,
        _ => (1.0 / (counts.active.max(1.0) * steps), Share::Sum),
    };
    let entropy_coef = counts.step.entropy_coef.unwrap_or(config.entropy_coef);
    if entropy_coef != 0.0 && config.entropy_coef == 0.0 {
        return Err(Error::Config(format!(
            "the step has an entropy_coef of {entropy_coef}, but the configuration has no entropy bonus: set its \
             entropy_coef to anything but 0"
        )));
    }
    let mut weights = TokenWeights::zeros(batch.tokens());
    for sequence in 0..batch.sequences() {
        let [policy, kl, entropy] =
            [of_policy, of_kl, of_entropy].map(|(weight, share)| weight * counts.share(sequence, share));
        let (kl, entropy) = (config.beta * kl, entropy_coef * entropy);
        for token in batch.range(sequence).filter(|token| batch.is_active(*token)) {
            (weights.policy[token], weights.kl[token], weights.entropy[token]) = (policy, kl, entropy);
        }
    }
    if config.positive_example_nll_weight != 0.0 {
        imitate(config, batch, &counts, &mut weights.nll);
    }
    Ok(weights)
}

/// Returns the weights of `batch`: its own ([`TokenBatch::with_weights`]) if it has some, because it is a part of an optimizer
/// step; else the weights of the batch as one whole step.
///
/// # Errors
/// The errors of [`token_weights`].
pub fn batch_weights<'a>(config: &LossConfig, batch: &'a TokenBatch) -> Result<Cow<'a, TokenWeights>> {
    batch.weights().map_or_else(|| token_weights(config, batch).map(Cow::Owned), |weights| Ok(Cow::Borrowed(weights)))
}

/// Adds the weights of the mean over the tokens of `positive_rows`.
fn imitate(config: &LossConfig, batch: &TokenBatch, counts: &Counts, nll: &mut [f64]) {
    let positive = counts.step.positive_rows.indices();
    let tokens: usize = positive.iter().map(|sequence| counts.lengths[*sequence]).sum();
    let weight = 1.0 / (tokens.max(1) as f64 * config.gradient_accumulation_steps as f64);
    for sequence in positive {
        let active = batch.range(sequence).filter(|token| batch.is_active(*token));
        active.for_each(|token| nll[token] = config.positive_example_nll_weight * weight);
    }
}

/// Returns TRL's average of the loss, or the default average of a loss that TRL does not have.
fn of_loss(config: &LossConfig, counts: &Counts) -> (f64, Share) {
    let steps = config.gradient_accumulation_steps as f64;
    let (divisor, share) = match config.average() {
        Average::StepTokens => (counts.active.max(1.0) * steps, Share::Sum),
        Average::GenerationTokens => {
            // num_items_in_batch counts the generation batch on all processes. Without it, all batches of the generation batch are
            // taken to have as many tokens as this one.
            let per_generation = config.steps_per_generation.unwrap_or(config.gradient_accumulation_steps) as f64;
            let whole = counts.active * per_generation * config.num_processes as f64;
            let items = counts.step.num_items_in_batch.unwrap_or(whole).max(1.0);
            (items / config.num_processes as f64 * steps / per_generation, Share::Sum)
        }
        Average::Sequences => (counts.sequences() * steps, Share::Mean),
        Average::ConstantLength => {
            (counts.sequences() * config.max_completion_length.unwrap_or(1) as f64 * steps, Share::Sum)
        }
        Average::SequenceSums => (counts.sequences() * steps, Share::Sum),
    };
    (1.0 / divisor, share)
}

/// Returns the average of an explicit aggregation mode.
fn of_mode(config: &LossConfig, mode: LossAggMode, counts: &Counts) -> Result<(f64, Share)> {
    let processes = config.dp_size as f64 / config.gradient_accumulation_steps as f64;
    let sequences = || counts.step.global_batch_size.unwrap_or(counts.sequences());
    let of_groups = |key: &str, size: Option<usize>| {
        let (size, sequences) = (size.unwrap_or(1), counts.lengths.len());
        if !sequences.is_multiple_of(size) {
            return Err(Error::Config(format!("{key} is {size}, which does not divide the {sequences} sequences")));
        }
        let groups = counts.step.global_batch_size.map_or(counts.groups(size), |sequences| sequences / size as f64);
        Ok((processes / groups, Share::MeanOfGroup(size)))
    };
    Ok(match mode {
        LossAggMode::TokenMean => {
            (processes / counts.step.batch_num_tokens.unwrap_or(counts.active.max(1.0)), Share::Sum)
        }
        LossAggMode::TokenSum => (processes, Share::Sum),
        LossAggMode::SeqMeanTokenSum => (processes / sequences(), Share::Sum),
        LossAggMode::SeqMeanTokenSumNorm => {
            (processes / sequences() / config.loss_scale_factor.unwrap_or(counts.width), Share::Sum)
        }
        LossAggMode::SeqMeanTokenMean => (processes / sequences(), Share::Mean),
        LossAggMode::SequenceMeanTokenSumNorm => {
            let rows = || counts.step.global_batch_size.unwrap_or((counts.lengths.len() as f64).max(1.0));
            (processes / config.loss_scale_factor.unwrap_or_else(rows), Share::Sum)
        }
        LossAggMode::PromptMean => of_groups("num_generations", config.num_generations)?,
        LossAggMode::TokenMeanLegacy => of_groups("micro_batch_size", config.micro_batch_size)?,
    })
}

/// Checks that the step has its counts over all processes, which explicit averages divide by if there are several processes.
fn check_counts(config: &LossConfig, step: &StepData) -> Result<()> {
    if config.dp_size == 1 {
        return Ok(());
    }
    let mode = config.agg_mode();
    let of_policy = match config.verl_average() {
        Some(OwnAverage::Mode(mode)) => Some(mode),
        Some(OwnAverage::AllRows) => None,
        None => mode,
    };
    let of_kl = config.kl_agg_mode.or(mode).filter(|_| config.beta != 0.0);
    let of_entropy = mode.filter(|_| config.entropy_coef != 0.0 && config.semantics == Semantics::Verl);
    for mode in [of_policy, of_kl, of_entropy].into_iter().flatten() {
        let (needs, counted) = match mode {
            LossAggMode::TokenMean => ("token-mean needs batch_num_tokens", step.batch_num_tokens.is_some()),
            LossAggMode::TokenSum => ("", true),
            LossAggMode::SequenceMeanTokenSumNorm if config.loss_scale_factor.is_some() => ("", true),
            _ => ("means over sequences need global_batch_size", step.global_batch_size.is_some()),
        };
        if !counted {
            let size = config.dp_size;
            return Err(Error::Config(format!(
                "dp_size is {size}: {needs}, counted over all processes: give it with the batch (TokenBatch::with_step)"
            )));
        }
    }
    Ok(())
}
