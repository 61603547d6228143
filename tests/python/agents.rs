//! Agents with OpenAI's own SDK, which hold the conversations of runs.

use crate::support::{Call, Runs, assert_has, repository};
use crate::tiny_model::{call, prepare_shape, small};
use models::ModelConfig;
use serde_json::{Value, json};
use std::ffi::OsStr;

/// Returns a folder with a small Qwen3 that has room for a conversation.
fn runs() -> Runs {
    let runs = Runs::new(&[]);
    prepare_shape(&runs, &ModelConfig { max_position_embeddings: 1024, ..small() });
    runs
}

/// Returns a run with the agent `script`, whose Python has the SDK.
fn run(runs: &Runs, script: &str, settings: &[&str]) -> Call {
    let python = testkit::python::Python::install_vllm();
    let program = python.program().to_str().expect("UTF-8").to_owned();
    let agent =
        format!("environments={{test: {{agent: [{program}, {}], workers: 4, timeout: 600}}}}", repository(script));
    let common = ["data.training_chat_template=chatml", "data.held_out_fraction=0", "rewards.environment=1", &agent];
    let call = call(runs, "model", "a", &[&common[..], settings].concat()).with_path();
    let command = python.command();
    let path = command.get_envs().find(|(name, _)| *name == OsStr::new("PYTHONPATH"));
    match path.and_then(|(_, value)| value) {
        Some(path) => call.env("PYTHONPATH", path),
        None => call,
    }
}

fn value(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

#[test]
fn the_sdk_gets_messages_tool_calls_log_probabilities_and_its_own_exceptions() {
    let runs = runs();
    let parameters =
        json!({"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]});
    let tools = json!([{"type": "function", "function": {"name": "calculator", "description": "Computes.", "parameters": parameters}}]);
    let called = "<tool_call>\n{\"name\": \"calculator\", \"arguments\": {\"expression\": \"2+3\"}}\n</tool_call>";
    // The warm-up memorises a call, with the tool in the prompt.
    runs.write_rows(
        8,
        |_| json!({"question": "What is 2+3?", "answer": "5", "completion": called, "tools": tools, "schemas": tools}),
    );
    let settings = [
        "warmup={steps: 80, batch_size: 4, optimizer: {learning_rate: 0.03, lr_scheduler_type: constant}}",
        "rollout={max_completion_length: 200, temperature: 0.2}",
        "run.log_completions_steps=1",
    ];
    let text = run(&runs, "tests/python/agent.py", &settings).exit(0).stderr;
    assert!(!text.contains("has failed"), "{text}");
    let steps = runs.phase("a", "grpo");
    assert_eq!(steps.len(), 2);
    for row in &steps {
        assert_eq!((value(row, "environments/failures"), value(row, "num_rows/max")), (0.0, 1.0), "{row}");
    }
    assert!(
        value(&steps[0], "tools/call_frequency") > 0.5 && value(&steps[0], "num_turns/mean") > 1.5,
        "{:?}",
        steps[0]
    );
    // The call and its result are in one row, and the tokens between them are those of the template.
    let result =
        "<|im_end|>\\n<|im_start|>user\\n<tool_response>\\n5\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n";
    assert_has(&runs.read("a/completions.jsonl"), &[result]);
}

#[test]
fn an_agent_loop_with_the_sdk_trains() {
    let runs = runs();
    let settings = [
        "grpo={max_steps: 45, num_generations: 8}",
        "rollout.max_completion_length=100",
        "rewards.environment=10",
        "optimizer.learning_rate=0.02",
        "loss.beta=0",
        "run.save_steps=0",
    ];
    run(&runs, "examples/agents/openai_agent.py", &settings).succeed();
    let steps = runs.phase("a", "grpo");
    let rewards: Vec<f64> = steps.iter().map(|row| value(row, "rewards/environment/mean")).collect();
    assert!(steps.iter().all(|row| value(row, "environments/failures") == 0.0 && value(row, "num_turns/min") == 2.0));
    // The share of digits in what the model writes.
    let mean = |rewards: &[f64]| rewards.iter().sum::<f64>() / rewards.len() as f64;
    let (first, last) = (mean(&rewards[..3]), mean(&rewards[42..]));
    assert!(last > first + 0.2, "{rewards:?}");
}
