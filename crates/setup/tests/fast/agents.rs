//! Agents that hold conversations over the endpoint: scripted answers with the tokenizer and template of Qwen2.5, and a real policy.

use crate::conversations::{CALL, QUESTION, Questions, RESULT, Script, answers, config, tokenizer};
pub(crate) use crate::support::agents::{Client, Function, Hold, trainer, user};
use grpo_core::advantages::{AdvantageEstimator, Whitening};
use grpo_models::{HfTokenizer, Tokenizer};
use grpo_policy::{Completion, Policy, PolicyEngine, RolloutEngine, RolloutRequest};
use grpo_trainer::agents::{Agent, Calculator, Environment, Environments, Failure};
use grpo_trainer::step::StepReport;
use grpo_trainer::{Error, Result, TrainConfig, Trainer, agents};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

/// Returns the report of a step with two conversations, and the prompts of all answers.
fn step(config: TrainConfig, hold: Hold, turns: [&[&'static str]; 2]) -> (StepReport, Vec<String>) {
    let prompts = Arc::new(Mutex::new(Vec::new()));
    let turns = turns.map(<[_]>::to_vec).to_vec();
    let engine = Box::new(Script { tokenizer: tokenizer(), turns, prompts: Arc::clone(&prompts) });
    let report = trainer(config, hold, answers(), engine).unwrap().grpo_step().unwrap();
    let prompts = prompts.lock().unwrap().clone();
    (report, prompts)
}

/// Returns the number of tokens that the policy writes for a text.
fn tokens(text: &str) -> f64 {
    tokenizer().encode_completion(text).unwrap().len() as f64
}

/// Returns the number of tokens that the loss counts.
fn trained(report: &StepReport) -> f64 {
    match report.metrics.get("entropy") {
        Some(grpo_core::Metric::Mean { count, .. }) => *count,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_agent_with_a_tool_has_the_tokens_of_the_same_environment() {
    let hold: Hold = |client, _| {
        let tools = json!({"tools": Calculator::default().tools().unwrap(), "logprobs": true});
        let mut messages = vec![user(QUESTION)];
        let (message, reason) = client.ask(&messages, tools.clone());
        if reason == "stop" {
            assert_eq!(message["content"], "41");
            return Ok(None);
        }
        let call = &message["tool_calls"][0];
        assert_eq!((reason.as_str(), &message["content"]), ("tool_calls", &Value::Null));
        assert_eq!(call["function"], json!({"name": "calculator", "arguments": "{\"expression\":\"6*7\"}"}));
        let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "42"});
        messages.extend([message.clone(), result]);
        let (status, body) = client.send(&messages, tools);
        assert_eq!((status, &body["choices"][0]["message"]["content"]), (200, &json!("42")));
        let logprobs = body["choices"][0]["logprobs"]["content"].as_array().unwrap();
        let text: String = logprobs.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
        assert_eq!(text, "42<|im_end|>");
        assert!(logprobs.iter().all(|entry| entry["logprob"] == -1.0));
        assert_eq!(body["usage"]["completion_tokens"], logprobs.len());
        Ok(None)
    };
    let (report, mut prompts) = step(config(json!({})), hold, [&[CALL, "42"], &["41"]]);
    prompts.sort_by_key(String::len);
    let first = &prompts[0];
    assert!(first.contains("\"name\": \"calculator\"") && first.contains(QUESTION), "{first}");
    assert_eq!(prompts, [first.clone(), first.clone(), format!("{first}{CALL}<|im_end|>{RESULT}")]);
    let sampled = [tokens(CALL) + tokens("42"), tokens("41")];
    for (name, expected) in [
        ("num_turns/mean", 1.5),
        ("num_rows/max", 1.0),
        ("tools/call_frequency", 0.5),
        ("tools/failure_frequency", 0.0),
        ("environments/failures", 0.0),
        ("completions/mean_length", (sampled[0] + sampled[1]) / 2.0),
        ("completions/clipped_ratio", 0.0),
        ("reward", 0.5),
    ] {
        assert_eq!(report.metrics.value(name), Some(expected), "{name}");
    }
    assert_eq!(trained(&report), sampled[0] + sampled[1]);
    assert_eq!(report.samples[0].completion, format!("{first}{CALL}<|im_end|>{RESULT}42<|im_end|>"));
    assert!(report.samples[0].advantage > 0.0 && report.samples[1].advantage < 0.0);
}

/// Holds conversations with rows of their own: the first continues, begins anew, goes back to its first turn, and continues that.
const FORKS: Hold = |client, index| {
    let first = vec![user("one")];
    let (answer, _) = client.ask(&first, json!({}));
    if index == 1 {
        return Ok(None);
    }
    let told = [first.clone(), vec![answer.clone(), user("two")]].concat();
    client.ask(&told, json!({}));
    // Other words, and the same words with other tools.
    client.ask(&[user("three")], json!({}));
    // Back to the first turn, without what was said then.
    let back = [first, vec![answer, user("four")]].concat();
    let (last, _) = client.ask(&back, json!({}));
    client.ask(&[back, vec![last, user("five")]].concat(), json!({}));
    Ok(None)
};

#[test]
fn rewritten_turns_of_an_agent_become_rows() {
    const THOUGHT: &str = "<think>a</think>b";
    let hold: Hold = |client, _| {
        let first = vec![user("one")];
        let (answer, _) = client.ask(&first, json!({}));
        client.ask(&[first, vec![answer, user("two")]].concat(), json!({}));
        Ok(None)
    };
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let run = |history: grpo_data::History| {
        let mut config = config(json!({}));
        config.data.history = history;
        let prompts = Arc::new(Mutex::new(Vec::new()));
        let with_template = || tokenizer().with_chat_template(template, "test.jinja");
        let turns = vec![vec![THOUGHT, "42"], vec!["b", "42"]];
        let engine = Box::new(Script { tokenizer: with_template(), turns, prompts: Arc::clone(&prompts) });
        let agent: Arc<dyn Agent> = Arc::new(Function(hold, Mutex::new(0)));
        let environments = Environments::from_agents(vec![("test".into(), agent)]);
        let mut parts = grpo_setup::parts_with_tokenizer(&config, Box::new(with_template()))
            .unwrap()
            .with_environments(environments);
        (parts.dataset, parts.rewards, parts.engine) = (Box::new(Questions(0)), answers(), engine);
        let report = Trainer::with_parts(config, parts).unwrap().grpo_step().unwrap();
        let prompts = prompts.lock().unwrap().clone();
        (report, prompts)
    };
    let (report, prompts) = run(grpo_data::History::Fork);
    let next = prompts.iter().filter(|prompt| prompt.contains("two")).collect::<Vec<_>>();
    assert!(next.len() == 2 && next[0] == next[1] && !next[0].contains("think"), "{next:?}");
    assert_eq!(trained(&report), [THOUGHT, "42", "b", "42"].map(tokens).iter().sum::<f64>());
    assert_eq!((report.metric("num_rows/mean"), report.metric("environments/failures")), (1.5, 0.0));
    assert_eq!(report.metric("reward"), 1.0);
}

#[test]
fn edited_histories_become_rows_and_sampled_tokens_are_trained_once() {
    let run = |parts: usize| {
        let mut config = config(json!({}));
        config.grpo.gradient_accumulation_steps = parts;
        step(config, FORKS, [&["a", "b", "c", "d", "42"], &["e"]])
    };
    let (report, prompts) = run(1);
    let turn = |said: &str, next: &str| {
        format!("{said}<|im_end|>\n<|im_start|>user\n{next}<|im_end|>\n<|im_start|>assistant\n")
    };
    let begin = |text: &str| prompts[0].replace("one", text);
    let mut of_first: Vec<&String> = prompts.iter().collect();
    // The other conversation has the same first prompt, once.
    of_first.remove(prompts.iter().rposition(|prompt| *prompt == prompts[0]).unwrap());
    let back = format!("{}{}", begin("one"), turn("a", "four"));
    let expected = [
        begin("one"),
        format!("{}{}", begin("one"), turn("a", "two")),
        begin("three"),
        back.clone(),
        format!("{back}{}", turn("d", "five")),
    ];
    assert_eq!(of_first, expected.iter().collect::<Vec<_>>());
    let sampled = ["a", "b", "c", "d", "42", "e"].map(tokens);
    assert_eq!(trained(&report), sampled.iter().sum::<f64>());
    for (name, expected) in [
        ("num_rows/mean", 2.0),
        ("num_rows/max", 3.0),
        ("num_turns/mean", 3.0),
        ("completions/max_length", sampled[..5].iter().sum()),
        ("reward", 0.5),
    ] {
        assert_eq!(report.metrics.value(name), Some(expected), "{name}");
    }
    // Samples are conversations, compared with the conversations about the same row.
    assert_eq!(report.samples.len(), 2);
    assert!(report.samples[0].advantage > 0.0 && report.samples[1].advantage < 0.0);
    // Micro-batches have at most as many rows as without forks, and change nothing but the order of sums.
    let (split, _) = run(2);
    for name in ["loss", "entropy", "grad_norm"] {
        let [one, two] = [&report, &split].map(|report| report.metric(name));
        assert!((one - two).abs() <= 1e-5 * one.abs().max(1.0), "{name}: {one} {two}");
    }
    assert!(report.metric("grad_norm") > 0.0);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn every_estimator_of_advantages_takes_conversations_with_rows() {
    let with = |change: fn(&mut TrainConfig)| {
        let mut config = config(json!({}));
        config.loss.mask_truncated_completions = true;
        change(&mut config);
        let (report, _) = step(config, FORKS, [&["a", "b", "c", "d", "42"], &["e"]]);
        assert!(report.metric("grad_norm") > 0.0 && report.metric("loss").is_finite());
        [report.samples[0].advantage, report.samples[1].advantage]
    };
    let plain = with(|_| {});
    assert_eq!(plain[0], -plain[1]);
    for advantages in [
        with(|config| {
            config.grpo.advantages.estimator = AdvantageEstimator::ReinforcePlusPlus;
            config.grpo.advantages.whiten = Some(Whitening::Tokens);
        }),
        with(|config| config.grpo.advantages.estimator = AdvantageEstimator::Opo),
        with(|config| config.grpo.use_kl_in_reward = true),
        with(|config| config.grpo.advantages.estimator = AdvantageEstimator::Gae),
    ] {
        assert!(advantages[0] > advantages[1], "{advantages:?}");
    }
}

#[test]
fn a_strict_endpoint_refuses_requests_that_the_run_cannot_sample() {
    let hold: Hold = |client, index| {
        let messages = vec![user("Hi")];
        for (more, param) in [
            (json!({"temperature": 0.5}), "temperature"),
            (json!({"top_p": 0.9}), "top_p"),
            (json!({"stop": ["x"]}), "stop"),
        ] {
            let (status, body) = client.send(&messages, more);
            assert_eq!((status, &body["error"]["param"]), (400, &json!(param)));
            assert!(body["error"]["message"].as_str().unwrap().contains(&format!("rollout.{param}")), "{body}");
        }
        let same = json!({"temperature": 1, "top_p": 1.0, "stop": [], "max_tokens": 2});
        let (message, reason) = client.ask(&messages, same);
        assert_eq!(reason, "length");
        let long = user(&"long ".repeat(1200));
        assert_eq!(client.refusal(std::slice::from_ref(&long), json!({})), (400, "context_length_exceeded".into()));
        // A text far beyond the context is refused by its bytes.
        let (status, body) = client.send(&[user(&"x ".repeat(1 << 20))], json!({}));
        assert_eq!((status, &body["error"]["code"]), (400, &json!("context_length_exceeded")));
        assert!(body["error"]["message"].as_str().unwrap().contains("needs at least 16384"), "{body}");
        if index == 0 {
            // The answer that the agent has cut is continued.
            let next = [messages, vec![message, user("Go on.")]].concat();
            assert_eq!(client.ask(&next, json!({})).1, "stop");
        } else {
            let next = [messages, vec![message, long]].concat();
            assert_eq!(client.refusal(&next, json!({})), (400, "context_length_exceeded".into()));
        }
        Ok(Some(0.5))
    };
    let mut config = config(json!({}));
    config.rollout.endpoint_strict = true;
    let (report, prompts) = step(config, hold, [&["abcdefgh", "42"], &["ijklmnop"]]);
    let cut = prompts.iter().max_by_key(|prompt| prompt.len()).unwrap();
    // The end of the turn that the policy has not written is not trained on.
    assert!(cut.contains("<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>"), "{cut}");
    assert_eq!(trained(&report), 2.0 + tokens("42") + 2.0);
    // Requests that were too long for the run end the conversation early.
    assert_eq!(report.metric("completions/clipped_ratio"), 1.0);
}

#[test]
fn a_stop_text_of_a_request_ends_its_turn_and_unmet_requests_are_counted() {
    let hold: Hold = |client, _| {
        let messages = vec![user(QUESTION)];
        let usual = json!({"stop": ["END"], "temperature": 0, "seed": 3, "model": "gpt-4o-mini"});
        let (message, reason) = client.ask(&messages, usual);
        assert_eq!((message["content"].as_str(), reason.as_str()), (Some("41 "), "stop"));
        let next = [messages, vec![message, user("JSON?")]].concat();
        client.ask(&next, json!({"response_format": {"type": "json_object"}}));
        Ok(Some(1.0))
    };
    let (report, prompts) = step(config(json!({})), hold, [&["41 END! of it", "no"], &["41 END", "{}"]]);
    let continued = prompts.iter().filter(|prompt| prompt.contains("41 END<|im_end|>\n<|im_start|>user\nJSON?"));
    assert_eq!(continued.count(), 2, "{prompts:?}");
    assert_eq!((report.metric("endpoint/unmet_requests"), report.metric("num_rows/max")), (0.5, 1.0));
    // Nothing behind the stop text is trained on.
    let own = tokens("41 END") - 1.0;
    assert_eq!(trained(&report), 2.0 * own + tokens("no") + tokens("{}"));
}

#[test]
fn limits_of_turns_end_conversations() {
    let hold: Hold = |client, index| {
        let tools = json!({"tools": Calculator::default().tools().unwrap()});
        let mut messages = vec![user(QUESTION)];
        let turns = if index == 0 { 2 } else { 3 };
        for _ in 0..turns {
            let (message, _) = client.ask(&messages, tools.clone());
            messages.extend([message, user("More?")]);
        }
        assert_eq!(client.refusal(&messages, tools), (400, "conversation_over".into()));
        Ok(None)
    };
    let limits = json!({"max_tool_calling_iterations": 1, "max_assistant_turns": 3});
    let (report, _) = step(config(limits), hold, [&[CALL, CALL], &["a", "b", "42"]]);
    assert_eq!((report.metric("num_turns/mean"), report.metric("completions/clipped_ratio")), (2.5, 0.0));
    assert_eq!((report.metric("environments/failures"), report.metric("reward")), (0.0, 0.5));
}

#[test]
fn agents_that_fail_are_counted_and_left_out() {
    let hold: Hold = |client, index| match index % 2 {
        0 => {
            client.ask(&[user(QUESTION)], json!({}));
            Ok(None)
        }
        _ => Err(Failure::new("the shop is closed")),
    };
    let (report, _) = step(config(json!({})), hold, [&["42"], &["42"]]);
    assert_eq!((report.metric("environments/failures"), report.metric("reward")), (1.0, 1.0));
    assert_eq!((report.samples[1].reward.total, report.samples[1].advantage), (None, 0.0));
    // Too many in a row end the run, which stays as it was before the step.
    let closed: Hold = |_, _| Err(Failure::new("the shop is closed"));
    let config = config(json!({"max_consecutive_failures": 2}));
    let mut run = trainer(config, closed, answers(), Box::new(PolicyEngine)).unwrap();
    let error = run.grpo_step().unwrap_err();
    assert!(matches!(error, Error::Environments(agents::Error::TooManyFailures { failures: 2, .. })), "{error}");
    assert!(error.to_string().contains("the shop is closed"), "{error}");
    // Without an answer there is nothing to score.
    let mute: Hold = |_, _| Ok(Some(1.0));
    let config = crate::conversations::config(json!({}));
    let mut run = trainer(config, mute, answers(), Box::new(PolicyEngine)).unwrap();
    let error = run.grpo_step().unwrap_err();
    assert!(matches!(error, Error::Environments(agents::Error::NeverAnswered { failures: 2, .. })), "{error}");
    assert!(error.to_string().contains("none of its requests was answered"), "{error}");
}

/// Returns the tokenizer with the special token `<|tool_call|>`, as Granite's.
fn with_special_tag() -> HfTokenizer {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/chat/qwen2_5");
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(source).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    let mut tag = added[0].clone();
    (tag["id"], tag["content"]) = (405.into(), "<|tool_call|>".into());
    added.push(tag);
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    HfTokenizer::open(folder.path(), &[], 512).unwrap()
}

/// An engine that writes a call of the calculator in the first turn, and answers with the result in the second.
struct Calls(HfTokenizer, &'static str);

impl RolloutEngine for Calls {
    fn generate(&mut self, _: &mut dyn Policy, request: &RolloutRequest<'_>) -> grpo_policy::Result<Vec<Completion>> {
        let completion = |index: usize| {
            let text = if request.stream(index) >> 32 == 0 { self.1 } else { "42<|im_end|>" };
            let ids = self.0.encode_rendered(text)?;
            Ok(Completion::sampled(ids.clone(), vec![-1.0; ids.len()], false))
        };
        (0..request.prompts.len() * request.num_generations).map(completion).collect()
    }
}

#[test]
fn calls_whose_tags_are_special_tokens_are_found() {
    let hold: Hold = |client, _| {
        let tools = json!({"tools": Calculator::default().tools().unwrap()});
        let (message, reason) = client.ask(&[user(QUESTION)], tools.clone());
        assert_eq!(
            (reason.as_str(), &message["tool_calls"][0]["function"]["name"]),
            ("tool_calls", &json!("calculator"))
        );
        let result = json!({"role": "tool", "content": "42", "tool_call_id": message["tool_calls"][0]["id"]});
        assert_eq!(client.ask(&[user(QUESTION), message, result], tools).0["content"], "42");
        Ok(None)
    };
    let agent: Arc<dyn Agent> = Arc::new(Function(hold, Mutex::new(0)));
    let of_agents = Environments::from_agents(vec![("test".into(), agent)]);
    let calculator: Arc<dyn Environment> = Arc::new(Calculator::default());
    for environments in [of_agents, Environments::from_list(vec![("test".into(), calculator)])] {
        let config = config(json!({"tool_parser": "granite"}));
        let mut parts = grpo_setup::parts_with_tokenizer(&config, Box::new(with_special_tag()))
            .unwrap()
            .with_environments(environments);
        let call = "<|tool_call|>[{\"name\": \"calculator\", \"arguments\": {\"expression\": \"6*7\"}}]<|im_end|>";
        let engine = Box::new(Calls(with_special_tag(), call));
        (parts.dataset, parts.rewards, parts.engine) = (Box::new(Questions(0)), answers(), engine);
        let report = Trainer::with_parts(config, parts).unwrap().grpo_step().unwrap();
        for (name, expected) in [("tools/call_frequency", 1.0), ("tools/failure_frequency", 0.0), ("reward", 1.0)] {
            assert_eq!(report.metric(name), expected, "{name}");
        }
    }
}

/// Tests that take seconds: `cargo fast` skips modules of this name.
mod slow {
    use super::*;

    #[test]
    fn the_reasoning_parser_decides_whether_a_call_within_thoughts_is_one() {
        let call = "<think><tool_call>{\"name\": \"calculator\", \"arguments\": {\"expression\": \"6*7\"}}</tool_call></think>42<|im_end|>";
        for (parser, frequency) in
            [(Value::Null, 0.0), (json!("qwen3"), 0.0), (json!("mistral"), 1.0), (json!("none"), 1.0)]
        {
            let config = config(json!({"tool_parser": "hermes", "reasoning_parser": parser}));
            let calculator: Arc<dyn Environment> = Arc::new(Calculator::default());
            let environments = Environments::from_list(vec![("test".into(), calculator)]);
            let mut parts = grpo_setup::parts_with_tokenizer(&config, Box::new(tokenizer()))
                .unwrap()
                .with_environments(environments);
            let engine = Box::new(Calls(tokenizer(), call));
            (parts.dataset, parts.rewards, parts.engine) = (Box::new(Questions(0)), answers(), engine);
            let report = Trainer::with_parts(config, parts).unwrap().grpo_step().unwrap();
            assert_eq!(report.metric("tools/call_frequency"), frequency, "{parser}");
        }
    }
}
