//! A whole policy on meshes of eight virtual devices of XLA's CPU plugin: the contract of [`Policy`], and the numbers of one device.

use crate::prefills::rows_of_prefills;
use crate::support::{
    Named, assert_close, assert_same_gradients, assert_same_tensors, by_name, gradients, import, moved, random,
    request, runtime, state, whole,
};
use grpo_core::LossConfig;
use models::{
    ClampedSwiglu, Experts, LayerRope, LayerSpec, LinearAttention, LoraConfig, ModelConfig, NamedTensor, TargetModules,
};
use pjrt::install::{Kind, install};
use policy::contract::{Fixture, Setup, batches};
use policy::{
    AdamWConfig, LogitsProcessors, OptimizerName, Policy, PolicyState, RolloutRequest, Sequence, SequenceBatch,
    StateGroup, StepLoss, TensorSource, Turn, Weights, export_all,
};
use policy_pjrt::decoder::{Adapters, Axis, AxisRules, Compute, Decoder, ExpertProducts};
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, RolloutSizes, Runtime, TrainPrograms, TrainShape, TrainingSizes};
use stablehlo::{Mesh, Save};
use std::num::NonZeroUsize;
use std::sync::OnceLock;
use testkit::xla_cpu::mesh_flags;

pub(crate) fn rules(axes: &[(&str, usize)]) -> AxisRules {
    AxisRules::new(&Mesh::new("mesh", axes.iter().copied()).unwrap())
}

/// Returns eight virtual devices, which round differently from [`runtime`]. There is one client for all tests: collectives of two clients in one process are mixed up.
pub(crate) fn eight() -> &'static Runtime {
    static EIGHT: OnceLock<Runtime> = OnceLock::new();
    EIGHT.get_or_init(|| {
        let installed = install(Kind::Cpu, |_| {}).expect("XLA's CPU plugin can be installed");
        let runtime = Runtime::open_mesh(Kind::Cpu, Some(&installed.path), rules(&[("fsdp", 8)])).expect("8 devices");
        let runtime = runtime.with_compile_cache(concat!(env!("CARGO_TARGET_TMPDIR"), "/policy-pjrt-mesh"));
        mesh_flags().into_iter().fold(runtime, |runtime, (flag, value)| runtime.with_compile_flag(flag, value))
    })
}

/// Returns the first ones of eight devices with this mesh.
pub(crate) fn on_mesh(axes: &[(&str, usize)]) -> Runtime {
    eight().clone().on_mesh(rules(axes)).unwrap()
}

/// Returns a model whose dimensions are divisible by eight, and whose heads are by two.
pub(crate) fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 32,
        hidden_size: 16,
        intermediate_size: 16,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        initializer_range: 0.3,
        ..ModelConfig::default()
    }
}

struct OnMesh;

impl Fixture for OnMesh {
    const SCORE_TOLERANCE: f32 = 0.0;

    fn policy(Setup { config, loss, lora, of_values }: &Setup) -> policy::Result<Box<dyn Policy>> {
        // The vocabulary of the contract's model is odd.
        let rules = rules(&[("data", 2), ("fsdp", 2), ("tensor", 2)]).with(Axis::Vocab, &[]).expect("a rule");
        let runtime = eight().clone().on_mesh(rules)?;
        let mut policy = PjrtPolicy::new(&runtime, config, 1, loss.clone(), PjrtPolicyOptions::default())?;
        if let Some(lora) = lora {
            policy = policy.with_lora(lora, 1)?;
        }
        Ok(match of_values {
            Some(of_values) => Box::new(policy.with_value_head(of_values.clone())?),
            None => Box::new(policy),
        })
    }
}

policy::contract_tests!(OnMesh);

pub(crate) fn sequences() -> Vec<Sequence> {
    let of = |prompt: &[u32], completion: &[u32]| Sequence { prompt: prompt.to_vec(), completion: completion.to_vec() };
    vec![of(&[1, 5, 6], &[7, 2]), of(&[1, 9], &[8, 10, 2])]
}

fn loss() -> LossConfig {
    Setup::default().loss
}

