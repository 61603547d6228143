//! The decoder against plain burn operations, and its invariances.

use super::*;
use crate::decoder::to_host;
use burn::tensor::activation::{silu, softmax};

fn config() -> ModelConfig {
    ModelConfig { hidden_size: 32, intermediate_size: 48, initializer_range: 0.3, ..ModelConfig::default() }
}

fn decoder(config: &ModelConfig) -> Decoder {
    Decoder::new(config, 11, &Device::flex()).unwrap()
}

/// Returns the hidden states of each sequence.
fn rows<S: AsRef<[u32]>>(decoder: &Decoder, sequences: &[S]) -> Vec<Vec<f32>> {
    let batch = PackedBatch::new(sequences).unwrap();
    let hidden = to_host(decoder.forward(&batch).unwrap());
    let h = decoder.config().hidden_size;
    batch.sequences.spans.iter().map(|span| hidden[span.rows.start * h..span.rows.end * h].to_vec()).collect()
}

/// Returns normal values.
fn noise(shape: [usize; 2], seed: u64, name: &str) -> TensorData {
    TensorData::new(rng::normal_weights(0..shape[0] * shape[1], 1.0, seed, name), shape)
}

#[track_caller]
fn assert_close(a: &[f32], b: &[f32], tolerance: f32) {
    assert_eq!(a.len(), b.len());
    let largest = a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
    assert!(largest <= tolerance, "largest difference {largest} > {tolerance}");
    assert!(a.iter().any(|x| x.abs() > 0.1), "states too small to tell anything");
}

const LONG: [u32; 7] = [1, 9, 4, 7, 30, 12, 5];
const SHORT: [u32; 4] = [1, 20, 21, 6];

#[test]
fn a_sequence_does_not_depend_on_others_in_its_batch() {
    let decoder = decoder(&config());
    let alone = rows(&decoder, &[SHORT]);
    assert_eq!(rows(&decoder, &[&LONG[..], &SHORT])[1], alone[0]);
    assert_eq!(rows(&decoder, &[&SHORT[..], &LONG, &SHORT])[2], alone[0]);
}

/// Computes the decoder with burn's own operations, one sequence at a time.
fn plain(decoder: &Decoder, ids: &[u32]) -> Tensor<2> {
    let (config, device) = (decoder.config(), decoder.device());
    let (t, a, k, d) = (ids.len(), config.num_attention_heads, config.num_key_value_heads, config.head_dim());
    let norm = |x: Tensor<2>, weight: &Param<Tensor<1>>| {
        let rms = (x.clone().square().mean_dim(1) + config.rms_norm_eps).sqrt();
        x / rms * weight.val().unsqueeze()
    };
    let table = |of: fn(f64) -> f64| {
        let angle = |p: usize, i: usize| p as f64 * config.rope_theta.powf(-2.0 * (i % (d / 2)) as f64 / d as f64);
        let values: Vec<f32> = (0..t * d).map(|at| of(angle(at / d, at % d)) as f32).collect();
        Tensor::<3>::from_data(TensorData::new(values, [t, 1, d]), &device)
    };
    let turned = |x: Tensor<3>| {
        let (first, second) = (x.clone().narrow(2, 0, d / 2), x.clone().narrow(2, d / 2, d / 2));
        x * table(f64::cos) + Tensor::cat(vec![-second, first], 2) * table(f64::sin)
    };
    let hidden: Vec<f32> = (0..t * t).map(|at| if at % t > at / t { -1e9 } else { 0.0 }).collect();
    let mask = Tensor::<3>::from_data(TensorData::new(hidden, [1, t, t]), &device);
    let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [t]), &device);
    let mut x = decoder.embed_tokens.val().select(0, ids);
    for layer in &decoder.layers {
        let attn = &layer.attn;
        let qkv = norm(x.clone(), &layer.input_norm.weight).matmul(attn.qkv_proj.weight.val());
        let qkv = qkv + attn.qkv_proj.bias.as_ref().unwrap().val().unsqueeze();
        let qkv = qkv.reshape([t, a + 2 * k, d]);
        let queries = turned(qkv.clone().narrow(1, 0, a)).swap_dims(0, 1);
        // Repeat keys and values for their query heads.
        let repeated = |x: Tensor<3>| {
            let heads = (0..a).map(|head| x.clone().narrow(1, head / (a / k), 1)).collect();
            Tensor::cat(heads, 1).swap_dims(0, 1)
        };
        let keys = repeated(turned(qkv.clone().narrow(1, a, k)));
        let values = repeated(qkv.narrow(1, a + k, k));
        let scores = queries.matmul(keys.swap_dims(1, 2)) / (d as f64).sqrt() + mask.clone();
        let mixed = softmax(scores, 2).matmul(values).swap_dims(0, 1).reshape([t, a * d]);
        x = x + mixed.matmul(attn.o_proj.weight.val());
        let gate_up = norm(x.clone(), &layer.post_norm.weight).matmul(layer.mlp.gate_up_proj.weight.val());
        let width = config.intermediate_size;
        let mixed = silu(gate_up.clone().narrow(1, 0, width)) * gate_up.narrow(1, width, width);
        x = x + mixed.matmul(layer.mlp.down_proj.weight.val());
    }
    norm(x, &decoder.norm.weight)
}

