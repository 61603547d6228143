//! Checks of whole functions that are sharded over devices.

use super::{Groups, Manual, Mesh, MeshAxes, Sharding};
use crate::graph::{Function, Kind, Region};

impl Function {
    /// Returns the meshes of the function's operations, arguments and results, in order of appearance.
    pub fn meshes(&self) -> Vec<Mesh> {
        let mut found: Vec<Mesh> = vec![];
        let mut add = |mesh: &Mesh| {
            if !found.contains(mesh) {
                found.push(mesh.clone());
            }
        };
        let ends = self.arguments.iter().map(|a| &a.sharding).chain(self.results.iter().map(|r| &r.sharding));
        ends.flatten().for_each(|sharding| add(sharding.mesh()));
        self.visit(|op| {
            if let Some(mesh) = mesh(&op.kind) {
                add(mesh);
            }
        });
        found
    }
}

/// Returns the mesh of an operation.
fn mesh(kind: &Kind) -> Option<&Mesh> {
    match kind {
        Kind::Constrain(sharding) => Some(sharding.mesh()),
        Kind::Manual(manual) => Some(manual.axes().mesh()),
        kind => axes(kind).map(MeshAxes::mesh),
    }
}

/// Returns the axes of a collective, or of an axis index.
fn axes(kind: &Kind) -> Option<&MeshAxes> {
    match kind {
        Kind::AxisIndex(axes) | Kind::AllReduce { groups: Groups::Axes(axes), .. } => Some(axes),
        _ => None,
    }
}

/// Checks the function as a whole.
///
/// Meshes must agree; collectives along mesh axes must be inside manual computations; operations that refer to replicas
/// or other axes must be outside. Returns the name of the first illegal operation and the reason.
pub(crate) fn check(function: &Function) -> Result<(), (&'static str, String)> {
    let meshes = function.meshes();
    for (i, mesh) in meshes.iter().enumerate() {
        if let Some(other) = meshes[..i].iter().find(|m| m.name() == mesh.name()) {
            let [one, other] = [other, mesh].map(Mesh::to_string);
            return Err(("sdy.mesh", format!("two meshes of one name, `{one}` and `{other}`")));
        }
        if mesh.devices() != meshes[0].devices() {
            return Err(("sdy.mesh", format!("meshes of as many devices expected, got `{}` and `{mesh}`", meshes[0])));
        }
    }
    region(&function.body, None)
}

fn region(code: &Region, around: Option<&Manual>) -> Result<(), (&'static str, String)> {
    for op in &code.operations {
        let refuse = |reason: String| Err((op.kind.name(), reason));
        let mut inside = around;
        match (&op.kind, around) {
            (Kind::Manual(_), Some(outer)) => {
                let outer = outer.axes().names().join(", ");
                return refuse(format!("it is inside of another one, along {outer}; name all axes there"));
            }
            (Kind::Manual(manual), None) => inside = Some(manual),
            (Kind::Constrain(sharding), Some(manual)) => constrains(sharding, manual).or_else(refuse)?,
            (kind, around) => match (axes(kind), around) {
                (Some(axes), None) => {
                    let names = axes.names().join(", ");
                    return refuse(format!("along {names} outside of a manual computation (`Builder::manual`)"));
                }
                (Some(axes), Some(manual)) if !axes.within(manual.axes()) => {
                    let (names, manual) = (axes.names().join(", "), manual.axes().names().join(", "));
                    return refuse(format!("along {names} inside of a computation that is manual along {manual}"));
                }
                (None, Some(_)) if matches!(kind, Kind::AllReduce { .. }) => {
                    return refuse("by replicas inside of a manual computation; name axes of its mesh".into());
                }
                _ => {}
            },
        }
        op.regions.iter().try_for_each(|r| region(r, inside))?;
    }
    Ok(())
}

fn constrains(sharding: &Sharding, manual: &Manual) -> Result<(), String> {
    let (mesh, axes) = (manual.axes().mesh(), manual.axes().axes());
    if sharding.mesh() != mesh {
        return Err(format!("{sharding} inside of a computation that is manual on `{mesh}`"));
    }
    match axes.iter().find(|axis| sharding.uses(**axis)) {
        Some(axis) => Err(format!("{sharding} inside of a computation that is manual along {}", mesh.axis(*axis))),
        None => Ok(()),
    }
}
