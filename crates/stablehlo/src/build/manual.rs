//! Programs that are sharded over devices.

use super::contract::combines;
use super::trace::Traced;
use super::{Builder, Value};
use crate::graph::{Kind, Reducer};
use crate::sharding::{Groups, Manual, MeshAxes, Sharding};
use crate::types::{Dtype, TensorType};

impl Value {
    /// Requests a sharding of the value from the partitioner; its numbers do not change. The cotangent gets the same
    /// sharding.
    ///
    /// ```
    /// use stablehlo::{Builder, DotDimensions, Dtype, Mesh, Precision, TensorType};
    ///
    /// let mesh = Mesh::new("mesh", [("data", 2), ("tensor", 2)])?;
    /// let f = Builder::new();
    /// let x = f.argument("x", TensorType::new(Dtype::F32, [8, 16]));
    /// let w = f.argument("w", TensorType::new(Dtype::F32, [16, 32]));
    /// f.shard(&x, &mesh.sharding(&[&["data"], &[]])?);
    /// f.shard(&w, &mesh.sharding(&[&[], &["tensor"]])?);
    /// let hidden = x.dot_general(&w, DotDimensions::contract(1, 0), Dtype::F32, Precision::Default);
    /// let hidden = hidden.constrain(&mesh.sharding(&[&["data"], &["tensor"]])?);
    /// let module = f.finish("split", &[("hidden", &hidden)])?;
    /// assert_eq!(module.partitions, 4);
    /// assert!(module.to_string().contains("sdy.sharding_constraint"));
    /// # Ok::<(), stablehlo::Error>(())
    /// ```
    #[track_caller]
    pub fn constrain(&self, sharding: &Sharding) -> Self {
        let check = sharding.part(self.ty()).map(|_| self.ty().clone()).map_err(|error| error.to_string());
        self.then(Kind::Constrain(sharding.clone()), &[], check)
    }

    /// Reduces a value over the devices of each group; every device gets the result. `groups` are lists of replicas, or
    /// the mesh axes along which devices communicate, in a [`Builder::manual`] body.
    #[track_caller]
    pub fn all_reduce(&self, reducer: Reducer, groups: impl Into<Groups>) -> Self {
        let groups = groups.into();
        let check = combines(reducer, self.ty()).and(groups.size()).map(|_| self.ty().clone());
        self.then(Kind::AllReduce { reducer, groups }, &[], check)
    }
}

impl Builder {
    /// Runs `body` on every device of a mesh, with each device's shards of `operands`: see [`Manual`].
    ///
    /// The derivative is such a computation, too. The cotangent of a result that is replicated on several devices is
    /// divided among them, and the cotangent of a replicated operand is summed over its devices: every device has
    /// variables of its own, and the derivative is taken of the sum over devices. A [`Builder::custom_vjp`] in the body
    /// takes and returns cotangents with this meaning; it makes no difference to one that ends before a collective.
    #[track_caller]
    pub fn manual(&self, manual: &Manual, body: &Traced, operands: &[&Value]) -> Vec<Value> {
        let types: Vec<TensorType> = operands.iter().map(|v| v.ty().clone()).collect();
        let check = manual.results(&types, body);
        let region = self.state.borrow_mut().body(body);
        self.emit_all(Kind::Manual(manual.clone()), operands, vec![region], check, || body.result_types())
    }

    /// Returns the position of the running device along axes of its mesh, in a [`Builder::manual`] body: a u32 scalar.
    #[track_caller]
    pub fn axis_index(&self, axes: &MeshAxes) -> Value {
        let ty = TensorType::scalar(Dtype::U32);
        self.emit(Kind::AxisIndex(axes.clone()), &[], Ok(ty.clone()), &ty)
    }

    /// Returns the id of the running replica, a u32 scalar.
    #[track_caller]
    pub fn replica_id(&self) -> Value {
        let ty = TensorType::scalar(Dtype::U32);
        self.emit(Kind::ReplicaId, &[], Ok(ty.clone()), &ty)
    }
}
