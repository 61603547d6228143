//! Derivatives of scans that save the inputs of every nth iteration, and recompute the iterations of a group before
//! their backward pass.
//!
//! The inner loops slice the whole stacks by the number of the iteration. A loop over the slices of a group would first
//! copy them.

use crate::build::{Builder, Traced, Value};
use crate::error::Result;
use crate::graph::{Save, Scan};
use crate::types::{Dtype, TensorType};

/// The iterations of a scan in groups of `iterations`.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    iterations: usize,
    scan: Scan,
    /// One iteration of the scan.
    code: Traced,
    stacks: Vec<Value>,
    constants: Vec<Value>,
    /// The carried values before each group, `[groups, ...]`.
    starts: Vec<Value>,
    back: Read,
}

/// The values of the forward scan that an iteration of the backward pass reads.
#[derive(Clone, Debug)]
pub(super) struct Read {
    /// Indices of carried values.
    pub(super) carry: Vec<usize>,
    /// Indices of stacks.
    pub(super) stacks: Vec<usize>,
    /// Indices of constants.
    pub(super) constants: Vec<usize>,
}

/// An iteration of the backward pass and its operands.
pub(super) struct Iteration<'a> {
    /// Takes carried cotangents, inputs of the forward iteration, slices, cotangents of stacked results, the number of
    /// the iteration if `numbered`, and constants.
    pub(super) code: &'a Traced,
    pub(super) scan: &'a Scan,
    pub(super) carry: Vec<&'a Value>,
    /// Cotangents of stacked results.
    pub(super) parts: &'a [Value],
    pub(super) numbered: bool,
}

impl Groups {
    /// Adds the scan and returns its results. `back` lists the values that an iteration of the backward pass reads.
    pub(super) fn forward(
        builder: &Builder,
        iterations: usize,
        scan: &Scan,
        code: &Traced,
        operands: &[Value],
        back: Read,
    ) -> Result<(Vec<Value>, Self)> {
        let (carry, rest) = operands.split_at(scan.carry);
        let (stacks, constants) = rest.split_at(scan.xs);
        let scan = Scan { save: Save::Carry, ..scan.clone() };
        let (stacks, constants) = (stacks.to_vec(), constants.to_vec());
        let mut groups = Self { iterations, scan, code: code.clone(), stacks, constants, starts: vec![], back };
        let whole = groups.whole();
        let numbers = TensorType::new(Dtype::I32, [iterations]);
        let types: Vec<TensorType> = types(carry).chain([numbers]).chain(types(&whole)).collect();
        let group = crate::trace(&types, |f, values| {
            let (before, rest) = values.split_at(carry.len());
            let (numbers, whole) = rest.split_at(1);
            let scanned = groups.run(f, iterations, before, &numbers[0], whole, &[]);
            [scanned.carry, scanned.ys, before.to_vec()].concat()
        })?;
        let outer = Scan { trips: groups.scan.trips / iterations, xs: 1, ..groups.scan.clone() };
        let numbers = groups.numbers(builder);
        let operands: Vec<&Value> = carry.iter().chain([&numbers]).chain(&whole).collect();
        let mut scanned = builder.scan_over(outer, &group, &operands);
        groups.starts = scanned.ys.split_off(scanned.ys.len() - carry.len());
        let mut results = scanned.carry;
        results.extend(scanned.ys.iter().map(merged));
        Ok((results, groups))
    }

    /// Adds the backward pass. Returns the values carried after its last iteration, then its other results, stacked
    /// over all iterations.
    pub(super) fn pull(&self, builder: &Builder, iteration: &Iteration<'_>) -> Vec<Value> {
        let whole = self.whole();
        let numbers = TensorType::new(Dtype::I32, [self.iterations]);
        let starts = self.starts.iter().map(|stack| TensorType::new(stack.dtype(), &stack.shape()[1..]));
        let types: Vec<TensorType> = types(iteration.carry.iter().copied())
            .chain(starts)
            .chain([numbers])
            .chain(types(&whole))
            .chain(types(iteration.parts))
            .collect();
        let group = crate::trace(&types, |f, values| {
            let (carry, rest) = values.split_at(iteration.carry.len());
            let (starts, rest) = rest.split_at(self.starts.len());
            let (numbers, rest) = rest.split_at(1);
            let (whole, parts) = rest.split_at(whole.len());
            let inputs = self.again(f, starts, &numbers[0], whole);
            let scanned = self.back_through(f, iteration, carry, &inputs, &numbers[0], [whole, parts]);
            [scanned.carry, scanned.ys].concat()
        });
        let group = group.expect("iterations of a scan that was built");
        let outer = Scan {
            trips: self.scan.trips / self.iterations,
            carry: iteration.carry.len(),
            xs: self.starts.len() + 1,
            reverse: iteration.scan.reverse,
            save: Save::Carry,
        };
        let numbers = self.numbers(builder);
        let operands: Vec<&Value> = iteration
            .carry
            .iter()
            .copied()
            .chain(&self.starts)
            .chain([&numbers])
            .chain(&whole)
            .chain(iteration.parts)
            .collect();
        let scanned = builder.scan_over(outer, &group, &operands);
        scanned.carry.into_iter().chain(scanned.ys.iter().map(merged)).collect()
    }

