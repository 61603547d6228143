//! Export and import of tensors: for checkpoints, and for engines that sample elsewhere.
//!
//! All policies have the same tensors, so a run can resume on another one: a tensor for each trained parameter of `transformers`, with its name,
//! shape and orientation; with adapters, PEFT's tensors instead; and of a value head `value_head.weight` `[H, 1]` and `value_head.bias`
//! `[1]`. All of them are f32; the codes of 8-bit moments are whole numbers from 0 to 255, which files store as bytes.
//!
//! Parameters that are not trained are in no state: the model below adapters, frozen routers, and factors of layers (`layer_scalar`). A policy
//! that imports a state keeps its own, which it has from the model's folder.

use crate::error::{Error, Result};
use crate::optimizer::OptimizerSettings;
use crate::policy::{Policy, Weights};
use grpo_models::{Adapter, NamedTensor, Parameter, WeightTensor};
use std::borrow::Cow;
use std::collections::HashMap;

/// A group of tensors that [`Policy::export`] can export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateGroup {
    /// A set of weights; empty for a missing reference policy.
    Weights(Weights),
    /// The moments of the optimizer ([`crate::moment_tensors`]): the names of the weights with the prefixes [`MOMENTS`], or, for 8-bit
    /// moments, [`crate::MOMENT_CODES`] and [`crate::MOMENT_SCALES`]; empty before its first step.
    Optimizer,
}

/// The prefixes of the names of first and second moments.
pub const MOMENTS: [&str; 2] = ["exp_avg.", "exp_avg_sq."];

/// A receiver of tensors, one by one, so that a PJRT policy need not hold all of them in host memory. Closures and lists implement it.
///
/// ```
/// use grpo_policy::{Policy, StateGroup, Weights};
///
/// fn bytes(policy: &dyn Policy) -> grpo_policy::Result<usize> {
///     let mut bytes = 0;
///     policy.export(StateGroup::Weights(Weights::Policy), &mut |tensor: grpo_models::NamedTensor| {
///         bytes += 4 * tensor.data.len();
///         Ok(())
///     })?;
///     Ok(bytes)
/// }
/// ```
pub trait TensorSink {
    /// Receives the next tensor.
    ///
    /// # Errors
    /// Any error that prevents storing it; the export stops there.
    fn tensor(&mut self, tensor: NamedTensor) -> Result<()>;
}

impl<F: FnMut(NamedTensor) -> Result<()>> TensorSink for F {
    fn tensor(&mut self, tensor: NamedTensor) -> Result<()> {
        self(tensor)
    }
}

impl TensorSink for Vec<NamedTensor> {
    fn tensor(&mut self, tensor: NamedTensor) -> Result<()> {
        self.push(tensor);
        Ok(())
    }
}

/// A source of tensors, read one by one, so that a PJRT policy need not hold all of them in host memory. Lists, slices and arrays of
/// tensors implement it, and the files of a checkpoint do.
///
/// ```
/// use grpo_policy::TensorSource;
///
/// # fn main() -> grpo_policy::Result<()> {
/// let tensors = vec![grpo_models::NamedTensor { name: "norm.weight".into(), shape: vec![2], data: vec![1.0, 2.0] }];
/// assert_eq!(tensors.shapes(), [("norm.weight", &[2][..])]);
/// assert_eq!(*tensors.values("norm.weight")?, [1.0, 2.0]);
/// # Ok(())
/// # }
/// ```
pub trait TensorSource {
    /// Returns the names and shapes of all tensors.
    fn shapes(&self) -> Vec<(&str, &[usize])>;

    /// Returns the values of the tensor `name`, row-major; borrowed if they are in memory as f32.
    ///
    /// # Errors
    /// [`Error::State`] if there is no tensor `name`, or if the number of values does not match its shape.
    fn values(&self, name: &str) -> Result<Cow<'_, [f32]>>;
}

