//! The decoder against what it must be invariant to.

use super::*;
use crate::decoder::params::to_host;

fn config() -> ModelConfig {
    ModelConfig { hidden_size: 32, intermediate_size: 48, initializer_range: 0.3, ..ModelConfig::default() }
}

fn decoder(config: &ModelConfig) -> Decoder {
    Decoder::new(config, 11, &Device::flex()).unwrap()
}

/// Hidden states of each row, without padding.
fn rows(decoder: &Decoder, batch: &PaddedBatch) -> Vec<Vec<f32>> {
    let hidden = to_host(decoder.forward(batch).unwrap());
    let h = decoder.config().hidden_size;
    (0..batch.rows())
        .map(|b| {
            let first = (b * batch.columns + batch.start[b]) * h;
            hidden[first..first + batch.len[b] * h].to_vec()
        })
        .collect()
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
fn padding_on_either_side_changes_nothing() {
    let decoder = decoder(&config());
    let alone = rows(&decoder, &PaddedBatch::right_padded(&[SHORT]).unwrap());
    let pair = [LONG.to_vec(), SHORT.to_vec()];
    let right = rows(&decoder, &PaddedBatch::right_padded(&pair).unwrap());
    let left = rows(&decoder, &PaddedBatch::left_padded(&pair).unwrap());
    assert_close(&alone[0], &right[1], 1e-5);
    assert_close(&alone[0], &left[1], 1e-5);
    assert_close(&right[0], &left[0], 1e-5);
}

#[test]
fn hidden_states_of_padding_are_finite() {
    let decoder = decoder(&config());
    let batch = PaddedBatch::left_padded(&[LONG.to_vec(), SHORT.to_vec()]).unwrap();
    assert!(to_host(decoder.forward(&batch).unwrap()).iter().all(|x| x.is_finite()));
}

#[test]
fn a_future_token_does_not_change_earlier_states() {
    let decoder = decoder(&config());
    let mut changed = LONG;
    changed[5] = 40;
    let before = &rows(&decoder, &PaddedBatch::right_padded(&[LONG]).unwrap())[0];
    let after = &rows(&decoder, &PaddedBatch::right_padded(&[changed]).unwrap())[0];
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
    let before = &rows(&decoder, &PaddedBatch::right_padded(&[LONG]).unwrap())[0];
    let after = &rows(&decoder, &PaddedBatch::right_padded(&[changed]).unwrap())[0];
    let last = before.len() - decoder.config().hidden_size;
    assert!(before[last..].iter().zip(&after[last..]).any(|(a, b)| (a - b).abs() > 1e-2));
}

#[test]
fn cached_decoding_equals_the_full_forward() {
    let decoder = decoder(&config());
    let sequences = [LONG.to_vec(), SHORT.to_vec()];
    let suffix: [[u32; 2]; 3] = [[33, 8], [2, 45], [17, 3]];
    let prompts = PaddedBatch::left_padded(&sequences).unwrap();
    let (hidden, mut cache) = decoder.prefill(&prompts, prompts.columns + 3).unwrap();
    let mut got: Vec<Vec<f32>> = vec![Vec::new(); 2];
    let [_, t, h] = hidden.dims();
    let hidden = to_host(hidden);
    for b in 0..2 {
        got[b].extend_from_slice(&hidden[(b * t + prompts.start[b]) * h..(b + 1) * t * h]);
    }
    for ids in suffix {
        let hidden = to_host(decoder.decode(&ids, &prompts.start, &mut cache).unwrap());
        got[0].extend_from_slice(&hidden[..h]);
        got[1].extend_from_slice(&hidden[h..]);
    }
    let whole: Vec<Vec<u32>> =
        (0..2).map(|b| sequences[b].iter().copied().chain(suffix.iter().map(|ids| ids[b])).collect()).collect();
    let want = rows(&decoder, &PaddedBatch::right_padded(&whole).unwrap());
    assert_close(&got[0], &want[0], 2e-5);
    assert_close(&got[1], &want[1], 2e-5);
    assert!(matches!(decoder.decode(&[3, 3], &prompts.start, &mut cache), Err(Error::TooLong { .. })));
}

#[test]
fn a_repeated_cache_serves_each_sample() {
    let decoder = decoder(&config());
    let prompts = PaddedBatch::left_padded(&[LONG.to_vec(), SHORT.to_vec()]).unwrap();
    let (_, mut cache) = decoder.prefill(&prompts, 8).unwrap();
    let (_, once) = decoder.prefill(&prompts, 8).unwrap();
    let mut twice = once.repeat_each(2);
    let single = to_host(decoder.decode(&[7, 9], &[0, 3], &mut cache).unwrap());
    let double = to_host(decoder.decode(&[7, 7, 9, 9], &[0, 0, 3, 3], &mut twice).unwrap());
    let h = decoder.config().hidden_size;
    for (sample, prompt) in [0, 0, 1, 1].into_iter().enumerate() {
        assert_close(&double[sample * h..(sample + 1) * h], &single[prompt * h..(prompt + 1) * h], 1e-5);
    }
}

#[test]
fn grouped_queries_equal_repeated_key_value_heads() {
    let grouped = decoder(&config());
    let full_config = ModelConfig { num_key_value_heads: 4, ..config() };
    let full = decoder(&full_config);
    // Columns of qkv_proj are heads of width D: 4 queries, 2 keys, 2 values; the full model repeats keys and values.
    let d = config().head_dim();
    let heads = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7];
    let repeated: Vec<NamedTensor> = grouped
        .parameters()
        .into_iter()
        .map(|p| {
            if !p.name.contains("qkv_proj") {
                return p;
            }
            let data = p
                .data
                .chunks_exact(8 * d)
                .flat_map(|row| heads.iter().flat_map(|&head| row[head * d..(head + 1) * d].to_vec()))
                .collect();
            let mut shape = p.shape.clone();
            *shape.last_mut().unwrap() = 12 * d;
            NamedTensor { shape, data, ..p }
        })
        .collect();
    let full = full.with_parameters(&repeated).unwrap();
    let batch = PaddedBatch::right_padded(&[LONG]).unwrap();
    assert_close(&rows(&grouped, &batch)[0], &rows(&full, &batch)[0], 1e-5);
}