/// The results of a training on some mesh.
#[derive(PartialEq)]
pub(crate) struct Trained {
    scores: grpo_core::Scores,
    gradients: Named,
    /// The weights of both policies and the moments after each update.
    states: Vec<[Vec<NamedTensor>; 3]>,
    completions: Vec<policy::Completion>,
    logits: Vec<Vec<f32>>,
    cached_logits: Vec<Vec<f32>>,
    /// The share of rows without a sequence in the last update.
    rows_empty: Option<f64>,
    /// The load balancing loss of experts in the last update.
    aux_loss: Option<f64>,
}

/// Trains for three updates: of two micro-batches, of one, and of one at once. The reference policy follows.
pub(crate) fn train(policy: PjrtPolicy) -> Trained {
    train_from(policy, None)
}

/// Trains like [`train`]. After each update the policy gets the state of `leader`, so every update and the samples of both begin from equal
/// numbers: updates of AdamW amplify rounding errors, on some processors by more than an error in a shard would change.
pub(crate) fn train_beside(leader: &Trained, policy: PjrtPolicy) -> Trained {
    train_from(policy, Some(leader))
}

fn train_from(mut policy: PjrtPolicy, leader: Option<&Trained>) -> Trained {
    let all = sequences();
    // A learning rate below epsilon does not amplify differences of gradients.
    let adamw = AdamWConfig { adam_epsilon: 0.03, ..AdamWConfig::default() };
    policy.reset_optimizer(&adamw).unwrap();
    let mut states = vec![];
    let mut end_update = |policy: &mut PjrtPolicy| {
        states.push(state(policy));
        if let Some(leader) = leader {
            let [weights, ref_policy, optimizer] = &leader.states[states.len() - 1];
            let ref_policy = (!ref_policy.is_empty()).then_some(ref_policy as &dyn TensorSource);
            import(policy, weights, ref_policy, optimizer, states.len() as u64, &adamw);
        }
    };
    let parts = batches(&mut policy, &all, 1);
    let scores = policy.score(Weights::Policy, &[whole(&all)]).unwrap();
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    let gradients = gradients(&mut policy);
    assert!(policy.apply(0.02).unwrap().applied);
    end_update(&mut policy);
    let whole_batch = batches(&mut policy, &all, 2);
    policy.accumulate(&whole_batch, StepLoss::Grpo).unwrap();
    assert!(policy.apply(0.02).unwrap().applied);
    let has_adapters = gradients.keys().any(|name| name.contains("lora"));
    if !has_adapters {
        policy.mix_ref_policy(0.25).unwrap();
    }
    end_update(&mut policy);
    let (output, report) = policy.step(&[whole(&all)], StepLoss::CrossEntropy { tokens: 5 }, 0.02).unwrap();
    assert!(report.applied);
    end_update(&mut policy);
    let prompts: Vec<Vec<u32>> = vec![vec![1, 5, 6], vec![9], vec![3, 4]];
    let sampling = random(
        1.0,
        LogitsProcessors { repetition_penalty: Some(1.2), top_k: Some(20), ..LogitsProcessors::default() },
        0,
    );
    let mut completions = policy.generate(&request(&prompts, 6, 20, &[2], sampling)).unwrap();
    completions.extend(two_turns(&mut policy, &prompts));
    let rows: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let (mut logits, mut cached_logits) = (vec![], vec![]);
    policy.logits(&rows, |_, _, row| logits.push(row.to_vec())).unwrap();
    policy.cached_logits(&rows, |_, _, row| cached_logits.push(row.to_vec())).unwrap();
    let [rows_empty, aux_loss] = ["frac_rows_empty", "aux_loss"].map(|name| output.metrics.value(name));
    Trained { scores, gradients, states, completions, logits, cached_logits, rows_empty, aux_loss }
}

/// Returns the completions of two turns of conversations; the second one continues.
fn two_turns(policy: &mut PjrtPolicy, prompts: &[Vec<u32>]) -> Vec<policy::Completion> {
    let (mut conversations, mut all) = (prompts.to_vec(), vec![]);
    for number in 0..2 {
        let streams: Vec<u64> = (0..3).map(|index| (number << 32) + index).collect();
        let turn = Some(Turn { streams: &streams, limits: &[5, 4, 6], finished: None });
        let sampling = random(1.0, LogitsProcessors::default(), 0);
        let request = RolloutRequest { turn, ..request(&conversations, 1, 60, &[2], sampling) };
        let (completions, prefills) = rows_of_prefills(|| policy.generate(&request).unwrap());
        assert_eq!(prefills.is_empty(), number == 1, "{prefills:?}");
        for (conversation, completion) in conversations.iter_mut().zip(&completions) {
            let between = [4, 9, 11].iter().cycle().take(3 + 5 * conversation.len());
            conversation.extend(completion.ids.iter().chain(between));
        }
        all.extend(completions);
    }
    all
}

