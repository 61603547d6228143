//! The settings and tokens of the numbers on the pages: on both sides of every bound, for both signs of the advantage.

use grpo_core::LossType;

/// Tokens (old logp, logp) that share an advantage.
pub(crate) struct Sequence {
    pub(crate) advantage: f64,
    pub(crate) tokens: Vec<(f64, f64)>,
}

/// Each list of tokens with A = 1, then with A = -1.
fn both_signs(sequences: &[&[(f64, f64)]]) -> Vec<Sequence> {
    let with = |advantage: f64| sequences.iter().map(move |tokens| Sequence { advantage, tokens: tokens.to_vec() });
    with(1.0).chain(with(-1.0)).collect()
}

/// One token each.
fn tokens() -> Vec<Sequence> {
    both_signs(&[&[(-2.0, -2.5)], &[(-2.0, -2.1)], &[(-2.0, -2.0)], &[(-2.0, -1.9)], &[(-2.0, -1.5)], &[(-2.0, -0.5)]])
}

/// Two tokens each, whose log-ratios have the mean -0.3, 0 and 0.3.
fn pairs() -> Vec<Sequence> {
    both_signs(&[&[(-2.0, -2.5), (-1.0, -1.1)], &[(-2.0, -1.9), (-1.0, -1.1)], &[(-2.0, -1.5), (-1.0, -0.9)]])
}

/// Tokens that gain and lose a little or a lot of probability; the last one from a small one.
fn probabilities() -> Vec<Sequence> {
    both_signs(&[&[(-1.0, -2.0)], &[(-1.0, -1.1)], &[(-1.0, -0.9)], &[(-1.0, -0.5)], &[(-4.0, -0.5)]])
}

/// Tokens whose covariances of advantage and logp differ.
fn covariances() -> Vec<Sequence> {
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

/// Settings with their sequences.
pub(crate) fn examples(loss: LossType) -> Vec<(&'static str, Vec<Sequence>)> {
    match loss {
        LossType::Grpo => vec![
            (r#"{"loss_type": "grpo"}"#, tokens()),
            (r#"{"loss_type": "grpo", "delta": 1.5}"#, tokens()),
            (r#"{"loss_type": "grpo", "importance_sampling_level": "sequence"}"#, pairs()),
        ],
        LossType::Bnpo => vec![(r#"{"loss_type": "bnpo"}"#, tokens())],
        LossType::DrGrpo => vec![(r#"{"loss_type": "dr_grpo", "max_completion_length": 1024}"#, tokens())],
        LossType::Dapo => vec![(r#"{"loss_type": "dapo", "epsilon_high": 0.28}"#, tokens())],
        LossType::Cispo => vec![
            (r#"{"loss_type": "cispo", "epsilon_high": 2.0}"#, tokens()),
            (r#"{"loss_type": "cispo", "semantics": "verl"}"#, tokens()),
        ],
        LossType::Gspo => {
            vec![(r#"{"loss_type": "gspo"}"#, pairs()), (r#"{"loss_type": "gspo", "semantics": "verl"}"#, pairs())]
        }
        LossType::Luspo => vec![(r#"{"loss_type": "luspo"}"#, pairs())],
        LossType::Sapo => vec![(r#"{"loss_type": "sapo"}"#, tokens())],
        LossType::Vespo => vec![(r#"{"loss_type": "vespo"}"#, pairs())],
        LossType::GeoMean => vec![(r#"{"loss_type": "geo_mean", "epsilon_low": 0.4}"#, pairs())],
        LossType::Vanilla => vec![
            (r#"{"loss_type": "vanilla", "semantics": "verl"}"#, tokens()),
            (r#"{"loss_type": "vanilla", "semantics": "verl", "clip_ratio_c": 1.5}"#, tokens()),
        ],
        LossType::Gpg => vec![(r#"{"loss_type": "gpg"}"#, tokens())],
        LossType::Reinforce => vec![(r#"{"loss_type": "reinforce"}"#, tokens())],
        LossType::ClipCov => {
            vec![(r#"{"loss_type": "clip_cov", "semantics": "verl", "clip_cov_ratio": 0.2}"#, covariances())]
        }
        LossType::KlCov => {
            vec![(r#"{"loss_type": "kl_cov", "semantics": "verl", "kl_cov_ratio": 0.2}"#, covariances())]
        }
        LossType::DppoTv => vec![(r#"{"loss_type": "dppo_tv", "semantics": "verl"}"#, probabilities())],
        LossType::DppoKl => {
            vec![(r#"{"loss_type": "dppo_kl", "semantics": "verl", "epsilon_low": 0.05}"#, probabilities())]
        }
        LossType::Dro => vec![(r#"{"loss_type": "dro", "dro_beta": 0.5}"#, tokens())],
        LossType::PrimeRl => vec![(r#"{"loss_type": "prime_rl", "kl_tau": 0.1}"#, probabilities())],
        LossType::Ipo => {
            vec![(r#"{"loss_type": "ipo", "epsilon_low": 0.1, "kl_tau": 0.1}"#, probabilities())]
        }
    }
}
