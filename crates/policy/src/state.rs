//! Tensors that leave and enter a policy: checkpoints, and engines that sample elsewhere.

use crate::adamw::AdamWConfig;
use crate::error::Result;
use crate::seam::{Policy, Weights};
use models::NamedTensor;

/// A group of tensors that [`Policy::export`] hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateGroup {
    /// A set of weights; none of the reference policy when there is no reference policy.
    Weights(Weights),
    /// The moments of the optimizer; none before its first step.
    Optimizer,
}

/// Takes tensors one by one, so that a policy on a device need not hold all of them in host memory.
///
/// ```
/// use policy::{Policy, StateGroup, TensorSink, Weights};
///
/// /// Counts bytes.
/// struct Size(usize);
/// impl TensorSink for Size {
///     fn tensor(&mut self, tensor: models::NamedTensor) -> policy::Result<()> {
///         self.0 += 4 * tensor.data.len();
///         Ok(())
///     }
/// }
/// fn size(policy: &dyn Policy) -> policy::Result<usize> {
///     let mut size = Size(0);
///     policy.export(StateGroup::Weights(Weights::Policy), &mut size)?;
///     Ok(size.0)
/// }
/// ```
pub trait TensorSink {
    /// Takes the next tensor.
    ///
    /// # Errors
    /// Whatever keeps it from being stored; the export ends there.
    fn tensor(&mut self, tensor: NamedTensor) -> Result<()>;
}

impl TensorSink for Vec<NamedTensor> {
    fn tensor(&mut self, tensor: NamedTensor) -> Result<()> {
        self.push(tensor);
        Ok(())
    }
}

/// All tensors of a group.
///
/// # Errors
/// As [`Policy::export`].
pub fn export_all(policy: &dyn Policy, group: StateGroup) -> Result<Vec<NamedTensor>> {
    let mut tensors = Vec::new();
    policy.export(group, &mut tensors)?;
    Ok(tensors)
}

/// What [`Policy::import`] continues from.
#[derive(Clone, Copy, Debug)]
pub struct PolicyState<'a> {
    /// The weights of the policy.
    pub policy: &'a [NamedTensor],
    /// The weights of the reference policy; `None` when there is none.
    pub ref_policy: Option<&'a [NamedTensor]>,
    /// The moments of the optimizer; empty before its first step.
    pub optimizer: &'a [NamedTensor],
    /// The number of optimizer steps done.
    pub optimizer_steps: u64,
    /// The settings with which the optimizer continues.
    pub adamw: &'a AdamWConfig,
}