pub(crate) fn policy(runtime: &Runtime, lora: Option<&LoraConfig>, options: PjrtPolicyOptions) -> PjrtPolicy {
    with_moved_adapters(PjrtPolicy::new(runtime, &config(), 1, loss(), options).unwrap(), lora)
}

pub(crate) fn with_moved_adapters(policy: PjrtPolicy, lora: Option<&LoraConfig>) -> PjrtPolicy {
    let Some(lora) = lora else { return policy };
    let mut policy = policy.with_lora(lora, 1).unwrap();
    // Fresh adapters have gradients of 0.
    policy.import_weights(&moved(&policy, 0.05)).unwrap();
    policy
}

pub(crate) fn assert_same(what: &str, found: &Trained, expected: &Trained) {
    assert_within(what, found, expected, 1e-5);
}

/// Fails unless completions are equal, and all numbers within `tolerance`.
fn assert_within(what: &str, found: &Trained, expected: &Trained, tolerance: f32) {
    assert_close(&format!("{what}: logp"), &found.scores.logp, &expected.scores.logp, tolerance);
    assert_close(&format!("{what}: entropy"), &found.scores.entropy, &expected.scores.entropy, tolerance);
    assert_same_gradients(&format!("{what}: gradients"), &found.gradients, &expected.gradients, tolerance);
    assert_eq!(found.states.len(), expected.states.len(), "{what}");
    for (update, (found, expected)) in found.states.iter().zip(&expected.states).enumerate() {
        for ((group, found), expected) in ["weights", "reference policy", "moments"].iter().zip(found).zip(expected) {
            let what = format!("{what}: {group} after update {update}");
            // Biases, norms and adapters of a reference policy begin as zeros.
            let (zeros, expected): (Vec<_>, Vec<_>) =
                expected.iter().cloned().partition(|tensor| tensor.data.iter().all(|value| *value == 0.0));
            let (found_zeros, found): (Vec<_>, Vec<_>) =
                found.iter().cloned().partition(|tensor| zeros.contains(tensor));
            assert_eq!(found_zeros, zeros, "{what}");
            // Second moments are squares, which double relative errors.
            let (squares, others): (Vec<_>, Vec<_>) =
                expected.into_iter().partition(|tensor| tensor.name.starts_with("exp_avg_sq."));
            let (found_squares, found): (Vec<_>, Vec<_>) =
                found.into_iter().partition(|tensor| tensor.name.starts_with("exp_avg_sq."));
            assert_same_tensors(&what, &by_name(found), &by_name(others), tolerance);
            assert_same_tensors(&what, &by_name(found_squares), &by_name(squares), 2.0 * tolerance);
        }
    }
    let ids = |trained: &Trained| trained.completions.iter().map(|c| c.ids.clone()).collect::<Vec<_>>();
    assert_eq!(ids(found), ids(expected), "{what}");
    let logps = |trained: &Trained| trained.completions.iter().flat_map(|c| c.logps.clone()).collect::<Vec<_>>();
    assert_close(&format!("{what}: log-probabilities"), &logps(found), &logps(expected), tolerance);
    assert_close(&format!("{what}: logits"), &found.logits.concat(), &expected.logits.concat(), tolerance);
    let [found, expected] = [found, expected].map(|trained| trained.cached_logits.concat());
    assert_close(&format!("{what}: cached logits"), &found, &expected, tolerance);
}

