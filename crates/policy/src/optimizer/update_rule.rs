//! The traits of update rules.
//!
//! A rule has named slots, tensors of its state for every trained tensor, and scalars that are equal for all elements of a step. Its arithmetic is
//! one function over [`Real`]: with f32 it updates weights on the host, with values of a program it writes the update of a device.
//!
//! ```text
//! gradient = clip * sum of gradients
//! value, slots = next(scalars, value, gradient, slots)    for every element
//! ```
//!
//! A [`MatrixRule`] has a few coarse operations on whole matrices between two functions of elements.
//!
//! How a slot is stored (f32, or 8 bits with scales) does not concern the rule.

use super::bounds::OptimizerBounds;
use super::code_book::CodeBook;
use super::settings::OptimizerSettings;
use grpo_core::backend_api::real::Real;

/// A tensor of an optimizer's state, with the shape of the trained tensor.
#[derive(Debug, PartialEq, Eq)]
pub struct Slot {
    /// The prefix of the tensor's name in checkpoints, as f32.
    pub single: &'static str,
    /// The prefixes of the names of its codes and scales, if it is stored in 8 bits.
    pub eight_bit: [&'static str; 2],
    /// The values of the codes.
    pub book: CodeBook,
    /// `true` if it has squares, so that its root is bounded.
    pub is_squared: bool,
}

impl Slot {
    /// A buffer of momentum, with torch's name.
    pub(super) const MOMENTUM: Self = Self {
        single: "momentum_buffer.",
        eight_bit: ["momentum_buffer_codes.", "momentum_buffer_scales."],
        book: CodeBook::Signed,
        is_squared: false,
    };

    /// Returns the prefixes of the names of its tensors. Small tensors are f32 in every format.
    pub(super) fn prefixes(&self, is_eight_bit: bool) -> impl Iterator<Item = &'static str> + use<> {
        let [codes, scales] = self.eight_bit;
        std::iter::once(self.single).chain([codes, scales].into_iter().filter(move |_| is_eight_bit))
    }
}

/// A rule of single elements.
pub trait UpdateRule<const SLOTS: usize, const SCALARS: usize> {
    /// The tensors of the state.
    const SLOTS: [Slot; SLOTS];

    /// Returns the scalars of step `step`, counted from 1.
    fn scalars(config: &OptimizerSettings, step: u64, learning_rate: f64) -> [f64; SCALARS];

    /// Returns the value and the slots of an element after the step. `decays` is `false` for norms and biases, which have no weight decay.
    fn next<R: Real>(scalars: &[R; SCALARS], decays: bool, value: R, gradient: R, slots: [R; SLOTS])
    -> (R, [R; SLOTS]);

    /// Returns bounds after the step, given upper bounds before it and the largest magnitude of an element of the gradient; `None` if they are
    /// not known. The caller checks that the result is small enough.
    fn bounds(scalars: &[f64; SCALARS], before: OptimizerBounds, gradient: f64) -> Option<OptimizerBounds>;
}

/// A rule of matrices with one slot.
pub trait MatrixRule<const SCALARS: usize> {
    /// The buffer, as a list.
    const SLOTS: [Slot; 1];

    /// Returns the scalars of step `step`, counted from 1.
    fn scalars(config: &OptimizerSettings, step: u64, learning_rate: f64) -> [f64; SCALARS];

    /// Returns an element of the matrix that is transformed, and of the buffer, after a step.
    fn direction<R: Real>(scalars: &[R; SCALARS], gradient: R, buffer: R) -> (R, R);

    /// Returns the directions of the weights.
    fn transformed<M: Matrices>(directions: &M) -> M;

    /// Returns a weight of a matrix of this size after a step, given the element of the transformed matrix.
    fn next<R: Real>(scalars: &[R; SCALARS], dims: [usize; 2], value: R, direction: R) -> R;

    /// Returns bounds after the step, given upper bounds before it and the largest magnitude of an element of the gradient; `None` if they are
    /// not known. The caller checks that the result is small enough.
    fn bounds(scalars: &[f64; SCALARS], before: OptimizerBounds, gradient: f64) -> Option<OptimizerBounds>;
}

/// A stack of matrices, with coarse operations.
pub trait Matrices: Sized {
    /// Returns the numbers of rows and columns of a matrix.
    fn dims(&self) -> [usize; 2];
    /// Returns the transposes.
    fn transposed(&self) -> Self;
    /// Returns each matrix X times its transpose, X X^T.
    fn gram(&self) -> Self;
    /// Returns the product of each matrix and the matrix of `other` at the same place.
    fn product(&self, other: &Self) -> Self;
    /// Returns `a` times these matrices plus `b` times `other`.
    fn combined(&self, a: f64, other: &Self, b: f64) -> Self;
    /// Returns each matrix divided by its 2-norm over all elements, or by `smallest` if that is larger.
    fn normalised(&self, smallest: f64) -> Self;
}
