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

use super::{CodeBook, OptimizerBounds, OptimizerSettings, Slot};
use grpo_core::backend_api::real::Real;
use grpo_models::AdjustLr;

/// The average of gradients.
pub(super) const SLOTS: [Slot; 1] = [Slot {
    single: "momentum_buffer.",
    eight_bit: ["momentum_buffer_codes.", "momentum_buffer_scales."],
    book: CodeBook::Signed,
    is_squared: false,
}];

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

/// A stack of matrices, with the coarse operations of the iteration.
pub trait Matrices: Sized {
    /// Returns the numbers of rows and columns of a matrix.
    fn dims(&self) -> [usize; 2];
    /// Returns the transposes.
    fn transposed(&self) -> Self;
    /// Returns each matrix X times its transpose, X X^T.
    fn gram(&self) -> Self;
    /// Returns the products of the matrices with those of `other`.
    fn product(&self, other: &Self) -> Self;
    /// Returns `a` times these matrices plus `b` times `other`.
    fn combined(&self, a: f64, other: &Self, b: f64) -> Self;
    /// Returns each matrix divided by its 2-norm over all elements, or by `smallest` if that is larger.
    fn normalised(&self, smallest: f64) -> Self;
}

/// Returns matrices with the singular vectors of `matrices` and singular values near 1, by five iterations of Newton and Schulz.
pub fn orthogonalised<M: Matrices>(matrices: &M) -> M {
    let [a, b, c] = COEFFICIENTS;
    let [rows, columns] = matrices.dims();
    let is_tall = rows > columns;
    let mut x = if is_tall { matrices.transposed().normalised(EPSILON) } else { matrices.normalised(EPSILON) };
    for _ in 0..ITERATIONS {
        let gram = x.gram();
        let polynomial = gram.combined(b, &gram.product(&gram), c);
        x = x.combined(a, &polynomial.product(&x), 1.0);
    }
    if is_tall { x.transposed() } else { x }
}

pub(super) fn scalars(config: &OptimizerSettings, learning_rate: f64) -> [f64; SCALARS] {
    let rate = |adjust| if config.adjust_lr_fn == adjust { learning_rate } else { 0.0 };
    let decay = 1.0 - learning_rate * config.weight_decay;
    let momentum = config.momentum.unwrap_or(0.95);
    [momentum, rate(AdjustLr::Original), rate(AdjustLr::MatchRmsAdamw), decay]
}

/// Returns an element of the matrix that is orthogonalised, and of the buffer, after a step.
#[inline(always)]
pub(super) fn direction<R: Real>(scalars: &[R; SCALARS], gradient: R, buffer: R) -> (R, R) {
    let momentum = scalars[0].clone();
    let one = momentum.constant(1.0);
    let buffer = momentum.clone() * buffer + (one - momentum.clone()) * gradient.clone();
    (gradient.clone() + momentum * (buffer.clone() - gradient), buffer)
}

/// Returns a weight of a matrix of this size after a step, given the element of the orthogonalised matrix.
#[inline(always)]
pub(super) fn next<R: Real>(scalars: &[R; SCALARS], [rows, columns]: [usize; 2], value: R, direction: R) -> R {
    let [rows, columns] = [rows as f64, columns as f64];
    let [_, original, match_rms, decay] = scalars.clone();
    let original = original.clone() * original.constant((rows / columns).max(1.0).sqrt());
    let match_rms = match_rms.clone() * match_rms.constant(0.2 * rows.max(columns).sqrt());
    value * decay - (original + match_rms) * direction
}

/// The buffer is an average of the gradient's elements.
pub(super) fn bounds(scalars: &[f64; SCALARS], before: OptimizerBounds, gradient: f64) -> OptimizerBounds {
    let [_, original, match_rms, decay] = *scalars;
    let rate = original + match_rms;
    let moments = before.moments.max(gradient) * OptimizerBounds::ROUNDING;
    let weights = before.weights * decay.abs().max(1.0) + rate.abs() * LARGEST_FACTOR * LARGEST;
    OptimizerBounds { weights, moments }
}
