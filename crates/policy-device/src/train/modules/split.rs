//! The programs of training on a mesh: what is split of rows and hidden states, and how the head of the loss takes them.

use super::{TrainModules, TrainShape, row_types};
use crate::decoder::{Axis, Parameter};
use crate::error::Result;
use crate::runtime::finish;
use backend_tpu::program::{HeadSplit, Pass, Role, Spec};
use stablehlo::{Builder, Module, TensorType, Value};

/// What the dimensions of the hidden states `[N, H]` count, and those of the LM head.
const HIDDEN: [Axis; 2] = [Axis::Batch, Axis::Embed];
const LM_HEAD: [Axis; 2] = [Axis::Vocab, Axis::Embed];

impl TrainModules {
    /// Hidden states `[N, H]`, of which every device has rows.
    pub(super) fn split_hidden(&self, hidden: &Value) -> Value {
        self.decoder.split().constrain(hidden, &HIDDEN)
    }

    /// Hidden states and the LM head as the head of the loss takes them. Every device has all columns of both before the loop over tiles
    /// begins: where they were split, the logits of every tile would be sums of what all devices have.
    pub(super) fn operands_of_head(&self, hidden: &Value, head: &Value) -> [Value; 2] {
        let split = self.decoder.split();
        let head = split.constrain(head, &LM_HEAD);
        [
            split.constrain_named(&self.split_hidden(hidden), &[None, None]),
            split.constrain_named(&head, &[Some(Axis::Vocab), None]),
        ]
    }

    /// The gradient of hidden states as their rows are split. Devices that have all rows and some columns of it keep their rows first, and then
    /// send each other columns.
    pub(super) fn rows_of_gradient(&self, dhidden: &Value) -> Value {
        self.split_hidden(&self.decoder.split().constrain_from_the_last(dhidden, &HIDDEN))
    }

    /// What the head of the loss makes of its arguments.
    pub(super) fn of_head(
        &self,
        f: &Builder,
        spec: &Spec,
        pass: Pass,
        arguments: Vec<(Role, Value)>,
    ) -> Result<Vec<(Role, Value)>> {
        let split = self.decoder.split();
        let of_head = split.named(&[None, None]).zip(split.named(&[Some(Axis::Vocab), None]));
        let results = match of_head {
            Some((rows, weight)) => spec.operations_on_mesh(f, pass, arguments, &HeadSplit { rows, weight })?,
            None => spec.operations(f, pass, arguments)?,
        };
        Ok(results.into_iter().map(|(role, value)| (role, self.split_gradient(role, &value))).collect())
    }

    /// What the head of the loss takes or returns in this role. Of the gradient of hidden states a device makes its columns of all tokens.
    pub(super) fn split_gradient(&self, role: Role, value: &Value) -> Value {
        match role {
            Role::GradHidden => self.decoder.split().constrain_named(value, &[None, Some(Axis::Embed)]),
            Role::GradLmHead => self.decoder.split().constrain(value, &LM_HEAD),
            _ => value.clone(),
        }
    }

    /// Checks that rows `[B, T]` and hidden states `[N, H]` split evenly.
    pub(in crate::train) fn check_split(&self, shape: TrainShape) -> Result<()> {
        let TrainShape { rows, length, tokens, .. } = shape;
        let (split, hidden) = (self.decoder.split(), self.config().hidden_size);
        split.check("the rows of a micro-batch", &[(Axis::Batch, rows), (Axis::Length, length)])?;
        split.check("the completion tokens of a micro-batch", &[(Axis::Batch, tokens), (Axis::Embed, hidden)])
    }

    /// The program that returns `results`. The first are gradients of `trained`, split as the parameters are; behind them are numbers of
    /// tokens and of the whole micro-batch, which every device has.
    pub(super) fn finish(
        &self,
        f: &Builder,
        name: &str,
        trained: &[Parameter],
        results: &[(&str, &Value)],
    ) -> Result<Module> {
        let split = self.decoder.split();
        trained.iter().enumerate().for_each(|(i, parameter)| split.result(f, i, &parameter.axes));
        Ok(split.complete(finish(f.clone(), name, results)?))
    }

    /// Declares the rows of a micro-batch as the next arguments.
    pub(super) fn declare_rows(&self, f: &Builder, shape: TrainShape) -> Vec<Value> {
        let declare = |(name, ty): (&str, TensorType)| {
            let argument = f.argument(name, ty);
            if argument.shape().len() == 2 {
                self.decoder.split().argument(&argument, &[Axis::Batch, Axis::Length]);
            }
            argument
        };
        row_types(shape).into_iter().map(declare).collect()
    }
}
