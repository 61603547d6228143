//! Which held-out rows an evaluation takes, what passes, and runs without any.

use crate::support::{Runs, assert_has};
use crate::tiny_model::{call, train};

fn refuse(runs: &Runs, settings: &[&str]) -> String {
    let text = call(runs, "model", "refused", settings).refuse();
    assert!(!runs.path("refused").exists(), "nothing is left behind: {text}");
    text
}

#[test]
fn an_evaluation_takes_as_many_rows_as_there_are_unless_a_number_was_written() {
    let runs = Runs::small();
    train(&runs, "model", "a", &["eval.num_problems=null"]);
    let found = runs.phase("a", "eval");
    let held_out = found[0]["eval/problems"].as_f64().expect("a number");
    assert!(found.len() == 2 && held_out > 0.0 && held_out < 60.0, "{found:?}");
    let text = refuse(&runs, &["eval.num_problems=64"]);
    assert_has(&text, &["`eval.num_problems`", &format!("at most {held_out}, "), "got 64", "eval: { num_problems: "]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_run_without_held_out_rows_trains_and_says_that_evaluation_is_off() {
    let runs = Runs::small();
    // A number that was written does not count: there is nothing to take it of.
    let off = ["data.held_out_fraction=0", "eval.eval_steps=0", "eval.num_problems=64"];
    let text = train(&runs, "model", "a", &off);
    assert!(text.contains("evaluation off: no row is held out"), "{text}");
    assert!(text.contains("60 rows, 60 to train on, 0 held out"), "{text}");
    assert!(runs.phase("a", "eval").is_empty());
    // It goes on as other runs do.
    let resumed = runs.resume("a").set(["grpo.max_steps=3"]).succeed();
    assert!(resumed.contains("continued from step-000002"), "{resumed}");
    let steps = runs.metrics("a");
    assert_eq!(steps.iter().map(|row| row["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
    let text = refuse(&runs, &["data.held_out_fraction=0", "run.metric_for_best_model=pass@1"]);
    assert_has(&text, &["`run.metric_for_best_model`", "evaluation is off"]);
    // Rows so few that by chance none is held out.
    runs.write("rows.jsonl", "{\"question\": \"What is 1 + 1?\", \"answer\": \"2\"}\n");
    let output = call(&runs, "model", "few", &["eval.num_problems=null"]).exit(0);
    assert!(output.stdout.contains("evaluation off") && output.stderr.contains("held_out_fraction"), "{output:?}");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn what_passes_is_what_the_run_rewards() {
    let runs = Runs::small();
    let pass = |name: &str, settings: &[&str]| -> f64 {
        let text = train(&runs, "model", name, settings);
        let row = runs.phase(name, "eval").pop().expect("an evaluation");
        assert!(text.contains("pass@1 counts completions with "), "{text}");
        row["eval/pass@1"].as_f64().expect("a share")
    };
    // Any completion has this, and none is the right number.
    let always = "rewards={correct: 0, regex: {vowel: {pattern: x, weight: 0}, any: {pattern: ''}}}";
    assert_eq!(pass("any", &[always]), 1.0);
    assert_eq!(pass("named", &[always, "eval.pass_reward=correct"]), 0.0);
    // With several each has to give 1.
    let both = "rewards.regex={vowel: {pattern: x, weight: 0}, any: {pattern: ''}, never: {pattern: '^$x'}}";
    assert_eq!(pass("both", &["rewards.correct=0", both]), 0.0);
    assert_eq!(pass("sum", &["rewards.correct=0", both, "eval.pass_reward=reward"]), 1.0);
    let text = refuse(&runs, &["eval.pass_reward=beauty"]);
    assert_has(&text, &["`eval.pass_reward`", "one of reward, ", "beauty"]);
}