/// The smallest error of a mesh, two shards of one tensor in each other's place, exceeds the bound of this model, 1e-5, tenfold.
#[test]
fn two_exchanged_shards_of_any_tensor_exceed_the_bounds() {
    let mut policy = policy(&on_mesh(&[("fsdp", 8)]), None, PjrtPolicyOptions::default());
    let all = sequences();
    let mut weights = export_all(&policy, StateGroup::Weights(Weights::Policy)).unwrap();
    // Norms are ones, and biases zeros.
    for (i, tensor) in weights.iter_mut().enumerate() {
        tensor.data.iter_mut().enumerate().for_each(|(k, value)| *value += 0.1 * ((i + 3 * k) as f32).sin());
    }
    let mut score = |weights: &Vec<NamedTensor>| {
        policy.import_weights(weights).unwrap();
        policy.score(Weights::Policy, &[whole(&all)]).unwrap().logp
    };
    let expected = score(&weights);
    let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    for index in 0..weights.len() {
        let mut exchanged = weights.clone();
        let shard = exchanged[index].data.len() / 8;
        let (first, others) = exchanged[index].data.split_at_mut(shard);
        first.swap_with_slice(&mut others[..shard]);
        let off = score(&exchanged).iter().zip(&expected).fold(0f32, |m, (f, e)| m.max((f - e).abs()));
        assert!(off > 10.0 * 1e-5 * largest, "{}: off by {off} of {largest}", weights[index].name);
    }
}

#[test]
fn training_and_sampling_on_every_mesh_match_one_device() {
    let options = PjrtPolicyOptions::default();
    let expected = train(policy(runtime(), None, options.clone()));
    assert!(expected.completions.iter().any(|c| c.ids.len() > 16), "several calls of the decode program");
    let meshes: [&[(&str, usize)]; 6] = [
        &[("data", 8)],
        &[("fsdp", 8)],
        &[("tensor", 2)],
        &[("fsdp", 4), ("tensor", 2)],
        &[("data", 2), ("fsdp", 2), ("tensor", 2)],
        &[("data", 4), ("tensor", 2)],
    ];
    for axes in meshes {
        let found = train_beside(&expected, policy(&on_mesh(axes), None, options.clone()));
        assert_same(&format!("{axes:?}"), &found, &expected);
        // Both sequences share a row; the others fill the shards.
        let shards: usize = axes.iter().filter(|(axis, _)| *axis != "tensor").map(|(_, size)| size).product();
        assert_eq!(found.rows_empty, Some(1.0 - 1.0 / shards as f64), "{axes:?}");
    }
}

/// Returns a model like Qwen3-MoE and one like gpt-oss, with eight experts and four key/value heads.
fn with_experts() -> [ModelConfig; 2] {
    // Every expert has tokens.
    let experts = Experts { num_experts: 8, num_experts_per_tok: 5, moe_intermediate_size: 16, ..Experts::default() };
    let config = ModelConfig { num_key_value_heads: 4, experts: Some(experts.clone()), ..config() };
    let qwen3_moe = ModelConfig { attention_bias: false, qk_norm: true, ..config.clone() };
    let gpt_oss = ModelConfig {
        attention_bias: true,
        attention_output_bias: true,
        attention_sinks: true,
        experts: Some(Experts { clamped: Some(ClampedSwiglu::default()), ..experts }),
        ..config
    };
    [qwen3_moe, gpt_oss]
}

/// Dense and grouped products on meshes, against dense products on one device. Experts are sharded over `tensor` and `fsdp`; with grouped products, devices
/// with the same tokens compute blocks of their experts.
#[test]
fn mixtures_of_experts_on_meshes_match_one_device() {
    let (dense, grouped) = (ExpertProducts::Dense, ExpertProducts::Grouped { rows: NonZeroUsize::new(4) });
    let meshes: [(&[(&str, usize)], ExpertProducts); 7] = [
        (&[("tensor", 2)], dense),
        (&[("tensor", 2)], grouped),
        (&[("fsdp", 4), ("tensor", 2)], dense),
        (&[("fsdp", 4), ("tensor", 2)], grouped),
        (&[("fsdp", 2), ("tensor", 4)], dense),
        (&[("fsdp", 2), ("tensor", 4)], grouped),
        (&[("data", 2), ("fsdp", 2), ("tensor", 2)], grouped),
    ];
    for config in with_experts() {
        let on = |runtime: &Runtime, expert_products| {
            let options =
                PjrtPolicyOptions { router_aux_loss_coef: 0.1, expert_products, ..PjrtPolicyOptions::default() };
            PjrtPolicy::new(runtime, &config, 1, loss(), options).unwrap()
        };
        let expected = train(on(runtime(), dense));
        let clamped = config.experts.as_ref().and_then(|experts| experts.clamped);
        let compare = |what: &str, found: &Trained| {
            let what = format!("{what}, {clamped:?}");
            // Sums over experts have another order, and AdamW divides by small moments: biases differed by 1.03e-5.
            assert_within(&what, found, &expected, 2e-5);
            let [found, expected] = [found, &expected].map(|trained| trained.aux_loss.unwrap() as f32);
            assert_close(&what, &[found], &[expected], 1e-5);
        };
        for (axes, products) in meshes {
            compare(&format!("{axes:?}, {products:?}"), &train_beside(&expected, on(&on_mesh(axes), products)));
        }
        let rules = rules(&[("fsdp", 4), ("tensor", 2)]);
        let other = rules.with(Axis::Experts, &["tensor"]).unwrap();
        let other = eight().clone().on_mesh(other).unwrap();
        compare("experts over tensor", &train_beside(&expected, on(&other, dense)));
    }
}