/// Outputs and gradients of all parameters match plain burn operations with burn's derivatives.
#[test]
fn the_decoder_and_its_gradient_match_plain_burn() {
    for (tied, kv_heads) in [(false, 2), (true, 4)] {
        let config = ModelConfig { num_key_value_heads: kv_heads, tie_word_embeddings: tied, ..config() };
        let decoder = Decoder::new(&config, 11, &Device::flex().autodiff()).unwrap();
        // Change biases and norms from their initial 0 and 1, which could hide errors.
        let mut moved = decoder.parameters();
        for (i, parameter) in moved.iter_mut().filter(|p| p.shape.len() == 1).enumerate() {
            parameter.data.iter_mut().enumerate().for_each(|(j, x)| *x += ((i + 3 * j) % 7) as f32 * 0.1 - 0.2);
        }
        let decoder = decoder.with_parameters(&moved).unwrap();
        // Two completions of one prompt, one of another.
        let of = |prompt: &[u32], completion: &[u32]| policy::Sequence {
            prompt: prompt.to_vec(),
            completion: completion.to_vec(),
        };
        let sequences = [of(&LONG, &[3, 8, 2]), of(&SHORT, &[9, 2]), of(&LONG, &[40, 41, 42, 2])];
        let count: usize = sequences.iter().map(|s| s.completion.len()).sum();
        let weights = Tensor::<2>::from_data(noise([count, 32], 4, "weights"), &decoder.device());

        let found = crate::sequences::completion_hidden(&decoder, &sequences).unwrap();
        let expected = sequences.iter().map(|s| {
            let whole = [&s.prompt[..], &s.completion[..s.completion.len() - 1]].concat();
            plain(&decoder, &whole).narrow(0, s.prompt.len() - 1, s.completion.len())
        });
        let expected = Tensor::cat(expected.collect(), 0);
        assert_close(&to_host(found.clone().inner()), &to_host(expected.clone().inner()), 2e-5);
        // The loss includes the head, so that a tied embedding has two gradients.
        let loss = |hidden: Tensor<2>| {
            ((hidden.matmul(decoder.lm_head().unwrap().transpose()).tanh().sum_dim(1) + 0.5) * weights.clone()).sum()
        };
        let gradients = |loss: Tensor<1>| {
            let mut sum = crate::GradientSum::new();
            sum.add(&decoder, loss.backward());
            sum
        };
        let (found, expected) = (gradients(loss(found)), gradients(loss(expected)));
        for (found, expected) in found.parameters().iter().zip(expected.parameters()) {
            let largest = expected.data.iter().fold(0f32, |m, g| m.max(g.abs()));
            assert!(largest > 1e-3, "{}: no gradient to compare", expected.name);
            let off = found.data.iter().zip(&expected.data).map(|(f, e)| (f - e).abs()).fold(0.0, f32::max);
            assert!(off <= 1e-4 * largest, "{}: off by {off} of {largest}", expected.name);
        }
    }
}

#[test]
fn a_future_token_does_not_change_earlier_states() {
    let decoder = decoder(&config());
    let mut changed = LONG;
    changed[5] = 40;
    let before = &rows(&decoder, &[LONG])[0];
    let after = &rows(&decoder, &[changed])[0];
    let h = decoder.config().hidden_size;
    assert_close(&before[..5 * h], &after[..5 * h], 0.0);
    let moved = before[5 * h..].iter().zip(&after[5 * h..]).any(|(a, b)| (a - b).abs() > 0.1);
    assert!(moved, "the changed token itself must matter");
}

