//! Environments that are programs, here shell scripts.

use grpo_agents::{
    Environment, EnvironmentConfig, EnvironmentProgram, Environments, Episode, Failure, Outcome, Reply, Start,
};
use grpo_data::Item;
use serde_json::{Value, json};
use std::path::PathBuf;
use tempfile::TempDir;

/// A folder with a script.
struct Script(TempDir);

impl Script {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("env.sh"), text).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn config(&self) -> EnvironmentConfig {
        let command = vec!["/bin/sh".into(), self.path("env.sh").display().to_string()];
        EnvironmentConfig { command, timeout: 20.0, ..EnvironmentConfig::default() }
    }

    /// Returns a script and its environment.
    fn started(text: &str) -> (Self, EnvironmentProgram) {
        let script = Self::new(text);
        let environment = script.environment();
        (script, environment)
    }

    fn environment(&self) -> EnvironmentProgram {
        EnvironmentProgram::new("game", &self.config()).unwrap()
    }
}

fn row() -> Item {
    Item::new("Begin.").with_answer("7")
}

fn said(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

fn start(environment: &EnvironmentProgram, worker: usize) -> Box<dyn Episode> {
    environment.reset(&row(), worker).unwrap().episode
}

/// Returns the reply of a program that gives this answer to the first message.
fn reply(answer: &str) -> Result<Reply, Failure> {
    let script = Script::new(&format!("read -r l; echo '{{}}'; read -r l; echo '{answer}'; read -r l"));
    start(&script.environment(), 0).step(&said("x"))
}

#[test]
fn a_program_reads_events_and_answers_with_messages() {
    let script = Script::new(
        "n=0\nwhile read -r l; do\n  echo \"$l\" >> \"$(dirname \"$0\")/log\"\n  n=$((n+1))\n  case $n in\n\
         1) echo '{\"messages\": [{\"role\": \"user\", \"content\": \"Guess.\"}]}';;\n\
         2) echo '{\"content\": \"Lower.\", \"reward\": 0.25}';;\n\
         3) echo '{\"messages\": [], \"reward\": true, \"done\": true}';;\n\
         *) echo '{\"content\": \"?\"}';;\n  esac\ndone\n",
    );
    let environment = script.environment();
    let Start { messages, mut episode } = environment.reset(&row(), 0).unwrap();
    assert_eq!(messages, [json!({"role": "user", "content": "Guess."})]);
    let reply = episode.step(&said("9")).unwrap();
    let lower = json!({"role": "user", "content": "Lower."});
    assert_eq!((reply.messages, reply.reward, reply.done), (vec![lower], Some(0.25), false));
    let reply = episode.step(&said("7")).unwrap();
    assert_eq!((reply.messages.len(), reply.reward, reply.done), (0, Some(1.0), true));
    drop(episode);
    // A text behind a tool call is the result of the tool. The conversation that the environment has not ended is closed.
    let mut episode = start(&environment, 0);
    let call = json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]});
    assert_eq!(episode.step(&call).unwrap().messages[0]["role"], "tool");
    drop(episode);
    let log = std::fs::read_to_string(script.path("log")).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let events: Vec<(u64, &str)> =
        lines.iter().map(|line| (line["id"].as_u64().unwrap(), line["event"].as_str().unwrap())).collect();
    assert_eq!(events, [(0, "reset"), (0, "step"), (0, "step"), (1, "reset"), (1, "step"), (1, "close")]);
    let expected = json!({"prompt": "Begin.", "answer": "7", "answers": ["7"], "columns": {}, "source": "data"});
    assert_eq!((&lines[0]["row"], &lines[1]["message"]), (&expected, &said("9")));
}

