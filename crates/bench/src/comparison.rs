//! Programs that only benchmarks run, next to the programs of the loss: a baseline and a lower bound of measured times.
//!
//! Both take the arguments of a pass and return its results, so that plans run them like the loss. Both are for one
//! device.
//!
//! Legend: N tokens, V vocabulary.

use grpo_backend_tpu::program::{Blocking, Frame, Head, Pass, Program, Role, Spec};
use grpo_core::PolicySpec;
use grpo_core::error::{Error, Result};
use grpo_stablehlo::{Dtype, GatherDimensions, Reducer, Value, trace};

/// Declares the arguments of `pass`.
fn frame(spec: &Spec, pass: Pass, what: &str) -> Result<Frame> {
    // The errors of the spec.
    spec.program(pass)?;
    match spec.mesh.devices() {
        1 => Ok(Frame::new(spec, pass)),
        _ => Err(unsupported(format!("the {what} on several devices"), "compare on one")),
    }
}

fn unsupported(what: String, instead: &str) -> Error {
    Error::Unsupported { backend: "pjrt".into(), what, instead: instead.into() }
}

fn cannot_be_built(error: grpo_stablehlo::Error) -> Error {
    Error::Backend { backend: "pjrt".into(), message: format!("the materialised baseline cannot be built: {error}") }
}

/// Makes the program of the dense loss as `jax.grad` writes it for `log_softmax` and `take_along_axis`: a gather over
/// the vocabulary, its derivative by reverse mode, and gradients that are new results in the inputs' dtype.
///
/// It is not a usable implementation: a collapsed softmax loses its gradient here, and NaN in masked rows spreads.
///
/// # Errors
/// The errors of [`Spec::program`]; [`Error::Unsupported`] on several devices, or with an entropy bonus.
pub fn materialised(spec: &Spec, pass: Pass) -> Result<Program> {
    if spec.loss.entropy_coef != 0.0 {
        return Err(unsupported("the materialised baseline with an entropy bonus".into(), "set entropy_coef to 0"));
    }
    let frame = frame(spec, Pass::Score, "materialised baseline")?;
    let loss = spec.token_loss(|role| frame.argument(role));
    let (n, v) = (spec.tokens, spec.policy.vocab());
    let (factors, active) = (loss.factors(), loss.active());
    // Batching dimensions, as in JAX: with (row, column) pairs instead, TPUs flatten `[N, V]` and copy it.
    let index = loss.targets().reshape(&[n, 1, 1]);

    let inputs: &[(Role, Role)] = match spec.policy {
        PolicySpec::Logits { .. } => &[(Role::Logits, Role::GradLogits)],
        PolicySpec::Hidden { bias: false, .. } => &HEAD[..2],
        PolicySpec::Hidden { bias: true, .. } => &HEAD,
    };
    let policy: Vec<Value> = inputs.iter().map(|(role, _)| frame.argument(*role)).collect();
    let operands: Vec<&Value> = [&index, &factors.logits].into_iter().chain(&policy).collect();
    let types: Vec<_> = operands.iter().map(|value| value.ty().clone()).collect();
    let forward = trace(&types, |_, operands| {
        let [index, factor, policy @ ..] = operands else { unreachable!("an index and a factor come first") };
        let spread = |row: &Value| row.broadcast_in_dim(&[n, v], &[0]);
        let logits = match (spec.policy, policy) {
            (PolicySpec::Hidden { layout, .. }, [hidden, weight, bias @ ..]) => {
                let head = Head { weight: weight.clone(), bias: bias.first().cloned(), layout, split: None };
                head.logits(spec, hidden)
            }
            _ => policy[0].clone(),
        };
        let logits = logits.convert(Dtype::F32);
        let logits = match spec.loss.final_logit_softcapping {
            None if spec.loss.logit_scale == 1.0 => logits,
            None => &logits * logits.like(spec.loss.logit_scale),
            Some(cap) => logits.like(cap) * (&logits * logits.like(spec.loss.logit_scale / cap)).tanh(),
        };
        let scaled = &logits * spread(factor);
        let shifted = &scaled - spread(&scaled.reduce(Reducer::Max, &[1]).stop_gradient());
        let log_softmax = &shifted - spread(&shifted.exp().reduce(Reducer::Add, &[1]).log());
        vec![log_softmax.gather(index, column_of_every_row(), &[n, 1]).reshape(&[n])]
    });

    let gradients = spec.accumulators(pass);
    let position = |role: &Role| inputs.iter().position(|(_, gradient)| gradient == role);
    let differentiated: Vec<usize> = gradients.iter().filter_map(position).map(|position| position + 2).collect();
    let derivative = frame.f.vjp(&forward.map_err(cannot_be_built)?, &operands, &differentiated);
    let (at_target, pullback) = derivative.map_err(cannot_be_built)?;
    let logp = active.select(&(&at_target[0] * &factors.logp), &at_target[0].like(0.0));
    let (sums, dlogp) = loss.value_and_derivative(&logp, None);
    let found = pullback.call(&[&(dlogp * &factors.logp)]);
    let scores = [(Role::Sums, sums), (Role::Logp, logp.clone()), (Role::Entropy, logp.like(0.0))];
    let results: Vec<_> = scores.into_iter().chain(gradients.into_iter().zip(found)).collect();
    frame.finish("materialised", spec, &results)
}

