//! A program that is being built, and the common parts of all programs.

use super::pass::Pass;
use super::products::{Head, HeadSplit};
use super::role::Role;
use super::spec::Spec;
use grpo_core::PolicySpec;
use grpo_core::error::{Error, Result};
use grpo_stablehlo::{Builder, Dtype, Module, Value};

/// A program with the roles of its arguments and results.
#[derive(Clone, Debug)]
pub struct Program {
    /// The StableHLO module; its `Display` is the text.
    pub module: Module,
    /// The roles of the arguments, in order. Arguments that are also results are donated.
    pub arguments: Vec<Role>,
    /// The roles of the results, in order.
    pub results: Vec<Role>,
}

/// A program that is being built, with its arguments by role.
#[derive(Debug)]
pub struct Frame {
    /// The builder of the program.
    pub f: Builder,
    arguments: Vec<(Role, Value)>,
    /// The shardings of the operands of logits.
    split: Option<HeadSplit>,
}

impl Frame {
    /// Declares the arguments of `pass`.
    pub fn new(spec: &Spec, pass: Pass) -> Self {
        let f = Builder::new();
        let argument = |role: Role| {
            let argument = f.argument(role.name(), spec.type_of(role));
            if let Some(sharding) = spec.sharding(role) {
                f.shard(&argument, &sharding);
            }
            (role, argument)
        };
        let arguments = spec.arguments(pass).into_iter().map(argument).collect();
        Self { f, arguments, split: spec.head_split() }
    }

    /// Adds to the program that `f` builds, with `values` as the arguments of `pass`. The head may be f32 even if the
    /// spec has a narrower dtype.
    ///
    /// # Errors
    /// [`Error::Shape`] for a missing value, or one of another type.
    pub(super) fn of(
        spec: &Spec,
        pass: Pass,
        f: &Builder,
        values: Vec<(Role, Value)>,
        split: Option<HeadSplit>,
    ) -> Result<Self> {
        for role in spec.arguments(pass) {
            let (expected, found) = (spec.type_of(role), values.iter().find(|(r, _)| *r == role));
            let fits = |value: &Value| {
                let held = if role == Role::LmHead { value.dtype() } else { expected.dtype };
                *value.ty() == expected || (held == Dtype::F32 && *value.ty() == expected.with_dtype(held))
            };
            if found.is_none_or(|(_, value)| !fits(value)) {
                let found = found.map_or("none".into(), |(_, value)| value.ty().to_string());
                return Err(Error::shape("the loss in a program", role.name(), expected, found));
            }
        }
        Ok(Self { f: f.clone(), arguments: values, split })
    }

    /// Returns an argument, if the program has it.
    pub(super) fn get(&self, role: Role) -> Option<&Value> {
        self.arguments.iter().find(|(r, _)| *r == role).map(|(_, value)| value)
    }

    /// Returns an argument of the pass.
    ///
    /// # Panics
    /// If the pass does not have it.
    pub fn argument(&self, role: Role) -> Value {
        match self.get(role) {
            Some(value) => value.clone(),
            None => unreachable!("the frame declares {role:?} for this pass"),
        }
    }

    /// Returns hidden states and head, if the policy provides them.
    pub fn head(&self, spec: &Spec) -> Option<(Value, Head)> {
        match spec.policy {
            PolicySpec::Logits { .. } => None,
            PolicySpec::Hidden { layout, .. } => {
                let (weight, bias) = (self.argument(Role::LmHead), self.get(Role::Bias).cloned());
                Some((self.argument(Role::Hidden), Head { weight, bias, layout, split: self.split.clone() }))
            }
        }
    }

    /// Finishes the program that returns `results`. Results that are also arguments reuse their buffers.
    ///
    /// # Errors
    /// [`Error::Backend`] for an illegal operation.
    pub fn finish(self, name: &str, spec: &Spec, results: &[(Role, Value)]) -> Result<Program> {
        for (index, (role, _)) in results.iter().enumerate() {
            if let Some(argument) = self.get(*role) {
                self.f.alias(argument, index);
            }
            if let Some(sharding) = spec.sharding(*role) {
                self.f.shard_result(index, &sharding);
            }
        }
        let named: Vec<(&str, &Value)> = results.iter().map(|(role, value)| (role.name(), value)).collect();
        let arguments: Vec<Role> = self.arguments.iter().map(|(role, _)| *role).collect();
        let mut module = self.f.finish(name, &named).map_err(|e| Error::Backend {
            backend: crate::error::NAME.into(),
            message: format!("the program `{name}` cannot be built: {e}"),
        })?;
        if spec.mosaic.is_some() {
            // Otherwise the compiler transposes logits whose V is not a multiple of 128, and copies them for the kernels.
            let logits = |role: &Role| *role == Role::Logits;
            module.main.arguments.iter_mut().zip(&arguments).for_each(|(a, role)| a.row_major = logits(role));
            module.main.results.iter_mut().zip(results).for_each(|(r, (role, _))| r.row_major = logits(role));
        }
        Ok(Program { module, arguments, results: results.iter().map(|(role, _)| *role).collect() })
    }
}

/// Returns `sum + gradient`, rounded to the dtype of gradient accumulators.
pub(super) fn accumulate(sum: &Value, gradient: &Value) -> Value {
    (sum.convert(Dtype::F32) + gradient).convert(sum.dtype())
}

/// Prevents the compiler from changing the logits, if scoring and loss must see the same bits.
pub(super) fn pinned(spec: &Spec, logits: Value) -> Value {
    match spec.numerics.exact_ratio {
        true => logits.builder().optimization_barrier(&[&logits]).swap_remove(0),
        false => logits,
    }
}