    /// Recomputes the inputs of each iteration of a group, as far as the backward pass reads them.
    fn again(&self, f: &Builder, starts: &[Value], numbers: &Value, whole: &[Value]) -> Vec<Value> {
        let (read, iterations) = (&self.back.carry, self.iterations);
        if read.is_empty() {
            return vec![];
        }
        let row = |value: &Value| value.reshape(&[&[1], value.shape()].concat());
        // The last iteration of a group need not run: only its inputs are read.
        let (from, to) = if self.scan.reverse { (1, iterations) } else { (0, iterations - 1) };
        let before_last = numbers.slice(&[from], &[to]);
        let scanned = self.run(f, iterations - 1, starts, &before_last, whole, read);
        let inputs = scanned.ys.split_at(scanned.ys.len() - read.len()).1;
        let both = |(inputs, i): (&Value, &usize)| {
            let last = row(&scanned.carry[*i]);
            f.concatenate(&if self.scan.reverse { [&last, inputs] } else { [inputs, &last] }, 0)
        };
        inputs.iter().zip(read).map(both).collect()
    }

    /// Runs the iterations `numbers`. The carried values in `asked`, as they are before each iteration, are stacked
    /// after the other stacked results.
    fn run(
        &self,
        f: &Builder,
        iterations: usize,
        carry: &[Value],
        numbers: &Value,
        whole: &[Value],
        asked: &[usize],
    ) -> crate::Scanned {
        let scan = Scan { trips: iterations, xs: 1, ..self.scan.clone() };
        let types: Vec<TensorType> = types(carry).chain([TensorType::scalar(Dtype::I32)]).chain(types(whole)).collect();
        let iteration = crate::trace(&types, |f, values| {
            let (before, rest) = values.split_at(carry.len());
            let (number, whole) = rest.split_at(1);
            let (stacks, constants) = whole.split_at(self.stacks.len());
            let slices: Vec<Value> = stacks.iter().map(|stack| slice(f, stack, &number[0])).collect();
            let mut results = f.call(&self.code, &before.iter().chain(&slices).chain(constants).collect::<Vec<_>>());
            results.extend(asked.iter().map(|i| before[*i].clone()));
            results
        });
        let iteration = iteration.expect("a iteration of a scan that was built");
        f.scan_over(scan, &iteration, &carry.iter().chain([numbers]).chain(whole).collect::<Vec<_>>())
    }

    fn back_through(
        &self,
        f: &Builder,
        iteration: &Iteration<'_>,
        carry: &[Value],
        inputs: &[Value],
        numbers: &Value,
        [whole, parts]: [&[Value]; 2],
    ) -> crate::Scanned {
        let (carried, xs) = (carry.len(), inputs.len() + 1);
        let scan =
            Scan { trips: self.iterations, carry: carried, xs, reverse: iteration.scan.reverse, save: Save::Carry };
        let slice_type = |stack: &Value| TensorType::new(stack.dtype(), &stack.shape()[1..]);
        let types: Vec<TensorType> = types(carry)
            .chain(inputs.iter().map(slice_type))
            .chain([TensorType::scalar(Dtype::I32)])
            .chain(types(whole))
            .chain(types(parts))
            .collect();
        let code = crate::trace(&types, |f, values| {
            let (before, rest) = values.split_at(carry.len());
            let (inputs, rest) = rest.split_at(inputs.len());
            let (number, rest) = rest.split_at(1);
            let (whole, parts) = rest.split_at(whole.len());
            let (stacks, constants) = whole.split_at(self.stacks.len());
            let at = |stack: &Value| slice(f, stack, &number[0]);
            let slices: Vec<Value> = self.back.stacks.iter().map(|i| at(&stacks[*i])).collect();
            let parts: Vec<Value> = parts.iter().map(at).collect();
            let number = if iteration.numbered { number } else { &[] };
            let constants = self.back.constants.iter().map(|i| &constants[*i]);
            let given = before.iter().chain(inputs).chain(&slices).chain(&parts).chain(number).chain(constants);
            f.call(iteration.code, &given.collect::<Vec<_>>())
        });
        let code = code.expect("a iteration back through one that was built");
        f.scan_over(
            scan,
            &code,
            &carry.iter().chain(inputs).chain([numbers]).chain(whole).chain(parts).collect::<Vec<_>>(),
        )
    }

    /// Returns stacks and constants, each once: compilers copy an operand that a loop takes twice.
    fn whole(&self) -> Vec<Value> {
        self.stacks.iter().chain(&self.constants).cloned().collect()
    }

    /// Returns the numbers of the iterations, group by group.
    fn numbers(&self, builder: &Builder) -> Value {
        let all = builder.iota(0, TensorType::new(Dtype::I32, [self.scan.trips]));
        all.reshape(&[self.scan.trips / self.iterations, self.iterations])
    }
}

fn types<'a>(values: impl IntoIterator<Item = &'a Value>) -> impl Iterator<Item = TensorType> {
    values.into_iter().map(|value| value.ty().clone())
}

/// Returns the slice of a stack for one iteration.
fn slice(f: &Builder, stack: &Value, number: &Value) -> Value {
    let mut row = stack.shape().to_vec();
    row[0] = 1;
    let zero = f.scalar(0, Dtype::I32);
    let starts: Vec<&Value> = (0..row.len()).map(|d| if d == 0 { number } else { &zero }).collect();
    stack.dynamic_slice(&starts, &row).reshape(&stack.shape()[1..])
}

/// Turns a stack over groups and their iterations into a stack over all iterations.
fn merged(stack: &Value) -> Value {
    let [groups, iterations, rest @ ..] = stack.shape() else { return stack.clone() };
    stack.reshape(&[&[groups * iterations], rest].concat())
}
