//! Collectives between replicas and devices.

use super::array::{Array, Elements};
use super::elementwise::combine;
use super::machine::{Machine, Values, zeros};
use super::{Fault, shape};
use crate::graph::{Kind, Reducer};
use crate::sharding::{Groups, MeshAxes};
use crate::types::TensorType;
use std::collections::BTreeMap;

/// Matches the operations that involve several devices.
macro_rules! of_devices {
    () => {
        Kind::AllReduce { .. }
            | Kind::ReduceScatter { .. }
            | Kind::AllGather { .. }
            | Kind::AllToAll { .. }
            | Kind::CollectivePermute { .. }
            | Kind::ReplicaId
            | Kind::PartitionId
            | Kind::AxisIndex(_)
    };
}
pub(super) use of_devices;

impl Machine<'_> {
    /// Runs such an operation on the given lanes and returns its only result on each of them.
    pub(super) fn meet(
        &self,
        kind: &Kind,
        lanes: &[usize],
        operands: &[Values],
        types: &[&TensorType],
    ) -> Result<Vec<Elements>, Fault> {
        let count = |n: usize| Fault::malformed(format!("{n} operands and {} results", types.len()));
        let [ty] = types else { return Err(count(operands.first().map_or(0, Vec::len))) };
        let number = |number: &dyn Fn(usize) -> Result<usize, Fault>| -> Result<Vec<Elements>, Fault> {
            if let Some(operands) = operands.iter().find(|operands| !operands.is_empty()) {
                return Err(count(operands.len()));
            }
            lanes.iter().map(|lane| Ok(Elements::Int(vec![number(*lane)? as i64]))).collect()
        };
        match kind {
            Kind::ReplicaId => return number(&|lane| self.replica(lane)),
            Kind::PartitionId => return number(&|lane| self.partition(lane)),
            Kind::AxisIndex(axes) => {
                self.along(axes)?;
                return number(&|lane| Ok(axes.place(&self.lanes[lane].coordinates)));
            }
            _ => {}
        }
        let mut values: Vec<&Array> = Vec::with_capacity(lanes.len());
        for operands in operands {
            match &operands[..] {
                [one] => values.push(one),
                _ => return Err(count(operands.len())),
            }
        }
        match kind {
            Kind::AllReduce { reducer, groups } => self.each(groups, lanes, |group, _| sum(group, &values, *reducer)),
            Kind::ReduceScatter { reducer, dimension, groups } => self.each(groups, lanes, |group, place| {
                let all = Array { ty: values[group[0]].ty.clone(), elements: sum(group, &values, *reducer)? };
                part(&all, *dimension, group.len(), place)?.elements_of(ty)
            }),
            Kind::AllGather { dimension, groups } => self.each(groups, lanes, |group, _| {
                let all: Vec<&Array> = group.iter().map(|i| values[*i]).collect();
                shape::concatenate(&all, *dimension, ty)
            }),
            Kind::AllToAll { split, concat, groups } => self.each(groups, lanes, |group, place| {
                let parts = group.iter().map(|i| part(values[*i], *split, group.len(), place));
                let parts = parts.collect::<Result<Vec<_>, _>>()?;
                shape::concatenate(&parts.iter().collect::<Vec<_>>(), *concat, ty)
            }),
            Kind::CollectivePermute { pairs, axes } => self.permute(pairs, axes.as_ref(), lanes, &values, ty),
            _ => Err(Fault::malformed("an operation of one device")),
        }
    }

    /// Calls `result` for every device with its group, as positions in `lanes`, and its position in the group.
    fn each(
        &self,
        groups: &Groups,
        lanes: &[usize],
        result: impl Fn(&[usize], usize) -> Result<Elements, Fault>,
    ) -> Result<Vec<Elements>, Fault> {
        let mut found: Vec<Option<Elements>> = vec![None; lanes.len()];
        for group in self.groups(groups, lanes)? {
            for (place, lane) in group.iter().enumerate() {
                if found[*lane].is_some() {
                    return Err(Fault::malformed(format!(
                        "replica {} in two places",
                        self.lanes[lanes[*lane]].replica
                    )));
                }
                found[*lane] = Some(result(&group, place)?);
            }
        }
        let left = found.iter().position(Option::is_none);
        match left {
            Some(i) => Err(Fault::malformed(format!("replica {} is in no group", self.lanes[lanes[i]].replica))),
            None => Ok(found.into_iter().flatten().collect()),
        }
    }

    /// Returns the groups as positions in `lanes`.
    fn groups(&self, groups: &Groups, lanes: &[usize]) -> Result<Vec<Vec<usize>>, Fault> {
        match groups {
            Groups::Replicas(groups) => {
                self.replicas_meet()?;
                let find = |replica: &usize| self.find(*replica, lanes);
                let groups = groups.iter().filter(|group| !group.is_empty());
                groups.map(|group| group.iter().map(find).collect()).collect()
            }
            Groups::Axes(axes) => {
                self.along(axes)?;
                // Grouped by the coordinates along all other axes.
                let mut found: BTreeMap<Vec<usize>, Vec<(usize, usize)>> = BTreeMap::new();
                for (i, lane) in lanes.iter().enumerate() {
                    let mut others = self.lanes[*lane].coordinates.clone();
                    let place = axes.place(&others);
                    axes.axes().iter().for_each(|axis| others[*axis] = 0);
                    found.entry(others).or_default().push((place, i));
                }
                let whole = |mut group: Vec<(usize, usize)>| {
                    group.sort_unstable();
                    if group.len() == axes.size() {
                        return Ok(group.into_iter().map(|(_, i)| i).collect());
                    }
                    let (names, size) = (axes.names().join(", "), axes.size());
                    Err(Fault::malformed(format!("{} of {size} devices along {names} reach it", group.len())))
                };
                found.into_values().map(whole).collect()
            }
        }
    }

    fn permute(
        &self,
        pairs: &[(usize, usize)],
        axes: Option<&MeshAxes>,
        lanes: &[usize],
        values: &[&Array],
        ty: &TensorType,
    ) -> Result<Vec<Elements>, Fault> {
        let mut found: Vec<Option<Elements>> = vec![None; lanes.len()];
        let mut send = |source: usize, target: usize| match found[target].replace(values[source].elements.clone()) {
            Some(_) => Err(Fault::malformed("a target receives twice")),
            None => Ok(()),
        };
        match axes {
            None => {
                self.replicas_meet()?;
                for (source, target) in pairs {
                    send(self.find(*source, lanes)?, self.find(*target, lanes)?)?;
                }
            }
            Some(axes) => {
                for group in self.groups(&Groups::Axes(axes.clone()), lanes)? {
                    for (source, target) in pairs {
                        let [source, target] = [source, target].map(|place| group.get(*place).copied());
                        let beyond = || Fault::malformed(format!("places below {} expected", group.len()));
                        send(source.ok_or_else(beyond)?, target.ok_or_else(beyond)?)?;
                    }
                }
            }
        }
        Ok(found.into_iter().map(|elements| elements.unwrap_or_else(|| zeros(ty))).collect())
    }

    /// Returns the position of a replica in `lanes`.
    fn find(&self, replica: usize, lanes: &[usize]) -> Result<usize, Fault> {
        let found = lanes.iter().position(|lane| self.lanes[*lane].replica == replica);
        found.ok_or_else(|| match self.lanes.iter().any(|lane| lane.replica == replica) {
            true => Fault::malformed(format!("replica {replica} does not reach it")),
            false => copies(),
        })
    }

    fn replicas_meet(&self) -> Result<(), Fault> {
        match self.manual {
            Some(_) => Err(Fault::malformed("replicas meet inside of a manual computation")),
            None => Ok(()),
        }
    }

    /// Checks that the running body is manual along these axes.
    fn along(&self, axes: &MeshAxes) -> Result<(), Fault> {
        match self.manual.is_some_and(|manual| axes.within(manual.axes())) {
            true => Ok(()),
            false => {
                let names = axes.names().join(", ");
                Err(Fault::malformed(format!("no computation around it is manual along {names}")))
            }
        }
    }

    fn replica(&self, lane: usize) -> Result<usize, Fault> {
        let there = self.lanes.len() == self.replicas || self.manual.is_some() && self.replicas == 1;
        if there { Ok(self.lanes[lane].replica) } else { Err(copies()) }
    }

    fn partition(&self, lane: usize) -> Result<usize, Fault> {
        match self.manual {
            None if self.partitions == 1 => Ok(0),
            Some(manual) if manual.axes().size() == manual.axes().mesh().devices() => {
                Ok(manual.axes().device(&self.lanes[lane].coordinates))
            }
            _ => Err(copies()),
        }
    }
}

