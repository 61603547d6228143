//! Sampling of completions with a KV cache.

use crate::decoder::{Decoder, Inference, PackedBatch};
use policy::{Completion, Error, LogitsProcessors, Result, RolloutRequest, Sampling};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use rng::stream;
use std::collections::HashSet;

/// Samples the completions of a request. At most `batch_size` sequences decode together, several batches run in parallel, and samples of
/// one prompt share its prefill; none of this changes the samples.
pub(crate) fn generate(model: &Decoder, request: &RolloutRequest<'_>, batch_size: usize) -> Result<Vec<Completion>> {
    let (prompts, per_prompt) = (request.prompts, request.num_generations);
    if prompts.is_empty() || per_prompt == 0 || request.max_completion_length == 0 {
        let found = format!("{} x {per_prompt} x {}", prompts.len(), request.max_completion_length);
        return Err(Error::argument("generate", "at least one prompt, generation and token", found));
    }
    let inference = model.inference()?;
    let for_each_thread = prompts.len().div_ceil(rayon::current_num_threads());
    let prompts_per_chunk = (batch_size / per_prompt).min(for_each_thread).max(1);
    let completions = prompts
        .par_chunks(prompts_per_chunk)
        .enumerate()
        .map(|(i, chunk)| generate_chunk(&inference, request, chunk, (i * prompts_per_chunk * per_prompt) as u64))
        .collect::<Result<Vec<_>>>()?;
    Ok(completions.concat())
}

/// Samples completions of `prompts`; `first` is the request's sample index of the first one.
fn generate_chunk(
    model: &Inference,
    request: &RolloutRequest<'_>,
    prompts: &[Vec<u32>],
    first: u64,
) -> Result<Vec<Completion>> {
    let (per_prompt, vocab) = (request.num_generations, model.vocab());
    // The last token is never an input of the decoder.
    let (of_prompts, mut cache) =
        model.prefill(&PackedBatch::new(prompts)?, per_prompt, request.max_completion_length - 1)?;
    let mut samples: Vec<Sample<'_>> = (0..prompts.len() * per_prompt)
        .map(|i| Sample::new(request, first + i as u64, &prompts[i / per_prompt]))
        .collect();
    for (i, sample) in samples.iter_mut().enumerate() {
        // All samples of a prompt draw their first token from the same row of logits.
        sample.extend(&of_prompts[i / per_prompt * vocab..(i / per_prompt + 1) * vocab])?;
    }
    for _ in 1..request.max_completion_length {
        let (open, last): (Vec<usize>, Vec<u32>) =
            samples.iter().enumerate().filter_map(|(i, sample)| Some((i, sample.open_at()?))).unzip();
        if open.is_empty() {
            break;
        }
        let logits = model.decode(&last, &open, &mut cache)?;
        for (i, logits) in open.iter().zip(logits.chunks_exact(vocab)) {
            samples[*i].extend(logits)?;
        }
    }
    Ok(samples.into_iter().map(Sample::finish).collect())
}

/// A completion in progress.
struct Sample<'a> {
    temperature: f64,
    processors: LogitsProcessors,
    /// The random stream; `None` for greedy sampling.
    random: Option<ChaCha8Rng>,
    /// The tokens so far, if the repetition penalty is on.
    seen: HashSet<u32>,
    request: &'a RolloutRequest<'a>,
    ids: Vec<u32>,
    logps: Vec<f32>,
    /// Whether the last token has ended the completion.
    has_ended: bool,
}

impl<'a> Sample<'a> {
    fn new(request: &'a RolloutRequest<'a>, index: u64, prompt: &[u32]) -> Self {
        let (temperature, processors, random) = match request.sampling {
            Sampling::Greedy => (1.0, LogitsProcessors::default(), None),
            Sampling::Random { temperature, processors, seed, purpose, step, first } => {
                (temperature, processors, Some(stream(seed, purpose, step, first + index)))
            }
        };
        let seen = if processors.penalises_repetition() { prompt.iter().copied().collect() } else { HashSet::new() };
        Self { temperature, processors, random, seen, request, ids: Vec::new(), logps: Vec::new(), has_ended: false }
    }

    /// Returns the last token, unless it is a stop token.
    fn open_at(&self) -> Option<u32> {
        self.ids.last().copied().filter(|_| !self.has_ended)
    }

    /// Samples the next token from `logits: [V]`.
    fn extend(&mut self, logits: &[f32]) -> Result<()> {
        let scores = self.processors.scores(logits, self.temperature, &self.seen);
        let (best, max) = scores
            .iter()
            .copied()
            .enumerate()
            .fold((0, f64::NEG_INFINITY), |best, (i, x)| if x > best.1 { (i, x) } else { best });
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        let id = match &mut self.random {
            None => best,
            Some(rng) => {
                // Inverse transform sampling; rounding may leave the point beyond the last token.
                let mut point = rng.random::<f64>() * total;
                let passed = |weight: &f64| {
                    point -= weight;
                    point < 0.0
                };
                weights.iter().position(passed).unwrap_or(best)
            }
        };
        self.ids.push(id as u32);
        self.logps.push((scores[id] - max - total.ln()) as f32);
        self.has_ended = self.request.ends(&self.ids)?;
        if self.processors.penalises_repetition() {
            self.seen.insert(id as u32);
        }
        Ok(())
    }