#[test]
fn integers_of_any_length_reach_a_program_as_digits() {
    let (script, environment) = Script::started(
        "while read -r l; do\n  echo \"$l\" >> \"$(dirname \"$0\")/log\"\n  echo '{\"content\": \"x\"}'\ndone\n",
    );
    let digits = "98765432109876543210987";
    let function = json!({"name": "f", "arguments": {"id": grpo_files::long_integer(digits)}});
    let call = json!({"role": "assistant", "content": "", "tool_calls": [{"function": function}]});
    start(&environment, 0).step(&call).unwrap();
    let log = std::fs::read_to_string(script.path("log")).unwrap();
    assert!(log.contains(&format!("{{\"id\":{digits}}}")), "{log}");
}

#[test]
fn rewards_are_numbers_true_false_or_null() {
    for (answer, reward) in [
        ("{}", None),
        ("{\"reward\": null}", None),
        ("{\"reward\": false}", Some(0.0)),
        ("{\"reward\": true}", Some(1.0)),
        ("{\"reward\": -0.5}", Some(-0.5)),
    ] {
        assert_eq!(reply(answer).unwrap().reward, reward, "{answer}");
    }
}

#[test]
fn an_answer_that_is_none_is_a_failure_with_the_reason() {
    for (answer, words) in [
        ("nonsense", "expected a line of JSON"),
        ("[1]", "expected an object"),
        ("{\"messages\": 1}", "list of `messages`"),
        ("{\"messages\": [{\"role\": \"assistant\", \"content\": \"x\"}]}", "`role` (tool, user or system)"),
        ("{\"messages\": [{\"role\": \"user\"}]}", "`content`, a text"),
        ("{\"reward\": \"much\"}", "a finite `reward`"),
        ("{\"done\": 1}", "`done` true or false"),
        ("{\"id\": 9}", "conversation with id 0"),
        ("{\"error\": \"out of words\"}", "it says: out of words"),
    ] {
        let text = reply(answer).unwrap_err().to_string();
        assert!(text.contains(words), "{answer}: {text}");
    }
    let script = Script::new("read -r l; echo '{\"done\": true}'; read -r l");
    let text = script.environment().reset(&row(), 0).err().unwrap().to_string();
    assert!(text.contains("before the first message"), "{text}");
}

#[test]
fn conversations_fail_with_their_program_and_the_next_one_starts_it_again() {
    // The program ends after a reset and a step.
    let script = Script::new("for i in 1 2 3; do read -r l; echo '{\"content\": \"x\"}'; done; echo gone >&2; exit 3");
    let environment = script.environment();
    let (mut first, mut second) = (start(&environment, 0), start(&environment, 0));
    first.step(&said("x")).unwrap();
    let text = second.step(&said("x")).unwrap_err().to_string();
    assert!(text.contains("exit status: 3") && text.contains("gone"), "{text}");
    let text = first.step(&said("x")).unwrap_err().to_string();
    assert!(text.contains("its program has ended") && text.contains("gone"), "{text}");
    start(&environment, 0).step(&said("x")).unwrap();
}

#[test]
fn a_line_too_many_fails_all_conversations_of_the_rollout() {
    let double = "read -r l; echo '{}'; read -r l; echo '{}'; read -r l; echo '{\"content\": \"first\", \"done\": true}'; sleep 0.02; \
                  echo '{\"content\": \"stale\", \"reward\": 77, \"done\": true}'";
    // The line comes behind the last answer, or is the answer of the next conversation.
    let (_script, environment) = Script::started(&format!("{double}; while read -r l; do echo '{{}}'; done"));
    let (mut first, mut second) = (start(&environment, 0), start(&environment, 0));
    assert_eq!(first.step(&said("x")).unwrap().messages[0]["content"], "first");
    let _ = second.step(&said("x"));
    for episode in [&mut first, &mut second] {
        let text = episode.end().unwrap_err().to_string();
        assert!(text.contains("may belong to other conversations"), "{text}");
        assert!(text.contains("nobody has asked for") && text.contains("standard error"), "{text}");
    }
    // The conversations of the next process are whole.
    let mut third = start(&environment, 0);
    third.step(&said("x")).unwrap();
    assert_eq!(third.end(), Ok(()));
}