#[test]
fn replayed_experts_on_meshes_match_one_device() {
    let [_, config] = with_experts();
    let on = |runtime: &Runtime, expert_products| {
        let options = PjrtPolicyOptions { expert_products, ..PjrtPolicyOptions::default() };
        let mut policy = PjrtPolicy::new(runtime, &config, 1, loss(), options).unwrap();
        let prompts = [vec![1, 5, 6], vec![9], vec![3, 4]];
        let sampling = random(1.0, LogitsProcessors::default(), 0);
        let of_request = request(&prompts, 2, 9, &[2], sampling);
        let completions = policy.generate(&RolloutRequest { return_routed_experts: true, ..of_request }).unwrap();
        let pairs = completions.iter().enumerate().map(|(i, completion)| {
            let prompt = prompts[i / 2].clone();
            // Other experts than the router chooses.
            let mut routed = completion.routed_experts.clone();
            routed.ids.iter_mut().for_each(|id| *id = (*id + 1) % 8);
            (Sequence { prompt, completion: completion.ids.clone() }, routed)
        });
        let (sequences, routed): (Vec<_>, Vec<_>) = pairs.unzip();
        let batch = || SequenceBatch { routed_experts: &routed, ..whole(&sequences) };
        let tokens = batch().tokens.tokens();
        let output = policy.accumulate(&[batch()], StepLoss::CrossEntropy { tokens }).unwrap();
        let mismatch = output.metrics.value("moe/routing_mismatch").unwrap();
        assert!(mismatch > 0.5, "{mismatch}");
        (completions, output.loss as f32, mismatch as f32, gradients(&mut policy))
    };
    let (dense, grouped) = (ExpertProducts::Dense, ExpertProducts::Grouped { rows: NonZeroUsize::new(4) });
    let (completions, loss, mismatch, expected) = on(runtime(), dense);
    for (axes, products) in [(&[("fsdp", 4), ("tensor", 2)][..], dense), (&[("data", 4), ("tensor", 2)], grouped)] {
        let (found, of_mesh, of_routers, gradients) = on(&on_mesh(axes), products);
        let ids = |all: &[policy::Completion]| {
            all.iter().map(|c| (c.ids.clone(), c.routed_experts.clone())).collect::<Vec<_>>()
        };
        assert_eq!(ids(&found), ids(&completions), "{axes:?}");
        assert_close("loss and mismatch", &[of_mesh, of_routers], &[loss, mismatch], 1e-5);
        assert_same_gradients(&format!("{axes:?}"), &gradients, &expected, 2e-5);
    }
}

