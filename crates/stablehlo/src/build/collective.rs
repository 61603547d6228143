//! Operations across devices: replicas that run the same program, each on its own data.

use super::{Builder, Value};
use crate::graph::{CustomCall, Kind, Reducer, Sharding};
use crate::types::{Dtype, TensorType};

impl Value {
    /// Combines the values that the replicas of a group hold; each replica of it gets the result.
    #[track_caller]
    pub fn all_reduce(&self, reducer: Reducer, groups: &[Vec<usize>]) -> Self {
        let check = uniform(groups).map(|_| self.ty().clone());
        self.then(Kind::AllReduce { reducer, groups: groups.to_vec() }, &[], check)
    }

    /// [`Value::all_reduce`], of which each replica of a group keeps its part along `dimension`, in the group's order.
    #[track_caller]
    pub fn reduce_scatter(&self, reducer: Reducer, dimension: usize, groups: &[Vec<usize>]) -> Self {
        let ty = self.ty();
        let check = uniform(groups).and_then(|size| match ty.shape.get(dimension) {
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
        let check = match sharding {
            Sharding::Tiled { tiles, .. } if tiles.len() != self.ty().rank() => {
                Err(format!("one number of parts per dimension of {} expected, got {tiles:?}", self.ty()))
            }
            _ => Ok(self.ty().clone()),
        };
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

/// Size of every group.
fn uniform(groups: &[Vec<usize>]) -> Result<usize, String> {
    match groups.first().map(Vec::len) {
        Some(size) if size > 0 && groups.iter().all(|g| g.len() == size) => Ok(size),
        _ => Err(format!("groups of one size expected, got {groups:?}")),
    }
}
