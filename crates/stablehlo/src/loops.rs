//! Loops of a program, for estimates: their trip counts, and the program without them.

use crate::graph::*;
use std::collections::BTreeMap;

/// A loop that is not inside of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// The index of the loop among the operations of the function's body.
    pub operation: usize,
    /// The number of iterations, if that can be read off: a counter that begins with a constant, grows by a constant,
    /// and is compared with a constant.
    pub trips: Option<u64>,
}

impl Function {
    /// The loops of the body, in order; not those nested in other operations.
    pub fn loops(&self) -> Vec<Loop> {
        let constants = scalars(&self.body);
        let operations = self.body.operations.iter().enumerate();
        let loops = operations.filter_map(|(operation, op)| match &op.kind {
            Kind::While => Some(Loop { operation, trips: trips(op, &constants) }),
            Kind::Scan(scan) => Some(Loop { operation, trips: Some(scan.trips as u64) }),
            _ => None,
        });
        loops.collect()
    }

    /// The same function with the given [`Loop::operation`]s left out, as if they had no iterations: what they return
    /// is what they begin with, and zeros for what a scan stacks.
    pub fn without_loops(&self, operations: &[usize]) -> Self {
        let mut function = self.clone();
        let mut initial = BTreeMap::new();
        let mut kept = vec![];
        for (index, op) in std::mem::take(&mut function.body.operations).into_iter().enumerate() {
            let stacked = match &op.kind {
                Kind::While if operations.contains(&index) => op.results.len(),
                Kind::Scan(scan) if operations.contains(&index) => scan.carry.min(op.results.len()),
                _ => {
                    kept.push(op);
                    continue;
                }
            };
            initial.extend(op.results[..stacked].iter().copied().zip(op.operands.iter().copied()));
            kept.extend(op.results[stacked..].iter().map(|id| {
                let kind = Kind::Constant(Literal::Splat(Number::zero(self.type_of(*id).dtype)));
                Operation { kind, operands: vec![], results: vec![*id], regions: vec![] }
            }));
        }
        function.body.operations = kept;
        rename(&mut function.body, &initial);
        function
    }
}

impl Module {
    /// The module whose main is [`Function::without_loops`].
    pub fn without_loops(&self, operations: &[usize]) -> Self {
        Self { main: self.main.without_loops(operations), ..self.clone() }
    }
}

fn rename(region: &mut Region, names: &BTreeMap<ValueId, ValueId>) {
    // A loop may begin with what another one that is left out returns.
    let resolve = |id: &mut ValueId| {
        while let Some(earlier) = names.get(id) {
            *id = *earlier;
        }
    };
    for operation in &mut region.operations {
        operation.operands.iter_mut().for_each(resolve);
        operation.regions.iter_mut().for_each(|region| rename(region, names));
    }
    region.results.iter_mut().for_each(resolve);
}

/// Integer constants of a region.
fn scalars(region: &Region) -> BTreeMap<ValueId, i64> {
    let constants = region.operations.iter().filter_map(|op| match (&op.kind, op.results.as_slice()) {
        (Kind::Constant(Literal::Splat(Number::Int(value))), [result]) => Some((*result, *value)),
        _ => None,
    });
    constants.collect()
}

