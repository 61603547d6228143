//! Conversations whose chat template writes ids and names, or rewrites earlier turns.

use crate::conversations::{Questions, Script, answers, config, tokenizer};
use agents::{Calculator, Environment, Environments, Episode, Failure, Reply, Start};
use grpo_data::{History, Item};
use grpo_models::{HfTokenizer, Tokenizer};
use grpo_trainer::step::StepReport;
use grpo_trainer::{TrainConfig, Trainer, agents};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

/// Writes the id of a call, and the id and the name of the call of a result.
const IDS: &str = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if m.role == 'tool' %}{{ m.name + '/' + m.tool_call_id + ': ' }}{% endif %}{{ m.content }}\
    {% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}\
    <tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Drops the thoughts of earlier turns.
const WITHOUT_THOUGHTS: &str = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {{ (m.content or '').split('</think>')[-1] }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>\
    {% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

const CALL: &str = "<tool_call>{\"name\": \"calculator\", \"arguments\": {\"expression\": \"6*7\"}}</tool_call>";

/// An environment with two tools from a function of the message, which it records.
#[derive(Clone)]
struct Recorded(fn(&Value) -> Result<Reply, Failure>, Arc<Mutex<Vec<Value>>>, Value);

impl Recorded {
    fn new(answer: fn(&Value) -> Result<Reply, Failure>) -> Self {
        let tool =
            |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
        Self(answer, Arc::default(), json!([tool("add"), tool("sub")]))
    }
}

impl Environment for Recorded {
    fn tools(&self) -> Option<&Value> {
        Some(&self.2)
    }

    fn reset(&self, _: &Item, _: usize) -> Result<Start, Failure> {
        Ok(Start { messages: vec![], episode: Box::new(self.clone()) })
    }
}

impl Episode for Recorded {
    fn step(&mut self, message: &Value) -> Result<Reply, Failure> {
        self.1.lock().unwrap().push(message.clone());
        (self.0)(message)
    }
}

fn with_template(template: &str) -> HfTokenizer {
    tokenizer().with_chat_template(template, "test.jinja")
}

/// Returns the report of a step with two conversations, and the prompts of all turns.
fn step(
    config: TrainConfig,
    template: &str,
    environment: impl Environment + 'static,
    turns: [&[&'static str]; 2],
) -> (StepReport, Vec<String>) {
    let prompts = Arc::new(Mutex::new(Vec::new()));
    let turns = turns.map(<[_]>::to_vec).to_vec();
    let engine = Script { tokenizer: with_template(template), turns, prompts: Arc::clone(&prompts) };
    let environments = Environments::from_list(vec![("test".into(), Arc::new(environment))]);
    let parts = grpo_setup::parts_with_tokenizer(&config, Box::new(with_template(template))).unwrap();
    let mut parts = parts.with_environments(environments).with_engine(engine);
    (parts.dataset, parts.rewards) = (Box::new(Questions(0)), answers());
    let report = Trainer::with_parts(config, parts).unwrap().grpo_step().unwrap();
    let prompts = prompts.lock().unwrap().clone();
    (report, prompts)
}

fn forking() -> TrainConfig {
    let mut config = config(json!({}));
    config.data.history = History::Fork;
    config
}

/// Returns the number of tokens that the loss counts.
fn trained(report: &StepReport) -> f64 {
    match report.metrics.get("entropy") {
        Some(grpo_core::Metric::Mean { count, .. }) => *count,
        other => panic!("{other:?}"),
    }
}

fn tokens(text: &str) -> f64 {
    tokenizer().encode_completion(text).unwrap().len() as f64
}

const BOTH: &str = "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call><tool_call>{\"name\": \"sub\", \"arguments\": {}}</tool_call>";

#[test]
fn results_without_ids_belong_to_the_calls_in_order_and_ids_name_them() {
    let in_order = Recorded::new(|message| match message.get("tool_calls") {
        Some(_) => Ok(Reply { messages: ["3", "-1"].map(result).to_vec(), ..Reply::default() }),
        None => Ok(Reply { done: true, ..Reply::default() }),
    });
    let by_id = Recorded::new(|message| match message.get("tool_calls") {
        Some(calls) => {
            let answer = |index: usize, content: &str| {
                let mut result = result(content);
                result["tool_call_id"] = calls[index]["id"].clone();
                result
            };
            Ok(Reply { messages: vec![answer(1, "-1"), answer(0, "3")], ..Reply::default() })
        }
        None => Ok(Reply { done: true, ..Reply::default() }),
    });
    for (environment, contents) in [(in_order, [("add", "3"), ("sub", "-1")]), (by_id, [("sub", "-1"), ("add", "3")])] {
        let seen = Arc::clone(&environment.1);
        let (report, prompts) = step(config(json!({})), IDS, environment, [&[BOTH, "42"], &["41"]]);
        assert_eq!(report.metrics.value("environments/failures"), Some(0.0));
        let seen = seen.lock().unwrap();
        let calls = seen.iter().find_map(|message| message["tool_calls"].as_array()).unwrap();
        let id = |name: &str| {
            let call = calls.iter().find(|call| call["function"]["name"] == name).unwrap();
            call["id"].as_str().unwrap().to_owned()
        };
        assert!(id("add") != id("sub") && id("add").len() == 9);
        let next = prompts.iter().find(|prompt| prompt.contains("tool\n")).unwrap();
        let results =
            contents.map(|(name, content)| format!("<|im_start|>tool\n{name}/{}: {content}<|im_end|>\n", id(name)));
        assert!(next.ends_with(&format!("{}<|im_start|>assistant\n", results.concat())), "{next}");
    }
}

fn result(content: &str) -> Value {
    json!({"role": "tool", "content": content})
}

#[test]
fn the_id_of_no_call_fails_its_conversation() {
    let environment = Recorded::new(|message| {
        let mut result = result("3");
        result["tool_call_id"] = "call_7".into();
        Ok(Reply { messages: vec![result], done: message.get("tool_calls").is_none(), ..Reply::default() })
    });
    let (report, prompts) = step(config(json!({})), IDS, environment, [&[BOTH, "42"], &["41"]]);
    assert_eq!(report.metrics.value("environments/failures"), Some(1.0));
    assert_eq!(prompts.len(), 2, "no turn follows");
}

#[test]
fn ids_repeat_with_the_seed_and_differ_between_conversations() {
    let ids = |seed: u64| {
        let environment = Recorded::new(|_| Ok(Reply { done: true, ..Reply::default() }));
        let seen = Arc::clone(&environment.1);
        let mut config = config(json!({}));
        config.seed = seed;
        step(config, IDS, environment, [&[BOTH], &[BOTH]]);
        let seen = seen.lock().unwrap();
        let calls = seen.iter().flat_map(|message| message["tool_calls"].as_array().unwrap().clone());
        calls.map(|call| call["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let first = ids(1);
    assert_eq!(first.iter().collect::<std::collections::BTreeSet<_>>().len(), 4, "{first:?}");
    assert_eq!(first, ids(1));
    assert_ne!(first, ids(2));
}

#[test]
fn a_conversation_whose_template_rewrites_turns_goes_on_in_another_row() {
    let thought = format!("<think>six times seven</think>{CALL}");
    let thought: &'static str = Box::leak(thought.into_boxed_str());
    let (report, prompts) =
        step(forking(), WITHOUT_THOUGHTS, Calculator::default(), [&[thought, "<think>so</think>42"], &[CALL, "42"]]);
    let first = &prompts[0];
    let next = format!("{CALL}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n");
    // The thought is gone, and the second conversation has had none.
    assert_eq!(prompts[2..], [format!("{first}{next}"), format!("{first}{next}")]);
    let sampled = [tokens(thought) + tokens("<think>so</think>42"), tokens(CALL) + tokens("42")];
    for (name, expected) in [
        ("num_rows/mean", 1.5),
        ("num_rows/max", 2.0),
        ("num_turns/mean", 2.0),
        ("environments/failures", 0.0),
        ("completions/max_length", sampled[0]),
        ("completions/min_length", sampled[1]),
    ] {
        assert_eq!(report.metrics.value(name), Some(expected), "{name}");
    }
    // Every sampled token of both rows is trained on once, and nothing else.
    assert_eq!(trained(&report), sampled[0] + sampled[1]);
    assert!(report.samples[0].completion.starts_with(first.as_str()), "{}", report.samples[0].completion);
    assert!(report.samples[0].completion.ends_with("<think>so</think>42<|im_end|>"));
}

#[test]
fn a_rendering_without_room_ends_the_conversation_with_the_rows_so_far() {
    let mut config = forking();
    let (_, prompts) = step(forking(), WITHOUT_THOUGHTS, Calculator::default(), [&[CALL, "42"], &["41"]]);
    let length = tokenizer().encode_rendered(&prompts[0]).unwrap().len();
    // The context is 1024 tokens.
    config.rollout.max_completion_length = Some(1024 - length - 4);
    let thought: &'static str = Box::leak(format!("<think>so</think>{CALL}").into_boxed_str());
    let (report, _) = step(config, WITHOUT_THOUGHTS, Calculator::default(), [&[thought, "42"], &["41"]]);
    assert_eq!(report.metrics.value("environments/without_room"), Some(0.5));
    assert_eq!(report.metrics.value("num_rows/max"), Some(1.0));
    assert!(report.samples[0].truncated && report.samples[0].completion.starts_with(thought));
}
