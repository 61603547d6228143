//! Training with 8-bit moments on one device and on meshes, compared with the host; states move between them bit for bit.

use crate::mesh_support::{eight, rules, sequences};
use crate::support::{assert_close, by_name, host_loss, import, runtime, state, whole};
use grpo_core::LossConfig;
use models::{MOMENT_BLOCK, ModelConfig, NamedTensor};
use policy::{AdamWConfig, CodeBook, MOMENT_CODES, MOMENT_SCALES, MomentBlocks, OptimizerName, Policy, StepLoss};
use policy_cpu::CpuPolicy;
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
use testkit::margin::assert_below;

/// Learning rate.
const RATE: f64 = 0.01;

/// Returns a model with rows of 288 values: a block, and a part of a block. Shards of rows do not end with a block.
fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 32,
        hidden_size: 288,
        intermediate_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        ..ModelConfig::default()
    }
}

fn adamw() -> AdamWConfig {
    AdamWConfig { name: OptimizerName::AdamW8bit, adam_epsilon: 1e-3, ..AdamWConfig::default() }
}

fn runtimes() -> Vec<Runtime> {
    let on_mesh = |axes: &[(&str, usize)]| eight().clone().on_mesh(rules(axes)).unwrap();
    vec![runtime().clone(), on_mesh(&[("fsdp", 8)]), on_mesh(&[("data", 2), ("fsdp", 2), ("tensor", 2)])]
}

fn on_host() -> CpuPolicy {
    CpuPolicy::new(&config(), 1, host_loss(LossConfig::default())).unwrap()
}

/// Takes steps with one micro-batch, in one program and in two.
fn train(policy: &mut dyn Policy, steps: usize) {
    let all = sequences();
    let loss = StepLoss::CrossEntropy { tokens: 5 };
    for step in 0..steps {
        let report = if step % 2 == 0 {
            policy.step(&[whole(&all)], loss, RATE).unwrap().1
        } else {
            policy.accumulate(&[whole(&all)], loss).unwrap();
            policy.apply(RATE).unwrap()
        };
        assert!(report.applied);
    }
}

/// Returns the values of moments, and the scale of each value.
fn values(codes: &NamedTensor, scales: &NamedTensor, book: CodeBook) -> Vec<(f32, f32)> {
    let blocks = MomentBlocks::of(OptimizerName::AdamW8bit, &codes.shape).unwrap();
    let rows = codes.data.chunks(blocks.row()).flat_map(|row| row.chunks(MOMENT_BLOCK));
    let of_block = |(codes, scale): (&[f32], &f32)| {
        codes.iter().map(|code| (book.entries()[*code as usize] * scale, *scale)).collect::<Vec<_>>()
    };
    rows.zip(&scales.data).flat_map(of_block).collect()
}

/// Fails unless weights and moments are close. A moment whose value was near a midpoint may have the next code, which changes it by at most
/// 1.6 % of its scale in each step, and the next update of its weight as much.
fn assert_same_states(what: &str, found: [Vec<NamedTensor>; 3], expected: [Vec<NamedTensor>; 3]) {
    let ([weights, _, moments], [of_host, _, of_moments]) = (found.map(by_name), expected.map(by_name));
    assert!(weights.keys().eq(of_host.keys()) && moments.keys().eq(of_moments.keys()), "{what}");
    let (mut different, mut all) = (0, 0);
    for (name, expected) in &of_host {
        let (found, expected) = (&weights[name].data, &expected.data);
        let largest = expected.iter().fold(0f32, |most, weight| most.max(weight.abs()));
        for (found, expected) in found.iter().zip(expected) {
            let off = (found - expected).abs();
            assert!(off <= 0.05 * RATE as f32, "{what}: {name}: {found} {expected}");
            different += usize::from(off > 1e-4 * largest);
        }
        all += found.len();
    }
    assert!(all > 100_000 && different < all / 50, "{what}: {different} of {all} weights differ");
    let (mut different, mut all) = (0, 0);
    for (name, expected) in &of_moments {
        let (what, found) = (format!("{what}: {name}"), &moments[name]);
        let Some((book, of_scales)) = CodeBook::OF_MOMENTS.into_iter().enumerate().find_map(|(moment, book)| {
            let name = name.strip_prefix(MOMENT_CODES[moment])?;
            Some((book, format!("{}{name}", MOMENT_SCALES[moment])))
        }) else {
            // Scales, and f32 moments of small tensors.
            assert_close(&what, &found.data, &expected.data, 1e-2);
            continue;
        };
        different += found.data.iter().zip(&expected.data).filter(|(a, b)| a != b).count();
        all += found.data.len();
        let [found, expected] = [(found, &moments), (expected, &of_moments)]
            .map(|(codes, tensors)| values(codes, &tensors[&of_scales], book));
        let shares = found.into_iter().zip(expected).map(|((found, _), (expected, scale))| {
            let share = if found == expected { 0.0 } else { f64::from((found - expected).abs() / scale) };
            if share.is_nan() { f64::INFINITY } else { share }
        });
        assert_below(&what, shares.fold(0.0, f64::max), 4.0 * 0.016);
    }
    assert!(all > 100_000 && different < all / 20, "{what}: {different} of {all} codes differ");
}

#[test]
fn eight_bit_moments_on_devices_and_meshes_match_the_host() {
    let mut host = on_host();
    host.reset_optimizer(&adamw()).unwrap();
    train(&mut host, 4);
    for runtime in runtimes() {
        let options = PjrtPolicyOptions::default();
        let mut device = PjrtPolicy::new(&runtime, &config(), 1, LossConfig::default(), options).unwrap();
        device.import_weights(&state(&on_host())[0]).unwrap();
        device.reset_optimizer(&adamw()).unwrap();
        train(&mut device, 4);
        assert_same_states(&format!("{} devices", runtime.devices().len()), state(&device), state(&host));
    }
}

#[test]
fn a_state_with_eight_bit_moments_moves_between_host_and_meshes_bit_for_bit() {
    let mut host = on_host();
    host.reset_optimizer(&adamw()).unwrap();
    train(&mut host, 2);
    let saved = state(&host);
    let [weights, _, moments] = &saved;
    train(&mut host, 1);
    for runtime in runtimes() {
        let options = PjrtPolicyOptions::default();
        let mut device = PjrtPolicy::new(&runtime, &config(), 2, LossConfig::default(), options).unwrap();
        import(&mut device, weights, None, moments, 2, &adamw());
        assert_eq!(state(&device).map(by_name), saved.clone().map(by_name));
        train(&mut device, 1);
        assert_same_states("after a resumed step", state(&device), state(&host));
        let of_device = state(&device);
        let mut back = on_host();
        import(&mut back, &of_device[0], None, &of_device[2], 3, &adamw());
        assert_eq!(state(&back).map(by_name), of_device.map(by_name));
    }
}
