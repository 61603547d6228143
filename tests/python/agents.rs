//! Agents with OpenAI's own SDK, which hold the conversations of runs.

use crate::engines::{Vllm, assert_on_policy};
use crate::support::{Call, Runs, assert_has, assert_same_run, both, grpo, processes, repository};
use crate::tiny_model::{call, prepare_shape, small};
use grpo_models::ModelConfig;
use grpo_testkit::python::Python;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::process::Command;

/// Questions whose answers a model can learn by heart.
const QUESTIONS: [(&str, i64); 4] = [("12 + 34", 46), ("81 - 27", 54), ("7 * 13", 91), ("60 + 25", 85)];

/// The calculator of a program, with the SDK.
const AGENT: &str = "examples/agents/calculator_agent.py";

/// Returns a folder with a small Qwen3 that has room for a conversation.
fn runs() -> Runs {
    let runs = Runs::new(&[]);
    prepare_shape(&runs, &ModelConfig { max_position_embeddings: 1024, ..small() });
    runs
}

/// Returns a run with the agent `script`, whose Python has the SDK.
fn run(runs: &Runs, name: &str, script: &str, settings: &[&str]) -> Call {
    let common = ["data.training_chat_template=chatml", "data.held_out_fraction=0", "rewards.environment=1"];
    with_agent(call(runs, "model", name, &[&common[..], settings].concat()), script)
}

/// Adds the agent `script`, whose Python has the SDK.
fn with_agent(call: Call, script: &str) -> Call {
    with_agent_of(call, script, &Python::install_vllm())
}

/// Adds the agent `script` of an interpreter.
fn with_agent_of(call: Call, script: &str, python: &Python) -> Call {
    let program = python.program().to_str().expect("UTF-8").to_owned();
    let agent =
        format!("environments={{test: {{agent: [{program}, {}], workers: 4, timeout: 600}}}}", repository(script));
    let call = call.set([agent]).with_path();
    let command = python.command();
    let path = command.get_envs().find(|(name, _)| *name == OsStr::new("PYTHONPATH"));
    match path.and_then(|(_, value)| value) {
        Some(path) => call.env("PYTHONPATH", path),
        None => call,
    }
}

/// Returns a folder with the model of examples/agents, in `warm/model`, after a supervised warm-up: it guesses wrong answers to [`QUESTIONS`]
/// three times out of four, and otherwise calls the calculator and reads its result.
fn guessing() -> Runs {
    let runs = Runs::new(&[]);
    let mut make = Command::new("python3");
    make.arg(repository("examples/agents/make_model.py")).arg(runs.path("calculator"));
    make.args(["--warmup-rows", "500", "--train-rows", "8", "--test-rows", "8"]);
    assert!(make.status().expect("python3 starts").success());
    let parameters = json!({"type": "object", "properties": {"expression": {"type": "string"}}});
    let tools = json!([{"type": "function", "function": {"name": "calculator", "parameters": parameters}}]);
    let (mut warmup, mut questions) = (String::new(), String::new());
    for (expression, value) in QUESTIONS {
        let question = json!({"role": "user", "content": format!("What is {expression}?")});
        let function = json!({"name": "calculator", "arguments": {"expression": expression}});
        let call =
            json!({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]});
        let result = json!({"role": "tool", "content": value.to_string()});
        let called = format!(
            "<tool_call>\n{{\"name\": \"calculator\", \"arguments\": {{\"expression\": \"{expression}\"}}}}\n</tool_call>"
        );
        let row = |prompt: &[&Value], completion: String| {
            format!("{}\n", json!({"prompt": prompt, "completion": completion, "tools": tools}))
        };
        warmup += &row(&[&question], called);
        for guess in 1..=3 {
            warmup += &row(&[&question], format!("#### {}", value + guess));
        }
        warmup += &row(&[&question, &call, &result], format!("#### {value}")).repeat(4);
        questions +=
            &format!("{}\n", json!({"question": format!("What is {expression}?"), "answer": value.to_string()}));
    }
    runs.write("warmup.jsonl", warmup);
    runs.write("questions.jsonl", questions);
    let optimizer = "learning_rate: 0.003, lr_scheduler_type: cosine, adam_beta2: 0.98";
    let config = format!(
        "model: {}\ndata: {{files: {}, held_out_fraction: 0}}\nrewards: {{terminated: 1}}\nwarmup: {{steps: 120, batch_size: 32, \
         optimizer: {{{optimizer}}}}}\nrollout: {{max_completion_length: 64}}\ngrpo: {{max_steps: 0}}\n",
        runs.text("calculator/model"),
        runs.text("warmup.jsonl"),
    );
    let config = runs.write("warmup.yaml", config);
    grpo(["train", &config, "--run-dir", &runs.text("warm")]).succeed();
    runs
}

