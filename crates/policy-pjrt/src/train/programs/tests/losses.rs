//! Gradients of a micro-batch for every option of the losses, in f64 in the interpreter, against the oracle's loss on the same decoder.

use super::*;
use crate::Error;
use grpo_backend_cpu::oracle::{self, Evaluation, Policy};
use grpo_core::backend_api::token_columns::LossSums;
use grpo_core::batch::{PolicyValues, TokenBatch};
use grpo_core::{Advantages, LossType};
use serde_json::{Map, Value as Json, json};

const LEVELS: [&str; 3] = ["token", "sequence", "sequence_token"];
const ESTIMATORS: [&str; 9] = ["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+", "low_var_kl+", "abs+"];
const IMPORTANCES: [&str; 4] = ["off", "ratio", "score_function", "sampler"];

/// A decoder and its outputs for some sequences.
struct Setting {
    modules: TrainPrograms,
    sequences: Vec<Sequence>,
    shape: TrainShape,
    weights: Vec<Array>,
    rows: Vec<Array>,
    /// The program from weights, rows and the cotangent of hidden states to hidden states and gradients.
    pullback: Module,
    hidden: Vec<f64>,
    lm_head: Vec<f64>,
}

impl Setting {
    fn new() -> Self {
        let modules = modules(attention(false), false);
        let of = |prompt: &[u32], completion: &[u32]| Sequence { prompt: prompt.into(), completion: completion.into() };
        let sequences = vec![of(&[1, 7, 4], &[5, 8, 2, 9, 10, 4, 6]), of(&[3], &[6]), of(&[2, 5], &[9, 3, 2, 7, 1, 8])];
        let packing = alone(&sequences);
        let rows = BatchRows::packed(&sequences, &packing, packing.shape(&sequences));
        let (shape, weights, rows) = (rows.shape, weights(&modules), rows_of(&modules, &rows));
        let pullback = pullback(&modules, shape);
        let table = modules.decoder().parameters();
        let head = table.iter().position(|p| p.role == ParameterRole::LmHead).unwrap();
        let lm_head = weights[head].to_floats();
        let mut setting = Self { modules, sequences, shape, weights, rows, pullback, hidden: vec![], lm_head };
        let none = vec![0.0; shape.tokens * setting.modules.config().hidden_size];
        setting.hidden = setting.pull(&none).swap_remove(0);
        setting
    }

    fn pull(&self, cotangent: &[f64]) -> Vec<Vec<f64>> {
        let shape = [self.shape.tokens, self.modules.config().hidden_size];
        let mut cotangent = cotangent.to_vec();
        cotangent.resize(shape[0] * shape[1], 0.0);
        let cotangent = Array::floats(Dtype::F32, shape, cotangent).unwrap();
        let arguments = [&self.weights[..], &self.rows, &[cotangent]].concat();
        self.pullback.interpret(&arguments).unwrap().iter().map(Array::to_floats).collect()
    }

    /// Evaluates the oracle on the hidden states.
    fn oracle(&self, loss: &LossConfig, batch: &TokenBatch, of: Oracle) -> Evaluation<f64> {
        let hidden = &self.hidden[..batch.tokens() * self.modules.config().hidden_size];
        let policy = Policy::hidden(hidden, &self.lm_head, None, HeadLayout::VocabHidden, VOCAB as usize);
        of(loss, &policy, batch).unwrap()
    }

    /// Creates completion tokens with all inputs of losses, and ratios on both sides of every clip bound.
    fn batch(&self, loss: &LossConfig) -> TokenBatch {
        const RATIOS: [f64; 11] = [0.02, -0.12, 0.33, -0.03, 0.1, -0.31, 0.15, 0.3, -0.34, -0.09, 0.04];
        let batch = token_batch(&self.sequences).unwrap();
        let logp = self.oracle(loss, &batch, oracle::score).logp;
        let near = |step: usize, lean: f64| -> Vec<f32> {
            let ratio = |i: usize| RATIOS[(step * i + step) % RATIOS.len()] + lean;
            logp.iter().enumerate().map(|(i, logp)| (logp - ratio(i)) as f32).collect()
        };
        let batch = batch.with_advantages(Advantages::PerSequence(vec![1.3, -0.9, -0.7])).unwrap();
        let batch = batch.with_old_logp(near(1, 0.05)).unwrap().with_ref_logp(near(3, 0.0)).unwrap();
        match loss.asks_for_sampler_logp() {
            true => batch.with_sampler_logp(near(4, 0.1)).unwrap(),
            false => batch,
        }
    }