#[test]
fn answers_repeat_the_id_or_the_number_once_one_has() {
    for (second, words) in [
        ("{\\\"content\\\": \\\"a\\\"}", "expected an answer with `number`, as before"),
        ("{\\\"number\\\": 1}", "question with number 2"),
        ("{\\\"number\\\": 2, \\\"id\\\": 5}", "conversation with id 0"),
    ] {
        let script = format!("read -r l; echo '{{\"number\": 1}}'; read -r l; echo \"{second}\"; read -r l");
        let (_script, environment) = Script::started(&script);
        let (mut first, text) = (start(&environment, 0), "x");
        let failure = first.step(&said(text)).unwrap_err().to_string();
        assert!(failure.contains(words), "{second}: {failure}");
        assert!(first.end().is_err());
    }
    // `close` needs no number, and a program that sends them is not waited for.
    let script = "while read -r l; do n=$((n+1)); case $n in 3) echo '{}';; *) echo \"{\\\"number\\\": $n, \\\"content\\\": \\\"a\\\"}\";; \
                  esac; done";
    let (_script, environment) = Script::started(script);
    let mut first = start(&environment, 0);
    first.step(&said("x")).unwrap();
    assert_eq!(first.end(), Ok(()));
    assert_eq!(start(&environment, 0).step(&said("x")).unwrap().messages[0]["content"], "a");
}

#[test]
fn an_answer_that_is_too_long_fails_its_conversation_alone() {
    let long =
        |bytes: usize| format!("printf '{{\"content\": \"'; head -c {bytes} /dev/zero | tr '\\0' 'x'; echo '\"}}'");
    let lines = "read -r l; echo '{}'; read -r l; echo '{}'";
    let script = format!("{lines}; read -r l; {}; read -r l; {}; read -r l", long(9 << 20), long(3 << 20));
    let (_script, environment) = Script::started(&script);
    let (mut first, mut second) = (start(&environment, 0), start(&environment, 0));
    let text = first.step(&said("x")).unwrap_err().to_string();
    assert!(text.contains("more than 8388608 bytes") && text.contains("max_tool_response_length"), "{text}");
    assert_eq!(second.step(&said("x")).unwrap().messages[0]["content"].as_str().unwrap().len(), 3 << 20);
}

#[test]
fn an_empty_text_of_a_program_is_an_observation() {
    assert_eq!(reply("{\"content\": \"\"}").unwrap().messages, [json!({"role": "user", "content": ""})]);
}

#[test]
fn workers_are_processes_of_their_own() {
    let script = Script::new("while read -r l; do echo \"{\\\"content\\\": \\\"$$\\\"}\"; done");
    let environment = EnvironmentProgram::new("game", &EnvironmentConfig { workers: 2, ..script.config() }).unwrap();
    let process = |worker: usize| start(&environment, worker).step(&said("x")).unwrap().messages[0]["content"].clone();
    assert_eq!((environment.workers(), process(0) == process(2), process(0) == process(1)), (2, true, false));
}