#[test]
fn an_earlier_token_changes_later_states() {
    let decoder = decoder(&config());
    let mut changed = LONG;
    changed[1] = 40;
    let before = &rows(&decoder, &[LONG])[0];
    let after = &rows(&decoder, &[changed])[0];
    let last = before.len() - decoder.config().hidden_size;
    assert!(before[last..].iter().zip(&after[last..]).any(|(a, b)| (a - b).abs() > 1e-2));
}

#[test]
fn cached_decoding_equals_the_full_forward() {
    let decoder = decoder(&config());
    let inference = decoder.inference().unwrap();
    let prompts = [LONG.to_vec(), SHORT.to_vec()];
    let (first, mut cache) = inference.prefill(&PackedBatch::new(&prompts).unwrap(), 2, 3).unwrap();
    let logits = |ids: &[u32]| {
        let all = decoder.forward(&PackedBatch::new(&[ids]).unwrap()).unwrap();
        let last = all.clone().narrow(0, ids.len() - 1, 1);
        to_host(last.matmul(decoder.lm_head().unwrap().transpose()))
    };
    let vocab = inference.vocab();
    for (prompt, found) in prompts.iter().zip(first.chunks_exact(vocab)) {
        assert_close(found, &logits(prompt), 2e-5);
    }
    // Two samples per prompt; sample 1 stops after its first token.
    let mut whole: Vec<Vec<u32>> = prompts.iter().flat_map(|prompt| [prompt.clone(), prompt.clone()]).collect();
    for (samples, ids) in
        [(&[0, 1, 2, 3][..], &[33, 8, 2, 45][..]), (&[0, 2, 3], &[17, 3, 4]), (&[0, 2, 3], &[5, 6, 7])]
    {
        let found = inference.decode(ids, samples, &mut cache).unwrap();
        for ((sample, id), found) in samples.iter().zip(ids).zip(found.chunks_exact(vocab)) {
            whole[*sample].push(*id);
            assert_close(found, &logits(&whole[*sample]), 2e-5);
        }
    }
    assert!(inference.decode(&[3], &[0], &mut cache).is_err(), "sample 0 is full");
    assert!(inference.decode(&[3], &[4], &mut cache).is_err(), "there is no sample 4");
    assert!(inference.decode(&[9999], &[1], &mut cache).is_err(), "there is no such token");
}

#[test]
fn grouped_queries_equal_repeated_key_value_heads() {
    let grouped = decoder(&config());
    let full_config = ModelConfig { num_key_value_heads: 4, ..config() };
    let full = decoder(&full_config);
    // Each head of keys and values has D rows; the full model has each of them twice.
    let d = config().head_dim();
    let repeated: Vec<NamedTensor> = grouped
        .parameters()
        .into_iter()
        .map(|mut p| {
            if p.name.contains("k_proj") || p.name.contains("v_proj") {
                let head = p.data.len() / 2;
                p.data = p.data.chunks_exact(head).flat_map(|head| [head, head].concat()).collect();
                p.shape[0] = 4 * d;
            }
            p
        })
        .collect();
    let full = full.with_parameters(&repeated).unwrap();
    assert_close(&rows(&grouped, &[LONG])[0], &rows(&full, &[LONG])[0], 1e-5);
}

