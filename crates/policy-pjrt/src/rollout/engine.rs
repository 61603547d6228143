//! Runs the programs of a rollout until every sample of a request is finished. Sizes are rounded up, so that few executables are compiled.

use super::check::check_ids;
use super::columns::columns_read;
use super::decode::{Decode, DecodeLayout};
use super::extend::{self, Extend, TOKENS};
use super::options::RolloutOptions;
use super::prefill::{self, Prompts};
use super::routed;
use super::sampling::{NUMBERS, Sampler};
use super::sizes::{RolloutSizes, places};
use super::slots::{Admission, Records, Slots};
use super::state::{Shape, State};
use super::threefry::sample_key;
use crate::decoder::{Axis, Compute, Decoder};
use crate::error::Result;
use crate::program::{Program, Programs};
use crate::runtime::Runtime;
use crate::weights::DeviceWeights;
use crate::{Argument, DeviceTensor};
use grpo_models::ModelConfig;
use grpo_policy::{Completion, RolloutRequest, Sampling};
use grpo_stablehlo::Dtype;
use std::sync::Arc;

/// A sampler of completions with weights on a device. The [crate documentation](crate) has an example.
///
/// Its programs are compiled for the sizes of a request, rounded up so that few executables are compiled, and cached.
#[derive(Debug)]
pub struct DeviceRollout {
    pub(super) runtime: Runtime,
    pub(super) decoder: Decoder,
    pub(super) options: RolloutOptions,
    programs: Programs<Key>,
    turns: Option<Turns>,
}

/// The KV cache after a request with [`RolloutRequest::turn`], for the next such request.
#[derive(Debug)]
struct Turns {
    state: State,
    /// The tokens of each slot that have keys and values.
    cached: Vec<Vec<u32>>,
    /// The experts `[tokens, L, k]` of these tokens, if the request records them.
    routed: Option<Vec<Vec<u16>>>,
}

/// A sample whose prompt begins with tokens that are in the KV cache of a slot.
#[derive(Clone, Copy, Debug)]
struct Continuation {
    slot: usize,
    sample: usize,
    /// The number of tokens of its prompt that have keys and values in the slot.
    cached: usize,
}

/// A sample that begins in a slot after `length` tokens.
struct Beginning {
    slot: usize,
    sample: usize,
    last: u32,
    length: usize,
}

/// Identifies an executable of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Empty(Shape),
    Prefill(Prompts, Dtype),
    Admit(Shape, Prompts),
    Decode(Decode, Dtype),
    Follow(Decode, Dtype),
    Resume(Shape),
    Extend(Extend, Dtype),
}

/// Prompts with their keys and values, and samples that have not begun yet.
pub(super) struct Prefilled {
    /// The indices of the prompts in the request, one for each row.
    indices: Vec<usize>,
    prompts: Prompts,
    tensors: Vec<DeviceTensor>,
    /// The experts of all tokens, `[L, P, T, k]`, if the request records them.
    routed: Option<Vec<i32>>,
}

/// Arguments of the decode program other than weights and state.
struct DecodeArguments {
    sampler: Sampler,
    routed_experts: bool,
    stop_ids: usize,
    tensors: Vec<DeviceTensor>,
}

impl DeviceRollout {
    /// Creates a rollout for decoders of this configuration, sharded by the axis rules of the runtime.
    ///
    /// # Errors
    /// [`crate::Error::Model`] for an invalid configuration, [`crate::Error::Policy`] for options without slots or tokens.
    pub fn new(runtime: &Runtime, config: &ModelConfig, compute: Compute, options: RolloutOptions) -> Result<Self> {
        Self::of(runtime, Decoder::new(config, compute), options)
    }