/// Adapters of experts are sharded like the experts.
#[test]
fn adapters_of_experts_on_meshes_match_one_device() {
    let (dense, grouped) = (ExpertProducts::Dense, ExpertProducts::Grouped { rows: NonZeroUsize::new(4) });
    let lora = of_experts();
    for config in with_experts() {
        let on = |runtime: &Runtime, expert_products, rollout_rules| {
            let options = PjrtPolicyOptions { expert_products, rollout_rules, ..PjrtPolicyOptions::default() };
            with_moved_adapters(PjrtPolicy::new(runtime, &config, 1, loss(), options).unwrap(), Some(&lora))
        };
        let expected = train(on(runtime(), dense, None));
        let clamped = config.experts.as_ref().and_then(|experts| experts.clamped);
        let meshes = [
            (&[("tensor", 2)][..], grouped, None),
            (&[("fsdp", 4), ("tensor", 2)], dense, None),
            (&[("data", 2), ("fsdp", 2), ("tensor", 2)], grouped, None),
            (&[("fsdp", 8)], dense, Some(rules(&[("data", 4), ("tensor", 2)]))),
        ];
        for (axes, products, rollout_rules) in meshes {
            let found = train_beside(&expected, on(&on_mesh(axes), products, rollout_rules));
            // Sums over experts have another order.
            assert_within(&format!("{axes:?}, {products:?}, {clamped:?}"), &found, &expected, 2e-5);
        }
        let policy = on(&on_mesh(&[("fsdp", 4), ("tensor", 2)]), dense, None);
        let weights = policy.weights().unwrap();
        for (parameter, tensor) in weights.table().iter().zip(weights.tensors()) {
            if !parameter.role.is_of_model() {
                let axis = parameter.axes.iter().position(|axis| *axis == Axis::Experts).expect("an axis of experts");
                let sharding = tensor.layout().sharding().expect("a sharding");
                assert_eq!(sharding.parts(axis), 8, "{}", parameter.name());
            }
        }
    }
}

/// Returns adapters of the experts alone. A larger factor would amplify rounding errors, too.
fn of_experts() -> LoraConfig {
    LoraConfig {
        r: 2,
        lora_alpha: 2.0,
        target_modules: TargetModules::Names(vec![]),
        target_parameters: ["experts.gate_up_proj", "experts.down_proj"].map(String::from).to_vec(),
        ..LoraConfig::default()
    }
}

#[test]
fn gated_delta_nets_on_meshes_match_one_device() {
    // The last period is incomplete.
    let config = ModelConfig {
        num_hidden_layers: 3,
        layers: vec![LayerSpec::GATED_DELTA_NET, LayerSpec::default()],
        linear_attention: Some(LinearAttention {
            linear_key_head_dim: 4,
            linear_value_head_dim: 8,
            ..LinearAttention::default()
        }),
        attention_bias: false,
        attention_output_gate: true,
        qk_norm: true,
        zero_centered_norms: true,
        partial_rotary_factor: 0.5,
        ..config()
    };
    // A larger factor of adapters would amplify rounding errors, too.
    let target_modules = TargetModules::Pattern("all-linear".into());
    let all = LoraConfig { r: 2, lora_alpha: 2.0, target_modules, ..LoraConfig::default() };
    for lora in [None, Some(&all)] {
        let on = |runtime: &Runtime| {
            let policy = PjrtPolicy::new(runtime, &config, 1, loss(), PjrtPolicyOptions::default()).unwrap();
            with_moved_adapters(policy, lora)
        };
        let expected = train(on(runtime()));
        for axes in [&[("fsdp", 8)][..], &[("data", 2), ("fsdp", 2), ("tensor", 2)]] {
            // These layers amplify rounding errors.
            assert_within(
                &format!("{axes:?}, {lora:?}"),
                &train_beside(&expected, on(&on_mesh(axes))),
                &expected,
                1e-4,
            );
        }
    }
    let one_head = LinearAttention { linear_num_key_heads: 1, ..config.linear_attention.unwrap() };
    let config = ModelConfig { linear_attention: Some(one_head), ..config };
    let policy = PjrtPolicy::new(&on_mesh(&[("tensor", 2)]), &config, 1, loss(), PjrtPolicyOptions::default());
    let error = policy.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("the key heads of Gated DeltaNets"), "{error}");
}

