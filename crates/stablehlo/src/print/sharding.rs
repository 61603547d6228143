//! Prints meshes and shardings.

use super::{List, Name, Printer, names};
use crate::graph::Operation;
use crate::sharding::{Manual, Mesh, Sharding};
use std::fmt::{self, Display, Formatter};

impl Display for Mesh {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let axes = self.axes().iter().map(|(axis, size)| format!("\"{axis}\"={size}"));
        write!(f, "@{} = <[{}]>", self.name(), List(axes.collect::<Vec<_>>()))
    }
}

impl Display for Sharding {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let dimensions: Vec<String> = self.dimensions().iter().map(|axes| braced(self.mesh(), axes)).collect();
        write!(f, "<@{}, [{}]", self.mesh().name(), List(dimensions))?;
        if !self.replicated().is_empty() {
            write!(f, ", replicated={}", braced(self.mesh(), self.replicated()))?;
        }
        f.write_str(">")
    }
}

/// Prints axes, by their indices, in braces.
fn braced(mesh: &Mesh, axes: &[usize]) -> String {
    let names = axes.iter().map(|axis| format!("\"{}\"", mesh.axis(*axis)));
    format!("{{{}}}", List(names.collect::<Vec<_>>()))
}

/// Prints the attributes of a manual computation.
fn attributes(manual: &Manual) -> String {
    format!(
        "in_shardings=[{}] out_shardings=[{}] manual_axes={}",
        List(manual.inputs()),
        List(manual.outputs()),
        braced(manual.mesh(), &(0..manual.mesh().axes().len()).collect::<Vec<_>>())
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
}