    /// Creates a rollout for `decoder`, including its adapters, sharded by the axis rules of the runtime.
    ///
    /// # Errors
    /// See [`DeviceRollout::new`]; [`crate::Error::Split`] if the decoder does not shard evenly.
    pub fn of(runtime: &Runtime, decoder: Decoder, options: RolloutOptions) -> Result<Self> {
        decoder.config().validate()?;
        if options.slots == 0 || options.tokens_per_call == 0 {
            let found = format!("{} and {}", options.slots, options.tokens_per_call);
            return Err(
                grpo_policy::Error::argument("RolloutOptions", "at least one slot and token per call", found).into()
            );
        }
        let runtime = runtime.for_model(decoder.config());
        // Sampling does not use the value head.
        let decoder = decoder.without_value_head().with_axis_rules(runtime.axis_rules().for_rollout())?;
        Ok(Self { runtime, decoder, options, programs: Programs::new(), turns: None })
    }

    /// Returns the devices with their mesh.
    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Drops the KV cache of the last request. Call it when the weights change, or to free the memory.
    pub fn forget_turns(&mut self) {
        self.turns = None;
    }

    /// Samples `num_generations` completions per prompt. Completions of one prompt are contiguous. A completion depends only on its prompt,
    /// its sample index and the request's sampling; not on other samples, the number of slots, or its slot. `weights` must match the
    /// decoder's [`Decoder::parameters`].
    ///
    /// After a request with [`RolloutRequest::turn`], the KV cache stays on the device. If a prompt of the next such request begins with the cached
    /// tokens of a slot, the sample uses this slot, and only the new tokens of the prompt are processed. With a repetition penalty, the cache is
    /// dropped. The state of a Gated DeltaNet cannot go back: if a stop condition drops tokens that it has, the next turn processes its whole
    /// prompt.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] for a request without prompts, generations or tokens, with an empty prompt, or too long for the model;
    /// [`crate::Error::Model`] for an unknown token; [`crate::Error::NotFinite`]; [`crate::Error::Rollout`] if the device finishes no
    /// completion; [`crate::Error::TimedOut`]; [`crate::Error::Device`].
    pub fn generate(&mut self, weights: &DeviceWeights, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        self.check(request)?;
        let (sampler, numbers, top_k) =
            Sampler::of(&request.sampling, self.decoder.config().vocab_size, request.return_sampling_mask);
        let sizes = RolloutSizes::of(request);
        let decoding = self.decode_arguments(request, sampler, numbers, top_k)?;
        let needed = sizes.shape(self.options, sampler, self.runtime.axis_rules());
        // A state that does not fit is freed before the next one is made.
        let records = request.return_routed_experts;
        let earlier = self.turns.take().filter(|turns| request.turn.is_some() && turns.fit(needed));
        let Turns { mut state, cached, routed } = match earlier.filter(|turns| turns.routed.is_some() == records) {
            Some(turns) => turns,
            None => {
                let tensors = self.program(Key::Empty(needed))?.run(vec![])?;
                let cached = vec![vec![]; needed.slots];
                let routed = records.then(|| vec![vec![]; needed.slots]);
                Turns { state: State { shape: needed, tensors }, cached, routed }
            }
        };
        let shape = state.shape;
        let at_once = sizes.prompts_at_once(shape);
        let continued = continuations(request, &cached);
        let mut slots = Slots::new(request, cached, routed.unwrap_or_default(), self.decoder.config());
        if !continued.is_empty() {
            continued.iter().for_each(|continuation| slots.resume(continuation.slot, continuation.sample));
            state = self.resume(weights, state, request, &continued, &mut slots)?;
        }
        let mut prefilled: Option<Prefilled> = None;
        loop {
            while let Some(prompt) = slots.waiting() {
                if prefilled.as_ref().is_none_or(|prefilled| !prefilled.indices.contains(&prompt)) {
                    // Free the previous prompts' memory before the next prefill.
                    drop(prefilled.take());
                    prefilled = Some(self.prefill(weights, request, shape, slots.next_prompts(at_once), at_once)?);
                }
                let Some(prefilled) = &prefilled else { break };
                let admissions = slots.admit(&prefilled.indices);
                if let Some(record) = &prefilled.routed {
                    for Admission { sample, prompt, row, .. } in &admissions {
                        let count = request.prompts[*prompt].len() - 1;
                        slots.record_experts(*sample, &self.experts_of(record, prefilled.prompts.tokens, *row, count));
                    }
                }
                state = self.admit(state, prefilled, request, &admissions)?;
            }
            let Some(longest) = slots.longest() else { break };
            let (next, records) = self.decode(weights, state, &decoding, &slots.limits(), longest)?;
            state = next;
            // Fails after as many calls as the longest completion needs, so this loop ends.
            slots.harvest(&self.runtime, &state, &records, self.options.tokens_per_call)?;
        }
        let (completions, cached, routed) = slots.finish();
        // The state of the repetition penalty lacks the tokens between two turns.
        if request.turn.is_some() && !shape.seen {
            self.turns = Some(Turns { state, cached, routed: records.then_some(routed) });
        }
        Ok(completions)
    }