/// The inputs of a head, with the roles of their gradients.
const HEAD: [(Role, Role); 3] =
    [(Role::Hidden, Role::GradHidden), (Role::LmHead, Role::GradLmHead), (Role::Bias, Role::GradBias)];

fn column_of_every_row() -> GatherDimensions {
    GatherDimensions {
        collapsed_slice_dims: vec![1],
        operand_batching_dims: vec![0],
        start_indices_batching_dims: vec![0],
        start_index_map: vec![1],
        index_vector_dim: 2,
        slice_sizes: vec![1, 1],
        ..GatherDimensions::default()
    }
}

/// Makes a program of only the products of `pass`: a lower bound of measured times.
///
/// For hidden states, the products in chunks of tokens: logits, which are used in place of their gradient, and one
/// product per gradient, added to the caller's donated accumulator. For precomputed logits, one pass that writes as much
/// as it reads. Other results are zeros.
///
/// # Errors
/// The errors of [`Spec::program`]; [`Error::Unsupported`] on several devices.
pub fn bare_products(spec: &Spec, pass: Pass) -> Result<Program> {
    let frame = frame(spec, pass, "bare products")?;
    let zeros = |role| (role, frame.f.splat(0.0, spec.type_of(role)));
    let mut results: Vec<_> = [Role::Sums, Role::Logp, Role::Entropy].into_iter().map(zeros).collect();
    match frame.head(spec) {
        None => {
            let logits = frame.argument(Role::Logits);
            results.push((Role::Logits, &logits * logits.like(-0.5)));
        }
        Some((hidden, head)) => results.extend(products(spec, &frame, &hidden, &Head { bias: None, ..head })),
    }
    frame.finish("bare", spec, &results)
}

