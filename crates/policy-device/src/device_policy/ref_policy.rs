//! The reference policy of the KL, moved towards the policy.

use super::{DevicePolicy, no_ref_policy};
use crate::decoder::{Parameter, Role};
use crate::error::{Error, Result};
use crate::runtime::finish;
use pjrt::Argument;
use stablehlo::{Builder, Dtype, Module, TensorType, Value};
use std::sync::Arc;

impl DevicePolicy {
    /// ref = alpha x policy + (1 - alpha) x ref, weight by weight.
    pub(super) fn mix(&mut self, alpha: f64) -> Result<()> {
        self.weights()?;
        let Some(of_ref) = &self.ref_policy else { return Err(no_ref_policy("mix_ref_policy")) };
        if self.modules.decoder().adapters().is_some() {
            let expected = "a reference policy with weights of its own (sync_ref_model without LoRA)";
            let found = "the model beneath LoRA adapters, which is frozen";
            return Err(policy::Error::argument("mix_ref_policy", expected, found).into());
        }
        // Without a value head.
        let weights = self.weights.subset(Role::is_of_model);
        let program = match &self.mix {
            Some(program) => program.clone(),
            None => self.mix.insert(Arc::new(self.runtime.compile(&module(weights.table())?)?)).clone(),
        };
        let shares = self.runtime.upload(&[alpha as f32, (1.0 - alpha) as f32], &[2])?;
        let mut arguments = weights.arguments();
        arguments.extend(of_ref.arguments());
        arguments.push(Argument::from(&shares));
        let mixed = program.run(arguments)?;
        // Launched, not yet computed.
        mixed.iter().try_for_each(|buffer| buffer.wait().map_err(Error::device("mixing the reference policy")))?;
        self.ref_policy = Some(of_ref.with_buffers(mixed.into_iter().map(Arc::new).collect()));
        Ok(())
    }
}

/// The program: weights, those of the reference policy, and the shares of both, f32 `[2]`.
fn module(table: &[Parameter]) -> Result<Module> {
    let f = Builder::new();
    let group = |suffix: &str| -> Vec<Value> {
        let argument =
            |p: &Parameter| f.argument(&format!("{}{suffix}", p.name()), TensorType::new(Dtype::F32, &p.shape[..]));
        table.iter().map(argument).collect()
    };
    let (policy, of_ref) = (group(""), group(".ref"));
    let shares = f.argument("shares", TensorType::new(Dtype::F32, [2]));
    let share = |i: usize, like: &Value| shares.slice(&[i], &[i + 1]).reshape(&[]).broadcast_in_dim(like.shape(), &[]);
    let mix = |(new, old): (&Value, &Value)| share(0, new) * new + share(1, old) * old;
    let mixed: Vec<Value> = policy.iter().zip(&of_ref).map(mix).collect();
    let results: Vec<(&str, &Value)> = table.iter().map(Parameter::name).zip(&mixed).collect();
    finish(f.clone(), "mix_ref_policy", &results)
}
