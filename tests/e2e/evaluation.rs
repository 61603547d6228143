//! Which held-out rows an evaluation takes, what passes, and runs without any.

use crate::support::{Runs, command, refused, rows, stderr, stdout, succeed};
use crate::tiny_model::{arguments, prepare, train};
use serde_json::Value;

fn evaluations(runs: &Runs, name: &str) -> Vec<Value> {
    let rows = rows(&runs.path(&format!("{name}/metrics.jsonl")));
    rows.into_iter().filter(|row| row["phase"] == "eval").collect()
}

fn refuse(runs: &Runs, settings: &[&str]) -> String {
    let arguments = arguments(runs, "model", "refused", settings);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let text = refused(&arguments, &command(&arguments).output().expect("the binary starts"));
    assert!(!runs.path("refused").exists(), "nothing is left behind: {text}");
    text
}

#[test]
fn an_evaluation_takes_as_many_rows_as_there_are_unless_a_number_was_written() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    train(&runs, "model", "a", &["eval.num_problems=null"]);
    let found = evaluations(&runs, "a");
    let held_out = found[0]["eval/problems"].as_f64().expect("a number");
    assert!(found.len() == 2 && held_out > 0.0 && held_out < 60.0, "{found:?}");
    let text = refuse(&runs, &["eval.num_problems=64"]);
    for part in ["`eval.num_problems`", &format!("at most {held_out}, "), "got 64", "eval: { num_problems: "] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_run_without_held_out_rows_trains_and_says_that_evaluation_is_off() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    // A number that was written does not count: there is nothing to take it of.
    let off = ["data.held_out_fraction=0", "eval.eval_steps=0", "eval.num_problems=64"];
    let text = train(&runs, "model", "a", &off);
    assert!(text.contains("evaluation off: no row is held out"), "{text}");
    assert!(text.contains("60 rows, 60 to train on, 0 held out"), "{text}");
    assert!(evaluations(&runs, "a").is_empty());
    // It goes on as other runs do.
    let resumed = succeed(&["train", "--resume", &runs.text("a"), "--set", "grpo.max_steps=3"]);
    assert!(resumed.contains("continued from step-000002"), "{resumed}");
    let steps = rows(&runs.path("a/metrics.jsonl"));
    assert_eq!(steps.iter().map(|row| row["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
    let text = refuse(&runs, &["data.held_out_fraction=0", "run.metric_for_best_model=pass@1"]);
    assert!(text.contains("`run.metric_for_best_model`") && text.contains("evaluation is off"), "{text}");
    // Rows so few that by chance none is held out.
    std::fs::write(runs.path("rows.jsonl"), "{\"question\": \"What is 1 + 1?\", \"answer\": \"2\"}\n").unwrap();
    let arguments = arguments(&runs, "model", "few", &["eval.num_problems=null"]);
    let output = command(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).output().expect("starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("evaluation off") && stderr(&output).contains("held_out_fraction"), "{output:?}");
}

#[test]
fn what_passes_is_what_the_run_rewards() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let pass = |name: &str, settings: &[&str]| -> f64 {
        let text = train(&runs, "model", name, settings);
        let row = evaluations(&runs, name).pop().expect("an evaluation");
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
    assert!(
        text.contains("`eval.pass_reward`") && text.contains("one of reward, ") && text.contains("beauty"),
        "{text}"
    );
}
