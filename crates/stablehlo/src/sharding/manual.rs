//! Computations on the shards of devices.

use super::{Dimension, MeshAxes, Sharding};
use crate::build::{Builder, Traced, Value, listed, trace};
use crate::error::{Error, Result};
use crate::types::TensorType;

/// The shardings of the operands and results of a computation that is written for one device. Along the manual axes,
/// the body sees the device's shard of each operand, and communicates with other devices in collectives over these
/// axes. Along other axes, the partitioner shards the body like the rest of the program.
///
/// Along a manual axis that an operand's sharding does not name, all devices get the same value. Along a manual axis
/// that a result's sharding does not name, all devices must return the same value.
///
/// ```
/// use stablehlo::{Array, Builder, DotDimensions, Dtype, Manual, Mesh, Precision, Reducer, TensorType};
///
/// // x w, where each device multiplies some columns of x with some rows of w.
/// let mesh = Mesh::new("mesh", [("data", 2), ("tensor", 2)])?;
/// let axes = mesh.along(&["data", "tensor"])?;
/// let inputs = [mesh.sharding(&[&["data"], &["tensor"]])?, mesh.sharding(&[&["tensor"], &[]])?];
/// let manual = Manual::new(&axes, &inputs, &[mesh.sharding(&[&["data"], &[]])?])?;
///
/// let types = [TensorType::new(Dtype::F32, [4, 8]), TensorType::new(Dtype::F32, [8, 2])];
/// let tensor = mesh.along(&["tensor"])?;
/// let body = manual.trace(&types, |_, parts| {
///     let product = parts[0].dot_general(&parts[1], DotDimensions::contract(1, 0), Dtype::F32, Precision::Default);
///     vec![product.all_reduce(Reducer::Add, &tensor)]
/// })?;
/// let f = Builder::new();
/// let (x, w) = (f.argument("x", types[0].clone()), f.argument("w", types[1].clone()));
/// let product = f.manual(&manual, &body, &[&x, &w]).remove(0);
/// let module = f.finish("product", &[("product", &product)])?;
/// assert_eq!(module.partitions, 4);
///
/// let ones = types.map(|ty| Array::floats(Dtype::F32, &ty.shape[..], vec![1.0; ty.elements()]).unwrap());
/// assert_eq!(module.interpret(&ones)?[0].to_floats(), [8.0; 8]);
/// # Ok::<(), stablehlo::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manual {
    axes: MeshAxes,
    inputs: Vec<Sharding>,
    outputs: Vec<Sharding>,
}

impl Manual {
    /// Creates a computation along `axes`, with a sharding for each operand and each result.
    ///
    /// # Errors
    /// [`Error::Axis`] if a manual axis follows another axis in a dimension, because shards are then not contiguous;
    /// [`Error::Mesh`] for a sharding of another mesh.
    pub fn new(axes: &MeshAxes, inputs: &[Sharding], outputs: &[Sharding]) -> Result<Self> {
        let whole = |shardings: &[Sharding]| shardings.iter().map(|s| Self::named(axes, s)).collect::<Result<Vec<_>>>();
        Ok(Self { axes: axes.clone(), inputs: whole(inputs)?, outputs: whole(outputs)? })
    }

    /// Names every manual axis in the sharding.
    fn named(axes: &MeshAxes, sharding: &Sharding) -> Result<Sharding> {
        let mesh = axes.mesh();
        if sharding.mesh() != mesh {
            let reason = format!("its own shardings expected, got {sharding}");
            return Err(Error::Mesh { mesh: mesh.name().into(), reason });
        }
        let is_manual = |axis: &usize| axes.axes().contains(axis);
        for dimension in sharding.dimensions() {
            let manual = dimension.axes.iter().take_while(|axis| is_manual(axis)).count();
            if let Some(late) = dimension.axes[manual..].iter().find(|axis| is_manual(axis)) {
                let free = mesh.axis(dimension.axes[manual]);
                let reason = format!("it is manual, but comes after `{free}`, which is not, in {sharding}");
                return Err(mesh.refuse(mesh.axis(*late), reason));
            }
        }
        let mut sharding = sharding.clone();
        for axis in axes.axes() {
            if !sharding.uses(*axis) {
                sharding.replicate(*axis);
            }
        }
        Ok(sharding)
    }

    /// Returns the manual axes.
    pub fn axes(&self) -> &MeshAxes {
        &self.axes
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
            parts.push(self.inputs.get(i).map_or(Ok(ty.clone()), |sharding| self.part(sharding, ty))?);
        }
        trace(&parts, body)
    }

    pub(crate) fn part(&self, sharding: &Sharding, ty: &TensorType) -> Result<TensorType> {
        sharding.part_over(ty, self.axes.axes())
    }

    /// Returns the manual axes along which a value with this sharding is replicated.
    pub(crate) fn copied_along(&self, sharding: &Sharding) -> MeshAxes {
        let axes = self.axes.axes().iter().copied().filter(|axis| !sharding.splits_over(*axis)).collect();
        MeshAxes::of(self.axes.mesh(), axes)
    }

    /// Returns `true` if it leaves axes to the partitioner.
    pub(crate) fn is_partial(&self) -> bool {
        self.axes.size() < self.axes.mesh().devices()
    }

    /// Adds operands: for each list of axes, a vector with one element per device along these axes.
    pub(crate) fn with_places<'a>(&self, places: impl Iterator<Item = &'a MeshAxes>) -> Self {
        let row = |axes: &MeshAxes| {
            let dimension = Dimension { axes: axes.axes().to_vec(), open: false };
            let others = self.axes.axes().iter().copied().filter(|axis| !axes.axes().contains(axis)).collect();
            Sharding { mesh: axes.mesh().clone(), dimensions: vec![dimension], replicated: others }
        };
        let inputs = self.inputs.iter().cloned().chain(places.map(row)).collect();
        Self { inputs, ..self.clone() }
    }

    /// Returns the sharding that stacks each device's value of `rank` dimensions along the first dimension.
    pub(crate) fn stacked(&self, rank: usize) -> Sharding {
        let mesh = self.axes.mesh();
        let open = self.axes.axes().len() < mesh.axes().len();
        let mut dimensions = vec![Dimension { axes: vec![], open }; rank];
        if let Some(first) = dimensions.first_mut() {
            first.axes = self.axes.axes().to_vec();
        }
        Sharding { mesh: mesh.clone(), dimensions, replicated: vec![] }
    }

    /// Returns the types of the results for operands of these types.
    pub(crate) fn results(&self, operands: &[TensorType], body: &Traced) -> Result<Vec<TensorType>, String> {
        if operands.len() != self.inputs.len() {
            return Err(format!("{} operands expected, got {}", self.inputs.len(), operands.len()));
        }
        let text = |error: Error| error.to_string();
        let parts = operands.iter().zip(&self.inputs).map(|(ty, s)| self.part(s, ty)).collect::<Result<Vec<_>>>();
        let (parts, takes, returns) = (parts.map_err(text)?, body.argument_types(), body.result_types());
        if parts != takes {
            return Err(format!("a body of the parts ({}) expected, got one of ({})", listed(&parts), listed(&takes)));
        }
        if returns.is_empty() || returns.len() != self.outputs.len() {
            return Err(format!("{} results expected, at least 1, got {}", self.outputs.len(), returns.len()));
        }
        let whole = returns.iter().zip(&self.outputs).map(|(ty, s)| s.whole_over(ty, self.axes.axes()));
        whole.collect::<Result<_>>().map_err(text)
    }
}
