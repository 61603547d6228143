//! Sampling of a completion from logits on the host.

use crate::categorical::Categorical;
use crate::error::Result;
use crate::rollout::{Completion, RolloutRequest};
use crate::routed_experts::RoutedExperts;
use crate::sampling::{LogitsProcessors, Sampling};
use grpo_core::batch::SamplingMask;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use std::collections::HashSet;

/// Samples one completion of a [`RolloutRequest`], token by token, from logits on the host, with the request's temperature, processors, random
/// stream and stop conditions.
///
/// ```
/// use grpo_policy::{Completion, CompletionSampler, RolloutRequest};
///
/// /// Samples from a model whose logits `[V]` depend on the last token only.
/// fn generate(logits: impl Fn(u32) -> Vec<f32>, request: &RolloutRequest<'_>) -> grpo_policy::Result<Vec<Completion>> {
///     let mut completions = Vec::new();
///     for prompt in request.prompts {
///         for _ in 0..request.num_generations {
///             let mut sampler = CompletionSampler::new(request, completions.len(), prompt);
///             while let Some(token) = sampler.next_input() {
///                 sampler.extend(&logits(token))?;
///             }
///             completions.push(sampler.finish());
///         }
///     }
///     Ok(completions)
/// }
/// ```
pub struct CompletionSampler<'a> {
    temperature: f64,
    processors: LogitsProcessors,
    /// The random stream; `None` for greedy sampling.
    random: Option<ChaCha8Rng>,
    /// The tokens so far, if the repetition penalty is on.
    seen: HashSet<u32>,
    request: &'a RolloutRequest<'a>,
    /// The index of the completion in the request.
    index: usize,
    /// The largest number of tokens.
    limit: usize,
    /// The last token of the prompt.
    prompt_end: Option<u32>,
    ids: Vec<u32>,
    logps: Vec<f32>,
    /// Of no tokens, unless the request asks for it.
    sampling_mask: SamplingMask,
    /// The recorded experts; empty until the completion is finished.
    routed_experts: RoutedExperts,
    /// `true` if the last token ends the completion.
    has_ended: bool,
}

impl<'a> CompletionSampler<'a> {
    /// Starts the completion number `index` of the request, counted over all its prompts; `prompt` has its token ids.
    pub fn new(request: &'a RolloutRequest<'a>, index: usize, prompt: &[u32]) -> Self {
        let (temperature, processors, random) = match request.sampling {
            Sampling::Greedy => (1.0, LogitsProcessors::default(), None),
            Sampling::Random { temperature, processors, seed, purpose, step, first } => {
                (temperature, processors, Some(grpo_rng::stream(seed, purpose, step, first + request.stream(index))))
            }
        };
        let seen = if processors.penalises_repetition() { prompt.iter().copied().collect() } else { HashSet::new() };
        Self {
            temperature,
            processors,
            random,
            seen,
            request,
            index,
            limit: request.limit(index),
            prompt_end: prompt.last().copied(),
            ids: Vec::new(),
            logps: Vec::new(),
            sampling_mask: SamplingMask::default(),
            routed_experts: RoutedExperts::default(),
            has_ended: false,
        }
    }

    /// Returns the token whose logits come next: the last token of the prompt, then of the completion; `None` if the completion is finished,
    /// by a stop condition or at the length limit.
    pub fn next_input(&self) -> Option<u32> {
        let is_open = !self.has_ended && self.ids.len() < self.limit;
        self.ids.last().copied().or(self.prompt_end).filter(|_| is_open)
    }

    /// Samples the next token from `logits: [V]`. Reports a completion that it finishes to the listener of the request.
    ///
    /// # Errors
    /// The errors of [`RolloutRequest::ends`].
    pub fn extend(&mut self, logits: &[f32]) -> Result<()> {
        self.extend_with_experts(logits, RoutedExperts::default)
    }

