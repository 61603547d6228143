//! Gradients of a micro-batch: the backward pass from the loss head through the decoder.

use super::{Batch, Outputs, TrainPrograms, TrainShape};
use crate::decoder::{Matrix, Parameter, ParameterValues, Role as ParameterRole, zeros};
use crate::error::Result;
use crate::modules::program_error;
use grpo_backend_tpu::program::{Pass, Role, Spec, ValueTable, value_gradient};
use grpo_stablehlo::{Dtype, Value, trace};

/// Results of a micro-batch.
pub(in crate::train) struct Gradients {
    /// Gradients of [`crate::decoder::Decoder::trained`], added to the accumulators.
    pub(in crate::train) sums: Vec<Value>,
    /// The loss, log-probabilities and entropies.
    pub(in crate::train) of_loss: [(Role, Value); 3],
    /// Values `[N]` with a value head, the tokens of each expert `[L, E]` with experts, the load balancing loss, and the comparison with recorded
    /// experts, with their names.
    pub(in crate::train) others: Vec<(&'static str, Value)>,
}

impl TrainPrograms {
    /// Builds the loss of a micro-batch and the gradients of all trained parameters, added to the accumulators `begun`, if any. `name` is
    /// the program's name in errors.
    pub(in crate::train) fn gradients(
        &self,
        name: &'static str,
        spec: &Spec,
        weights: &ParameterValues,
        begun: Option<Vec<Value>>,
        batch: Batch,
        shape: TrainShape,
    ) -> Result<Gradients> {
        let (table, trained) = (self.decoder.parameters(), self.decoder.trained());
        let mut sums: Vec<Option<Value>> = match begun {
            Some(begun) => begun.into_iter().map(Some).collect(),
            None => vec![None; trained.len()],
        };
        let f = &batch.rows[0].builder();
        let outputs = Outputs { values: batch.of_values.is_some(), routers: true };
        let forward = self.forward(&table, shape, outputs).map_err(program_error(name))?;
        let arguments = self.arguments(&table, weights, &batch, outputs);
        // Indices of trained parameters among the arguments of `forward` and among the accumulators.
        let place = |id| trained.iter().position(|p| p.id() == id);
        let inside = table.iter().filter(|p| outputs.depend_on(p.role)).enumerate();
        let (asked, places): (Vec<usize>, Vec<usize>) = inside.filter_map(|(i, p)| Some((i, place(p.id())?))).unzip();
        let (mut results, pullback) = match asked.is_empty() {
            // Only the head has adapters.
            true => (f.call(&forward, &arguments), None),
            false => {
                // Gradients have f32 precision, whatever the dtype of the weights.
                let pulled = f.vjp_unrounded(&forward, &arguments, &asked);
                let (results, pullback) = pulled.map_err(program_error(name))?;
                (results, Some(pullback))
            }
        };
        let mut routers = results.split_off(1 + usize::from(outputs.values));
        let replay = if shape.routed_experts { routers.pop() } else { None };
        let aux_loss = (routers.len() > 1).then(|| routers.swap_remove(1));
        let tokens = routers.pop();
        let values = (results.len() > 1).then(|| results.swap_remove(1));
        let hidden = &results[0];
        let dvalues = values.as_ref().zip(batch.of_values.as_ref()).map(|(values, (of, table))| {
            let row = |i: usize| table.slice(&[i, 0], &[i + 1, shape.tokens]).reshape(&[shape.tokens]);
            let [old_values, returns, weights] = [row(0), row(1), row(2)];
            value_gradient(of, ValueTable { values, old_values: &old_values, returns: &returns, weights: &weights })
        });

        let adapter = weights.adapter(Matrix::LmHead);
        let place_of_head = self.trained_head().and_then(|role| place((role, 0)));
        let of_head = place_of_head.map(|i| match (adapter, &sums[i]) {
            (None, Some(begun)) => begun.clone(),
            // The adapted head is a separate tensor with its own gradient.
            _ => f.splat(0.0, spec.type_of(Role::GradLmHead)),
        });
        let dhidden = f.splat(0.0, spec.type_of(Role::GradHidden));
        let sums_of_loss =
            std::iter::once((Role::GradHidden, dhidden)).chain(of_head.map(|sum| (Role::GradLmHead, sum)));
        let to_head = self.to_head(weights, hidden, batch.tables, sums_of_loss);
        let of_loss = self.of_head(f, spec, Pass::Gradient, to_head)?;
        let result = |role: Role| match of_loss.iter().find(|(r, _)| *r == role) {
            Some((_, value)) => value,
            None => unreachable!("the program of gradients returns {role:?}"),
        };

        if let Some(adapter) = adapter {
            let types = adapter.map(|value| value.ty().clone());
            let low_rank = trace(&types, |_, values| vec![self.decoder.low_rank([&values[0], &values[1]])]);
            let low_rank = low_rank.map_err(program_error(name))?;
            let (_, pullback) = f.vjp(&low_rank, &adapter, &[0, 1]).map_err(program_error(name))?;
            let places = [ParameterRole::LoraA(Matrix::LmHead), ParameterRole::LoraB(Matrix::LmHead)]
                .map(|role| place((role, 0)));
            let places: Vec<usize> = places.into_iter().flatten().collect();
            let begun: Vec<Option<&Value>> = places.iter().map(|i| sums[*i].as_ref()).collect();
            let added = pullback.add_to_begun(&[result(Role::GradLmHead)], &begun);
            places.into_iter().zip(added).for_each(|(i, sum)| sums[i] = Some(sum));
        } else if let Some(i) = place_of_head {
            sums[i] = Some(result(Role::GradLmHead).clone());
        }
        if let Some(pullback) = pullback {
            let dhidden = result(Role::GradHidden).convert(hidden.dtype());
            let dhidden = self.rows_of_gradient(&dhidden);
            // The numbers of tokens have no gradient.
            let [dtokens, dreplay] = [&tokens, &replay].map(|count| count.as_ref().map(|count| count.like(0.0)));
            let of_routers = dtokens.iter().chain(&batch.aux_loss_factor).chain(&dreplay);
            let cotangents: Vec<&Value> = std::iter::once(&dhidden).chain(&dvalues).chain(of_routers).collect();
            let begun: Vec<Option<&Value>> = places.iter().map(|i| sums[*i].as_ref()).collect();
            // The gradients of layers are added to the accumulators in place, within the loop over layers.
            let added = pullback.add_to_begun(&cotangents, &begun);
            places.into_iter().zip(added).for_each(|(i, sum)| sums[i] = Some(sum));
        }
        let whole = |(sum, p): (Option<Value>, &Parameter)| sum.unwrap_or_else(|| zeros(f, Dtype::F32, &p.shape));
        let sums = sums.into_iter().zip(&trained).map(whole).collect();
        let of_loss = [Role::Sums, Role::Logp, Role::Entropy].map(|role| (role, result(role).clone()));
        let others =
            [("values", values), ("expert_tokens", tokens), ("aux_loss", aux_loss), ("routing_replay", replay)];
        let others = others.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
        Ok(Gradients { sums, of_loss, others })
    }
}