/// Turns of `for (i = begin; i < end; i += step)`.
fn trips(op: &Operation, outside: &BTreeMap<ValueId, i64>) -> Option<u64> {
    let [condition, body] = op.regions.as_slice() else { return None };
    let known = |region: &Region, id: ValueId| outside.get(&id).copied().or_else(|| scalars(region).get(&id).copied());
    let definition = |region: &Region, id| -> Option<(Kind, ValueId, ValueId)> {
        let op = region.operations.iter().find(|op| op.results == [id])?;
        let [a, b] = op.operands.as_slice() else { return None };
        Some((op.kind.clone(), *a, *b))
    };
    let (Kind::Compare(Comparison::Lt), counter, end) = definition(condition, *condition.results.first()?)? else {
        return None;
    };
    let position = condition.arguments.iter().position(|id| *id == counter)?;
    let begin = *outside.get(op.operands.get(position)?)?;
    let (Kind::Binary(Binary::Add), a, b) = definition(body, *body.results.get(position)?)? else { return None };
    let step = match *body.arguments.get(position)? {
        counter if counter == a => known(body, b)?,
        counter if counter == b => known(body, a)?,
        _ => return None,
    };
    let distance = u64::try_from(known(condition, end)?.checked_sub(begin)?).unwrap_or(0);
    u64::try_from(step).ok().filter(|step| *step > 0).map(|step| distance.div_ceil(step))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, Dtype, Save, TensorType, Value, trace};

    /// Two loops, of which the second begins with what the first returns.
    fn module() -> Module {
        let f = Builder::new();
        let a = f.argument("a", TensorType::new(Dtype::F32, [4]));
        let first = f.for_loop(5, &[&a], |_, carried| vec![&carried[0] + &a]).remove(0);
        let second = f.for_loop(3, &[&first], |_, carried| vec![&carried[0] * &first]).remove(0);
        let sum = &first + second.exp();
        f.finish("loops", &[("sum", &sum), ("first", &first)]).expect("a program")
    }

    fn counted(begin: i64, end: i64, step: impl Fn(&Value) -> Value) -> Option<u64> {
        let f = Builder::new();
        let begin = f.scalar(begin, Dtype::I32);
        let end = f.scalar(end, Dtype::I32);
        let i = f.while_loop(&[&begin], |c| c[0].lt(&end), |c| vec![step(&c[0])]).remove(0);
        f.finish("counted", &[("i", &i)]).expect("a program").main.loops()[0].trips
    }

    #[test]
    fn trips_are_read_off_the_counter() {
        let trips: Vec<_> = module().main.loops().iter().map(|l| l.trips).collect();
        assert_eq!(trips, [Some(5), Some(3)]);
        assert_eq!(counted(0, 7, |i| i + i.like(2)), Some(4));
        assert_eq!(counted(3, 7, |i| i.like(1) + i), Some(4));
        assert_eq!(counted(9, 7, |i| i + i.like(1)), Some(0));
        // No counter: these are not guessed at.
        assert_eq!(counted(1, 7, |i| i * i.like(2)), None);
        assert_eq!(counted(0, 7, |i| i + i.like(0)), None);
    }

    #[test]
    fn a_scan_is_a_loop() {
        let row = TensorType::new(Dtype::F32, [2]);
        let body = trace(&[row.clone(), row.clone()], |_, a| vec![&a[0] + &a[1], a[0].exp()]).expect("a body");
        let f = Builder::new();
        let (a, xs) = (f.argument("a", row), f.argument("xs", TensorType::new(Dtype::F32, [7, 2])));
        let scanned = f.scan(7, &body, &[&a], &[&xs], &[], Save::Carry);
        let module = f.finish("scan", &[("carry", &scanned.carry[0]), ("ys", &scanned.ys[0])]).expect("a program");
        let [of_scan, of_while] = [&module, &module.lowered()].map(|m| m.main.loops());
        assert_eq!(of_scan, [Loop { operation: 0, trips: Some(7) }]);
        assert_eq!(of_while.iter().map(|l| l.trips).collect::<Vec<_>>(), [Some(7)]);

        let without = module.without_loops(&[0]);
        assert_eq!(without.main.body.results[0], module.main.body.arguments[0]);
        assert!(without.to_string().contains("dense<0.0e0> : tensor<7x2xf32>"), "{without}");
        let lowered = module.lowered().without_loops(&[of_while[0].operation]);
        assert_eq!(lowered.main.body.results[0], module.main.body.arguments[0]);
    }

    #[test]
    fn a_loop_that_is_left_out_returns_what_it_begins_with() {
        let module = module();
        let [first, second] = [0, 1].map(|i| module.main.loops()[i].operation);
        let argument = module.main.body.arguments[0];
        let sum_of = |m: &Module| m.main.body.operations.last().expect("a sum").operands[0];

        let without = module.without_loops(&[first]);
        assert_eq!(without.main.loops().iter().map(|l| l.trips).collect::<Vec<_>>(), [Some(3)]);
        assert_eq!((sum_of(&without), without.main.body.results[1]), (argument, argument));
        // Also inside of the loop that stays.
        let body = &without.main.body.operations[without.main.loops()[0].operation].regions[1];
        assert!(body.operations.iter().any(|op| op.operands.contains(&argument)), "{without}");

        let neither = module.without_loops(&[first, second]);
        assert!(neither.main.loops().is_empty() && !neither.to_string().contains("stablehlo.while"), "{neither}");
        assert!(neither.to_string().contains("stablehlo.exponential %0"), "{neither}");
        assert_eq!(module.without_loops(&[]), module);
    }
}
