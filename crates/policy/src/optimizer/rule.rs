//! The update rules of optimizers.
//!
//! A rule has named slots, tensors of its state for every trained tensor, and scalars that are equal for all elements of a step. Its arithmetic is
//! one function over [`Real`]: with f32 it updates weights on the host, with values of a program it writes the update of a device.
//!
//! ```text
//! gradient = clip * sum of gradients
//! value, slots = next(scalars, value, gradient, slots)    for every element
//! ```
//!
//! How a slot is stored (f32, or 8 bits with scales) does not concern the rule.

use super::{CodeBook, OptimizerBounds, OptimizerSettings, adamw, sgd};
use grpo_core::backend_api::real::Real;
use models::OptimizerName;
use std::fmt::Debug;

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

/// The rule by which a tensor is updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// AdamW.
    AdamW,
    /// SGD with momentum.
    Sgd,
}

impl Rule {
    pub(super) const ALL: [Self; 2] = [Self::AdamW, Self::Sgd];

    /// Returns the rule of a trained tensor.
    pub fn of(optimizer: OptimizerName) -> Self {
        match optimizer {
            OptimizerName::AdamW | OptimizerName::AdamW8bit => Self::AdamW,
            OptimizerName::Sgd => Self::Sgd,
        }
    }

    /// Returns the tensors of its state.
    pub fn slots(self) -> &'static [Slot] {
        match self {
            Self::AdamW => &adamw::SLOTS,
            Self::Sgd => &sgd::SLOTS,
        }
    }
}

/// The arithmetic of a [`Rule`].
pub trait UpdateRule<const SLOTS: usize, const SCALARS: usize> {
    /// Returns the scalars of step `step`, counted from 1.
    fn scalars(config: &OptimizerSettings, step: u64, learning_rate: f64) -> [f64; SCALARS];

    /// Returns the value and the slots of an element after the step. `decays` is `false` for norms and biases, which have no weight decay.
    fn next<R: Real>(scalars: &[R; SCALARS], decays: bool, value: R, gradient: R, slots: [R; SLOTS])
    -> (R, [R; SLOTS]);

    /// Returns bounds after the step, given upper bounds before it and the largest magnitude of an element of the gradient; `None` if they are
    /// not known. The caller checks that the result is small enough.
    fn bounds(scalars: &[f64; SCALARS], before: OptimizerBounds, gradient: f64) -> Option<OptimizerBounds>;
}

/// The scalars of one step, which do not differ between elements. [`OptimizerSettings::step`] creates them in f32, the precision of the update.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerStep<R = f32> {
    scalars: Scalars<R>,
    /// Gradients with a larger norm are clipped to this norm; infinite if clipping is off.
    pub max_grad_norm: R,
    /// Largest gradient norm that is applied.
    pub limit: R,
}

#[derive(Clone, Debug, PartialEq)]
enum Scalars<R> {
    AdamW([R; adamw::SCALARS]),
    Sgd([R; sgd::SCALARS]),
}

impl OptimizerStep {
    pub(super) fn new(config: &OptimizerSettings, step: u64, learning_rate: f64) -> Self {
        let max_grad_norm = if config.max_grad_norm > 0.0 { config.max_grad_norm } else { f64::INFINITY };
        let scalars = match Rule::of(config.name) {
            Rule::AdamW => Scalars::AdamW(adamw::AdamW::scalars(config, step, learning_rate).map(|x| x as f32)),
            Rule::Sgd => Scalars::Sgd(sgd::Sgd::scalars(config, step, learning_rate).map(|x| x as f32)),
        };
        Self {
            scalars,
            max_grad_norm: max_grad_norm as f32,
            // Without a limit, every finite norm passes.
            limit: config.skip_grad_norm.unwrap_or(f64::from(f32::MAX)) as f32,
        }
    }

    /// Returns the scalars as a list: of the rule, then the two of clipping.
    pub fn to_list(&self) -> Vec<f32> {
        let scalars = match &self.scalars {
            Scalars::AdamW(scalars) => &scalars[..],
            Scalars::Sgd(scalars) => &scalars[..],
        };
        scalars.iter().copied().chain([self.max_grad_norm, self.limit]).collect()
    }

    /// Returns the bounds of the rule.
    pub(super) fn bounds(&self, before: OptimizerBounds, gradient: f64) -> Option<OptimizerBounds> {
        match &self.scalars {
            Scalars::AdamW(scalars) => adamw::AdamW::bounds(&scalars.map(f64::from), before, gradient),
            Scalars::Sgd(scalars) => sgd::Sgd::bounds(&scalars.map(f64::from), before, gradient),
        }
    }

