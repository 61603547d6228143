//! The operation as a node of a larger graph: upstream layers, scaled and summed losses, frozen and tied heads.

use super::case::{Case, H, N, OFFSETS, V, assert_close, grpo, laid_out, tensor, transposed, values};
use super::plain;
use burn::tensor::{Device, GradientCheckpointingStrategy, Int, Tensor, TensorData, s};
use grpo_core::{HeadLayout, Implementation, LossConfig};
use rstest::rstest;

const TOLERANCE: f32 = 1e-5;
const IMPLEMENTATIONS: &[Implementation] = &Implementation::ALL;

fn config() -> LossConfig {
    LossConfig { beta: 0.1, ..LossConfig::default() }
}

/// Returns the gradients of a leaf `[H, H]` that produces the hidden states, and of the head.
fn through_layer(case: &Case, make: impl FnOnce(Tensor<2>, Tensor<2>) -> Tensor<1>) -> [Vec<f32>; 2] {
    let device = Device::flex().autodiff();
    let (input, head, _) = case.leaves(&device);
    let weight = tensor(&case.lm_head[..H * H], [H, H], &device).require_grad();
    let loss = make(input.detach().matmul(weight.clone()).tanh(), head.clone());
    let grads = loss.backward();
    [values(weight.grad(&grads).unwrap()), values(head.grad(&grads).unwrap())]
}

#[test]
fn gradients_reach_upstream_layers() {
    let (config, case) = (config(), Case::new(&config()));
    let expected = through_layer(&case, |h, w| plain::loss(&config, h.matmul(w.transpose()), &case));
    for implementation in IMPLEMENTATIONS.iter().copied() {
        let grpo = grpo(&config, implementation);
        let found = through_layer(&case, |h, w| grpo.loss(h, w, None, &case.batch()).unwrap().loss);
        for (what, (found, expected)) in ["upstream weight", "lm_head"].iter().zip(found.iter().zip(&expected)) {
            assert_close(&format!("{} {what}", implementation.name()), found, expected, TOLERANCE);
        }
    }
}

#[test]
fn summed_micro_batches_equal_the_whole_batch() {
    let (config, case) = (config(), Case::new(&config()));
    let whole = config.prepare_step(&case.batch()).unwrap();
    let cut = |b: std::ops::Range<usize>| (OFFSETS[b.start], OFFSETS[b.end], whole.select_sequences(b).unwrap());
    let grpo = grpo(&config, Implementation::Reference);
    let expected = through_layer(&case, |h, w| grpo.loss(h, w, None, &whole).unwrap().loss);
    let found = through_layer(&case, |h, w| {
        [cut(0..2), cut(2..5)]
            .map(|(from, to, batch)| {
                // A slice is a view with an offset into the storage of all hidden states.
                grpo.loss(h.clone().slice([from..to, 0..H]), w.clone(), None, &batch).unwrap().loss
            })
            .into_iter()
            .reduce(|a, b| a + b)
            .unwrap()
    });
    assert_close("micro-batches: upstream weight", &found[0], &expected[0], TOLERANCE);
    assert_close("micro-batches: lm_head", &found[1], &expected[1], TOLERANCE);
}

#[rstest]
fn tied_embeddings_accumulate_both_gradients(
    #[values(Implementation::Reference, Implementation::Logits, Implementation::Fused)] implementation: Implementation,
    #[values(false, true)] turned: bool,
) {
    let (config, case) = (config(), Case::new(&config()));
    let device = Device::flex().autodiff();
    let run = |make: &mut dyn FnMut(Tensor<2>, Tensor<2>) -> Tensor<1>| {
        let embedding = tensor(&case.lm_head, [V, H], &device).require_grad();
        let ids: Vec<i64> = (0..N).map(|i| ((i * 5 + 2) % V) as i64).collect();
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [N]), &device);
        let loss = make(embedding.clone().select(0, ids), embedding.clone());
        values(embedding.grad(&loss.backward()).unwrap())
    };
    let expected = run(&mut |h, w| plain::loss(&config, h.matmul(w.transpose()), &case));
    let head_alone = run(&mut |h, w| plain::loss(&config, h.detach().matmul(w.transpose()), &case));
    let layout = if turned { HeadLayout::HiddenVocab } else { HeadLayout::VocabHidden };
    let grpo = laid_out(&config, implementation, layout);
    let found = run(&mut |h, w| {
        let head = if turned { w.transpose() } else { w };
        grpo.loss(h, head, None, &case.batch()).unwrap().loss
    });
    assert_close(&format!("tied {} turned: {turned}", implementation.name()), &found, &expected, TOLERANCE);
    let share = expected.iter().zip(&head_alone).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(share > 1e-3, "the embedding's own share is all but zero: {share}");
}

