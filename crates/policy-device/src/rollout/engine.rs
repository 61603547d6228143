//! Completions of a request: programs in buckets of sizes, run until every sample has ended.

use super::decode::Decode;
use super::prefill::{self, Prompts};
use super::sampling::{NUMBERS, Sampler};
use super::sizes::{RolloutSizes, columns_read, places};
use super::slots::{Admission, Slots};
use super::state::{Shape, State};
use super::threefry::sample_key;
use crate::decoder::{Compute, Decoder};
use crate::error::Result;
use crate::runtime::{Program, Programs, Runtime};
use crate::weights::DeviceWeights;
use backend_tpu::plugins::Kind;
use models::ModelConfig;
use pjrt::{Argument, Buffer};
use policy::{Completion, RolloutRequest, Sampling};
use stablehlo::Dtype;
use std::ops::Range;
use std::sync::Arc;

/// How a rollout uses its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RolloutOptions {
    /// The largest number of sequences that decode side by side: memory for their keys and values against speed.
    pub slots: usize,
    /// The largest number of tokens of each that one call of the decode program adds. In between, sequences that have ended make room
    /// for others. Another number sums attention in another order, and so changes the last digits of what is computed.
    pub tokens_per_call: usize,
}

impl Default for RolloutOptions {
    fn default() -> Self {
        Self { slots: 64, tokens_per_call: 16 }
    }
}

/// Whether the decode loop of devices of this kind is given weights and cache as products read them. XLA's CPU copies whatever a loop slices
/// for a product, in every turn the weights and the cache of every layer, and packs a matrix that is summed over its innermost dimension
/// number by number, which takes eight times as long as the product of a few rows itself. TPUs and GPUs read slices where they are, and
/// lay tensors out as they like.
pub(super) fn prepares_operands(kind: Kind) -> bool {
    kind == Kind::Cpu
}

/// Samples completions of prompts with weights on a device. The [front page](crate) has an example.
///
/// Its programs are compiled for the sizes that requests have, rounded up so that few of them come to be, and kept.
#[derive(Debug)]
pub struct DeviceRollout {
    pub(super) runtime: Runtime,
    pub(super) decoder: Decoder,
    pub(super) options: RolloutOptions,
    programs: Programs<Key>,
}

/// What distinguishes the programs of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Empty(Shape),
    Prefill(Prompts, Dtype),
    Admit(Shape, Prompts),
    Decode(Decode, Dtype),
    Follow(Decode, Dtype),
}

/// Prompts with keys and values, of which samples may still begin.
pub(super) struct Prefilled {
    range: Range<usize>,
    prompts: Prompts,
    buffers: Vec<Buffer>,
}

/// What the decode program gets besides weights and state.
struct DecodeArguments {
    sampler: Sampler,
    stop_ids: usize,
    buffers: Vec<Buffer>,
}

impl DeviceRollout {
    /// A rollout of decoders of this configuration.
    ///
    /// # Errors
    /// [`crate::Error::Model`] for an illegal configuration, [`crate::Error::Policy`] for options without slots or tokens.
    pub fn new(runtime: &Runtime, config: &ModelConfig, compute: Compute, options: RolloutOptions) -> Result<Self> {
        Self::of(runtime, Decoder::new(config, compute), options)
    }

    /// A rollout of `decoder`, whose adapters act where it has some.
    ///
    /// # Errors
    /// As [`DeviceRollout::new`]; [`crate::Error::Policy`] for a decoder that is split over a mesh.
    pub fn of(runtime: &Runtime, decoder: Decoder, options: RolloutOptions) -> Result<Self> {
        decoder.config().validate()?;
        if options.slots == 0 || options.tokens_per_call == 0 {
            let found = format!("{} and {}", options.slots, options.tokens_per_call);
            return Err(policy::Error::argument("RolloutOptions", "at least one slot and token per call", found).into());
        }
        if let Some(rules) = decoder.axis_rules() {
            let found = format!("one that is split over {} devices", rules.mesh().devices());
            return Err(policy::Error::argument("DeviceRollout", "a decoder for one device", found).into());
        }
        // Of a value head nothing is sampled.
        let (runtime, decoder) = (runtime.clone(), decoder.without_value_head());
        Ok(Self { runtime, decoder, options, programs: Programs::new() })
    }

