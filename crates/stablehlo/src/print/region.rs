//! Prints the regions of reductions.

use super::List;
use crate::graph::*;
use crate::types::Dtype;
use std::fmt::{self, Formatter};

/// Prints the region of a reduction, which takes the left operands, then the right ones, and combines them pair by
/// pair.
pub(super) fn combine(f: &mut Formatter<'_>, reducers: &[Reducer], dtypes: &[Dtype]) -> fmt::Result {
    let side = |letter: char| dtypes.iter().enumerate().map(move |(i, d)| format!("%{letter}{i}: tensor<{d}>"));
    write!(f, "({{ ^bb0({}): ", List(side('a').chain(side('b')).collect::<Vec<_>>()))?;
    for (i, (reducer, dtype)) in reducers.iter().zip(dtypes).enumerate() {
        write!(f, "%c{i} = {} %a{i}, %b{i} : tensor<{dtype}> ", Kind::Binary(reducer.binary()).name())?;
    }
    let results = List((0..reducers.len()).map(|i| format!("%c{i}")).collect::<Vec<_>>());
    let types = List(dtypes.iter().map(|d| format!("tensor<{d}>")).collect::<Vec<_>>());
    write!(f, "stablehlo.return {results} : {types} }})")
}

/// Prints the region of an [`Kind::ArgMax`], which returns the larger of a0 and b0 and its index, a1 or b1.
pub(super) fn arg_max(f: &mut Formatter<'_>, dtype: Dtype) -> fmt::Result {
    let (ty, kind) = (format!("tensor<{dtype}>"), comparison_type(dtype));
    let compare = |f: &mut Formatter<'_>, to: &str, direction: &str, a: &str, b: &str| {
        write!(f, "%{to} = stablehlo.compare {direction}, %{a}, %{b}, {kind} : ({ty}, {ty}) -> tensor<i1> ")
    };
    let predicate = |f: &mut Formatter<'_>, to: &str, binary: &str, a: &str, b: &str| {
        write!(f, "%{to} = stablehlo.{binary} %{a}, %{b} : tensor<i1> ")
    };
    write!(f, "({{ ^bb0(%a0: {ty}, %a1: tensor<i32>, %b0: {ty}, %b1: tensor<i32>): ")?;
    compare(f, "more", "GT", "a0", "b0")?;
    compare(f, "same", "EQ", "a0", "b0")?;
    write!(f, "%first = stablehlo.compare LT, %a1, %b1, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1> ")?;
    let [mut more, mut same] = ["more", "same"];
    if dtype.is_float() {
        compare(f, "a_nan", "NE", "a0", "a0")?;
        compare(f, "b_number", "EQ", "b0", "b0")?;
        compare(f, "b_nan", "NE", "b0", "b0")?;
        predicate(f, "above", "and", "a_nan", "b_number")?;
        predicate(f, "both", "and", "a_nan", "b_nan")?;
        predicate(f, "more_or_nan", "or", "more", "above")?;
        predicate(f, "same_or_nan", "or", "same", "both")?;
        [more, same] = ["more_or_nan", "same_or_nan"];
    }
    predicate(f, "earlier", "and", same, "first")?;
    predicate(f, "hit", "or", more, "earlier")?;
    write!(f, "%c0 = stablehlo.select %hit, %a0, %b0 : tensor<i1>, {ty} ")?;
    write!(f, "%c1 = stablehlo.select %hit, %a1, %b1 : tensor<i1>, tensor<i32> ")?;
    write!(f, "stablehlo.return %c0, %c1 : {ty}, tensor<i32> }})")
}

/// Returns the comparison type of a dtype.
pub(super) fn comparison_type(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Pred | Dtype::U8 | Dtype::U32 => "UNSIGNED",
        d if d.is_float() => "FLOAT",
        _ => "SIGNED",
    }
}