/// A micro-batch in which every token is masked: its loss stays on the graph, as 0 with gradients of 0, alone and in a sum
/// with others.
#[rstest]
fn batch_without_active_tokens_keeps_the_graph(
    #[values(Implementation::Reference, Implementation::Logits, Implementation::Fused)] implementation: Implementation,
) {
    let (config, case) = (config(), Case::new(&config()));
    let batch = case.batch();
    let masked = batch.clone().with_mask(&[0.0; N]).unwrap();
    let grpo = grpo(&config, implementation);
    let alone = through_layer(&case, |h, w| grpo.loss(h, w, None, &masked).unwrap().loss);
    assert!(alone.iter().flatten().all(|g| *g == 0.0), "{alone:?}");

    let expected = through_layer(&case, |h, w| grpo.loss(h, w, None, &batch).unwrap().loss);
    let found = through_layer(&case, |h, w| {
        let empty = grpo.loss(h.clone(), w.clone(), None, &masked).unwrap();
        assert_eq!(empty.value, 0.0);
        empty.loss + grpo.loss(h, w, None, &batch).unwrap().loss
    });
    assert_eq!(found, expected);

    if implementation != Implementation::Fused {
        let logits = tensor(&vec![f32::NAN; N * V], [N, V], &Device::flex().autodiff()).require_grad();
        let loss = grpo.loss_from_logits(logits.clone() * 1.0, &masked).unwrap().loss;
        assert_eq!(values(logits.grad(&loss.backward()).unwrap()), vec![0.0; N * V]);
    }
}

#[test]
fn tensors_may_be_padded_sliced_and_transposed() {
    let (config, case) = (config(), Case::new(&config()));
    let device = Device::flex().autodiff();
    let grpo = grpo(&config, Implementation::Reference);
    let (hidden, head, _) = case.leaves(&device);
    let batch = case.batch();
    let flat = grpo.loss(hidden.clone(), head.clone(), None, &batch).unwrap().loss.backward();
    let (expected, expected_head) = (values(hidden.grad(&flat).unwrap()), values(head.grad(&flat).unwrap()));

    let grads = grpo.loss(hidden.clone().reshape([2, N / 2, H]), head.clone(), None, &batch).unwrap().loss.backward();
    assert_close("[B, T, H]", &values(hidden.grad(&grads).unwrap()), &expected, 1e-6);

    // Hidden states stored as [H, N] must be copied to rows; a head stored as [H, V] is read in place.
    let turned = tensor(&transposed(&case.hidden, H), [H, N], &device).require_grad();
    let turned_head = tensor(&transposed(&case.lm_head, H), [H, V], &device).require_grad();
    let loss = grpo.loss(turned.clone().transpose(), turned_head.clone().transpose(), None, &batch).unwrap().loss;
    let grads = loss.backward();
    let found = [(&turned, N, expected), (&turned_head, V, expected_head.clone())];
    for (what, (leaf, columns, expected)) in ["hidden of a view", "lm_head of a view"].iter().zip(found) {
        assert_close(what, &transposed(&values(leaf.grad(&grads).unwrap()), columns), &expected, TOLERANCE);
    }

    // Every other column of a wider head: neither its rows nor its columns are contiguous.
    let wide: Vec<f32> = case.lm_head.iter().flat_map(|w| [*w, 9.0]).collect();
    let wide = tensor(&wide, [V, 2 * H], &device).require_grad();
    let strided = wide.clone().slice([s![..], s![0..;2]]);
    let grads = grpo.loss(hidden, strided, None, &batch).unwrap().loss.backward();
    let found: Vec<f32> = values(wide.grad(&grads).unwrap()).into_iter().step_by(2).collect();
    assert_close("lm_head of a strided slice", &found, &expected_head, TOLERANCE);
}

#[test]
fn balanced_checkpointing_gives_the_same_gradients() {
    let (config, case) = (config(), Case::new(&config()));
    let run = |strategy| {
        let device = Device::flex().autodiff();
        let leaf = |t: Tensor<2>| t.detach().with_gradient_checkpointing_strategy(strategy).require_grad();
        let (hidden, head, _) = case.leaves(&device);
        let (hidden, head) = (leaf(hidden.inner().autodiff()), leaf(head.inner().autodiff()));
        let loss = grpo(&config, Implementation::Reference)
            .loss(hidden.clone().exp().log(), head, None, &case.batch())
            .unwrap()
            .loss;
        assert_eq!(loss.gradient_checkpointing_strategy(), Some(strategy));
        values(hidden.grad(&(loss * 2.0).backward()).unwrap())
    };
    let expected = run(GradientCheckpointingStrategy::Disabled);
    assert_close("balanced", &run(GradientCheckpointingStrategy::Balanced), &expected, TOLERANCE);
}
