//! Derivatives of operations that contain functions: scans and custom derivatives.

use super::activity::{Activity, Endpoints};
use super::checkpointed_scan::{Groups, Iteration, Read};
use super::partition::{Derivative, DerivativeSpec};
use super::{sum, wide};
use crate::build::{Builder, Names, Traced, Value};
use crate::error::Result;
use crate::graph::{Kind, Operation, Save, Scan};
use crate::types::{Dtype, TensorType};

/// The backward pass of an operation that contains functions.
#[derive(Clone, Debug)]
pub(super) enum Structure {
    Scan(Box<ScanBack>),
    /// A function of the `kept` values and the cotangents of `given` results.
    Code {
        backward: Traced,
        kept: Vec<Value>,
        given: Vec<(usize, TensorType)>,
        operands: usize,
        to: Vec<usize>,
    },
}

/// The backward pass of a scan: a scan in the other direction over the residuals.
#[derive(Clone, Debug)]
pub(super) struct ScanBack {
    scan: Scan,
    iteration: Traced,
    /// The dtypes and shapes of the accumulators of constants, which are carried after the carried cotangents.
    sums: Vec<TensorType>,
    xs: Vec<Value>,
    constants: Vec<Value>,
    /// Results whose cotangents are carried; `stacked` has the results whose cotangents are sliced.
    carried: Vec<(usize, TensorType)>,
    stacked: Vec<(usize, TensorType)>,
    /// Operands that get cotangents: carried values, constants, sliced values.
    to: Vec<usize>,
    operands: usize,
    /// The groups of a scan that saves every nth iteration; `xs` is empty then.
    groups: Option<Groups>,
}

impl Builder {
    /// Adds an operation with its residuals, if it contains a function; otherwise adds nothing and returns `None`.
    pub(super) fn structure(
        &self,
        source: &Traced,
        operation: &Operation,
        names: &mut Names,
        activity: &Activity,
    ) -> Result<Option<Structure>> {
        let operands: Vec<Value> = operation.operands.iter().map(|id| self.copied(source, *id, names)).collect();
        let active_indices =
            |ids: &[crate::ValueId]| (0..ids.len()).filter(|i| activity.wanted(ids[*i])).collect::<Vec<_>>();
        let (to, given) = (active_indices(&operation.operands), active_indices(&operation.results));
        let unrounded: Vec<usize> = to.iter().copied().filter(|i| activity.unrounded(operation.operands[*i])).collect();
        let ends = Endpoints { with_respect_to: &to, unrounded: &unrounded, given: &given };
        let typed = |i: &usize| (*i, source.function().type_of(operation.results[*i]).clone());
        let (results, structure) = match &operation.kind {
            Kind::Scan(scan) => {
                let carried: Vec<usize> =
                    (0..scan.carry).filter(|i| activity.wanted(operation.regions[0].arguments[*i])).collect();
                let code = source.region(&operation.regions[0])?;
                let (results, back) = self.scan_back(scan, &code, &operands, &carried, &ends)?;
                (results, Structure::Scan(Box::new(back)))
            }
            Kind::CustomVjp { results: count } => {
                let forward = source.region(&operation.regions[0])?;
                let backward = source.region(&operation.regions[1])?;
                let mut results = self.call(&forward, &operands.iter().collect::<Vec<_>>());
                let kept = results.split_off(*count);
                let given = (0..*count).map(|i| typed(&i)).filter(|(_, ty)| ty.dtype.is_float()).collect();
                let to = (0..operands.len()).filter(|i| operands[*i].dtype().is_float()).collect();
                (results, Structure::Code { backward, kept, given, operands: operands.len(), to })
            }
            _ => return Ok(None),
        };
        operation.results.iter().zip(&results).for_each(|(id, value)| names[id.0] = Some(value.id()));
        Ok(Some(structure))
    }

