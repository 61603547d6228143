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
//! A rule of matrices ([`Rule::Muon`]) has a few coarse operations between two functions of elements ([`Matrices`]).
//!
//! How a slot is stored (f32, or 8 bits with scales) does not concern the rule.

use super::{CodeBook, Matrices, OptimizerBounds, OptimizerSettings, adamw, muon, orthogonalised, sgd};
use grpo_core::backend_api::real::Real;
use grpo_models::OptimizerName;
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
    /// Momentum whose matrices are orthogonalised.
    Muon,
}

impl Rule {
    pub(super) const ALL: [Self; 3] = [Self::AdamW, Self::Sgd, Self::Muon];

    /// Returns the rule of a trained tensor, given its name and shape in `transformers`.
    pub fn of(optimizer: OptimizerName, name: &str, shape: &[usize]) -> Self {
        if optimizer == OptimizerName::Muon && is_hidden_matrix(name, shape) {
            return Self::Muon;
        }
        Self::of_elements(optimizer)
    }

    /// Returns the rule of tensors that are not matrices of layers.
    pub fn of_elements(optimizer: OptimizerName) -> Self {
        match optimizer {
            OptimizerName::AdamW | OptimizerName::AdamW8bit | OptimizerName::Muon => Self::AdamW,
            OptimizerName::Sgd => Self::Sgd,
        }
    }

    /// Returns all rules of an optimizer.
    pub fn of_optimizer(optimizer: OptimizerName) -> &'static [Self] {
        match optimizer {
            OptimizerName::AdamW | OptimizerName::AdamW8bit => &[Self::AdamW],
            OptimizerName::Sgd => &[Self::Sgd],
            OptimizerName::Muon => &[Self::AdamW, Self::Muon],
        }
    }

    /// Returns the tensors of its state.
    pub fn slots(self) -> &'static [Slot] {
        match self {
            Self::AdamW => &adamw::SLOTS,
            Self::Sgd => &sgd::SLOTS,
            Self::Muon => &muon::SLOTS,
        }
    }
}

/// Returns `true` for matrices of layers: of projections, of MLPs and of routers, and stacks of the matrices of all experts.
fn is_hidden_matrix(name: &str, shape: &[usize]) -> bool {
    let is_matrix = shape.len() == 2 || shape.len() == 3 && name.contains(".experts.");
    is_matrix && name.starts_with("model.layers.") && !name.ends_with("bias")
}

/// Refuses an optimizer that cannot train adapters.
///
/// # Errors
/// [`crate::Error::Argument`] for `muon` with adapters: a low-rank product has no matrix to orthogonalise.
pub fn check_optimizer(optimizer: OptimizerName, has_adapters: bool) -> crate::Result<()> {
    if optimizer == OptimizerName::Muon && has_adapters {
        let expected = "an optimizer of adapters: `adamw`, `adamw_8bit` or `sgd`";
        return Err(crate::Error::argument("optimizer.name", expected, "muon"));
    }
    Ok(())
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
    /// Of AdamW and of Muon.
    Muon([R; adamw::SCALARS], [R; muon::SCALARS]),
}

