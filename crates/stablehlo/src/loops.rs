//! Loops of a program, for estimates: their trip counts, and the program without them or with them twice.

use crate::graph::*;
use crate::types::TensorType;
use std::collections::BTreeMap;

/// A loop of a function's body, or one that is nested in another operation of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Where it is: the index of an operation of the body, then, for each operation on the way to the loop, the index of
    /// a region and that of an operation in it.
    pub path: Vec<usize>,
    /// The number of iterations each time it begins, if that can be read off: a counter that begins with a constant, grows
    /// by a constant, and is compared with a constant. Of a loop that goes on while `counter < end & ...`, the largest number.
    pub trips: Option<u64>,
    /// How often it begins: the iterations of the loops around it, multiplied; 1 outside of all loops.
    pub begins: Option<u64>,
}

impl Loop {
    /// All its iterations: those of each time it begins.
    pub fn turns(&self) -> Option<u64> {
        self.begins.zip(self.trips).map(|(begins, trips)| begins.saturating_mul(trips))
    }
}

impl Function {
    /// The loops of the function, each before those in it; scans are loops too, as [`Function::lowered`] makes them.
    ///
    /// A compiler's estimate counts every body once, however often it turns. With `once`, the estimate of the whole, and
    /// `without`, that of the program without a loop (and what is in it), the cost of all iterations is
    /// once + sum over the loops of (turns - begins) (once - without).
    pub fn loops(&self) -> Vec<Loop> {
        let mut loops = vec![];
        find(&self.lowered().body, &mut vec![], Some(1), &BTreeMap::new(), &mut loops);
        loops
    }

    /// The lowered function with the loops at the given [`Loop::path`]s left out, as if they had no iterations: what they
    /// return is what they begin with.
    pub fn without_loops(&self, paths: &[&[usize]]) -> Self {
        let mut function = self.lowered().into_owned();
        remove(&mut function.body, paths);
        function
    }

    /// The lowered function with each of the loops at the given [`Loop::path`]s followed by itself, which begins with its results and
    /// counts anew: with `twice` its estimate, the cost of all iterations is once + sum over the loops of (turns - begins) (twice - once).
    ///
    /// It leaves bodies and what is around a loop as they are. Where a loop is left out ([`Function::without_loops`]) and its results
    /// are constants, compilers leave out what is computed of them, too; and of a body with everything in it twice they may make another
    /// one, with another layout of what it takes, so that the difference is not one turn.
    pub fn with_loops_twice(&self, paths: &[&[usize]]) -> Self {
        let mut function = self.lowered().into_owned();
        repeat(&mut function.body, paths, &mut function.types);
        function
    }
}

impl Module {
    /// The module whose main is [`Function::without_loops`].
    pub fn without_loops(&self, paths: &[&[usize]]) -> Self {
        Self { main: self.main.without_loops(paths), name: self.name.clone(), ..*self }
    }

    /// The module whose main is [`Function::with_loops_twice`].
    pub fn with_loops_twice(&self, paths: &[&[usize]]) -> Self {
        Self { main: self.main.with_loops_twice(paths), name: self.name.clone(), ..*self }
    }
}

/// Adds the loops of a region that is entered `begins` times, with the constants of the regions around it.
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

/// What is left of the paths that begin with `first`.
fn below<'a>(paths: &[&'a [usize]], first: usize) -> Vec<&'a [usize]> {
    let rest = |path: &&'a [usize]| path.split_first().filter(|(index, _)| **index == first).map(|(_, rest)| rest);
    paths.iter().filter_map(rest).collect()
}

