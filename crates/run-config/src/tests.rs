//! Valid and invalid configurations of runs, beyond the types of keys.

use crate::{LrSchedulerType, PolicyDtype, TrainConfig};
use grpo_files::{Layers, Result};
use grpo_models::{GenerationDefaults, OptimizerName};
use grpo_policy::trains_adapters;

fn resolve(layers: Result<Layers>) -> crate::Result<TrainConfig> {
    TrainConfig::from_layers(layers?)
}

fn set(assignments: &[&str]) -> Result<Layers> {
    over(Layers::new(), assignments)
}

fn over(layers: Layers, assignments: &[&str]) -> Result<Layers> {
    layers.set(&assignments.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
}

/// Checks TRL's defaults, without the settings of the built-in task.
fn assert_defaults_of_a_model_that_is_read(config: &TrainConfig) {
    let defaults = TrainConfig::default();
    assert_eq!(config.warmup.steps, 0, "no supervised steps");
    assert_eq!((&config.optimizer, &config.warmup), (&defaults.optimizer, &defaults.warmup));
    let optimizer = &config.optimizer;
    assert_eq!(
        (optimizer.learning_rate, optimizer.settings.weight_decay, optimizer.settings.adam_beta2),
        (1e-6, 0.0, 0.999)
    );
    assert_eq!((optimizer.lr_scheduler_type, optimizer.warmup_ratio), (LrSchedulerType::Linear, 0.0));
    assert_eq!((optimizer.learning_rate_at(0, 10), optimizer.learning_rate_at(10, 10)), (1e-6, 0.0));
    let rollout = &config.rollout;
    assert_eq!((rollout.temperature(), rollout.processors().active().len()), (1.0, 0));
    assert_eq!(config.clone().with_context(32768).rollout.max_completion_length, Some(512));
    assert_eq!(config.rewards, defaults.rewards);
}

#[rstest::rstest]
#[case::nothing("{}", 8)]
#[case::tiny(include_str!("../../../configs/train/tiny.yaml"), 8)]
#[case::arithmetic(include_str!("../../../configs/train/arithmetic.yaml"), 8)]
#[case::dapo(include_str!("../../../configs/train/dapo.yaml"), 8)]
#[case::gspo(include_str!("../../../configs/train/gspo.yaml"), 8)]
#[case::dr_grpo(include_str!("../../../configs/train/dr-grpo.yaml"), 8)]
#[case::ppo(include_str!("../../../configs/train/ppo.yaml"), 1)]
fn pretrained_models_inherit_nothing_from_the_built_in_task(#[case] file: &str, #[case] num_generations: usize) {
    let with = |settings: &[&str]| over(Layers::new().text("a file", file).unwrap(), settings).unwrap();
    let config = TrainConfig::from_layers(with(&["model=M", "data.files=rows.jsonl"])).unwrap();
    config.validate().unwrap();
    assert_defaults_of_a_model_that_is_read(&config);
    assert_eq!(config.grpo.num_generations, num_generations);
    assert!(config.data.tasks.weights().iter().all(|(_, weight)| *weight == 0.0));
    // The same from the environment.
    let variables = [("GRPO__MODEL", "M"), ("GRPO__DATA__FILES", "rows.jsonl")];
    let env = with(&[]).env(variables.iter().map(|(name, value)| (name.into(), value.into()))).unwrap();
    assert_eq!(TrainConfig::from_layers(env).unwrap(), config);
    // A requested warm-up is done, but not at the learning rate of the built-in task.
    let asked = TrainConfig::from_layers(with(&["model=M", "data.files=rows.jsonl", "warmup.steps=3"])).unwrap();
    assert_eq!((asked.warmup.steps, asked.warmup.optimizer.learning_rate), (3, 2e-5));
    // Without a model, the section `without_model` configures a small one.
    let small = TrainConfig::from_layers(with(&[])).unwrap();
    small.validate().unwrap();
    assert!(small.warmup.steps > 0 && small.optimizer.learning_rate >= 7e-4, "{small:?}");
    // A model without data, or data without a model, is refused.
    let [no_data, no_model] = [["model=M"], ["data.files=rows.jsonl"]]
        .map(|one| TrainConfig::from_layers(with(&one)).unwrap().validate().unwrap_err().to_string());
    assert!(no_data.contains("`data.files`: expected rows") && no_data.contains("--set data.files="), "{no_data}");
    assert!(no_model.contains("`model`: expected the model") && no_model.contains("--set model="), "{no_model}");
}

#[test]
fn named_tasks_train_a_pretrained_model() {
    let config = resolve(set(&["model=M", "data.tasks.sorting.weight=1"])).unwrap();
    config.validate().unwrap();
    assert_defaults_of_a_model_that_is_read(&config);
    let shape = resolve(set(&["model.hidden_size=16", "data.files=rows.jsonl"])).unwrap();
    shape.validate().unwrap();
    let error = TrainConfig::default().validate().unwrap_err().to_string();
    assert!(error.contains("neither a model nor data"), "{error}");
}

#[rstest::rstest]
#[case::long(32768, None, 512)]
#[case::short(600, None, 300)]
#[case::tiny(64, None, 32)]
#[case::prompts_of_100(600, Some(100), 500)]
#[case::long_prompts(600, Some(599), 300)]
#[case::smallest(1, None, 1)]
fn completions_take_what_the_context_leaves(
    #[case] context: usize,
    #[case] max_prompt_length: Option<usize>,
    #[case] expected: usize,
) {
    let mut config = TrainConfig::default();
    config.data.max_prompt_length = max_prompt_length;
    assert_eq!(config.clone().with_context(context).rollout.max_completion_length, Some(expected));
    config.rollout.max_completion_length = Some(7);
    assert_eq!(config.with_context(context).rollout.max_completion_length, Some(7));
}

#[test]
fn num_train_epochs_sets_max_steps() {
    let config = |settings: &[&str]| resolve(set(&[&["model=M", "data.files=rows.jsonl"], settings].concat()));
    let steps = |epochs: &str, rows: usize, prompts: usize| {
        let set = [format!("grpo.num_train_epochs={epochs}"), format!("grpo.prompts_per_step={prompts}")];
        let mut config = config(&[&set[0], &set[1]]).unwrap();
        config.validate().unwrap();
        config.grpo.count_epochs(rows);
        assert_eq!(config.grpo.num_train_epochs, None);
        config.grpo.max_steps
    };
    for (epochs, rows, prompts, expected) in [
        ("3", 100, 8, 38),
        ("1", 96, 8, 12),
        ("0.1", 100, 1, 10),
        ("0.3", 10, 1, 3),
        ("2.5", 7, 2, 9),
        ("0.001", 10, 8, 1),
    ] {
        assert_eq!(steps(epochs, rows, prompts), expected, "{epochs} x {rows} / {prompts}");
    }
    let mut without = config(&["grpo.max_steps=7"]).unwrap();
    without.grpo.count_epochs(100);
    assert_eq!(without.grpo.max_steps, 7);
    let both = config(&["grpo.max_steps=7", "grpo.num_train_epochs=1"]).unwrap_err().to_string();
    assert!(both.contains("`grpo.num_train_epochs`: expected one of"), "{both}");
}

#[test]
fn all_four_forms_of_trls_scale_rewards_are_read() {
    use grpo_core::advantages::ScaleRewards;
    for (written, expected) in [
        ("true", Some(ScaleRewards::Group)),
        ("group", Some(ScaleRewards::Group)),
        ("'true'", Some(ScaleRewards::Group)),
        ("false", Some(ScaleRewards::None)),
        ("none", Some(ScaleRewards::None)),
        ("batch", Some(ScaleRewards::Batch)),
        ("null", None),
    ] {
        let setting = format!("grpo.advantages.scale_rewards={written}");
        assert_eq!(resolve(set(&[&setting])).unwrap().grpo.advantages.scale_rewards, expected, "{written}");
    }
    let error = format!("{:?}", resolve(set(&["grpo.advantages.scale_rewards=std"])).unwrap_err());
    assert!(error.contains("scale_rewards") && error.contains("group (true), batch, none (false)"), "{error}");
}

#[test]
fn a_section_rewards_replaces_the_default_reward() {
    let names = |layers: Result<Layers>| {
        let config = resolve(layers).unwrap();
        let rewards = grpo_rewards::Rewards::new(&config.rewards).map_err(|error| error.to_string())?;
        let terms = rewards.names().map(str::to_owned).collect::<Vec<_>>();
        config.validate().map(|()| terms).map_err(|error| error.to_string())
    };
    let own = ["model=M", "data.files=a.jsonl"];
    let with = |setting: &str| names(set(&[own[0], own[1], setting])).unwrap();
    assert_eq!(names(set(&own)).unwrap(), ["correct"]);
    assert_eq!(names(set(&[])).unwrap(), ["correct"], "the built-in task");
    assert_eq!(with("rewards.math=1"), ["math"]);
    assert_eq!(with("rewards.regex={a: {pattern: x}}"), ["a"]);
    assert_eq!(with("rewards={correct: 0.5, terminated: 1}"), ["correct", "terminated"]);
    assert_eq!(names(set(&["rewards.partial=1"])).unwrap(), ["partial"], "of the built-in task, too");
    // Later layers change a section of earlier ones.
    let file = Layers::new().text("file", "{model: M, data: {files: a.jsonl}, rewards: {math: 1}}").unwrap();
    assert_eq!(names(file.set(&["rewards.terminated=1".into()])).unwrap(), ["terminated", "math"]);
    for empty in ["rewards: {}", "rewards:", "rewards: {answer_from: boxed}", "rewards: {correct: 0}"] {
        let text = names(Layers::new().text("file", empty)).unwrap_err();
        assert!(text.contains("`rewards`") && text.contains("correct: 1"), "{empty}: {text}");
    }
}

/// Assignments, and words of the error.
const REFUSED: &[(&[&str], &[&str])] = &[
    (&["grpo.num_train_epochs=0"], &["grpo.num_train_epochs", "above 0"]),
    (&["grpo.num_train_epochs=-1"], &["grpo.num_train_epochs", "above 0"]),
    (&["grpo.num_train_epochs=1"], &["rows without end"]),
    // Estimators without their inputs.
    (&["grpo.advantages.estimator=optimal_token_baseline"], &["advantages.estimator", "sums of squared probabilities"]),
    (&["grpo.advantages.estimator=tir_optimal_token_baseline"], &["sums of squared probabilities"]),
    (&["grpo.advantages.reward_weights=[1, 2]"], &["those of the section rewards"]),
    (&["grpo.advantages.estimator=gdpo", "grpo.use_kl_in_reward=true"], &["Gdpo", "grpo.use_kl_in_reward"]),
    (&["grpo.advantages={estimator: remax, whiten: sequences}", "grpo.use_kl_in_reward=true"], &["advantages.whiten"]),
    (&["grpo.advantages={estimator: gae, whiten: sequences}"], &["grpo.advantages.whiten"]),
    (&["grpo.advantages.estimator=gae", "loss.loss_type=geo_mean"], &["loss.loss_type"]),
    (&["grpo.advantages.estimator=gae", "grpo.vf_coef=-1"], &["vf_coef"]),
    (&["grpo.advantages.estimator=gae", "grpo.cliprange_value=0"], &["cliprange_value"]),
    (&["grpo.vf_coef=0.1"], &["estimator gae"]),
    (&["grpo.cliprange_value=null"], &["estimator gae"]),
    (
        &["grpo={advantages: {estimator: gae}, num_generations: 1, filter_groups: {enable: true}}"],
        &["no group would be kept"],
    ),
    (&["grpo.advantages.gamma=0.5"], &["gamma is used by gae"]),
    (&["grpo.advantages.estimator=grpo_passk", "grpo.num_generations=1"], &["at least 2"]),
    // Sampling.
    (&["rollout.temperature=0"], &["`rollout.temperature`"]),
    (&["rollout.top_p=1.5"], &["`rollout.top_p`"]),
    (&["rollout.min_p=-0.1"], &["`rollout.min_p`"]),
    (&["rollout.repetition_penalty=0"], &["`rollout.repetition_penalty`"]),
    (&["eval.temperature=-1"], &["`eval.temperature`"]),
    (&["eval.top_p=2"], &["`eval.top_p`"]),
    (&["eval.temperature=0", "eval.repetition_penalty=1.1"], &["`eval.repetition_penalty`"]),
    (&["eval.temperature=0", "eval.num_generations=8", "eval.pass_at=[8]"], &["`eval.pass_at`"]),
    (&["eval.num_generations=4", "eval.pass_at=[1, 8]"], &["`eval.pass_at`"]),
    (&["eval.pass_at=[0]"], &["`eval.pass_at`"]),
    // Settings around the loss.
    (&["grpo.use_kl_in_reward=true", "grpo.kl_ctrl.kl_coef=-1"], &["grpo.kl_ctrl.kl_coef"]),
    (&["grpo.use_kl_in_reward=true", "grpo.kl_ctrl={type: adaptive, horizon: 100}"], &["horizon above 102.4"]),
    (&["grpo.use_kl_in_reward=true", "grpo.kl_ctrl={type: adaptive, target_kl: 0}"], &["target_kl"]),
    (&["grpo.filter_groups={enable: true, max_num_gen_batches: 0}"], &["max_num_gen_batches"]),
    (&["grpo.filter_groups={enable: true, keep: {reward_range: [1, 0]}}"], &["reward_range must rise"]),
    (&["grpo.use_adaptive_entropy=true", "grpo.entropy_coef_min=2"], &["entropy_coef_min (2)"]),
    (&["grpo.sync_ref_model=true"], &["grpo.sync_ref_model"]),
    (&["grpo.sync_ref_model=true", "loss.beta=0.1", "grpo.ref_model_mixup_alpha=1.5"], &["grpo.ref_model_mixup_alpha"]),
    (&["grpo.sync_ref_model=true", "loss.beta=0.1", "grpo.ref_model_sync_steps=0"], &["grpo.ref_model_sync_steps"]),
    (&["grpo.sync_ref_model=true", "loss.beta=0.1", "lora={r: 4}"], &["the model without adapters"]),
    (&["optimizer.momentum=1"], &["optimizer.momentum", "in [0, 1)"]),
    (&["rewards.soft_overlong_punishment={max_completion_len: 4, soft_punish_cache: 5}"], &["soft_punish_cache (5)"]),
    (&["rewards.soft_overlong_punishment={max_completion_len: 20, soft_punish_cache: 4}"], &["begins below"]),
    // The schedule of learning rates.
    (&["optimizer.lr_scheduler_kwargs.power=2"], &["optimizer.lr_scheduler_kwargs.power", "polynomial"]),
    (
        &["optimizer={lr_scheduler_type: cosine, lr_scheduler_kwargs: {min_lr: 1e-7}}"],
        &["lr_scheduler_kwargs.min_lr", "cosine_with_min_lr"],
    ),
    (&["optimizer.lr_scheduler_type=cosine_with_min_lr"], &["lr_scheduler_kwargs", "min_lr_rate", "neither"]),
    (
        &["optimizer={lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1e-7, min_lr_rate: 0.1}}"],
        &["lr_scheduler_kwargs", "one of", "both"],
    ),
    (&["optimizer={warmup_steps: 10, warmup_ratio: 0.1}"], &["optimizer.warmup_steps", "warmup_ratio"]),
    (&["optimizer={warmup_steps: -1, warmup_ratio: 0}"], &["optimizer.warmup_steps", "at least 0"]),
    (&["optimizer={lr_scheduler_type: polynomial, lr_scheduler_kwargs: {lr_end: 1}}"], &["lr_end", "below"]),
    // Devices and runs.
    (&["policy={device: 'pjrt:cpu', wait_limit_minutes: 0}"], &["policy.wait_limit_minutes", "1 or more"]),
    (
        &["policy.dtype=bfloat16", "grpo.implementation=reference"],
        &["grpo.implementation", "fused or logits, or policy.dtype: float32"],
    ),
    (&["policy.wait_limit_minutes=5"], &["policy.wait_limit_minutes", "60, or a policy.device of PJRT"]),
    (&["policy.quantization=int8"], &["policy.quantization", "a run with the section `lora`", "got int8"]),
    (&["lora={r: 4}", "policy.quantization=nf4"], &["policy.quantization", "a pretrained `model`", "got nf4"]),
    (
        &[
            "lora={r: 4}",
            "model=M",
            "data.files=F",
            "policy={quantization: nf4, device: 'pjrt:cpu', recompute_granularity: none}",
        ],
        &["policy.recompute_granularity", "would save dequantised weights"],
    ),
    (&["policy.router_aux_loss_coef=-1"], &["policy.router_aux_loss_coef", "a finite number from 0"]),
    (&["run.early_stopping_patience=3"], &["run.early_stopping_patience", "run.metric_for_best_model"]),
    (&["run={metric_for_best_model: pass@1, early_stopping_patience: 0}"], &["run.early_stopping_patience"]),
    (&["run.early_stopping_threshold=-1"], &["run.early_stopping_threshold"]),
    // Sizes that fit no memory.
    (&["rollout.max_completion_length=18446744073709551615"], &["rollout.max_completion_length"]),
    (&["warmup.batch_size=18446744073709551615"], &["warmup.batch_size"]),
    (&["grpo.num_generations=1048576"], &["grpo.num_generations"]),
    (&["grpo.num_iterations=18446744073709551615"], &["grpo.num_iterations"]),
    (&["eval.num_problems=18446744073709551615"], &["eval.num_problems"]),
    (&["eval.num_generations=18446744073709551615"], &["eval.num_generations"]),
    (&["run.num_completions_to_print=18446744073709551615"], &["run.num_completions_to_print"]),
    (
        &["grpo.filter_groups={enable: true, max_num_gen_batches: 18446744073709551615}"],
        &["grpo.filter_groups.max_num_gen_batches"],
    ),
    (&["data.tasks.reverse.max_length=18446744073709551615"], &["data.tasks.reverse"]),
];

#[test]
fn invalid_settings_are_refused_by_key() {
    for (assignments, words) in REFUSED {
        let text = resolve(set(assignments)).unwrap().validate().unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{assignments:?}: {text}");
    }
}

#[test]
fn optimizers_of_whole_matrices_are_refused_with_lora() {
    for name in OptimizerName::ALL {
        let config = resolve(set(&[&format!("optimizer.name={name}"), "lora={r: 4}"])).unwrap();
        match config.validate() {
            Ok(()) => assert!(trains_adapters(name), "{name}"),
            Err(error) => {
                let text = error.to_string();
                let words = ["`optimizer.name`", " with `lora`", &name.to_string()];
                assert!(!trains_adapters(name) && words.iter().all(|word| text.contains(word)), "{text}");
            }
        }
    }
}

#[test]
fn valid_combinations_of_estimators_are_accepted() {
    for assignments in [
        &["grpo.advantages={estimator: remax, whiten: sequences}"][..],
        &["grpo.advantages.estimator=gae", "grpo.num_generations=1", "grpo.cliprange_value=null"],
        &["grpo.advantages={estimator: dapo_mix, ddof: 0, clip: 5}"],
    ] {
        resolve(set(assignments)).unwrap().validate().unwrap();
    }
}

#[test]
fn evaluations_sample_like_rollouts_by_default() {
    let config = resolve(set(&[
        "rollout={temperature: 0.7, top_k: 20, top_p: 0.8}",
        "eval={temperature: 1.2, top_k: 0, num_generations: 8, pass_at: [1, 8]}",
    ]))
    .unwrap();
    config.validate().unwrap();
    let grpo_policy::Sampling::Random { temperature, processors, .. } = config.eval.sampling(&config.rollout, 0) else {
        panic!("sampled");
    };
    assert_eq!((temperature, processors.top_k, processors.top_p), (1.2, Some(0), Some(0.8)));
    let greedy = resolve(set(&["eval.temperature=0"])).unwrap();
    greedy.validate().unwrap();
    assert_eq!(greedy.eval.sampling(&greedy.rollout, 0), grpo_policy::Sampling::Greedy);
}

#[test]
fn keys_around_the_loss_have_the_names_of_trl_and_verl() {
    let legal = [
        "grpo.use_kl_in_reward=true",
        "grpo.kl_penalty=kl",
        "grpo.kl_ctrl={type: adaptive, kl_coef: 0.01, target_kl: 0.2}",
        "grpo.use_adaptive_entropy=true",
        "grpo.entropy_target=0.3",
        "grpo.sync_ref_model=true",
        "grpo.filter_groups={enable: true, metric: correct}",
        "rewards.soft_overlong_punishment={max_completion_len: 8, soft_punish_cache: 4}",
    ];
    let config = resolve(set(&legal)).unwrap();
    config.validate().unwrap();
    assert_eq!((config.grpo.kl_ctrl.horizon, config.grpo.ref_model_sync_steps), (10_000.0, 512));
    let error = resolve(set(&["grpo.filter_groups.max_gen_batches=3"])).unwrap_err();
    let text = std::error::Error::source(&error).unwrap().to_string();
    assert!(text.contains("did you mean `max_num_gen_batches`?"), "{text}");
}

#[test]
fn the_wait_limit_of_a_device_is_in_minutes() {
    let config = resolve(set(&["policy.device=pjrt:cpu", "policy.wait_limit_minutes=5"])).unwrap();
    config.validate().unwrap();
    assert_eq!(config.policy.wait_limit().as_secs(), 300);
}

#[test]
fn generation_config_fills_unset_sampling_keys() {
    let defaults = GenerationDefaults {
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.95),
        min_p: Some(0.05),
        repetition_penalty: Some(1.05),
        ..GenerationDefaults::default()
    };
    let numbers = |assignments: &[&str], defaults: &GenerationDefaults| {
        let model = ["model=a", "data.files=b", "rollout.use_generation_config=true"];
        let config = resolve(set(&[&model, assignments].concat())).unwrap();
        let rollout = config.with_generation_defaults(defaults).rollout;
        (rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p, rollout.repetition_penalty)
    };
    assert_eq!(numbers(&[], &defaults), (Some(0.6), Some(20), Some(0.95), Some(0.05), Some(1.05)));
    assert_eq!(numbers(&["rollout.use_generation_config=false"], &defaults), (None, None, None, None, None));
    let own = ["rollout.temperature=1", "rollout.top_k=0", "rollout.top_p=1"];
    assert_eq!(numbers(&own, &defaults), (Some(1.0), Some(0), Some(1.0), Some(0.05), Some(1.05)));
    // Settings of greedy decoding are not settings of sampling, and greedy completions carry no training signal.
    let none = numbers(&[], &GenerationDefaults::default());
    assert_eq!(numbers(&[], &GenerationDefaults { do_sample: Some(false), ..defaults.clone() }), none);
    assert_eq!(numbers(&[], &GenerationDefaults { temperature: Some(0.0), ..defaults }).0, none.0);
}