#[test]
fn invalid_settings_are_named() {
    let of = |text: &str| Environments::new(&serde_json::from_str(text).unwrap()).unwrap_err().to_string();
    for (text, words) in [
        (r#"{"a b": {"built_in": "calculator"}}"#, "`a b`"),
        (r#"{"a": {}}"#, "one of `command`, `agent`, `url` and `built_in`"),
        (r#"{"a": {"built_in": "calculator", "command": ["x"]}}"#, "got 2 of them"),
        (r#"{"a": {"built_in": "calculator", "timeout": 1}}"#, "environments.a.built_in"),
        (r#"{"a": {"command": ["/nowhere/x"]}}"#, "environments.a.command"),
        (r#"{"a": {"command": ["sh"], "workers": 0}}"#, "environments.a.workers"),
        (r#"{"a": {"command": ["sh"], "timeout": 0}}"#, "environments.a.timeout"),
        (r#"{"a": {"command": ["sh"], "tools": [{}]}}"#, "environments.a.tools"),
    ] {
        let error = of(text);
        assert!(error.contains(words), "{text}: {error}");
    }
}

#[test]
fn rows_name_their_environment_and_failures_in_a_row_are_counted() {
    let text = r#"{"sums": {"built_in": "calculator"}, "words": {"built_in": "word_guess"}}"#;
    let mut environments = Environments::new(&serde_json::from_str(text).unwrap()).unwrap();
    let row = |name: Value| Item {
        columns: std::sync::Arc::new([("environment".to_owned(), name)].into_iter().collect()),
        ..row()
    };
    assert_eq!(environments.of_row(&row(json!("words"))), Ok(1));
    for (name, words) in [(json!("chess"), "`chess`"), (json!(null), "sums, words"), (json!(3), "got 3")] {
        let text = environments.of_row(&row(name)).unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    }
    let failed = || Outcome::Failed(Failure::new("x"));
    for outcome in [failed(), failed(), Outcome::Answered, failed(), Outcome::NotAsked, failed()] {
        environments.count([(Some(1), &Outcome::Answered), (Some(1), &outcome)], 3).unwrap();
        environments.count([(Some(0), &Outcome::Answered)], 3).unwrap();
    }
    // A conversation that has not asked the environment is no success.
    let last = Outcome::Failed(Failure::new("at last"));
    let outcomes = [Outcome::NotAsked, failed(), Outcome::NotAsked, failed(), last];
    environments.count([(Some(1), &Outcome::Answered)], 3).unwrap();
    let text = environments.count(outcomes.iter().map(|outcome| (Some(1), outcome)), 3).unwrap_err().to_string();
    assert!(text.contains("`words` has failed in 3 conversations in a row") && text.contains("at last"), "{text}");
}

#[test]
fn an_environment_that_has_never_answered_ends_the_run_with_the_cause_and_not_its_consequences() {
    let environments = || {
        let text = r#"{"sums": {"built_in": "calculator"}, "words": {"built_in": "word_guess"}}"#;
        Environments::new(&serde_json::from_str(text).unwrap()).unwrap()
    };
    let cause = Outcome::Failed(Failure::new("the database is locked"));
    let consequence = Outcome::Failed(Failure::consequence("its program has ended"));
    let [answered, silent] = [Outcome::Answered, Outcome::NotAsked];
    for outcomes in [vec![&cause], vec![&consequence, &cause], vec![&silent, &consequence, &cause, &consequence]] {
        let outcomes = outcomes.iter().map(|outcome| (Some(1), *outcome)).chain([(Some(0), &answered)]);
        let text = environments().count(outcomes, 256).unwrap_err().to_string();
        assert!(text.contains("`words` has failed in every conversation") && text.contains("is locked"), "{text}");
    }
    let mut environments = environments();
    // One failure beside conversations that did not ask, then an answer.
    environments.count([(Some(1), &silent), (Some(1), &cause)], 256).unwrap();
    environments.count([(Some(1), &answered)], 256).unwrap();
    environments.count([(Some(1), &cause), (Some(1), &cause)], 256).unwrap();
}

/// Tests that take seconds: `cargo fast` skips modules of this name.
mod slow {
    use super::*;

    #[test]
    fn a_program_that_hangs_is_killed_at_its_time_limit() {
        let script = Script::new("read -r l; echo '{}'; sleep 1000");
        let environment =
            EnvironmentProgram::new("game", &EnvironmentConfig { timeout: 2.0, ..script.config() }).unwrap();
        let text = start(&environment, 0).step(&said("x")).unwrap_err().to_string();
        assert!(text.contains("2 seconds, its timeout"), "{text}");
    }
}