/// Puts loops of a region, and of regions in it, behind themselves.
fn repeat(region: &mut Region, paths: &[&[usize]], types: &mut Vec<TensorType>) {
    let mut names = BTreeMap::new();
    for (index, mut op) in std::mem::take(&mut region.operations).into_iter().enumerate() {
        rename_in(&mut op, &names);
        let here = below(paths, index);
        for (nested, region) in op.regions.iter_mut().enumerate() {
            let inside = below(&here, nested);
            if !inside.is_empty() {
                repeat(region, &inside, types);
            }
        }
        let again = (op.kind == Kind::While && here.contains(&&[][..])).then(|| {
            let mut again = copied(std::slice::from_ref(&op), &mut BTreeMap::new(), types).remove(0);
            // Counters are scalars.
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

/// The operations once more, with values of their own; `names` are those of the copy for what is defined outside of it.
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
            // Condition and body of a loop have their arguments in common.
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

/// Leaves out loops of a region, and of regions in it.
fn remove(region: &mut Region, paths: &[&[usize]]) {
    let mut initial = BTreeMap::new();
    let mut index = 0;
    region.operations.retain_mut(|op| {
        let here = below(paths, index);
        index += 1;
        if op.kind == Kind::While && here.iter().any(|rest| rest.is_empty()) {
            initial.extend(op.results.iter().copied().zip(op.operands.iter().copied()));
            return false;
        }
        for (nested, region) in op.regions.iter_mut().enumerate() {
            let inside = below(&here, nested);
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

/// Renames what an operation takes.
fn rename_in(operation: &mut Operation, names: &BTreeMap<ValueId, ValueId>) {
    operation.operands.iter_mut().for_each(|id| *id = resolved(*id, names));
    operation.regions.iter_mut().for_each(|region| rename(region, names));
}

/// What a value is called: a loop may begin with what another one that is left out returns.
fn resolved(mut id: ValueId, names: &BTreeMap<ValueId, ValueId>) -> ValueId {
    while let Some(other) = names.get(&id) {
        id = *other;
    }
    id
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
    let mut found = definition(condition, *condition.results.first()?)?;
    // A loop that may end earlier: the counter comes first.
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
    use crate::{Array, Builder, Dtype, Value, trace};

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
        let f = Builder::new();
        let (begin, end) = (f.scalar(0, Dtype::I32), f.scalar(7, Dtype::I32));
        let early = |c: &[Value]| c[0].lt(&end) & c[0].ne(&c[0].like(3));
        let i = f.while_loop(&[&begin], early, |c| vec![&c[0] + c[0].like(1)]).remove(0);
        assert_eq!(f.finish("early", &[("i", &i)]).expect("a program").main.loops()[0].trips, Some(7));
        // No counter: these are not guessed at.
        assert_eq!(counted(1, 7, |i| i * i.like(2)), None);
        assert_eq!(counted(0, 7, |i| i + i.like(0)), None);
    }

    #[test]
    fn a_loop_that_is_left_out_returns_what_it_begins_with() {
        let module = module();
        let loops = module.main.loops();
        let [first, second] = [0, 1].map(|i| &loops[i].path[..]);
        let argument = module.main.body.arguments[0];
        let sum_of = |m: &Module| m.main.body.operations.last().expect("a sum").operands[0];

        let without = module.without_loops(&[first]);
        assert_eq!(without.main.loops().iter().map(|l| l.trips).collect::<Vec<_>>(), [Some(3)]);
        assert_eq!((sum_of(&without), without.main.body.results[1]), (argument, argument));
        // Also inside of the loop that stays.
        let body = &without.main.body.operations[without.main.loops()[0].path[0]].regions[1];
        assert!(body.operations.iter().any(|op| op.operands.contains(&argument)), "{without}");

        let neither = module.without_loops(&[first, second]);
        assert!(neither.main.loops().is_empty() && !neither.to_string().contains("stablehlo.while"), "{neither}");
        assert!(neither.to_string().contains("stablehlo.exponential %0"), "{neither}");
        assert_eq!(module.without_loops(&[]), module);
    }

    /// Four turns, in each of which two loops follow one another: one of three turns, with one of five turns in a branch of
    /// it, and one whose end is data.
    fn nested() -> Module {
        let f = Builder::new();
        let a = f.argument("a", TensorType::new(Dtype::F32, [4]));
        let end = f.argument("end", TensorType::scalar(Dtype::I32));
        let outer = f.for_loop(4, &[&a], |_, outer| {
            let middle = f.for_loop(3, &[&outer[0]], |i, middle| {
                f.case(i, 2, |branch| match branch {
                    0 => f.for_loop(5, &[&middle[0]], |_, inner| vec![&inner[0] * &a]),
                    _ => vec![middle[0].exp()],
                })
            });
            let begin = [&f.scalar(0, Dtype::I32), &middle[0]];
            let open = f.while_loop(&begin, |c| c[0].lt(&end), |c| vec![&c[0] + c[0].like(1), &c[1] + &a]);
            vec![open[1].clone()]
        });
        f.finish("nested", &[("a", &outer[0])]).expect("a program")
    }

    #[test]
    fn nested_loops_turn_as_often_as_those_around_them() {
        let loops = nested().main.loops();
        let counts: Vec<_> = loops.iter().map(|l| (l.begins, l.trips, l.turns())).collect();
        let expected = [(1, Some(4)), (4, Some(3)), (12, Some(5)), (4, None)];
        assert_eq!(counts, expected.map(|(begins, trips)| (Some(begins), trips, trips.map(|t| t * begins))));
        // The outer one, its body's first operation that is a loop, the case in that one's body, and its first branch.
        assert_eq!(loops.iter().map(|l| l.path.len()).collect::<Vec<_>>(), [1, 3, 7, 3]);
        assert!(loops[1].path.starts_with(&loops[0].path) && loops[2].path.starts_with(&loops[1].path));
    }

    #[test]
    fn a_nested_loop_that_is_left_out_returns_what_it_begins_with() {
        let module = nested();
        let loops = module.main.loops();
        let ends = |module: &Module| module.main.loops().iter().map(|l| l.trips).collect::<Vec<_>>();
        let without =
            |which: &[usize]| module.without_loops(&which.iter().map(|i| &loops[*i].path[..]).collect::<Vec<_>>());
        assert_eq!(ends(&without(&[2])), [Some(4), Some(3), None]);
        assert_eq!(ends(&without(&[1])), [Some(4), None]);
        assert_eq!(ends(&without(&[3, 2])), [Some(4), Some(3)]);
        // One that is in another one is left out with it.
        assert_eq!(ends(&without(&[1, 2])), [Some(4), None]);
        assert_eq!(ends(&without(&[0, 3])), []);
        let arguments = [
            Array::floats(Dtype::F32, [4], [0.5, 0.25, -1.0, 2.0]).expect("numbers"),
            Array::ints(Dtype::I32, [], [2]).expect("a number"),
        ];
        let run = |module: &Module| module.interpret(&arguments).expect("a value").remove(0).to_floats();
        // Without the loops in it, the outer one adds nothing.
        assert_eq!(run(&without(&[1, 3])), arguments[0].to_floats());
        assert_eq!(run(&without(&[1])), arguments[0].to_floats().iter().map(|a| a * 9.0).collect::<Vec<_>>());
        assert_ne!(run(&without(&[2])), run(&module));
    }

    /// The sum over loops is the sum over iterations: each operation counts as often as it runs.
    #[test]
    fn costs_of_bodies_become_those_of_iterations() {
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
    fn a_loop_twice_goes_on_where_it_ended() {
        // Grows by 3 in two turns, or in a loop of so many turns by 3 more.
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
        // Of three turns six.
        assert_eq!(run(&twice(&paths[..1])), run(&grown(6, 2)));
        // 1 + 2 and, counted anew, once more.
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

    /// Scans too.
    #[test]
    fn a_scan_is_a_loop() {
        let row = TensorType::new(Dtype::F32, [2]);
        let body = trace(&[row.clone(), row.clone()], |_, a| vec![&a[0] + &a[1]]).expect("a body");
        let f = Builder::new();
        let (a, xs) = (f.argument("a", row), f.argument("xs", TensorType::new(Dtype::F32, [6, 2])));
        let sum = f.scan(6, &body, &[&a], &[&xs], &[], Save::Carry).carry.remove(0);
        let module = f.finish("scan", &[("sum", &sum)]).expect("a program");
        let loops = module.main.loops();
        assert_eq!(loops.iter().map(Loop::turns).collect::<Vec<_>>(), [Some(6)]);
        assert!(module.without_loops(&[&loops[0].path]).main.loops().is_empty());
    }
}
