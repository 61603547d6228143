//! Sharding of the values of programs over a device mesh, by a table of axis rules. On one device, programs have no shardings.
//!
//! * Attention is sharded by rows and heads, including blocks of scores, so that none crosses devices.
//! * A device looks up the tokens of its shard of the vocabulary for all rows; the sum over devices has every row once. If the
//!   columns of the embedding are sharded (`vocab: []`), it looks up its columns, and devices exchange them.
//! * Rows that do not divide are padded with empty rows, and a vocabulary is padded with rows of zeros, whose logits are masked. Another
//!   dimension of the model that does not divide is an error.

use super::rules::{AxisRules, legal};
use crate::decoder::Axis;
use crate::error::Result;
use crate::modules::finish;
use grpo_stablehlo::{Builder, Manual, Module, TensorType, Value, ValueId};

impl AxisRules {
    /// Constrains the sharding of `value`, and of its cotangent, by these logical axes.
    #[track_caller]
    pub(crate) fn constrain<A: Copy + Into<Option<Axis>>>(&self, value: &Value, dimensions: &[A]) -> Value {
        match self.sharding(dimensions) {
            Some(sharding) => value.constrain(&sharding),
            None => value.clone(),
        }
    }

    /// Like [`AxisRules::constrain`], but mesh axes are assigned from the last dimension to the first.
    #[track_caller]
    pub(crate) fn constrain_from_the_last(&self, value: &Value, dimensions: &[Axis]) -> Value {
        match self.sharding_from_the_last(dimensions) {
            Some(sharding) => value.constrain(&sharding),
            None => value.clone(),
        }
    }

    /// Like [`AxisRules::constrain`], for a tensor without the dimension that has the mesh axes of `taken`: these axes shard none of its dimensions.
    #[track_caller]
    pub(crate) fn constrain_after(&self, value: &Value, taken: Axis, dimensions: &[Option<Axis>]) -> Value {
        match self.sharding(&[&[Some(taken)], dimensions].concat()) {
            Some(all) => {
                let axes: Vec<Vec<&str>> = (1..all.rank()).map(|dimension| all.axes(dimension)).collect();
                let sharding = all.mesh().sharding(&axes.iter().map(Vec::as_slice).collect::<Vec<_>>());
                value.constrain(&legal(sharding))
            }
            None => value.clone(),
        }
    }

    /// Shards an argument of a program by these logical axes.
    #[track_caller]
    pub(crate) fn argument<A: Copy + Into<Option<Axis>>>(&self, argument: &Value, dimensions: &[A]) {
        if let Some(sharding) = self.sharding(dimensions) {
            argument.builder().shard(argument, &sharding);
        }
    }

    /// Shards result `index` of a program by these logical axes.
    #[track_caller]
    pub(crate) fn result<A: Copy + Into<Option<Axis>>>(&self, f: &Builder, index: usize, dimensions: &[A]) {
        if let Some(sharding) = self.sharding(dimensions) {
            f.shard_result(index, &sharding);
        }
    }

    /// Runs `body` on every device with the device's shards of `operands`, without communication. Operands and results have these logical
    /// axes; an operand whose axes differ is resharded first. On one device, `body` takes the whole operands.
    ///
    /// # Errors
    /// [`grpo_stablehlo::Error::Split`] if an operand does not shard evenly; the first illegal operation of `body`.
    pub(crate) fn on_shards(
        &self,
        f: &Builder,
        operands: &[(&Value, &[Option<Axis>])],
        results: &[&[Option<Axis>]],
        body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>,
    ) -> grpo_stablehlo::Result<Vec<Value>> {
        let (values, axes): (Vec<&Value>, Vec<&[Option<Axis>]>) = operands.iter().copied().unzip();
        if !self.is_sharded() {
            return Ok(body(f, &values.into_iter().cloned().collect::<Vec<_>>()));
        }
        let shardings =
            |axes: &[&[Option<Axis>]]| axes.iter().filter_map(|axes| self.sharding(axes)).collect::<Vec<_>>();
        let manual = Manual::new(self.mesh(), &shardings(&axes), &shardings(results))?;
        let types: Vec<TensorType> = values.iter().map(|value| value.ty().clone()).collect();
        let body = manual.trace(&types, body)?;
        Ok(f.manual(&manual, &body, &values))
    }

    /// Finishes a program. All arguments and results without a sharding are replicated.
    pub(crate) fn finish<'a>(
        &self,
        f: Builder,
        name: &str,
        results: impl IntoIterator<Item = (&'a str, &'a Value)>,
    ) -> Result<Module> {
        let mut module = finish(f, name, results)?;
        if !self.is_sharded() {
            return Ok(module);
        }
        let main = &module.main;
        let whole = |id: &ValueId| self.mesh().replicated(main.type_of(*id).rank());
        let [arguments, results] =
            [&main.body().arguments, &main.body().results].map(|ids| ids.iter().map(whole).collect::<Vec<_>>());
        for (argument, whole) in module.main.arguments.iter_mut().zip(arguments) {
            argument.sharding.get_or_insert(whole);
        }
        for (result, whole) in module.main.results.iter_mut().zip(results) {
            result.sharding.get_or_insert(whole);
        }
        Ok(module)
    }
}
