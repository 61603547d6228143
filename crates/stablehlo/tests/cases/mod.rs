//! Programs with arguments, at least one per operation. `fast` runs them in the interpreter only, `device` compares the
//! interpreter with XLA.
#![allow(dead_code, unreachable_pub)] // every test binary uses its own part

mod control;
mod derivatives;
mod elementwise;
mod products;
mod shape;
pub mod split;
pub mod transformer;
pub mod windows;

use grpo_stablehlo::*;
use std::collections::BTreeSet;
use strum::{VariantArray, VariantNames};

/// A program with arguments.
pub struct Case {
    pub name: String,
    pub module: Module,
    pub arguments: Vec<Array>,
    /// The tolerance for floats, relative to the largest magnitude of a result. Rounding in the last bits is always
    /// tolerated.
    pub slack: f64,
}

/// Builds a case from these arguments.
pub fn case(
    name: impl Into<String>,
    arguments: &[Array],
    build: impl FnOnce(&Builder, &[Value]) -> Vec<Value>,
) -> Case {
    let name = name.into();
    let f = Builder::new();
    let values: Vec<Value> = arguments.iter().map(|a| f.argument("", a.ty().clone())).collect();
    let results = build(&f, &values);
    let named: Vec<(&str, &Value)> = results.iter().map(|v| ("", v)).collect();
    let module = f.finish("case", &named).unwrap_or_else(|error| panic!("{name}: {error}"));
    Case { name, module, arguments: arguments.to_vec(), slack: 1e-6 }
}

/// Returns a function that must be legal.
pub fn built(function: Result<Traced>) -> Traced {
    function.unwrap_or_else(|error| panic!("{error}"))
}

/// Returns all cases.
pub fn all() -> Vec<Case> {
    [elementwise::cases(), shape::cases(), products::cases(), windows::cases(), control::cases(), derivatives::cases()]
        .into_iter()
        .flatten()
        .collect()
}

pub fn ty(dtype: Dtype, shape: &[usize]) -> TensorType {
    TensorType::new(dtype, shape)
}

/// A deterministic random number generator (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number in [-4, 4] that every floating-point dtype represents exactly.
    pub fn float(&mut self) -> f64 {
        (self.bits() % 129) as f64 / 16.0 - 4.0
    }

    /// Returns a random tensor: small floats, 6-bit integers (signed if the dtype is), or predicates.
    pub fn array(&mut self, dtype: Dtype, shape: &[usize]) -> Array {
        let n: usize = shape.iter().product();
        if dtype.is_float() {
            return Array::floats(dtype, shape, (0..n).map(|_| self.float())).expect("floats");
        }
        let low = if dtype.is_unsigned() { 0 } else { 32 };
        match dtype {
            Dtype::Pred => Array::preds(shape, (0..n).map(|_| self.bits() & 1 == 1)).expect("predicates"),
            _ => Array::ints(dtype, shape, (0..n).map(|_| (self.bits() % 64) as i64 - low)).expect("integers"),
        }
    }
}

pub fn f32s(shape: &[usize], numbers: &[f64]) -> Array {
    Array::floats(Dtype::F32, shape, numbers.iter().copied()).expect("floats")
}

pub fn i32s(shape: &[usize], numbers: &[i64]) -> Array {
    Array::ints(Dtype::I32, shape, numbers.iter().copied()).expect("integers")
}

/// Names the form of an operation. Returns `None` for operations that the interpreter refuses.
pub fn form(kind: &Kind) -> Option<String> {
    let name = match kind {
        Kind::Unary(unary) => format!("{unary:?}"),
        Kind::Binary(binary) => format!("{binary:?}"),
        Kind::Compare(direction) => format!("Compare {direction:?}"),
        Kind::Reduce { reducers, .. } if reducers.len() > 1 => "Reduce of several".into(),
        Kind::Reduce { reducers, .. } => format!("Reduce {:?}", reducers[0]),
        Kind::Scatter(_, reducer) => format!("Scatter {reducer:?}"),
        Kind::Scan(scan) if scan.reverse => "Scan in reverse".into(),
        Kind::ArgMax { .. } => "ArgMax".into(),
        Kind::CustomCall(_) => return None,
        kind => <&str>::from(kind).trim_start_matches("stablehlo.").into(),
    };
    Some(name)
}

/// Returns all forms, without the names of variants that have several.
pub fn every_form() -> BTreeSet<String> {
    let several = ["unary", "binary", "compare", "reduce", "scatter", "custom_call"];
    let kinds = Kind::VARIANTS.iter().map(|name| name.trim_start_matches("stablehlo."));
    let mut every: BTreeSet<String> = kinds.filter(|name| !several.contains(name)).map(str::to_owned).collect();
    every.extend(Unary::VARIANTS.iter().map(|unary| format!("{unary:?}")));
    every.extend(Binary::VARIANTS.iter().map(|binary| format!("{binary:?}")));
    every.extend(Comparison::VARIANTS.iter().map(|direction| format!("Compare {direction:?}")));
    every.extend(Reducer::VARIANTS.iter().flat_map(|r| [format!("Reduce {r:?}"), format!("Scatter {r:?}")]));
    every.extend(["Reduce of several", "Scan in reverse", "ArgMax"].map(str::to_owned));
    every
}

/// Returns the forms that have a case.
pub fn forms(cases: &[Case]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for case in cases {
        case.module.main.visit(|op| found.extend(form(&op.kind)));
    }
    found
}
