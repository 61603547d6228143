//! Which tensors have which rule, and the registration of rules.

use super::Rule;
use grpo_models::OptimizerName;

/// Registers rules, in the file [`super`]: each line is `module::Rule`; a rule of elements names its slots, and the function that updates so many.
macro_rules! rules {
    (
        elements { $($module:ident::$element:ident by $update:ident($($slot:ident),+),)+ }
        matrices { $($of_matrix:ident::$matrix:ident,)+ }
    ) => {
        use grpo_core::backend_api::real::Real;

        /// The rule by which a tensor is updated.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct Rule(Kind);

        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        enum Kind {
            $($element,)+
            $($matrix,)+
        }

        impl Rule {
            const ALL: &[Self] = &[$(Self(Kind::$element),)+ $(Self(Kind::$matrix),)+];

            /// Returns the tensors of its state.
            pub fn slots(self) -> &'static [Slot] {
                match self.0 {
                    $(Kind::$element => &$module::$element::SLOTS,)+
                    $(Kind::$matrix => &$of_matrix::$matrix::SLOTS,)+
                }
            }

            /// Returns `true` for a rule of whole matrices.
            pub fn is_of_matrices(self) -> bool {
                match self.0 {
                    $(Kind::$element => false,)+
                    $(Kind::$matrix => true,)+
                }
            }

            /// Returns the number of its scalars.
            fn count(self) -> usize {
                match self.0 {
                    $(Kind::$element => $module::SCALARS,)+
                    $(Kind::$matrix => $of_matrix::SCALARS,)+
                }
            }

            /// Returns the scalars of step `step`, counted from 1.
            fn scalars(self, config: &OptimizerSettings, step: u64, learning_rate: f64) -> Vec<f64> {
                match self.0 {
                    $(Kind::$element => $module::$element::scalars(config, step, learning_rate).to_vec(),)+
                    $(Kind::$matrix => $of_matrix::$matrix::scalars(config, step, learning_rate).to_vec(),)+
                }
            }

            /// See [`UpdateRule::bounds`].
            fn bounds(
                self,
                scalars: &[f64],
                before: OptimizerBounds,
                gradient: f64,
            ) -> Option<OptimizerBounds> {
                match self.0 {
                    $(Kind::$element => $module::$element::bounds(rule::array(scalars), before, gradient),)+
                    $(Kind::$matrix => $of_matrix::$matrix::bounds(rule::array(scalars), before, gradient),)+
                }
            }

            /// See [`UpdateRule::next`].
            fn next<R: Real + std::fmt::Debug>(
                self,
                scalars: &[R],
                decays: bool,
                value: R,
                gradient: R,
                slots: Vec<R>,
            ) -> (R, Vec<R>) {
                match self.0 {
                    $(Kind::$element => {
                        let slots = slots.try_into().expect("a value for each slot");
                        let (value, slots) =
                            $module::$element::next(rule::array(scalars), decays, value, gradient, slots);
                        (value, slots.into())
                    })+
                    $(Kind::$matrix => panic!("expected a rule of elements, got {}", stringify!($matrix)),)+
                }
            }

            /// Updates elements in place, with the gradient times `clip`.
            fn update(
                self,
                scalars: &[f32],
                decays: bool,
                clip: f32,
                values: &mut [f32],
                gradient: &[f32],
                slots: &mut [&mut [f32]],
            ) {
                match self.0 {
                    $(Kind::$element => {
                        let [$($slot),+] = slots else { panic!("a slice for each slot, got {}", slots.len()) };
                        // A copy, which no slice overlaps.
                        let scalars = *rule::array(scalars);
                        let next = |value, gradient: f32, slots| {
                            $module::$element::next(&scalars, decays, value, gradient * clip, slots)
                        };
                        rule::$update(next, values, gradient, $($slot),+);
                    })+
                    $(Kind::$matrix => panic!("expected a rule of elements, got {}", stringify!($matrix)),)+
                }
            }

            /// See [`MatrixRule::direction`].
            #[inline(always)]
            fn direction<R: Real>(self, scalars: &[R], gradient: R, buffer: R) -> (R, R) {
                match self.0 {
                    $(Kind::$matrix => $of_matrix::$matrix::direction(rule::array(scalars), gradient, buffer),)+
                    _ => panic!("expected a rule of matrices, got {self:?}"),
                }
            }

            /// See [`MatrixRule::transformed`].
            fn transformed<M: Matrices>(self, directions: &M) -> M {
                match self.0 {
                    $(Kind::$matrix => $of_matrix::$matrix::transformed(directions),)+
                    _ => panic!("expected a rule of matrices, got {self:?}"),
                }
            }

            /// See [`MatrixRule::next`].
            #[inline(always)]
            fn next_of_matrix<R: Real>(
                self,
                scalars: &[R],
                dims: [usize; 2],
                value: R,
                direction: R,
            ) -> R {
                match self.0 {
                    $(Kind::$matrix => $of_matrix::$matrix::next(rule::array(scalars), dims, value, direction),)+
                    _ => panic!("expected a rule of matrices, got {self:?}"),
                }
            }
        }
    };
}

