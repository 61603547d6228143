//! Conversations with environments in runs of the binary.

use crate::support::{Runs, assert_has, names};
use crate::tiny_model::{call, prepare_shape, small, train};
use grpo_models::ModelConfig;
use serde_json::{Value, json};
use std::net::TcpListener;

pub(crate) const CALL: &str =
    "<tool_call>\n{\"name\": \"calculator\", \"arguments\": {\"expression\": \"2+3\"}}\n</tool_call>";

/// Returns a folder with a small Qwen3 that has room for a conversation.
pub(crate) fn runs() -> Runs {
    let runs = Runs::new(&[]);
    prepare_shape(&runs, &ModelConfig { max_position_embeddings: 1024, ..small() });
    runs
}

/// Returns the settings of an environment that is the shell script `env.sh`, which answers lines with `answer` to a message.
pub(crate) fn program(runs: &Runs, answer: &str) -> [String; 5] {
    let text = format!(
        "n=0\nwhile read -r l; do\n  n=$((n+1))\n  case \"$l\" in\n  *'\"event\":\"step\"'*) {answer};;\n  *) echo '{{}}';;\n  esac\ndone\n"
    );
    let script = runs.write("env.sh", text);
    [
        format!("environments={{game: {{command: [/bin/sh, {script}]}}}}"),
        "rollout.multi_turn.max_assistant_turns=2".into(),
        "rewards.environment=1".into(),
        "rollout.max_completion_length=100".into(),
        // A model of random weights seldom ends a turn.
        format!("rollout.stop_token_ids={:?}", (0..80).collect::<Vec<_>>()),
    ]
}

