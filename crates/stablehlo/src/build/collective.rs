//! Collective operations between devices that run the same program on different data: replicas, or the devices of a
//! mesh in a [`Builder::manual`] body.

use super::contract::combines;
use super::{Builder, Value};
use crate::graph::{Kind, Reducer};
use crate::sharding::{Groups, MeshAxes};
use crate::types::{Dtype, TensorType};

impl Value {
    /// Reduces a value over the devices of each group; every device gets the result. `groups` are lists of replicas, or
    /// the mesh axes along which devices communicate.
    #[track_caller]
    pub fn all_reduce(&self, reducer: Reducer, groups: impl Into<Groups>) -> Self {
        let groups = groups.into();
        let check = combines(reducer, self.ty()).and(groups.size()).map(|_| self.ty().clone());
        self.then(Kind::AllReduce { reducer, groups }, &[], check)
    }

    /// Like [`Value::all_reduce`], but each device keeps only its shard of the result along `dimension`, in the order
    /// of its group.
    #[track_caller]
    pub fn reduce_scatter(&self, reducer: Reducer, dimension: usize, groups: impl Into<Groups>) -> Self {
        let (ty, groups) = (self.ty(), groups.into());
        let check = combines(reducer, ty).and(groups.size()).and_then(|size| match ty.shape.get(dimension) {
            Some(length) if length % size == 0 => {
                let mut result = ty.clone();
                result.shape[dimension] /= size;
                Ok(result)
            }
            _ => Err(format!("dimension {dimension} of {ty} does not split into {size} parts")),
        });
        self.then(Kind::ReduceScatter { reducer, dimension, groups }, &[], check)
    }

    /// Concatenates the values of a group's devices along `dimension`, in the order of the group.
    #[track_caller]
    pub fn all_gather(&self, dimension: usize, groups: impl Into<Groups>) -> Self {
        let (ty, groups) = (self.ty(), groups.into());
        let check = groups.size().and_then(|size| {
            let length = ty.shape.get(dimension).and_then(|length| length.checked_mul(size));
            let length = length.ok_or_else(|| format!("{size} of {ty} along dimension {dimension}"))?;
            let mut result = ty.clone();
            result.shape[dimension] = length;
            Ok(result)
        });
        self.then(Kind::AllGather { dimension, groups }, &[], check)
    }

    /// Splits each device's value along dimension `split`, sends shard i to device i of the group, and concatenates the
    /// received shards along dimension `concat`.
    #[track_caller]
    pub fn all_to_all(&self, split: usize, concat: usize, groups: impl Into<Groups>) -> Self {
        let (ty, groups) = (self.ty(), groups.into());
        let check = groups.size().and_then(|size| {
            let splits = ty.shape.get(split).is_some_and(|length| length % size == 0);
            let mut result = ty.clone();
            if !splits || concat >= ty.rank() {
                return Err(format!("{ty} does not split into {size} parts along {split} that join along {concat}"));
            }
            result.shape[split] /= size;
            let joined = result.shape[concat].checked_mul(size);
            result.shape[concat] = joined.ok_or_else(|| format!("{size} of {ty} along dimension {concat}"))?;
            Ok(result)
        });
        self.then(Kind::AllToAll { split, concat, groups }, &[], check)
    }

    /// Sends values between replicas along (source, target) `pairs`. A replica that receives nothing gets zeros.
    #[track_caller]
    pub fn collective_permute(&self, pairs: &[(usize, usize)]) -> Self {
        let check = once(pairs).map(|()| self.ty().clone());
        self.then(Kind::CollectivePermute { pairs: pairs.to_vec(), axes: None }, &[], check)
    }

    /// Like [`Value::collective_permute`], but within each group of devices along mesh axes, in a [`Builder::manual`]
    /// body. `pairs` hold positions in the group.
    #[track_caller]
    pub fn collective_permute_along(&self, axes: &MeshAxes, pairs: &[(usize, usize)]) -> Self {
        let size = axes.size();
        let beyond = pairs.iter().find(|(source, target)| *source >= size || *target >= size);
        let check = match beyond {
            Some(pair) => Err(format!("places below {size} expected, got {pair:?}")),
            None => once(pairs).map(|()| self.ty().clone()),
        };
        self.then(Kind::CollectivePermute { pairs: pairs.to_vec(), axes: Some(axes.clone()) }, &[], check)
    }
}

impl Builder {
    /// Returns the id of the running replica, a u32 scalar.
    #[track_caller]
    pub fn replica_id(&self) -> Value {
        let ty = TensorType::scalar(Dtype::U32);
        self.emit(Kind::ReplicaId, &[], Ok(vec![ty.clone()]), || ty)
    }

    /// Returns the id of the running partition, a u32 scalar.
    #[track_caller]
    pub fn partition_id(&self) -> Value {
        let ty = TensorType::scalar(Dtype::U32);
        self.emit(Kind::PartitionId, &[], Ok(vec![ty.clone()]), || ty)
    }
}

/// Checks that no device sends or receives twice.
fn once(pairs: &[(usize, usize)]) -> Result<(), String> {
    let repeated = |i: usize| pairs[..i].iter().any(|(s, t)| *s == pairs[i].0 || *t == pairs[i].1);
    match (0..pairs.len()).any(repeated) || pairs.is_empty() {
        true => Err(format!("each source and each target once expected, got {pairs:?}")),
        false => Ok(()),
    }
}
