//! The resolved properties of a configuration.

use super::examples::example_of_page;
use super::page::{number, table};
use grpo_core::aggregate::token_weights;
use grpo_core::batch::{PolicyValues, StepData};
use grpo_core::objective::Bounds;
use grpo_core::{KlImportance, LossConfig, LossType, Semantics, TokenBatch};
use serde::Serialize;

pub(crate) const SYSTEMS: [Semantics; 3] = [Semantics::Trl, Semantics::Verl, Semantics::MllmJax];

/// A property and its value.
pub(crate) type Property = (&'static str, String);

pub(crate) fn word(value: impl Serialize) -> String {
    serde_json::to_value(value).unwrap().as_str().unwrap().to_owned()
}

fn or_off(value: Option<f64>) -> String {
    value.map_or("off".into(), number)
}

/// Returns the smallest legal configuration of a loss under a system, with the keys of its example if it needs some; `None` if it is refused.
pub(crate) fn minimal(loss_type: LossType, semantics: Semantics) -> Option<LossConfig> {
    let bare = LossConfig { loss_type, semantics, ..LossConfig::default() };
    if bare.validate().is_ok() {
        return Some(bare);
    }
    let mut example = example_of_page(loss_type);
    example["semantics"] = semantics.name().into();
    let needed: LossConfig = serde_json::from_value(example).unwrap();
    needed.validate().is_ok().then_some(needed)
}

/// Returns the properties of `config`.
pub(crate) fn properties(config: &LossConfig) -> Vec<Property> {
    let bounds = match config.bounds() {
        Bounds::None => "none".into(),
        Bounds::Ratio { low: None, high } => format!("r at most {}", exact(high)),
        Bounds::Ratio { low: Some(low), high } => format!("r in [{}, {}]", exact(low), exact(high)),
        Bounds::LogRatio { low, high } => format!("log r in [{}, {}] per token", exact(low), exact(high)),
        Bounds::Probability { down, up } => format!("{} down, {} up", exact(down), exact(up)),
    };
    let clamps = match config.kl_clamps() {
        (None, None) => "off".into(),
        (input, output) => format!("q - l to {}, the value to {}", plus_minus(input), plus_minus(output)),
    };
    let [policy, kl, entropy] = averages(config);
    vec![
        ("level of the ratio", word(config.level())),
        ("bounds", bounds),
        ("dual clip (dppo: cap of r)", or_off(config.dual_clip())),
        ("log-ratio guard", config.guard().map_or("off".into(), |guard| plus_minus(Some(guard)))),
        ("KL estimator", word(config.kl_estimator)),
        ("KL term times r", if config.kl_importance() == KlImportance::Ratio { "yes" } else { "no" }.into()),
        ("KL clamps", clamps),
        ("weight of a token, policy term", policy),
        ("weight of a token, KL term", kl),
        ("weight of a token, entropy bonus", entropy),
        ("sampler's ratio", sampler(config)),
        ("temperature divides", word(config.temperature_mode())),
    ]
}

/// Formats a number without the rounding error of 1 + epsilon.
fn exact(value: f64) -> String {
    ((value * 1e12).round() / 1e12).to_string()
}

fn plus_minus(bound: Option<f64>) -> String {
    bound.map_or("any".into(), |bound| format!("±{}", number(bound)))
}

/// Measures the weights of tokens on a batch of width 4 with 3, 1 and 0 active tokens.
fn averages(config: &LossConfig) -> [String; 3] {
    let active = |i: usize| if i < 3 || i == 4 { 1.0 } else { 0.0 };
    let batch = TokenBatch::padded(&[0; 12], &std::array::from_fn::<f32, 12, _>(active), [3, 4]).unwrap();
    let step = StepData { num_items_in_batch: Some(10.0), ..StepData::default() };
    // With coefficients of 1 the weights are the averages.
    let config = LossConfig { beta: 1.0, entropy_coef: 1.0, ..config.clone() };
    let weights = token_weights(&config, &batch.with_step(step).unwrap()).expect("weights");
    let constant = config.max_completion_length.unwrap_or(1024) as f64;
    let known = [
        ("1/N", 4.0, 4.0),
        ("1/num_items_in_batch", 10.0, 10.0),
        (r"1/(B \|y\|)", 9.0, 3.0),
        (r"1/(B' \|y\|)", 6.0, 2.0),
        ("1/B", 3.0, 3.0),
        ("1/B'", 2.0, 2.0),
        ("1/(B' width)", 8.0, 8.0),
        ("1/(B max_completion_length)", 3.0 * constant, 3.0 * constant),
        ("1/(B' max_completion_length)", 2.0 * constant, 2.0 * constant),
    ];
    [weights.policy, weights.kl, weights.entropy].map(|list| {
        let same = |a: f64, b: f64| (a * b - 1.0).abs() < 1e-12;
        let found = known.iter().find(|(_, first, second)| same(list[0], *first) && same(list[4], *second));
        found.unwrap_or_else(|| panic!("no known average: {list:?}")).0.to_owned()
    })
}

/// Measures the treatment of an unbounded ratio between old policy and sampler.
fn sampler(config: &LossConfig) -> String {
    let batch = TokenBatch::packed(vec![0; 2], vec![0, 2])
        .unwrap()
        .with_old_logp(vec![-1.0; 2])
        .unwrap()
        .with_sampler_logp(vec![-1.25; 2])
        .unwrap();
    let values = PolicyValues { logp: vec![-1.0; 2], entropy: vec![0.5; 2] };
    let prepared = match config.prepare(&batch, |_| Ok::<_, grpo_core::Error>(values)) {
        Ok(prepared) => prepared,
        Err(_) => return format!("refuses {}", word(config.vllm_importance_sampling_mode)),
    };
    let weighs = prepared.factors().is_some_and(|f| f.policy.iter().any(|w| *w != 1.0) || f.log_ratio_bias[0] != 0.0);
    if !weighs {
        return "ignored".into();
    }
    match config.rollout_is {
        Some(rollout_is) => format!(
            "{}, {}",
            word(rollout_is),
            config.rollout_is_threshold.map_or("off".into(), |threshold| number(threshold.high))
        ),
        None => {
            format!(
                "{}, {}",
                word(config.vllm_importance_sampling_mode),
                or_off(config.vllm_importance_sampling_clip_max)
            )
        }
    }
}

/// A system that refuses a loss.
const REFUSED: &str = "refused";

/// Lists the properties of all losses by system. Losses with the same values share a row, also if a system refuses some of them.
pub(crate) fn by_system(losses: &[LossType]) -> String {
    let configs = |loss: &LossType| SYSTEMS.map(|system| minimal(*loss, system).map(|config| properties(&config)));
    let mut of: Vec<(&str, [Option<Vec<Property>>; 3])> =
        losses.iter().map(|loss| (loss.name(), configs(loss))).collect();
    of.sort_by_key(|(_, systems)| systems.iter().filter(|system| system.is_none()).count());
    let names = of[0].1[0].clone().unwrap_or_default();
    let mut rows = Vec::new();
    for (i, (name, _)) in names.into_iter().enumerate() {
        let mut groups: Vec<([String; 3], Vec<&str>)> = Vec::new();
        for (loss, systems) in &of {
            let values = systems.clone().map(|list| list.map_or(REFUSED.into(), |list| list[i].1.clone()));
            let same = |other: &[String; 3]| other.iter().zip(&values).all(|(a, b)| a == b || b == REFUSED);
            match groups.iter_mut().find(|(other, _)| same(other)) {
                Some((_, losses)) => losses.push(loss),
                None => groups.push((values, vec![loss])),
            }
        }
        rows.extend(
            groups.into_iter().map(|([trl, verl, jax], losses)| [name.to_owned(), losses.join(", "), trl, verl, jax]),
        );
    }
    table(&["property", "losses", "trl", "verl", "mllm_jax"], rows)
}
