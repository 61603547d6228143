//! A first run on a user's model and rows: data, settings, refusals and warnings.

use crate::support::{Call, Runs, assert_has, grpo, json, repository, succeed};
use serde_json::json;

/// Returns the settings that name the model and the rows of `runs`.
fn of(runs: &Runs) -> [String; 2] {
    [format!("model={}", runs.text("model")), format!("data.files={}", runs.text("rows.jsonl"))]
}

/// Calls `train` for one short step on the model and the rows of `runs`.
fn own(runs: &Runs, name: &str, settings: &[&str]) -> Call {
    let quick = ["grpo.max_steps=1", "eval.num_problems=2", "eval.num_generations=0"];
    let short = ["rollout.max_completion_length=4", "grpo.prompts_per_step=2", "grpo.num_generations=2"];
    grpo(["train", "--run-dir", &runs.text(name)]).set(of(runs)).set(quick).set(short).set(settings)
}

/// Trains and returns standard error.
#[track_caller]
fn train(runs: &Runs, name: &str, settings: &[&str]) -> String {
    own(runs, name, settings).exit(0).stderr
}

/// Fails unless `count` warnings in standard error contain `words`.
#[track_caller]
fn assert_warned(text: &str, words: &str, count: usize) {
    let found = text.lines().filter(|line| line.contains("WARN") && line.contains(words)).count();
    assert_eq!(found, count, "{words}: {text}");
}

#[test]
fn the_first_run_on_a_model_has_the_settings_of_a_model_that_is_read() {
    let runs = Runs::small();
    for name in ["none", "dapo", "ppo"] {
        let file = if name == "none" { vec![] } else { vec![repository(&format!("configs/train/{name}.yaml"))] };
        // Few prompts, for these tests' sake; one step of a schedule that falls from the first.
        let small = ["grpo.prompts_per_step=4", "rewards.regex={vowel: {pattern: '[aeiou]{2}'}}"];
        let quick = ["grpo.max_steps=1", "eval.num_problems=2", "eval.num_generations=0"];
        let call = grpo(["train", "--run-dir", &runs.text(name)]).args(file).set(of(&runs)).set(quick).set(small);
        call.set(["grpo.filter_groups.enable=false"]).succeed();
        assert!(runs.phase(name, "warmup").is_empty(), "{name}: supervised steps that nobody asked for");
        let step = &runs.phase(name, "grpo")[0];
        // The mean over the updates of a step, of a rate that falls on a line from the first of them on.
        let rate = step["learning_rate"].as_f64().expect("a rate");
        let expected = if name == "none" { 1e-6 } else { 7.5e-7 };
        assert!((rate / expected - 1.0).abs() < 1e-9, "{name}: {rate}");
        // The context of this model has 256 tokens.
        let longest = step["completions/max_length"].as_f64().expect("a length");
        assert!(longest > 8.0 && longest <= 128.0, "{name}: {longest}");
        assert_has(&runs.read(&format!("{name}/config.yaml")), &["max_completion_length: 128"]);
    }
}

#[test]
fn a_model_without_data_and_data_without_a_model_are_refused() {
    let runs = Runs::small();
    let [model, files] = of(&runs);
    for file in [None, Some("configs/train/ppo.yaml"), Some("configs/train/tiny.yaml")] {
        for (setting, words) in [
            (&model, ["`data.files`: expected rows to train the model on", "--set data.files=train.jsonl"]),
            (&files, ["`model`: expected the model to train", "--set model=FOLDER"]),
        ] {
            let call = grpo(["train", "--run-dir", &runs.text("run")]).args(file.map(repository)).set([setting]);
            assert_has(&call.refuse(), &words);
            assert!(!runs.path("run").exists());
        }
    }
    assert_has(&grpo(["train"]).env("GRPO__MODEL", runs.text("model")).refuse(), &["`data.files`"]);
}

