//! Derivatives of collectives. They differentiate the sum over devices of their results.

use super::{Parts, Step};
use crate::graph::Reducer;
use crate::sharding::{Groups, MeshAxes};

pub(super) fn all_reduce(step: &Step<'_>, groups: &Groups) -> Parts {
    vec![Some(step.cotangent().all_reduce(Reducer::Add, groups))]
}

pub(super) fn reduce_scatter(step: &Step<'_>, dimension: usize, groups: &Groups) -> Parts {
    vec![Some(step.cotangent().all_gather(dimension, groups))]
}

pub(super) fn all_gather(step: &Step<'_>, dimension: usize, groups: &Groups) -> Parts {
    vec![Some(step.cotangent().reduce_scatter(Reducer::Add, dimension, groups))]
}

pub(super) fn all_to_all(step: &Step<'_>, split: usize, concat: usize, groups: &Groups) -> Parts {
    vec![Some(step.cotangent().all_to_all(concat, split, groups))]
}

pub(super) fn collective_permute(step: &Step<'_>, pairs: &[(usize, usize)], axes: Option<&MeshAxes>) -> Parts {
    let back: Vec<(usize, usize)> = pairs.iter().map(|(source, target)| (*target, *source)).collect();
    let ct = step.cotangent();
    vec![Some(match axes {
        Some(axes) => ct.collective_permute_along(axes, &back),
        None => ct.collective_permute(&back),
    })]
}
