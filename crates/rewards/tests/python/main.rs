//! The examples of examples/rewards/ with the packages of PyPI that they are for.

use data::Item;
use rewards::{Program, ProgramConfig, Reward, RewardInput, Rewards};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use testkit::python::Python;

/// Python with the packages.
fn python() -> &'static Python {
    static PYTHON: OnceLock<Python> = OnceLock::new();
    PYTHON.get_or_init(Python::install)
}

fn example(file: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/rewards").join(file).display().to_string()
}

fn judge(file: &str, workers: usize) -> Rewards {
    let mut config = ProgramConfig::new(vec![python().program().to_string_lossy().into_owned(), example(file)]);
    (config.workers, config.timeout) = (workers, 300.0);
    config.env.extend(python().python_path().map(|folder| ("PYTHONPATH".into(), folder.display().to_string())));
    Rewards::from_terms(vec![(Box::new(Program::new("judge", config).unwrap()), 1.0)]).unwrap()
}

fn score(rewards: &Rewards, rows: &[(&Item, &str)]) -> Vec<Option<f32>> {
    let inputs: Vec<RewardInput<'_>> = rows
        .iter()
        .map(|(item, completion)| RewardInput { item, completion, truncated: false, completion_len: 1 })
        .collect();
    let total = |reward: Reward| {
        assert!(reward.failures.is_empty(), "{:?}", reward.failures);
        reward.total
    };
    rewards.score(&inputs).into_iter().map(total).collect()
}

#[test]
fn math_verify_judges_completions() {
    let rewards = judge("math_verify_reward.py", 2);
    let (half, none) = (Item::new("?").with_answer("\\frac{1}{2}"), Item::new("?"));
    let rows = [
        (&half, "So it is half of it, $\\boxed{0.5}$."),
        (&half, "The answer is $\\frac{2}{4}$"),
        (&half, "The answer is $\\frac{1}{3}$"),
        (&none, "5"),
    ];
    assert_eq!(score(&rewards, &rows), [Some(1.0), Some(1.0), Some(0.0), None]);
}

#[test]
fn reasoning_gym_makes_rows_and_judges_them() {
    for task in ["chain_sum", "countdown", "word_sorting"] {
        let output = python().command().arg(example("reasoning_gym_reward.py")).args([task, "5"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let rows: Vec<Value> =
            String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(rows.len(), 5);
        let rewards = judge("reasoning_gym_reward.py", 1);
        for row in rows {
            let mut item = Item::new(row["prompt"].as_str().unwrap()).with_answer(row["answer"].as_str().unwrap());
            let mut columns = row.as_object().unwrap().clone();
            columns.retain(|name, _| name == "dataset" || name == "entry");
            item.columns = Arc::new(columns);
            let right = format!("<think>...</think><answer>{}</answer>", item.answer.as_deref().unwrap());
            let scores = score(&rewards, &[(&item, &right), (&item, "<answer>nothing of the kind</answer>")]);
            let (right, wrong) = (scores[0].unwrap(), scores[1].unwrap());
            assert!(right == 1.0 && wrong < 0.5, "{task}: {scores:?}");
        }
    }
}

/// What a library prints to standard output must not be taken for an answer, and one bad row must not end the program.
#[test]
fn the_helper_keeps_the_protocol() {
    let folder = tempfile::tempdir().unwrap();
    let script = "import sys; sys.path.insert(0, sys.argv[1])\nfrom judge import serve\n\
        def score(row):\n    print('a library says hello')\n    return float(row['completion'])\n\
        serve(score)";
    let file = folder.path().join("reward.py");
    fs::write(&file, script).unwrap();
    let command = vec!["python3".into(), file.display().to_string(), example("")];
    let program = Program::new("judge", ProgramConfig::new(command)).unwrap();
    let rewards = Rewards::from_terms(vec![(Box::new(program), 1.0)]).unwrap();
    let item = Item::new("?");
    let input = |completion| RewardInput { item: &item, completion, truncated: false, completion_len: 1 };
    let scored = rewards.score(&[input("1.5"), input("x"), input("2")]);
    assert_eq!((scored[0].total, scored[2].total), (Some(1.5), Some(2.0)));
    assert!(scored[1].failures[0].1.to_string().contains("ValueError"), "{:?}", scored[1].failures);
}
