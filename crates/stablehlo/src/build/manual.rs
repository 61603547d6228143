//! Programs that are sharded over devices.

use super::trace::Traced;
use super::{Builder, Value};
use crate::graph::Kind;
use crate::sharding::{Manual, Sharding};
use crate::types::TensorType;

impl Value {
    /// Requests a sharding of the value from the partitioner; its numbers do not change. The cotangent gets the same
    /// sharding.
    ///
    /// ```
    /// use grpo_stablehlo::{Builder, DotDimensions, Dtype, Mesh, Precision, TensorType};
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
    /// # Ok::<(), grpo_stablehlo::Error>(())
    /// ```
    #[track_caller]
    pub fn constrain(&self, sharding: &Sharding) -> Self {
        let check = sharding.part(self.ty()).map(|_| self.ty().clone()).map_err(|error| error.to_string());
        self.then(Kind::Constrain(sharding.clone()), &[], check)
    }
}

impl Builder {
    /// Runs `body` on every device of a mesh, with each device's shards of `operands`: see [`Manual`]. It has no
    /// derivative.
    #[track_caller]
    pub fn manual(&self, manual: &Manual, body: &Traced, operands: &[&Value]) -> Vec<Value> {
        let types: Vec<TensorType> = operands.iter().map(|v| v.ty().clone()).collect();
        let check = manual.results(&types, body);
        let region = self.state.borrow_mut().body(body);
        self.emit_all(Kind::Manual(manual.clone()), operands, vec![region], check, || body.result_types())
    }
}
