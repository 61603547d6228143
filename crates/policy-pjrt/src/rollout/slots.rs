//! Assignment of samples to slots.

use super::routed;
use super::sampling::kept_tokens;
use super::state::State;
use crate::DeviceTensor;
use crate::error::{Error, Result};
use crate::runtime::Runtime;
use grpo_core::batch::SamplingMask;
use grpo_models::ModelConfig;
use grpo_policy::{Completion, RolloutRequest, RoutedExperts};
use std::collections::VecDeque;

/// A sample in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    /// Its index in the request.
    number: usize,
    /// Number of its tokens so far, prompt and completion together.
    length: usize,
    /// Number of calls of the decode program since it began.
    calls: usize,
    /// The number of tokens of its completion behind which the stop condition does not hold.
    checked: usize,
}

/// The samples of a request: waiting, in slots, and finished.
#[derive(Debug)]
pub(crate) struct Slots<'a> {
    request: &'a RolloutRequest<'a>,
    vocab: usize,
    slots: Vec<Option<Sample>>,
    /// Waiting samples in order.
    waiting: VecDeque<usize>,
    completions: Vec<Option<Completion>>,
    /// The tokens in the KV cache of each slot that a later turn may continue.
    cached: Vec<Vec<u32>>,
    /// The sampling mask of each unfinished sample, if requested.
    masks: Vec<SamplingMask>,
    /// L k of the model; 0 if experts are not recorded.
    width: usize,
    /// The experts `[tokens, L, k]` of each unfinished sample, if requested.
    routed: Vec<Vec<u16>>,
    /// The experts `[tokens, L, k]` of the tokens in `cached`, if requested.
    cached_routed: Vec<Vec<u16>>,
    /// `true` if the model has Gated DeltaNets: their states contain all processed tokens, and cannot drop the last ones.
    has_states: bool,
}

/// Records of the tokens of a call of the decode program, if requested.
#[derive(Debug, Default)]
pub(crate) struct Records {
    /// Sampling masks.
    pub(crate) masks: Option<DeviceTensor>,
    /// Experts.
    pub(crate) routed: Option<DeviceTensor>,
}

/// A sample that begins in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admission {
    pub(crate) slot: usize,
    pub(crate) sample: usize,
    pub(crate) prompt: usize,
    /// The row of the prompt in its prefill.
    pub(crate) row: usize,
}

impl<'a> Slots<'a> {
    /// Creates a slot for each of `cached`, the tokens in its KV cache; `routed` are the experts of these tokens, if the request records experts.
    pub(crate) fn new(
        request: &'a RolloutRequest<'a>,
        cached: Vec<Vec<u32>>,
        routed: Vec<Vec<u16>>,
        config: &ModelConfig,
    ) -> Self {
        let samples = request.prompts.len() * request.num_generations;
        Self {
            request,
            vocab: config.vocab_size,
            has_states: config.linear_attention.is_some(),
            slots: vec![None; cached.len()],
            waiting: (0..samples).collect(),
            completions: vec![None; samples],
            cached,
            masks: vec![SamplingMask::default(); samples],
            width: routed::width(config).filter(|_| request.return_routed_experts).unwrap_or(0),
            routed: vec![Vec::new(); samples],
            cached_routed: routed,
        }
    }

    /// Places a sample in the slot that has the keys and values of its prompt.
    pub(crate) fn resume(&mut self, slot: usize, sample: usize) {
        self.waiting.retain(|waiting| *waiting != sample);
        if let Some(routed) = self.cached_routed.get_mut(slot) {
            self.routed[sample] = std::mem::take(routed);
        }
        self.place(slot, sample);
    }

    /// Appends the experts `[tokens, L, k]` of the next tokens of a sample.
    pub(crate) fn record_experts(&mut self, sample: usize, experts: &[u16]) {
        self.routed[sample].extend_from_slice(experts);
    }

    fn place(&mut self, slot: usize, number: usize) {
        let length = self.request.prompts[number / self.request.num_generations].len();
        self.slots[slot] = Some(Sample { number, length, calls: 0, checked: 0 });
        self.cached[slot].clear();
        if let Some(routed) = self.cached_routed.get_mut(slot) {
            routed.clear();
        }
    }

    /// Returns the prompt of the next waiting sample if a slot is free.
    pub(crate) fn waiting(&self) -> Option<usize> {
        let first = self.waiting.front().filter(|_| self.slots.iter().any(Option::is_none));
        first.map(|sample| sample / self.request.num_generations)
    }