#[test]
fn layers_with_other_heads_on_meshes_match_one_device() {
    let sliding = LayerSpec { sliding_window: Some(3), rope: LayerRope::Local, ..LayerSpec::default() };
    let full = LayerSpec { head_dim: Some(8), keys_are_values: true, ..LayerSpec::default() };
    let config = ModelConfig {
        num_hidden_layers: 5,
        layers: vec![sliding, full, full],
        attention_bias: false,
        qk_norm: true,
        value_norm: true,
        layer_scalars: true,
        final_logit_softcapping: Some(2.0),
        ..config()
    };
    let on = |runtime: &Runtime| PjrtPolicy::new(runtime, &config, 1, loss(), PjrtPolicyOptions::default()).unwrap();
    let expected = train(on(runtime()));
    for axes in [&[("fsdp", 8)][..], &[("data", 2), ("fsdp", 2), ("tensor", 2)]] {
        // The gradient of the queries in layer 3 is a small difference of large terms: off by 1.3e-5 with other rounding.
        assert_within(&format!("{axes:?}"), &train_beside(&expected, on(&on_mesh(axes))), &expected, 4e-5);
    }
}

#[test]
fn a_rollout_on_a_mesh_of_its_own_matches_one_device() {
    for lora in [None, Some(LoraConfig { r: 2, ..LoraConfig::default() })] {
        let expected = train(policy(runtime(), lora.as_ref(), PjrtPolicyOptions::default()));
        let rollout_rules = Some(rules(&[("data", 4), ("tensor", 2)]));
        let options = PjrtPolicyOptions { rollout_rules, ..PjrtPolicyOptions::default() };
        let found = train_beside(&expected, policy(&on_mesh(&[("fsdp", 8)]), lora.as_ref(), options));
        let what = format!("a rollout on {{data 4, tensor 2}}, LoRA: {}", lora.is_some());
        assert_same(&what, &found, &expected);
    }
}

#[test]
fn a_rollout_on_other_devices_than_the_training_is_an_error() {
    for (training, rollout) in
        [(&[("fsdp", 8)][..], [("data", 4)]), (&[("fsdp", 8)], [("data", 1)]), (&[], [("data", 8)])]
    {
        let runtime = if training.is_empty() { runtime().clone() } else { on_mesh(training) };
        let options = PjrtPolicyOptions { rollout_rules: Some(rules(&rollout)), ..PjrtPolicyOptions::default() };
        let error = PjrtPolicy::new(&runtime, &config(), 1, loss(), options).map(|_| ()).unwrap_err().to_string();
        let expected = format!("a mesh of the {} devices", runtime.devices().len());
        assert!(error.contains("rollout_rules") && error.contains(&expected), "{error}");
    }
}

#[test]
fn a_state_is_restored_on_another_mesh_bit_for_bit() {
    let adamw = AdamWConfig::default();
    let mut first = policy(&on_mesh(&[("fsdp", 8)]), None, PjrtPolicyOptions::default());
    first.freeze_ref_policy().unwrap();
    let all = sequences();
    first.accumulate(&[whole(&all)], StepLoss::CrossEntropy { tokens: 5 }).unwrap();
    assert!(first.apply(0.02).unwrap().applied);
    let groups = [StateGroup::Weights(Weights::Policy), StateGroup::Weights(Weights::RefPolicy), StateGroup::Optimizer];
    let state = |policy: &PjrtPolicy| groups.map(|group| export_all(policy, group).unwrap());
    let expected = state(&first);
    let [of_policy, of_ref, optimizer] = &expected;
    for runtime in [runtime().clone(), on_mesh(&[("data", 2), ("fsdp", 2), ("tensor", 2)])] {
        let mut second = policy(&runtime, None, PjrtPolicyOptions::default());
        let imported =
            PolicyState { policy: of_policy, ref_policy: Some(of_ref), optimizer, optimizer_steps: 1, adamw: &adamw };
        second.import(&imported).unwrap();
        assert_eq!(state(&second), expected);
    }
}