    fn finish(self) -> Completion {
        let truncated = self.open_at().is_some();
        Completion { ids: self.ids, logps: self.logps, truncated }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::to_host;
    use burn::tensor::Device;
    use models::ModelConfig;
    use rng::Purpose;

    const EOS: u32 = 2;

    fn model() -> Decoder {
        let config = ModelConfig { hidden_size: 32, initializer_range: 0.3, ..ModelConfig::default() };
        Decoder::new(&config, 3, &Device::flex()).unwrap()
    }

    fn request(prompts: &[Vec<u32>], per_prompt: usize, sampling: Sampling) -> RolloutRequest<'_> {
        RolloutRequest {
            prompts,
            num_generations: per_prompt,
            max_completion_length: 6,
            stop_ids: &[EOS],
            stop: None,
            sampling,
        }
    }

    fn random(step: u64) -> Sampling {
        let processors = LogitsProcessors::default();
        Sampling::Random { temperature: 0.8, processors, seed: 5, purpose: Purpose::Rollout, step, first: 0 }
    }

    fn prompts() -> Vec<Vec<u32>> {
        vec![vec![1, 9, 4], vec![1, 7], vec![1, 20, 21, 22, 23], vec![1, 30]]
    }

    fn generate(batch_size: usize, request: &RolloutRequest<'_>) -> Vec<Completion> {
        super::generate(&model(), request, batch_size).unwrap()
    }

    #[test]
    fn samples_depend_on_their_index_and_step_only() {
        let prompts = prompts();
        let together = generate(1000, &request(&prompts, 4, random(0)));
        assert_eq!(together.len(), 16);
        assert_eq!(generate(1, &request(&prompts, 4, random(0))), together);
        assert!(together[..4].iter().any(|c| c.ids != together[0].ids));
        assert_ne!(generate(1000, &request(&prompts, 4, random(1))), together);
        // With fewer prompts, the remaining samples are the same. A second request continues the indices.
        let fewer = generate(1000, &request(&prompts[..2], 4, random(0)));
        let mut rest = random(0);
        let Sampling::Random { first, .. } = &mut rest else { panic!("random") };
        *first = 8;
        let rest = generate(1000, &request(&prompts[2..], 4, rest));
        assert!([fewer, rest].concat().iter().zip(&together).all(|(a, b)| a.ids == b.ids));
    }

    #[test]
    fn logps_match_a_full_forward_pass() {
        let (model, prompts) = (model(), prompts());
        // Some samples of a batch end before others.
        let stop_ids: Vec<u32> = (0..8).collect();
        let completions = generate(1000, &RolloutRequest { stop_ids: &stop_ids, ..request(&prompts, 4, random(0)) });
        assert!(completions.iter().any(|c| c.ids.len() < 6) && completions.iter().any(|c| c.truncated));
        for (i, completion) in completions.iter().enumerate() {
            let prompt = &prompts[i / 4];
            let whole = [prompt.clone(), completion.ids.clone()].concat();
            let hidden = model.forward(&PackedBatch::new(&[whole]).unwrap()).unwrap();
            let [t, _] = hidden.dims();
            let logits = hidden.matmul(model.lm_head().unwrap().transpose()) / 0.8;
            let logp = to_host(burn::tensor::activation::log_softmax(logits, 1));
            let vocab = logp.len() / t;
            for (j, (&id, &got)) in completion.ids.iter().zip(&completion.logps).enumerate() {
                let want = logp[(prompt.len() - 1 + j) * vocab + id as usize];
                assert!((got - want).abs() < 1e-4, "{got} {want}");
            }
        }
    }

    #[test]
    fn completions_end_with_eos_or_at_the_limit() {
        let prompts: Vec<Vec<u32>> = (3..53).map(|id| vec![1, id]).collect();
        let completions = generate(1000, &request(&prompts, 4, random(0)));
        for c in &completions {
            let eos = c.ids.iter().position(|id| *id == EOS);
            match eos {
                Some(at) => assert!(at + 1 == c.ids.len() && !c.truncated),
                None => assert!(c.ids.len() == 6 && c.truncated),
            }
            assert_eq!(c.ids.len(), c.logps.len());
        }
        assert!(completions.iter().any(|c| c.truncated) && completions.iter().any(|c| !c.truncated));
    }

    #[test]
    fn greedy_takes_the_most_likely_token_with_the_smallest_id() {
        let prompts = prompts();
        let a = generate(1000, &request(&prompts, 1, Sampling::Greedy));
        assert_eq!(a, generate(1000, &request(&prompts, 1, Sampling::Greedy)));
        let of = request(&[], 1, Sampling::Greedy);
        let mut sample = Sample::new(&of, 0, &[]);
        sample.extend(&[0.0, 3.0, 1.0, 3.0]).unwrap();
        assert_eq!(sample.ids, [1]);
    }

    /// Returns the share of each token among 20000 samples of one token after the prompt `[1, 0]`, and its recorded log-probability.
    fn draws(logits: [f32; 4], temperature: f64, processors: LogitsProcessors) -> ([f64; 4], [f32; 4]) {
        let (mut shares, mut logps) = ([0.0; 4], [f32::NEG_INFINITY; 4]);
        for index in 0..20_000 {
            let purpose = Purpose::Rollout;
            let sampling = Sampling::Random { temperature, processors, seed: 0, purpose, step: 0, first: 0 };
            let of = request(&[], 1, sampling);
            let mut sample = Sample::new(&of, index, &[1, 0]);
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
        let of = request(&[], 1, sampling);
        let mut sample = Sample::new(&of, 0, &[]);
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

    #[test]
    fn too_long_or_empty_requests_are_errors() {
        let long = vec![vec![1; 60]];
        let model = model();
        let of = |prompts: &[Vec<u32>]| super::generate(&model, &request(prompts, 1, Sampling::Greedy), 8);
        assert!(matches!(of(&long), Err(Error::TooLong { .. })));
        assert!(of(&[]).is_err());
        assert!(of(&[vec![]]).is_err());
    }
}