    /// Returns the prompts of the next waiting samples, at most `count`.
    pub(crate) fn next_prompts(&self, count: usize) -> Vec<usize> {
        let mut prompts: Vec<usize> = self.waiting.iter().map(|sample| sample / self.request.num_generations).collect();
        prompts.dedup();
        prompts.truncate(count);
        prompts
    }

    /// Places waiting samples of these prompts in free slots, first in those without a conversation.
    pub(crate) fn admit(&mut self, prompts: &[usize]) -> Vec<Admission> {
        let mut free: Vec<usize> = (0..self.slots.len()).filter(|slot| self.slots[*slot].is_none()).collect();
        free.sort_by_key(|slot| !self.cached[*slot].is_empty());
        let mut admitted = vec![];
        for slot in free {
            let Some(&sample) = self.waiting.front() else { break };
            let prompt = sample / self.request.num_generations;
            let Some(row) = prompts.iter().position(|of_list| *of_list == prompt) else { break };
            self.waiting.pop_front();
            self.place(slot, sample);
            admitted.push(Admission { slot, sample, prompt, row });
        }
        admitted
    }

    /// Returns the largest number of completion tokens of each slot, 0 for empty slots.
    pub(crate) fn limits(&self) -> Vec<i32> {
        let limit = |sample: Sample| i32::try_from(self.request.limit(sample.number)).unwrap_or(i32::MAX);
        self.slots.iter().map(|held| held.map_or(0, limit)).collect()
    }

    /// Returns the length of the longest sequence; `None` if all slots are empty.
    pub(crate) fn longest(&self) -> Option<usize> {
        self.slots.iter().flatten().map(|sample| sample.length).max()
    }

    /// Takes finished completions out of the state after a call of the decode program, which adds up to `tokens_per_call` tokens to each
    /// unfinished sequence.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if a token was sampled from logits that are not finite, [`Error::Rollout`] if a sequence is too long or does
    /// not end, [`Error::Policy`] of the stop condition, [`Error::TimedOut`], [`Error::Device`].
    pub(crate) fn harvest(
        &mut self,
        runtime: &Runtime,
        state: &State,
        records: &Records,
        tokens_per_call: usize,
    ) -> Result<()> {
        let counts = state.counts(runtime)?;
        if let Some(routed) = &records.routed {
            self.record_routed(&counts, &runtime.read(routed, "the experts of tokens")?, tokens_per_call);
        }
        if let Some(masks) = &records.masks {
            self.record_masks(&counts, &runtime.read(masks, "sampling masks")?, tokens_per_call);
        }
        let mut done = self.empty_ended(&counts, &state.ended(runtime)?, tokens_per_call)?;
        if done.is_empty() && self.request.stop.is_none() {
            return Ok(());
        }
        let (ids, logps, width) = (state.ids(runtime)?, state.logps(runtime)?, state.shape.tokens);
        done.extend(self.empty_stopped(&counts, &ids, width)?);
        for (slot, number, count) in done {
            let row = slot * width..slot * width + count;
            let all: Vec<u32> = ids[row.clone()].iter().map(|id| *id as u32).collect();
            let stopped = self.request.stopped_at(known(&all, self.vocab), 0)?;
            let length = stopped.unwrap_or(count);
            let (ids, logps) = (&ids[row.clone()][..length], &logps[row][..length]);
            let legal = |(id, logp): (&i32, &f32)| (0..self.vocab as i32).contains(id) && logp.is_finite();
            if let Some(token) = ids.iter().zip(logps).position(|pair| !legal(pair)) {
                return Err(Error::NotFinite { sample: number, token });
            }
            let ids = all[..length].to_vec();
            let truncated = stopped.is_none() && ids.last().is_none_or(|id| !self.request.stop_ids.contains(id));
            if self.request.turn.is_some() {
                let sampled = counts.get(slot).map_or(0, |count| usize::try_from(*count).unwrap_or(0));
                let prompt = &self.request.prompts[number / self.request.num_generations];
                let kept = kept_in_cache(length, sampled, self.has_states);
                self.cached[slot] = kept.map_or_else(Vec::new, |kept| [prompt, &ids[..kept]].concat());
                if let Some(routed) = self.cached_routed.get_mut(slot) {
                    let recorded = self.routed[number].iter().take(self.cached[slot].len() * self.width);
                    *routed = recorded.copied().collect();
                }
            }
            let mut completion = Completion::sampled(ids, logps.to_vec(), truncated);
            if self.request.return_sampling_mask {
                completion.sampling_mask = std::mem::take(&mut self.masks[number]);
                completion.sampling_mask.resize(length);
            }
            if self.width > 0 {
                let prompt = self.request.prompts[number / self.request.num_generations].len();
                let mut ids = std::mem::take(&mut self.routed[number]);
                // The last token is no input of the model.
                ids.truncate((prompt + length).saturating_sub(1) * self.width);
                completion.routed_experts = RoutedExperts { width: self.width, ids };
            }
            self.request.report(number, &completion);
            self.completions[number] = Some(completion);
        }
        Ok(())
    }

