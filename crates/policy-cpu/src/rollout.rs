//! Sampling of completions with a KV cache.

use crate::decoder::{Cache, Decoder, Inference};
use grpo_policy::{Completion, CompletionSampler, Result, RolloutRequest};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Bound;

/// The number of weights from which all sequences decode together, and threads divide the products instead of the sequences. So many weights do
/// not fit the caches, and every batch of sequences reads all of them from memory for each token.
const LARGE: u64 = 1 << 25;
/// The least logits that a thread samples from at a time.
const LOGITS_PER_TASK: usize = 1 << 14;

/// The packed weights of a request, for the next one, and its KV caches if it had a [`RolloutRequest::turn`].
pub(crate) struct Prepared {
    inference: Inference,
    chunks: Vec<Sampled>,
}

/// A cache and the tokens of its samples.
struct Sampled {
    cache: Cache,
    /// The samples that a later turn may continue, and their tokens in the cache.
    ids: Vec<(usize, Vec<u32>)>,
}

/// A sample of a cache of an earlier turn, and the number of its tokens in the cache.
#[derive(Clone, Copy)]
struct Kept<'a> {
    cache: &'a Cache,
    sample: usize,
    length: usize,
}

/// Samples the completions of a request. At most `batch_size` sequences decode together, in one batch for every thread unless the model is
/// large, and samples of one prompt share its prefill; none of this changes the samples. `prepared` has the packed weights of
/// an earlier request, and the caches of the first `batch_size` conversations of an earlier turn; it is replaced.
pub(crate) fn generate(
    model: impl FnOnce() -> Decoder,
    request: &RolloutRequest<'_>,
    batch_size: usize,
    prepared: &mut Option<Prepared>,
) -> Result<Vec<Completion>> {
    request.check()?;
    let (inference, mut earlier) = match prepared.take() {
        Some(Prepared { inference, chunks }) if inference.records_experts() == request.return_routed_experts => {
            (inference, chunks)
        }
        _ => (model().inference()?.recording_experts(request.return_routed_experts), Vec::new()),
    };
    if request.turn.is_none() {
        earlier.clear();
    }
    let (prompts, per_prompt) = (request.prompts, request.num_generations);
    let chunks = sample(&inference, request, batch_size, &earlier)?;
    drop(earlier);
    let (mut completions, mut kept) = (vec![Completion::default(); prompts.len() * per_prompt], Vec::new());
    for Chunk { indices, completions: of_chunk, cache } in chunks {
        if let Some(cache) = cache {
            // By index, and not by chunk, so that the number of threads does not matter.
            let sequences = indices.iter().zip(&of_chunk).enumerate().filter(|(_, (index, _))| **index < batch_size);
            let ids = sequences.map(|(sample, (index, completion))| {
                let mut ids = [&prompts[index / per_prompt][..], &completion.ids].concat();
                ids.truncate(cache.tokens(sample));
                (sample, ids)
            });
            kept.push(Sampled { ids: ids.collect(), cache });
        }
        indices.into_iter().zip(of_chunk).for_each(|(index, completion)| completions[index] = completion);
    }
    *prepared = Some(Prepared { inference, chunks: kept });
    Ok(completions)
}

/// Some samples of a request.
struct Chunk {
    /// Their indices in the request.
    indices: Vec<usize>,
    completions: Vec<Completion>,
    /// Their cache, if a later turn may continue it.
    cache: Option<Cache>,
}

