//! Metrics of evaluations with scripted completions.

use super::scripted::{Script, scripted};
use super::*;
use grpo_data::DataFile;

/// Four samples, of which two return at least 1.
const FOUR: Script = Script { sampled: &["1.", "0.", "0.", "3."], greedy: "0." };

fn evaluated(change: impl FnOnce(&mut TrainConfig)) -> grpo_trainer::eval::EvalReport {
    let mut config = small();
    config.eval.num_generations = 4;
    config.eval.pass_reward = Some("number".into());
    change(&mut config);
    scripted(FOUR, config, true).evaluate().unwrap()
}

#[test]
fn evaluations_estimate_pass_at_k_from_their_samples() {
    let greedy = evaluated(|_| {});
    assert_eq!((greedy.pass_at_1, greedy.problems), (0.0, 16));
    assert!(greedy.pass_at.is_empty());
    let found = evaluated(|config| config.eval.pass_at = vec![1, 2, 3]);
    assert_eq!(found.pass_at_1, 0.5);
    // A pair has a passing completion unless it is the two failing ones: 1 - 1 / 6.
    assert!((found.pass_at[&2].all - 5.0 / 6.0).abs() < 1e-12);
    assert_eq!((found.pass_at[&3].all, found.pass_at[&3].by_source["comparison"]), (1.0, 1.0));
    assert_eq!(found.pass_at_1_by_task["comparison"], 0.5);
    for report in [greedy, found] {
        assert_eq!((report.mean_rewards["number"], report.mean_rewards["square"]), (1.0, 2.5));
        assert_eq!(report.mean_reward, Some(1.0 - 0.5 * 2.5));
    }
}

#[test]
fn greedy_evaluations_have_one_completion_per_problem() {
    let found = evaluated(|config| config.eval.temperature = Some(0.0));
    assert_eq!((found.pass_at_1, found.mean_reward), (0.0, Some(0.0)));
    let passed = evaluated(|config| {
        config.eval.temperature = Some(0.0);
        config.eval.pass_at = vec![1];
        config.eval.pass_reward = Some("square".into());
    });
    assert_eq!(passed.pass_at_1, 0.0);
}

#[test]
fn num_problems_0_evaluates_all_held_out_rows() {
    let mut config = small();
    config.eval.num_problems = Some(0);
    let endless = grpo_setup::trainer(config.clone()).err().unwrap().to_string();
    assert!(endless.contains("`eval.num_problems`") && endless.contains("without end"), "{endless}");
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, prompt: &str, rows: usize| {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("{{\"prompt\": \"{prompt}\", \"answer\": \"7\"}}\n").repeat(rows)).unwrap();
        vec![DataFile::new(path)]
    };
    config.data.files = file("rows.jsonl", "2+5=", 9);
    config.data.eval_files = file("held_out.jsonl", "3+4=", 5);
    assert_eq!(grpo_setup::trainer(config).unwrap().evaluate().unwrap().problems, 5);
}
