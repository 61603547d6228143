//! Checks the keys of meshes.

use crate::{LogicalAxisRules, MeshChoice, Result, TrainConfig, check};

impl TrainConfig {
    /// Checks the keys of meshes as far as they do not depend on the model and the devices.
    pub(super) fn validate_mesh(&self) -> Result<()> {
        let (policy, rollout) = (&self.policy, &self.rollout);
        let Some(mesh) = &policy.mesh else {
            let of_mesh = "left out: it is for a run with policy.mesh";
            check(policy.devices.is_none(), "policy.devices", of_mesh, format!("{:?}", policy.devices))?;
            let no_rules = policy.logical_axis_rules == LogicalAxisRules::default();
            check(no_rules, "policy.logical_axis_rules", of_mesh, "rules")?;
            return check(rollout.mesh.is_none(), "rollout.mesh", of_mesh, "a mesh");
        };
        check(policy.devices != Some(0), "policy.devices", "1 or more", 0)?;
        if let MeshChoice::Axes(axes) = mesh {
            axes.validate("policy.mesh")?;
            if let Some(devices) = policy.devices {
                axes.on_devices("policy.mesh", devices)?;
            }
        }
        if let Some(MeshChoice::Axes(axes)) = &rollout.mesh {
            axes.validate("rollout.mesh")?;
        }
        Ok(())
    }
}