    /// Fails unless loss and gradients of the gradient program match the oracle, each to 1e-5 of its largest entry.
    fn check(&self, what: &str, loss: &LossConfig) {
        let batch = self.batch(loss);
        let expected = self.oracle(loss, &batch, oracle::evaluate);

        let scored = |batch: &TokenBatch| {
            let Evaluation { logp, entropy, .. } = self.oracle(loss, batch, oracle::score);
            Ok::<_, grpo_core::Error>(PolicyValues { logp, entropy })
        };
        let prepared = loss.prepare(&batch, scored).unwrap();
        let evaluator = Evaluator::new(loss, &prepared).unwrap();
        let spec = self.modules.head(loss, self.shape.tokens).unwrap();
        let trained = self.modules.decoder().trained();
        let mut arguments = self.weights.clone();
        arguments.extend(trained.iter().map(|p| floats(&p.shape, vec![0.0; p.shape.iter().product()])));
        arguments.extend(self.rows.iter().cloned());
        arguments.extend(tables_of(&spec, &TokenTables::new(&spec, &prepared, Some(&evaluator))));
        let module = self.modules.gradient(loss, None, self.shape).unwrap();
        let found: Vec<_> = module.interpret(&arguments).unwrap().iter().map(Array::to_floats).collect();

        let of_loss = LossSums::<f64>::from_fn(|i| found[trained.len()][i]).loss;
        let bound = 1e-5 * expected.magnitude;
        assert!((of_loss - expected.loss).abs() <= bound && bound > 0.0, "{what}: {of_loss} {}", expected.loss);
        let mut of_decoder = self.pull(&expected.grad_hidden).into_iter().skip(1);
        for (parameter, found) in trained.iter().zip(&found) {
            let expected = match parameter.role {
                ParameterRole::LmHead => expected.grad_lm_head.clone(),
                _ => of_decoder.next().unwrap(),
            };
            let largest = expected.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            let off = found.iter().zip(&expected).fold(0.0, |m: f64, (f, e)| m.max((f - e).abs()));
            let is_close = off <= 1e-5 * largest && largest > 1e-9 && found.iter().all(|x| x.is_finite());
            assert!(
                is_close && found.len() == expected.len(),
                "{what}, {}: off by {off} of {largest}",
                parameter.name()
            );
        }
    }
}