    /// Begins samples in the slots that have their prompts in the KV cache, and processes the new tokens of these prompts.
    fn resume(
        &mut self,
        weights: &DeviceWeights,
        state: State,
        request: &RolloutRequest<'_>,
        continued: &[Continuation],
        of_samples: &mut Slots<'_>,
    ) -> Result<State> {
        let (shape, runtime) = (state.shape, self.runtime.clone());
        let beginnings = continued.iter().map(|&Continuation { slot, sample, cached }| {
            let last = request.prompts[sample][cached];
            Beginning { slot, sample, last, length: cached + 1 }
        });
        let program = self.program(Key::Resume(shape))?;
        let mut arguments: Vec<Argument<'_>> = state.tensors.into_iter().map(Argument::from).collect();
        arguments.extend(self.begin(request, shape, beginnings)?);
        let mut state = State { shape, tensors: program.run(arguments)? };
        let mut continued = continued.to_vec();
        // The decode loop processes the last token of a prompt.
        let left = |one: &Continuation| request.prompts[one.sample].len() - 1 - one.cached;
        while let Some(most) = continued.iter().map(left).max().filter(|most| *most > 0) {
            let tokens = TOKENS.into_iter().find(|tokens| most <= *tokens).unwrap_or(TOKENS[TOKENS.len() - 1]);
            let longest = continued.iter().map(|one| one.cached + 1).max().unwrap_or(1);
            let (mut ids, mut counts, mut behind) =
                (vec![0; shape.slots * tokens], vec![0; shape.slots], vec![0; shape.slots]);
            let taken: Vec<usize> = continued.iter().map(|one| left(one).min(tokens)).collect();
            for (one, count) in continued.iter_mut().zip(&taken) {
                let (count, prompt) = (*count, &request.prompts[one.sample]);
                let row = &mut ids[one.slot * tokens..][..count];
                row.iter_mut().zip(&prompt[one.cached..]).for_each(|(to, id)| *to = *id as i32);
                one.cached += count;
                (counts[one.slot], behind[one.slot]) = (count as i32, prompt[one.cached] as i32);
            }
            let routed_experts = request.return_routed_experts;
            let columns_read = columns_read(longest, shape.columns.all);
            let extend = Extend { shape, columns_read, tokens, routed_experts };
            let program = self.program(Key::Extend(extend, weights.dtype()))?;
            let mut arguments = weights.arguments();
            arguments.extend(state.tensors.into_iter().map(Argument::from));
            arguments.extend([
                runtime.upload(&ids, &[shape.slots, tokens])?.into(),
                runtime.upload(&counts, &[shape.slots])?.into(),
                runtime.upload(&behind, &[shape.slots])?.into(),
            ]);
            let mut tensors = program.run(arguments)?;
            if let Some(record) = tensors.pop_if(|_| routed_experts) {
                let record: Vec<i32> = runtime.read(&record, "the experts of prompts")?;
                for (one, count) in continued.iter().zip(&taken) {
                    of_samples.record_experts(one.sample, &self.experts_of(&record, tokens, one.slot, *count));
                }
            }
            state = State { shape, tensors };
            tracing::debug!(tokens, sequences = continued.len(), "conversations are extended");
        }
        Ok(state)
    }

