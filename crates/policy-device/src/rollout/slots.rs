//! Which sample lies in which slot.

use super::state::State;
use crate::error::{Error, Result};
use policy::{Completion, RolloutRequest};

/// A sample in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    /// Its number within the request.
    number: usize,
    /// The number of its tokens so far, prompt and completion together.
    length: usize,
}

/// The samples of a request: those that wait, those in slots, and the completions of those that have ended.
#[derive(Debug)]
pub(crate) struct Slots<'a> {
    request: &'a RolloutRequest<'a>,
    vocab: usize,
    slots: Vec<Option<Sample>>,
    /// The first sample that waits.
    next: usize,
    completions: Vec<Option<Completion>>,
}

/// A sample that begins in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admission {
    pub(crate) slot: usize,
    pub(crate) sample: usize,
    pub(crate) prompt: usize,
}

impl<'a> Slots<'a> {
    pub(crate) fn new(request: &'a RolloutRequest<'a>, slots: usize, vocab: usize) -> Self {
        let samples = request.prompts.len() * request.num_generations;
        Self { request, vocab, slots: vec![None; slots], next: 0, completions: vec![None; samples] }
    }

    /// The prompt of the next sample that there is a free slot for.
    pub(crate) fn waiting(&self) -> Option<usize> {
        let free = self.slots.iter().any(Option::is_none);
        (free && self.next < self.completions.len()).then(|| self.next / self.request.num_generations)
    }

    /// Puts samples of the prompts before `end` into free slots.
    pub(crate) fn admit(&mut self, end: usize) -> Vec<Admission> {
        let mut admitted = vec![];
        for (slot, held) in self.slots.iter_mut().enumerate() {
            let (sample, prompt) = (self.next, self.next / self.request.num_generations);
            if prompt >= end {
                break;
            }
            if held.is_none() {
                *held = Some(Sample { number: sample, length: self.request.prompts[prompt].len() });
                admitted.push(Admission { slot, sample, prompt });
                self.next += 1;
            }
        }
        admitted
    }

    /// The length of the longest sequence; `None` where all slots are empty.
    pub(crate) fn longest(&self) -> Option<usize> {
        self.slots.iter().flatten().map(|sample| sample.length).max()
    }

    /// Takes the completions that have ended out of the state.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for a token that was chosen among logits that are not finite, [`Error::Device`].
    pub(crate) fn harvest(&mut self, state: &State) -> Result<()> {
        let (counts, ended) = (state.counts()?, state.ended()?);
        let mut done = vec![];
        for (slot, held) in self.slots.iter_mut().enumerate() {
            let Some(sample) = held else { continue };
            sample.length =
                self.request.prompts[sample.number / self.request.num_generations].len() + counts[slot] as usize;
            if ended[slot] {
                done.push((slot, sample.number));
                *held = None;
            }
        }
        if done.is_empty() {
            return Ok(());
        }
        let (ids, logps, width) = (state.ids()?, state.logps()?, state.shape.tokens);
        for (slot, number) in done {
            let row = slot * width..slot * width + counts[slot] as usize;
            let (ids, logps) = (&ids[row.clone()], &logps[row]);
            let legal = |(id, logp): (&i32, &f32)| (0..self.vocab as i32).contains(id) && logp.is_finite();
            if let Some(token) = ids.iter().zip(logps).position(|pair| !legal(pair)) {
                return Err(Error::NotFinite { sample: number, token });
            }
            let ids: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
            let truncated = ids.last().is_none_or(|id| !self.request.stop_ids.contains(id));
            self.completions[number] = Some(Completion { ids, logps: logps.to_vec(), truncated });
        }
        Ok(())
    }

    /// The completions in the order of the samples; those that have not ended are left out.
    pub(crate) fn finish(self) -> Vec<Completion> {
        self.completions.into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use policy::Sampling;

    #[test]
    fn samples_fill_free_slots_in_their_order() {
        let prompts = vec![vec![1, 2], vec![3], vec![4, 5, 6]];
        let sampling = Sampling::Greedy;
        let request =
            RolloutRequest { prompts: &prompts, num_generations: 2, max_completion_length: 4, stop_ids: &[], sampling };
        let mut slots = Slots::new(&request, 4, 10);
        assert_eq!((slots.waiting(), slots.longest()), (Some(0), None));
        let of = |list: Vec<Admission>| list.iter().map(|a| (a.slot, a.sample, a.prompt)).collect::<Vec<_>>();
        assert_eq!(of(slots.admit(1)), [(0, 0, 0), (1, 1, 0)]);
        assert_eq!((slots.waiting(), slots.longest()), (Some(1), Some(2)));
        assert_eq!(of(slots.admit(3)), [(2, 2, 1), (3, 3, 1)]);
        assert_eq!(slots.waiting(), None);
        slots.slots[2] = None;
        assert_eq!(slots.waiting(), Some(2));
        assert_eq!(of(slots.admit(3)), [(2, 4, 2)]);
        assert_eq!(slots.longest(), Some(3));
    }
}