impl OptimizerStep {
    pub(super) fn new(config: &OptimizerSettings, step: u64, learning_rate: f64) -> Self {
        let max_grad_norm = if config.max_grad_norm > 0.0 { config.max_grad_norm } else { f64::INFINITY };
        let of_adamw = || adamw::AdamW::scalars(config, step, learning_rate).map(|x| x as f32);
        let scalars = match config.name {
            OptimizerName::AdamW | OptimizerName::AdamW8bit => Scalars::AdamW(of_adamw()),
            OptimizerName::Sgd => Scalars::Sgd(sgd::Sgd::scalars(config, step, learning_rate).map(|x| x as f32)),
            OptimizerName::Muon => Scalars::Muon(of_adamw(), muon::scalars(config, learning_rate).map(|x| x as f32)),
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
        let (scalars, of_muon) = match &self.scalars {
            Scalars::AdamW(scalars) => (&scalars[..], &[][..]),
            Scalars::Sgd(scalars) => (&scalars[..], &[][..]),
            Scalars::Muon(scalars, of_muon) => (&scalars[..], &of_muon[..]),
        };
        scalars.iter().chain(of_muon).copied().chain([self.max_grad_norm, self.limit]).collect()
    }

    /// Returns the bounds of the rule.
    pub(super) fn bounds(&self, before: OptimizerBounds, gradient: f64) -> Option<OptimizerBounds> {
        match &self.scalars {
            Scalars::AdamW(scalars) => adamw::AdamW::bounds(&scalars.map(f64::from), before, gradient),
            Scalars::Sgd(scalars) => sgd::Sgd::bounds(&scalars.map(f64::from), before, gradient),
            Scalars::Muon(scalars, of_muon) => {
                let elements = adamw::AdamW::bounds(&scalars.map(f64::from), before, gradient)?;
                let matrices = muon::bounds(&of_muon.map(f64::from), before, gradient);
                let weights = elements.weights.max(matrices.weights);
                // `max` ignores NaN.
                let is_known = !elements.weights.is_nan() && !matrices.weights.is_nan();
                is_known.then_some(OptimizerBounds { weights, moments: elements.moments.max(matrices.moments) })
            }
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
            Scalars::AdamW(scalars) | Scalars::Muon(scalars, _) => {
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

impl OptimizerStep {
    /// Updates the matrices `[rows, columns]` of a stack: `values` and the `buffer` in place, with the gradient times `clip`. `matrices` creates a
    /// stack of matrices, and `elements` returns the elements of one.
    ///
    /// # Panics
    /// Panics unless the optimizer has [`Rule::Muon`].
    pub fn update_matrices<M: Matrices>(
        &self,
        clip: f32,
        values: &mut [f32],
        gradient: &[f32],
        buffer: &mut [f32],
        matrices: impl Fn(Vec<f32>) -> M,
        elements: impl Fn(M) -> Vec<f32>,
    ) {
        let scalars = self.of_muon();
        let direction = |(buffer, gradient): (&mut f32, &f32)| {
            let (direction, after) = muon::direction(scalars, gradient * clip, *buffer);
            *buffer = after;
            direction
        };
        let directions = matrices(buffer.iter_mut().zip(gradient).map(direction).collect());
        let dims = directions.dims();
        let directions = elements(orthogonalised(&directions));
        for (value, direction) in values.iter_mut().zip(directions) {
            *value = muon::next(scalars, dims, *value, direction);
        }
    }
}

impl<R> OptimizerStep<R> {
    fn of_muon(&self) -> &[R; muon::SCALARS] {
        match &self.scalars {
            Scalars::Muon(_, scalars) => scalars,
            _ => panic!("expected an optimizer with the rule of matrices"),
        }
    }
}

impl<R: Real + Debug> OptimizerStep<R> {
    /// Returns matrices and their buffer after the step, given the clipped gradient.
    ///
    /// # Panics
    /// Panics unless the optimizer has [`Rule::Muon`].
    pub fn next_matrices(&self, value: R, gradient: R, buffer: R) -> (R, R)
    where
        R: Matrices,
    {
        let scalars = self.of_muon();
        let (directions, buffer) = muon::direction(scalars, gradient, buffer);
        let dims = directions.dims();
        (muon::next(scalars, dims, value, orthogonalised(&directions)), buffer)
    }

    /// Returns the length of [`OptimizerStep::to_list`].
    pub fn count(optimizer: OptimizerName) -> usize {
        let of_rules = Rule::of_optimizer(optimizer).iter().map(|rule| match rule {
            Rule::AdamW => adamw::SCALARS,
            Rule::Sgd => sgd::SCALARS,
            Rule::Muon => muon::SCALARS,
        });
        of_rules.sum::<usize>() + 2
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
        let scalars = match optimizer {
            OptimizerName::AdamW | OptimizerName::AdamW8bit => Scalars::AdamW(array(rest)),
            OptimizerName::Sgd => Scalars::Sgd(array(rest)),
            OptimizerName::Muon => {
                let of_muon = array(rest.split_off(adamw::SCALARS));
                Scalars::Muon(array(rest), of_muon)
            }
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
            Scalars::AdamW(scalars) | Scalars::Muon(scalars, _) => {
                next::<adamw::AdamW, _, _, _>(scalars, decays, value, gradient, slots)
            }
            Scalars::Sgd(scalars) => next::<sgd::Sgd, _, _, _>(scalars, decays, value, gradient, slots),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_testkit::optimizer_steps::{OptimizerSteps, to_f32};

    /// The name of a matrix of a layer.
    const MATRIX: &str = "model.layers.0.mlp.up_proj.weight";

    #[test]
    fn steps_match_torch() {
        for case in OptimizerSteps::<OptimizerSettings>::all() {
            let rule = Rule::of(case.settings.name, MATRIX, &case.shape);
            if rule == Rule::Muon {
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
    fn muon_updates_matrices_of_layers_and_no_others() {
        let rule = |name: &str, shape: &[usize]| Rule::of(OptimizerName::Muon, name, shape);
        for (name, shape) in [
            (MATRIX, &[6, 10][..]),
            ("model.layers.1.mlp.experts.0.gate_proj.weight", &[6, 10]),
            ("model.layers.1.mlp.experts.gate_up_proj", &[4, 6, 10]),
            ("model.layers.1.mlp.gate.weight", &[4, 10]),
        ] {
            assert_eq!(rule(name, shape), Rule::Muon, "{name}");
        }
        for (name, shape) in [
            ("model.embed_tokens.weight", &[32, 10][..]),
            ("lm_head.weight", &[32, 10]),
            ("model.layers.0.input_layernorm.weight", &[10]),
            ("model.layers.1.mlp.experts.gate_up_proj_bias", &[4, 20]),
            ("model.layers.0.linear_attn.conv1d.weight", &[20, 1, 4]),
            ("v_head.summary.weight", &[1, 10]),
        ] {
            assert_eq!(rule(name, shape), Rule::AdamW, "{name}");
        }
    }

    #[test]
    fn muon_is_refused_for_adapters() {
        let error = check_optimizer(OptimizerName::Muon, true).unwrap_err().to_string();
        assert!(error.contains("optimizer.name") && error.contains("`adamw`, `adamw_8bit` or `sgd`"), "{error}");
        check_optimizer(OptimizerName::Muon, false).unwrap();
        check_optimizer(OptimizerName::AdamW8bit, true).unwrap();
    }

    #[test]
    fn a_rule_is_written_once_for_every_number() {
        for name in [OptimizerName::AdamW, OptimizerName::Sgd, OptimizerName::Muon] {
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
