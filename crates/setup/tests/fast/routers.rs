//! Mixtures of experts: loads, the load balancing loss, and replayed routing.

use super::rollout::config;
use grpo_models::{Experts, ModelConfig};
use grpo_policy::{Completion, Policy, PolicyEngine, Result, RolloutEngine, RolloutRequest};
use grpo_trainer::step::StepReport;
use grpo_trainer::{TrainConfig, Trainer};
use std::sync::{Arc, Mutex};

/// Returns the settings of one step of a model with four experts.
fn with_experts() -> TrainConfig {
    let experts = Experts { num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, ..Experts::default() };
    let model = ModelConfig {
        hidden_size: 32,
        initializer_range: 0.3,
        attention_bias: false,
        qk_norm: true,
        experts: Some(experts),
        ..ModelConfig::default()
    };
    TrainConfig { model: model.into(), ..config() }
}

fn step(config: TrainConfig) -> StepReport {
    grpo_setup::trainer(config).unwrap().grpo_step().unwrap()
}

#[test]
fn loads_and_load_balancing_losses_are_logged() {
    let mut config = with_experts();
    let report = step(config.clone());
    assert_eq!(report.metrics.value("aux_loss"), None);
    let (most, least) = (report.metric("moe/load_max"), report.metric("moe/load_min"));
    assert!(most > 1.0 && (0.0..1.0).contains(&least), "{most} {least}");
    config.policy.router_aux_loss_coef = 0.5;
    let with = step(config);
    // Two experts per token: a balanced router has the loss 2.
    let aux_loss = with.metric("aux_loss");
    assert!((1.5..4.0).contains(&aux_loss), "{aux_loss}");
    let added = with.metric("loss") - report.metric("loss");
    assert!((added - 0.5 * aux_loss).abs() < 1e-5, "{added} {aux_loss}");
    assert_eq!(with.metric("policy_loss"), report.metric("policy_loss"));
}

#[test]
fn updates_replay_the_experts_of_the_rollout() {
    let of = |replay_routing: bool, num_iterations: usize, parts: usize| {
        let mut config = with_experts();
        config.policy.replay_routing = replay_routing;
        config.grpo.num_iterations = num_iterations;
        config.grpo.gradient_accumulation_steps = parts;
        config.optimizer.learning_rate = 0.05;
        // Changes the routers without a reward.
        config.policy.router_aux_loss_coef = 1.0;
        let report = step(config);
        if num_iterations == 1 {
            assert_eq!([report.metric("is_ratio/min"), report.metric("is_ratio/max")], [1.0; 2]);
        }
        report.metrics.value("moe/routing_mismatch")
    };
    assert_eq!(of(false, 2, 1), None);
    // The weights of the first update are those of the rollout.
    assert_eq!(of(true, 1, 1), Some(0.0));
    assert_eq!(of(true, 1, 4), Some(0.0));
    // The second update has other weights.
    assert!(of(true, 2, 1).unwrap() > 0.0);
}

/// An engine that replaces the recorded experts by experts 0 and 1, and stores the share of tokens whose experts were others.
struct Forger(Arc<Mutex<f64>>);

impl RolloutEngine for Forger {
    fn generate(&mut self, policy: &mut dyn Policy, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        let mut completions = PolicyEngine.generate(policy, request)?;
        let (mut tokens, mut others) = (0, 0);
        for ids in completions.iter_mut().flat_map(|completion| completion.routed_experts.ids.chunks_exact_mut(2)) {
            tokens += 1;
            others += usize::from(!(ids.contains(&0) && ids.contains(&1)));
            ids.copy_from_slice(&[0, 1]);
        }
        *self.0.lock().unwrap() = f64::from(others as u32) / f64::from(tokens as u32);
        Ok(completions)
    }
}

#[test]
fn updates_compute_the_recorded_experts_and_count_other_choices_of_the_router() {
    let mut config = with_experts();
    // The experts of a layer change the choices of the next layers.
    config.model.shape_mut().num_hidden_layers = 1;
    let of = |replay_routing: bool| {
        let mut config = config.clone();
        config.policy.replay_routing = replay_routing;
        let others = Arc::new(Mutex::new(f64::NAN));
        let engine: Box<dyn RolloutEngine> = match replay_routing {
            true => Box::new(Forger(Arc::clone(&others))),
            false => Box::new(PolicyEngine),
        };
        let mut parts = grpo_setup::parts(&config).unwrap();
        parts.engine = engine;
        let report = Trainer::with_parts(config, parts).unwrap().grpo_step().unwrap();
        let others = *others.lock().unwrap();
        (report, others)
    };
    let (sampled, _) = of(false);
    assert!(sampled.metric("moe/load_max") < 2.0);
    assert!(sampled.metric("sampling/sampling_logp_difference/max") < 1e-4);
    let (forged, others) = of(true);
    assert!(others > 0.1 && others < 1.0, "{others}");
    let found = forged.metric("moe/routing_mismatch");
    assert!((found - others).abs() < 1e-9, "{found} {others}");
    // All tokens go to two of four experts, which have twice the mean load.
    assert_eq!([forged.metric("moe/load_max"), forged.metric("moe/load_min")], [2.0, 0.0]);
    // The sampler's log-probabilities are those of other experts.
    assert!(forged.metric("sampling/sampling_logp_difference/max") > 0.01);
}

/// An engine that drops the experts of its completions.
struct Forgetful;

impl RolloutEngine for Forgetful {
    fn generate(&mut self, policy: &mut dyn Policy, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        PolicyEngine.generate(policy, &RolloutRequest { return_routed_experts: false, ..*request })
    }
}

#[test]
fn missing_experts_are_errors() {
    let mut moe = with_experts();
    moe.policy.replay_routing = true;
    let parts = grpo_setup::parts(&moe).unwrap().with_engine(Forgetful);
    let error = Trainer::with_parts(moe, parts).unwrap().grpo_step().unwrap_err().to_string();
    assert!(error.contains("and with its experts"), "{error}");
    let mut dense = config();
    dense.policy.replay_routing = true;
    let error = grpo_setup::trainer(dense).err().unwrap().to_string();
    assert!(error.contains("`policy.replay_routing`: expected false, or a model with a mixture"), "{error}");
    let mut dense = config();
    dense.policy.router_aux_loss_coef = 0.1;
    let error = grpo_setup::trainer(dense).err().unwrap().to_string();
    assert!(error.contains("`policy.router_aux_loss_coef`: expected 0, or a model with a mixture"), "{error}");
}
