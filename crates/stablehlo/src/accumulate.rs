//! Sums that are read only to be added to something begin as it.
//!
//! Reverse mode stacks the gradients of layers, and scatters those of rows into zeros; a program that accumulates gradients then adds them
//! to what it has. Where nobody else reads them, the stack and the scatter begin as what they are added to: no second buffer of that size
//! comes to be. Numbers are added in the same order, but for places that a scatter hits more than once.

use crate::graph::*;
use std::collections::{BTreeMap, HashSet};

/// The sums among the operations of a region that are added to something.
#[derive(Debug, Default)]
pub(crate) struct Accumulated {
    /// By the sum: what it is added to, and what comes of it.
    sums: BTreeMap<ValueId, (ValueId, ValueId)>,
    totals: HashSet<ValueId>,
}

impl Accumulated {
    /// Those of `operations`, in a region that returns `results`.
    pub(crate) fn of(operations: &[Operation], results: &[ValueId]) -> Self {
        let mut readers: BTreeMap<ValueId, Vec<usize>> = BTreeMap::new();
        let (mut made, mut zeros) = (BTreeMap::new(), HashSet::<ValueId>::new());
        for (index, operation) in operations.iter().enumerate() {
            operation.reads().into_iter().for_each(|id| readers.entry(id).or_default().push(index));
            made.extend(operation.results.iter().map(|id| (*id, index)));
            if matches!(operation.kind, Kind::Constant(Literal::Splat(Number::Float(0.0)))) {
                zeros.extend(&operation.results);
            }
        }
        // Nothing that is returned is read by one operation alone.
        results.iter().for_each(|id| readers.entry(*id).or_default().push(operations.len()));

        let mut found = Self::default();
        for (index, operation) in operations.iter().enumerate() {
            let candidates = match &operation.kind {
                Kind::Scan(scan) => operation.results.get(scan.carry..).unwrap_or_default(),
                Kind::Scatter(_, Reducer::Add) if operation.operands.first().is_some_and(|id| zeros.contains(id)) => {
                    &operation.results
                }
                _ => continue,
            };
            for sum in candidates {
                let [reader] = readers.get(sum).map_or(&[][..], |readers| readers) else { continue };
                let Some(Operation { kind: Kind::Binary(Binary::Add), operands, results, .. }) = operations.get(*reader)
                else {
                    continue;
                };
                let ([a, b], [total]) = (&operands[..], &results[..]) else { continue };
                let other = if a == sum { b } else { a };
                if other != sum && made.get(other).is_none_or(|before| *before < index) {
                    found.sums.insert(*sum, (*other, *total));
                    found.totals.insert(*total);
                }
            }
        }
        found
    }

    /// What the sum is added to, and what comes of it.
    pub(crate) fn onto(&self, sum: ValueId) -> Option<(ValueId, ValueId)> {
        self.sums.get(&sum).copied()
    }

    /// Whether the operation adds such a sum to something, which is no longer to be done.
    pub(crate) fn is_done(&self, operation: &Operation) -> bool {
        matches!(operation.results[..], [total] if self.totals.contains(&total))
    }
}

#[cfg(test)]
mod tests {
    use crate::{Builder, Dtype, GatherDimensions, Kind, Module, Save, TensorType, trace};

    fn operations(module: &Module) -> Vec<&'static str> {
        let lowered = module.lowered();
        lowered.main.body.operations.iter().map(|operation| operation.kind.name()).collect()
    }

    /// Three slices, negated and stacked, with what `then` makes of the stack, the total before and one that comes later.
    fn stacked(then: impl FnOnce(&crate::Value, [&crate::Value; 2]) -> Vec<crate::Value>) -> Module {
        let (row, stack) = (TensorType::new(Dtype::F32, [2]), TensorType::new(Dtype::F32, [3, 2]));
        let body = trace(&[row], |_, x| vec![-&x[0]]).unwrap();
        let f = Builder::new();
        let (x, total) = (f.argument("x", stack.clone()), f.argument("total", stack));
        let ys = f.scan(3, &body, &[], &[&x], &[], Save::Carry).ys.remove(0);
        let later = x.tanh();
        let results = then(&ys, [&total, &later]);
        let named: Vec<_> = results.iter().map(|value| ("", value)).collect();
        f.finish("stacked", &named).unwrap()
    }

    #[test]
    fn a_stack_begins_as_what_it_is_added_to() {
        let module = stacked(|ys, [total, _]| vec![total + ys]);
        let found = operations(&module);
        assert!(!found.contains(&"stablehlo.add"), "{found:?}");
        let lowered = module.lowered();
        let total = lowered.main.body.arguments[1];
        let turns = lowered.main.body.operations.iter().find(|operation| operation.kind == Kind::While).unwrap();
        assert!(turns.operands.contains(&total));
    }

    #[test]
    fn a_stack_that_others_read_or_that_is_added_to_what_comes_later_begins_at_zero() {
        for module in [
            stacked(|ys, [total, _]| vec![total + ys, ys.clone()]),
            stacked(|ys, [total, _]| vec![total + ys, -ys]),
            stacked(|ys, [_, later]| vec![later + ys]),
            stacked(|ys, _| vec![ys + ys]),
            stacked(|ys, [total, _]| vec![total - ys]),
        ] {
            let found = operations(&module);
            let kept = |name: &&&str| ["stablehlo.add", "stablehlo.subtract"].contains(*name);
            assert_eq!(found.iter().filter(kept).count(), 1, "{found:?}");
        }
    }

    #[test]
    fn rows_are_scattered_into_what_they_are_added_to() {
        let (table, ids) = (TensorType::new(Dtype::F32, [5, 2]), TensorType::new(Dtype::I32, [3]));
        let dimensions = GatherDimensions {
            offset_dims: vec![1],
            collapsed_slice_dims: vec![0],
            start_index_map: vec![0],
            index_vector_dim: 1,
            slice_sizes: vec![1, 2],
            ..GatherDimensions::default()
        };
        // A name is structure, or nothing would be lowered.
        let rows = trace(&[table.clone(), ids.clone()], |_, a| vec![a[0].gather(&a[1], dimensions, &[3, 2]).named("rows")]);
        let f = Builder::new();
        let (x, ids, total) = (f.argument("x", table.clone()), f.argument("ids", ids), f.argument("total", table));
        let (rows, pullback) = f.vjp(&rows.unwrap(), &[&x, &ids], &[0]).unwrap();
        let gradient = pullback.call(&[&rows[0]]).remove(0);
        let module = f.finish("rows", &[("", &(&total + gradient))]).unwrap();
        assert!(!operations(&module).contains(&"stablehlo.add"));
    }
}