    /// Uploads the arguments of samples that begin.
    fn begin(
        &self,
        request: &RolloutRequest<'_>,
        shape: Shape,
        beginnings: impl IntoIterator<Item = Beginning>,
    ) -> Result<[Argument<'static>; 4]> {
        let (mut begins, mut last, mut length) = (vec![false; shape.slots], vec![0; shape.slots], vec![1; shape.slots]);
        let mut random = vec![0_u32; 2 * shape.slots];
        for beginning in beginnings {
            let slot = beginning.slot;
            (begins[slot], last[slot], length[slot]) = (true, beginning.last as i32, beginning.length as i32);
            if let Sampling::Random { seed, purpose, step, first, .. } = request.sampling {
                let key = sample_key(seed, purpose, step, first + request.stream(beginning.sample));
                random[2 * slot..2 * slot + 2].copy_from_slice(&key);
            }
        }
        let (runtime, of_slots) = (&self.runtime, [shape.slots]);
        Ok([
            runtime.upload(&begins, &of_slots)?.into(),
            runtime.upload(&last, &of_slots)?.into(),
            runtime.upload(&length, &of_slots)?.into(),
            runtime.upload(&random, &[shape.slots, 2])?.into(),
        ])
    }

    /// Checks that a request is valid.
    fn check(&self, request: &RolloutRequest<'_>) -> Result<()> {
        let (config, prompts) = (self.decoder.config(), request.prompts);
        request.check()?;
        if let Some(prompt) = prompts.iter().position(Vec::is_empty) {
            let found = format!("prompt {prompt} without tokens");
            return Err(grpo_policy::Error::argument("generate", "at least one token per prompt", found).into());
        }
        if let Sampling::Random { temperature, processors, .. } = &request.sampling {
            processors.validate()?;
            if !(temperature.is_finite() && *temperature > 0.0) {
                return Err(grpo_policy::Error::argument("temperature", "a number above 0", temperature).into());
            }
        }
        let (length, limit) = (RolloutSizes::of(request).longest(), config.max_position_embeddings);
        if length > limit {
            return Err(grpo_policy::Error::TooLong { what: "prompt with its completion", length, limit }.into());
        }
        if request.return_routed_experts && config.experts.is_none() {
            let expected = "a model with a mixture of experts, for routed experts";
            return Err(grpo_policy::Error::argument("generate", expected, "a model without").into());
        }
        Ok(check_ids(config, prompts.iter().flatten())?)
    }

    /// Returns the experts `[count, L, k]` of the first tokens of a row of `record` `[L, B, T, k]`, for rows of `tokens` tokens.
    fn experts_of(&self, record: &[i32], tokens: usize, row: usize, count: usize) -> Vec<u16> {
        let config = self.decoder.config();
        let top = config.experts.as_ref().map_or(1, |experts| experts.num_experts_per_tok);
        let of_rows = (config.routers() * tokens * top).max(1);
        routed::of_row(record, [config.routers(), record.len() / of_rows, tokens, top], row, count)
    }

