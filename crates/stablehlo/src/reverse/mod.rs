//! Reverse-mode derivatives of functions.
//!
//! [`activity`] finds the values on paths from differentiated arguments to results. [`rules`] has the derivative of
//! each operation. [`partition`] splits a function and its derivative into a forward pass, residuals, and a backward
//! pass with recomputation. It serves [`nested`] (scans, custom derivatives) and [`checkpointed_scan`] (scans that save
//! every nth iteration).

mod activity;
mod checkpointed_scan;
mod nested;
mod partition;
mod rules;

use crate::build::{Builder, Names, Traced, Value};
use crate::error::{Error, Result};
use crate::graph::{Kind, ValueId};
use crate::types::{Dtype, TensorType};
use activity::{Activity, Endpoints};
use nested::Structure;
use rules::{Rule, Step};
use std::collections::BTreeMap;
use std::panic::Location;

/// The linear function from cotangents of results to cotangents of arguments, at the arguments of [`Builder::vjp`].
///
/// A call adds its operations at the builder's current position; several calls are allowed.
#[derive(Clone, Debug)]
pub struct Pullback {
    builder: Builder,
    function: Traced,
    names: Names,
    activity: Activity,
    structures: BTreeMap<usize, Structure>,
    with_respect_to: Vec<usize>,
}

