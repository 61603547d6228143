//! Operations across devices that run the same program, each on its own data: replicas, or the devices of a mesh in a
//! [`Builder::manual`] body.

use super::contract::combines;
use super::{Builder, Value};
use crate::graph::{Kind, Reducer};
use crate::sharding::{Groups, MeshAxes};
use crate::types::{Dtype, TensorType};

impl Value {
    /// Combines the values that the devices of a group hold; each of them gets the result. `groups` are lists of replicas, or
    /// the axes of a mesh along which devices meet.
    #[track_caller]
    pub fn all_reduce(&self, reducer: Reducer, groups: impl Into<Groups>) -> Self {
        let groups = groups.into();
        let check = combines(reducer, self.ty()).and(groups.size()).map(|_| self.ty().clone());
        self.then(Kind::AllReduce { reducer, groups }, &[], check)
    }

    /// [`Value::all_reduce`], of which each device of a group keeps its part along `dimension`, in the group's order.
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

    /// The values of the devices of a group one after the other along `dimension`, in the group's order.
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

    /// Splits the value of each device of a group along `split`, gives part i of all to the group's device i, and puts
    /// what arrives one after the other along `concat`.
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

    /// The value of the replica that is the source of this one, in (source, target) `pairs`; zeros where there is none.
    #[track_caller]
    pub fn collective_permute(&self, pairs: &[(usize, usize)]) -> Self {
        let check = once(pairs).map(|()| self.ty().clone());
        self.then(Kind::CollectivePermute { pairs: pairs.to_vec(), axes: None }, &[], check)
    }

    /// [`Value::collective_permute`] in each group of devices along axes of a mesh, in a [`Builder::manual`] body: pairs are of
    /// places in the group.
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

/// Whether no device sends, or gets, twice.
fn once(pairs: &[(usize, usize)]) -> Result<(), String> {
    let repeated = |i: usize| pairs[..i].iter().any(|(s, t)| *s == pairs[i].0 || *t == pairs[i].1);
    match (0..pairs.len()).any(repeated) || pairs.is_empty() {
        true => Err(format!("each source and each target once expected, got {pairs:?}")),
        false => Ok(()),
    }
}
