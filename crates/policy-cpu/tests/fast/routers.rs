//! The statistics and the load balancing loss of routers match transformers.

use crate::checkpoint::{self, Checkpoint, Tensors};
use crate::families::{assert_close, policy};
use grpo_core::LossOutput;
use policy::{Error, Policy, RouterStatistics, Sequence, SequenceBatch, StepLoss, token_batch};
use policy_cpu::CpuPolicy;
use std::collections::BTreeMap;

const COEF: f64 = 0.5;

fn batches(sequences: &[Sequence], size: usize) -> Vec<SequenceBatch<'_>> {
    let batch = |sequences| SequenceBatch { sequences, tokens: token_batch(sequences).unwrap() };
    sequences.chunks(size).map(batch).collect()
}

fn accumulate(policy: &mut CpuPolicy, sequences: &[Sequence], size: usize) -> LossOutput {
    let tokens = sequences.iter().map(|sequence| sequence.completion.len()).sum();
    policy.accumulate(&batches(sequences, size), StepLoss::CrossEntropy { tokens }).unwrap()
}

/// Returns the gradients by name, and zeroes them.
fn take_gradients(policy: &mut CpuPolicy) -> BTreeMap<String, Vec<f32>> {
    let mut gradients = Vec::new();
    policy.model().export_values(policy.gradients().parameters(), &mut gradients).unwrap();
    policy.skip().unwrap();
    gradients.into_iter().map(|gradient| (gradient.name, gradient.data)).collect()
}

#[track_caller]
fn assert_metric(what: &str, output: &LossOutput, name: &str, expected: f64) {
    let found = output.metrics.value(name).unwrap();
    assert!((found - expected).abs() < 1e-5 * expected.abs().max(1.0), "{what}: {name}: {found} {expected}");
}

#[test]
fn loads_and_load_balancing_losses_match_transformers() {
    for name in checkpoint::ROUTERS {
        let checkpoint = Checkpoint::open(name);
        let expected = Tensors::read(&checkpoint.folder.path().join("router.safetensors")).0;
        let (sequences, number) = (checkpoint.completions(), |of: &str| f64::from(expected[of].data[0]));
        let mut policy = policy(&checkpoint).with_router_aux_loss(COEF).unwrap();

        let output = accumulate(&mut policy, &sequences, sequences.len());
        let of_tokens = f64::from(checkpoint.expected.0["expected.loss"].data[0]);
        let loss = of_tokens + COEF * number("aux_loss");
        assert!((output.loss - loss).abs() < 1e-5 * loss, "{name}: {} {loss}", output.loss);
        assert_metric(name, &output, "aux_loss", number("aux_loss"));
        let mut metrics = grpo_core::Metrics::default();
        let tokens = &expected["tokens"];
        RouterStatistics::new(tokens.shape[1], tokens.data.iter().map(|x| f64::from(*x)).collect())
            .record(&mut metrics);
        assert!(metrics.values().count() >= 3);
        metrics.values().for_each(|(metric, value)| assert_metric(name, &output, metric, value));

        let found = take_gradients(&mut policy);
        let of_aux_loss = expected.iter().filter_map(|(n, t)| Some((n.strip_prefix("expected.grad.")?, t)));
        let mut compared = 0;
        for (parameter, of_aux_loss) in of_aux_loss.filter(|(p, _)| !checkpoint::has_no_gradient(name, p)) {
            let of_tokens = &checkpoint.expected.0[&format!("expected.grad.{parameter}")].data;
            let sum = of_tokens.iter().zip(&of_aux_loss.data).map(|(a, b)| a + COEF as f32 * b).collect::<Vec<_>>();
            assert_close(&format!("{name}: {parameter}"), &found[parameter], &sum);
            compared += 1;
        }
        assert!(compared > 3, "{name}: {compared}");

        // In micro-batches of one sequence.
        let output = accumulate(&mut policy, &sequences, 1);
        assert_metric(name, &output, "aux_loss", number("aux_loss.mean"));
        let loss = of_tokens + COEF * number("aux_loss.mean");
        assert!((output.loss - loss).abs() < 1e-5 * loss, "{name}: {} {loss}", output.loss);
        metrics.values().for_each(|(metric, value)| assert_metric(name, &output, metric, value));
    }
}

#[test]
fn extreme_loads_are_visible() {
    let of = |name: &str| {
        let checkpoint = Checkpoint::open(name);
        accumulate(&mut policy(&checkpoint), &checkpoint.completions(), 1)
    };
    // Each of two layers sends all tokens to one of four experts.
    let idle = of("qwen3_moe_idle");
    [("load_max", 4.0), ("load_min", 0.0), ("max_vio", 3.0), ("load_entropy", 0.0)]
        .into_iter()
        .for_each(|(metric, value)| assert_metric("idle", &idle, &format!("moe/{metric}"), value));
    // Every expert gets every token.
    let all = of("qwen3_moe_fused");
    [("load_max", 1.0), ("load_min", 1.0), ("max_vio", 0.0), ("load_entropy", 1.0)]
        .into_iter()
        .for_each(|(metric, value)| assert_metric("all", &all, &format!("moe/{metric}"), value));
    assert_metric("one", &of("qwen3_moe_one"), "moe/load_max", 1.0);
    assert_eq!(idle.metrics.value("aux_loss"), None, "there is no such loss by default");
}

#[test]
fn a_shared_prompt_counts_once_for_each_completion() {
    let checkpoint = Checkpoint::open("qwen3_moe");
    let prompt = vec![5, 9, 12, 40, 33, 7];
    let sequences = [vec![3, 8, 21], vec![60, 2], vec![17]];
    let sequences = sequences.map(|completion| Sequence { prompt: prompt.clone(), completion });
    let mut policy = policy(&checkpoint).with_router_aux_loss(COEF).unwrap();
    let [together, apart] = [3, 1].map(|size| accumulate(&mut policy, &sequences, size));
    let loads = |output: &LossOutput| {
        let values = output.metrics.values().filter(|(name, _)| name.starts_with("moe/"));
        values.map(|(name, value)| (name.to_owned(), value)).collect::<Vec<_>>()
    };
    assert_eq!(loads(&together).len(), 4);
    assert_eq!(loads(&together), loads(&apart));
    // The third sequence has only its prompt, so the prompt alone determines its loss.
    let alone = accumulate(&mut policy, &sequences[2..], 1);
    let twice = accumulate(&mut policy, &[sequences[2].clone(), sequences[2].clone()], 2);
    assert_metric("twice", &twice, "aux_loss", alone.metrics.value("aux_loss").unwrap());
}

#[test]
fn invalid_coefficients_are_errors() {
    let moe = Checkpoint::open("qwen3_moe");
    for coef in [-0.1, f64::NAN, f64::INFINITY] {
        let error = policy(&moe).with_router_aux_loss(coef).err().unwrap();
        assert!(matches!(error, Error::Argument { operation: "router_aux_loss_coef", .. }), "{error}");
    }
    let dense = Checkpoint::open("qwen3");
    let error = policy(&dense).with_router_aux_loss(0.1).err().unwrap().to_string();
    assert!(error.contains("a model with a mixture of experts"), "{error}");
    assert!(policy(&dense).with_router_aux_loss(0.0).is_ok());
}
