//! Checks of whole functions that are sharded over devices.

use super::Mesh;
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
        Kind::Manual(manual) => Some(manual.mesh()),
        _ => None,
    }
}

/// Checks the function as a whole: meshes must agree, and the body of a manual computation is for one device, without
/// shardings. Returns the name of the first illegal operation and the reason.
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
    region(&function.body, false)
}

fn region(code: &Region, for_one_device: bool) -> Result<(), (&'static str, String)> {
    for op in &code.operations {
        let is_manual = matches!(op.kind, Kind::Manual(_));
        if for_one_device && (is_manual || matches!(op.kind, Kind::Constrain(_))) {
            return Err((op.kind.name(), "inside of a manual computation, whose body is for one device".into()));
        }
        op.regions.iter().try_for_each(|r| region(r, for_one_device || is_manual))?;
    }
    Ok(())
}