    /// Returns slot, sample index and number of new tokens of the samples in slots after a call.
    fn added(&self, counts: &[i32], tokens_per_call: usize) -> Vec<(usize, usize, usize)> {
        let of_slot = |(slot, (held, count)): (usize, (&Option<Sample>, &i32))| {
            let sample = held.as_ref()?;
            let before = sample.length - self.request.prompts[sample.number / self.request.num_generations].len();
            let added = usize::try_from(*count).unwrap_or(0).saturating_sub(before).min(tokens_per_call);
            Some((slot, sample.number, added))
        };
        self.slots.iter().zip(counts).enumerate().filter_map(of_slot).collect()
    }

    /// Appends the experts of the tokens that a call has processed, one before each new token, from `[B, tokens_per_call, L, k]`.
    fn record_routed(&mut self, counts: &[i32], experts: &[i32], tokens_per_call: usize) {
        for (slot, number, added) in self.added(counts, tokens_per_call) {
            let of_slot = experts[slot * tokens_per_call * self.width..].iter().take(added * self.width);
            // A model has at most 2^12 experts.
            self.routed[number].extend(of_slot.map(|id| *id as u16));
        }
    }

    /// Appends the sampling masks of the tokens that a call has added, from its words `[B, tokens_per_call, W]`.
    fn record_masks(&mut self, counts: &[i32], words: &[u32], tokens_per_call: usize) {
        // Words of a padded vocabulary, whose last bits are zero.
        let (width, mut kept) = ((words.len() / (self.slots.len() * tokens_per_call).max(1)).max(1), Vec::new());
        for (slot, number, added) in self.added(counts, tokens_per_call) {
            let of_slot = words[slot * tokens_per_call * width..].chunks(width).take(added);
            for words in of_slot {
                kept_tokens(words, self.vocab, &mut kept);
                self.masks[number].push(&kept);
            }
        }
    }

    /// Empties the slots of samples that meet the request's stop condition, which the executable does not check. Returns slot, sample index
    /// and completion length of each. Tokens that the executable has sampled after the stop in this call are ignored; later calls
    /// skip the slot, because its limit is 0.
    fn empty_stopped(&mut self, counts: &[i32], ids: &[i32], width: usize) -> Result<Vec<(usize, usize, usize)>> {
        let mut done = vec![];
        for (slot, held) in self.slots.iter_mut().enumerate() {
            let (Some(sample), Some(&count)) = (held.as_mut(), counts.get(slot)) else { continue };
            let count = usize::try_from(count).unwrap_or(0).min(width);
            let so_far: Vec<u32> = ids[slot * width..slot * width + count].iter().map(|id| *id as u32).collect();
            match self.request.stopped_at(known(&so_far, self.vocab), sample.checked.min(count))? {
                Some(count) => {
                    done.push((slot, sample.number, count));
                    *held = None;
                }
                None => sample.checked = count,
            }
        }
        Ok(done)
    }

    /// Counts a call, empties the slots of finished samples, and returns slot, sample index and completion length of each. A call adds
    /// tokens to every unfinished sequence, so no sample needs more calls than its largest number of tokens.
    ///
    /// # Errors
    /// [`Error::Rollout`] for an invalid length or too many calls, so that the caller's loop always ends.
    fn empty_ended(
        &mut self,
        counts: &[i32],
        ended: &[bool],
        tokens_per_call: usize,
    ) -> Result<Vec<(usize, usize, usize)>> {
        let RolloutRequest { prompts, num_generations, .. } = *self.request;
        let mut done = vec![];
        for (slot, ((held, &count), &ended)) in self.slots.iter_mut().zip(counts).zip(ended).enumerate() {
            let Some(sample) = held else { continue };
            let number = sample.number;
            let limit = self.request.limit(number);
            let most_calls = limit.div_ceil(tokens_per_call.max(1));
            let wrong = |expected, found| Err(Error::Rollout { sample: number, expected, found });
            let count = match usize::try_from(count) {
                Ok(count) if count <= limit => count,
                _ => return wrong(format!("at most {limit} tokens"), format!("{count} tokens")),
            };
            sample.calls += 1;
            sample.length = prompts[number / num_generations].len() + count;
            if ended {
                done.push((slot, number, count));
                *held = None;
            } else if sample.calls >= most_calls {
                let expected = format!("an end after {most_calls} calls of {tokens_per_call} tokens");
                return wrong(expected, format!("none, with {count} of {limit} tokens"));
            }
        }
        Ok(done)
    }

