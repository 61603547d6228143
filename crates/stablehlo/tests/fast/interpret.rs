//! The interpreter without a plugin: values by hand, limits, and programs that are none.

#[path = "../cases/mod.rs"]
mod cases;

use cases::{BINARY, COMPARISONS, REDUCERS, UNARY, all, form, forms};
use stablehlo::*;
use std::collections::BTreeSet;

/// Every operation has a case, and the interpreter runs it: `device` holds the same cases against XLA.
#[test]
fn every_operation_has_a_case() {
    let cases = all();
    for case in &cases {
        let results = case.module.interpret(&case.arguments).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        let types: Vec<&TensorType> = results.iter().map(Array::ty).collect();
        let main = &case.module.main;
        assert_eq!(types, main.body.results.iter().map(|id| main.type_of(*id)).collect::<Vec<_>>(), "{}", case.name);
    }
    let kinds =
        UNARY.map(Kind::Unary).into_iter().chain(BINARY.map(Kind::Binary)).chain(COMPARISONS.map(Kind::Compare));
    let mut expected: BTreeSet<String> = kinds.chain(others()).filter_map(|kind| form(&kind)).collect();
    expected.insert("Reduce of several".into());
    let found = forms(&cases);
    assert_eq!(expected.difference(&found).collect::<Vec<_>>(), Vec::<&String>::new(), "no case");
    assert_eq!(found.difference(&expected).collect::<Vec<_>>(), Vec::<&String>::new(), "not listed");
}

/// One of each kind that is not element by element.
fn others() -> Vec<Kind> {
    let mut kinds = vec![
        Kind::Constant(Literal::Splat(Number::Int(0))),
        Kind::Iota { dimension: 0 },
        Kind::Select,
        Kind::Clamp,
        Kind::Convert,
        Kind::BitcastConvert,
        Kind::DotGeneral(DotDimensions::default(), Precision::Default),
        Kind::BroadcastInDim { dimensions: vec![] },
        Kind::Reshape,
        Kind::Transpose { permutation: vec![] },
        Kind::Concatenate { dimension: 0 },
        Kind::Slice { start: vec![], limit: vec![], stride: vec![] },
        Kind::DynamicSlice { sizes: vec![] },
        Kind::DynamicUpdateSlice,
        Kind::Pad { low: vec![], high: vec![], interior: vec![] },
        Kind::Gather(GatherDimensions::default()),
        Kind::Sort { dimension: 0, order: Order::Ascending, stable: true },
        Kind::Sort { dimension: 0, order: Order::Descending, stable: true },
        Kind::While,
        Kind::Case,
        Kind::AllReduce { reducer: Reducer::Add, groups: vec![] },
        Kind::ReduceScatter { reducer: Reducer::Add, dimension: 0, groups: vec![] },
        Kind::AllGather { dimension: 0, groups: vec![] },
        Kind::AllToAll { split: 0, concat: 0, groups: vec![] },
        Kind::CollectivePermute { pairs: vec![] },
        Kind::ReplicaId,
        Kind::PartitionId,
        Kind::OptimizationBarrier,
        Kind::Scan(Scan { trips: 1, carry: 0, xs: 0, reverse: false, save: Save::Carry }),
        Kind::Scan(Scan { trips: 1, carry: 0, xs: 0, reverse: true, save: Save::Carry }),
        Kind::Remat(Save::Carry),
        Kind::CustomVjp { results: 1 },
        Kind::Named(String::new()),
        Kind::StopGradient,
        Kind::CustomCall(CustomCall { target: "Sharding".into(), ..CustomCall::default() }),
    ];
    for reducer in REDUCERS {
        kinds.push(Kind::Reduce { reducers: vec![reducer], dimensions: vec![] });
        kinds.push(Kind::Scatter(ScatterDimensions::default(), reducer));
        kinds.push(Kind::ReduceWindow(Window::default(), reducer));
    }
    kinds
}