    /// `num_generations` completions per prompt, those of one prompt next to each other. What a sample becomes depends on its prompt,
    /// its number and the request's sampling only: not on the samples beside it, on the number of slots, or on the slot that it gets.
    /// `weights` are those of the decoder's [`Decoder::parameters`].
    ///
    /// # Errors
    /// [`crate::Error::Policy`] for a request without prompts, generations or tokens, with an empty prompt, or too long for the model;
    /// [`crate::Error::Model`] for a token that the model does not have; [`crate::Error::NotFinite`];
    /// [`crate::Error::Rollout`] for a device that ends no completion; [`crate::Error::TimedOut`]; [`crate::Error::Device`].
    pub fn generate(&mut self, weights: &DeviceWeights, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        self.check(request)?;
        let (sampler, numbers, top_k) = Sampler::of(&request.sampling, self.decoder.config().vocab_size);
        let sizes = RolloutSizes::of(request);
        let shape = sizes.shape(self.options, sampler);
        let at_once = sizes.prompts_at_once(shape);
        let decoding = self.decode_arguments(request, sampler, numbers, top_k)?;
        let mut slots = Slots::new(request, shape.slots, self.decoder.config().vocab_size);
        let empty = self.program(Key::Empty(shape))?;
        let mut state = State { shape, buffers: empty.run(vec![])? };
        let mut prefilled: Option<Prefilled> = None;
        loop {
            while let Some(prompt) = slots.waiting() {
                if prefilled.as_ref().is_none_or(|prefilled| !prefilled.range.contains(&prompt)) {
                    // The memory of the last ones is free before there are others.
                    drop(prefilled.take());
                    let end = (prompt + at_once).min(request.prompts.len());
                    prefilled = Some(self.prefill(weights, request, shape, prompt..end, at_once)?);
                }
                let Some(prefilled) = &prefilled else { break };
                let admissions = slots.admit(prefilled.range.end);
                state = self.admit(state, prefilled, request, &admissions)?;
            }
            let Some(longest) = slots.longest() else { return Ok(slots.finish()) };
            state = self.decode(weights, state, &decoding, longest)?;
            // Ends every sample, or this loop, after the calls that the longest completion needs.
            slots.harvest(&state, self.options.tokens_per_call)?;
        }
    }

    /// Checks that a request is legal.
    fn check(&self, request: &RolloutRequest<'_>) -> Result<()> {
        let (config, prompts) = (self.decoder.config(), request.prompts);
        if prompts.is_empty() || request.num_generations == 0 || request.max_completion_length == 0 {
            let found = format!("{} x {} x {}", prompts.len(), request.num_generations, request.max_completion_length);
            return Err(policy::Error::argument("generate", "at least one prompt, generation and token", found).into());
        }
        if let Some(prompt) = prompts.iter().position(Vec::is_empty) {
            let found = format!("prompt {prompt} without tokens");
            return Err(policy::Error::argument("generate", "at least one token per prompt", found).into());
        }
        if let Sampling::Random { temperature, processors, .. } = &request.sampling {
            processors.validate()?;
            if !(temperature.is_finite() && *temperature > 0.0) {
                return Err(policy::Error::argument("temperature", "a number above 0", temperature).into());
            }
        }
        let (length, limit) = (RolloutSizes::of(request).longest(), config.max_position_embeddings);
        if length > limit {
            return Err(policy::Error::TooLong { what: "prompt with its completion", length, limit }.into());
        }
        match prompts.iter().flatten().find(|id| **id as usize >= config.vocab_size) {
            Some(&id) => Err(models::Error::UnknownToken { id, vocab_size: config.vocab_size }.into()),
            None => Ok(()),
        }
    }

    /// Keys and values of the prompts of `range`, which are at most `at_once`.
    pub(super) fn prefill(
        &mut self,
        weights: &DeviceWeights,
        request: &RolloutRequest<'_>,
        shape: Shape,
        range: Range<usize>,
        at_once: usize,
    ) -> Result<Prefilled> {
        let of_range = &request.prompts[range.clone()];
        let longest = of_range.iter().map(Vec::len).max().unwrap_or(1);
        let prompts = Prompts::of(at_once, longest, shape);
        let rows = prompts.rows;
        let mut ids = vec![0; rows * prompts.tokens];
        let mut lengths = vec![1; rows];
        for (i, prompt) in of_range.iter().enumerate() {
            lengths[i] = prompt.len() as i32;
            let row = &mut ids[i * prompts.tokens..][..prompt.len()];
            row.iter_mut().zip(prompt).for_each(|(to, id)| *to = *id as i32);
        }
        let ids = self.runtime.upload(&ids, &[rows, prompts.tokens])?;
        let lengths = self.runtime.upload(&lengths, &[rows])?;
        let program = self.program(Key::Prefill(prompts, weights.dtype()))?;
        let mut arguments = weights.arguments();
        arguments.extend([ids.into(), lengths.into()]);
        tracing::debug!(prefill_rows = rows, tokens = prompts.tokens, prompts = range.len(), "prompts are prefilled");
        Ok(Prefilled { range, prompts, buffers: program.run(arguments)? })
    }