    /// Updates the elements of a tensor: `values` and `slots` in place, with the gradient times `clip`.
    ///
    /// # Panics
    /// Panics unless there is a slice for each slot of the rule.
    pub fn update(&self, decays: bool, clip: f32, values: &mut [f32], gradient: &[f32], slots: &mut [&mut [f32]]) {
        // Every slice is an argument: the compiler then knows that they do not overlap, and updates several elements by one instruction.
        fn with_one(
            next: impl Fn(f32, f32, [f32; 1]) -> (f32, [f32; 1]),
            values: &mut [f32],
            gradient: &[f32],
            slot: &mut [f32],
        ) {
            for ((value, gradient), slot) in values.iter_mut().zip(gradient).zip(slot) {
                (*value, [*slot]) = next(*value, *gradient, [*slot]);
            }
        }
        fn with_two(
            next: impl Fn(f32, f32, [f32; 2]) -> (f32, [f32; 2]),
            values: &mut [f32],
            gradient: &[f32],
            first: &mut [f32],
            second: &mut [f32],
        ) {
            for ((value, gradient), (first, second)) in
                values.iter_mut().zip(gradient).zip(first.iter_mut().zip(second))
            {
                (*value, [*first, *second]) = next(*value, *gradient, [*first, *second]);
            }
        }
        match &self.scalars {
            Scalars::AdamW(scalars) => {
                let [first, second] = slots else { panic!("AdamW has two slots, got {}", slots.len()) };
                let next =
                    |value, gradient: f32, slots| adamw::AdamW::next(scalars, decays, value, gradient * clip, slots);
                with_two(next, values, gradient, first, second);
            }
            Scalars::Sgd(scalars) => {
                let [buffer] = slots else { panic!("SGD has one slot, got {}", slots.len()) };
                let next = |value, gradient: f32, slots| sgd::Sgd::next(scalars, decays, value, gradient * clip, slots);
                with_one(next, values, gradient, buffer);
            }
        }
    }
}

impl<R: Real + Debug> OptimizerStep<R> {
    /// Returns the length of [`OptimizerStep::to_list`].
    pub fn count(optimizer: OptimizerName) -> usize {
        2 + match Rule::of(optimizer) {
            Rule::AdamW => adamw::SCALARS,
            Rule::Sgd => sgd::SCALARS,
        }
    }

    /// Returns the scalars of a list.
    ///
    /// # Panics
    /// Panics unless the list has [`OptimizerStep::count`] elements.
    pub fn of_list(optimizer: OptimizerName, numbers: Vec<R>) -> Self {
        fn array<R: Debug, const N: usize>(numbers: Vec<R>) -> [R; N] {
            numbers.try_into().expect("as many scalars as the optimizer has")
        }
        let mut rest = numbers;
        let [max_grad_norm, limit] = array(rest.split_off(rest.len() - 2));
        let scalars = match Rule::of(optimizer) {
            Rule::AdamW => Scalars::AdamW(array(rest)),
            Rule::Sgd => Scalars::Sgd(array(rest)),
        };
        Self { scalars, max_grad_norm, limit }
    }

    /// Returns value and slots after the step, given the clipped gradient.
    ///
    /// # Panics
    /// Panics unless there is a value for each slot of the rule.
    pub fn next(&self, decays: bool, value: R, gradient: R, slots: Vec<R>) -> (R, Vec<R>) {
        fn next<T: UpdateRule<S, C>, R: Real + Debug, const S: usize, const C: usize>(
            scalars: &[R; C],
            decays: bool,
            value: R,
            gradient: R,
            slots: Vec<R>,
        ) -> (R, Vec<R>) {
            let (value, slots) =
                T::next(scalars, decays, value, gradient, slots.try_into().expect("a value for each slot"));
            (value, slots.into())
        }
        match &self.scalars {
            Scalars::AdamW(scalars) => next::<adamw::AdamW, _, _, _>(scalars, decays, value, gradient, slots),
            Scalars::Sgd(scalars) => next::<sgd::Sgd, _, _, _>(scalars, decays, value, gradient, slots),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::OptimizerSteps;

    fn narrow(values: &[f64]) -> Vec<f32> {
        values.iter().map(|value| *value as f32).collect()
    }

    fn wide(values: &[f32]) -> Vec<f64> {
        values.iter().copied().map(f64::from).collect()
    }

    #[test]
    fn steps_match_torch() {
        for case in OptimizerSteps::<OptimizerSettings>::all() {
            let rule = Rule::of(case.settings.name);
            let mut weight = narrow(&case.weight);
            let mut slots = vec![vec![0.0; weight.len()]; rule.slots().len()];
            for (step, gradient) in (1..).zip(&case.gradients) {
                let mut slots: Vec<&mut [f32]> = slots.iter_mut().map(|slot| &mut slot[..]).collect();
                let scalars = case.settings.step(step, case.learning_rate);
                scalars.update(case.shape.len() > 1, 1.0, &mut weight, &narrow(gradient), &mut slots);
                case.assert_weight(step as usize, &wide(&weight));
            }
            assert_eq!(case.state.len(), slots.len());
            for (slot, found) in rule.slots().iter().zip(&slots) {
                case.assert_state(slot.single.trim_end_matches('.'), &wide(found));
            }
        }
    }

    #[test]
    fn a_rule_is_written_once_for_every_number() {
        for name in [OptimizerName::AdamW, OptimizerName::Sgd] {
            let config = OptimizerSettings { name, weight_decay: 0.1, ..OptimizerSettings::default() };
            let step = config.step(3, 0.5);
            let count = Rule::of(name).slots().len();
            let numbers = step.to_list().into_iter().map(f64::from).collect();
            let (value, after) = OptimizerStep::of_list(name, numbers).next(true, 0.75, -0.5, vec![0.25; count]);
            let (mut values, mut slots) = ([0.75_f32], vec![[0.25_f32]; count]);
            let mut slices: Vec<&mut [f32]> = slots.iter_mut().map(|slot| &mut slot[..]).collect();
            step.update(true, 1.0, &mut values, &[-0.5], &mut slices);
            assert!((value - f64::from(values[0])).abs() < 1e-6);
            assert!(after.iter().zip(&slots).all(|(a, b)| (a - f64::from(b[0])).abs() < 1e-6));
        }
    }
}
