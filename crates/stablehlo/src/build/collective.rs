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

    /// The values of the replicas of a group one after the other along `dimension`, in the group's order.
    #[track_caller]
    pub fn all_gather(&self, dimension: usize, groups: &[Vec<usize>]) -> Self {
        let ty = self.ty();
        let check = uniform(groups).and_then(|size| {
            let length = ty.shape.get(dimension).and_then(|length| length.checked_mul(size));
            let mut result = ty.clone();
            result.shape[dimension] = length.ok_or_else(|| format!("{size} of {ty} along dimension {dimension}"))?;
            Ok(result)
        });
        self.then(Kind::AllGather { dimension, groups: groups.to_vec() }, &[], check)
    }

    /// Splits the value of each replica of a group along `split`, gives part i of all to the group's replica i, and puts
    /// what arrives one after the other along `concat`.
    #[track_caller]
    pub fn all_to_all(&self, split: usize, concat: usize, groups: &[Vec<usize>]) -> Self {
        let ty = self.ty();
        let check = uniform(groups).and_then(|size| {
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
        self.then(Kind::AllToAll { split, concat, groups: groups.to_vec() }, &[], check)
    }

    /// The value of the replica that is the source of this one, in (source, target) `pairs`; zeros where there is none.
    #[track_caller]
    pub fn collective_permute(&self, pairs: &[(usize, usize)]) -> Self {
        let repeated = |i: usize| pairs[..i].iter().any(|(s, t)| *s == pairs[i].0 || *t == pairs[i].1);
        let check = match (0..pairs.len()).any(repeated) || pairs.is_empty() {
            true => Err(format!("each source and each target once expected, got {pairs:?}")),
            false => Ok(self.ty().clone()),
        };
        self.then(Kind::CollectivePermute { pairs: pairs.to_vec() }, &[], check)
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
