//! Checks the section `policy` with the rest of the configuration.

use crate::policy::{ExpertProducts, PolicyAttention, PolicyConfig, PolicyDevice, PolicyDtype, RecomputeGranularity};
use crate::{ModelSource, Result, TrainConfig, check};
use grpo_core::Implementation;

impl TrainConfig {
    /// Checks that the device supports the rest of the configuration.
    pub(super) fn validate_policy(&self) -> Result<()> {
        let PolicyConfig { device, plugin, mesh, dtype, attention, compile_cache, can_roll_back, .. } = &self.policy;
        let PolicyConfig { recompute_granularity, recompute_num_layers, wait_limit_minutes, .. } = &self.policy;
        self.validate_mesh()?;
        let coef = self.policy.router_aux_loss_coef;
        if self.policy.replay_routing {
            let (engine, key) = (self.rollout.engine, "policy.replay_routing");
            let of_server = format!("false with rollout.engine {}: its completions have no experts", engine.name());
            check(!engine.is_server(), key, &of_server, true)?;
        }
        if let Some(lora) = self.lora.as_ref().filter(|lora| !lora.target_parameters.is_empty()) {
            let (engine, key) = (self.rollout.engine, "lora.target_parameters");
            let found = format!("{:?}", lora.target_parameters);
            let of_server =
                format!("[] with rollout.engine {}: adapters of experts are not sent to servers", engine.name());
            check(!engine.is_server(), key, &of_server, &found)?;
        }
        check(coef.is_finite() && coef >= 0.0, "policy.router_aux_loss_coef", "a finite number from 0", coef)?;
        if let Some(quantization) = self.policy.quantization {
            let (key, found) = ("policy.quantization", quantization.name());
            check(
                self.lora.is_some(),
                key,
                "null, or a run with the section `lora`: quantised weights are not trained",
                found,
            )?;
            let is_new = matches!(self.model, ModelSource::New(_));
            check(!is_new, key, "null, or a pretrained `model`: a new model has no weights to quantise", found)?;
        }
        if *device == PolicyDevice::Host {
            let of_device = "left out: it is for a policy.device of PJRT";
            check(plugin.is_none(), "policy.plugin", of_device, format!("{plugin:?}"))?;
            check(compile_cache.is_none(), "policy.compile_cache", of_device, format!("{compile_cache:?}"))?;
            check(mesh.is_none(), "policy.mesh", of_device, "a mesh")?;
            check(*can_roll_back, "policy.can_roll_back", "true, or a policy.device of PJRT", can_roll_back)?;
            let is_auto = *attention == PolicyAttention::Auto;
            check(is_auto, "policy.attention", "auto, or a policy.device of PJRT", format!("{attention:?}"))?;
            let products = self.policy.expert_products;
            let expected = "dense, or a policy.device of PJRT";
            check(products == ExpertProducts::Dense, "policy.expert_products", expected, format!("{products:?}"))?;
            let keeps = "full, or a policy.device of PJRT";
            let is_full = *recompute_granularity == RecomputeGranularity::Full;
            let found = serde_json::to_string(recompute_granularity).unwrap_or_default();
            check(is_full, "policy.recompute_granularity", keeps, found)?;
            let one = "1, or a policy.device of PJRT";
            check(*recompute_num_layers == 1, "policy.recompute_num_layers", one, recompute_num_layers)?;
            let (default, found) = (PolicyConfig::default().wait_limit_minutes, *wait_limit_minutes);
            let expected = format!("{default}, or a policy.device of PJRT");
            check(found == default, "policy.wait_limit_minutes", &expected, found)?;
            let is_exact = *dtype == PolicyDtype::Float32 || self.grpo.implementation != Implementation::Reference;
            let expected = "fused or logits, or policy.dtype: float32; reference computes in f32";
            return check(is_exact, "grpo.implementation", expected, self.grpo.implementation.name());
        }
        check(*wait_limit_minutes > 0, "policy.wait_limit_minutes", "1 or more", wait_limit_minutes)?;
        let saves_all = *recompute_granularity == RecomputeGranularity::None && self.policy.quantization.is_some();
        let expected =
            "full, except_attention or selective with policy.quantization: none would save dequantised weights";
        check(!saves_all, "policy.recompute_granularity", expected, "none")?;
        let groups = match recompute_granularity {
            RecomputeGranularity::Full => (*recompute_num_layers > 0, "1 or more"),
            _ => (*recompute_num_layers == 1, "1, or policy.recompute_granularity: full"),
        };
        check(groups.0, "policy.recompute_num_layers", groups.1, recompute_num_layers)?;
        let on_device = "left out: a policy.device of PJRT computes the loss itself";
        let implementation = self.grpo.implementation;
        check(implementation == Implementation::Fused, "grpo.implementation", on_device, implementation.name())
    }
}