    /// Computes keys and values of the prompts with these indices, at most `at_once`.
    pub(super) fn prefill(
        &mut self,
        weights: &DeviceWeights,
        request: &RolloutRequest<'_>,
        shape: Shape,
        indices: Vec<usize>,
        at_once: usize,
    ) -> Result<Prefilled> {
        let chosen = || indices.iter().map(|index| &request.prompts[*index]);
        let longest = chosen().map(Vec::len).max().unwrap_or(1);
        let routed_experts = request.return_routed_experts;
        let prompts = Prompts { routed_experts, ..Prompts::of(at_once, longest, shape, self.runtime.axis_rules()) };
        let rows = prompts.rows;
        let mut ids = vec![0; rows * prompts.tokens];
        let mut lengths = vec![1; rows];
        for (i, prompt) in chosen().enumerate() {
            lengths[i] = prompt.len() as i32;
            let row = &mut ids[i * prompts.tokens..][..prompt.len()];
            row.iter_mut().zip(prompt).for_each(|(to, id)| *to = *id as i32);
        }
        let ids = self.runtime.upload_sharded(&ids, &[rows, prompts.tokens], &[Some(Axis::Batch), None])?;
        let lengths = self.runtime.upload(&lengths, &[rows])?;
        let program = self.program(Key::Prefill(prompts, weights.dtype()))?;
        let mut arguments = weights.arguments();
        arguments.extend([ids.into(), lengths.into()]);
        tracing::debug!(prefill_rows = rows, tokens = prompts.tokens, prompts = indices.len(), "prompts are prefilled");
        let mut tensors = program.run(arguments)?;
        let record = tensors.pop_if(|_| routed_experts);
        let routed = record.map(|record| self.runtime.read(&record, "the experts of prompts")).transpose()?;
        Ok(Prefilled { indices, prompts, tensors, routed })
    }

    /// Places new samples in slots and returns the next state.
    pub(super) fn admit(
        &mut self,
        state: State,
        prefilled: &Prefilled,
        request: &RolloutRequest<'_>,
        admissions: &[Admission],
    ) -> Result<State> {
        let (shape, runtime) = (state.shape, self.runtime.clone());
        // Every shard of slots has a list of its own.
        let shards = runtime.axis_rules().parts(Axis::Batch);
        let slots_of_shard = shape.slots / shards;
        let (mut counts, mut slots, mut sources) = (vec![0; shards], vec![0; shape.slots], vec![0; shape.slots]);
        for admission in admissions {
            let shard = admission.slot / slots_of_shard;
            let place = shard * slots_of_shard + counts[shard] as usize;
            slots[place] = (admission.slot % slots_of_shard) as i32;
            sources[place] = admission.row as i32;
            counts[shard] += 1_i32;
        }
        let beginnings = admissions.iter().map(|&Admission { slot, sample, prompt, .. }| {
            let prompt = &request.prompts[prompt];
            Beginning { slot, sample, last: prompt.last().copied().unwrap_or(0), length: prompt.len() }
        });
        let program = self.program(Key::Admit(shape, Prompts { routed_experts: false, ..prefilled.prompts }))?;
        let of_slots = [shape.slots];
        let mut arguments: Vec<Argument<'_>> = state.tensors.into_iter().map(Argument::from).collect();
        arguments.extend(prefilled.tensors.iter().map(Argument::from));
        arguments.extend([
            runtime.upload_sharded(&counts, &[shards], &[Axis::Batch])?.into(),
            runtime.upload_sharded(&slots, &of_slots, &[Axis::Batch])?.into(),
            runtime.upload_sharded(&sources, &of_slots, &[Axis::Batch])?.into(),
        ]);
        arguments.extend(self.begin(request, shape, beginnings)?);
        Ok(State { shape, tensors: program.run(arguments)? })
    }

    /// Uploads the arguments of the decode program that are the same for all calls of a request.
    fn decode_arguments(
        &self,
        request: &RolloutRequest<'_>,
        sampler: Sampler,
        numbers: [f32; NUMBERS],
        top_k: i32,
    ) -> Result<DecodeArguments> {
        // Token ids above `i32::MAX` are in no vocabulary.
        let mut stop_ids: Vec<i32> = request.stop_ids.iter().filter_map(|id| i32::try_from(*id).ok()).collect();
        stop_ids.resize(places(stop_ids.len()), -1);
        let tensors = vec![
            self.runtime.upload(&numbers, &[NUMBERS])?,
            self.runtime.upload(&[top_k], &[])?,
            self.runtime.upload(&stop_ids, &[stop_ids.len()])?,
        ];
        let routed_experts = request.return_routed_experts;
        Ok(DecodeArguments { sampler, routed_experts, stop_ids: stop_ids.len(), tensors })
    }

