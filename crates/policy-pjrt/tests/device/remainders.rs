//! Policies with bf16 products: bf16 weights with the remainders of f32 weights.

use crate::checkpoint::Checkpoint;
use crate::support::{
    Named, by_name, cross_entropy, device_weights, exported, halves, import, narrow, on_device, random as sampled,
    request, runtime, state, weights, whole,
};
use grpo_core::LossConfig;
use grpo_models::{LoraConfig, ModelConfig, NamedTensor};
use grpo_policy::{LogitsProcessors, OptimizerSettings, Policy, Sampling, StateGroup, Weights, export_all};
use grpo_policy_pjrt::decoder::{Compute, Decoder};
use grpo_policy_pjrt::{
    Argument, DeviceTensor, DeviceWeights, PjrtPolicy, PjrtPolicyOptions, TrainPrograms, TrainShape,
};
use grpo_stablehlo::{Dtype, Module, Save, TensorType};
use half::bf16;
use rand::{Rng, RngExt};
use rstest::rstest;
use std::sync::Arc;

pub(crate) fn config() -> ModelConfig {
    ModelConfig { hidden_size: 16, intermediate_size: 16, num_hidden_layers: 2, ..Default::default() }
}

/// Returns a random generator with a fixed seed.
pub(crate) fn random(seed: u64) -> impl Rng {
    grpo_rng::stream(seed, grpo_rng::Purpose::Weights, 0, 0)
}

/// Returns `count` numbers between -`size` and `size`.
pub(crate) fn numbers(random: &mut impl Rng, count: usize, size: f32) -> Vec<f32> {
    (0..count).map(|_| random.random_range(-size..=size)).collect()
}