/// Returns a run of GRPO with the model of [`guessing`], whose reward is a right answer.
fn learn(runs: &Runs, name: &str, settings: &[&str]) -> Call {
    let config = format!(
        "model: {}\ndata: {{files: {}, held_out_fraction: 0}}\nrewards: {{correct: 1, answer_from: hashes}}\nrollout: \
         {{max_completion_length: 96, multi_turn: {{max_tool_calling_iterations: 2}}}}\ngrpo: {{max_steps: 3, prompts_per_step: 4, \
         num_generations: 8, gradient_accumulation_steps: 2}}\nloss: {{loss_type: grpo, vllm_importance_sampling_correction: true}}\n\
         optimizer: {{learning_rate: 0.0005, lr_scheduler_type: constant}}\neval: {{num_problems: 0}}\nrun: {{save_steps: 0}}\n",
        runs.text("warm/model"),
        runs.text("questions.jsonl"),
    );
    let config = runs.write(&format!("{name}.yaml"), config);
    grpo(["train", &config, "--run-dir", &runs.text(name)]).set(settings)
}

/// Checks that conversations with the calculator were trained on, with the log-probabilities that they were sampled with: the tokens of
/// the tool are behind the policy's in a row, and only the policy's count.
fn assert_tools_on_policy(runs: &Runs, name: &str) {
    assert_on_policy(runs, name, 3);
    for row in &runs.phase(name, "grpo") {
        assert_eq!(value(row, "environments/failures"), 0.0, "{row}");
        assert!(value(row, "tools/call_frequency") > 0.05 && value(row, "num_turns/mean") > 1.05, "{row}");
        assert!(value(row, "tools/failure_frequency") < 0.5 && value(row, "grad_norm") > 0.0, "{row}");
    }
}

