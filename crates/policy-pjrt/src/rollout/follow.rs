//! Logits of given tokens, computed as in sampling: prefill, admission, and decode steps with the KV cache.
//!
//! Legend: B slots, W decode steps of a call, V vocabulary.

use super::check::check_sequences;
use super::decode::{Decode, Forward};
use super::engine::{DeviceRollout, Key};
use super::options::RolloutOptions;
use super::sampling::Sampler;
use super::sizes::{RolloutSizes, places};
use super::slots::Admission;
use super::state::{SlotRows, State, StateValues};
use super::window::Window;
use crate::Argument;
use crate::decoder::{Decoder, DeltaStates};
use crate::error::Result;
use crate::leaves::{for_loop, leaves};
use crate::modules::program_error;
use crate::weights::DeviceWeights;
use grpo_policy::{RolloutRequest, Sampling};
use grpo_stablehlo::{Builder, Dtype, Module, TensorType, Value};

/// Number of sequences per call, each with W rows of logits.
const SEQUENCES: usize = 8;

/// A sequence or the beginning of one, divided into prompt and completion.
struct Followed<'a> {
    /// Index of the sequence.
    sequence: usize,
    ids: &'a [u32],
    /// Number of tokens of the prompt.
    prompt: usize,
}

impl Followed<'_> {
    /// Returns the number of positions that decode steps compute: the prompt's last token and all later ones.
    fn steps(&self) -> usize {
        self.ids.len() - self.prompt + 1
    }
}

impl DeviceRollout {
    /// Passes the logits `[V]` of every position of every sequence to `see`, with the index of the sequence and the position, computed as
    /// in sampling. Each sequence is decoded twice, once after a prompt of its first token, up to its middle, and once after a prompt of
    /// its first half. The logits therefore test both the prefill and the decode loop.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] for a sequence that is empty or too long, [`crate::Error::Model`] for an unknown token, [`crate::Error::Device`].
    pub fn logits(
        &mut self,
        weights: &DeviceWeights,
        sequences: &[&[u32]],
        mut see: impl FnMut(usize, usize, &[f32]),
    ) -> Result<()> {
        check_sequences(self.decoder.config(), sequences)?;
        let halves = sequences.iter().enumerate().flat_map(|(sequence, ids)| {
            let half = ids.len().div_ceil(2);
            [Followed { sequence, ids: &ids[..half - 1], prompt: 1 }, Followed { sequence, ids, prompt: half }]
        });
        // A sequence of one or two tokens has no first part.
        let halves: Vec<Followed<'_>> = halves.filter(|followed| followed.prompt <= followed.ids.len()).collect();
        halves.chunks(SEQUENCES).try_for_each(|part| self.follow(weights, part, &mut see))
    }