    /// Samples like [`CompletionSampler::extend`] from a model that records experts. If the token finishes the completion, `routed_experts`
    /// returns the experts of all tokens before it.
    ///
    /// # Errors
    /// The errors of [`RolloutRequest::ends`].
    pub fn extend_with_experts(
        &mut self,
        logits: &[f32],
        routed_experts: impl FnOnce() -> RoutedExperts,
    ) -> Result<()> {
        let of = Categorical::new(logits, self.temperature, &self.processors, &self.seen);
        let id = match &mut self.random {
            None => of.best(),
            Some(rng) => of.at(rng.random()),
        };
        self.ids.push(id as u32);
        self.logps.push(of.logp(id) as f32);
        if self.request.return_sampling_mask {
            self.sampling_mask.push(&of.kept().unwrap_or_default());
        }
        self.has_ended = self.request.ends(&self.ids)?;
        if self.processors.penalises_repetition() {
            self.seen.insert(id as u32);
        }
        if self.next_input().is_none() {
            self.routed_experts = routed_experts();
            if self.request.turn.is_some_and(|turn| turn.finished.is_some()) {
                let completion = Completion::sampled(self.ids.clone(), self.logps.clone(), !self.has_ended);
                let (sampling_mask, routed_experts) = (self.sampling_mask.clone(), self.routed_experts.clone());
                self.request.report(self.index, &Completion { sampling_mask, routed_experts, ..completion });
            }
        }
        Ok(())
    }