#[rstest::rstest]
#[case("float32", PolicyDtype::Float32)]
#[case("fp32", PolicyDtype::Float32)]
#[case("f32", PolicyDtype::Float32)]
#[case("bfloat16", PolicyDtype::Bfloat16)]
#[case("bf16", PolicyDtype::Bfloat16)]
fn dtypes_have_short_names(#[case] name: &str, #[case] dtype: PolicyDtype) {
    let config = resolve(set(&[&format!("policy.dtype={name}"), &format!("export.dtype={name}")])).unwrap();
    assert_eq!((config.policy.dtype, config.export.dtype), (dtype, Some(dtype)));
    for name in ["fp16", "float16", "f16"] {
        let error = resolve(set(&[&format!("policy.dtype={name}")])).unwrap_err();
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(cause.contains("policy.dtype") && cause.contains("bfloat16"), "{error}: {cause}");
    }
}

#[test]
fn an_assigned_section_of_rewards_replaces_those_of_lower_layers() {
    let file = || {
        let text = "{model: m, data: {files: a.jsonl}, rewards: {math: 1, regex: {polite: {pattern: please}}}}";
        grpo_files::Layers::new().text("train.yaml", text).unwrap()
    };
    let of = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(|text| (*text).to_owned()).collect();
        TrainConfig::from_layers(file().set(&set).unwrap()).unwrap().rewards
    };
    let replaced = of(&["rewards={choice: 0.5}"]);
    assert_eq!(replaced, grpo_rewards::RewardConfig { choice: 0.5, ..Default::default() });
    // Keys below the section are merged, in the order of the layers.
    let merged = of(&["rewards.choice=0.5"]);
    assert_eq!((merged.choice, merged.math, merged.regex.len()), (0.5, 1.0, 1));
    let both = of(&["rewards.choice=0.5", "rewards={exact: 1}", "rewards.math=2"]);
    assert_eq!((both.choice, both.exact, both.math, both.regex.len()), (0.0, 1.0, 2.0, 0));
    let variables = [("GRPO__REWARDS".into(), "{exact: 1}".into())].into_iter();
    let of_environment = TrainConfig::from_layers(file().env(variables).unwrap()).unwrap().rewards;
    assert_eq!(of_environment, grpo_rewards::RewardConfig { exact: 1.0, ..Default::default() });
}

#[test]
fn a_misspelt_key_of_the_length_penalty_names_the_key_beside_it() {
    let refused = |key: &str| {
        let set = [format!("rewards.soft_overlong_punishment={{{key}: 1}}")];
        let error = TrainConfig::from_layers(grpo_files::Layers::new().set(&set).unwrap()).unwrap_err();
        format!("{error}: {}", std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default())
    };
    for (key, meant) in [
        ("max_completion_length", "max_completion_len"),
        ("soft_punish_cache_len", "soft_punish_cache"),
        ("weight", "rewards.soft_overlong_punishment.penalty_factor"),
    ] {
        let text = refused(key);
        assert!(text.contains(&format!("did you mean `{meant}`?")), "{key}: {text}");
    }
}
