//! Training programs on a device mesh: sharding of rows, hidden states, and the loss head.

use super::{TrainPrograms, TrainShape};
use crate::decoder::{Axis, Parameter};
use crate::error::Result;
use grpo_backend_tpu::program::{HeadSplit, Pass, Role, Spec};
use grpo_stablehlo::{Builder, Module, TensorType, Value};

/// Logical axes of the hidden states `[N, H]` and of the LM head.
const HIDDEN: [Axis; 2] = [Axis::Batch, Axis::Embed];
const LM_HEAD: [Axis; 2] = [Axis::Vocab, Axis::Embed];

/// Logical axes of recorded experts `[L, B, T, k]`.
pub(in crate::train) const ROUTED: [Option<Axis>; 4] = [None, Some(Axis::Batch), None, None];

impl TrainPrograms {
    /// Shards hidden states `[N, H]` by rows.
    pub(super) fn shard_hidden(&self, hidden: &Value) -> Value {
        self.decoder.axis_rules().constrain(hidden, &HIDDEN)
    }

    /// Shards the operands of the loss head. Every device gets all columns of both before the loop over tiles: with sharded columns, every
    /// tile of logits would need an all-reduce.
    pub(super) fn operands_of_head(&self, hidden: &Value, head: &Value) -> [Value; 2] {
        let rules = self.decoder.axis_rules();
        let head = rules.constrain(head, &LM_HEAD);
        [
            rules.constrain(&self.shard_hidden(hidden), &[None::<Axis>; 2]),
            rules.constrain(&head, &[Some(Axis::Vocab), None]),
        ]
    }

    /// Shards the gradient of hidden states by rows. Devices hold all rows and some columns of it: they first select their rows, then
    /// exchange columns.
    pub(super) fn rows_of_gradient(&self, dhidden: &Value) -> Value {
        self.shard_hidden(&self.decoder.axis_rules().constrain_from_the_last(dhidden, &HIDDEN))
    }

    /// Builds the operations of the loss head.
    pub(super) fn of_head(
        &self,
        f: &Builder,
        spec: &Spec,
        pass: Pass,
        arguments: Vec<(Role, Value)>,
    ) -> Result<Vec<(Role, Value)>> {
        let rules = self.decoder.axis_rules();
        let of_head = rules.sharding(&[None::<Axis>; 2]).zip(rules.sharding(&[Some(Axis::Vocab), None]));
        let of_head = of_head.map(|(rows, weight)| HeadSplit { rows, weight });
        let results = spec.operations(f, pass, arguments, of_head)?;
        Ok(results.into_iter().map(|(role, value)| (role, self.shard_gradient(role, &value))).collect())
    }

    /// Constrains the gradients that the loss head takes and returns. Each device computes its columns of the hidden states' gradient, for
    /// all tokens.
    pub(super) fn shard_gradient(&self, role: Role, value: &Value) -> Value {
        match role {
            Role::GradHidden => self.decoder.axis_rules().constrain(value, &[None, Some(Axis::Embed)]),
            Role::GradLmHead => self.decoder.axis_rules().constrain(value, &LM_HEAD),
            _ => value.clone(),
        }
    }

    /// Checks that rows `[B, T]` and hidden states `[N, H]` shard evenly.
    pub(in crate::train) fn check_shape(&self, shape: TrainShape) -> Result<()> {
        let TrainShape { rows, length, tokens, .. } = shape;
        let (rules, hidden) = (self.decoder.axis_rules(), self.config().hidden_size);
        rules.check("the rows of a micro-batch", &[(Axis::Batch, rows), (Axis::Length, length)])?;
        rules.check("the completion tokens of a micro-batch", &[(Axis::Batch, tokens), (Axis::Embed, hidden)])
    }

    /// Finishes the program with `results`. The first ones are gradients of `trained`, sharded like the parameters; the others are
    /// replicated.
    pub(super) fn finish<'a>(
        &self,
        f: &Builder,
        name: &str,
        trained: &[Parameter],
        results: impl IntoIterator<Item = (&'a str, &'a Value)>,
    ) -> Result<Module> {
        let rules = self.decoder.axis_rules();
        trained.iter().enumerate().for_each(|(i, parameter)| rules.result(f, i, &parameter.axes));
        rules.finish(f.clone(), name, results)
    }

    /// Declares the rows of a micro-batch as the next arguments.
    pub(super) fn declare_rows(&self, f: &Builder, shape: TrainShape) -> Vec<Value> {
        let declare = |(name, ty): (&str, TensorType)| {
            let argument = f.argument(name, ty);
            let axes = match argument.shape().len() {
                4 => &ROUTED[..],
                rank => &[Some(Axis::Batch), None][..rank],
            };
            self.decoder.axis_rules().argument(&argument, axes);
            argument
        };
        self.row_types(shape).into_iter().map(declare).collect()
    }

    /// Declares a token table of the loss as the next argument.
    pub(super) fn declare_table(&self, f: &Builder, spec: &Spec, role: Role) -> Value {
        let argument = f.argument(role.name(), spec.type_of(role));
        self.decoder.axis_rules().argument(&argument, table_axes(role));
        argument
    }

    /// Copies a token table to all devices, for the loss head.
    pub(super) fn whole_table(&self, table: &Value) -> Value {
        self.decoder.axis_rules().constrain(table, &vec![None::<Axis>; table.shape().len()])
    }
}

/// Returns the logical axes of a token table of the loss. The columns of ids and numbers are sharded like rows: whole tables would be in the
/// memory of every device until the end of the step.
pub(in crate::train) fn table_axes(role: Role) -> &'static [Option<Axis>] {
    match role {
        Role::TokenIds | Role::TokenNumbers => &[None, Some(Axis::Batch)],
        Role::SamplingMask => &[None, None],
        _ => &[],
    }
}