impl<T: AsRef<[NamedTensor]>> TensorSource for T {
    fn shapes(&self) -> Vec<(&str, &[usize])> {
        self.as_ref().iter().map(|tensor| (&*tensor.name, &*tensor.shape)).collect()
    }

    fn values(&self, name: &str) -> Result<Cow<'_, [f32]>> {
        let Some(tensor) = self.as_ref().iter().find(|tensor| tensor.name == name) else {
            return Err(Error::state(name, "a tensor", "none"));
        };
        let expected = tensor.shape.iter().try_fold(1_usize, |count, size| count.checked_mul(*size));
        if expected != Some(tensor.data.len()) {
            let found = format!("{} values", tensor.data.len());
            return Err(Error::state(name, format!("the values of a tensor of shape {:?}", tensor.shape), found));
        }
        Ok(Cow::Borrowed(&tensor.data))
    }
}

/// The tensors of a stored adapter, by PEFT's names.
#[derive(Clone, Copy, Debug)]
pub struct AdapterTensors<'a>(pub &'a Adapter);

impl AdapterTensors<'_> {
    fn tensors(&self) -> impl Iterator<Item = WeightTensor<'_>> {
        self.0.matrices().iter().flat_map(|matrix| [self.0.lora_a(matrix), self.0.lora_b(matrix)]).flatten()
    }
}

impl TensorSource for AdapterTensors<'_> {
    fn shapes(&self) -> Vec<(&str, &[usize])> {
        self.tensors().map(|tensor| (tensor.name(), tensor.shape())).collect()
    }

    fn values(&self, name: &str) -> Result<Cow<'_, [f32]>> {
        let tensor = self.tensors().find(|tensor| tensor.name() == name);
        tensor.map(|tensor| tensor.values()).ok_or_else(|| Error::state(name, "a matrix of the adapter", "none"))
    }
}

/// Checks that the tensors whose names begin with `prefix` match the parameters one to one, without reading values.
///
/// # Errors
/// [`Error::State`] if a tensor is missing, has another shape, or has no parameter.
pub fn check_tensors(parameters: &[Parameter], prefix: &str, tensors: &dyn TensorSource) -> Result<()> {
    let tensors = tensors.shapes().into_iter();
    let mut left: HashMap<&str, &[usize]> =
        tensors.filter_map(|(name, shape)| Some((name.strip_prefix(prefix)?, shape))).collect();
    for Parameter { name, shape } in parameters {
        let found = left.remove(&**name);
        if found != Some(shape) {
            let found = found.map_or("none".into(), |found| format!("shape {found:?}"));
            return Err(Error::state(format!("{prefix}{name}"), format!("a tensor of shape {shape:?}"), found));
        }
    }
    match left.keys().next() {
        Some(extra) => {
            let extra = format!("{prefix}{extra}");
            Err(Error::state(extra, "a name that the model has", "a tensor that no parameter uses"))
        }
        None => Ok(()),
    }
}

/// Exports all tensors of a group into a list.
///
/// # Errors
/// See [`Policy::export`].
pub fn export_all(policy: &dyn Policy, group: StateGroup) -> Result<Vec<NamedTensor>> {
    let mut tensors = Vec::new();
    policy.export(group, &mut tensors)?;
    Ok(tensors)
}

/// The state that [`Policy::import`] restores: `PolicyState { policy: &weights, ... }` of a list of tensors or another source.
#[derive(Clone, Copy)]
pub struct PolicyState<'a> {
    /// Weights of the policy.
    pub policy: &'a dyn TensorSource,
    /// Weights of the reference policy; `None` if there is none.
    pub ref_policy: Option<&'a dyn TensorSource>,
    /// Moments of the optimizer; empty before its first step.
    pub optimizer: &'a dyn TensorSource,
    /// Number of optimizer steps done.
    pub optimizer_steps: u64,
    /// Settings with which the optimizer continues.
    pub optimizer_settings: &'a OptimizerSettings,
}
