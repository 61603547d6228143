//! Every loss trains pretrained models of every family for a whole step, from sampling to AdamW.

use crate::support::{Latin1, scored};
use grpo_core::{AdvantageEstimator, LossConfig};
use grpo_files::Layers;
use grpo_models::NamedTensor;
use grpo_testkit::family;
use grpo_trainer::{Error, ModelSource, TrainConfig, Trainer};
use rstest::rstest;
use std::path::{Path, PathBuf};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Returns two updates on the same eight completions: in the second, ratios and the KL differ from their initial values.
fn config(model: &str, loss: LossConfig) -> TrainConfig {
    let model = repository("tests/checkpoints").join(model).display().to_string();
    let mut config = TrainConfig { model: ModelSource::Pretrained(model), ..TrainConfig::default() };
    config.data.tasks.addition.weight = 1.0;
    config.rollout.max_completion_length = Some(6);
    config.rollout.temperature = Some(loss.temperature);
    config.grpo.max_steps = 1;
    config.grpo.prompts_per_step = 2;
    config.grpo.num_generations = 4;
    config.grpo.num_iterations = 2;
    config.grpo.gradient_accumulation_steps = 2;
    config.optimizer.learning_rate = 1e-3;
    // Without weight decay, only gradients change weights.
    config.optimizer.settings.weight_decay = 0.0;
    config.eval.num_problems = Some(1);
    config.loss = loss;
    config
}

fn trainer(config: TrainConfig) -> grpo_setup::Result<Trainer> {
    let ModelSource::Pretrained(model) = &config.model else { unreachable!("every model here is read") };
    let vocab_size = grpo_models::ModelFolder::open(Path::new(model))?.config().vocab_size;
    // The mean character code, which differs between the completions of a group.
    let rewards = scored("mean_code", |input| {
        let codes = input.completion.chars().map(u32::from);
        Some(codes.sum::<u32>() as f32 / input.completion.chars().count() as f32 / 256.0)
    });
    let mut parts = grpo_setup::parts_with_tokenizer(&config, Box::new(Latin1 { vocab_size }))?;
    parts.rewards = rewards;
    Ok(Trainer::with_parts(config, parts)?)
}

fn weights(run: &Trainer) -> Vec<NamedTensor> {
    let mut weights = Vec::new();
    run.policy().export_model(&mut weights).unwrap();
    weights
}

/// Returns the files of configs/loss.
fn presets() -> impl Iterator<Item = (String, LossConfig)> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(repository("configs/loss")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() > 20, "{files:?}");
    files.into_iter().map(|file| {
        let loss = Layers::new().file(&file).unwrap().resolve().unwrap();
        (file.file_stem().unwrap().display().to_string(), loss)
    })
}

const MODELS: [&str; 3] = ["qwen2", "qwen3", "llama3"];

/// Returns every loss of the tests by name.
fn losses() -> impl Iterator<Item = (String, LossConfig)> {
    let named = family::LOSSES.into_iter().chain(family::others());
    named.map(|name| (name.to_owned(), family::loss(name)))
}

#[test]
fn every_loss_trains_a_model() {
    losses().zip(MODELS.iter().cycle()).for_each(|((name, loss), model)| assert_trains(model, &name, loss));
}

#[rstest]
#[ignore = "GRPO_TESTS=all"]
fn every_loss_and_preset_trains_every_family(#[values(0, 1, 2)] model: usize) {
    losses().chain(presets()).for_each(|(name, loss)| assert_trains(MODELS[model], &name, loss));
}

fn assert_trains(model: &str, name: &str, loss: LossConfig) {
    let has_kl = loss.needs_ref_logp();
    let mut run = trainer(config(model, loss)).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(run.policy().has_ref_policy(), has_kl, "{name}");
    let before = weights(&run);
    let report = run.grpo_step().unwrap_or_else(|error| panic!("{name}: {error}"));
    let metric = |metric: &str| report.metrics.value(metric);
    let (loss, grad_norm) = (metric("loss").unwrap(), metric("grad_norm").unwrap());
    assert!(loss.is_finite() && grad_norm.is_finite() && grad_norm > 0.0, "{name}: {loss}, gradient {grad_norm}");
    // The reference is the pretrained model, and the second update starts from the result of the first.
    assert_eq!(metric("kl").is_some(), has_kl, "{name}");
    assert!(metric("kl").is_none_or(|kl| kl.is_finite() && kl != 0.0), "{name}: {:?}", metric("kl"));
    for (before, after) in before.iter().zip(weights(&run)) {
        assert!(after.data.iter().all(|x| x.is_finite()) && before.data != after.data, "{name}: {}", after.name);
    }
}

/// Returns the key in the error of an invalid run.
#[track_caller]
fn refused(config: TrainConfig) -> String {
    match trainer(config).err() {
        Some(grpo_setup::Error::Trainer(Error::Config(grpo_run_config::Error::Key { key, .. }))) => key,
        other => panic!("{other:?}"),
    }
}

/// Rollouts of a pretrained model sample from its unmodified logits, at the temperature of `rollout`.
#[test]
fn a_loss_on_logits_other_than_the_sampled_ones_is_refused() {
    for name in ["logit_scale", "negative_scale", "softcap"] {
        assert_eq!(refused(config("qwen2", family::loss(name))), "loss.logit_scale", "{name}");
    }
    let softcap = LossConfig { final_logit_softcapping: Some(30.0), ..LossConfig::default() };
    assert_eq!(refused(config("qwen2", softcap)), "loss.final_logit_softcapping");
    let mut cooler = config("qwen2", LossConfig { temperature: 0.5, ..LossConfig::default() });
    cooler.rollout.temperature = None;
    assert_eq!(refused(cooler), "loss.temperature");
}

#[test]
fn ppo_works_with_token_level_losses() {
    assert_ppo_works(4);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn ppo_works_with_every_token_level_loss() {
    assert_ppo_works(1);
}

/// PPO has one advantage per token. Losses that need one per sequence are refused by name; every `step`th one of the others trains.
fn assert_ppo_works(step: usize) {
    let mut refusals = Vec::new();
    for (index, name) in family::LOSSES.into_iter().chain(family::others()).enumerate() {
        let loss = family::loss(name);
        let loss_type = loss.loss_type;
        let mut config = config("qwen3", loss);
        config.grpo.advantages.estimator = AdvantageEstimator::Gae;
        if loss_type.traits().is_of_sequences {
            assert_eq!(refused(config), "loss.loss_type", "{name}");
            refusals.push(name);
            continue;
        }
        if index % step != 0 {
            continue;
        }
        let mut run = trainer(config).unwrap_or_else(|error| panic!("{name}: {error}"));
        let before = weights(&run);
        let report = run.grpo_step().unwrap_or_else(|error| panic!("{name}: {error}"));
        for metric in ["grad_norm", "value_loss"] {
            let value = report.metrics.value(metric).unwrap();
            assert!(value.is_finite() && value > 0.0, "{name}: {metric} {value}");
        }
        assert!(before.iter().zip(weights(&run)).all(|(before, after)| before.data != after.data), "{name}");
    }
    assert!(!refusals.is_empty());
}