/// Attention with a head dimension larger than hidden_size / num_attention_heads (Qwen3), computed in f64 for every position.
#[test]
fn head_dim_may_differ_from_hidden_size_per_head() {
    let config = ModelConfig { head_dim: Some(12), num_hidden_layers: 1, ..config() };
    let decoder = decoder(&config);
    let (h, a, k, d) = (config.hidden_size, 4, 2, 12);
    let attn = &decoder.layers[0].attn;
    assert_eq!(attn.qkv_proj.weight.dims(), [h, (a + 2 * k) * d]);
    assert_eq!(attn.o_proj.weight.dims(), [a * d, h]);

    let t = LONG.len();
    let input = Tensor::<2>::from_data(noise([t, h], 3, "x"), &decoder.device());
    let (x, w) = (to_host(input.clone()), |tensor: Tensor<2>| to_host(tensor));
    let product = |rows: &[f64], weight: &[f32], width: usize| -> Vec<f64> {
        let of_row = |row: &[f64]| {
            (0..width)
                .map(|j| row.iter().enumerate().map(|(i, x)| x * f64::from(weight[i * width + j])).sum::<f64>())
                .collect::<Vec<_>>()
        };
        rows.chunks_exact(weight.len() / width).flat_map(of_row).collect()
    };
    let x: Vec<f64> = x.into_iter().map(f64::from).collect();
    // Biases are initially zero.
    let qkv = product(&x, &w(attn.qkv_proj.weight.val()), (a + 2 * k) * d);
    let head = |position: usize, head: usize| &qkv[(position * (a + 2 * k) + head) * d..][..d];
    let turned = |position: usize, of: usize| -> Vec<f64> {
        let (x, half) = (head(position, of), d / 2);
        let angle = |i: usize| position as f64 * config.rope_theta.powf(-2.0 * (i % half) as f64 / d as f64);
        (0..d)
            .map(|i| {
                let other = if i < half { -x[i + half] } else { x[i - half] };
                x[i] * angle(i).cos() + other * angle(i).sin()
            })
            .collect()
    };
    let mut mixed = Vec::new();
    for query in 0..t {
        for of in 0..a {
            let (q, kv) = (turned(query, of), of / (a / k));
            let score = |key: usize| {
                let key = turned(key, a + kv);
                (q.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = (0..=query).map(score).collect();
            let total: f64 = weights.iter().sum();
            let value = |i: usize| (0..=query).map(|key| weights[key] / total * head(key, a + k + kv)[i]).sum::<f64>();
            mixed.extend((0..d).map(value));
        }
    }
    let expected: Vec<f32> = product(&mixed, &w(attn.o_proj.weight.val()), h).iter().map(|x| *x as f32).collect();

    let batch = PackedBatch::new(&[LONG]).unwrap();
    let nothing = Tensor::zeros([t, h], &decoder.device());
    let found = attn.forward(input, nothing, &decoder.rope().table(t).unwrap(), &batch.sequences).unwrap();
    assert_close(&to_host(found), &expected, 1e-4);
}

#[test]
fn an_explicit_head_dim_equals_the_derived_one() {
    let said = ModelConfig { head_dim: Some(config().hidden_size / config().num_attention_heads), ..config() };
    assert_eq!(decoder(&said).parameters(), decoder(&config()).parameters());
    assert_eq!(rows(&decoder(&said), &[LONG]), rows(&decoder(&config()), &[LONG]));
}

#[test]
fn weights_depend_on_the_seed_only_and_load_back_exactly() {
    let bits =
        |d: &Decoder| d.parameters().into_iter().flat_map(|p| p.data.into_iter().map(f32::to_bits)).collect::<Vec<_>>();
    let first = decoder(&config());
    assert_eq!(bits(&first), bits(&decoder(&config())));
    let other = Decoder::new(&config(), 12, &Device::flex().autodiff()).unwrap();
    assert_ne!(bits(&first), bits(&other));
    let loaded = other.with_parameters(&first.parameters()).unwrap();
    assert_eq!(bits(&first), bits(&loaded));
    assert!(loaded.embed_tokens.val().is_require_grad(), "loading must not freeze");
}

#[test]
fn parameters_are_tensors_of_transformers_and_tying_drops_the_head() {
    for config in [config(), ModelConfig { tie_word_embeddings: true, ..config() }] {
        let mut found: Vec<_> = decoder(&config).parameters().into_iter().map(|p| (p.name, p.shape)).collect();
        let mut expected: Vec<_> = config.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
    }
    let tied = decoder(&ModelConfig { tie_word_embeddings: true, ..config() });
    assert_eq!(to_host(tied.lm_head().unwrap()), tied.parameters()[0].data);
}

#[test]
fn loading_rejects_missing_extra_and_misshapen_tensors() {
    let good = decoder(&config()).parameters();
    let load = |tensors: &[NamedTensor]| decoder(&config()).with_parameters(&tensors);
    assert!(matches!(load(&good[1..]), Err(Error::State { .. })), "missing");
    let mut wrong = good.clone();
    wrong[0].shape.reverse();
    assert!(matches!(load(&wrong), Err(Error::State { .. })), "shape");
    let mut extra = good.clone();
    extra.push(NamedTensor { name: "x".into(), shape: vec![1], data: vec![0.0] });
    assert!(matches!(load(&extra), Err(Error::State { .. })), "extra");
}

#[test]
fn bad_input_is_an_error() {
    let decoder = decoder(&ModelConfig { max_position_embeddings: 4, ..config() });
    let long = PackedBatch::new(&[LONG]).unwrap();
    assert!(matches!(decoder.forward(&long), Err(Error::TooLong { .. })));
    let unknown = PackedBatch::new(&[[1, 9999]]).unwrap();
    assert!(matches!(decoder.forward(&unknown), Err(Error::Model(models::Error::UnknownToken { id: 9999, .. }))));
}