/// Samples the completions of a request in chunks. A chunk either continues sequences of an earlier turn or prefills new prompts.
fn sample(
    inference: &Inference,
    request: &RolloutRequest<'_>,
    batch_size: usize,
    earlier: &[Sampled],
) -> Result<Vec<Chunk>> {
    let per_prompt = request.num_generations;
    let known: BTreeMap<&[u32], Kept<'_>> = earlier
        .iter()
        .flat_map(|Sampled { cache, ids }| {
            ids.iter().map(|(sample, ids)| (&ids[..], Kept { cache, sample: *sample, length: ids.len() }))
        })
        .collect();
    let kept = |prompt: &Vec<u32>| {
        // Every sequence between a prefix of the prompt and the prompt begins with this prefix, too.
        let mut before = known.range::<[u32], _>((Bound::Unbounded, Bound::Excluded(&prompt[..]))).rev();
        before.find(|(ids, _)| per_prompt == 1 && prompt.starts_with(ids)).map(|(_, kept)| *kept)
    };
    let (continued, fresh): (Vec<_>, Vec<_>) =
        request.prompts.iter().map(kept).enumerate().partition(|(_, kept)| kept.is_some());
    let keeps = |mut chunk: Chunk| {
        let is_kept = request.turn.is_some() && chunk.indices.iter().any(|index| *index < batch_size);
        chunk.cache = chunk.cache.filter(|_| is_kept);
        chunk
    };
    let chunk_of = |count: usize| {
        let batches = if inference.weights() >= LARGE { 1 } else { rayon::current_num_threads() };
        (batch_size / per_prompt).min(count.div_ceil(batches)).max(1)
    };
    let fresh = fresh.par_chunks(chunk_of(fresh.len())).map(|chunk| {
        let prompts: Vec<usize> = chunk.iter().map(|(prompt, _)| *prompt).collect();
        sample_fresh(inference, request, &prompts).map(keeps)
    });
    let continued = continued.par_chunks(chunk_of(continued.len())).map(|chunk| {
        let prompts: Vec<(usize, Kept<'_>)> =
            chunk.iter().filter_map(|(prompt, kept)| Some((*prompt, (*kept)?))).collect();
        sample_continued(inference, request, &prompts).map(keeps)
    });
    fresh.chain(continued).collect()
}

/// Samples the completions of prompts, given by their indices.
fn sample_fresh(model: &Inference, request: &RolloutRequest<'_>, prompts: &[usize]) -> Result<Chunk> {
    let (per_prompt, vocab) = (request.num_generations, model.vocab());
    let indices: Vec<usize> =
        prompts.iter().flat_map(|prompt| prompt * per_prompt..(prompt + 1) * per_prompt).collect();
    let ids: Vec<&[u32]> = prompts.iter().map(|prompt| &request.prompts[*prompt][..]).collect();
    // The last token is never an input of the decoder.
    let capacity = indices.iter().map(|index| request.limit(*index)).max().unwrap_or(1) - 1;
    check_lengths(model, request, &indices)?;
    let (of_prompts, mut cache) = model.prefill(&ids, per_prompt, capacity)?;
    let mut samples = samplers(request, &indices);
    // All samples of a prompt draw their first token from the same row of logits.
    let row = |i: usize| &of_prompts[i / per_prompt * vocab..(i / per_prompt + 1) * vocab];
    extend(samples.iter_mut().enumerate().map(|(i, sample)| ((i, sample), row(i))), vocab, &cache)?;
    let completions = decode(model, samples, &mut cache)?;
    Ok(Chunk { indices, completions, cache: Some(cache) })
}

/// Samples the completions of prompts, given by their indices, that begin with sequences of earlier caches.
fn sample_continued(model: &Inference, request: &RolloutRequest<'_>, prompts: &[(usize, Kept<'_>)]) -> Result<Chunk> {
    let indices: Vec<usize> = prompts.iter().map(|(prompt, _)| *prompt).collect();
    check_lengths(model, request, &indices)?;
    let sources: Vec<(&Cache, usize)> = prompts.iter().map(|(_, kept)| (kept.cache, kept.sample)).collect();
    let new: Vec<&[u32]> = prompts.iter().map(|(prompt, kept)| &request.prompts[*prompt][kept.length..]).collect();
    let capacity = new.iter().zip(&indices).map(|(new, index)| new.len() + request.limit(*index) - 1).max();
    let mut cache = Cache::continued(&sources, capacity.unwrap_or(0))?;
    let logits = model.extend(&new, &mut cache)?;
    let mut samples = samplers(request, &indices);
    extend(samples.iter_mut().enumerate().zip(logits.chunks_exact(model.vocab())), model.vocab(), &cache)?;
    let completions = decode(model, samples, &mut cache)?;
    Ok(Chunk { indices, completions, cache: Some(cache) })
}

fn samplers<'a>(request: &'a RolloutRequest<'a>, indices: &[usize]) -> Vec<CompletionSampler<'a>> {
    let sampler =
        |index: &usize| CompletionSampler::new(request, *index, &request.prompts[index / request.num_generations]);
    indices.iter().map(sampler).collect()
}

/// Checks that the sequences of some completions fit into the model's context.
fn check_lengths(model: &Inference, request: &RolloutRequest<'_>, indices: &[usize]) -> Result<()> {
    let length = |index: &usize| request.prompts[index / request.num_generations].len() + request.limit(*index) - 1;
    model.check_length(indices.iter().map(length).max().unwrap_or(0))
}

/// Samples until every completion is finished. All of them have their first token.
fn decode(model: &Inference, mut samples: Vec<CompletionSampler<'_>>, cache: &mut Cache) -> Result<Vec<Completion>> {
    let mut logits = Vec::new();
    loop {
        let (open, last): (Vec<usize>, Vec<u32>) =
            samples.iter().enumerate().filter_map(|(i, sample)| Some((i, sample.next_input()?))).unzip();
        if open.is_empty() {
            return Ok(samples.into_iter().map(CompletionSampler::finish).collect());
        }
        model.decode(&last, &open, cache, &mut logits)?;
        let mut open = open.iter().peekable();
        let of_open = samples.iter_mut().enumerate().filter(|(i, _)| open.next_if_eq(&i).is_some());
        extend(of_open.zip(logits.chunks_exact(model.vocab())), model.vocab(), cache)?;
    }
}