pub(crate) fn value(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

#[test]
fn a_model_calls_the_calculator_and_reads_its_result() {
    let runs = runs();
    // The warm-up memorises a call, with the tool in the prompt.
    runs.write_rows(8, |_| json!({"question": "What is 2+3?", "answer": "5", "completion": CALL}));
    let settings = [
        "environments={calculator: {built_in: calculator}}",
        "data.held_out_fraction=0",
        "warmup={steps: 80, batch_size: 4, optimizer: {learning_rate: 0.03, lr_scheduler_type: constant}}",
        "rollout={max_completion_length: 120, temperature: 0.2, multi_turn: {max_tool_calling_iterations: 1}}",
        "run.log_completions_steps=1",
    ];
    train(&runs, "model", "a", &settings);
    let steps = runs.phase("a", "grpo");
    assert!(steps.len() == 2 && steps.iter().all(|row| row["timing_s/environments"].is_f64()), "{steps:?}");
    assert!(
        value(&steps[0], "tools/call_frequency") > 0.5 && value(&steps[0], "num_turns/mean") > 1.5,
        "{:?}",
        steps[0]
    );
    let completions = runs.read("a/completions.jsonl");
    let result =
        "<|im_end|>\\n<|im_start|>user\\n<tool_response>\\n5\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n";
    assert_has(&completions, &[result]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_model_that_calls_no_tool_is_reported_with_a_sample() {
    let runs = runs();
    let answer = "echo '{\"content\": \"x\", \"reward\": '$((n % 3))'}'";
    let settings = program(&runs, answer);
    let calculator = "environments={calculator: {built_in: calculator}}";
    let warning = "no completion of the first step calls a tool";
    let more = ["data.training_chat_template=chatml", "rollout.multi_turn.tool_parser=pythonic"];
    let all: Vec<&str> = settings.iter().map(String::as_str).chain(more).collect();
    let text = call(&runs, "model", "game", &all).exit(0).stderr;
    assert!(!text.contains(warning), "an environment without tools: {text}");
    let text = call(&runs, "model", "tools", &[&all[1..], &[calculator]].concat()).exit(0).stderr;
    assert_has(&text, &[warning, "rollout.multi_turn.tool_parser", "sample="]);
    assert_eq!(text.matches(warning).count(), 1, "{text}");
    // The token that begins a call is sampled now and then, and no call follows it.
    let coder =
        [&all[1..], &[calculator, "rollout.multi_turn.tool_parser=qwen3_coder", "grpo.num_generations=8"]].concat();
    let text = call(&runs, "model", "calls", &coder).exit(0).stderr;
    let steps = runs.phase("calls", "grpo");
    assert!(value(&steps[0], "tools/call_frequency") > 0.0, "{:?}", steps[0]);
    assert_has(&text, &["every call of a tool in the first step failed"]);
}

#[test]
fn a_program_is_an_environment_and_a_template_that_rewrites_turns_is_refused() {
    let runs = runs();
    let answer = "echo '{\"content\": \"More <|im_end|> please.\", \"reward\": '$((n % 3))'}'";
    let settings = program(&runs, answer);
    let settings = settings.each_ref().map(String::as_str);
    let text = call(&runs, "model", "a", &settings).refuse();
    assert_has(&text, &["chat_template.jinja", "reasoning of earlier turns", "training_chat_template: chatml"]);
    assert!(!runs.path("a").exists());
    let training = ["data.training_chat_template=qwen3", "grpo.max_steps=3", "run.log_completions_steps=1"];
    train(&runs, "model", "a", &[&settings[..], &training].concat());
    let steps = runs.phase("a", "grpo");
    for row in &steps {
        assert_eq!((value(row, "num_turns/max"), value(row, "environments/failures")), (2.0, 0.0), "{row}");
        assert!(row["rewards/environment/mean"].is_f64() && value(row, "grad_norm") > 0.0, "{row}");
        // Two turns of the model, and the environment's message does not count.
        assert!(value(row, "completions/max_length") <= 100.0);
    }
    // What the environment says is text, also a special token.
    assert_has(
        &runs.read("a/completions.jsonl"),
        &["user\\nMore <|im_end|> please.<|im_end|>\\n<|im_start|>assistant\\n"],
    );
    // The configuration of the run folder resumes it.
    runs.resume("a").set(["grpo.max_steps=4"]).succeed();
    assert_eq!(runs.phase("a", "grpo").len(), 4);
    // The template's own rendering of every turn is a row. Untrained models write no thoughts, so the tokens before often stay.
    let forks = ["data.history=fork", "grpo.max_steps=1"];
    let text = train(&runs, "model", "b", &[&settings[..], &forks].concat());
    assert_has(&text, &["anew after every turn (data.history: fork)"]);
    for row in runs.phase("b", "grpo") {
        assert_eq!((value(&row, "num_turns/max"), value(&row, "environments/failures")), (2.0, 0.0), "{row}");
        assert!(value(&row, "num_rows/mean") >= 1.0 && value(&row, "grad_norm") > 0.0, "{row}");
    }
    // This template rewrites every earlier turn, so each of the two turns is a row.
    let rewriting = runs.write(
        "rewriting.jinja",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n\
         {{ 'said' if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}\
         {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let template = format!("data.chat_template={rewriting}");
    let forks = ["data.history=fork", "grpo.max_steps=2", "run.log_completions_steps=1", &template];
    train(&runs, "model", "c", &[&settings[..], &forks].concat());
    for row in runs.phase("c", "grpo") {
        assert_eq!((value(&row, "num_rows/mean"), value(&row, "num_turns/max")), (2.0, 2.0), "{row}");
        assert!(value(&row, "grad_norm") > 0.0, "{row}");
    }
    runs.resume("c").set(["grpo.max_steps=3"]).succeed();
    assert_eq!(runs.phase("c", "grpo").len(), 3);
}

#[test]
fn an_environment_that_fails_too_often_ends_the_run_with_a_checkpoint() {
    let runs = runs();
    let answer = "if [ $n -gt 20 ]; then echo '{\"error\": \"out of words\"}'; else echo '{\"content\": \"x\", \"reward\": 1}'; fi";
    let settings = program(&runs, answer);
    let more =
        ["data.training_chat_template=chatml", "rollout.multi_turn.max_consecutive_failures=8", "run.save_steps=0"];
    let all: Vec<&str> = settings.iter().map(String::as_str).chain(more).collect();
    let text = call(&runs, "model", "a", &all).exit(2).stderr;
    assert_has(
        text.lines().last().expect("an error"),
        &["`game` has failed in 8 conversations", "out of words", "--resume"],
    );
    let checkpoints = names(&runs.path("a/checkpoints"));
    // With an environment that works, the run ends.
    program(&runs, "echo '{\"done\": true, \"reward\": 1}'");
    runs.resume("a").succeed();
    assert!(!checkpoints.is_empty() && runs.path("a/summary.json").exists());
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn agents_that_fail_in_the_whole_first_step_end_the_run_with_the_cause() {
    let runs = runs();
    for (name, script, words) in [
        ("exits", "echo no network >&2; exit 3", "exit status: 3"),
        ("hangs", "read -r l; sleep 100", "neither sent a request nor ended in 0.2 seconds"),
        ("mute", "while read -r l; do echo 1; done", "without a request to the endpoint"),
        ("floods", "read -r l; yes", "expected a line of JSON"),
    ] {
        let timeout = if name == "hangs" { 0.2 } else { 60.0 };
        let settings = [
            &format!("environments={{game: {{agent: [/bin/sh, -c, '{script}'], timeout: {timeout}}}}}"),
            "data.training_chat_template=chatml",
            "grpo={prompts_per_step: 1, num_generations: 2, gradient_accumulation_steps: 1}",
            "data.held_out_fraction=0",
            "rollout.max_completion_length=100",
        ];
        let text = call(&runs, "model", name, &settings).exit(2).stderr;
        let error = text.lines().last().expect("an error");
        assert_has(error, &["`game` has failed in every conversation so far that asked it (2)", words]);
    }
    // Too many in a row end the run.
    let settings = [
        "environments={game: {agent: [/bin/sh, -c, 'exit 3']}}",
        "data.training_chat_template=chatml",
        "rollout.max_completion_length=100",
        "rollout.multi_turn.max_consecutive_failures=4",
    ];
    let text = call(&runs, "model", "ends", &settings).exit(2).stderr;
    assert_has(text.lines().last().expect("an error"), &["`game` has failed in 4 conversations", "exit status: 3"]);
}

#[test]
fn wrong_environments_are_refused_before_anything_is_written() {
    let runs = runs();
    let long = "echo '{\"content\": \"x\"}'";
    let script = program(&runs, long);
    let missing = "environments={game: {command: [/nowhere/game]}}";
    let mute = "environments={game: {command: [/bin/sh, -c, 'exit 3']}}";
    let closed = format!("http://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    let absent = format!("environments={{game: {{url: '{closed}'}}}}");
    let two = "environments={sums: {built_in: calculator}, words: {built_in: word_guess}}";
    let calculator = "environments={sums: {built_in: calculator}}";
    let deaf = runs.write("deaf.jinja", "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}");
    let deaf = format!("data.chat_template={deaf}");
    // No parser reads this format of calls.
    let strange = runs.write(
        "strange.jinja",
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\
         PLEASE {{ c.function.name }} WITH {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}\
         {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let strange = format!("data.chat_template={strange}");
    // Another run has the port.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("rollout.endpoint='{}'", listener.local_addr().unwrap());
    let agent = "environments={game: {agent: [/bin/sh]}}";
    let template = "data.training_chat_template=chatml";
    for (settings, words) in [
        (vec![missing], vec!["environments.game.command", "/nowhere/game"]),
        (vec![mute], vec!["`game` cannot start a conversation", "exit status: 3"]),
        (vec![absent.as_str()], vec!["`game` cannot start a conversation", closed.as_str(), "cannot connect"]),
        (vec!["environments={game: {url: game}}"], vec!["environments.game.url", "http://"]),
        (vec!["environments={game: {agent: [/nowhere/agent]}}"], vec!["environments.game.agent", "/nowhere/agent"]),
        (vec!["environments={game: {agent: [x], command: [x]}}"], vec!["environments.game", "got 2 of them"]),
        (vec![agent, template, &taken], vec!["`rollout.endpoint`", "cannot listen on", "another run"]),
        (vec![agent, "rollout.endpoint=localhost"], vec!["`rollout.endpoint`", "such as 127.0.0.1:8000"]),
        (
            vec![calculator, "rollout.endpoint='127.0.0.1:8000'"],
            vec!["`rollout.endpoint`", "no environment is an agent"],
        ),
        (vec!["rollout.endpoint='127.0.0.1:8000'"], vec!["`rollout.endpoint`", "no environment is an agent"]),
        (
            vec![agent, template, "loss={loss_type: grpo, loss_agg_mode: prompt-mean}"],
            vec!["loss.loss_agg_mode", "with agents"],
        ),
        (vec![agent], vec!["reasoning of earlier turns", "training_chat_template", "history: fork"]),
        (
            vec![calculator, template, "data.history=fork", "loss={loss_type: grpo, loss_agg_mode: prompt-mean}"],
            vec!["loss.loss_agg_mode", "data.history=fork"],
        ),
        (vec!["environments={game: {}}"], vec!["environments.game", "`command`, `agent`, `url` and `built_in`"]),
        (vec![two], vec!["column `environment`", "sums, words"]),
        (vec![calculator, "data.apply_chat_template=false"], vec!["a row with messages"]),
        (vec![calculator, &deaf], vec!["deaf.jinja", "does not show the tools"]),
        (
            vec![calculator, &strange],
            vec![
                "`rollout.multi_turn.tool_parser`",
                "a name of docs/agents.md",
                "no parser reads the calls",
                "PLEASE ",
            ],
        ),
        (vec![&script[0], "rollout.multi_turn.max_assistant_turns=0"], vec!["rollout.multi_turn.max_assistant_turns"]),
        (
            vec![calculator, "data.training_chat_template=qwen3", "data.chat_template=x.jinja"],
            vec!["data.training_chat_template", "data.chat_template"],
        ),
        (
            vec![calculator, "rollout.max_completion_length=900"],
            vec!["rollout.max_completion_length", "tools and environments"],
        ),
    ] {
        let text = call(&runs, "model", "a", &settings).refuse();
        assert_has(&text, &words);
        assert!(!runs.path("a").exists(), "{settings:?}");
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn messages_without_room_name_the_key_that_cuts_them() {
    let runs = runs();
    let words = "of the first step's conversations ended because a message of a tool or an environment had no room in \
                 rollout.max_completion_length, 100: cut messages with rollout.multi_turn.max_tool_response_length";
    let long = "printf '{\"content\": \"'; printf '%0900d' 0; echo '\"}'";
    let settings = program(&runs, long);
    let settings: Vec<&str> =
        settings.iter().map(String::as_str).chain(["data.training_chat_template=chatml"]).collect();
    let text = call(&runs, "model", "long", &settings).exit(0).stderr;
    assert_eq!(text.matches(words).count(), 1, "{text}");
    assert!(!text.contains("were cut off at rollout.max_completion_length"), "{text}");
    let cut = [&settings[..], &["rollout.multi_turn.max_tool_response_length=20"]].concat();
    let text = call(&runs, "model", "cut", &cut).exit(0).stderr;
    assert!(!text.contains("had no room"), "{text}");
}

#[test]
fn the_first_restart_of_an_environment_program_is_logged() {
    let runs = runs();
    // It ends after the 16 conversations of a step.
    let answer = "m=$((m+1)); echo '{\"done\": true, \"reward\": 1}'; [ $m -lt 16 ] || exit 4";
    let settings = program(&runs, answer);
    let more = ["data.training_chat_template=chatml", "environments.game.workers=1", "grpo.max_steps=3"];
    let settings: Vec<&str> = settings.iter().map(String::as_str).chain(more).collect();
    let text = call(&runs, "model", "run", &settings).exit(0).stderr;
    let words = "it is started again, as it had ended after its last conversation; this is said once: it has ended (exit status: 4)";
    assert_eq!(text.matches(words).count(), 1, "{text}");
    assert!(runs.phase("run", "grpo").iter().all(|row| value(row, "environments/failures") == 0.0), "{text}");
}

#[test]
fn the_restart_of_an_agent_that_ended_after_its_conversation_is_logged() {
    let runs = runs();
    runs.write_rows(8, |_| json!({"question": "Which word?", "answer": "plane"}));
    let log = runs.text("starts");
    let script = format!("echo started >> {log}; read -r l; echo \"{{\\\"error\\\": \\\"no tools\\\"}}\"; exit 3");
    let agent = runs.write("agent.sh", script);
    let settings = [
        &format!("environments={{game: {{agent: [/bin/sh, {agent}], workers: 1}}}}"),
        "data.training_chat_template=chatml",
        "rewards.environment=1",
        "data.held_out_fraction=0",
        "rollout.max_completion_length=20",
    ];
    let text = call(&runs, "model", "run", &settings).exit(2).stderr;
    let words = "it is started again, as it had ended after its last conversation: it has ended (exit status: 3)";
    let (logged, starts) = (text.matches(words).count(), runs.read("starts").lines().count());
    assert!(logged > 0 && logged == starts - 1, "{logged} of {starts}: {text}");
}
