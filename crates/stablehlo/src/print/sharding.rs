//! Prints meshes, shardings and the device groups of collectives.

use super::{List, Name, Printer, names};
use crate::graph::Operation;
use crate::sharding::{Groups, Manual, Mesh, MeshAxes, Sharding};
use std::fmt::{self, Display, Formatter};

impl Display for Mesh {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let axes = self.axes().iter().map(|(axis, size)| format!("\"{axis}\"={size}"));
        write!(f, "@{} = <[{}]>", self.name(), List(axes.collect::<Vec<_>>()))
    }
}

impl Display for Sharding {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let dimensions = self.dimensions().iter().map(|dimension| {
            let axes = dimension.axes.iter().map(|axis| format!("\"{}\"", self.mesh().axis(*axis)));
            let open = dimension.open.then(|| "?".to_owned());
            format!("{{{}}}", List(axes.chain(open).collect::<Vec<_>>()))
        });
        write!(f, "<@{}, [{}]", self.mesh().name(), List(dimensions.collect::<Vec<_>>()))?;
        if !self.replicated().is_empty() {
            let axes = MeshAxes::of(self.mesh(), self.replicated().to_vec());
            write!(f, ", replicated={}", braced(&axes))?;
        }
        f.write_str(">")
    }
}

/// Prints axes in braces.
fn braced(axes: &MeshAxes) -> String {
    let names = axes.names().into_iter().map(|name| format!("\"{name}\""));
    format!("{{{}}}", List(names.collect::<Vec<_>>()))
}

/// Prints the attributes of a manual computation.
fn attributes(manual: &Manual) -> String {
    format!(
        "in_shardings=[{}] out_shardings=[{}] manual_axes={}",
        List(manual.inputs()),
        List(manual.outputs()),
        braced(manual.axes())
    )
}

impl Printer<'_> {
    pub(super) fn manual(&self, f: &mut Formatter<'_>, op: &Operation, manual: &Manual, indent: usize) -> fmt::Result {
        let [body] = &op.regions[..] else { return Err(fmt::Error) };
        let bound = body.arguments.iter().map(|id| format!("{}: {}", Name(*id), self.type_of(*id)));
        write!(f, "{}({}) {} ", op.kind.name(), names(&op.operands), attributes(manual))?;
        writeln!(f, "({}) {{", List(bound.collect::<Vec<_>>()))?;
        self.region(f, body, indent + 2, "sdy.return")?;
        write!(f, "{:indent$}}} : ({}) -> ", "", self.types(&op.operands))?;
        write!(f, "{}", self.result_types(op))
    }

    /// Prints the attributes of a collective's device groups. A channel makes groups refer to partitions instead of
    /// replicas.
    pub(super) fn devices(&self, groups: &Groups) -> String {
        if matches!(groups, Groups::Replicas(_)) {
            return format!("replica_groups = {}", ids(groups));
        }
        self.channels.set(self.channels.get() + 1);
        let handle = format!("#stablehlo.channel_handle<handle = {}, type = 1>", self.channels.get());
        format!("channel_handle = {handle}, replica_groups = {}, use_global_device_ids", ids(groups))
    }
}

/// Prints the device ids of each group.
fn ids(groups: &Groups) -> String {
    let list = match groups {
        Groups::Replicas(list) => list.clone(),
        Groups::Axes(axes) => axes.groups(),
    };
    format!("dense<{list:?}> : tensor<{}x{}xi64>", list.len(), list.first().map_or(0, Vec::len))
}
