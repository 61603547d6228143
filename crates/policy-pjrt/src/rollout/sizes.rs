//! Sizes of a rollout's programs, rounded to few values so that few executables are compiled.

use super::columns::{Columns, FEWEST_COLUMNS, columns, columns_read};
use super::decode::{Decode, DecodeLayout};
use super::extend::TOKENS;
use super::options::{RequestOptions, RolloutOptions};
use super::prefill::{self, Prompts};
use super::sampling::Sampler;
use super::state::Shape;
use crate::decoder::{Axis, AxisRules, Decoder};
use crate::error::Result;
use grpo_backend_tpu::plugins::Kind;
use grpo_policy::RolloutRequest;
use grpo_stablehlo::{Dtype, Module};

/// Smallest number of slots: fewer rows take as long, and compilers sum a product of one row in another order.
const FEWEST_SLOTS: usize = 8;
/// Sizes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RolloutSizes {
    /// Number of prompts.
    pub prompts: usize,
    /// Number of tokens of the longest prompt.
    pub longest_prompt: usize,
    /// Number of completions per prompt.
    pub num_generations: usize,
    /// Largest number of tokens of a completion.
    pub max_completion_length: usize,
    /// `true` for requests with [`RolloutRequest::turn`], whose KV cache stays for the next request.
    pub conversations: bool,
}

impl RolloutSizes {
    /// Returns the sizes of a request. In the turns of conversations the longest prompt may have a shorter completion, and shorter prompts
    /// longer ones: the two lengths add up to the length of the longest sequence.
    pub fn of(request: &RolloutRequest<'_>) -> Self {
        Self {
            prompts: request.prompts.len(),
            longest_prompt: request.longest_sequence().saturating_sub(request.max_completion_length),
            num_generations: request.num_generations,
            max_completion_length: request.max_completion_length,
            conversations: request.turn.is_some(),
        }
    }

    /// Returns the largest number of tokens of a sequence that the decoder processes: all but the last one.
    pub(crate) fn longest(&self) -> usize {
        (self.longest_prompt + self.max_completion_length).saturating_sub(1)
    }

    /// Returns the number of columns that calls write. A sequence begins with a call, and every call writes `tokens_per_call` columns, even
    /// the last one. Later calls may overwrite the columns of finished sequences, which are never read. In conversations a call may begin
    /// behind any token, and extensions write as many columns.
    fn columns_written(&self, tokens_per_call: usize) -> usize {
        if self.conversations {
            let most = TOKENS.into_iter().fold(tokens_per_call, usize::max);
            return self.longest_prompt + self.max_completion_length + most;
        }
        (self.longest_prompt + self.max_completion_length.next_multiple_of(tokens_per_call)).saturating_sub(1)
    }

    /// Returns how many positions from the next token of a sequence on calls may have written ([`Columns::ahead`]). In conversations, the next
    /// token is one of the last call of a turn, and later calls for other sequences write behind the end of this call.
    fn columns_ahead(&self, tokens_per_call: usize) -> usize {
        let most = TOKENS.into_iter().fold(tokens_per_call, usize::max);
        if self.conversations { tokens_per_call + most } else { tokens_per_call }
    }

    /// Returns the shape of the state. Slots are a multiple of the shards of rows.
    pub(crate) fn shape(&self, options: RolloutOptions, sampler: Sampler, rules: &AxisRules) -> Shape {
        let slots = rows((self.prompts * self.num_generations).min(options.slots).max(FEWEST_SLOTS));
        Shape {
            slots: slots.next_multiple_of(rules.parts(Axis::Batch)),
            columns: Columns {
                all: columns(self.columns_written(options.tokens_per_call)),
                ahead: self.columns_ahead(options.tokens_per_call),
            },
            tokens: self.max_completion_length,
            seen: sampler.repetition_penalty,
        }
    }

    /// Returns the number of prompts per prefill: enough to fill the slots.
    pub(crate) fn prompts_at_once(&self, shape: Shape) -> usize {
        (shape.slots / self.num_generations.max(1)).max(1).min(self.prompts)
    }
}

impl Prompts {
    /// Returns the shape of a prefill of at most `count` prompts of at most `longest` tokens.
    pub(crate) fn of(count: usize, longest: usize, shape: Shape, rules: &AxisRules) -> Self {
        let rows = rows(count).next_multiple_of(rules.parts(Axis::Batch));
        let Shape { columns, seen, .. } = shape;
        Self { rows, tokens: bucket(longest).min(columns.all), columns, seen, routed_experts: false }
    }
}

/// Rounds a number of rows up: to a power of two up to 8, to a multiple of 8 above.
fn rows(count: usize) -> usize {
    if count <= 8 { count.next_power_of_two() } else { count.next_multiple_of(8) }
}

/// Rounds a length of prompts up to a power of two or 1.5 times a power of two.
fn bucket(length: usize) -> usize {
    let power = length.max(FEWEST_COLUMNS).next_power_of_two();
    let between = power / 4 * 3;
    if between >= length && between > FEWEST_COLUMNS { between } else { power }
}

/// The programs of a rollout, for ahead-of-time compilation, without the programs that continue conversations.
#[derive(Clone, Debug)]
pub struct RolloutPrograms {
    /// The prefill of as many prompts as fill the slots.
    pub prefill: Module,
    /// The admission of samples into slots.
    pub admit: Module,
    /// The decode loops, by the number of columns of the KV cache that they read, ascending. Each call uses the smallest one that fits its
    /// longest sequence.
    pub decode: Vec<(usize, Module)>,
}