/// Returns bf16 parameter and i16 remainder of an f32 word.
pub(crate) fn split_word(word: u32) -> (bf16, i16) {
    (bf16::from_bits((word.wrapping_add(0x8000) >> 16) as u16), word as u16 as i16)
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn finite_f32_weights_are_restored_exactly_and_read_as_the_nearest_bf16() {
    let mut random = random(7);
    // Zeros, subnormals, ties, and numbers that are infinite in bf16, of both signs.
    let edges =
        [0, 1, 0x7F_FFFF, 0x80_0000, 0x3F80_8000, 0x3F81_8000, 0x3F80_7FFF, 0x3F80_8001, 0x7F7F_7FFF, 0x7F7F_FFFF];
    let mut edges = edges.into_iter().flat_map(|word: u32| [word, word | 1 << 31]).cycle();
    let mut word = || {
        let word = random.next_u32();
        if word.is_multiple_of(5) || !f32::from_bits(word).is_finite() { edges.next().unwrap() } else { word }
    };
    let mut tensor = |p: grpo_models::Parameter| {
        let data = (0..p.len()).map(|_| f32::from_bits(word())).collect();
        NamedTensor { name: p.name, shape: p.shape, data }
    };
    let tensors: Vec<NamedTensor> = config().parameters().into_iter().map(&mut tensor).collect();
    let policy = PjrtPolicy::from_tensors(runtime(), &config(), &tensors, LossConfig::default(), narrow()).unwrap();
    let (found, expected) = (exported(&policy), by_name(tensors));
    assert_eq!(found.len(), expected.len());
    for (name, tensor) in &expected {
        assert_eq!(bits(&found[name].data), bits(&tensor.data), "{name}");
    }

    let weights = policy.weights().unwrap();
    let (mut remainders, mut seen) = (weights.remainders(), 0);
    for (parameter, tensor) in weights.table().iter().zip(weights.tensors()) {
        let words = parameter.tensors().flat_map(|(_, name)| bits(&expected[&*name].data));
        if !parameter.has_matrices() {
            assert_eq!(
                bits(&tensor.read::<f32>("weights").unwrap()),
                words.collect::<Vec<_>>(),
                "{}",
                parameter.name()
            );
            continue;
        }
        let (high, low): (Vec<bf16>, Vec<i16>) = words.map(split_word).unzip();
        let patterns = |values: &[bf16]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(patterns(&tensor.read::<bf16>("weights").unwrap()), patterns(&high), "{}", parameter.name());
        assert_eq!(remainders.next().unwrap().read::<i16>("remainders").unwrap(), low, "{}", parameter.name());
        seen += 1;
    }
    // Embedding, head, and seven stacked matrices of the layers.
    assert_eq!((seen, remainders.count()), (9, 0));
}

/// Uploads arguments after the first `given` ones: small numbers, equal for all programs.
fn rest_of_arguments(module: &Module, given: usize) -> Vec<DeviceTensor> {
    let mut random = random(3);
    let types = module.main.body().arguments.iter().skip(given).map(|id| module.main.type_of(*id).clone());
    let upload = |ty: TensorType| {
        let count = ty.elements();
        match ty.dtype {
            Dtype::I32 => {
                runtime().upload(&(0..count).map(|_| random.random_range(0..8_i32)).collect::<Vec<_>>(), &ty.shape)
            }
            Dtype::F32 => {
                let values = numbers(&mut random, count, 1.0).iter().map(|x| x.abs()).collect::<Vec<_>>();
                runtime().upload(&values, &ty.shape)
            }
            Dtype::Pred => runtime().upload(&vec![false; count], &ty.shape),
            other => panic!("{other}"),
        }
    };
    types.map(upload).map(Result::unwrap).collect()
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case("qwen2")]
#[ignore = "GRPO_TESTS=all"]
#[case("qwen3")]
#[case("llama3_bf16")]
fn gradients_of_bf16_weights_match_f32_weights_of_equal_values(#[case] name: &str) {
    let checkpoint = Checkpoint::open(name);
    let decoder = Decoder::new(checkpoint.config(), Compute::Bf16);
    let mut stored = Vec::new();
    device_weights(&checkpoint, Dtype::Bf16).export(&mut stored).unwrap();
    let gradients = |dtype: Dtype| {
        let modules = TrainPrograms::new(decoder.clone(), Save::Carry).with_model_dtype(dtype);
        let shape = TrainShape { rows: 2, length: 8, tokens: 8, ..TrainShape::default() };
        let module = modules.gradient(&LossConfig::default(), None, shape).unwrap();
        let weights = DeviceWeights::from_tensors(runtime(), checkpoint.config(), &stored, dtype).unwrap();
        let rest = rest_of_arguments(&module, weights.tensors().len());
        let arguments = weights.arguments().into_iter().chain(rest.into_iter().map(Argument::from)).collect();
        let outputs = runtime().compile(&module).unwrap().run(arguments).unwrap();
        outputs.iter().map(|output| bits(&output.read::<f32>("gradients").unwrap())).collect::<Vec<_>>()
    };
    let [narrow, wide] = [Dtype::Bf16, Dtype::F32].map(gradients);
    let table = decoder.trained();
    assert_eq!(narrow.len(), table.len() + 3);
    let names = table.iter().map(|p| p.name()).chain(["sums", "logp", "entropy"]);
    for ((part, narrow), wide) in names.zip(&narrow).zip(&wide) {
        assert_eq!(narrow, wide, "{name}: {part}");
    }
    // Gradients have f32 precision.
    for (parameter, gradient) in table.iter().zip(&narrow) {
        let low = gradient.iter().filter(|word| *word & 0xFFFF != 0).count();
        assert!(2 * low > gradient.len(), "{name}: {}: {low} of {}", parameter.name(), gradient.len());
    }
}

/// Returns the bits of every number of a state.
fn patterns(state: &[Vec<NamedTensor>; 3]) -> Vec<u32> {
    state.iter().flatten().flat_map(|tensor| bits(&tensor.data)).collect()
}

#[rstest]
#[case::with_roll_back_and_mixed(true, true)]
#[ignore = "GRPO_TESTS=all"]
#[case::without_roll_back(false, false)]
fn a_bf16_policy_is_restored_bit_for_bit_by_import_and_roll_back(#[case] can_roll_back: bool, #[case] mixed: bool) {
    let checkpoint = Checkpoint::open("qwen2");
    let sequences = checkpoint.completions();
    let (parts, loss) = (halves(&sequences), cross_entropy(&sequences));
    let train = |policy: &mut PjrtPolicy| {
        policy.accumulate(&parts, loss).unwrap();
        assert!(policy.apply(1e-4).unwrap().applied);
    };
    let fresh = || on_device(&checkpoint, PjrtPolicyOptions { can_roll_back, ..narrow() });
    let mut policy = fresh();
    let [begun, ..] = state(&policy);
    let has_low_digits = |tensor: &NamedTensor| bits(&tensor.data).iter().any(|word| word & 0xFFFF != 0);
    assert!(begun.iter().filter(|tensor| tensor.shape.len() > 1).all(has_low_digits), "no low bits to lose");
    policy.freeze_ref_policy().unwrap();
    train(&mut policy);
    if mixed {
        policy.mix_ref_policy(0.25).unwrap();
    }
    train(&mut policy);
    let before = state(&policy);
    assert_ne!(before[0], begun);

    policy.begin().unwrap();
    train(&mut policy);
    let after = state(&policy);
    assert_ne!(after, before);
    match can_roll_back {
        true => policy.roll_back().unwrap(),
        false => assert!(matches!(policy.roll_back(), Err(grpo_policy::Error::State { .. }))),
    }
    // After an import of the exported tensors, the next step is the same.
    let [weights, of_ref, moments] = &before;
    let mut other = fresh();
    import(&mut other, weights, Some(of_ref), moments, 2, &OptimizerSettings::default());
    assert_eq!(patterns(&state(&other)), patterns(&before));
    let plain = |policy: &mut PjrtPolicy| bits(&policy.score(Weights::RefPolicy, &parts).unwrap().logp);
    assert_eq!(plain(&mut other), plain(&mut policy));
    train(&mut other);
    assert_eq!(patterns(&state(&other)), patterns(&after));
    if can_roll_back {
        train(&mut policy);
        assert_eq!(patterns(&state(&policy)), patterns(&after));
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_reference_policy_is_bf16_until_it_is_mixed() {
    let checkpoint = Checkpoint::open("qwen3");
    let sequences = checkpoint.completions();
    let parts = halves(&sequences);
    let mut policy = on_device(&checkpoint, narrow());
    policy.freeze_ref_policy().unwrap();
    let score = |policy: &mut PjrtPolicy, of| bits(&policy.score(of, &parts).unwrap().logp);
    let begun = score(&mut policy, Weights::Policy);
    assert_eq!(score(&mut policy, Weights::RefPolicy), begun);
    policy.accumulate(&parts, cross_entropy(&sequences)).unwrap();
    assert!(policy.apply(1e-2).unwrap().applied);
    assert_ne!(score(&mut policy, Weights::Policy), begun);
    assert_eq!(score(&mut policy, Weights::RefPolicy), begun);

    let of_ref = |policy: &PjrtPolicy| by_name(export_all(policy, StateGroup::Weights(Weights::RefPolicy)).unwrap());
    let (now, before) = (weights(&policy), of_ref(&policy));
    let low = |tensors: &Named| {
        let numbers = tensors.values().filter(|t| t.shape.len() > 1).flat_map(|t| &t.data);
        numbers.filter(|x| x.to_bits() & 0xFFFF != 0).count()
    };
    assert!(low(&before) == 0 && low(&now) > 0);
    // Mixed in f32, repeatedly: in bf16, a thousandth would be rounded away.
    for _ in 0..2 {
        let before = of_ref(&policy);
        policy.mix_ref_policy(0.001).unwrap();
        let after = of_ref(&policy);
        assert!(low(&after) > 0);
        for (name, after) in after {
            let (now, before) = (&now[&name].data, &before[&name].data);
            for ((after, now), before) in after.data.iter().zip(now).zip(before) {
                let expected = 0.001 * f64::from(*now) + (1.0 - 0.001) * f64::from(*before);
                let off = (f64::from(*after) - expected).abs();
                assert!(off <= 2e-7 * expected.abs().max(f64::from(*before).abs()), "{name}: {after} {expected}");
            }
        }
    }
    policy.mix_ref_policy(1.0).unwrap();
    assert_eq!(of_ref(&policy), now);
    assert_eq!(score(&mut policy, Weights::RefPolicy), score(&mut policy, Weights::Policy));
}

#[test]
fn sampling_and_training_share_the_weights_buffers() {
    let checkpoint = Checkpoint::open("qwen2");
    let mut policy = on_device(&checkpoint, narrow());
    let sequences = checkpoint.completions();
    let prompts: Vec<Vec<u32>> = sequences.iter().map(|sequence| sequence.prompt.clone()).collect();
    let sample = |policy: &mut PjrtPolicy, sampling| policy.generate(&request(&prompts, 2, 6, &[], sampling)).unwrap();
    let sampled = || sampled(1.0, LogitsProcessors::default(), 0);
    let before = sample(&mut policy, sampled());
    assert_eq!(sample(&mut policy, sampled()), before);
    policy.accumulate(&halves(&sequences), cross_entropy(&sequences)).unwrap();
    let held: Vec<Arc<DeviceTensor>> = policy.weights().unwrap().tensors().to_vec();
    assert!(policy.apply(0.05).unwrap().applied);
    let now = policy.weights().unwrap().tensors();
    assert!(held.iter().zip(now).all(|(before, now)| !Arc::ptr_eq(before, now)));
    assert_ne!(sample(&mut policy, sampled()), before, "the rollout after an update uses the old weights");
    // Greedy tokens have the largest training logit, up to bf16 rounding.
    let chosen = sample(&mut policy, Sampling::Greedy);
    let whole: Vec<Vec<u32>> =
        chosen.iter().enumerate().map(|(i, c)| [&prompts[i / 2][..], &c.ids[..]].concat()).collect();
    let rows: Vec<&[u32]> = whole.iter().map(Vec::as_slice).collect();
    let vocab = checkpoint.config().vocab_size;
    let mut compared = 0;
    policy
        .logits(&rows, |row, first, logits| {
            for (i, logits) in logits.chunks_exact(vocab).enumerate() {
                let Some(next) = rows[row].get(first + i + 1) else { continue };
                if first + i + 1 < prompts[row / 2].len() {
                    continue;
                }
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                assert!(logits[*next as usize] > largest - 0.05 * largest.abs(), "{row}: {i}");
                compared += 1;
            }
        })
        .unwrap();
    assert_eq!(compared, 6 * rows.len());
}

#[test]
fn an_f32_base_model_keeps_its_precision_below_adapters() {
    let checkpoint = Checkpoint::open("qwen2_5_sharded");
    let lora = LoraConfig { r: 2, ..LoraConfig::default() };
    let (config, weights, loss) = (checkpoint.config(), &checkpoint.weights, LossConfig::default());
    let mut policy = PjrtPolicy::from_weights_with_lora(runtime(), config, weights, &lora, 1, loss, narrow()).unwrap();
    assert_eq!(policy.weights().unwrap().dtype(), Dtype::Bf16);
    // B is zero, so merging changes nothing.
    for (name, tensor) in exported(&policy) {
        assert_eq!(tensor.data, weights.tensor(&name).unwrap().to_vec(), "{name}");
    }
    policy.freeze_ref_policy().unwrap();
    let sequences = checkpoint.completions();
    policy.accumulate(&[whole(&sequences)], cross_entropy(&sequences)).unwrap();
    assert!(policy.apply(0.01).unwrap().applied);
    let merged = exported(&policy);
    let changed = merged.iter().filter(|(name, t)| t.data != weights.tensor(name).unwrap().to_vec()).count();
    assert_eq!(changed, 7 * config.num_hidden_layers, "every matrix of a layer has an adapter");
}