/// Samples the next token of each sample from its logits `[vocab]`, in parallel. Samples have their index in the cache.
fn extend<'a: 'b, 'b>(
    samples: impl Iterator<Item = ((usize, &'b mut CompletionSampler<'a>), &'b [f32])>,
    vocab: usize,
    cache: &Cache,
) -> Result<()> {
    let mut samples: Vec<_> = samples.collect();
    let at_once = LOGITS_PER_TASK.div_ceil(vocab.max(1));
    samples
        .par_iter_mut()
        .with_min_len(at_once)
        .try_for_each(|((index, sample), logits)| sample.extend_with_experts(logits, || cache.routed_experts(*index)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{PackedBatch, to_host};
    use burn::tensor::Device;
    use grpo_models::{LayerRope, LayerSpec, LinearAttention, ModelConfig};
    use grpo_policy::{Error, LogitsProcessors, Sampling, Turn};
    use grpo_rng::Purpose;

    const EOS: u32 = 2;

    /// Windows of one token, of less than a turn, and of more than a prompt.
    fn model() -> Decoder {
        let layers = [1, 4, 9].map(|window| LayerSpec {
            sliding_window: Some(window),
            rope: LayerRope::Local,
            ..LayerSpec::default()
        });
        let config = ModelConfig {
            hidden_size: 32,
            initializer_range: 0.3,
            num_hidden_layers: 4,
            layers: layers.into_iter().chain([LayerSpec::default()]).collect(),
            rope_local_theta: Some(100.0),
            ..ModelConfig::default()
        };
        Decoder::new(&config, 3, &Device::flex()).unwrap()
    }

    /// Its first layer has a recurrent state, and its second attention with output gates.
    fn recurrent_model() -> Decoder {
        let sizes = LinearAttention { linear_key_head_dim: 8, linear_value_head_dim: 6, ..LinearAttention::default() };
        let config = ModelConfig {
            hidden_size: 32,
            initializer_range: 0.3,
            layers: vec![LayerSpec::GATED_DELTA_NET, LayerSpec::default()],
            linear_attention: Some(sizes),
            attention_output_gate: true,
            ..ModelConfig::default()
        };
        Decoder::new(&config, 4, &Device::flex()).unwrap()
    }

    /// No layer has keys and values.
    fn model_without_attention() -> Decoder {
        let config = ModelConfig { layers: vec![LayerSpec::GATED_DELTA_NET], ..recurrent_model().config().clone() };
        Decoder::new(&config, 4, &Device::flex()).unwrap()
    }

    fn request(prompts: &[Vec<u32>], per_prompt: usize, sampling: Sampling) -> RolloutRequest<'_> {
        RolloutRequest {
            prompts,
            num_generations: per_prompt,
            max_completion_length: 6,
            stop_ids: &[EOS],
            stop: None,
            sampling,
            return_sampling_mask: false,
            return_routed_experts: false,
            turn: None,
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
        super::generate(model, request, batch_size, &mut None).unwrap()
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
        [model, recurrent_model, model_without_attention].into_iter().for_each(assert_logps_match);
    }

    fn assert_logps_match(of_model: fn() -> Decoder) {
        let (model, prompts) = (of_model(), prompts());
        // Some samples of a batch end before others.
        let stop_ids: Vec<u32> = (0..8).collect();
        let request = RolloutRequest { stop_ids: &stop_ids, ..request(&prompts, 4, random(0)) };
        let completions = super::generate(of_model, &request, 1000, &mut None).unwrap();
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
    fn prompts_that_are_prefilled_in_pieces_have_the_completions_of_each_alone() {
        // 1,800 tokens, with prompts of 20 to 40 tokens.
        let prompts: Vec<Vec<u32>> =
            (0..60).map(|i| (0..20 + i % 21).map(|j| 3 + (7 * i + j) % 40).collect()).collect();
        for model in [model, recurrent_model] {
            let together = super::generate(model, &request(&prompts, 2, random(0)), 1000, &mut None).unwrap();
            let alone = super::generate(model, &request(&prompts, 2, random(0)), 2, &mut None).unwrap();
            assert_eq!(together, alone);
        }
    }

    #[test]
    fn too_long_or_empty_requests_are_errors() {
        let long = vec![vec![1; 60]];
        let model = model();
        let of = |prompts: &[Vec<u32>]| {
            super::generate(|| model.clone(), &request(prompts, 1, Sampling::Greedy), 8, &mut None)
        };
        assert!(matches!(of(&long), Err(Error::TooLong { .. })));
        assert!(of(&[]).is_err());
        assert!(of(&[vec![]]).is_err());
    }

    /// Samples two turns of conversations, with other tokens between them, and returns the second turn.
    fn second_turn(model: fn() -> Decoder, batch_size: usize, keeps: bool) -> Vec<Completion> {
        let (prompts, streams, mut turns) = (prompts(), (0..8).collect::<Vec<u64>>(), None);
        let turn = Turn { streams: &streams, limits: &[6, 5, 4, 3, 2, 1, 6, 6], finished: None };
        let first = RolloutRequest { turn: Some(turn), ..request(&prompts, 2, random(0)) };
        let first = super::generate(model, &first, batch_size, &mut turns).unwrap();
        assert!(first.iter().zip(turn.limits).all(|(completion, limit)| completion.ids.len() <= *limit));
        // The third conversation has ended, and what follows the turns is of different lengths.
        let open: Vec<usize> = (0..8).filter(|i| *i != 2).collect();
        let given = |i: &usize| [&prompts[i / 2][..], &first[*i].ids, &vec![11; 1 + i % 3]].concat();
        let longer: Vec<Vec<u32>> = open.iter().map(given).collect();
        let streams: Vec<u64> = open.iter().map(|i| 100 + *i as u64).collect();
        let second = Turn { streams: &streams, limits: &[6, 6, 2, 6, 6, 6, 1], finished: None };
        let second = RolloutRequest { turn: Some(second), ..request(&longer, 1, random(0)) };
        if !keeps {
            turns = None;
        }
        super::generate(model, &second, batch_size, &mut turns).unwrap()
    }

    #[test]
    fn a_turn_that_continues_caches_samples_what_a_new_prefill_does() {
        let models = [model, recurrent_model, model_without_attention].into_iter();
        for (model, batch_size) in models.flat_map(|model: fn() -> Decoder| [(model, 1000), (model, 3)]) {
            let fresh = second_turn(model, 1000, false);
            assert_eq!(fresh.len(), 7);
            assert!(fresh[2].ids.len() <= 2 && fresh[6].ids.len() == 1 && fresh.iter().any(|c| c.ids.len() > 2));
            // Whether all sequences are kept or some are prefilled again.
            let kept = second_turn(model, batch_size, true);
            for (kept, fresh) in kept.iter().zip(&fresh) {
                assert_eq!((&kept.ids, kept.truncated), (&fresh.ids, fresh.truncated));
                assert!(kept.logps.iter().zip(&fresh.logps).all(|(a, b)| (a - b).abs() < 1e-4), "{kept:?} {fresh:?}");
            }
        }
    }

    #[test]
    fn a_turn_processes_no_token_of_an_earlier_turn_again() {
        let prompts = prompts();
        let (streams, limits) = ([0, 1, 2, 3], [6; 4]);
        let turn = Some(Turn { streams: &streams, limits: &limits, finished: None });
        let mut prepared = None;
        let first = RolloutRequest { turn, ..request(&prompts, 1, random(0)) };
        let first = super::generate(model, &first, 1000, &mut prepared).unwrap();
        let kept = prepared.as_ref().unwrap();
        let mut ids: Vec<Vec<u32>> =
            kept.chunks.iter().flat_map(|chunk| chunk.ids.iter().map(|(_, ids)| ids.clone())).collect();
        // The last token of a completion was never an input.
        let sequence = |(prompt, completion): (&Vec<u32>, &Completion)| {
            [&prompt[..], &completion.ids[..completion.ids.len() - 1]].concat()
        };
        let mut expected: Vec<Vec<u32>> = prompts.iter().zip(&first).map(sequence).collect();
        ids.sort();
        expected.sort();
        assert_eq!(ids, expected);
        // Without the model, only the kept weights and caches can sample the next turn.
        let longer: Vec<Vec<u32>> =
            prompts.iter().zip(&first).map(|(prompt, c)| [&prompt[..], &c.ids, &[11]].concat()).collect();
        let next = RolloutRequest { turn, ..request(&longer, 1, random(0)) };
        super::generate(|| unreachable!("the packed weights are kept"), &next, 1000, &mut prepared).unwrap();
        // A request without a turn drops the caches and keeps the packed weights.
        let plain = request(&prompts, 1, random(0));
        let kept =
            super::generate(|| unreachable!("the packed weights are kept"), &plain, 1000, &mut prepared).unwrap();
        assert!(prepared.as_ref().unwrap().chunks.is_empty());
        assert_eq!(kept, generate(1000, &plain));
    }
}