// Every slice is an argument: the compiler then knows that they do not overlap, and updates several elements by one instruction.

pub(super) fn update_one(
    next: impl Fn(f32, f32, [f32; 1]) -> (f32, [f32; 1]),
    values: &mut [f32],
    gradient: &[f32],
    slot: &mut [f32],
) {
    for ((value, gradient), slot) in values.iter_mut().zip(gradient).zip(slot) {
        (*value, [*slot]) = next(*value, *gradient, [*slot]);
    }
}

pub(super) fn update_two(
    next: impl Fn(f32, f32, [f32; 2]) -> (f32, [f32; 2]),
    values: &mut [f32],
    gradient: &[f32],
    first: &mut [f32],
    second: &mut [f32],
) {
    for ((value, gradient), (first, second)) in values.iter_mut().zip(gradient).zip(first.iter_mut().zip(second)) {
        (*value, [*first, *second]) = next(*value, *gradient, [*first, *second]);
    }
}

pub(super) fn array<R, const N: usize>(scalars: &[R]) -> &[R; N] {
    scalars.try_into().expect("the scalars of the rule")
}

impl Rule {
    /// Returns the rule of tensors that are not matrices of layers.
    pub fn of_elements(optimizer: OptimizerName) -> Self {
        Self::of_optimizer(optimizer)[0]
    }

    /// Returns the rule of matrices of layers, if it is another one.
    pub(super) fn of_matrices(optimizer: OptimizerName) -> Option<Self> {
        Self::of_optimizer(optimizer).iter().copied().find(|rule| rule.is_of_matrices())
    }

    /// Returns the rule of a trained tensor, given its name and shape in `transformers`.
    pub fn of(optimizer: OptimizerName, name: &str, shape: &[usize]) -> Self {
        let of_matrices = Self::of_matrices(optimizer).filter(|_| is_hidden_matrix(name, shape));
        of_matrices.unwrap_or_else(|| Self::of_elements(optimizer))
    }
}

/// Returns `true` for matrices of layers: of projections, of MLPs and of routers, and stacks of the matrices of all experts.
fn is_hidden_matrix(name: &str, shape: &[usize]) -> bool {
    let is_matrix = shape.len() == 2 || shape.len() == 3 && name.contains(".experts.");
    is_matrix && name.starts_with("model.layers.") && !name.ends_with("bias")
}

/// Returns `true` for an optimizer that can train adapters: one without a rule of matrices, because a low-rank product has none.
pub fn trains_adapters(optimizer: OptimizerName) -> bool {
    Rule::of_matrices(optimizer).is_none()
}

/// Returns the names of the optimizers that can train adapters, as a phrase.
pub fn adapter_optimizers() -> String {
    let names: Vec<String> =
        OptimizerName::ALL.into_iter().filter(|name| trains_adapters(*name)).map(|name| format!("`{name}`")).collect();
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => names.concat(),
    }
}

/// Refuses an optimizer that cannot train adapters.
///
/// # Errors
/// [`crate::Error::Argument`] with [`adapter_optimizers`].
pub fn check_optimizer(optimizer: OptimizerName, has_adapters: bool) -> crate::Result<()> {
    if has_adapters && !trains_adapters(optimizer) {
        let expected = format!("an optimizer of adapters: {}", adapter_optimizers());
        return Err(crate::Error::argument("optimizer.name", expected, optimizer));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OptimizerSettings, OptimizerStep};
    use grpo_testkit::optimizer_steps::{OptimizerSteps, to_f32};

    /// The name of a matrix of a layer.
    const MATRIX: &str = "model.layers.0.mlp.up_proj.weight";

    #[test]
    fn steps_match_torch() {
        for case in OptimizerSteps::<OptimizerSettings>::all() {
            let rule = Rule::of(case.settings.name, MATRIX, &case.shape);
            if rule.is_of_matrices() {
                continue;
            }
            let mut weight = to_f32(&case.weight);
            let mut slots = vec![vec![0.0; weight.len()]; rule.slots().len()];
            for (step, gradient) in (1..).zip(&case.gradients) {
                let mut slots: Vec<&mut [f32]> = slots.iter_mut().map(|slot| &mut slot[..]).collect();
                let scalars = case.settings.step(step, case.learning_rate);
                scalars.update(case.shape.len() > 1, 1.0, &mut weight, &to_f32(gradient), &mut slots);
                case.assert_weight(step as usize, &weight);
            }
            assert_eq!(case.state.len(), slots.len());
            for (slot, found) in rule.slots().iter().zip(&slots) {
                case.assert_state(slot.single.trim_end_matches('.'), found);
            }
        }
    }

    #[test]
    fn a_rule_is_written_once_for_every_number() {
        for name in OptimizerName::ALL {
            let config = OptimizerSettings { name, weight_decay: 0.1, ..OptimizerSettings::default() };
            let step = config.step(3, 0.5);
            let count = Rule::of_elements(name).slots().len();
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
