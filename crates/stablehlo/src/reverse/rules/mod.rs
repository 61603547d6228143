//! What each operation does to cotangents.

mod collective;
mod contract;
mod elementwise;
mod indexing;
mod movement;

use crate::build::{Builder, Value};
use crate::graph::{Binary, Kind, Reducer, Unary};
use crate::types::{Dtype, TensorType};

/// An operation on the way back.
pub(super) struct Step<'a> {
    pub(super) builder: &'a Builder,
    pub(super) operands: Vec<Value>,
    pub(super) results: Vec<Value>,
    /// Per result; at least one is there. Of the results' types, but that a conversion and a barrier may get a wider one.
    pub(super) cotangents: Vec<Option<Value>>,
    /// Which operands are to get one.
    pub(super) wanted: Vec<bool>,
    /// Per operand: the dtype in which its part is best given.
    pub(super) sums: Vec<Dtype>,
    /// What the part of a gather's operand is added to, if there is something; it is then part of it.
    pub(super) begun: Option<Value>,
}

/// Cotangents of the operands; none where it is zero. A dtype wider than the operand's keeps what was summed.
pub(super) type Parts = Vec<Option<Value>>;

/// How an operation is differentiated.
pub(super) enum Rule {
    /// No result depends smoothly on an operand, or with a slope that is not zero.
    Constant,
    /// Like this.
    Of(Box<dyn Fn(&Step<'_>) -> Parts>),
    /// By the function inside of it.
    Structure,
    /// Not at all; what to do instead.
    None(&'static str),
}

fn of(rule: impl Fn(&Step<'_>) -> Parts + 'static) -> Rule {
    Rule::Of(Box::new(rule))
}

/// The rule of an operation.
pub(super) fn rule(kind: &Kind) -> Rule {
    match kind {
        Kind::Constant(_)
        | Kind::Iota { .. }
        | Kind::Compare(_)
        | Kind::ReplicaId
        | Kind::PartitionId
        | Kind::AxisIndex(_)
        | Kind::StopGradient => Rule::Constant,
        Kind::Unary(unary) => match *unary {
            Unary::Sign | Unary::Floor | Unary::Ceil | Unary::IsFinite | Unary::Not => Rule::Constant,
            unary => of(move |step| elementwise::unary(step, unary)),
        },
        Kind::Binary(binary) => match *binary {
            Binary::And
            | Binary::Or
            | Binary::Xor
            | Binary::ShiftLeft
            | Binary::ShiftRightLogical
            | Binary::ShiftRightArithmetic => Rule::Constant,
            binary => of(move |step| elementwise::binary(step, binary)),
        },
        Kind::Select => of(elementwise::select),
        Kind::Clamp => of(elementwise::clamp),
        Kind::Convert | Kind::Named(_) => of(|step| vec![step.cotangents[0].clone()]),
        Kind::DotGeneral(dimensions, precision) => {
            let (dimensions, precision) = (dimensions.clone(), *precision);
            of(move |step| contract::dot_general(step, &dimensions, precision))
        }
        Kind::Reduce { reducers, dimensions } => {
            let (reducers, dimensions) = (reducers.clone(), dimensions.clone());
            of(move |step| contract::reduce(step, &reducers, &dimensions))
        }
        Kind::BroadcastInDim { dimensions } => {
            let dimensions = dimensions.clone();
            of(move |step| contract::broadcast_in_dim(step, &dimensions))
        }
        Kind::Reshape => of(movement::reshape),
        Kind::Transpose { permutation } => {
            let permutation = permutation.clone();
            of(move |step| movement::transpose(step, &permutation))
        }
        Kind::Concatenate { dimension } => {
            let dimension = *dimension;
            of(move |step| movement::concatenate(step, dimension))
        }
        Kind::Slice { start, limit: _, stride } => {
            let (start, stride) = (start.clone(), stride.clone());
            of(move |step| movement::slice(step, &start, &stride))
        }
        Kind::Pad { low, high, interior } => {
            let (low, high, interior) = (low.clone(), high.clone(), interior.clone());
            of(move |step| movement::pad(step, &low, &high, &interior))
        }
        Kind::DynamicSlice { .. } => of(indexing::dynamic_slice),
        Kind::DynamicUpdateSlice => of(indexing::dynamic_update_slice),
        Kind::Gather(dimensions) => {
            let dimensions = dimensions.clone();
            of(move |step| indexing::gather(step, &dimensions))
        }
        Kind::Scatter(dimensions, Reducer::Add) => {
            let dimensions = dimensions.clone();
            of(move |step| indexing::scatter(step, &dimensions))
        }
        Kind::Scatter(..) => Rule::None("only that of a scatter that adds is known"),
        Kind::ReduceWindow(window, Reducer::Add) => {
            let window = window.clone();
            of(move |step| contract::reduce_window(step, &window))
        }
        Kind::ReduceWindow(..) => Rule::None("only that of windows that are added up is known"),
        Kind::BitcastConvert => Rule::None("bits do not change smoothly; use `convert` for numbers"),
        Kind::Sort { .. } => Rule::None("sort indices by `stop_gradient` of the keys, and gather by them"),
        Kind::While => Rule::None("a loop whose turns are not known ahead keeps nothing for it; use `scan`"),
        Kind::Case => Rule::None("which region ran is not kept; use `select` between the results of both"),
        Kind::AllReduce { reducer: Reducer::Add, groups } => {
            let groups = groups.clone();
            of(move |step| collective::all_reduce(step, &groups))
        }
        Kind::AllReduce { .. } => Rule::None("only that of a sum over devices is known; use `stop_gradient`"),
        Kind::ReduceScatter { reducer: Reducer::Add, dimension, groups } => {
            let (dimension, groups) = (*dimension, groups.clone());
            of(move |step| collective::reduce_scatter(step, dimension, &groups))
        }
        Kind::ReduceScatter { .. } => Rule::None("only that of a sum over devices is known; use `stop_gradient`"),
        Kind::AllGather { dimension, groups } => {
            let (dimension, groups) = (*dimension, groups.clone());
            of(move |step| collective::all_gather(step, dimension, &groups))
        }
        Kind::AllToAll { split, concat, groups } => {
            let (split, concat, groups) = (*split, *concat, groups.clone());
            of(move |step| collective::all_to_all(step, split, concat, &groups))
        }
        Kind::CollectivePermute { pairs, axes } => {
            let (pairs, axes) = (pairs.clone(), axes.clone());
            of(move |step| collective::collective_permute(step, &pairs, axes.as_ref()))
        }
        // It holds back what is computed from the values, not what comes of their cotangents.
        Kind::OptimizationBarrier => of(|step| step.cotangents.clone()),
        Kind::Constrain(sharding) => {
            let sharding = sharding.clone();
            of(move |step| vec![Some(step.cotangent().constrain(&sharding))])
        }
        Kind::CustomCall(_) => Rule::None("the target's own code says nothing about it; use `custom_vjp`"),
        Kind::Scan(_) | Kind::Remat(_) | Kind::CustomVjp { .. } | Kind::Manual(_) => Rule::Structure,
    }
}

impl Step<'_> {
    /// The cotangent of the only result.
    fn cotangent(&self) -> &Value {
        self.cotangents[0].as_ref().expect("an operation without a cotangent is passed over")
    }

    /// One part per operand, of those that are to get one.
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