/// Attention of heads that are wider than hidden_size / num_attention_heads (Qwen3), written out in f64 for every position.
#[test]
fn heads_have_a_width_of_their_own() {
    let config = ModelConfig { head_dim: Some(12), num_hidden_layers: 1, ..config() };
    let decoder = decoder(&config);
    let (h, a, k, d) = (config.hidden_size, 4, 2, 12);
    let attn = &decoder.layers[0].attn;
    assert_eq!(attn.qkv_proj.weight.dims(), [h, (a + 2 * k) * d]);
    assert_eq!(attn.o_proj.weight.dims(), [a * d, h]);

    let t = LONG.len();
    let input = Tensor::<2>::from_data(normal([t, h], 1.0, 3, "x"), &decoder.device());
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
    // Biases are zero at the beginning.
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

    let batch = PaddedBatch::right_padded(&[LONG]).unwrap();
    let rotation = decoder.rope.rotation(&batch.positions(), [1, t], &decoder.device());
    let mask = mask(&batch, 0..t, t, &decoder.device());
    let found = attn.forward(input.reshape([1, t, h]), &rotation, mask.as_ref(), None);
    assert_close(&to_host(found), &expected, 1e-4);
}

#[test]
fn a_width_that_is_said_and_derived_is_the_same_model() {
    let said = ModelConfig { head_dim: Some(config().hidden_size / config().num_attention_heads), ..config() };
    assert_eq!(decoder(&said).parameters(), decoder(&config()).parameters());
    let batch = PaddedBatch::right_padded(&[LONG]).unwrap();
    assert_eq!(rows(&decoder(&said), &batch), rows(&decoder(&config()), &batch));
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
fn names_are_paths_and_tying_drops_the_head() {
    let names: Vec<String> = decoder(&config()).parameters().into_iter().map(|p| p.name).collect();
    assert_eq!(names[0], "embed_tokens");
    assert!(names.contains(&"layers.0.attn.qkv_proj.weight".to_owned()), "{names:?}");
    assert!(names.contains(&"layers.1.mlp.down_proj.weight".to_owned()));
    assert!(names.contains(&"lm_head".to_owned()));
    let tied = decoder(&ModelConfig { tie_word_embeddings: true, ..config() });
    assert!(tied.parameters().iter().all(|p| p.name != "lm_head"));
    assert_eq!(to_host(tied.lm_head()), tied.parameters()[0].data);
}

#[test]
fn loading_refuses_what_does_not_fit() {
    let good = decoder(&config()).parameters();
    let load = |tensors: &[NamedTensor]| decoder(&config()).with_parameters(tensors);
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
    let long = PaddedBatch::right_padded(&[LONG]).unwrap();
    assert!(matches!(decoder.forward(&long), Err(Error::TooLong { .. })));
    let unknown = PaddedBatch::right_padded(&[[1, 9999]]).unwrap();
    assert!(matches!(decoder.forward(&unknown), Err(Error::Model(models::Error::UnknownToken { id: 9999, .. }))));
}