#[test]
fn a_section_of_rewards_is_all_the_rewards_of_a_run() {
    let runs = Runs::small();
    for (run, settings, reward) in [("default", &[][..], "correct"), ("own", &["rewards.terminated=1"], "terminated")] {
        train(&runs, run, settings);
        let step = &runs.phase(run, "grpo")[0];
        let name = |key: &String| Some(key.strip_prefix("rewards/")?.strip_suffix("/mean")?.to_owned());
        assert_eq!(step.as_object().expect("a row").keys().filter_map(name).collect::<Vec<_>>(), [reward]);
    }
    for section in ["rewards: {}", "rewards:"] {
        let text = own(&runs, "none", &[]).args([runs.write("train.yaml", section)]).refuse();
        assert_has(&text, &["`rewards`: expected at least one reward"]);
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn sampling_is_plain_unless_the_run_asks_for_the_models_own() {
    let runs = Runs::small();
    let generation =
        json!({"do_sample": true, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05});
    runs.write("model/generation_config.json", generation.to_string());
    let warning = "the loss is over the whole softmax";
    let sampling = |run: &str| {
        let text = runs.read(&format!("{run}/config.yaml"));
        let begin = text.find("rollout:").expect("a section");
        text[begin..].lines().skip(1).take(5).map(|line| line.trim().to_owned()).collect::<Vec<_>>()
    };
    assert_warned(&train(&runs, "plain", &[]), warning, 0);
    assert_eq!(sampling("plain")[..2], ["temperature: null", "top_k: null"]);
    let text = train(&runs, "own", &["rollout.use_generation_config=true", "rollout.top_k=5"]);
    assert_warned(&text, warning, 1);
    assert_eq!(sampling("own")[..3], ["temperature: 0.7", "top_k: 5", "top_p: 0.8"]);
    for one in ["top_k=3", "top_p=0.9", "min_p=0.1", "repetition_penalty=1.2"] {
        let setting = format!("rollout.{one}");
        let text = train(&runs, one, &[&setting]);
        assert_warned(&text, warning, 1);
        assert_has(&text, &[&setting]);
    }
    // Truncated sampling in an evaluation is no reason for a warning.
    assert_warned(&train(&runs, "eval", &["eval.top_k=3", "eval.num_generations=1"]), warning, 0);
}

#[test]
fn the_first_command_still_trains_the_built_in_task() {
    let text = succeed(["train", "--print-config"]);
    for line in [
        "name: arithmetic",
        "learning_rate: 0.0007",
        "until_pass_at_1: 0.35",
        "max_completion_length: 8",
        "correct: 1.0",
    ] {
        assert!(text.lines().any(|found| found.trim() == line), "{line}: {text}");
    }
    let runs = Runs::new(&[]);
    let short = ["warmup.steps=2", "grpo.max_steps=1", "eval.num_problems=4"];
    grpo(["train", "--run-dir", &runs.text("a")]).set(short).succeed();
    let summary = json(&runs.path("a/summary.json"));
    assert!(summary["eval_after"].is_object(), "{summary}");
}

#[test]
fn rows_with_nothing_to_reward_are_refused_with_their_columns() {
    let runs = Runs::small();
    let solution = |i: usize| format!("\\boxed{{{}}}", i + 1);
    runs.write_rows(60, |i| json!({"question": format!("What is {i} + 1?"), "solution": solution(i)}));
    let words = ["none of its", "`question`, `solution`", "`correct`", "--set data.answer_column=solution"];
    assert_has(&own(&runs, "a", &[]).refuse(), &words);
    assert!(!runs.path("a").exists());
    let data = || grpo(["data", &runs.text("rows.jsonl"), "--model", &runs.text("model")]);
    assert_has(&data().exit(1).stderr, &words);
    // The key that the error names, and rewards that need no answer.
    train(&runs, "named", &["data.answer_column=solution"]);
    data().set(["data.answer_column=solution"]).succeed();
    train(&runs, "without", &["rewards.terminated=1"]);
    // A few rows without an answer.
    runs.write_rows(60, |i| json!({"question": format!("What is {i}?"), "answer": (i != 4).then_some(i)}));
    assert_has(&own(&runs, "a", &[]).refuse(), &["1 of its ", "line 5"]);
}

#[test]
fn a_text_prompt_beside_a_chat_template_is_warned_of_once() {
    let runs = Runs::small();
    let words = "a text is sent as it is; use `messages`, or `data.apply_chat_template: true`";
    // A question is a user's message.
    assert_warned(&train(&runs, "question", &[]), words, 0);
    runs.write_rows(60, |i| json!({"prompt": format!("What is {i} + 1?"), "answer": i + 1}));
    assert_warned(&train(&runs, "text", &[]), words, 1);
    for choice in ["true", "false"] {
        let setting = format!("data.apply_chat_template={choice}");
        assert_warned(&train(&runs, choice, &[&setting]), words, 0);
    }
}

#[test]
fn a_first_step_that_teaches_nothing_is_warned_of_once() {
    let runs = Runs::small();
    let never = "rewards={correct: 1, think_format: 0.5, regex: {never: {pattern: 'zzzzzzzz'}}}";
    let text = train(&runs, "never", &[never, "grpo.max_steps=2"]);
    for words in [
        "of the first step's completions were cut off at rollout.max_completion_length, 4",
        "no group of the first step has completions with different rewards",
        "the reward `think_format` matched no completion",
        "the reward `never` matched no completion",
    ] {
        assert_warned(&text, words, 1);
    }
    let program = "rewards.programs.silent={command: [sh, -c, 'while read -r l; do echo null; done']}";
    let text = own(&runs, "none", &[program]).with_path().exit(0).stderr;
    assert_warned(&text, "no completion of the first step has a reward", 1);
}

#[test]
fn identical_completions_of_a_prompt_are_warned_of_with_the_cause() {
    let runs = Runs::small();
    let warning = "all completions of a prompt are identical for 2 of 2 prompts of the first step";
    for (setting, cause) in [
        ("rollout.top_k=1", "rollout.top_k is 1, which samples the most likely token: set 0"),
        ("rollout.temperature=0.0001", "rollout.temperature is 0.0001, which samples the most likely token: set 1"),
        ("rollout.top_p=0.0001", "rollout.top_p is 0.0001, which keeps hardly more than the most likely token: set 1"),
    ] {
        let text = train(&runs, setting, &[setting]);
        assert_warned(&text, warning, 1);
        assert_has(&text, &[cause]);
        assert_warned(&text, "no group of the first step has completions with different rewards", 0);
    }
    assert_warned(&train(&runs, "several", &[]), "all completions of a prompt are identical", 0);
}

#[test]
fn graded_rewards_that_never_pass_name_the_key_of_the_rule() {
    let runs = Runs::small();
    let graded = "rewards={length: {weight: 1, target: 1, mode: exact}, partial: 1}";
    let warning = "pass@1 of the first evaluation is 0: it counts completions with ";
    let text = train(&runs, "graded", &[graded]);
    assert_warned(&text, warning, 1);
    assert_has(&text, &["which graded rewards seldom reach", "`--set eval.pass_reward=partial`"]);
    // The key was set, or the only reward is not graded.
    assert_warned(&train(&runs, "named", &[graded, "eval.pass_reward=partial"]), warning, 0);
    assert_warned(&train(&runs, "correct", &[]), warning, 0);
    let passes = "rewards={regex: {any: {pattern: ''}}}";
    assert_warned(&train(&runs, "passes", &[passes]), warning, 0);
}
