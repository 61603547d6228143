//! Sampling of completions with a KV cache.

use crate::decoder::{Decoder, Inference, PackedBatch};
use policy::{Completion, CompletionSampler, Error, Result, RolloutRequest};
use rayon::prelude::*;

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
    let mut samples: Vec<CompletionSampler<'_>> = (0..prompts.len() * per_prompt)
        .map(|i| CompletionSampler::new(request, first + i as u64, &prompts[i / per_prompt]))
        .collect();
    for (i, sample) in samples.iter_mut().enumerate() {
        // All samples of a prompt draw their first token from the same row of logits.
        sample.extend(&of_prompts[i / per_prompt * vocab..(i / per_prompt + 1) * vocab])?;
    }
    loop {
        let (open, last): (Vec<usize>, Vec<u32>) =
            samples.iter().enumerate().filter_map(|(i, sample)| Some((i, sample.next_input()?))).unzip();
        if open.is_empty() {
            break;
        }
        let logits = model.decode(&last, &open, &mut cache)?;
        for (i, logits) in open.iter().zip(logits.chunks_exact(vocab)) {
            samples[*i].extend(logits)?;
        }
    }
    Ok(samples.into_iter().map(CompletionSampler::finish).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::to_host;
    use burn::tensor::Device;
    use models::ModelConfig;
    use policy::{LogitsProcessors, Sampling};
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
    fn greedy_completions_are_reproducible() {
        let prompts = prompts();
        let a = generate(1000, &request(&prompts, 1, Sampling::Greedy));
        assert_eq!(a, generate(1000, &request(&prompts, 1, Sampling::Greedy)));
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
