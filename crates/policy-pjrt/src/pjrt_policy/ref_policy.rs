//! The update of the reference policy of the KL towards the policy.

use super::{PjrtPolicy, no_ref_policy};
use crate::Argument;
use crate::decoder::{AxisRules, Parameter, Role};
use crate::error::Result;
use crate::modules::unnamed;
use crate::storage::Storage;
use grpo_stablehlo::{Builder, Dtype, Module, TensorType, Value};
use std::sync::Arc;

impl PjrtPolicy {
    /// Computes ref = alpha x policy + (1 - alpha) x ref for all trained weights, in f32; the others are equal. The result keeps f32 precision:
    /// in bf16, repeated small steps would be rounded away.
    pub(super) fn mix(&mut self, alpha: f64) -> Result<()> {
        self.weights()?;
        let Some(of_ref) = &self.ref_policy else { return Err(no_ref_policy("mix_ref_policy")) };
        if self.modules.decoder().adapters().is_some() {
            let expected = "a reference policy with weights of its own (sync_ref_model without LoRA)";
            let found = "the model beneath LoRA adapters, which is frozen";
            return Err(grpo_policy::Error::argument("mix_ref_policy", expected, found).into());
        }
        // The reference policy has no value head.
        let decoder = self.modules.decoder();
        let is_mixed = |role: Role| role.is_of_model() && decoder.trains(role);
        let (weights, of_ref, frozen) = (self.weights.subset(is_mixed), of_ref.subset(is_mixed), self.frozen()?);
        let build = |of_ref: &Storage| module(weights.table(), weights.storage(), *of_ref, self.runtime.axis_rules());
        let program = self.mix.get(&self.runtime, of_ref.storage(), build)?;
        let shares = self.runtime.upload(&[alpha as f32, (1.0 - alpha) as f32], &[2])?;
        let mut arguments = weights.arguments_with_remainders();
        arguments.extend(of_ref.arguments_with_remainders());
        arguments.push(Argument::from(&shares));
        let mixed = program.run(arguments)?;
        // Execution is asynchronous: wait for errors.
        mixed.iter().try_for_each(|tensor| tensor.wait("mixing the reference policy"))?;
        self.ref_policy = Some(frozen.followed_by(weights.with_tensors(mixed.into_iter().map(Arc::new))));
        Ok(())
    }
}

/// Builds a program from weights, reference weights and their factors, f32 `[2]`, to reference weights in the storage of the policy's
/// weights.
fn module(table: &[Parameter], storage: Storage, of_ref: Storage, rules: &AxisRules) -> Result<Module> {
    let f = Builder::new();
    let group = |storage: Storage, suffix: &str| -> Vec<Value> {
        let masters = |p: &Parameter| {
            let storage = storage.of(p);
            let values = storage.declare(&f, &format!("{}{suffix}", p.name()), &p.shape);
            values.iter().for_each(|value| rules.argument(value, &p.axes));
            storage.get(&values)
        };
        table.iter().map(masters).collect()
    };
    let (policy, of_ref) = (group(storage, ""), group(of_ref, ".ref"));
    let shares = f.argument("shares", TensorType::new(Dtype::F32, [2]));
    let share = |i: usize, like: &Value| shares.slice(&[i], &[i + 1]).reshape(&[]).broadcast_in_dim(like.shape(), &[]);
    let mix = |(new, old): (&Value, &Value)| share(0, new) * new + share(1, old) * old;
    let mixed = policy.iter().zip(&of_ref).map(mix).zip(table);
    let put = |(mixed, p): (Value, _)| storage.of(p).put(&mixed).into_iter().map(move |value| (value, p));
    let (mixed, of_results): (Vec<Value>, Vec<&Parameter>) = mixed.flat_map(put).unzip();
    of_results.iter().enumerate().for_each(|(i, p)| rules.result(&f, i, &p.axes));
    rules.finish(f.clone(), "mix_ref_policy", unnamed(&mixed))
}
