//! Sums over devices, and the ids of devices.

use super::Fault;
use super::array::{Array, Elements};
use super::elementwise::combine;
use super::machine::{Machine, Values};
use crate::graph::{Kind, Reducer};
use crate::sharding::{Groups, MeshAxes};
use std::collections::BTreeMap;

/// Matches the operations that involve several devices.
macro_rules! of_devices {
    () => {
        Kind::AllReduce { .. } | Kind::ReplicaId | Kind::PartitionId | Kind::AxisIndex(_)
    };
}
pub(super) use of_devices;

impl Machine<'_> {
    /// Runs such an operation on the given lanes and returns its only result on each of them.
    pub(super) fn meet(&self, kind: &Kind, lanes: &[usize], operands: &[Values]) -> Result<Vec<Elements>, Fault> {
        let number = |number: &dyn Fn(usize) -> Result<usize, Fault>| -> Result<Vec<Elements>, Fault> {
            lanes.iter().map(|lane| Ok(Elements::Int(vec![number(*lane)? as i64]))).collect()
        };
        match kind {
            Kind::AllReduce { reducer, groups } => self.all_reduce(*reducer, groups, lanes, operands),
            Kind::ReplicaId if self.replicas == 1 => number(&|_| Ok(0)),
            Kind::PartitionId => number(&|lane| self.partition(lane)),
            Kind::AxisIndex(axes) => {
                self.along(axes)?;
                number(&|lane| Ok(axes.place(&self.lanes[lane].coordinates)))
            }
            _ => Err(copies()),
        }
    }

    fn all_reduce(
        &self,
        reducer: Reducer,
        groups: &Groups,
        lanes: &[usize],
        operands: &[Values],
    ) -> Result<Vec<Elements>, Fault> {
        let axes = match groups {
            Groups::Axes(axes) => axes,
            // Each replica is alone.
            Groups::Replicas(groups) if groups.iter().all(|group| group.len() == 1) => {
                return Ok(operands.iter().map(|operands| operands[0].elements.clone()).collect());
            }
            Groups::Replicas(_) => return Err(copies()),
        };
        self.along(axes)?;
        // Grouped by the coordinates along all other axes; in a group, by position.
        let others = |lane: usize| {
            let mut others = self.lanes[lane].coordinates.clone();
            axes.axes().iter().for_each(|axis| others[*axis] = 0);
            others
        };
        let mut found: BTreeMap<Vec<usize>, BTreeMap<usize, &Values>> = BTreeMap::new();
        for (lane, operands) in lanes.iter().zip(operands) {
            let place = axes.place(&self.lanes[*lane].coordinates);
            found.entry(others(*lane)).or_default().insert(place, operands);
        }
        if let Some(group) = found.values().find(|group| group.len() < axes.size()) {
            let (names, size) = (axes.names().join(", "), axes.size());
            return Err(Fault::Malformed(format!("{} of {size} devices along {names} reach it", group.len())));
        }
        let sum = |(others, group): (Vec<usize>, BTreeMap<usize, &Values>)| {
            let parts = group.into_values().map(|operands| (*operands[0]).clone());
            let sum = parts.reduce(|a, b| Array {
                elements: combine(reducer.binary(), &a.elements, &b.elements, a.ty.dtype),
                ty: a.ty,
            });
            Some((others, sum?.elements))
        };
        let sums: BTreeMap<Vec<usize>, Elements> = found.into_iter().filter_map(sum).collect();
        Ok(lanes.iter().map(|lane| sums[&others(*lane)].clone()).collect())
    }

    /// Checks that the running body is manual along these axes.
    fn along(&self, axes: &MeshAxes) -> Result<(), Fault> {
        match self.manual.is_some_and(|manual| axes.within(manual.axes())) {
            true => Ok(()),
            false => {
                let names = axes.names().join(", ");
                Err(Fault::Malformed(format!("no computation around it is manual along {names}")))
            }
        }
    }

    fn partition(&self, lane: usize) -> Result<usize, Fault> {
        match self.manual {
            None if self.partitions == 1 => Ok(0),
            Some(manual) if !manual.is_partial() => Ok(manual.axes().device(&self.lanes[lane].coordinates)),
            _ => Err(copies()),
        }
    }
}

fn copies() -> Fault {
    Fault::Uninterpreted("it involves several copies of the program".into())
}
