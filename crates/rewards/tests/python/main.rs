//! The examples in examples/rewards/ with the PyPI packages that they use.

use grpo_data::Item;
use grpo_rewards::{Program, ProgramConfig, Reward, RewardInput, Rewards};
use grpo_testkit::python::Python;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::{Arc, OnceLock};

grpo_testkit::tiers!();

/// Returns a Python with the packages.
fn python() -> &'static Python {
    static PYTHON: OnceLock<Python> = OnceLock::new();
    PYTHON.get_or_init(Python::install)
}

fn example(file: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/rewards").join(file).display().to_string()
}

fn program(file: &str, arguments: &[&str], workers: usize) -> Rewards {
    let mut command = vec![python().program().to_string_lossy().into_owned(), example(file)];
    command.extend(arguments.iter().map(|argument| (*argument).to_owned()));
    let mut config = ProgramConfig::new(command);
    (config.workers, config.timeout) = (workers, 300.0);
    config.env.extend(python().python_path().map(|folder| ("PYTHONPATH".into(), folder.display().to_string())));
    Rewards::from_terms(vec![(Box::new(Program::new("judge", config).unwrap()), 1.0)]).unwrap()
}

fn score(rewards: &Rewards, rows: &[(&Item, &str)]) -> Vec<Option<f32>> {
    let inputs: Vec<_> = rows.iter().map(|(item, completion)| RewardInput::new(item, completion)).collect();
    let total = |reward: Reward| {
        assert!(reward.failures.is_empty(), "{:?}", reward.failures);
        reward.total
    };
    rewards.score(&inputs).into_iter().map(total).collect()
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn math_verify_judges_completions() {
    let rewards = program("math_verify_reward.py", &[], 2);
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
#[ignore = "GRPO_TESTS=all: Python packages"]
fn reasoning_gym_makes_rows_and_judges_them() {
    for task in ["chain_sum", "countdown", "word_sorting"] {
        let output = python().command().arg(example("reasoning_gym_reward.py")).args([task, "5"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let rows: Vec<Value> =
            String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(rows.len(), 5);
        let rewards = program("reasoning_gym_reward.py", &[], 1);
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

/// Text that a library prints to standard output must not become an answer, and one bad row must not end the program.
#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn the_python_helper_follows_the_protocol() {
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
    let scored = rewards.score(&["1.5", "x", "2"].map(|completion| RewardInput::new(&item, completion)));
    assert_eq!((scored[0].total, scored[2].total), (Some(1.5), Some(2.0)));
    assert!(scored[1].failures[0].1.to_string().contains("ValueError"), "{:?}", scored[1].failures);
}

/// Returns a row whose prompt is a conversation, with a column.
fn conversation(column: &str, value: &str) -> Item {
    let messages = vec![json!({"role": "user", "content": "?"})];
    let mut item = Item::new(grpo_data::Prompt::Messages { messages, tools: None, documents: None });
    item.columns = Arc::new(json!({ column: value }).as_object().unwrap().clone());
    item
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn reward_functions_of_trl_run_unchanged() {
    let third = conversation("solution", "\\frac{1}{3}");
    let rewards = program("trl_adapter.py", &["trl.rewards:accuracy_reward"], 1);
    let rows = [(&third, "It is \\boxed{\\frac{1}{3}}"), (&third, "It is \\boxed{\\frac{1}{2}}")];
    assert_eq!(score(&rewards, &rows), [Some(1.0), Some(0.0)]);
    // `None`, because the reference answer is not mathematics.
    assert_eq!(score(&rewards, &[(&conversation("solution", "$$"), "5")]), [None]);

    let rewards = program("trl_adapter.py", &["trl.rewards:think_format_reward"], 1);
    let rows = [(&third, "<think>\nSo.\n</think>\n1/3"), (&third, "<think>\nSo.\n1/3")];
    assert_eq!(score(&rewards, &rows), [Some(1.0), Some(0.0)]);

    // Factories of reward functions, and a function that reads tokens.
    let of_tokens = |function: &str, arguments: &str, tokens: &[&[u32]]| {
        let rewards = program("trl_adapter.py", &[function, arguments], 1);
        let inputs = tokens.iter().map(|ids| RewardInput { completion_ids: ids, ..RewardInput::new(&third, "x") });
        rewards.score(&inputs.collect::<Vec<_>>()).into_iter().map(|reward| reward.total.unwrap()).collect::<Vec<_>>()
    };
    let overlong = r#"{"max_completion_len": 8, "soft_punish_cache": 4}"#;
    let found = of_tokens("trl.rewards:get_soft_overlong_punishment", overlong, &[&[1; 4], &[1; 6], &[1; 9]]);
    assert_eq!(found, [0.0, -0.5, -1.0]);
    let repetition = r#"{"ngram_size": 2, "max_penalty": -1.0}"#;
    let found = of_tokens("trl.rewards:get_repetition_penalty_reward", repetition, &[&[1, 2, 3, 4], &[5; 5]]);
    assert_eq!(found, [0.0, -0.75]);
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn reward_functions_of_a_file_are_called_as_trl_calls_them() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("helper.py"), "BONUS = 0.5\n").unwrap();
    let functions = folder.path().join("mine.py");
    let text = r#"
import asyncio, os, sys
from helper import BONUS
print("printed when it is imported")

def batches(prompts, completions, completion_ids, trainer_state, **columns):
    print("printed when it is called")
    os.system("echo printed by a program")
    assert sys.stdin.read() == ""
    assert all(isinstance(c, str) for c in completions) and prompts == ["?"] * len(prompts), prompts
    assert columns["level"] == [3] * len(prompts) and "prompt" not in columns, columns
    return [len(completions) + BONUS for _ in completions]

async def later(completions, **kwargs):
    await asyncio.sleep(0)
    return [None if c == "?" else float("nan") if c == "-" else float(c) for c in completions]

def few(completions, **kwargs):
    return [1.0]

def step(trainer_state, **kwargs):
    return [trainer_state.global_step]
"#;
    fs::write(&functions, text).unwrap();
    let of = |name: &str| {
        let target = format!("{}:{name}", functions.display());
        program("trl_adapter.py", &[&target], 1)
    };
    let mut item = Item::new("?");
    item.columns = Arc::new(json!({"level": 3, "prompt": "?"}).as_object().unwrap().clone());
    let rows = [(&item, "1"), (&item, "2"), (&item, "3")];
    // All three functions at once.
    assert_eq!(score(&of("batches"), &rows), [Some(3.5); 3]);
    let rewards = of("later");
    assert_eq!(score(&rewards, &[(&item, "1"), (&item, "?"), (&item, "-")]), [Some(1.0), None, None]);
    // An exception fails its batch, and the program continues.
    let failures = |rewards: &Rewards, completions: &[&str]| {
        let inputs: Vec<_> = completions.iter().map(|completion| RewardInput::new(&item, completion)).collect();
        rewards.score(&inputs).iter().map(|reward| reward.failures[0].1.to_string()).collect::<Vec<_>>()
    };
    let told = failures(&rewards, &["1", "x"]);
    assert!(told.len() == 2 && told.iter().all(|failure| failure.contains("ValueError")), "{told:?}");
    assert_eq!(score(&rewards, &[(&item, "4")]), [Some(4.0)]);
    let told = failures(&of("few"), &["1", "2"]);
    assert!(told.iter().all(|failure| failure.contains("expected 2 rewards")), "{told:?}");
    let told = failures(&of("step"), &["1"]);
    assert!(told[0].contains("trainer_state.global_step is not known"), "{told:?}");
    let told = failures(&of("missing"), &["1"]);
    assert!(told[0].contains("has no 'missing'"), "{told:?}");
}

/// Returns the failure of a TRL function of a file, for a row with the column `solution`.
fn failure_of(text: &str, function: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    fs::write(&file, text).unwrap();
    let command = vec!["python3".into(), example("trl_adapter.py"), format!("{}:{function}", file.display())];
    let program = Program::new("mine", ProgramConfig::new(command)).unwrap();
    let rewards = Rewards::from_terms(vec![(Box::new(program), 1.0)]).unwrap();
    rewards.probe(&RewardInput::new(&conversation("solution", "4"), "4")).unwrap_err().to_string()
}

/// As in TRL, where such a call is a TypeError.
#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn a_trl_function_with_an_argument_without_a_column_is_refused_with_the_columns() {
    let text = "def needs(completions, answer, **kwargs):\n    return [0.0] * len(completions)\n\
                def strict(completions):\n    return [0.0] * len(completions)\n\
                def reads(completions, **kwargs):\n    return [float(s) for s in kwargs['solutions']]\n";
    let error = failure_of(text, "needs");
    assert!(error.contains("mine.py:needs: missing a required argument: 'answer'"), "{error}");
    assert!(error.contains("the columns of the rows are solution"), "{error}");
    let error = failure_of(text, "strict");
    assert!(error.contains("'solution'") && error.contains("needs `**kwargs`"), "{error}");
    let error = failure_of(text, "reads");
    assert!(error.contains("KeyError: 'solutions'") && error.contains("mine.py, line 6, in reads"), "{error}");
    assert!(error.contains("the columns of the rows are solution"), "{error}");
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn an_exception_of_a_trl_function_names_files_and_lines() {
    let text = "import json\n\ndef parsed(text):\n    return json.loads(text + '{')\n\n\
                def reward(completions, **kwargs):\n    return [parsed(c[0]['content']) for c in completions]\n";
    let error = failure_of(text, "reward");
    assert!(error.contains("JSONDecodeError: Extra data"), "{error}");
    assert!(
        error.contains("mine.py, line 4, in parsed; called at ") && error.contains("mine.py, line 7, in "),
        "{error}"
    );
}