type Oracle = fn(&LossConfig, &Policy<'_, f64>, &TokenBatch) -> grpo_core::Result<Evaluation<f64>>;

/// Builds the decoder's forward and backward pass without a loss.
fn pullback(modules: &TrainPrograms, shape: TrainShape) -> Module {
    let (f, decoder) = (Builder::new(), modules.decoder());
    let table = decoder.parameters();
    let weights = decoder.declare(&f, Dtype::F32);
    let batch = modules.batch_of_rows(&f, shape);
    let hidden = TensorType::new(Dtype::F32, [shape.tokens, modules.config().hidden_size]);
    let cotangent = f.argument("cotangent", hidden);
    let forward = modules.forward(&table, shape, Outputs::default()).unwrap();
    let arguments = modules.arguments(&table, &weights, &batch, Outputs::default());
    let inside: Vec<usize> = (0..arguments.len() - batch.rows.len()).collect();
    assert_eq!(inside.len() + 1, decoder.trained().len(), "all but the LM head are inside");
    let (results, pullback) = f.vjp(&forward, &arguments, &inside).unwrap();
    let gradients = pullback.call(&[&cotangent]);
    let results: Vec<(&str, &Value)> = results.iter().chain(&gradients).map(|value| ("", value)).collect();
    f.finish("pullback", &results).unwrap()
}

/// Parses a configuration; returns the error text if it is invalid.
fn loss(keys: &[(&str, Json)]) -> Result<LossConfig, String> {
    let keys: Map<String, Json> = keys.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    LossConfig::from_json(&Json::Object(keys).to_string()).map_err(|error| error.to_string())
}

/// Losses that are defined at one level reject the others with an error that names the key.
#[test]
fn every_loss_at_every_level_has_the_oracles_gradient() {
    let (setting, mut refused) = (Setting::new(), vec![]);
    for loss_type in LossType::ALL {
        let mut keys =
            vec![("loss_type", json!(loss_type.name())), ("beta", json!(0.1)), ("entropy_coef", json!(0.02))];
        keys.extend(match loss_type.name() {
            "dr_grpo" => vec![("max_completion_length", json!(8))],
            "cispo" => vec![("epsilon_high", json!(1.3))],
            "dro" => vec![("dro_beta", json!(0.7))],
            "vanilla" => vec![("semantics", json!("verl"))],
            _ => vec![],
        });
        let own = loss(&keys).unwrap_or_else(|error| panic!("{keys:?}: {error}"));
        setting.check(loss_type.name(), &own);
        for level in LEVELS {
            let what = format!("{} at {level}", loss_type.name());
            let importance_sampling_level = serde_json::from_value(json!(level)).unwrap();
            let loss = LossConfig { importance_sampling_level, ..own.clone() };
            match loss.validate() {
                Ok(()) => setting.check(&what, &loss),
                Err(_) => {
                    let error = setting.modules.gradient(&loss, None, setting.shape).unwrap_err();
                    let Error::Loss(grpo_core::Error::Key { key, message }) = &error else { panic!("{what}: {error}") };
                    assert_eq!(key, "importance_sampling_level", "{what}: {message}");
                    assert!(message.starts_with(loss_type.name()), "{what}: {message}");
                    refused.push(what);
                }
            }
        }
    }
    assert!(
        refused.iter().any(|what| what == "gspo at token") && refused.len() < LossType::ALL.len() * 2,
        "{refused:?}"
    );
}

#[test]
fn every_estimator_of_the_kl_at_every_level_has_the_oracles_gradient() {
    let setting = Setting::new();
    for level in LEVELS {
        for estimator in ESTIMATORS {
            for importance in IMPORTANCES {
                let what = format!("{estimator} at {level}, importance {importance}");
                let keys = [
                    ("importance_sampling_level", json!(level)),
                    ("kl_estimator", json!(estimator)),
                    ("kl_importance", json!(importance)),
                    ("beta", json!(0.4)),
                ];
                let loss = loss(&keys);
                // The gradient of k2 has no ratio.
                match (estimator.ends_with('+') && importance != "off", loss) {
                    (false, loss) => setting.check(&what, &loss.unwrap_or_else(|error| panic!("{what}: {error}"))),
                    (true, loss) => {
                        let error = loss.expect_err(&what);
                        assert!(error.contains("kl_importance"), "{what}: {error}");
                    }
                }
            }
        }
    }
}

/// Aggregations, sampler corrections and temperatures, with the names of both TRL and verl.
#[test]
fn every_aggregation_correction_and_temperature_has_the_oracles_gradient() {
    let setting = Setting::new();
    let check = |keys: &[(&str, Json)]| {
        let what = format!("{keys:?}");
        setting.check(&what, &loss(keys).unwrap_or_else(|error| panic!("{what}: {error}")));
    };
    for (mode, of_mode) in [
        ("token-mean", None),
        ("token-sum", None),
        ("seq-mean-token-sum", None),
        ("seq-mean-token-sum-norm", Some("loss_scale_factor")),
        ("seq-mean-token-mean", None),
        ("sequence-mean-token-sum-norm", Some("loss_scale_factor")),
        ("prompt-mean", Some("num_generations")),
        ("token-mean-legacy", Some("micro_batch_size")),
    ] {
        let mut keys =
            vec![("semantics", json!("verl")), ("loss_agg_mode", json!(mode)), ("entropy_coef", json!(0.02))];
        keys.extend(of_mode.map(|key| (key, json!(3))));
        check(&keys);
    }
    for mode in [
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "geometric_truncate",
        "geometric_mask",
        "seq_mask_tis",
    ] {
        check(&[
            ("vllm_importance_sampling_correction", json!(true)),
            ("vllm_importance_sampling_mode", json!(mode)),
            ("vllm_importance_sampling_clip_min", json!(0.8)),
            ("vllm_importance_sampling_clip_max", json!(1.3)),
            ("beta", json!(0.1)),
        ]);
    }
    for (correction, threshold) in [("token", "1.25"), ("sequence", "1.25"), ("icepop", "0.8_1.25")] {
        check(&[
            ("semantics", json!("verl")),
            ("rollout_is", json!(correction)),
            ("rollout_is_threshold", json!(threshold)),
        ]);
    }
    for mode in ["scale_logits", "scale_logprobs"] {
        check(&[
            ("temperature", json!(0.7)),
            ("temperature_mode", json!(mode)),
            ("entropy_coef", json!(0.02)),
            ("logit_scale", json!(1.7)),
            ("final_logit_softcapping", json!(4.0)),
        ]);
    }
}

/// Losses that select tokens, for selections of any size.
#[test]
fn every_token_selection_has_the_oracles_gradient() {
    let setting = Setting::new();
    let verl = |loss_type: &str| vec![("semantics", json!("verl")), ("loss_type", json!(loss_type))];
    let with = |mut keys: Vec<(&'static str, Json)>, more: &[(&'static str, Json)]| {
        keys.extend_from_slice(more);
        keys
    };
    for keys in [
        vec![("top_entropy_quantile", json!(0.3)), ("entropy_coef", json!(0.02))],
        vec![("top_entropy_quantile", json!(0.8)), ("loss_type", json!("gspo"))],
        vec![("off_policy_mask_threshold", json!(0.01)), ("beta", json!(0.1))],
        with(verl("clip_cov"), &[("clip_cov_ratio", json!(1.0)), ("clip_cov_lb", json!(0.01))]),
        with(verl("clip_cov"), &[("clip_cov_ratio", json!(0.3)), ("clip_cov_lb", json!(0.01))]),
        with(verl("kl_cov"), &[("kl_cov_ratio", json!(0.3)), ("ppo_kl_coef", json!(0.5))]),
    ] {
        let what = format!("{keys:?}");
        setting.check(&what, &loss(&keys).unwrap_or_else(|error| panic!("{what}: {error}")));
    }
}