    /// Adds the forward scan, with the residuals that `scan.save` selects.
    fn scan_back(
        &self,
        scan: &Scan,
        code: &Traced,
        operands: &[Value],
        carried: &[usize],
        ends: &Endpoints<'_>,
    ) -> Result<(Vec<Value>, ScanBack)> {
        let first_constant = scan.carry + scan.xs;
        let is_x = |i: &usize| (scan.carry..first_constant).contains(i);
        let types = code.argument_types();
        let to_xs: Vec<usize> = ends.with_respect_to.iter().copied().filter(is_x).collect();
        let to_constants: Vec<usize> = ends.with_respect_to.iter().copied().filter(|i| *i >= first_constant).collect();
        let to = [carried, &to_constants, &to_xs].concat();
        // Carried values have one dtype in all iterations.
        let unrounded: Vec<usize> = ends.unrounded.iter().copied().filter(|i| *i >= scan.carry).collect();
        let stacked: Vec<usize> = ends.given.iter().copied().filter(|i| *i >= scan.carry).collect();
        let (barred, invariant): (Vec<usize>, Vec<usize>) =
            ((0..scan.carry).collect(), (first_constant..operands.len()).collect());
        // Accumulators are updated in place where an iteration gathers rows of a constant.
        let sum = |i: &usize| (*i, types[*i].with_dtype(wide(types[*i].dtype)));
        let accumulated: Vec<(usize, TensorType)> = to_constants.iter().map(sum).collect();
        let given = [carried, &stacked].concat();
        let spec = DerivativeSpec {
            function: code,
            ends: Endpoints { with_respect_to: &to, unrounded: &unrounded, given: &given },
            save: &scan.save,
            barred: &barred,
            invariant: &invariant,
            accumulated: &accumulated,
        };
        let Derivative { forward, backward, arguments } = Derivative::of(&spec)?;
        debug_assert_eq!(backward.result_types().len(), to.len());
        let part = |is_member: &dyn Fn(&usize) -> bool| arguments.iter().copied().filter(is_member).collect();
        let reads = IterationReads {
            carry: part(&|i| *i < scan.carry),
            slices: part(&is_x),
            constants: part(&|i| *i >= first_constant),
        };
        let (results, Residuals { types: residuals, xs, groups }) =
            self.forward_scan(scan, code, &forward, operands, &reads)?;
        let sums: Vec<TensorType> = accumulated.into_iter().map(|(_, ty)| ty).collect();
        let rounded = |i: &usize| if unrounded.contains(i) { wide(types[*i].dtype) } else { types[*i].dtype };
        let iteration = BackwardIteration {
            code,
            backward: &backward,
            carried,
            sums: &sums,
            residuals: &residuals,
            reads: &reads,
            stacked: &stacked,
            slice_dtypes: to_xs.iter().map(rounded).collect(),
        }
        .trace()?;
        let back = ScanBack {
            scan: Scan {
                carry: carried.len() + sums.len(),
                xs: residuals.len() + reads.slices.len() + stacked.len(),
                reverse: !scan.reverse,
                ..scan.clone()
            },
            iteration,
            sums,
            xs,
            constants: reads.constants.iter().map(|i| operands[*i].clone()).collect(),
            carried: carried.iter().map(|i| (*i, types[*i].clone())).collect(),
            stacked: stacked.iter().map(|i| (*i, results[*i].ty().clone())).collect(),
            to,
            operands: operands.len(),
            groups,
        };
        Ok((results, back))
    }

    /// Adds the scan of `forward`, an iteration of `code` that returns residuals after the results.
    fn forward_scan(
        &self,
        scan: &Scan,
        code: &Traced,
        forward: &Traced,
        operands: &[Value],
        reads: &IterationReads,
    ) -> Result<(Vec<Value>, Residuals)> {
        let types = code.argument_types();
        if let Save::Every(iterations @ 2..) = scan.save {
            let below = |list: &[usize], first: usize| list.iter().map(|i| i - first).collect();
            let read = Read {
                carry: reads.carry.clone(),
                stacks: below(&reads.slices, scan.carry),
                constants: below(&reads.constants, scan.carry + scan.xs),
            };
            let (results, groups) = Groups::forward(self, iterations, scan, code, operands, read)?;
            let types = reads.carry.iter().map(|i| types[*i].clone()).collect();
            return Ok((results, Residuals { types, xs: vec![], groups: Some(groups) }));
        }
        let own = code.result_types().len();
        // Each iteration also returns the carried values that it starts with.
        let body = crate::trace(&types, |f, values| {
            let mut results = f.call(forward, &values.iter().collect::<Vec<_>>());
            let saved = results.split_off(own);
            results.extend(reads.carry.iter().map(|i| values[*i].clone()));
            results.extend(saved);
            results
        })?;
        let scanned = self.scan_over(scan.clone(), &body, &operands.iter().collect::<Vec<_>>());
        let mut results = scanned.carry;
        results.extend(scanned.ys);
        let mut xs = results.split_off(own);
        let types = xs.iter().map(|stack| TensorType::new(stack.dtype(), &stack.shape()[1..])).collect();
        xs.extend(reads.slices.iter().map(|i| operands[*i].clone()));
        Ok((results, Residuals { types, xs, groups: None }))
    }
}

