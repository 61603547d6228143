//! Operations across devices: replicas that run the same program, each on its own data.

use super::contract::combines;
use super::{Builder, Value};
use crate::graph::{CustomCall, Kind, Reducer, Sharding};
use crate::types::{Dtype, TensorType};

impl Value {
    /// Combines the values that the replicas of a group hold; each replica of it gets the result.
    #[track_caller]
    pub fn all_reduce(&self, reducer: Reducer, groups: &[Vec<usize>]) -> Self {
        let check = combines(reducer, self.ty()).and(uniform(groups)).map(|_| self.ty().clone());
        self.then(Kind::AllReduce { reducer, groups: groups.to_vec() }, &[], check)
    }

    /// [`Value::all_reduce`], of which each replica of a group keeps its part along `dimension`, in the group's order.
    #[track_caller]
    pub fn reduce_scatter(&self, reducer: Reducer, dimension: usize, groups: &[Vec<usize>]) -> Self {
        let ty = self.ty();
        let check = combines(reducer, ty).and(uniform(groups)).and_then(|size| match ty.shape.get(dimension) {
            Some(length) if length % size == 0 => {
                let mut result = ty.clone();
                result.shape[dimension] /= size;
                Ok(result)
            }
            _ => Err(format!("dimension {dimension} of {ty} does not split into {size} parts")),
        });
        self.then(Kind::ReduceScatter { reducer, dimension, groups: groups.to_vec() }, &[], check)
    }

    /// Asks the partitioner to split the value like this.
    #[track_caller]
    pub fn sharded(&self, sharding: &Sharding) -> Self {
        let call = CustomCall { target: "Sharding".into(), backend_config: String::new(), ..CustomCall::default() };
        let check = splits(sharding, self.ty()).map(|()| self.ty().clone());
        self.then(Kind::CustomCall(CustomCall { sharding: Some(sharding.clone()), ..call }), &[], check)
    }
}

impl Builder {
    /// The replica that runs: a u32 scalar.
    #[track_caller]
    pub fn replica_id(&self) -> Value {
        let ty = TensorType::scalar(Dtype::U32);
        self.emit(Kind::ReplicaId, &[], Ok(vec![ty.clone()]), || ty)
    }

    /// The partition that runs: a u32 scalar.
    #[track_caller]
    pub fn partition_id(&self) -> Value {
        let ty = TensorType::scalar(Dtype::U32);
        self.emit(Kind::PartitionId, &[], Ok(vec![ty.clone()]), || ty)
    }
}

/// Whether a tensor of type `ty` can be split like this.
pub(super) fn splits(sharding: &Sharding, ty: &TensorType) -> Result<(), String> {
    let Sharding::Tiled { tiles, devices } = sharding else { return Ok(()) };
    if tiles.len() != ty.rank() {
        return Err(format!("one number of parts per dimension of {ty} expected, got {tiles:?}"));
    }
    let parts = tiles.iter().try_fold(1, |n: usize, parts| n.checked_mul(*parts)).filter(|parts| *parts > 0);
    match parts.is_some_and(|parts| !devices.is_empty() && devices.len().is_multiple_of(parts)) {
        true => Ok(()),
        false => Err(format!("a device, or as many for each, of {tiles:?} parts expected, got {devices:?}")),
    }
}

/// Size of every group.
fn uniform(groups: &[Vec<usize>]) -> Result<usize, String> {
    match groups.first().map(Vec::len) {
        Some(size) if size > 0 && groups.iter().all(|g| g.len() == size) => Ok(size),
        _ => Err(format!("groups of one size expected, got {groups:?}")),
    }
}