    fn follow(
        &mut self,
        weights: &DeviceWeights,
        all: &[Followed<'_>],
        see: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<()> {
        let (runtime, vocab) = (self.runtime.clone(), self.decoder.config().vocab_size);
        let prompts: Vec<Vec<u32>> = all.iter().map(|followed| followed.ids[..followed.prompt].to_vec()).collect();
        let tokens_per_call = self.options.tokens_per_call;
        let steps = all.iter().map(Followed::steps).max().unwrap_or(0).next_multiple_of(tokens_per_call);
        let request = RolloutRequest {
            prompts: &prompts,
            num_generations: 1,
            max_completion_length: steps,
            stop_ids: &[],
            stop: None,
            sampling: Sampling::Greedy,
            return_sampling_mask: false,
            return_routed_experts: false,
            turn: None,
        };
        let (sampler, ..) = Sampler::of(&request.sampling, vocab, false);
        let sizes = RolloutSizes::of(&request);
        let shape = sizes.shape(RolloutOptions { slots: SEQUENCES, ..self.options }, sampler, runtime.axis_rules());
        let prefilled = self.prefill(weights, &request, shape, (0..all.len()).collect(), all.len())?;
        let admissions: Vec<Admission> =
            (0..all.len()).map(|i| Admission { slot: i, sample: i, prompt: i, row: i }).collect();
        let empty = self.program(Key::Empty(shape))?.run(vec![])?;
        let mut state = self.admit(State { shape, tensors: empty }, &prefilled, &request, &admissions)?;
        for done in (0..steps).step_by(tokens_per_call) {
            let decode = self.decode_program(shape, sampler, sizes.longest_prompt + done, places(0), false);
            let mut next = vec![0; shape.slots * tokens_per_call];
            for (row, followed) in next.chunks_mut(tokens_per_call).zip(all) {
                let ids = followed.ids.get(followed.prompt + done..).unwrap_or_default();
                row.iter_mut().zip(ids).for_each(|(to, id)| *to = *id as i32);
            }
            let next = runtime.upload(&next, &[shape.slots, tokens_per_call])?;
            let program = self.program(Key::Follow(decode, weights.dtype()))?;
            let mut arguments = weights.arguments();
            arguments.extend(state.tensors.into_iter().map(Argument::from));
            arguments.push(Argument::from(&next));
            let mut tensors = program.run(arguments)?;
            let logits: Vec<f32> = tensors.split_off(tensors.len().saturating_sub(1))[0].read("logits")?;
            state = State { shape, tensors };
            for (rows, followed) in logits.chunks(tokens_per_call * vocab).zip(all) {
                let left = followed.steps().saturating_sub(done);
                let first = followed.prompt - 1 + done;
                let rows = rows.chunks(vocab).take(left).enumerate();
                rows.for_each(|(step, logits)| see(followed.sequence, first + step, logits));
            }
        }
        Ok(())
    }
}

/// The values that the loop over given tokens carries.
#[derive(Clone)]
struct Given {
    /// The last token and the length of each row, as in [`SlotRows`].
    last: Value,
    length: Value,
    /// The logits of all steps, `[B, W, V]`.
    logits: Value,
    window: Window,
    delta: Option<DeltaStates>,
}

leaves!(Given { last, length, logits, window, delta });

impl Decode {
    /// Builds the decode program for given tokens: weights, state, and the next token after each decode step (`[B, W]`, i32) to the state
    /// and the logits of all steps, `[B, W, V]`. Logits after the end of a sequence are meaningless.
    pub(super) fn follow_module(self, decoder: &Decoder, weights: Dtype) -> Result<Module> {
        let (f, config, slots) = (Builder::new(), decoder.config(), self.shape.slots);
        let weights = decoder.declare(&f, weights);
        let state = self.shape.arguments(&f, decoder);
        let next = f.argument("next_ids", TensorType::new(Dtype::I32, [slots, self.steps]));
        let (step, window) = self.begin(decoder, &weights, &state);
        let vocab = config.vocab_size;
        let logits = f.splat(0.0, TensorType::new(Dtype::F32, [slots, self.steps, vocab]));
        let zero = f.scalar(0, Dtype::I32);
        let mut error = None;
        let StateValues { rows, .. } = &state;
        let (last, length, delta) = (rows.last.clone(), rows.length.clone(), rows.delta.clone());
        let first = Given { last, length, logits, window, delta };
        let given = for_loop(&f, self.steps, &first, |index, given| {
            let Given { last, length, logits, window, delta } = given.clone();
            let now = SlotRows { last, length: length.clone(), delta, ..rows.clone() };
            match step.forward(&now, &window, index) {
                Ok(Forward { logits: new, window, delta, .. }) => {
                    let new = decoder.without_padding(&new).reshape(&[slots, 1, vocab]);
                    let last = next.dynamic_slice(&[&zero, index], &[slots, 1]).reshape(&[slots]);
                    let logits = logits.dynamic_update_slice(&new, &[&zero, index, &zero]);
                    Given { last, length: &length + length.like(1), logits, window, delta }
                }
                Err(source) => {
                    error = Some(source);
                    given
                }
            }
        });
        let name = "rollout_follow";
        if let Some(source) = error {
            return Err(program_error(name)(source));
        }
        let Given { last, length, logits, window, delta } = given;
        let caches = step.flush(&window).map_err(program_error(name))?;
        let after = StateValues { rows: SlotRows { last, length, delta, ..rows.clone() }, caches };
        decoder.axis_rules().finish(f.clone(), name, after.results().chain([("logits", &logits)]))
    }
}