/// Computes the gradients in a loop over chunks.
fn products(spec: &Spec, frame: &Frame, hidden: &Value, head: &Head) -> Vec<(Role, Value)> {
    let (n, h) = (hidden.shape()[0], hidden.shape()[1]);
    let chunk = match spec.blocking {
        Blocking::TokenChunks(chunk) => chunk.clamp(1, n),
        Blocking::VocabPanels(_) => n,
    };
    let roles = spec.accumulators(Pass::Gradient);
    let sums: Vec<Value> = roles.iter().map(|role| frame.argument(*role)).collect();
    let carried = frame.f.for_loop(n.div_ceil(chunk), &sums.iter().collect::<Vec<_>>(), |trip, carried| {
        // The last chunk is shifted to end at the last token; rows that count twice do not matter here.
        let start = (trip * trip.like(chunk as i64)).min(&trip.like((n - chunk) as i64));
        let at = [&start, &start.like(0)];
        let rows = hidden.dynamic_slice(&at, &[chunk, h]);
        let tile = head.logits(spec, &rows).convert(hidden.dtype());
        let add = |sum: &Value, gradient: &Value| (sum.convert(Dtype::F32) + gradient).convert(sum.dtype());
        let next = roles.iter().zip(carried).map(|(role, sum)| match role {
            Role::GradHidden => {
                let current = sum.dynamic_slice(&at, &[chunk, h]);
                sum.dynamic_update_slice(&add(&current, &head.hidden_gradient(&tile)), &at)
            }
            Role::GradLmHead => add(sum, &head.weight_gradient(&tile, &rows)),
            _ => add(sum, &tile.convert(Dtype::F32).reduce(Reducer::Add, &[0])),
        });
        next.collect()
    });
    roles.into_iter().zip(carried).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_backend_tpu::TokenTables;
    use grpo_backend_tpu::program::{MeshShape, Numerics};
    use grpo_core::backend_api::evaluate::Evaluator;
    use grpo_core::{Advantages, GradientSpec, HeadLayout, Implementation, LossConfig, TemperatureMode, TokenBatch};
    use grpo_stablehlo::Array;
    use std::collections::HashMap;

    const N: usize = 6;
    const V: usize = 13;

    fn spec(policy: PolicySpec, temperature_mode: TemperatureMode, final_logit_softcapping: Option<f64>) -> Spec {
        let logit_scale = if final_logit_softcapping.is_some() { 1.5 } else { 1.0 };
        let temperature_mode = Some(temperature_mode);
        Spec {
            loss: LossConfig { temperature_mode, logit_scale, final_logit_softcapping, ..LossConfig::default() }.into(),
            implementation: Implementation::Reference,
            tokens: N,
            policy,
            vocab_padding: 0,
            gradients: GradientSpec { bias: true, ..GradientSpec::default() },
            blocking: Blocking::TokenChunks(2),
            mosaic: None,
            sampling_mask: false,
            numerics: Numerics { entropy: false, ..Numerics::default() },
            mesh: MeshShape::default(),
        }
    }

    fn policies() -> Vec<PolicySpec> {
        let dtype = grpo_core::Dtype::F32;
        let hidden = |layout| PolicySpec::Hidden { hidden: 8, vocab: V, dtype, layout, bias: true };
        vec![hidden(HeadLayout::VocabHidden), hidden(HeadLayout::HiddenVocab), PolicySpec::Logits { vocab: V, dtype }]
    }

    /// Makes the tables of two sequences; the second token is masked, and ratios lie on both sides of the clip range.
    fn tables(spec: &Spec) -> TokenTables {
        let batch = TokenBatch::packed(vec![3, 5, 12, 0, 7, 7], vec![0, 3, N]).expect("offsets");
        let batch = batch.with_mask(&[1.0, 0.0, 1.0, 1.0, 1.0, 1.0]).expect("a mask");
        let batch = batch.with_advantages(Advantages::PerToken(vec![0.8, 0.0, -1.2, 0.5, -0.4, 1.0]));
        let batch = batch.and_then(|batch| batch.with_old_logp(vec![-2.5, 0.0, -2.7, -6.0, -1.0, -3.1]));
        let batch = batch.and_then(|batch| batch.with_temperatures(vec![0.7, 1.0, 0.7, 1.4, 1.0, 0.7])).expect("legal");
        TokenTables::new(spec, &batch, Some(&Evaluator::new(&spec.loss, &batch).expect("advantages")))
    }

    fn argument(spec: &Spec, role: Role) -> Array {
        let ty = spec.type_of(role);
        let floats = |values: Vec<f64>| Array::floats(ty.dtype, ty.shape.clone(), values);
        let tables = tables(spec);
        let made = match role {
            Role::TokenIds => Array::ints(ty.dtype, ty.shape.clone(), tables.ids.into_iter().map(i64::from)),
            Role::TokenNumbers => floats(tables.numbers.into_iter().map(f64::from).collect()),
            Role::OnPolicy => Array::preds(ty.shape.clone(), [tables.on_policy]),
            // Pseudo-random numbers in [-1, 1); accumulators begin with them, too.
            _ => {
                let number = |i: usize| ((i * 7919 + (role as usize + 1) * 104_729) % 2048) as f64 / 1024.0 - 1.0;
                floats((0..ty.elements()).map(number).collect())
            }
        };
        made.expect("as many as the shape")
    }

    fn run(spec: &Spec, program: &Program) -> HashMap<Role, Vec<f64>> {
        let arguments: Vec<Array> = program.arguments.iter().map(|role| argument(spec, *role)).collect();
        let results = program.module.interpret(&arguments).expect("it runs");
        program.results.iter().copied().zip(results.iter().map(|result| result.to_floats())).collect()
    }

    #[test]
    fn materialised_gradients_are_the_gradients_of_the_loss() {
        for policy in policies() {
            for (mode, cap) in [
                (TemperatureMode::ScaleLogits, None),
                (TemperatureMode::ScaleLogits, Some(3.0)),
                (TemperatureMode::ScaleLogprobs, None),
                (TemperatureMode::ScaleLogprobs, Some(3.0)),
            ] {
                let spec = spec(policy, mode, cap);
                let reference = run(&spec, &spec.program(Pass::Gradient).expect("a program"));
                let program = materialised(&spec, Pass::Gradient).expect("a program");
                assert!(program.arguments.iter().all(|role| !program.results.contains(role)), "its gradients are new");
                let found = run(&spec, &program);
                assert_eq!(found.len(), reference.len());
                for (role, expected) in &reference {
                    let accumulated = spec.accumulators(Pass::Gradient).contains(role);
                    let begun =
                        if accumulated { argument(&spec, *role).to_floats() } else { vec![0.0; expected.len()] };
                    let expected: Vec<f64> = expected.iter().zip(begun).map(|(sum, begun)| sum - begun).collect();
                    let largest = expected.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
                    assert!(largest > 0.01 || *role == Role::Entropy, "{role:?} exercises nothing: {expected:?}");
                    let worst = expected.iter().zip(&found[role]).fold(0.0_f64, |m, (a, b)| m.max((a - b).abs()));
                    assert!(worst <= 2e-6 * largest.max(1.0), "{policy:?} {mode:?} {role:?}: {worst} of {largest}");
                }
            }
        }
    }

    #[test]
    fn bare_products_are_added_to_the_accumulators() {
        for policy in policies() {
            let spec = spec(policy, TemperatureMode::ScaleLogits, None);
            let PolicySpec::Hidden { hidden: h, layout, .. } = policy else {
                let program = bare_products(&spec, Pass::GradientInPlace).expect("a program");
                let logits = argument(&spec, Role::Logits).to_floats();
                let halved: Vec<f64> = logits.iter().map(|z| -0.5 * z).collect();
                assert_eq!(run(&spec, &program)[&Role::Logits], halved);
                continue;
            };
            let found = run(&spec, &bare_products(&spec, Pass::Gradient).expect("a program"));
            assert_eq!(found[&Role::Sums].iter().chain(&found[&Role::Logp]).find(|x| **x != 0.0), None);
            let [x, w] = [Role::Hidden, Role::LmHead].map(|role| argument(&spec, role).to_floats());
            let weight = |v: usize, i: usize| match layout {
                HeadLayout::VocabHidden => v * h + i,
                HeadLayout::HiddenVocab => i * V + v,
            };
            let logit = |n: usize, v: usize| (0..h).map(|i| x[n * h + i] * w[weight(v, i)]).sum::<f64>();
            let [mut dx, mut dw] = [Role::GradHidden, Role::GradLmHead].map(|role| argument(&spec, role).to_floats());
            for (n, v, i) in (0..N * V * h).map(|j| (j / h / V, j / h % V, j % h)) {
                dx[n * h + i] += logit(n, v) * w[weight(v, i)];
                dw[weight(v, i)] += logit(n, v) * x[n * h + i];
            }
            for (role, expected) in [(Role::GradHidden, dx), (Role::GradLmHead, dw)] {
                let worst = expected.iter().zip(&found[&role]).fold(0.0_f64, |m, (a, b)| m.max((a - b).abs()));
                assert!(worst < 1e-4, "{layout:?} {role:?}: {worst}");
            }
        }
    }

    #[test]
    fn comparisons_on_several_devices_are_refused() {
        let spec =
            Spec { mesh: MeshShape { data: 2, tensor: 1 }, ..spec(policies()[0], TemperatureMode::ScaleLogits, None) };
        for build in [materialised, bare_products] {
            let error = build(&spec, Pass::Gradient).map(drop).expect_err("a refusal").to_string();
            assert!(error.contains("several devices"), "{error}");
        }
    }
}
