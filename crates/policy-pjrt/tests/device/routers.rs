//! The statistics and the load balancing loss of routers match transformers and the CPU policy.

use crate::checkpoint::{self, Checkpoint, Tensors};
use crate::support::{
    assert_close, assert_near, assert_same_gradients, cross_entropy, gradients, halves, on_device, on_host, random,
    request, whole,
};
use grpo_core::LossOutput;
use policy::{Completion, LogitsProcessors, Policy, Sequence};
use policy_pjrt::decoder::ExpertProducts;
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions};
use stablehlo::Save;
use std::num::NonZeroUsize;

const COEF: f64 = 0.5;

fn with_aux_loss(checkpoint: &Checkpoint, save: Save) -> PjrtPolicy {
    on_device(checkpoint, PjrtPolicyOptions { router_aux_loss_coef: COEF, save, ..PjrtPolicyOptions::default() })
}

/// Returns the metrics of routers.
fn of_routers(output: &LossOutput) -> Vec<(String, f64)> {
    let values = output.metrics.values().filter(|(name, _)| name.starts_with("moe/") || *name == "aux_loss");
    values.map(|(name, value)| (name.to_owned(), value)).collect()
}

#[track_caller]
fn assert_same_metrics(what: &str, found: &LossOutput, expected: &LossOutput) {
    let (found, expected) = (of_routers(found), of_routers(expected));
    assert!(found.len() >= 4, "{what}: {found:?}");
    assert_eq!(found.len(), expected.len(), "{what}: {found:?} {expected:?}");
    for ((name, found), (other, expected)) in found.iter().zip(&expected) {
        let is_same = name == other && (found - expected).abs() < 1e-5 * expected.abs().max(1.0);
        assert!(is_same, "{what}: {name}: {found} {expected}");
    }
}

#[test]
fn loads_and_load_balancing_losses_match_transformers_and_the_cpu_policy() {
    let mut saves = [Save::Carry, Save::Every(1), Save::Everything].into_iter().cycle();
    for name in checkpoint::ROUTERS {
        let checkpoint = Checkpoint::open(name);
        let expected = Tensors::read(&checkpoint.folder.path().join("router.safetensors")).0;
        let (sequences, number) = (checkpoint.completions(), |of: &str| f64::from(expected[of].data[0]));
        let loss = cross_entropy(&sequences);
        let mut policy = with_aux_loss(&checkpoint, saves.next().unwrap());
        let mut host = on_host(&checkpoint).with_router_aux_loss(COEF).unwrap();

        let output = policy.accumulate(&[whole(&sequences)], loss).unwrap();
        let of_tokens = f64::from(checkpoint.expected.0["expected.loss"].data[0]);
        assert_near(name, output.loss, of_tokens + COEF * number("aux_loss"));
        assert_near(name, output.metrics.value("aux_loss").unwrap(), number("aux_loss"));
        assert_same_metrics(name, &output, &host.accumulate(&[whole(&sequences)], loss).unwrap());
        let found = gradients(&mut policy);
        let of_aux_loss = expected.iter().filter_map(|(n, t)| Some((n.strip_prefix("expected.grad.")?, t)));
        let mut compared = 0;
        for (parameter, of_aux_loss) in of_aux_loss.filter(|(p, _)| !checkpoint::has_no_gradient(name, p)) {
            let of_tokens = &checkpoint.expected.0[&format!("expected.grad.{parameter}")].data;
            let sum = of_tokens.iter().zip(&of_aux_loss.data).map(|(a, b)| a + COEF as f32 * b).collect::<Vec<_>>();
            assert_close(&format!("{name}: {parameter}"), &found[parameter].data, &sum, 1e-4);
            compared += 1;
        }
        assert!(compared > 3, "{name}: {compared}");
        let of_one = policy.skip().unwrap().grad_norm;

        let parts = policy.accumulate(&halves(&sequences), loss).unwrap();
        assert_near(name, parts.metrics.value("aux_loss").unwrap(), number("aux_loss.mean"));
        assert_same_metrics(name, &parts, &host.accumulate(&halves(&sequences), loss).unwrap());
        policy.skip().unwrap();

        // The loss and AdamW in one program.
        policy.reset_optimizer(&policy::AdamWConfig::default()).unwrap();
        let (at_once, report) = policy.step(&[whole(&sequences)], loss, 1e-3).unwrap();
        assert!(report.applied);
        assert_near(name, report.grad_norm, of_one);
        assert_near(name, at_once.loss, output.loss);
        assert_same_metrics(name, &at_once, &output);
    }
}

