//! Muon (Keller Jordan, <https://kellerjordan.github.io/posts/muon/>), as in PyTorch: momentum whose matrices are orthogonalised.
//!
//! ```text
//! b = momentum b + (1 - momentum) g
//! u = g + momentum (b - g)                    Nesterov's momentum
//! w = w decay - rate factor orthogonalised(u)
//! ```
//!
//! Matrices of layers have this rule, each expert's matrix for itself; embeddings, the head, norms and biases have AdamW's. PyTorch computes the
//! iteration in bf16, this crate in f32.

use super::bounds::OptimizerBounds;
use super::settings::{AdjustLr, OptimizerSettings};
use super::update_rule::{Matrices, MatrixRule, Slot};
use grpo_core::backend_api::real::Real;

/// The momentum; the learning rate times [`AdjustLr::Original`], or 0; the same of [`AdjustLr::MatchRmsAdamw`]; the factor of weights that decay.
pub(super) const SCALARS: usize = 4;

/// The coefficients of the iteration X -> (a I + b X X^T + c (X X^T)^2) X.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.775, 2.0315];
/// The number of iterations.
const ITERATIONS: usize = 5;
/// The smallest norm by which a matrix is divided.
const EPSILON: f64 = 1e-7;
/// A bound on the elements of an orthogonalised matrix: the polynomial is below 1.3 for singular values in [0, 1.3].
const LARGEST: f64 = 2.0;
/// A bound on the factor of the learning rate, for matrices of up to 2^32 rows or columns.
const LARGEST_FACTOR: f64 = 65_536.0;

/// The rule above; the three functions of [`MatrixRule`] are its lines.
pub(super) struct Muon;

impl MatrixRule<SCALARS> for Muon {
    /// The average of gradients.
    const SLOTS: [Slot; 1] = [Slot::MOMENTUM];

    fn scalars(config: &OptimizerSettings, _: u64, learning_rate: f64) -> [f64; SCALARS] {
        let rate = |adjust| if config.adjust_lr_fn == adjust { learning_rate } else { 0.0 };
        let decay = 1.0 - learning_rate * config.weight_decay;
        let momentum = config.momentum.unwrap_or(0.95);
        [momentum, rate(AdjustLr::Original), rate(AdjustLr::MatchRmsAdamw), decay]
    }

    #[inline(always)]
    fn direction<R: Real>(scalars: &[R; SCALARS], gradient: R, buffer: R) -> (R, R) {
        let momentum = scalars[0].clone();
        let one = momentum.constant(1.0);
        let buffer = momentum.clone() * buffer + (one - momentum.clone()) * gradient.clone();
        (gradient.clone() + momentum * (buffer.clone() - gradient), buffer)
    }

    /// Returns matrices with the singular vectors of `directions` and singular values near 1, by five iterations of Newton and Schulz.
    fn transformed<M: Matrices>(directions: &M) -> M {
        let [a, b, c] = COEFFICIENTS;
        let [rows, columns] = directions.dims();
        let is_tall = rows > columns;
        let mut x = if is_tall { directions.transposed().normalised(EPSILON) } else { directions.normalised(EPSILON) };
        for _ in 0..ITERATIONS {
            let gram = x.gram();
            let polynomial = gram.combined(b, &gram.product(&gram), c);
            x = x.combined(a, &polynomial.product(&x), 1.0);
        }
        if is_tall { x.transposed() } else { x }
    }

    #[inline(always)]
    fn next<R: Real>(scalars: &[R; SCALARS], [rows, columns]: [usize; 2], value: R, direction: R) -> R {
        let [rows, columns] = [rows as f64, columns as f64];
        let [_, original, match_rms, decay] = scalars.clone();
        let original = original.clone() * original.constant((rows / columns).max(1.0).sqrt());
        let match_rms = match_rms.clone() * match_rms.constant(0.2 * rows.max(columns).sqrt());
        value * decay - (original + match_rms) * direction
    }

    /// The buffer is an average of the gradient's elements.
    fn bounds(scalars: &[f64; SCALARS], before: OptimizerBounds, gradient: f64) -> Option<OptimizerBounds> {
        let [_, original, match_rms, decay] = *scalars;
        let rate = original + match_rms;
        let moments = before.moments.max(gradient) * OptimizerBounds::ROUNDING;
        let weights = before.weights * decay.abs().max(1.0) + rate.abs() * LARGEST_FACTOR * LARGEST;
        Some(OptimizerBounds { weights, moments })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{OptimizerName, Rule, check_optimizer};

    #[test]
    fn muon_updates_matrices_of_layers_and_no_others() {
        let rule = |name: &str, shape: &[usize]| Rule::of(OptimizerName::Muon, name, shape);
        for (name, shape) in [
            ("model.layers.0.mlp.up_proj.weight", &[6, 10][..]),
            ("model.layers.1.mlp.experts.0.gate_proj.weight", &[6, 10]),
            ("model.layers.1.mlp.experts.gate_up_proj", &[4, 6, 10]),
            ("model.layers.1.mlp.gate.weight", &[4, 10]),
        ] {
            assert!(rule(name, shape).is_of_matrices(), "{name}");
        }
        for (name, shape) in [
            ("model.embed_tokens.weight", &[32, 10][..]),
            ("lm_head.weight", &[32, 10]),
            ("model.layers.0.input_layernorm.weight", &[10]),
            ("model.layers.1.mlp.experts.gate_up_proj_bias", &[4, 20]),
            ("model.layers.0.linear_attn.conv1d.weight", &[20, 1, 4]),
            ("v_head.summary.weight", &[1, 10]),
        ] {
            assert_eq!(rule(name, shape), Rule::of_elements(OptimizerName::AdamW), "{name}");
        }
    }

    #[test]
    fn muon_is_refused_for_adapters() {
        let error = check_optimizer(OptimizerName::Muon, true).unwrap_err().to_string();
        assert!(error.contains("optimizer.name") && error.contains("of adapters: `adamw`, `adamw_8bit`"), "{error}");
        check_optimizer(OptimizerName::Muon, false).unwrap();
        check_optimizer(OptimizerName::AdamW8bit, true).unwrap();
    }
}
