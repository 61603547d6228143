//! Computations on the shards of devices.

use super::{Mesh, Sharding};
use crate::build::{Builder, Traced, Value, listed, trace};
use crate::error::{Error, Result};
use crate::types::TensorType;

/// The shardings of the operands and results of a computation that is written for one device: its body sees the device's
/// shard of each operand, and does not communicate.
///
/// Along an axis that an operand's sharding does not name, all devices get the same value. Along an axis that a result's
/// sharding does not name, all devices must return the same value.
///
/// ```
/// use grpo_stablehlo::{Array, Builder, Dtype, Manual, Mesh, Reducer, TensorType};
///
/// // Each device subtracts the maximum of its rows.
/// let mesh = Mesh::new("mesh", [("data", 2)])?;
/// let rows = [mesh.sharding(&[&["data"], &[]])?];
/// let manual = Manual::new(&mesh, &rows, &rows)?;
/// let ty = TensorType::new(Dtype::F32, [4, 8]);
/// let body = manual.trace(&[ty.clone()], |_, parts| {
///     let max = parts[0].reduce(Reducer::Max, &[0, 1]);
///     vec![&parts[0] - max.broadcast_in_dim(parts[0].shape(), &[])]
/// })?;
/// let f = Builder::new();
/// let x = f.argument("x", ty);
/// let shifted = f.manual(&manual, &body, &[&x]).remove(0);
/// let module = f.finish("shift", &[("shifted", &shifted)])?;
/// assert_eq!(module.partitions, 2);
///
/// let numbers = module.interpret(&[Array::floats(Dtype::F32, [4, 8], (0..32).map(f64::from))?])?[0].to_floats();
/// assert_eq!([numbers[15], numbers[31]], [0.0, 0.0]);
/// # Ok::<(), grpo_stablehlo::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manual {
    mesh: Mesh,
    inputs: Vec<Sharding>,
    outputs: Vec<Sharding>,
}

impl Manual {
    /// Creates a computation on all devices of `mesh`, with a sharding for each operand and each result.
    ///
    /// # Errors
    /// [`Error::Mesh`] for a sharding of another mesh.
    pub fn new(mesh: &Mesh, inputs: &[Sharding], outputs: &[Sharding]) -> Result<Self> {
        let named = |sharding: &Sharding| match sharding.mesh() == mesh {
            true => Ok(sharding.clone().with_all_axes()),
            false => {
                let reason = format!("its own shardings expected, got {sharding}");
                Err(Error::Mesh { mesh: mesh.name().into(), reason })
            }
        };
        let whole = |shardings: &[Sharding]| shardings.iter().map(named).collect::<Result<Vec<_>>>();
        Ok(Self { mesh: mesh.clone(), inputs: whole(inputs)?, outputs: whole(outputs)? })
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the sharding of each operand.
    pub fn inputs(&self) -> &[Sharding] {
        &self.inputs
    }

    /// Returns the sharding of each result.
    pub fn outputs(&self) -> &[Sharding] {
        &self.outputs
    }

    /// Traces `body`, a function of shards of arguments of these types, for [`Builder::manual`].
    ///
    /// # Errors
    /// [`Error::Split`] if the sharding of an operand does not divide its type evenly; the first illegal operation of
    /// the body.
    #[track_caller]
    pub fn trace(&self, types: &[TensorType], body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>) -> Result<Traced> {
        let mut parts = Vec::with_capacity(types.len());
        for (i, ty) in types.iter().enumerate() {
            // Surplus types are reported where the function is used.
            parts.push(self.inputs.get(i).map_or(Ok(ty.clone()), |sharding| sharding.part(ty))?);
        }
        trace(&parts, body)
    }

    /// Returns the types of the results for operands of these types.
    pub(crate) fn results(&self, operands: &[TensorType], body: &Traced) -> Result<Vec<TensorType>, String> {
        if operands.len() != self.inputs.len() {
            return Err(format!("{} operands expected, got {}", self.inputs.len(), operands.len()));
        }
        let text = |error: Error| error.to_string();
        let parts = operands.iter().zip(&self.inputs).map(|(ty, s)| s.part(ty)).collect::<Result<Vec<_>>>();
        let (parts, takes, returns) = (parts.map_err(text)?, body.argument_types(), body.result_types());
        if parts != takes {
            return Err(format!("a body of the parts ({}) expected, got one of ({})", listed(&parts), listed(&takes)));
        }
        if returns.is_empty() || returns.len() != self.outputs.len() {
            return Err(format!("{} results expected, at least 1, got {}", self.outputs.len(), returns.len()));
        }
        let whole = returns.iter().zip(&self.outputs).map(|(ty, s)| s.whole(ty));
        whole.collect::<Result<_>>().map_err(text)
    }
}