impl RolloutPrograms {
    /// Builds the programs that a [`DeviceRollout`](crate::DeviceRollout) runs for requests of these sizes on a `kind` of device with `decoder`, including its
    /// adapters. `weights` is the dtype of the model. If the decoder is sharded over a mesh, slots and prompts are sharded by rows, and keys and
    /// values also by heads.
    ///
    /// # Errors
    /// [`crate::Error::Model`] for an invalid configuration; [`crate::Error::Split`] if slots or prompts do not shard evenly.
    pub fn of(
        kind: Kind,
        decoder: &Decoder,
        weights: Dtype,
        options: RolloutOptions,
        sizes: RolloutSizes,
        requests: RequestOptions<'_>,
    ) -> Result<Self> {
        let RequestOptions { sampling, return_sampling_mask, return_routed_experts: routed_experts, stop_ids } =
            requests;
        let config = decoder.config();
        config.validate()?;
        let decoder = decoder.without_value_head().with_axis_rules(decoder.axis_rules().for_rollout())?;
        let (sampler, ..) = Sampler::of(sampling, config.vocab_size, return_sampling_mask);
        let shape = sizes.shape(options, sampler, decoder.axis_rules());
        let prompts = Prompts::of(sizes.prompts_at_once(shape), sizes.longest_prompt, shape, decoder.axis_rules());
        let lengths = 1..=sizes.longest();
        let mut columns: Vec<usize> = lengths.map(|length| columns_read(length, shape.columns.all)).collect();
        columns.dedup();
        let layout = DecodeLayout::of(kind, &decoder);
        let decode = columns.into_iter().map(|columns_read| {
            let (steps, stop_ids) = (options.tokens_per_call, places(stop_ids));
            let decode = Decode { shape, columns_read, steps, sampler, layout, stop_ids, routed_experts };
            Ok((columns_read, decode.module(&decoder, weights)?))
        });
        Ok(Self {
            prefill: prefill::module(&decoder, weights, Prompts { routed_experts, ..prompts })?,
            admit: prefill::admit(&decoder, shape, prompts)?,
            decode: decode.collect::<Result<_>>()?,
        })
    }
}

/// Returns the size of the array of stop ids in a program for `count` of them.
pub(crate) fn places(count: usize) -> usize {
    count.max(1).next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::Compute;
    use grpo_models::ModelConfig;
    use grpo_policy::Sampling;

    #[test]
    fn sizes_are_rounded_to_few_values() {
        assert_eq!([1, 3, 8, 9, 64].map(rows), [1, 4, 8, 16, 64]);
        assert_eq!([1, 16, 17, 24, 25, 60, 100, 200].map(bucket), [16, 16, 24, 24, 32, 64, 128, 256]);
        assert_eq!([1, 17, 128, 129, 1280].map(columns), [16, 32, 128, 256, 1280]);
        assert_eq!([1, 384, 513, 1280, 2000].map(|length| columns_read(length, 1280)), [256, 512, 768, 1280, 1280]);
        assert_eq!([1, 257].map(|length| columns_read(length, 384)), [256, 384]);
        assert_eq!([1, 60].map(|length| columns_read(length, 48)), [48, 48]);
    }

    #[test]
    fn a_cache_has_all_columns_that_calls_write() {
        let (sampler, ..) = Sampler::of(&Sampling::Greedy, 10, false);
        for (longest_prompt, max_completion_length, columns) in [(16, 112, 128), (16, 113, 256), (256, 1024, 1280)] {
            let sizes = RolloutSizes {
                prompts: 2,
                longest_prompt,
                num_generations: 8,
                max_completion_length,
                conversations: false,
            };
            assert_eq!(sizes.shape(RolloutOptions::default(), sampler, &AxisRules::default()).columns.all, columns);
        }
    }

    #[test]
    fn a_cache_of_a_sliding_window_does_not_grow_with_the_sequence() {
        let (sampler, ..) = Sampler::of(&Sampling::Greedy, 10, false);
        let of = |max_completion_length, conversations, window| {
            let sizes = RolloutSizes {
                prompts: 2,
                longest_prompt: 16,
                num_generations: 8,
                max_completion_length,
                conversations,
            };
            sizes.shape(RolloutOptions::default(), sampler, &AxisRules::default()).columns.of(window)
        };
        // 511 earlier tokens and 16 of a call; in conversations 16 that a turn drops, and 64 of an extension.
        for (length, expected) in [(100, 128), (1000, 640), (10_000, 640)] {
            assert_eq!(of(length, false, Some(512)), expected);
        }
        assert_eq!([of(10_000, true, Some(512)), of(10_000, true, Some(561))], [640, 640]);
        assert_eq!([of(10_000, true, Some(562)), of(10_000, false, Some(562))], [768, 640]);
        assert_eq!([of(10_000, false, Some(1)), of(10_000, false, Some(20_000))], [16, of(10_000, false, None)]);
    }

    #[test]
    fn decode_loops_cover_short_and_long_sequences() {
        let config = ModelConfig { max_position_embeddings: 1024, ..ModelConfig::default() };
        let sizes = RolloutSizes {
            prompts: 8,
            longest_prompt: 100,
            num_generations: 8,
            max_completion_length: 400,
            conversations: false,
        };
        let (decoder, options) = (Decoder::new(&config, Compute::Bf16), RolloutOptions::default());
        let modules = RolloutPrograms::of(
            Kind::Tpu,
            &decoder,
            Dtype::Bf16,
            options,
            sizes,
            RequestOptions::new(&Sampling::Greedy, 2),
        )
        .unwrap();
        assert_eq!(modules.decode.iter().map(|(columns, _)| *columns).collect::<Vec<_>>(), [256, 512]);
        assert!(modules.prefill.to_string().contains("8x128xi32"));
    }
}
