//! Aggregation: how much each token counts.
//!
//! Every way to average is "sum over tokens of weight x token loss" with its own weights. They are made here, on the host,
//! once per optimizer step, and travel with the batch through any split into micro-batches, packing or data
//! parallelism; kernels only sum. Gradients then add up to the same bits of meaning however the step was cut.
//!
//! A batch that is itself a part of a step, in TRL's or verl's sense, says so with `gradient_accumulation_steps`, `dp_size`
//! and the like: its loss is then what that system computes for that part.

use crate::batch::TokenBatch;
use crate::config::{LossAggMode, LossConfig, LossType, Semantics};

/// Per-token weights of one optimizer step. Masked tokens have weight 0.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenWeights {
    /// Of the token's policy term: `[N]`.
    pub policy: Vec<f64>,
    /// Of its KL term, before beta: `[N]`. As `policy`, unless a loss of verl averages in a way of its own.
    pub kl: Vec<f64>,
    /// Of its entropy in the bonus, before entropy_coef: `[N]`.
    pub entropy: Vec<f64>,
}

impl TokenWeights {
    /// Weight 0 for `tokens` tokens.
    pub fn zeros(tokens: usize) -> Self {
        Self { policy: vec![0.0; tokens], kl: vec![0.0; tokens], entropy: vec![0.0; tokens] }
    }

    /// The tokens `rows`.
    pub(crate) fn select(&self, rows: std::ops::Range<usize>) -> Self {
        let cut = |list: &[f64]| list[rows.clone()].to_vec();
        Self { policy: cut(&self.policy), kl: cut(&self.kl), entropy: cut(&self.entropy) }
    }
}

/// What an average divides by, as far as it is the same for all tokens.
struct Counts {
    /// Sequences that count.
    sequences: f64,
    /// Active tokens.
    active: f64,
    /// Rows of the longest sequence: the width of a padded batch.
    width: f64,
}

/// How the tokens of a sequence share its weight.
#[derive(Clone, Copy)]
enum Share {
    /// Each token has all of it.
    Sum,
    /// 1 / active tokens of the sequence.
    Mean,
}

/// The weights of `batch`, taken as one whole optimizer step.
pub fn token_weights(config: &LossConfig, batch: &TokenBatch) -> TokenWeights {
    let lengths: Vec<usize> = (0..batch.sequences()).map(|sequence| batch.active_in(sequence)).collect();
    let nonempty = lengths.iter().filter(|length| **length > 0).count() as f64;
    let counts = Counts {
        sequences: if config.counts_masked_rows() { lengths.len() as f64 } else { nonempty.max(1.0) },
        active: batch.active_tokens() as f64,
        width: (0..batch.sequences()).map(|sequence| batch.range(sequence).len()).max().unwrap_or(1).max(1) as f64,
    };
    let steps = config.gradient_accumulation_steps as f64;
    let of_terms =
        match config.loss_agg_mode.or((config.semantics == Semantics::Verl).then_some(LossAggMode::TokenMean)) {
            Some(mode) => of_mode(config, mode, &counts),
            None => of_type(config, &counts),
        };
    let of_policy = match (config.semantics, config.loss_type) {
        // These two have an average of their own there, whatever the mode.
        (Semantics::Verl, LossType::Sapo) => of_mode(config, LossAggMode::SeqMeanTokenMean, &counts),
        (Semantics::Verl, LossType::GeoMean) => {
            // A mean over all rows, whatever counts elsewhere.
            (1.0 / (lengths.len() as f64).max(1.0), Share::Mean)
        }
        _ => of_terms,
    };
    let of_entropy = match config.semantics {
        Semantics::Verl => of_terms,
        _ => (1.0 / (counts.active.max(1.0) * steps), Share::Sum),
    };
    let mut weights = TokenWeights::zeros(batch.tokens());
    for (sequence, length) in lengths.iter().enumerate() {
        let weigh = |(weight, share): &(f64, Share)| match share {
            Share::Sum => *weight,
            Share::Mean => weight / (*length).max(1) as f64,
        };
        for token in batch.range(sequence).filter(|token| batch.is_active(*token)) {
            weights.policy[token] = weigh(&of_policy);
            weights.kl[token] = weigh(&of_terms);
            weights.entropy[token] = weigh(&of_entropy);
        }
    }
    weights
}

/// TRL's averages, which go with the loss, and those of the losses that it does not have.
fn of_type(config: &LossConfig, counts: &Counts) -> (f64, Share) {
    let steps = config.gradient_accumulation_steps as f64;
    let (divisor, share) = match config.loss_type {
        LossType::Grpo if config.semantics == Semantics::MllmJax => (counts.active.max(1.0) * steps, Share::Sum),
        LossType::Grpo | LossType::Gspo | LossType::Sapo | LossType::GeoMean => (counts.sequences * steps, Share::Mean),
        LossType::DrGrpo => (counts.sequences * config.max_completion_length.unwrap_or(1) as f64 * steps, Share::Sum),
        LossType::Luspo => (counts.sequences * steps, Share::Sum),
        LossType::Dapo | LossType::Cispo | LossType::Vespo => {
            // num_items_in_batch spans the generation batch and all processes; a batch is one of its parts, which are taken
            // to be alike where nobody has counted.
            let per_generation = config.steps_per_generation.unwrap_or(config.gradient_accumulation_steps) as f64;
            let whole = counts.active * per_generation * config.num_processes as f64;
            let items = config.num_items_in_batch.unwrap_or(whole).max(1.0);
            (items / config.num_processes as f64 * steps / per_generation, Share::Sum)
        }
        _ => (counts.active.max(1.0) * steps, Share::Sum),
    };
    (1.0 / divisor, share)
}

/// verl's averages.
fn of_mode(config: &LossConfig, mode: LossAggMode, counts: &Counts) -> (f64, Share) {
    let processes = config.dp_size as f64 / config.gradient_accumulation_steps as f64;
    let sequences = config.global_batch_size.unwrap_or(counts.sequences);
    match mode {
        LossAggMode::TokenMean => (processes / config.batch_num_tokens.unwrap_or(counts.active.max(1.0)), Share::Sum),
        LossAggMode::TokenSum => (processes, Share::Sum),
        LossAggMode::SeqMeanTokenSum => (processes / sequences, Share::Sum),
        LossAggMode::SeqMeanTokenSumNorm => {
            (processes / sequences / config.loss_scale_factor.unwrap_or(counts.width), Share::Sum)
        }
        LossAggMode::SeqMeanTokenMean => (processes / sequences, Share::Mean),
    }
}