/// Padding tokens are in the blocks, too.
#[test]
fn grouped_products_match_transformers_and_dense_products() {
    let sampling = || random(1.0, LogitsProcessors::default(), 3);
    for name in checkpoint::ROUTERS {
        let checkpoint = Checkpoint::open(name);
        let sequences = checkpoint.completions();
        let loss = cross_entropy(&sequences);
        let of = |rows: Option<usize>| {
            let expert_products = match rows {
                Some(rows) => ExpertProducts::Grouped { rows: NonZeroUsize::new(rows) },
                None => ExpertProducts::Dense,
            };
            let mut policy =
                on_device(&checkpoint, PjrtPolicyOptions { expert_products, ..PjrtPolicyOptions::default() });
            let output = policy.accumulate(&[whole(&sequences)], loss).unwrap();
            let gradients = gradients(&mut policy);
            policy.skip().unwrap();
            let prompts = [vec![1, 5, 6], vec![9]];
            let completions = policy.generate(&request(&prompts, 2, 12, &[2], sampling())).unwrap();
            (output.loss, gradients, completions)
        };
        let (loss, dense, completions) = of(None);
        for rows in [2, 16] {
            let what = format!("{name}, {rows} rows");
            let (found, gradients, sampled) = of(Some(rows));
            assert_near(&what, found, loss);
            assert_near(&what, found, f64::from(checkpoint.expected.0["expected.loss"].data[0]));
            assert_same_gradients(&what, &gradients, &dense, 1e-5);
            let ids = |completions: &[Completion]| completions.iter().map(|c| c.ids.clone()).collect::<Vec<_>>();
            assert_eq!(ids(&sampled), ids(&completions), "{what}");
        }
    }
}

#[test]
fn packed_rows_and_shared_prompts_count_as_on_the_host() {
    let checkpoint = Checkpoint::open("gpt_oss");
    let prompt = vec![5, 9, 12, 40, 33, 7];
    let sequences = [vec![3, 8, 21], vec![60, 2], vec![17], vec![4; 9]];
    let sequences = sequences.map(|completion| Sequence { prompt: prompt.clone(), completion });
    let loss = cross_entropy(&sequences);
    let mut policy = with_aux_loss(&checkpoint, Save::Carry);
    let mut host = on_host(&checkpoint).with_router_aux_loss(COEF).unwrap();
    let found = policy.accumulate(&[whole(&sequences)], loss).unwrap();
    let expected = host.accumulate(&[whole(&sequences)], loss).unwrap();
    assert_near("loss", found.loss, expected.loss);
    assert_same_metrics("packed", &found, &expected);
}

#[test]
fn a_dense_model_has_no_load_balancing_loss() {
    let checkpoint = Checkpoint::open("qwen3");
    let options = PjrtPolicyOptions { router_aux_loss_coef: COEF, ..PjrtPolicyOptions::default() };
    let (config, weights) = (checkpoint.config(), &checkpoint.weights);
    let loss = grpo_core::LossConfig::default();
    let error = PjrtPolicy::from_weights(crate::support::runtime(), config, weights, loss, options).err().unwrap();
    assert!(error.to_string().contains("a model with a mixture of experts"), "{error}");
}