fn copies() -> Fault {
    let reason = "it involves several copies of the program; for replicas, use `Interpreter::run_replicas`";
    Fault::Uninterpreted(reason.into())
}

fn sum(group: &[usize], values: &[&Array], reducer: Reducer) -> Result<Elements, Fault> {
    let (first, rest) = group.split_first().ok_or_else(|| Fault::malformed("an empty group"))?;
    let first = values[*first];
    rest.iter().try_fold(first.elements.clone(), |sum, i| {
        combine(reducer.binary(), &sum, &values[*i].elements, first.ty.dtype)
    })
}

/// Returns one of `count` equal shards along a dimension.
fn part(a: &Array, dimension: usize, count: usize, place: usize) -> Result<Array, Fault> {
    let size = a.ty.shape.get(dimension).filter(|size| size.is_multiple_of(count));
    let size = size.ok_or_else(|| Fault::malformed(format!("{} in {count} parts along {dimension}", a.ty)))? / count;
    let mut ty = a.ty.clone();
    ty.shape[dimension] = size;
    let (mut start, mut limit) = (vec![0; ty.rank()], a.ty.shape.clone());
    (start[dimension], limit[dimension]) = (place * size, (place + 1) * size);
    let elements = shape::slice(a, &start, &limit, &vec![1; ty.rank()], &ty)?;
    Ok(Array { ty, elements })
}

impl Array {
    /// Returns the elements of a tensor, or an error if its type is not `ty`.
    fn elements_of(self, ty: &TensorType) -> Result<Elements, Fault> {
        if self.ty == *ty { Ok(self.elements) } else { Err(Fault::malformed(format!("{} is no {ty}", self.ty))) }
    }
}
