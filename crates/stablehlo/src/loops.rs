//! Loops of a program, for cost estimates: their trip counts, and the program with loops removed or duplicated.

use crate::graph::*;
use crate::types::TensorType;
use std::collections::BTreeMap;

/// A loop of a function's body, or of a nested region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    /// The position of the loop: the index of an operation of the body, then, for each nesting level, the index of a
    /// region and the index of an operation in it.
    pub path: Vec<usize>,
    /// The number of iterations per execution, if it can be determined: a counter that starts at a constant, grows by a
    /// constant, and is compared with a constant. For a condition `counter < end & ...`, it is the upper bound.
    pub trips: Option<u64>,
    /// The number of executions: the product of the trip counts of the enclosing loops; 1 without any.
    pub begins: Option<u64>,
}

impl Loop {
    /// Returns the total number of iterations over all executions.
    pub fn turns(&self) -> Option<u64> {
        self.begins.zip(self.trips).map(|(begins, trips)| begins.saturating_mul(trips))
    }
}

impl Function {
    /// Returns the loops of the function, outer loops before nested ones. Scans are included, because
    /// [`Function::lowered`] turns them into loops.
    ///
    /// A compiler's cost estimate counts every loop body once. With `once`, the estimate of the whole program, and
    /// `without`, the estimate of the program without a loop (and its body), the cost of all iterations is once + sum
    /// over the loops of (turns - begins) (once - without).
    pub fn loops(&self) -> Vec<Loop> {
        let mut loops = vec![];
        find(&self.lowered().body, &mut vec![], Some(1), &BTreeMap::new(), &mut loops);
        loops
    }
}

impl Module {
    /// Returns the lowered module without the loops at the given [`Loop::path`]s, as if they had no iterations: they
    /// return their initial values.
    pub fn without_loops(&self, paths: &[&[usize]]) -> Self {
        let mut module = self.lowered().into_owned();
        remove(&mut module.main.body, paths);
        module
    }

    /// Returns the lowered module with each loop at the given [`Loop::path`]s duplicated: the copy starts from the
    /// results of the first and restarts the counter. With `twice`, the estimate of this module, the cost of all
    /// iterations is once + sum over the loops of (turns - begins) (twice - once).
    ///
    /// Unlike [`Module::without_loops`], this leaves loop bodies and their surroundings unchanged. If a removed loop's
    /// results are constants, compilers also fold the operations that depend on them. If one body holds its operations
    /// twice, compilers may choose other layouts for its operands, so that the difference is not the cost of one
    /// iteration.
    pub fn with_loops_twice(&self, paths: &[&[usize]]) -> Self {
        let mut module = self.lowered().into_owned();
        repeat(&mut module.main.body, paths, &mut module.main.types);
        module
    }
}

/// Adds the loops of a region that runs `begins` times, with the integer constants of the enclosing regions.
fn find(
    region: &Region,
    path: &mut Vec<usize>,
    begins: Option<u64>,
    outside: &BTreeMap<ValueId, i64>,
    loops: &mut Vec<Loop>,
) {
    let mut constants = outside.clone();
    constants.extend(scalars(region));
    for (index, op) in region.operations.iter().enumerate() {
        path.push(index);
        let mut inside = begins;
        if op.kind == Kind::While {
            let found = Loop { path: path.clone(), trips: trips(op, &constants), begins };
            inside = found.turns();
            loops.push(found);
        }
        for (nested, region) in op.regions.iter().enumerate() {
            path.push(nested);
            find(region, path, inside, &constants, loops);
            path.pop();
        }
        path.pop();
    }
}

/// Returns the rest of the paths that begin with `first`.
fn below<'a>(paths: &[&'a [usize]], first: usize) -> Vec<&'a [usize]> {
    let rest = |path: &&'a [usize]| path.split_first().filter(|(index, _)| **index == first).map(|(_, rest)| rest);
    paths.iter().filter_map(rest).collect()
}

