//! Steps in micro-batches, and masked tokens: the denominators of means.

use super::*;
use grpo_core::batch::{Rows, StepData};
use grpo_testkit::config;
use rstest::rstest;

/// Sequences of one, three and two tokens, each with p = 1/2: on policy, a token's term is -A and its derivative -A.
fn six() -> ([f32; 12], TokenBatch) {
    let batch = TokenBatch::packed(vec![0; 6], vec![0, 1, 4, 6]).unwrap();
    ([0.0; 12], batch.with_advantages(Advantages::PerSequence(ADVANTAGES.to_vec())).unwrap())
}

type Select = fn(&TokenBatch, std::ops::Range<usize>) -> grpo_core::Result<TokenBatch>;

const ADVANTAGES: [f32; 3] = [1.0, -0.6, 0.5];
const SEQUENCE: [usize; 6] = [0, 1, 1, 1, 2, 2];

/// Runs the parts `0..cut` and `cut..3` of `batch`, which `select` returns, and adds the results.
fn added(loss: &LossConfig, z: &[f32], batch: &TokenBatch, cut: usize, select: Select) -> Vec<Found> {
    let of = |part: std::ops::Range<usize>| {
        let rows = 2 * batch.offsets()[part.start]..2 * batch.offsets()[part.end];
        everywhere(loss, &z[rows], 2, &select(batch, part).unwrap())
    };
    let mut sum = of(0..cut);
    for (sum, part) in sum.iter_mut().zip(of(cut..3)) {
        assert_eq!(sum.how, part.how);
        sum.loss += part.loss;
        sum.dz.extend(part.dz);
    }
    sum
}

/// `weights`: one per token.
#[track_caller]
fn assert_weighs(found: &[Found], expected: f64, weights: [f64; 6]) {
    for Found { how, loss, dz, .. } in found {
        assert!((loss - expected).abs() <= 1e-6, "{how}: {loss} for {expected}");
        for (i, weight) in weights.into_iter().enumerate() {
            // d log p_0 / dz_0 = 1 - p_0
            let slope = -f64::from(ADVANTAGES[SEQUENCE[i]]) * weight * 0.5;
            let right = (f64::from(dz[2 * i]) - slope).abs() < 1e-7 && dz[2 * i + 1] == -dz[2 * i];
            assert!(right, "{how}, token {i}: {:?} for {slope}", &dz[2 * i..2 * i + 2]);
        }
    }
}

/// Gradient accumulation. The naive average of the micro-batches, each as a separate step, differs: -0.42 under dapo,
/// where the step gives -0.033.
#[rstest]
#[case::dapo(r#"{"loss_type": "dapo"}"#, -0.2 / 6.0, [1.0 / 6.0; 6])]
#[case::bnpo(r#"{"loss_type": "bnpo"}"#, -0.2 / 6.0, [1.0 / 6.0; 6])]
#[case::grpo(r#"{"loss_type": "grpo"}"#, -0.9 / 3.0, [1.0 / 3.0, 1.0 / 9.0, 1.0 / 9.0, 1.0 / 9.0, 1.0 / 6.0, 1.0 / 6.0])]
#[case::dr_grpo(r#"{"loss_type": "dr_grpo", "max_completion_length": 5}"#, -0.2 / 15.0, [1.0 / 15.0; 6])]
#[case::cispo(r#"{"loss_type": "cispo", "epsilon_high": 5.0}"#, 0.2 * 2.0_f64.ln() / 6.0, [1.0 / 6.0; 6])]
#[case::verl(r#"{"semantics": "verl", "loss_type": "vanilla"}"#, -0.2 / 6.0, [1.0 / 6.0; 6])]
fn parts_of_a_step_add_up_to_the_step(#[case] json: &str, #[case] expected: f64, #[case] weights: [f64; 6]) {
    let (loss, (z, batch)) = (config(json), six());
    assert_weighs(&everywhere(&loss, &z, 2, &batch), expected, weights);

    assert_eq!(batch.select_sequences(0..1).unwrap_err(), Error::NoWeights, "a part of a batch that nothing weighed");
    let step = loss.prepare_step(&batch).unwrap();
    for cut in [1, 2] {
        assert_weighs(&added(&loss, &z, &step, cut, TokenBatch::select_sequences), expected, weights);
    }
    // Naive: each part as a separate step.
    for Found { how, loss, .. } in added(&loss, &z, &batch, 1, TokenBatch::select_independent) {
        let naive = loss / 2.0;
        assert!((naive - expected).abs() > 0.04, "{how}: naive is {naive} for {expected}");
    }
}

/// With TRL's micro-batches, `num_items_in_batch` has the number of tokens of the whole step.
#[rstest]
fn num_items_in_batch_is_the_count_of_the_whole_step(#[values("dapo", "cispo")] loss_type: &str) {
    let keys = r#""epsilon_high": 5.0, "gradient_accumulation_steps": 2"#;
    let (z, batch) = six();
    let whole = if loss_type == "dapo" { -0.2 / 6.0 } else { 0.2 * 2.0_f64.ln() / 6.0 };
    let loss = config(&format!(r#"{{"loss_type": "{loss_type}", {keys}}}"#));
    let step = StepData { num_items_in_batch: Some(6.0), ..StepData::default() };
    let counted = batch.clone().with_step(step).unwrap();
    for cut in [1, 2] {
        assert_weighs(&added(&loss, &z, &counted, cut, TokenBatch::select_independent), whole, [1.0 / 6.0; 6]);
    }
    // Without it, all parts get equal weight, so tokens of the shorter part weigh more.
    for Found { how, loss, dz, .. } in added(&loss, &z, &batch, 1, TokenBatch::select_independent) {
        assert!((loss - whole).abs() > 0.2, "{how}: naive is {loss} for {whole}");
        assert!((dz[0] + 0.5 / 2.0).abs() < 1e-6, "{how}: {dz:?}");
    }
}

/// A tool's token and a truncated completion are in no denominator: two of six tokens remain, with A of 1 and 1/2.
/// Dividing by all six tokens, or by three sequences, would give -1/4 or -5/12.
#[rstest]
#[case::dapo(r#"{"loss_type": "dapo"}"#, -1.5 / 2.0)]
#[case::bnpo(r#"{"loss_type": "bnpo"}"#, -1.5 / 2.0)]
#[case::verl(r#"{"semantics": "verl", "loss_type": "vanilla"}"#, -1.5 / 2.0)]
#[case::sequences(r#"{"loss_type": "grpo", "count_masked_rows": false}"#, -1.5 / 2.0)]
// TRL's grpo averages over all rows, including the masked one, but over active tokens within a row.
#[case::grpo(r#"{"loss_type": "grpo"}"#, -1.5 / 3.0)]
fn masked_tokens_leave_the_denominator(#[case] json: &str, #[case] expected: f64) {
    let (z, batch) = six();
    let batch = batch.with_mask(&[1.0, 1.0, 1.0, 1.0, 0.0, 1.0]).unwrap();
    let batch = batch.with_step(StepData { truncated_rows: Rows::Indices(vec![1]), ..StepData::default() }).unwrap();
    let truncated = r#", "mask_truncated_completions": true}"#;
    let loss = config(&json.replace('}', truncated));
    // expected = -(1 + 1/2) x weight
    let weight = expected / -1.5;
    assert_weighs(&everywhere(&loss, &z, 2, &batch), expected, [weight, 0.0, 0.0, 0.0, 0.0, weight]);
}