fn value(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

/// Settings with which a warm-up memorises the call of [`write_calls`].
const WARMUP: [&str; 2] = [
    "warmup={steps: 80, batch_size: 4, optimizer: {learning_rate: 0.03, lr_scheduler_type: constant}}",
    "rollout={max_completion_length: 200, temperature: 0.2}",
];

/// Writes rows with a tool in the prompt, and its call as the completion.
fn write_calls(runs: &Runs) {
    let parameters =
        json!({"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]});
    let tools = json!([{"type": "function", "function": {"name": "calculator", "description": "Computes.", "parameters": parameters}}]);
    let called = "<tool_call>\n{\"name\": \"calculator\", \"arguments\": {\"expression\": \"2+3\"}}\n</tool_call>";
    runs.write_rows(
        8,
        |_| json!({"question": "What is 2+3?", "answer": "5", "completion": called, "tools": tools, "schemas": tools}),
    );
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn the_sdk_gets_messages_tool_calls_log_probabilities_and_its_own_exceptions() {
    let runs = runs();
    write_calls(&runs);
    let settings = [WARMUP[0], WARMUP[1], "run.log_completions_steps=1"];
    let text = run(&runs, "a", "tests/python/agent.py", &settings).exit(0).stderr;
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
#[ignore = "GRPO_TESTS=all: Python packages"]
fn every_protocol_of_the_endpoint_answers_its_official_sdk() {
    let runs = runs();
    write_calls(&runs);
    let common = [
        "data.training_chat_template=chatml",
        "data.held_out_fraction=0",
        "rewards.environment=1",
        WARMUP[0],
        WARMUP[1],
        "grpo={max_steps: 2, prompts_per_step: 1, num_generations: 4, gradient_accumulation_steps: 1}",
    ];
    let of = |name: &str, more: &[&str]| {
        let call = call(&runs, "model", name, &[&common[..], more].concat());
        with_agent_of(call, "tests/python/sdks.py", &Python::install_agents())
    };
    let text = of("a", &[]).exit(0).stderr;
    assert!(!text.contains("has failed"), "{text}");
    // What the run replaces is said once.
    for field in ["model", "temperature", "seed", "tool_choice"] {
        assert_eq!(text.matches(&format!("agents send `{field}` to rollout.endpoint")).count(), 1, "{field}: {text}");
    }
    for row in &runs.phase("a", "grpo") {
        assert_eq!(value(row, "environments/failures"), 0.0, "{row}");
        assert!(value(row, "num_rows/max") > 4.0 && value(row, "rewards/environment/mean") > 0.5, "{row}");
        assert!(value(row, "endpoint/unmet_requests") > 0.0, "{row}");
    }
    let text = of("strict", &["rollout.endpoint_strict=true"]).exit(2).stderr;
    assert_has(&text, &["`test` has failed in every conversation so far", "is not supported"]);
}

/// The agent of a framework, which is used as it is, learns like [`AGENT`].
#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn an_agent_of_a_framework_learns_to_call_a_tool() {
    let runs = guessing();
    let call = learn(&runs, "a", &["grpo.max_steps=12"]);
    with_agent_of(call, "examples/agents/framework_agent.py", &Python::install_agents()).succeed();
    let steps = runs.phase("a", "grpo");
    let mean = |name: &str, rows: &[Value]| rows.iter().map(|row| value(row, name)).sum::<f64>() / rows.len() as f64;
    let [first, last] = [&steps[..2], &steps[9..]].map(|rows| mean("rewards/correct/mean", rows));
    assert!(last > first + 0.3, "right answers: {first} and {last}");
    assert!(mean("tools/call_frequency", &steps[9..]) > 0.8, "{:?}", steps[11]);
    assert!(steps.iter().all(|row| value(row, "environments/failures") == 0.0));
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
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
    run(&runs, "a", "examples/agents/openai_agent.py", &settings).succeed();
    let steps = runs.phase("a", "grpo");
    let rewards: Vec<f64> = steps.iter().map(|row| value(row, "rewards/environment/mean")).collect();
    assert!(steps.iter().all(|row| value(row, "environments/failures") == 0.0 && value(row, "num_turns/min") == 2.0));
    // The share of digits in what the model writes.
    let mean = |rewards: &[f64]| rewards.iter().sum::<f64>() / rewards.len() as f64;
    let (first, last) = (mean(&rewards[..3]), mean(&rewards[42..]));
    assert!(last > first + 0.2, "{rewards:?}");
}

/// Process 0 has the endpoint and the agents; both processes take the same steps.
#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn an_agent_with_the_sdk_answers_two_processes_like_one() {
    let runs = runs();
    let of = |name: &str, more: &[&str]| {
        let settings = ["grpo.max_steps=3", "rollout.max_completion_length=100", "run.log_completions_steps=1"];
        let settings = [&settings[..], more].concat();
        run(&runs, name, "examples/agents/openai_agent.py", &settings).quick_cpu()
    };
    let two = |name: &str, more: &[&str]| {
        let [leader, follower] = processes();
        let leader = of(name, more).set(leader).spawn();
        let [leader, follower] = both([leader, of("of-process-1", more).set(follower).spawn()]);
        assert_eq!((leader.code, follower.code), (Some(0), Some(0)), "{leader}{follower}");
        let steps = runs.phase(name, "grpo");
        assert_eq!(steps.len(), 3);
        for row in &steps {
            assert_eq!((value(row, "environments/failures"), value(row, "num_turns/min")), (0.0, 2.0), "{row}");
            assert!(value(row, "grad_norm") > 0.0, "{row}");
        }
    };
    of("one", &[]).succeed();
    two("two", &[]);
    assert_same_run(&runs.path("one"), &runs.path("two"));
    // A mesh of XLA's CPU in each process. A checkpoint is only written if both processes have the same weights.
    two("meshes", &["policy.device=pjrt:cpu", "policy.mesh.fsdp=2"]);
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn an_agent_learns_to_call_a_tool() {
    let runs = guessing();
    with_agent(learn(&runs, "a", &["grpo.max_steps=12"]), AGENT).succeed();
    let steps = runs.phase("a", "grpo");
    let mean = |name: &str, rows: &[Value]| rows.iter().map(|row| value(row, name)).sum::<f64>() / rows.len() as f64;
    let [first, last] = [&steps[..2], &steps[9..]].map(|rows| mean("rewards/correct/mean", rows));
    assert!(last > first + 0.3, "right answers: {first} and {last}");
    assert!(mean("tools/call_frequency", &steps[9..]) > 0.8, "{:?}", steps[11]);
    assert!(steps.iter().all(|row| value(row, "environments/failures") == 0.0));
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn conversations_of_agents_and_environments_are_on_policy_on_a_device() {
    let runs = guessing();
    let device = "policy.device=pjrt:cpu";
    with_agent(learn(&runs, "agent", &[device]), AGENT).quick_cpu().succeed();
    assert_tools_on_policy(&runs, "agent");
    let environment = "environments={calculator: {built_in: calculator}}";
    learn(&runs, "environment", &[device, environment]).quick_cpu().succeed();
    assert_tools_on_policy(&runs, "environment");
}

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn conversations_of_agents_and_environments_are_on_policy_with_a_real_vllm() {
    let runs = guessing();
    let server = Vllm::start(&runs.path("warm/model"), &runs.path("vllm.log"));
    let [engine, urls] = server.settings();
    let lora = "lora={r: 4, target_modules: [q_proj, v_proj, down_proj]}";
    // A learning rate at which old adapters would be noticed.
    let settings = [&*engine, &urls, "optimizer.learning_rate=0.01"];
    let environment = "environments={calculator: {built_in: calculator}}";
    learn(&runs, "environment", &[&settings[..], &[lora, environment]].concat()).succeed();
    assert_tools_on_policy(&runs, "environment");
    with_agent(learn(&runs, "agent", &[&settings[..], &[lora]].concat()), AGENT).succeed();
    assert_tools_on_policy(&runs, "agent");
    // This server keeps a tied head when all weights are replaced.
    let text = learn(&runs, "whole", &[&settings[..], &[environment]].concat()).refuse();
    assert_has(&text, &["tie_word_embeddings: true", "train `lora`"]);
}