/// The operands of a scan's iteration that the iteration of the backward pass reads, by index.
struct IterationReads {
    carry: Vec<usize>,
    slices: Vec<usize>,
    constants: Vec<usize>,
}

/// What a forward scan saves for the backward pass.
struct Residuals {
    /// The types of the residuals of one iteration: the carried values that it reads, then the saved values.
    types: Vec<TensorType>,
    /// The stacks that the backward pass slices: residuals, then operands of the forward scan. Empty with `groups`.
    xs: Vec<Value>,
    groups: Option<Groups>,
}

/// The parts of an iteration of the backward pass.
struct BackwardIteration<'a> {
    /// The iteration of the forward pass.
    code: &'a Traced,
    /// [`Derivative::backward`] of `code`.
    backward: &'a Traced,
    /// Carried values with a cotangent.
    carried: &'a [usize],
    /// The types of the accumulators of constants.
    sums: &'a [TensorType],
    /// [`Residuals::types`].
    residuals: &'a [TensorType],
    reads: &'a IterationReads,
    /// Stacked results with a cotangent.
    stacked: &'a [usize],
    /// The dtypes of the cotangents of slices.
    slice_dtypes: Vec<Dtype>,
}

impl BackwardIteration<'_> {
    /// Traces the iteration. It takes carried cotangents, accumulators of constants | residuals, slices, cotangents of
    /// stacked results | constants; and returns carried cotangents, accumulators | cotangents of slices.
    fn trace(&self) -> Result<Traced> {
        let (types, results) = (self.code.argument_types(), self.code.result_types());
        let of = |list: &[usize], types: &[TensorType]| list.iter().map(|i| types[*i].clone()).collect::<Vec<_>>();
        let argument_types = [
            of(self.carried, &types),
            self.sums.to_vec(),
            self.residuals.to_vec(),
            of(&self.reads.slices, &types),
            of(self.stacked, &results),
            of(&self.reads.constants, &types),
        ]
        .concat();
        crate::trace(&argument_types, |f, values| {
            let (cts, rest) = values.split_at(self.carried.len());
            let (before, rest) = rest.split_at(self.sums.len());
            let (residuals, rest) = rest.split_at(self.residuals.len());
            let (slices, rest) = rest.split_at(self.reads.slices.len());
            let (ct_parts, constants) = rest.split_at(self.stacked.len());
            // `backward` takes arguments in their order, then the other residuals.
            let (carry, saved) = residuals.split_at(self.reads.carry.len());
            let given = [carry, slices, constants, saved, cts, ct_parts, before];
            let given: Vec<&Value> = given.iter().flat_map(|part| part.iter()).collect();
            let pulled = f.call(self.backward, &given);
            let (next, rest) = pulled.split_at(self.carried.len());
            let (constant_cts, slice_cts) = rest.split_at(self.sums.len());
            let next = next.iter().zip(self.carried).map(|(ct, i)| ct.convert(types[*i].dtype));
            let added = before.iter().zip(constant_cts).map(|(before, sum)| sum.convert(before.dtype()));
            let slice_cts = slice_cts.iter().zip(&self.slice_dtypes).map(|(ct, dtype)| ct.convert(*dtype));
            next.chain(added).chain(slice_cts).collect()
        })
    }
}

impl Structure {
    /// Returns `true` if the operand's cotangent is added to its accumulator in place.
    pub(super) fn adds_to(&self, operand: usize) -> bool {
        matches!(self, Self::Scan(back) if back.to[back.scan.carry..].contains(&operand))
    }

    /// Returns the cotangents of operands from the cotangents of results. Operands with an accumulator in `begun` get
    /// the sum with it.
    pub(super) fn pull(
        &self,
        builder: &Builder,
        cotangents: Vec<Option<Value>>,
        begun: &[Option<Value>],
    ) -> Vec<Option<Value>> {
        match self {
            Self::Scan(back) => back.pull(builder, &cotangents, begun),
            Self::Code { backward, kept, given, operands, to } => {
                let given: Vec<Value> = given.iter().map(|end| cotangent_or_zeros(builder, &cotangents, end)).collect();
                let pulled = builder.call(backward, &kept.iter().chain(&given).collect::<Vec<_>>());
                spread(*operands, to, pulled)
            }
        }
    }
}