/// Duplicates loops of a region and of nested regions.
fn repeat(region: &mut Region, paths: &[&[usize]], types: &mut Vec<TensorType>) {
    let mut names = BTreeMap::new();
    for (index, mut op) in std::mem::take(&mut region.operations).into_iter().enumerate() {
        rename_in(&mut op, &names);
        let nested_paths = below(paths, index);
        for (nested, region) in op.regions.iter_mut().enumerate() {
            let inside = below(&nested_paths, nested);
            if !inside.is_empty() {
                repeat(region, &inside, types);
            }
        }
        let again = (op.kind == Kind::While && nested_paths.contains(&&[][..])).then(|| {
            let mut again = copied(std::slice::from_ref(&op), &mut BTreeMap::new(), types).remove(0);
            // Integer scalars are counters, which restart.
            let counts = |id: &ValueId| types[id.0].shape.is_empty() && types[id.0].dtype.is_integer();
            let begins = op.operands.iter().zip(&op.results);
            again.operands = begins.map(|(begin, result)| if counts(begin) { *begin } else { *result }).collect();
            names.extend(op.results.iter().copied().zip(again.results.iter().copied()));
            again
        });
        region.operations.push(op);
        region.operations.extend(again);
    }
    region.results.iter_mut().for_each(|id| *id = names.get(id).copied().unwrap_or(*id));
}

/// Copies operations, with new values; `names` maps the ids of defined values to their copies.
fn copied(
    operations: &[Operation],
    names: &mut BTreeMap<ValueId, ValueId>,
    types: &mut Vec<TensorType>,
) -> Vec<Operation> {
    let now = |ids: &[ValueId], names: &BTreeMap<ValueId, ValueId>| -> Vec<ValueId> {
        ids.iter().map(|id| names.get(id).copied().unwrap_or(*id)).collect()
    };
    let define = |ids: &[ValueId], names: &mut BTreeMap<ValueId, ValueId>, types: &mut Vec<TensorType>| {
        let fresh = ids.iter().map(|id| {
            types.push(types[id.0].clone());
            names.insert(*id, ValueId(types.len() - 1));
            ValueId(types.len() - 1)
        });
        fresh.collect::<Vec<_>>()
    };
    let mut copies = vec![];
    for operation in operations {
        let operands = now(&operation.operands, names);
        let mut regions: Vec<Region> = vec![];
        for (index, region) in operation.regions.iter().enumerate() {
            // The condition and body of a loop share their arguments.
            let shared = index > 0 && operation.regions[index - 1].arguments == region.arguments;
            let arguments = match regions.last() {
                Some(before) if shared => before.arguments.clone(),
                _ => define(&region.arguments, names, types),
            };
            let operations = copied(&region.operations, names, types);
            regions.push(Region { arguments, operations, results: now(&region.results, names) });
        }
        let results = define(&operation.results, names, types);
        copies.push(Operation { kind: operation.kind.clone(), operands, results, regions });
    }
    copies
}

/// Removes loops of a region and of nested regions.
fn remove(region: &mut Region, paths: &[&[usize]]) {
    let mut initial = BTreeMap::new();
    let mut index = 0;
    region.operations.retain_mut(|op| {
        let nested_paths = below(paths, index);
        index += 1;
        if op.kind == Kind::While && nested_paths.iter().any(|rest| rest.is_empty()) {
            initial.extend(op.results.iter().copied().zip(op.operands.iter().copied()));
            return false;
        }
        for (nested, region) in op.regions.iter_mut().enumerate() {
            let inside = below(&nested_paths, nested);
            if !inside.is_empty() {
                remove(region, &inside);
            }
        }
        true
    });
    rename(region, &initial);
}

fn rename(region: &mut Region, names: &BTreeMap<ValueId, ValueId>) {
    region.operations.iter_mut().for_each(|operation| rename_in(operation, names));
    region.results.iter_mut().for_each(|id| *id = resolved(*id, names));
}

