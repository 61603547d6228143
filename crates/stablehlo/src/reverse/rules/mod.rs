//! Derivative rules of operations.

mod contract;
mod elementwise;
mod indexing;
mod movement;

use crate::build::{Builder, Value};
use crate::graph::{Binary, Kind, Reducer, Unary};
use crate::types::{Dtype, TensorType};

/// An operation in the backward pass.
pub(super) struct Step<'a> {
    pub(super) builder: &'a Builder,
    pub(super) operands: Vec<Value>,
    pub(super) results: Vec<Value>,
    /// Cotangents by result, at least one of them present. They have the results' types, but a conversion or barrier
    /// may get a wider dtype.
    pub(super) cotangents: Vec<Option<Value>>,
    /// `true` for operands that need a cotangent.
    pub(super) wanted: Vec<bool>,
    /// For each operand, the best dtype for its summand.
    pub(super) sums: Vec<Dtype>,
    /// The accumulator of a gather's operand, if there is one; the rule adds to it and returns the sum.
    pub(super) begun: Option<Value>,
}

/// Cotangents of the operands; `None` for zero. A dtype wider than the operand's keeps the precision of the sum.
pub(super) type Parts = Vec<Option<Value>>;

/// The derivative of an operation.
pub(super) enum Rule<'a> {
    /// The derivative is zero, or no result depends smoothly on an operand.
    Constant,
    /// Computed by this function.
    Of(Box<dyn Fn(&Step<'_>) -> Parts + 'a>),
    /// Handled by [`Structure`](super::nested::Structure).
    Structure,
    /// Not available, with a hint what to do instead.
    None(&'static str),
}

fn of<'a>(rule: impl Fn(&Step<'_>) -> Parts + 'a) -> Rule<'a> {
    Rule::Of(Box::new(rule))
}

/// Returns the rule of an operation.
pub(super) fn rule(kind: &Kind) -> Rule<'_> {
    match kind {
        Kind::Constant(_) | Kind::Iota { .. } | Kind::Compare(_) | Kind::StopGradient => Rule::Constant,
        Kind::Unary(Unary::Sign | Unary::IsFinite | Unary::Not) => Rule::Constant,
        Kind::Unary(unary) => of(move |step| elementwise::unary(step, *unary)),
        Kind::Binary(
            Binary::And
            | Binary::Or
            | Binary::Xor
            | Binary::ShiftLeft
            | Binary::ShiftRightLogical
            | Binary::ShiftRightArithmetic,
        ) => Rule::Constant,
        Kind::Binary(binary) => of(move |step| elementwise::binary(step, *binary)),
        Kind::Select => of(elementwise::select),
        Kind::Clamp => Rule::None("a derivative is not implemented; use `max` and `min`"),
        Kind::Convert | Kind::Named(_) => of(|step| vec![step.cotangents[0].clone()]),
        Kind::DotGeneral(dimensions, precision) => of(move |step| contract::dot_general(step, dimensions, *precision)),
        Kind::Reduce { reducers, dimensions } => of(move |step| contract::reduce(step, reducers, dimensions)),
        Kind::ArgMax { dimension } => of(move |step| contract::arg_max(step, *dimension)),
        Kind::BroadcastInDim { dimensions } => of(move |step| contract::broadcast_in_dim(step, dimensions)),
        Kind::Reshape => of(movement::reshape),
        Kind::Transpose { permutation } => of(move |step| movement::transpose(step, permutation)),
        Kind::Concatenate { dimension } => of(move |step| movement::concatenate(step, *dimension)),
        Kind::Slice { start, limit } => of(move |step| movement::slice(step, start, limit)),
        Kind::Pad { low, high } => of(move |step| movement::pad(step, low, high)),
        Kind::DynamicSlice { .. } => of(indexing::dynamic_slice),
        Kind::DynamicUpdateSlice => of(indexing::dynamic_update_slice),
        Kind::Gather(dimensions) => of(move |step| indexing::gather(step, dimensions)),
        Kind::Scatter(dimensions, Reducer::Add) => of(move |step| indexing::scatter(step, dimensions)),
        Kind::Scatter(..) => Rule::None("a derivative is implemented for addition only"),
        Kind::BitcastConvert => Rule::None("bits are not differentiable; use `convert` for numbers"),
        Kind::While => Rule::None("a loop with an unknown number of iterations saves no residuals; use `scan`"),
        // The barrier orders the forward computation; cotangents pass without one.
        Kind::OptimizationBarrier => of(|step| step.cotangents.clone()),
        Kind::Constrain(sharding) => of(move |step| vec![Some(step.cotangent().constrain(sharding))]),
        Kind::CustomCall(_) => Rule::None("it is a custom call; use `custom_vjp` to give its derivative"),
        Kind::Manual(_) => {
            Rule::None("its body is for one device; use `constrain` and leave the rest to the partitioner")
        }
        Kind::Scan(_) | Kind::CustomVjp { .. } => Rule::Structure,
    }
}

impl Step<'_> {
    /// Returns the cotangent of the only result.
    fn cotangent(&self) -> &Value {
        self.cotangents[0].as_ref().expect("an operation without a cotangent is passed over")
    }

    /// Returns one part per operand, for operands that need a cotangent.
    fn parts(&self, part: impl Fn(usize) -> Option<Value>) -> Parts {
        (0..self.operands.len()).map(|i| if self.wanted[i] { part(i) } else { None }).collect()
    }

    fn zero(&self, dtype: Dtype) -> Value {
        self.builder.scalar(0.0, dtype)
    }

    fn zeros(&self, ty: &TensorType) -> Value {
        self.builder.splat(0.0, ty.clone())
    }
}