    /// Returns the completions in the order of the samples, without unfinished ones; the tokens in the KV cache of each slot; and the experts
    /// of these tokens, if they are recorded.
    pub(crate) fn finish(self) -> (Vec<Completion>, Vec<Vec<u32>>, Vec<Vec<u16>>) {
        (self.completions.into_iter().flatten().collect(), self.cached, self.cached_routed)
    }
}

/// Returns how many tokens of a completion of `length` tokens are in the cache, if the device has sampled `sampled` tokens and stored keys and values
/// of all but the last; `None` if the cache has states of tokens behind the completion.
fn kept_in_cache(length: usize, sampled: usize, has_states: bool) -> Option<usize> {
    let processed = sampled.saturating_sub(1);
    (length >= processed || !has_states).then_some(length.min(processed))
}

/// Returns the tokens before the first id outside the vocabulary, which [`Slots::harvest`] reports.
fn known(ids: &[u32], vocab: usize) -> &[u32] {
    &ids[..ids.iter().position(|id| *id as usize >= vocab).unwrap_or(ids.len())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_policy::Sampling;

    fn request(prompts: &[Vec<u32>], num_generations: usize, max_completion_length: usize) -> RolloutRequest<'_> {
        let (stop_ids, sampling) = (&[], Sampling::Greedy);
        RolloutRequest {
            prompts,
            num_generations,
            max_completion_length,
            stop_ids,
            stop: None,
            sampling,
            return_sampling_mask: false,
            return_routed_experts: false,
            turn: None,
        }
    }

    #[test]
    fn samples_fill_free_slots_in_order() {
        let prompts = vec![vec![1, 2], vec![3], vec![4, 5, 6]];
        let request = request(&prompts, 2, 4);
        let mut slots = Slots::new(&request, vec![vec![]; 4], vec![], &small());
        assert_eq!((slots.waiting(), slots.longest()), (Some(0), None));
        let of = |list: Vec<Admission>| list.iter().map(|a| (a.slot, a.sample, a.prompt)).collect::<Vec<_>>();
        assert_eq!(of(slots.admit(&[0])), [(0, 0, 0), (1, 1, 0)]);
        assert_eq!((slots.waiting(), slots.longest()), (Some(1), Some(2)));
        assert_eq!(of(slots.admit(&[1, 2])), [(2, 2, 1), (3, 3, 1)]);
        assert_eq!(slots.waiting(), None);
        slots.slots[2] = None;
        assert_eq!(slots.waiting(), Some(2));
        assert_eq!(of(slots.admit(&[1, 2])), [(2, 4, 2)]);
        assert_eq!(slots.longest(), Some(3));
    }

    #[test]
    fn samples_begin_first_in_slots_without_a_conversation() {
        let prompts = vec![vec![1, 2], vec![3], vec![4, 5, 6]];
        let request = request(&prompts, 1, 4);
        let mut slots = Slots::new(&request, vec![vec![8, 9], vec![], vec![1], vec![]], vec![], &small());
        slots.resume(2, 0);
        assert_eq!(slots.admit(&[1]).iter().map(|admission| admission.slot).collect::<Vec<_>>(), [1]);
        let (_, cached, _) = slots.finish();
        assert_eq!(cached, [vec![8, 9], vec![], vec![], vec![]]);
    }

    #[test]
    fn a_sample_that_never_ends_is_an_error_after_the_calls_of_the_longest_completion() {
        let prompts = vec![vec![1, 2], vec![3]];
        let request = request(&prompts, 1, 10);
        let mut slots = Slots::new(&request, vec![vec![]; 2], vec![], &small());
        slots.admit(&[0, 1]);
        // The second slot finishes and stays empty; the first never finishes. Three calls of four tokens are twelve.
        assert_eq!(slots.empty_ended(&[4, 3], &[false, true], 4).unwrap(), [(1, 1, 3)]);
        assert_eq!(slots.longest(), Some(6));
        assert_eq!(slots.empty_ended(&[8, 3], &[false, true], 4).unwrap(), []);
        let error = slots.empty_ended(&[10, 3], &[false, true], 4).unwrap_err();
        assert!(matches!(error, Error::Rollout { sample: 0, .. }), "{error:?}");
        let text = error.to_string();
        for part in ["sample 0", "after 3 calls of 4 tokens", "10 of 10 tokens", "`grpo parity`"] {
            assert!(text.contains(part), "{part:?} is not in: {text}");
        }
    }

    /// Returns the configuration of a model with a vocabulary of 10 tokens.
    fn small() -> ModelConfig {
        ModelConfig { vocab_size: 10, ..ModelConfig::default() }
    }

    #[test]
    fn a_state_of_dropped_tokens_is_not_continued() {
        // 8 tokens are sampled and 7 are processed.
        for (length, keys_and_values, states) in [(8, Some(7), Some(7)), (7, Some(7), Some(7)), (6, Some(6), None)] {
            assert_eq!(kept_in_cache(length, 8, false), keys_and_values);
            assert_eq!(kept_in_cache(length, 8, true), states);
        }
    }

    /// Ends a completion after two equal tokens.
    #[derive(Debug)]
    struct Twice;
    impl grpo_policy::StopCondition for Twice {
        fn is_met(&self, completion: &[u32]) -> grpo_policy::Result<bool> {
            match completion {
                [.., 8, _] => Err(grpo_policy::Error::other("no text for token 8")),
                [.., a, b] => Ok(a == b),
                _ => Ok(false),
            }
        }
    }

    #[test]
    fn samples_that_meet_the_stop_condition_leave_their_slots() {
        let prompts = vec![vec![1], vec![2], vec![3]];
        let request = RolloutRequest { stop: Some(&Twice), ..request(&prompts, 1, 8) };
        let mut slots = Slots::new(&request, vec![vec![]; 2], vec![], &small());
        slots.admit(&[0, 1, 2]);
        let ids = [7, 4, 4, 4, 0, 0, 0, 0, 1, 2, 1, 2, 0, 0, 0, 0];
        assert_eq!(slots.empty_stopped(&[4, 4], &ids, 8).unwrap(), [(0, 0, 3)]);
        // A new sample starts in slot 0. The first tokens in slot 1 were checked before and are not checked again.
        assert_eq!(slots.admit(&[0, 1, 2]), [Admission { slot: 0, sample: 2, prompt: 2, row: 2 }]);
        let ids = [5, 6, 0, 0, 0, 0, 0, 0, 1, 2, 1, 2, 2, 2, 3, 3];
        assert_eq!(slots.empty_stopped(&[2, 8], &ids, 8).unwrap(), [(1, 1, 5)]);
        assert_eq!(slots.longest(), Some(1));
        assert_eq!(request.stopped_at(&[3, 3, 1, 4, 4], 2).unwrap(), Some(5));
        assert_eq!([&[3, 3][..], &[3], &[]].map(|ids| request.ends(ids).unwrap()), [true, false, false]);
        // An error of the condition ends the request. The condition is not asked about ids outside the vocabulary.
        let ids = [5, 8, 1, 0, 0, 0, 0, 0];
        let error = slots.empty_stopped(&[3], &ids, 8).unwrap_err();
        assert!(error.to_string().contains("no text for token 8"), "{error}");
        assert_eq!(slots.empty_stopped(&[4], &[5, 10, 8, 1, 0, 0, 0, 0], 8).unwrap(), []);
    }

    #[test]
    fn calls_are_counted_from_the_beginning_of_each_sample() {
        let prompts = vec![vec![1], vec![2]];
        let request = request(&prompts, 1, 8);
        let mut slots = Slots::new(&request, vec![vec![]; 1], vec![], &small());
        for sample in 0..2 {
            assert_eq!(slots.admit(&[0, 1]), [Admission { slot: 0, sample, prompt: sample, row: sample }]);
            assert_eq!(slots.empty_ended(&[4], &[false], 4).unwrap(), []);
            assert_eq!(slots.empty_ended(&[8], &[true], 4).unwrap(), [(0, sample, 8)]);
        }
        assert_eq!((slots.waiting(), slots.longest()), (None, None));
    }

    #[test]
    fn an_invalid_number_of_tokens_is_an_error() {
        let prompts = vec![vec![1]];
        let request = request(&prompts, 1, 8);
        for count in [-1, 9, i32::MIN, i32::MAX] {
            let mut slots = Slots::new(&request, vec![vec![]; 1], vec![], &small());
            slots.admit(&[0]);
            let error = slots.empty_ended(&[count], &[true], 4).unwrap_err();
            assert!(error.to_string().contains(&format!("found {count} tokens")), "{error}");
        }
    }
}