impl ScanBack {
    fn pull(&self, builder: &Builder, cotangents: &[Option<Value>], begun: &[Option<Value>]) -> Vec<Option<Value>> {
        let carried = self.carried.iter().map(|end| cotangent_or_zeros(builder, cotangents, end));
        let sums = self.sums.iter().map(|ty| builder.splat(0.0, ty.clone()));
        let parts: Vec<Value> = self.stacked.iter().map(|end| cotangent_or_zeros(builder, cotangents, end)).collect();
        let carry: Vec<Value> = carried.chain(sums).collect();
        // The cotangents of slices are stacked, or added to carried accumulators.
        let begun: Vec<Option<&Value>> = self.to[self.scan.carry..].iter().map(|i| begun[*i].as_ref()).collect();
        let stacks: Vec<&Value> = begun.iter().copied().flatten().collect();
        let numbered = !stacks.is_empty();
        let iteration = if numbered { self.adding(&begun) } else { self.iteration.clone() };
        let carry: Vec<&Value> = carry.iter().chain(stacks).collect();
        let carried = carry.len();
        let mut scanned = match &self.groups {
            Some(groups) => {
                let iteration = Iteration { code: &iteration, scan: &self.scan, carry, parts: &parts, numbered };
                groups.pull(builder, &iteration)
            }
            None => {
                let mut xs = [&self.xs[..], &parts].concat();
                if numbered {
                    xs.push(builder.iota(0, TensorType::new(Dtype::I32, [self.scan.trips])));
                }
                let scan = Scan { carry: carried, xs: xs.len(), ..self.scan.clone() };
                let operands: Vec<&Value> = carry.into_iter().chain(&xs).chain(&self.constants).collect();
                let scanned = builder.scan_over(scan, &iteration, &operands);
                [scanned.carry, scanned.ys].concat()
            }
        };
        let mut ys = scanned.split_off(carried).into_iter();
        let mut carry = scanned.into_iter();
        let mut found: Vec<Value> = carry.by_ref().take(self.scan.carry).collect();
        found.extend(begun.iter().filter_map(|begun| if begun.is_some() { carry.next() } else { ys.next() }));
        spread(self.operands, &self.to, found)
    }

    /// Returns an iteration that adds the cotangents of slices to accumulators. It carries the accumulators after the
    /// other values, and takes its position as the last of its slices.
    fn adding(&self, begun: &[Option<&Value>]) -> Traced {
        let types = self.iteration.argument_types();
        let (carry, rest) = types.split_at(self.scan.carry);
        let (xs, constants) = rest.split_at(self.scan.xs);
        let stacks: Vec<TensorType> = begun.iter().flatten().map(|v| v.ty().clone()).collect();
        let place = [TensorType::scalar(Dtype::I32)];
        let types = [carry, &stacks, xs, &place, constants].concat();
        let iteration = crate::trace(&types, |f, values| {
            let (before, rest) = values.split_at(carry.len());
            let (stacks, rest) = rest.split_at(stacks.len());
            let (slices, rest) = rest.split_at(xs.len());
            let (place, constants) = rest.split_at(1);
            let given: Vec<&Value> = before.iter().chain(slices).chain(constants).collect();
            let mut results = f.call(&self.iteration, &given);
            let parts = results.split_off(carry.len());
            let mut stacks = stacks.iter();
            let mut others = vec![];
            let zero = f.scalar(0, Dtype::I32);
            for (part, begun) in parts.into_iter().zip(begun) {
                let Some(stack) = begun.and_then(|_| stacks.next()) else {
                    others.push(part);
                    continue;
                };
                let mut row = stack.shape().to_vec();
                row[0] = 1;
                let starts: Vec<&Value> = (0..row.len()).map(|d| if d == 0 { &place[0] } else { &zero }).collect();
                let sum = stack.dynamic_slice(&starts, &row) + part.convert(stack.dtype()).reshape(&row);
                results.push(stack.dynamic_update_slice(&sum, &starts));
            }
            results.extend(others);
            results
        });
        iteration.expect("stacks are of the types of what is added to them")
    }
}

/// Returns the cotangent of a result, or zeros if it has none.
fn cotangent_or_zeros(builder: &Builder, cotangents: &[Option<Value>], (index, ty): &(usize, TensorType)) -> Value {
    cotangents[*index].clone().unwrap_or_else(|| builder.splat(0.0, ty.clone()))
}

/// Distributes cotangents to operands, by index.
fn spread(operands: usize, to: &[usize], values: Vec<Value>) -> Vec<Option<Value>> {
    let mut parts: Vec<Vec<Value>> = vec![vec![]; operands];
    to.iter().zip(values).for_each(|(i, value)| parts[*i].push(value));
    parts.into_iter().map(sum).collect()
}
