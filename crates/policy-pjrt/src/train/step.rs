//! Optimizer step of a single micro-batch as one program: loss, gradients and the optimizer's step. Unlike a step of several micro-batches, it has no
//! gradient accumulators that are read, written and zeroed between programs.

use super::optimizer::{Applied, Check, Moments, Numbers, Scalars, StateValues, update};
use super::programs::{Gradients, TrainPrograms, TrainShape};
use crate::decoder::{ParameterValues, zeros};
use crate::error::Result;
use crate::modules::unnamed;
use crate::program::Program;
use crate::weights::DeviceWeights;
use crate::{Argument, DeviceTensor};
use grpo_backend_tpu::program::Role;
use grpo_core::LossConfig;
use grpo_core::backend_api::token_columns::LossSums;
use grpo_core::objective::ValueLossConfig;
use grpo_stablehlo::{Builder, Dtype, Module, Reducer, Save, Value};

impl TrainPrograms {
    /// Builds an optimizer step on one micro-batch: its loss and gradients ([`TrainPrograms::gradient`]) and [`TrainPrograms::optimizer`]
    /// in one program. As there, the caller must know that weights and moments stay finite for every finite gradient norm.
    ///
    /// Arguments: frozen parameters; donated: trained parameters, each in bf16 followed by its remainders, and first and second moments;
    /// the inputs of the micro-batch as in the gradient program; the scalars of the step, f32. Results: the donated arguments after
    /// the step; a report, f32 `[4]`: the gradient norm, whether it is within the limit, whether parameters and moments stay finite, and
    /// whether the loss and all scores of active tokens are finite (0 or 1); then loss, scores and values as in the gradient program. If
    /// one of the three flags is 0, parameters and moments are unchanged.
    ///
    /// # Errors
    /// [`Error::Loss`](crate::Error::Loss) for an invalid loss.
    pub fn step(&self, loss: &LossConfig, of_values: Option<&ValueLossConfig>, shape: TrainShape) -> Result<Module> {
        const NAME: &str = "step";
        let (spec, table, trained) = (self.spec(loss, shape)?, self.decoder().parameters(), self.decoder().trained());
        self.check_shape(shape)?;
        let (f, rules) = (Builder::new(), self.decoder().axis_rules());
        let frozen = &table[..table.len() - trained.len()];
        let frozen = self.decoder().declare_table(&f, frozen, self.model);
        let state = StateValues::declare(&f, &trained, self.storage(), self.optimizer, rules);
        let batch = self.batch(&f, &spec, of_values, shape);
        let numbers = Numbers::argument(&f, self.optimizer);
        let counts = batch.counts();

        // The first part of a parameter is what the decoder reads.
        let read = trained.iter().zip(&state.parameters).map(|(p, parts)| (p.id(), parts[0].clone()));
        let weights = ParameterValues::new(frozen.iter().map(|(id, value)| (id, value.clone())).chain(read));
        // With groups of layers, start from zeroed accumulators, which the loop over groups adds to in place. Otherwise it holds the
        // gradients of one group in addition to the gradients of all layers: 0.72 GB more for Qwen2.5-1.5B in groups of four, according to libtpu.
        let begun = matches!(self.save, Save::Every(_))
            .then(|| trained.iter().map(|p| zeros(&f, Dtype::F32, &p.shape)).collect());
        let Gradients { sums, of_loss, others } = self.gradients(NAME, &spec, &weights, begun, batch, shape)?;
        let allowed = is_finite(&of_loss, &counts);
        let (after, report) = update(&f, &trained, &state, &sums, &numbers, Some(&allowed), Check::Bounds);
        let of_loss = of_loss.iter().map(|(role, value)| (role.name(), value));
        let others = others.iter().map(|(name, value)| (*name, value));
        let results = unnamed(&after).chain([("report", &report)]).chain(of_loss).chain(others);
        rules.finish(f.clone(), NAME, results)
    }
}

/// Returns the predicate that the loss, and log-probabilities and entropies of active tokens, are finite.
fn is_finite(of_loss: &[(Role, Value); 3], counts: &Value) -> Value {
    let [(_, sums), (_, logp), (_, entropy)] = of_loss;
    let scores = (!counts | logp.is_finite() & entropy.is_finite()).reduce(Reducer::And, &[0]);
    let at = LossSums::from_fn(|i| i).loss;
    sums.slice(&[at], &[at + 1]).reshape(&[]).is_finite() & scores
}

/// The state that a program of [`TrainPrograms::step`] updates.
pub(crate) struct StepOfState<'a> {
    pub(crate) weights: &'a mut DeviceWeights,
    pub(crate) moments: &'a mut Option<Moments>,
    /// Fresh moments before the first step.
    pub(crate) fresh: Option<Moments>,
    pub(crate) scalars: Scalars,
    /// Set to the result of the update after the step.
    pub(crate) applied: &'a mut Option<Applied>,
}

impl StepOfState<'_> {
    /// Runs `program` on the state and the micro-batch, and returns loss, scores and values. Tensors are donated only at the launch; if it
    /// fails, weights and moments are lost, except tensors with another owner.
    pub(crate) fn run(self, program: &Program, of_batch: &[&DeviceTensor]) -> Result<Vec<DeviceTensor>> {
        let Self { weights, moments, fresh, scalars, applied } = self;
        let before = Moments::taken(moments, fresh);
        let rest = of_batch.iter().copied().chain([&scalars.numbers]).map(Argument::from).collect();
        let (after, report, of_loss) = before.step(weights, program, true, rest, 0)?;
        *applied = Some(Applied::of(&report, report.last() != Some(&0.0)));
        *moments = Some(Moments { bounds: scalars.after, ..after });
        Ok(of_loss)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_stablehlo::{Array, TensorType};

    #[test]
    fn loss_and_scores_of_active_tokens_must_be_finite() {
        let is_finite_of = |loss: f64, logp: [f64; 3], entropy: [f64; 3]| {
            let f = Builder::new();
            let vector = |name, n: usize| f.argument(name, TensorType::new(Dtype::F32, [n]));
            let of_loss = [
                (Role::Sums, vector("sums", LossSums::<f64>::COUNT)),
                (Role::Logp, vector("logp", 3)),
                (Role::Entropy, vector("entropy", 3)),
            ];
            let counts = f.argument("counts", TensorType::new(Dtype::Pred, [3]));
            let module = f.clone().finish("finite", &[("finite", &is_finite(&of_loss, &counts))]).unwrap();
            // Minima over no tokens are infinite.
            let sums = LossSums::from_fn(|_| f64::INFINITY);
            let sums = LossSums { loss, ..sums };
            let floats = |values: &[f64]| Array::floats(Dtype::F32, [values.len()], values.iter().copied()).unwrap();
            let sums: Vec<f64> = sums.iter().copied().collect();
            let counts = Array::preds([3], [true, false, true]).unwrap();
            module.interpret(&[floats(&sums), floats(&logp), floats(&entropy), counts]).unwrap()[0].to_preds()[0]
        };
        let (fine, none) = ([-1.0, -2.0, -3.0], f64::NAN);
        assert!(is_finite_of(0.5, fine, [0.1; 3]));
        assert!(is_finite_of(0.5, [-1.0, none, -3.0], [0.1, f64::INFINITY, 0.1]), "the second token is masked");
        for bad in [none, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(!is_finite_of(bad, fine, [0.1; 3]));
            assert!(!is_finite_of(0.5, [-1.0, -2.0, bad], [0.1; 3]));
            assert!(!is_finite_of(0.5, fine, [bad, 0.1, 0.1]));
        }
    }
}