    /// The state with samples that begin.
    pub(super) fn admit(
        &mut self,
        state: State,
        prefilled: &Prefilled,
        request: &RolloutRequest<'_>,
        admissions: &[Admission],
    ) -> Result<State> {
        let (shape, runtime) = (state.shape, self.runtime.clone());
        let (mut slots, mut sources) = (vec![0; shape.slots], vec![0; shape.slots]);
        let (mut begins, mut last, mut length) = (vec![false; shape.slots], vec![0; shape.slots], vec![1; shape.slots]);
        let mut random = vec![0_u32; 2 * shape.slots];
        for (i, admission) in admissions.iter().enumerate() {
            let (slot, prompt) = (admission.slot, &request.prompts[admission.prompt]);
            (slots[i], sources[i]) = (slot as i32, (admission.prompt - prefilled.range.start) as i32);
            begins[slot] = true;
            last[slot] = prompt.last().map_or(0, |id| *id as i32);
            length[slot] = prompt.len() as i32;
            if let Sampling::Random { seed, purpose, step, first, .. } = request.sampling {
                let key = sample_key(seed, purpose, step, first + admission.sample as u64);
                random[2 * slot..2 * slot + 2].copy_from_slice(&key);
            }
        }
        let program = self.program(Key::Admit(shape, prefilled.prompts))?;
        let of_slots = [shape.slots];
        let mut arguments: Vec<Argument<'_>> = state.buffers.into_iter().map(Argument::from).collect();
        arguments.extend(prefilled.buffers.iter().map(Argument::from));
        arguments.extend([
            runtime.upload(&[admissions.len() as i32], &[])?.into(),
            runtime.upload(&slots, &of_slots)?.into(),
            runtime.upload(&sources, &of_slots)?.into(),
            runtime.upload(&begins, &of_slots)?.into(),
            runtime.upload(&last, &of_slots)?.into(),
            runtime.upload(&length, &of_slots)?.into(),
            runtime.upload(&random, &[shape.slots, 2])?.into(),
        ]);
        Ok(State { shape, buffers: program.run(arguments)? })
    }

    /// The arguments of the decode program that are the same for all calls of a request.
    fn decode_arguments(
        &self,
        request: &RolloutRequest<'_>,
        sampler: Sampler,
        numbers: [f32; NUMBERS],
        top_k: i32,
    ) -> Result<DecodeArguments> {
        // A token id that no i32 holds is one that no model has.
        let mut stop_ids: Vec<i32> = request.stop_ids.iter().filter_map(|id| i32::try_from(*id).ok()).collect();
        stop_ids.resize(places(stop_ids.len()), -1);
        let length = i32::try_from(request.max_completion_length).unwrap_or(i32::MAX);
        let buffers = vec![
            self.runtime.upload(&numbers, &[NUMBERS])?,
            self.runtime.upload(&[top_k], &[])?,
            self.runtime.upload(&stop_ids, &[stop_ids.len()])?,
            self.runtime.upload(&[length], &[])?,
        ];
        Ok(DecodeArguments { sampler, stop_ids: stop_ids.len(), buffers })
    }

    /// The state after one call of the decode program; no sequence is longer than `longest` before.
    fn decode(
        &mut self,
        weights: &DeviceWeights,
        state: State,
        arguments: &DecodeArguments,
        longest: usize,
    ) -> Result<State> {
        let shape = state.shape;
        let columns_read = columns_read(longest, shape.columns);
        let &DecodeArguments { sampler, stop_ids, .. } = arguments;
        let (turns, prepared) = (self.options.tokens_per_call, prepares_operands(self.runtime.kind()));
        let decode = Decode { shape, columns_read, turns, sampler, prepared, stop_ids };
        let program = self.program(Key::Decode(decode, weights.dtype()))?;
        let mut all = weights.arguments();
        all.extend(state.buffers.into_iter().map(Argument::from));
        all.extend(arguments.buffers.iter().map(Argument::from));
        Ok(State { shape, buffers: program.run(all)? })
    }

    /// The program of `key`, compiled when it is first asked for.
    pub(super) fn program(&mut self, key: Key) -> Result<Arc<Program>> {
        let Self { runtime, decoder, programs, .. } = self;
        let (config, compute) = (decoder.config(), decoder.compute());
        programs.get(runtime, key, |key| match *key {
            Key::Empty(shape) => shape.empty(config, compute),
            Key::Prefill(prompts, dtype) => prefill::module(decoder, dtype, prompts),
            Key::Admit(shape, prompts) => prefill::admit(decoder, shape, prompts),
            Key::Decode(decode, dtype) => decode.module(decoder, dtype),
            Key::Follow(decode, dtype) => decode.follow_module(decoder, dtype),
        })
    }
}
