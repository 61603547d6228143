//! Settings and tokens of the numbers on the pages: both sides of every bound, both signs of the advantage.

use super::loss_pages::written;
use grpo_core::LossType;

/// Tokens (old logp, logp) that share one advantage.
pub(crate) struct Sequence {
    pub(crate) advantage: f64,
    pub(crate) tokens: Vec<(f64, f64)>,
}

/// Returns each list of tokens with A = 1, then with A = -1.
fn both_signs(sequences: &[&[(f64, f64)]]) -> Vec<Sequence> {
    let with = |advantage: f64| sequences.iter().map(move |tokens| Sequence { advantage, tokens: tokens.to_vec() });
    with(1.0).chain(with(-1.0)).collect()
}

/// Returns sequences of one token.
pub(crate) fn tokens() -> Vec<Sequence> {
    both_signs(&[&[(-2.0, -2.5)], &[(-2.0, -2.0)], &[(-2.0, -1.9)], &[(-2.0, -1.5)], &[(-2.0, -0.5)]])
}

/// Returns sequences of two tokens with mean log-ratios of -0.3, 0 and 0.3.
pub(crate) fn pairs() -> Vec<Sequence> {
    both_signs(&[&[(-2.0, -2.5), (-1.0, -1.1)], &[(-2.0, -1.9), (-1.0, -1.1)], &[(-2.0, -1.5), (-1.0, -0.9)]])
}

/// Returns tokens whose covariances of advantage and logp differ.
pub(crate) fn covariances() -> Vec<Sequence> {
    let tokens = [
        (1.0, -0.6, -0.5),
        (1.0, -4.1, -4.0),
        (-1.0, -0.6, -0.5),
        (-1.0, -4.9, -5.0),
        (1.0, -1.5, -1.0),
        (-1.0, -2.0, -2.5),
    ];
    tokens.map(|(advantage, old, logp)| Sequence { advantage, tokens: vec![(old, logp)] }).into()
}

/// Returns the settings with which the numbers of a loss are computed, in addition to `loss_type`; empty for the example on its page.
fn settings(loss: &str) -> &'static [&'static str] {
    match loss {
        "grpo" => &["", r#""delta": 1.5"#],
        "cispo" => &[r#""epsilon_high": 2.0"#, r#""semantics": "verl""#],
        "sapo" | "gspo" | "vespo" | "luspo" | "bnpo" | "gpg" | "reinforce" | "flash_reinforce" => &[""],
        "geo_mean" => &[r#""epsilon_low": 0.4"#],
        "vanilla" => &[r#""semantics": "verl""#, r#""semantics": "verl", "clip_ratio_c": 1.5"#],
        "clip_cov" => &[r#""semantics": "verl", "clip_cov_ratio": 0.2"#],
        "kl_cov" => &[r#""semantics": "verl", "kl_cov_ratio": 0.2"#],
        "dppo_tv" => &[r#""semantics": "verl""#],
        "dppo_kl" => &[r#""semantics": "verl", "epsilon_low": 0.05"#],
        "dapo" => &[r#""epsilon_high": 0.28"#],
        "prime_rl" => &[r#""kl_tau": 0.1"#],
        "ipo" => &["", r#""epsilon_low": 0.1, "kl_tau": 0.1"#],
        _ => &[],
    }
}

/// Returns the configurations of a loss whose numbers the pages show, as JSON.
pub(crate) fn examples(loss: LossType) -> Vec<String> {
    let name = loss.name();
    let with = |keys: &&str| match keys.is_empty() {
        true => format!(r#"{{"loss_type": "{name}"}}"#),
        false => format!(r#"{{"loss_type": "{name}", {keys}}}"#),
    };
    let settings: Vec<String> = settings(name).iter().map(with).collect();
    if settings.is_empty() { vec![example_of_page(loss).to_string()] } else { settings }
}

/// Returns the first example on the page of a loss.
pub(crate) fn example_of_page(loss: LossType) -> serde_json::Value {
    let text = written(loss);
    let yaml = text.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next());
    let yaml = yaml.unwrap_or_else(|| panic!("the documentation of {} has no example", loss.name()));
    serde_saphyr::from_str(yaml).unwrap_or_else(|e| panic!("{e}\n{yaml}"))
}