impl Builder {
    /// Calls `function` and returns its results with the reverse-mode derivative with respect to some of the arguments.
    ///
    /// The derivative consists of ordinary operations, so it can be differentiated again. The cotangents of a value
    /// that is used more than once are summed in f32 if its dtype is narrower. Integers, predicates and results of
    /// [`Value::stop_gradient`] are constants. Equal elements of a maximum or minimum, of two or many, share the
    /// cotangent equally. A product of bf16 operands in [`Precision::Default`](crate::Precision) rounds its cotangent to
    /// bf16. The cotangent of a value with [`Value::constrain`] has the same sharding.
    ///
    /// ```
    /// use grpo_stablehlo::{Builder, Dtype, Reducer, TensorType, trace};
    ///
    /// let ty = TensorType::new(Dtype::F32, [8]);
    /// let squares = trace(&[ty.clone()], |_, x| vec![(&x[0] * &x[0]).reduce(Reducer::Add, &[0])])?;
    /// let f = Builder::new();
    /// let x = f.argument("x", ty);
    /// let (results, pullback) = f.vjp(&squares, &[&x], &[0])?;
    /// let gradient = pullback.call(&[&results[0].like(1.0)]).remove(0);
    /// let module = f.finish("squares", &[("loss", &results[0]), ("gradient", &gradient)])?;
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoDerivative`] for an operation without a derivative between arguments and results;
    /// [`Error::Operation`] for arguments that do not match the function, or that are not floating-point.
    #[track_caller]
    pub fn vjp(
        &self,
        function: &Traced,
        arguments: &[&Value],
        with_respect_to: &[usize],
    ) -> Result<(Vec<Value>, Pullback)> {
        self.differentiable(function, arguments, with_respect_to)?;
        let given: Vec<usize> = (0..function.result_types().len()).collect();
        self.differentiate(function, arguments, &Endpoints { with_respect_to, unrounded: &[], given: &given })
    }

    /// Like [`Builder::vjp`], but cotangents of arguments narrower than f32 are not rounded on the way: products and
    /// slices of a scan return f32. [`Pullback::call`] rounds them once, at the end; [`Pullback::add_to`] adds them to
    /// f32 accumulators without rounding. This gives f32 gradients of bf16 weights.
    ///
    /// ```
    /// use grpo_stablehlo::{Array, Builder, DotDimensions, Dtype, Precision, TensorType, trace};
    ///
    /// let narrow = |shape: [usize; 2]| TensorType::new(Dtype::Bf16, shape);
    /// let product = trace(&[narrow([1, 2]), narrow([2, 1])], |_, a| {
    ///     vec![a[0].dot_general(&a[1], DotDimensions::contract(1, 0), Dtype::F32, Precision::Default)]
    /// })?;
    /// let f = Builder::new();
    /// let (x, weight) = (f.argument("x", narrow([1, 2])), f.argument("weight", narrow([2, 1])));
    /// let sum = f.argument("sum", TensorType::new(Dtype::F32, [2, 1]));
    /// let (results, pullback) = f.vjp_unrounded(&product, &[&x, &weight], &[1])?;
    /// let sums = pullback.add_to(&[&results[0].like(1.0)], &[&sum]);
    /// let module = f.finish("gradient", &[("sum", &sums[0])])?;
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Builder::vjp`].
    #[track_caller]
    pub fn vjp_unrounded(
        &self,
        function: &Traced,
        arguments: &[&Value],
        with_respect_to: &[usize],
    ) -> Result<(Vec<Value>, Pullback)> {
        self.differentiable(function, arguments, with_respect_to)?;
        let given: Vec<usize> = (0..function.result_types().len()).collect();
        let ends = Endpoints { with_respect_to, unrounded: with_respect_to, given: &given };
        self.differentiate(function, arguments, &ends)
    }

    /// Calls `function` and returns its results with the gradients of the first result, a floating-point scalar, with
    /// respect to some of the arguments. The other results, such as metrics, are constants to the derivative, so
    /// operations that only they depend on need no derivative.
    ///
    /// ```
    /// use grpo_stablehlo::{Array, Builder, Dtype, Reducer, TensorType, trace};
    ///
    /// let ty = TensorType::new(Dtype::F32, [3]);
    /// let loss = trace(&[ty.clone()], |_, x| {
    ///     vec![(&x[0] * &x[0]).reduce(Reducer::Add, &[0]), x[0].reduce(Reducer::Max, &[0])]
    /// })?;
    /// let f = Builder::new();
    /// let x = f.argument("x", ty);
    /// let (results, gradients) = f.value_and_grad(&loss, &[&x], &[0])?;
    /// let module = f.finish("squares", &[("loss", &results[0]), ("max", &results[1]), ("gradient", &gradients[0])])?;
    ///
    /// let x = Array::floats(Dtype::F32, [3], [1.0, -2.0, 3.0])?;
    /// assert_eq!(module.interpret(&[x])?[2].to_floats(), [2.0, -4.0, 6.0]);
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Builder::vjp`]; also if the first result is not a floating-point scalar.
    #[track_caller]
    pub fn value_and_grad(
        &self,
        function: &Traced,
        arguments: &[&Value],
        with_respect_to: &[usize],
    ) -> Result<(Vec<Value>, Vec<Value>)> {
        let results = function.result_types();
        if results.first().is_none_or(|ty| ty.rank() > 0 || !ty.dtype.is_float()) {
            let found = results.first().map_or("none".into(), ToString::to_string);
            let reason = format!("a floating-point scalar as first result expected, got {found}");
            return Err(Error::Operation { operation: "value_and_grad", reason, at: Location::caller() });
        }
        self.differentiable(function, arguments, with_respect_to)?;
        let ends = Endpoints { with_respect_to, unrounded: &[], given: &[0] };
        let (results, pullback) = self.differentiate(function, arguments, &ends)?;
        let one = results[0].like(1.0);
        let rest = results[1..].iter().map(|_| None);
        let gradients = pullback.pull_whole(std::iter::once(Some(one)).chain(rest).collect());
        Ok((results, gradients))
    }

    /// Checks that the function takes these arguments, and that the `with_respect_to` arguments are floating-point.
    #[track_caller]
    fn differentiable(&self, function: &Traced, arguments: &[&Value], with_respect_to: &[usize]) -> Result<()> {
        let at = Location::caller();
        let refuse = |reason| Error::Operation { operation: "vjp", reason, at };
        self.takes(function, arguments).map_err(refuse)?;
        let types = function.argument_types();
        match with_respect_to.iter().find(|i| types.get(**i).is_none_or(|ty| !ty.dtype.is_float())) {
            Some(index) => {
                let found = types.get(*index).map_or("none".into(), ToString::to_string);
                Err(refuse(format!("a floating-point argument {index} expected, got {found}")))
            }
            None => Ok(()),
        }
    }

    /// Like [`Builder::vjp`], for the results and arguments in `ends`.
    fn differentiate(
        &self,
        function: &Traced,
        arguments: &[&Value],
        ends: &Endpoints<'_>,
    ) -> Result<(Vec<Value>, Pullback)> {
        let activity = Activity::of(function, ends)?;
        let body = &function.function().body;
        let mut names = function.names();
        for (id, argument) in body.arguments.iter().zip(arguments) {
            names[id.0] = Some(argument.id());
        }
        let mut structures = BTreeMap::new();
        for (index, operation) in body.operations.iter().enumerate() {
            let reaches = operation.results.iter().any(|id| activity.wanted(*id));
            let structure = if reaches { self.structure(function, operation, &mut names, &activity)? } else { None };
            match structure {
                Some(structure) => drop(structures.insert(index, structure)),
                None => self.copy(function, operation, &mut names),
            }
        }
        let results = body.results.iter().map(|id| self.copied(function, *id, &names)).collect();
        let (builder, function, with_respect_to) = (self.clone(), function.clone(), ends.with_respect_to.to_vec());
        Ok((results, Pullback { builder, function, names, activity, structures, with_respect_to }))
    }
}

impl Pullback {
    /// Takes one cotangent per floating-point result, in order, and returns the cotangents of the `with_respect_to`
    /// arguments.
    ///
    /// Arguments that do not affect a result get zeros. Cotangents whose types differ from the results' are an error
    /// that [`Builder::finish`] returns.
    #[track_caller]
    pub fn call(&self, cotangents: &[&Value]) -> Vec<Value> {
        let given = self.given(cotangents);
        self.pull_whole(given)
    }

    /// Like [`Pullback::call`], but adds to `sums`: one accumulator per `with_respect_to` argument, of its shape and at
    /// least its width. Use it to accumulate gradients over batches. If an argument is sliced by a scan, or its rows
    /// are gathered, slices and rows are added one by one, without a second tensor of the argument's size.
    #[track_caller]
    pub fn add_to(&self, cotangents: &[&Value], sums: &[&Value]) -> Vec<Value> {
        self.add_to_begun(cotangents, &sums.iter().map(|sum| Some(*sum)).collect::<Vec<_>>())
    }

    /// Like [`Pullback::add_to`] for arguments with an accumulator. Other arguments get their cotangents in the dtype
    /// of the summation: f32 for narrower arguments of [`Builder::vjp_unrounded`].
    #[track_caller]
    pub fn add_to_begun(&self, cotangents: &[&Value], sums: &[Option<&Value>]) -> Vec<Value> {
        let given = self.given(cotangents);
        let types = self.function.argument_types();
        let expected_types: Vec<&TensorType> = self.with_respect_to.iter().map(|i| &types[*i]).collect();
        let fits = |ty: &TensorType, sum: &Value| {
            ty.shape == sum.shape() && sum.dtype().is_float() && sum.dtype().bytes() >= ty.dtype.bytes()
        };
        let once = (1..expected_types.len()).all(|i| !self.with_respect_to[..i].contains(&self.with_respect_to[i]));
        let all_fit = expected_types.iter().zip(sums).all(|(ty, sum)| sum.is_none_or(|sum| fits(ty, sum)));
        if !once || expected_types.len() != sums.len() || !all_fit {
            let expected = crate::build::listed(expected_types.iter().copied());
            let found = crate::build::listed(sums.iter().flatten().map(|v| v.ty()));
            self.builder.fail("vjp", format!("a sum for each of ({expected}), no narrower, expected, got ({found})"));
            let zeros = expected_types.into_iter().map(|ty| self.builder.splat(0.0, ty.clone()));
            return zeros.collect();
        }
        let begun: Vec<Option<Value>> = sums.iter().map(|sum| sum.cloned()).collect();
        let whole = |((pulled, begun), ty): ((Option<Value>, &Option<&Value>), &TensorType)| match (pulled, begun) {
            (Some(sum), Some(begun)) => sum.convert(begun.dtype()),
            (Some(sum), None) => sum,
            (None, Some(begun)) => (*begun).clone(),
            (None, None) => self.builder.splat(0.0, TensorType::new(wide(ty.dtype), &ty.shape[..])),
        };
        self.pull(given, &begun).into_iter().zip(sums).zip(expected_types).map(whole).collect()
    }

    /// Returns the cotangents by index of the result.
    #[track_caller]
    fn given(&self, cotangents: &[&Value]) -> Vec<Option<Value>> {
        let types = self.function.result_types();
        let expected: Vec<usize> = (0..types.len()).filter(|i| types[*i].dtype.is_float()).collect();
        let fits =
            expected.len() == cotangents.len() && expected.iter().zip(cotangents).all(|(i, v)| &types[*i] == v.ty());
        let mut given = vec![None; types.len()];
        if fits {
            expected.iter().zip(cotangents).for_each(|(i, v)| given[*i] = Some((*v).clone()));
        } else {
            let expected = crate::build::listed(expected.iter().map(|i| &types[*i]));
            let found = crate::build::listed(cotangents.iter().map(|v| v.ty()));
            self.builder.fail("vjp", format!("cotangents ({expected}) expected, got ({found})"));
        }
        given
    }

    /// Returns the cotangents of the `with_respect_to` arguments, in their dtypes.
    fn pull_whole(&self, cotangents: Vec<Option<Value>>) -> Vec<Value> {
        let types = self.function.argument_types();
        let whole = |(ct, i): (Option<Value>, &usize)| match ct {
            Some(ct) => ct.convert(types[*i].dtype),
            None => self.builder.splat(0.0, types[*i].clone()),
        };
        self.pull(cotangents, &vec![None; self.with_respect_to.len()])
            .into_iter()
            .zip(&self.with_respect_to)
            .map(whole)
            .collect()
    }

    /// Returns the cotangents of the `with_respect_to` arguments in the dtype of the summation, or `None` for zero.
    /// Cotangents are added to `begun` where it is present.
    fn pull(&self, cotangents: Vec<Option<Value>>, begun: &[Option<Value>]) -> Vec<Option<Value>> {
        let body = &self.function.function().body;
        let mut sums: Sums = vec![vec![]; self.function.function().types.len()];
        for (id, ct) in body.results.iter().zip(cotangents) {
            sums[id.0].extend(ct);
        }
        let arguments = self.with_respect_to.iter().map(|i| body.arguments[*i]);
        let mut begun: BTreeMap<ValueId, Value> =
            arguments.zip(begun).filter_map(|(id, begun)| Some((id, begun.clone()?))).collect();
        for (index, operation) in body.operations.iter().enumerate().rev() {
            let total = |id: &ValueId, sums: &mut Sums| {
                let parts = std::mem::take(&mut sums[id.0]);
                let ct = self.activity.wanted(*id).then(|| sum(parts)).flatten();
                // Operations that only move numbers keep the precision.
                match operation.kind {
                    Kind::Convert | Kind::OptimizationBarrier => ct,
                    Kind::Concatenate { .. } | Kind::Constrain(_) | Kind::Reshape
                        if self.activity.hands_digits_on(&self.function, *id) =>
                    {
                        ct
                    }
                    _ => ct.map(|ct| ct.convert(self.function.function().type_of(*id).dtype)),
                }
            };
            let cotangents: Vec<_> = operation.results.iter().map(|id| total(id, &mut sums)).collect();
            if cotangents.iter().all(Option::is_none) {
                continue;
            }
            let parts = match self.structures.get(&index) {
                Some(structure) => {
                    let takes = |(i, id): (usize, &ValueId)| {
                        let takes = structure.adds_to(i) && self.activity.wanted(*id);
                        if takes { begun.remove(id) } else { None }
                    };
                    let begun: Vec<Option<Value>> = operation.operands.iter().enumerate().map(takes).collect();
                    structure.pull(&self.builder, cotangents, &begun)
                }
                None => {
                    let value = |id: &ValueId| self.builder.copied(&self.function, *id, &self.names);
                    let begun = match (&operation.kind, &operation.operands[..]) {
                        (Kind::Gather(_), [table, _]) if self.activity.wanted(*table) => begun.remove(table),
                        _ => None,
                    };
                    let step = Step {
                        builder: &self.builder,
                        begun,
                        operands: operation.operands.iter().map(value).collect(),
                        results: operation.results.iter().map(value).collect(),
                        wanted: operation.operands.iter().map(|id| self.activity.wanted(*id)).collect(),
                        sums: operation
                            .operands
                            .iter()
                            .map(|id| self.activity.sum_dtype(&self.function, *id))
                            .collect(),
                        cotangents,
                    };
                    match rules::rule(&operation.kind) {
                        Rule::Of(rule) => rule(&step),
                        // Unreachable: these results never have cotangents.
                        Rule::Constant | Rule::Structure | Rule::None(_) => vec![],
                    }
                }
            };
            for (id, part) in operation.operands.iter().zip(parts) {
                if self.activity.wanted(*id) {
                    sums[id.0].extend(part);
                }
            }
        }
        let whole = |i: &usize| {
            let id = body.arguments[*i];
            sum(sums[id.0].iter().cloned().chain(begun.get(&id).cloned()).collect())
        };
        self.with_respect_to.iter().map(whole).collect()
    }
}

/// The summands of each value's cotangent, by id.
type Sums = Vec<Vec<Value>>;

/// Sums the parts, in f32 if there are several of a narrower dtype.
fn sum(parts: Vec<Value>) -> Option<Value> {
    let several = parts.len() > 1;
    let widest = parts.iter().map(Value::dtype).max_by_key(|d| d.bytes())?;
    let dtype = if several { wide(widest) } else { widest };
    parts.into_iter().map(|part| part.convert(dtype)).reduce(|a, b| a + b)
}

/// Returns the dtype in which numbers of `dtype` are summed.
fn wide(dtype: Dtype) -> Dtype {
    if matches!(dtype, Dtype::F16 | Dtype::Bf16) { Dtype::F32 } else { dtype }
}