    /// Returns the completion; it is truncated if no stop condition has ended it.
    pub fn finish(self) -> Completion {
        let (sampling_mask, routed_experts) = (self.sampling_mask, self.routed_experts);
        Completion { sampling_mask, routed_experts, ..Completion::sampled(self.ids, self.logps, !self.has_ended) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_rng::Purpose;

    fn request(sampling: Sampling) -> RolloutRequest<'static> {
        let (max_completion_length, num_generations) = (6, 1);
        RolloutRequest {
            prompts: &[],
            num_generations,
            max_completion_length,
            stop_ids: &[2],
            stop: None,
            sampling,
            return_sampling_mask: false,
            return_routed_experts: false,
            turn: None,
        }
    }

    #[test]
    fn sampling_masks_have_the_kept_ids() {
        let masks = |processors| {
            let purpose = Purpose::Rollout;
            let sampling = Sampling::Random { temperature: 0.8, processors, seed: 0, purpose, step: 0, first: 0 };
            let of = RolloutRequest { return_sampling_mask: true, ..request(sampling) };
            let mut sample = CompletionSampler::new(&of, 0, &[1]);
            for logits in [[0.5, 3.0, 1.0, 2.0], [9.0, 0.0, 0.0, 9.0]] {
                sample.extend(&logits).unwrap();
            }
            let mask = sample.finish().sampling_mask;
            assert_eq!(mask.tokens(), 2);
            [0, 1].map(|token| mask.kept(token).map(<[u32]>::to_vec))
        };
        let off = LogitsProcessors::default();
        assert_eq!(masks(off), [None, None]);
        assert_eq!(masks(LogitsProcessors { top_k: Some(1), ..off }), [Some(vec![1]), Some(vec![0, 3])]);
        assert_eq!(masks(LogitsProcessors { top_k: Some(3), ..off }), [Some(vec![1, 2, 3]), None]);
        assert_eq!(masks(LogitsProcessors { min_p: Some(0.2), ..off }), [Some(vec![1, 3]), Some(vec![0, 3])]);
        assert_eq!(masks(LogitsProcessors { top_p: Some(0.9), ..off }), [Some(vec![1, 3]), Some(vec![0, 3])]);
        // Greedy completions are over the whole softmax.
        let of = RolloutRequest { return_sampling_mask: true, ..request(Sampling::Greedy) };
        let mut sample = CompletionSampler::new(&of, 0, &[]);
        sample.extend(&[0.0, 3.0]).unwrap();
        assert_eq!(sample.finish().sampling_mask.kept(0), None);
    }

    #[test]
    fn greedy_takes_the_most_likely_token_with_the_smallest_id() {
        let of = request(Sampling::Greedy);
        let mut sample = CompletionSampler::new(&of, 0, &[]);
        sample.extend(&[0.0, 3.0, 1.0, 3.0]).unwrap();
        assert_eq!(sample.finish().ids, [1]);
    }

    #[test]
    fn stop_ids_and_the_length_limit_finish_a_completion() {
        let of = request(Sampling::Greedy);
        let mut sample = CompletionSampler::new(&of, 0, &[7, 5]);
        assert_eq!(sample.next_input(), Some(5));
        for length in 1..=6 {
            sample.extend(&[1.0, 0.0, 0.0]).unwrap();
            assert_eq!(sample.next_input(), (length < 6).then_some(0));
        }
        assert!(sample.finish().truncated);
        let mut sample = CompletionSampler::new(&of, 0, &[]);
        sample.extend(&[0.0, 0.0, 1.0]).unwrap();
        assert_eq!(sample.next_input(), None);
        assert!(!sample.finish().truncated);
    }

    /// Returns the share of each token among 20000 samples of one token after the prompt `[1, 0]`, and its recorded log-probability.
    fn draws(logits: [f32; 4], temperature: f64, processors: LogitsProcessors) -> ([f64; 4], [f32; 4]) {
        let (mut shares, mut logps) = ([0.0; 4], [f32::NEG_INFINITY; 4]);
        for index in 0..20_000 {
            let purpose = Purpose::Rollout;
            let sampling = Sampling::Random { temperature, processors, seed: 0, purpose, step: 0, first: 0 };
            let of = request(sampling);
            let mut sample = CompletionSampler::new(&of, index, &[1, 0]);
            sample.extend(&logits).unwrap();
            shares[sample.ids[0] as usize] += 1.0 / 20_000.0;
            logps[sample.ids[0] as usize] = sample.logps[0];
        }
        (shares, logps)
    }

    #[test]
    fn samples_follow_the_recorded_log_probabilities() {
        let off = LogitsProcessors::default();
        for (processors, left) in [
            (off, [true; 4]),
            (LogitsProcessors { top_k: Some(2), ..off }, [false, false, true, true]),
            (LogitsProcessors { top_p: Some(0.9), ..off }, [false, true, true, true]),
            (LogitsProcessors { min_p: Some(0.6), ..off }, [false, false, false, true]),
            (LogitsProcessors { repetition_penalty: Some(1.5), ..off }, [true; 4]),
        ] {
            let logits = [0.5f32, 1.0, 1.5, 2.0];
            let (shares, logps) = draws(logits, 0.8, processors);
            for (id, is_left) in left.into_iter().enumerate() {
                assert_eq!(shares[id] > 0.0, is_left, "{processors:?} {shares:?}");
                assert!((shares[id] - f64::from(logps[id]).exp()).abs() < 0.012, "{processors:?} {shares:?} {logps:?}");
            }
            let of_first: f64 = 0.5 / processors.repetition_penalty.unwrap_or(1.0);
            if left[0] {
                let [_, _, third, fourth] = logps;
                // The prompt contains tokens 1 and 0.
                assert!((f64::from(logps[0] - fourth) - (of_first - 2.0) / 0.8).abs() < 1e-5);
                assert!((f64::from(third - fourth) - (1.5 - 2.0) / 0.8).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn completion_tokens_are_penalised_too() {
        let processors = LogitsProcessors { repetition_penalty: Some(2.0), ..LogitsProcessors::default() };
        let sampling =
            Sampling::Random { temperature: 1.0, processors, seed: 0, purpose: Purpose::Rollout, step: 0, first: 0 };
        let of = request(sampling);
        let mut sample = CompletionSampler::new(&of, 0, &[]);
        sample.extend(&[90.0, 0.0]).unwrap();
        sample.extend(&[90.0, 0.0]).unwrap();
        assert_eq!(sample.ids, [0, 0]);
        assert_eq!(sample.seen.len(), 1);
        sample.extend(&[2.0, 0.0]).unwrap();
        // Logits 2 / 2 and 0.
        let p = f64::from(sample.logps[2]).exp();
        let first = 1.0_f64.exp() / (1.0 + 1.0_f64.exp());
        assert!((p - first).abs() < 1e-6 || (p - (1.0 - first)).abs() < 1e-6, "{p}");
    }
}