#[test]
fn a_dimension_that_does_not_divide_is_an_error() {
    let of = |config: &ModelConfig, axes: &[(&str, usize)]| {
        let policy = PjrtPolicy::new(&on_mesh(axes), config, 1, loss(), PjrtPolicyOptions::default());
        policy.map(|_| ()).unwrap_err().to_string()
    };
    let error = of(&ModelConfig { vocab_size: 30, ..config() }, &[("tensor", 4)]);
    assert!(error.contains("embed_tokens") && error.contains("size 30"), "{error}");
    let error = of(&config(), &[("tensor", 4)]);
    assert!(error.contains("key/value heads"), "{error}");
    let [qwen3_moe, _] = with_experts();
    let experts = Experts { num_experts: 6, num_experts_per_tok: 5, ..qwen3_moe.experts.clone().unwrap() };
    let error = of(&ModelConfig { experts: Some(experts), ..qwen3_moe }, &[("tensor", 4)]);
    assert!(error.contains("mlp.experts.gate_proj") && error.contains("size 6"), "{error}");
    let too_many = on_mesh(&[("fsdp", 8)]).on_mesh(rules(&[("fsdp", 16)])).unwrap_err().to_string();
    assert!(too_many.contains("16 devices") && too_many.contains("has 8"), "{too_many}");
    assert_eq!(on_mesh(&[("fsdp", 4), ("tensor", 2)]).axis_rules().unwrap().parts(Axis::Embed), 4);
}

/// The memory table of a mesh counts what XLA's CPU reports for the arguments of one device.
#[test]
fn the_memory_of_a_device_is_that_of_its_shards() {
    let dense = ModelConfig { vocab_size: 1024, hidden_size: 128, intermediate_size: 256, ..config() };
    let experts = Experts { num_experts: 8, moe_intermediate_size: 64, ..Experts::default() };
    let with_experts = ModelConfig { experts: Some(experts), ..dense.clone() };
    let micro_batch = TrainShape { rows: 8, length: 16, tokens: 64, ..TrainShape::default() };
    let rollout = RolloutSizes {
        prompts: 1,
        longest_prompt: 8,
        num_generations: 1,
        max_completion_length: 8,
        conversations: false,
    };
    let weights = models::Dtype::F32;
    let sizes = |optimizer, trained| TrainingSizes {
        micro_batch,
        rollout,
        weights,
        trained,
        optimizer,
        ref_policy: false,
        mixes_ref_policy: false,
    };
    let options = PjrtPolicyOptions { can_roll_back: false, ..PjrtPolicyOptions::default() };
    let meshes = [&[("data", 8)][..], &[("fsdp", 8)], &[("data", 2), ("fsdp", 2), ("tensor", 2)]];
    let lora = LoraConfig { r: 16, ..of_experts() };
    let configs = [
        (&dense, OptimizerName::AdamW, None),
        (&dense, OptimizerName::AdamW8bit, None),
        (&with_experts, OptimizerName::AdamW, None),
        (&with_experts, OptimizerName::AdamW, Some(&lora)),
    ];
    for (axes, (config, optimizer, lora)) in meshes.iter().flat_map(|axes| configs.map(|of| (axes, of))) {
        let rules = rules(axes);
        let trained = lora.map_or(models::Trained::All, |lora| {
            let of_experts = lora.parameters(config).unwrap().iter().map(|parameter| parameter.len() as u64).sum();
            models::Trained::Adapters { weights: of_experts, of_experts }
        });
        let table = sizes(optimizer, trained).memory(config, &options, Some(&rules)).unwrap();
        let part = |name: &str| table.rows().iter().find(|(part, _)| part.starts_with(name)).map(|(_, bytes)| *bytes);
        let expected: u64 = ["weights", "adapters", "gradients"].into_iter().filter_map(part).sum();
        let state = ["weights", "adapters", "first moments", "second moments"];
        let state: u64 = state.into_iter().filter_map(part).sum();
        let decoder = Decoder::new(config, Compute::F32);
        let decoder = match lora {
            Some(lora) => decoder.with_adapters(Adapters::new(config, lora).unwrap()),
            None => decoder,
        };
        let decoder = decoder.with_axis_rules(rules).unwrap();
        let programs = TrainPrograms::new(decoder, Save::Carry).with_optimizer(optimizer);
        let gradient = programs.gradient(&loss(), None, micro_batch).unwrap();
        let step = programs.step(&loss(), None, micro_batch).unwrap();
        for (module, expected) in [(gradient, expected), (step, state)] {
            let stats = crate::mesh::compile(&module).executable().memory_stats().unwrap();
            let (found, expected) = (stats.argument as f64, expected as f64);
            assert!(
                (found - expected).abs() < 0.1 * expected,
                "{axes:?}, {optimizer:?}, {}: {found} {expected}\n{table}",
                module.name
            );
        }
    }
}