/// Renames the operands of an operation.
fn rename_in(operation: &mut Operation, names: &BTreeMap<ValueId, ValueId>) {
    operation.operands.iter_mut().for_each(|id| *id = resolved(*id, names));
    operation.regions.iter_mut().for_each(|region| rename(region, names));
}

/// Follows renamings: a removed loop may start from the results of another removed loop.
fn resolved(mut id: ValueId, names: &BTreeMap<ValueId, ValueId>) -> ValueId {
    while let Some(other) = names.get(&id) {
        id = *other;
    }
    id
}

/// Returns the integer constants of a region.
fn scalars(region: &Region) -> BTreeMap<ValueId, i64> {
    let constants = region.operations.iter().filter_map(|op| match (&op.kind, op.results.as_slice()) {
        (Kind::Constant(Literal::Splat(Number::Int(value))), [result]) => Some((*result, *value)),
        _ => None,
    });
    constants.collect()
}

/// Returns the iterations of `for (i = begin; i < end; i += step)`.
fn trips(op: &Operation, outside: &BTreeMap<ValueId, i64>) -> Option<u64> {
    let [condition, body] = op.regions.as_slice() else { return None };
    let known = |region: &Region, id: ValueId| outside.get(&id).copied().or_else(|| scalars(region).get(&id).copied());
    let definition = |region: &Region, id| -> Option<(Kind, ValueId, ValueId)> {
        let op = region.operations.iter().find(|op| op.results == [id])?;
        let [a, b] = op.operands.as_slice() else { return None };
        Some((op.kind.clone(), *a, *b))
    };
    let mut found = definition(condition, *condition.results.first()?)?;
    // In `counter < end & ...`, the comparison of the counter comes first.
    while let (Kind::Binary(Binary::And), first, _) = found {
        found = definition(condition, first)?;
    }
    let (Kind::Compare(Comparison::Lt), counter, end) = found else { return None };
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
    use crate::{Array, Builder, Dtype, Value};

    /// Two loops; the second starts from the result of the first.
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
    fn trip_counts_follow_from_counters() {
        let trips: Vec<_> = module().main.loops().iter().map(|l| l.trips).collect();
        assert_eq!(trips, [Some(5), Some(3)]);
        assert_eq!(counted(0, 7, |i| i + i.like(2)), Some(4));
        assert_eq!(counted(3, 7, |i| i.like(1) + i), Some(4));
        assert_eq!(counted(9, 7, |i| i + i.like(1)), Some(0));
        let f = Builder::new();
        let (begin, end) = (f.scalar(0, Dtype::I32), f.scalar(7, Dtype::I32));
        let early = |c: &[Value]| c[0].lt(&end) & c[0].ne(&c[0].like(3));
        let i = f.while_loop(&[&begin], early, |c| vec![&c[0] + c[0].like(1)]).remove(0);
        assert_eq!(f.finish("early", &[("i", &i)]).expect("a program").main.loops()[0].trips, Some(7));
        // Without a counter that grows by a constant, the number is unknown.
        assert_eq!(counted(1, 7, |i| i * i.like(2)), None);
        assert_eq!(counted(0, 7, |i| i + i.like(0)), None);
    }

    #[test]
    fn a_removed_loop_returns_its_initial_values() {
        let module = module();
        let loops = module.main.loops();
        let [first, second] = [0, 1].map(|i| &loops[i].path[..]);
        let argument = module.main.body.arguments[0];
        let sum_of = |m: &Module| m.main.body.operations.last().expect("a sum").operands[0];

        let without = module.without_loops(&[first]);
        assert_eq!(without.main.loops().iter().map(|l| l.trips).collect::<Vec<_>>(), [Some(3)]);
        assert_eq!((sum_of(&without), without.main.body.results[1]), (argument, argument));
        // Also inside of the remaining loop.
        let body = &without.main.body.operations[without.main.loops()[0].path[0]].regions[1];
        assert!(body.operations.iter().any(|op| op.operands.contains(&argument)), "{without}");

        let neither = module.without_loops(&[first, second]);
        assert!(neither.main.loops().is_empty() && !neither.to_string().contains("stablehlo.while"), "{neither}");
        assert!(neither.to_string().contains("stablehlo.exponential %0"), "{neither}");
        assert_eq!(module.without_loops(&[]), module);
    }

    /// A loop of four iterations whose body has two loops: one of three iterations, around a loop of five iterations,
    /// and one whose end is data.
    fn nested() -> Module {
        let f = Builder::new();
        let a = f.argument("a", TensorType::new(Dtype::F32, [4]));
        let end = f.argument("end", TensorType::scalar(Dtype::I32));
        let outer = f.for_loop(4, &[&a], |_, outer| {
            let middle =
                f.for_loop(3, &[&outer[0]], |_, middle| f.for_loop(5, &[&middle[0]], |_, inner| vec![&inner[0] * &a]));
            let begin = [&f.scalar(0, Dtype::I32), &middle[0]];
            let open = f.while_loop(&begin, |c| c[0].lt(&end), |c| vec![&c[0] + c[0].like(1), &c[1] + &a]);
            vec![open[1].clone()]
        });
        f.finish("nested", &[("a", &outer[0])]).expect("a program")
    }

    #[test]
    fn begins_of_nested_loops_multiply_outer_trip_counts() {
        let loops = nested().main.loops();
        let counts: Vec<_> = loops.iter().map(|l| (l.begins, l.trips, l.turns())).collect();
        let expected = [(1, Some(4)), (4, Some(3)), (12, Some(5)), (4, None)];
        assert_eq!(counts, expected.map(|(begins, trips)| (Some(begins), trips, trips.map(|t| t * begins))));
        // The outer loop, the first loop of its body, the loop in that body, and the second loop.
        assert_eq!(loops.iter().map(|l| l.path.len()).collect::<Vec<_>>(), [1, 3, 5, 3]);
        assert!(loops[1].path.starts_with(&loops[0].path) && loops[2].path.starts_with(&loops[1].path));
    }

    #[test]
    fn a_removed_nested_loop_returns_its_initial_values() {
        let module = nested();
        let loops = module.main.loops();
        let ends = |module: &Module| module.main.loops().iter().map(|l| l.trips).collect::<Vec<_>>();
        let without =
            |which: &[usize]| module.without_loops(&which.iter().map(|i| &loops[*i].path[..]).collect::<Vec<_>>());
        assert_eq!(ends(&without(&[2])), [Some(4), Some(3), None]);
        assert_eq!(ends(&without(&[1])), [Some(4), None]);
        assert_eq!(ends(&without(&[3, 2])), [Some(4), Some(3)]);
        // A nested loop is removed with the enclosing one.
        assert_eq!(ends(&without(&[1, 2])), [Some(4), None]);
        assert_eq!(ends(&without(&[0, 3])), []);
        let arguments = [
            Array::floats(Dtype::F32, [4], [0.5, 0.25, -1.0, 2.0]).expect("numbers"),
            Array::ints(Dtype::I32, [], [2]).expect("a number"),
        ];
        let run = |module: &Module| module.interpret(&arguments).expect("a value").remove(0).to_floats();
        // Without its inner loops, the outer loop adds nothing.
        assert_eq!(run(&without(&[1, 3])), arguments[0].to_floats());
        assert_eq!(run(&without(&[1])), arguments[0].to_floats().iter().map(|a| a * 9.0).collect::<Vec<_>>());
        assert_ne!(run(&without(&[2])), run(&module));
    }

    /// Summed over loops, each operation counts as often as it runs.
    #[test]
    fn cost_formulas_count_all_iterations() {
        let f = Builder::new();
        let a = f.argument("a", TensorType::new(Dtype::F32, [4]));
        let looped = f.for_loop(4, &[&a], |_, outer| {
            let first =
                f.for_loop(3, &[&outer[0].tanh()], |_, c| f.for_loop(5, &[&c[0].tanh()], |_, c| vec![c[0].tanh()]));
            f.for_loop(0, &[&first[0]], |_, c| vec![c[0].tanh()])
        });
        let module = f.finish("tanh", &[("a", &looped[0].tanh())]).expect("a program");
        let once = |module: &Module| {
            let mut count = 0.0;
            module.main.visit(|op| count += f64::from(u8::from(op.kind == Kind::Unary(Unary::Tanh))));
            count
        };
        let all = module.main.loops().iter().fold(once(&module), |sum, l| {
            let [turns, begins] = [l.turns(), l.begins].map(|n| n.expect("a number") as f64);
            sum + (turns - begins) * (once(&module) - once(&module.without_loops(&[&l.path])))
        });
        assert_eq!(all, 1.0 + 4.0 + 4.0 * 3.0 + 4.0 * 3.0 * 5.0);
        let twice = module.main.loops().iter().fold(once(&module), |sum, l| {
            let [turns, begins] = [l.turns(), l.begins].map(|n| n.expect("a number") as f64);
            sum + (turns - begins) * (once(&module.with_loops_twice(&[&l.path])) - once(&module))
        });
        assert_eq!(twice, all);
    }

    #[test]
    fn a_duplicated_loop_continues_from_the_first() {
        // Each of `outer` iterations adds 1, 2, ..., `inner` in a nested loop, then doubles the value.
        let grown = |outer: usize, inner: usize| {
            let f = Builder::new();
            let a = f.argument("a", TensorType::new(Dtype::F32, [2]));
            let sum = f.for_loop(outer, &[&a], |_, c| {
                let two = f.for_loop(inner, &[&c[0]], |i, c| {
                    let i = i.convert(Dtype::F32).broadcast_in_dim(&[2], &[]);
                    vec![&c[0] + i + c[0].like(1.0)]
                });
                vec![&two[0] * two[0].like(2.0)]
            });
            f.finish("grown", &[("sum", &(&sum[0] + sum[0].like(0.5)))]).expect("a program")
        };
        let arguments = [Array::floats(Dtype::F32, [2], [0.5, -1.0]).expect("numbers")];
        let run = |module: &Module| module.interpret(&arguments).expect("a value").remove(0).to_floats();
        let module = grown(3, 2);
        let loops = module.main.loops();
        let paths: Vec<&[usize]> = loops.iter().map(|l| &l.path[..]).collect();
        let twice = |which: &[&[usize]]| module.with_loops_twice(which);
        // Three iterations become six.
        assert_eq!(run(&twice(&paths[..1])), run(&grown(6, 2)));
        // The inner loop adds 1 + 2, and again with the restarted counter.
        let by_hand = |outer: usize, adds: f64| {
            let grow = |x: f64| (0..outer).fold(x, |x, _| 2.0 * (x + adds)) + 0.5;
            vec![grow(0.5), grow(-1.0)]
        };
        assert_eq!(run(&module), by_hand(3, 3.0));
        assert_eq!(run(&twice(&paths[1..])), by_hand(3, 6.0));
        assert_eq!(run(&twice(&paths)), by_hand(6, 6.0));
        let counts = |module: &Module| module.main.loops().iter().map(Loop::turns).collect::<Vec<_>>();
        assert_eq!(counts(&twice(&paths)), [3, 6, 6, 3, 6, 6].map(Some));
        twice(&paths).main.visit(|op| {
            if let (Kind::While, [condition, body]) = (&op.kind, &op.regions[..]) {
                assert_eq!(condition.arguments, body.arguments, "the text has one list of them");
            }
        });
    }
}
