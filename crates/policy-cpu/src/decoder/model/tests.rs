//! Shared prompts and invalid input; tests/fast/families.rs compares outputs and gradients with torch.

use super::*;
use crate::GradientSum;
use grpo_policy::Sequence;

fn config() -> ModelConfig {
    ModelConfig { hidden_size: 32, intermediate_size: 48, initializer_range: 0.3, ..ModelConfig::default() }
}

fn decoder(config: &ModelConfig) -> Decoder {
    Decoder::new(config, 11, &Device::flex().autodiff()).unwrap()
}

const LONG: [u32; 7] = [1, 9, 4, 7, 30, 12, 5];

#[test]
fn completions_that_share_a_prompt_have_the_gradient_of_separate_sequences() {
    let recurrent = ModelConfig {
        layers: vec![grpo_models::LayerSpec::GATED_DELTA_NET, grpo_models::LayerSpec::default()],
        linear_attention: Some(grpo_models::LinearAttention::default()),
        attention_output_gate: true,
        ..config()
    };
    let other_head = ModelConfig { tie_word_embeddings: !config().tie_word_embeddings, ..config() };
    [config(), other_head, recurrent].iter().for_each(assert_shared_gradients);
}

fn assert_shared_gradients(config: &ModelConfig) {
    let decoder = decoder(config);
    let of = |prompt: &[u32], completion: &[u32]| Sequence { prompt: prompt.to_vec(), completion: completion.to_vec() };
    let sequences = [of(&LONG, &[3, 8, 2]), of(&[1, 20, 21, 6], &[9, 2]), of(&LONG, &[40, 41, 42, 2])];
    let backward = |hidden: Tensor<2>| hidden.matmul(decoder.lm_head().unwrap().transpose()).tanh().sum().backward();
    let mut together = GradientSum::new();
    let (batch, rows) = PackedBatch::of_completions(&sequences, &[]).unwrap();
    let (hidden, embedded) = decoder.forward_rows(&batch, &rows, &mut Routers::default()).unwrap();
    let mut gradients = backward(hidden);
    let embedded = embedded.unwrap().gradient(&mut gradients);
    together.add_with(&decoder, gradients, Some(&embedded));
    // The embedding is a leaf of these graphs, with a gradient [V, H].
    let mut apart = GradientSum::new();
    for Sequence { prompt, completion } in &sequences {
        let whole = [&prompt[..], &completion[..]].concat();
        let hidden = decoder.forward(&PackedBatch::new(&[&whole[..whole.len() - 1]]).unwrap()).unwrap();
        let [rows, width] = hidden.dims();
        apart.add(&decoder, backward(hidden.slice([prompt.len() - 1..rows, 0..width])));
    }
    for (found, expected) in together.parameters().iter().zip(apart.parameters()) {
        let largest = expected.data.iter().fold(0f32, |m, g| m.max(g.abs()));
        assert!(largest > 1e-3, "{}: no gradient to compare", expected.name);
        let off = found.data.iter().zip(&expected.data).map(|(f, e)| (f - e).abs()).fold(0.0, f32::max);
        assert!(off <= 1e-4 * largest, "{}: off by {off} of {largest}", expected.name);
    }
}

#[test]
fn bad_input_is_an_error() {
    let decoder = decoder(&ModelConfig { max_position_embeddings: 4, ..config() });
    let long = PackedBatch::new(&[LONG]).unwrap();
    assert!(matches!(decoder.forward(&long), Err(Error::TooLong { .. })));
    let unknown = PackedBatch::new(&[[1, 9999]]).unwrap();
    assert!(matches!(decoder.forward(&unknown), Err(Error::Model(grpo_models::Error::UnknownToken { id: 9999, .. }))));

    let inference = decoder.inference().unwrap();
    let (_, mut cache) = inference.prefill(&[&LONG[..3]], 2, 1).unwrap();
    inference.decode(&[3], &[0], &mut cache, &mut Vec::new()).unwrap();
    assert!(inference.decode(&[3], &[0], &mut cache, &mut Vec::new()).is_err(), "sample 0 is full");
    assert!(inference.decode(&[3], &[2], &mut cache, &mut Vec::new()).is_err(), "there is no sample 2");
    assert!(inference.decode(&[9999], &[1], &mut cache, &mut Vec::new()).is_err(), "there is no such token");
}