    /// Runs one call of the decode program, and returns the records of its tokens, if requested. No sequence is longer than `longest`
    /// before it; `limits` has the largest number of completion tokens of each slot.
    fn decode(
        &mut self,
        weights: &DeviceWeights,
        state: State,
        arguments: &DecodeArguments,
        limits: &[i32],
        longest: usize,
    ) -> Result<(State, Records)> {
        let (shape, routed_experts) = (state.shape, arguments.routed_experts);
        let decode = self.decode_program(shape, arguments.sampler, longest, arguments.stop_ids, routed_experts);
        let program = self.program(Key::Decode(decode, weights.dtype()))?;
        let mut all = weights.arguments();
        all.extend(state.tensors.into_iter().map(Argument::from));
        all.extend(arguments.tensors.iter().map(Argument::from));
        all.push(self.runtime.upload(limits, &[limits.len()])?.into());
        let mut tensors = program.run(all)?;
        let routed = tensors.pop_if(|_| routed_experts);
        let masks = tensors.pop_if(|_| arguments.sampler.sampling_mask);
        Ok((State { shape, tensors }, Records { masks, routed }))
    }

    /// Returns the decode program for sequences of up to `longest` tokens.
    pub(super) fn decode_program(
        &self,
        shape: Shape,
        sampler: Sampler,
        longest: usize,
        stop_ids: usize,
        routed_experts: bool,
    ) -> Decode {
        let columns_read = columns_read(longest, shape.columns.all);
        let layout = DecodeLayout::of(self.runtime.kind(), &self.decoder);
        let steps = self.options.tokens_per_call;
        Decode { shape, columns_read, steps, sampler, layout, stop_ids, routed_experts }
    }

    /// Returns the program of `key`; compiles it on first use.
    pub(super) fn program(&mut self, key: Key) -> Result<Arc<Program>> {
        let Self { runtime, decoder, programs, .. } = self;
        programs.get(runtime, key, |key| match *key {
            Key::Empty(shape) => shape.empty(decoder),
            Key::Prefill(prompts, dtype) => prefill::module(decoder, dtype, prompts),
            Key::Admit(shape, prompts) => prefill::admit(decoder, shape, prompts),
            Key::Decode(decode, dtype) => decode.module(decoder, dtype),
            Key::Follow(decode, dtype) => decode.follow_module(decoder, dtype),
            Key::Resume(shape) => extend::resume(decoder, shape),
            Key::Extend(extend, dtype) => extend.module(decoder, dtype),
        })
    }
}

impl Turns {
    /// Returns `true` if the state is large enough for a request that needs a state of shape `needed`.
    fn fit(&self, needed: Shape) -> bool {
        let has = self.state.shape;
        has.slots >= needed.slots
            && has.columns.all >= needed.columns.all
            && has.columns.ahead >= needed.columns.ahead
            && has.tokens >= needed.tokens
            && has.seen == needed.seen
    }
}

/// Returns the samples of a request whose prompts begin with the tokens in the KV cache of a slot, given by slot.
fn continuations(request: &RolloutRequest<'_>, cached: &[Vec<u32>]) -> Vec<Continuation> {
    if request.num_generations != 1 {
        return vec![];
    }
    let mut free: Vec<bool> = cached.iter().map(|ids| !ids.is_empty()).collect();
    let samples = request.prompts.iter().enumerate().filter_map(|(sample, prompt)| {
        // The last token of a prompt is processed again.
        let begins = |slot: &usize| free[*slot] && prompt[..prompt.len() - 1].starts_with(&cached[*slot]);
        let slot = (0..cached.len()).filter(begins).max_by_key(|slot| cached[*slot].len())?;
        free[slot] = false;
        Some(Continuation { slot, sample, cached: cached[slot].len() })
    });
    samples.collect()
}
