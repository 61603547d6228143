//! Servers that answer late, wrongly, or not at all.

use super::*;
use fake::Reply;
use rstest::rstest;
use serde_json::{Value, json};

/// The path of samples.
fn path_of(program: Program) -> &'static str {
    match program {
        Program::Vllm => "/v1/completions",
        Program::Sglang => "/generate",
    }
}

/// Samples with a server that changes the JSON of its completions.
fn changed(
    program: Program,
    change: impl Fn(&mut Value) + Send + Sync + 'static,
) -> grpo_policy::Result<Vec<Completion>> {
    let mut model = Model::new();
    let server = Fake::behaving(program, &model.path(), move |_, _, path, right| match right {
        Reply::Say(200, text) if path == path_of(program) => {
            let mut value: Value = serde_json::from_str(&text).unwrap();
            change(&mut value);
            Reply::json(value)
        }
        right => right,
    });
    let mut engine = model.engine(kind(program), &[&server]).unwrap();
    sample(&mut engine, &mut model, 0)
}

type Change = fn(&mut Value);

#[rstest]
#[case::too_few("expected 2 completions, got 1", |v: &mut Value| drop(v["choices"].as_array_mut().unwrap().pop()))]
#[case::too_many("expected 2 completions, got 3", |v: &mut Value| { let c = v["choices"][0].clone(); v["choices"].as_array_mut().unwrap().push(c) })]
#[case::twice("expected each `index` from 0 to 1 once in the completions, got 0 in the place of 1", |v: &mut Value| v["choices"][0]["index"] = json!(0))]
#[case::no_zero("expected each `index` from 0 to 1 once in the completions, got 1 in the place of 0", |v: &mut Value| v["choices"][1]["index"] = json!(1))]
#[case::no_such("got 7 in the place of 1", |v: &mut Value| v["choices"][0]["index"] = json!(7))]
#[case::unknown_token("below 24, the size of the vocabulary, got 24", |v: &mut Value| v["choices"][0]["token_ids"][0] = json!(24))]
#[case::negative_token("expected another reply", |v: &mut Value| v["choices"][0]["token_ids"][0] = json!(-1))]
#[case::no_tokens("expected token_ids", |v: &mut Value| v["choices"][0]["token_ids"] = json!(null))]
#[case::empty("expected 1 to 8 tokens", |v: &mut Value| v["choices"][0]["token_ids"] = json!([]))]
#[case::no_logps("expected logprobs", |v: &mut Value| v["choices"][0]["logprobs"] = json!(null))]
#[case::few_logps("a log-probability for each", |v: &mut Value| v["choices"][0]["logprobs"]["token_logprobs"] = json!([-1.0]))]
#[case::null_logp("finite and at most 0, got NaN", |v: &mut Value| v["choices"][0]["logprobs"]["token_logprobs"][0] = json!(null))]
#[case::positive_logp("finite and at most 0, got 0.5", |v: &mut Value| v["choices"][0]["logprobs"]["token_logprobs"][0] = json!(0.5))]
#[case::huge_logp("finite and at most 0", |v: &mut Value| v["choices"][0]["logprobs"]["token_logprobs"][0] = json!(-1e300))]
#[case::other_model("expected completions of the model `m`, got `n`", |v: &mut Value| v["model"] = json!("n"))]
#[case::other_prompt("the prompt of the request", |v: &mut Value| v["choices"][0]["prompt_token_ids"] = json!([3]))]
#[case::short("that reached its length", |v: &mut Value| {
    for choice in v["choices"].as_array_mut().unwrap() {
        choice["token_ids"] = json!([5]);
        choice["logprobs"]["token_logprobs"] = json!([-1.0]);
        choice["weight_versions"][0]["end"] = json!(1);
        choice["finish_reason"] = json!("length");
    }
})]
#[case::early("ends with token 5", |v: &mut Value| {
    let choice = &mut v["choices"][0];
    choice["token_ids"] = json!([5]);
    choice["logprobs"]["token_logprobs"] = json!([-1.0]);
    choice["weight_versions"][0]["end"] = json!(1);
    choice["finish_reason"] = json!("stop");
})]
#[case::beyond("behind the stop token 2", |v: &mut Value| {
    let choice = &mut v["choices"][0];
    choice["token_ids"] = json!([5, 2, 2]);
    choice["logprobs"]["token_logprobs"] = json!([-1.0, -1.0, -1.0]);
    choice["weight_versions"][0]["end"] = json!(3);
    choice["finish_reason"] = json!("stop");
})]
#[case::spans("contiguous weight_versions", |v: &mut Value| v["choices"][0]["weight_versions"][0]["start"] = json!(1))]
#[case::no_choices("expected another reply", |v: &mut Value| v["choices"] = json!("none"))]
fn invalid_replies_of_vllm_end_the_run(#[case] words: &str, #[case] change: Change) {
    let error = changed(Program::Vllm, change).unwrap_err().to_string();
    assert!(error.contains(words), "{words}: {error}");
}

#[rstest]
#[case::too_few("expected 2 completions, got 1", |v: &mut Value| drop(v.as_array_mut().unwrap().pop()))]
#[case::no_list("expected a list of completions", |v: &mut Value| *v = v[0].clone())]
#[case::unknown_token("below 24", |v: &mut Value| {
    v[0]["output_ids"][0] = json!(99);
    v[0]["meta_info"]["output_token_logprobs"][0][1] = json!(99);
})]
#[case::other_ids("those of other ids", |v: &mut Value| v[0]["output_ids"][0] = json!(23))]
#[case::null_logp("finite and at most 0, got NaN", |v: &mut Value| v[0]["meta_info"]["output_token_logprobs"][0][0] = json!(null))]
#[case::positive_logp("finite and at most 0", |v: &mut Value| v[0]["meta_info"]["output_token_logprobs"][0][0] = json!(1.0))]
#[case::not_finite_logits("ends with a stop of the run", |v: &mut Value| {
    v[0]["meta_info"]["finish_reason"] = json!({"type": "stop", "matched": "NaN happened"});
})]
fn invalid_replies_of_sglang_end_the_run(#[case] words: &str, #[case] change: Change) {
    let error = changed(Program::Sglang, change).unwrap_err().to_string();
    assert!(error.contains(words), "{words}: {error}");
}

#[rstest]
#[case::no_json("expected JSON", "[1, 2")]
#[case::nan(
    "expected JSON",
    "{\"model\": \"m\", \"choices\": [{\"index\": 0, \"logprobs\": {\"token_logprobs\": [NaN]}}]}"
)]
#[case::nothing("expected JSON", "")]
fn replies_that_are_no_json_end_the_run(#[case] words: &str, #[case] text: &'static str) {
    let mut model = Model::new();
    let server = Fake::behaving(Program::Vllm, &model.path(), move |_, _, path, right| match path {
        "/v1/completions" => Reply::Say(200, text.into()),
        _ => right,
    });
    let mut engine = model.engine(EngineKind::Vllm, &[&server]).unwrap();
    let error = sample(&mut engine, &mut model, 0).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}

#[test]
fn endless_replies_are_not_read() {
    let mut model = Model::new();
    let server = Fake::behaving(Program::Vllm, &model.path(), move |_, _, path, right| match path {
        "/v1/completions" => Reply::Say(200, " ".repeat(3 << 20)),
        _ => right,
    });
    let mut engine = model.engine(EngineKind::Vllm, &[&server]).unwrap();
    let error = sample(&mut engine, &mut model, 0).unwrap_err().to_string();
    assert!(error.contains("expected a reply of at most"), "{error}");
}

#[test]
fn failures_without_end_name_the_server_and_the_last_reason() {
    let mut model = Model::new();
    let server = Fake::behaving(Program::Vllm, &model.path(), |_, _, path, right| match path {
        "/v1/completions" => Reply::Say(500, "EngineDeadError".into()),
        _ => right,
    });
    let config = ServerConfig { retries: 1, ..model.config(&[&server]) };
    let mut engine = ServerEngine::open(EngineKind::Vllm, &config, model.run()).unwrap();
    let error = sample(&mut engine, &mut model, 0).unwrap_err().to_string();
    for words in [&*server.url, "EngineDeadError", "after 2 attempts"] {
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn late_replies_are_given_up() {
    let mut model = Model::new();
    let server = Fake::behaving(Program::Vllm, &model.path(), |_, _, path, right| match path {
        "/v1/completions" => Reply::Hang,
        _ => right,
    });
    let config = ServerConfig { timeout: 3.0, retries: 0, ..model.config(&[&server]) };
    let mut engine = ServerEngine::open(EngineKind::Vllm, &config, model.run()).unwrap();
    let error = sample(&mut engine, &mut model, 0).unwrap_err().to_string();
    assert!(error.contains("timeout") && error.contains("after 1 attempt"), "{error}");
}

#[test]
fn a_dead_server_does_not_stop_the_others() {
    let mut model = Model::new();
    let good = Fake::start(Program::Vllm, &model.path());
    let dead = Fake::behaving(Program::Vllm, &model.path(), |_, _, path, right| match path {
        "/v1/completions" => Reply::Close,
        _ => right,
    });
    let mut engine = model.engine(EngineKind::Vllm, &[&dead, &good]).unwrap();
    let completions = sample(&mut engine, &mut model, 0).unwrap();
    assert!(difference(&mut model, &completions) < 1e-4);
    assert_eq!(good.requests("/v1/completions").len(), PROMPTS);
}

/// A server that has lost its weights says so with every completion, and gets them again; one that never keeps them is given up.
#[test]
fn other_weights_are_replaced_or_refused() {
    let lie = |value: &mut Value| {
        for choice in value["choices"].as_array_mut().unwrap() {
            choice["weight_versions"][0]["version"] = json!("default");
        }
    };
    let error = changed(Program::Vllm, lie).unwrap_err().to_string();
    assert!(error.contains("it sampled from the weights `default`") && error.contains("after 4 attempts"), "{error}");
    let silent = |value: &mut Value| {
        for choice in value["choices"].as_array_mut().unwrap() {
            choice["weight_versions"] = json!(null);
        }
    };
    changed(Program::Vllm, silent).unwrap();
}

/// Another program replaces the weights of the server.
#[test]
fn weights_of_another_run_are_noticed() {
    let mut model = Model::new();
    let server = Fake::behaving(Program::Vllm, &model.path(), |_, _, path, right| match (path, right) {
        ("/weight_info", Reply::Say(200, text)) if text.contains("grpo-") => {
            Reply::json(json!({"weight_version": "another"}))
        }
        (_, right) => right,
    });
    let config = ServerConfig { retries: 0, ..model.config(&[&server]) };
    let mut engine = ServerEngine::open(EngineKind::Vllm, &config, model.run()).unwrap();
    let error = sample(&mut engine, &mut model, 0).unwrap_err().to_string();
    assert!(error.contains("got another"), "{error}");
}

#[test]
fn adapters_notice_that_the_model_below_them_was_replaced() {
    let mut model = Model::adapted();
    let server = Fake::behaving(Program::Vllm, &model.path(), |_, number, path, right| match right {
        Reply::Say(200, text) if path == "/v1/completions" && number > 2 => {
            Reply::Say(200, text.replace("\"default\"", "\"step-9\""))
        }
        right => right,
    });
    let mut engine = model.engine(EngineKind::Vllm, &[&server]).unwrap();
    sample(&mut engine, &mut model, 0).unwrap();
    let error = sample(&mut engine, &mut model, 1).unwrap_err().to_string();
    assert!(error.contains("replaced the weights below the adapters by `step-9`"), "{error}");
}

#[test]
fn dropped_completions_end_their_requests() {
    let mut model = Model::new();
    let server = Fake::start(Program::Vllm, &model.path());
    let config = model.config(&[&server]);
    let run = Run { batch_size: 1, ..model.run() };
    let mut engine = ServerEngine::open(EngineKind::Vllm, &config, run).unwrap();
    engine.update_weights(&model.policy, 0).unwrap();
    let prompts = vec![vec![1, 5]; 200];
    let pending = engine.start(&request(&prompts, sampling(0))).unwrap();
    drop(pending);
    let completions = sample(&mut engine, &mut model, 1).unwrap();
    assert_eq!(completions.len(), PROMPTS * PER_PROMPT);
    assert!(server.requests("/v1/completions").len() < 150);
}

/// Tests that take seconds: `cargo fast` skips modules of this name.
mod slow {
    use super::*;

    /// The first replies to samples fail, and retries succeed.
    #[rstest]
    #[case::closed(|_: Reply| Reply::Close)]
    #[case::overloaded(|_: Reply| Reply::Say(503, "busy".into()))]
    #[case::too_many(|_: Reply| Reply::Say(429, "slow down".into()))]
    #[case::aborted(|right: Reply| match right {
        Reply::Say(status, text) => Reply::Say(status, text.replace("\"length\"", "\"abort\"").replace("\"stop\"", "\"abort\"")),
        other => other,
    })]
    fn temporary_failures_are_retried(
        #[case] fail: fn(Reply) -> Reply,
        #[values(Program::Vllm, Program::Sglang)] program: Program,
    ) {
        let mut model = Model::new();
        let good = Fake::start(program, &model.path());
        let expected = sample(&mut model.engine(kind(program), &[&good]).unwrap(), &mut model, 0).unwrap();
        let server = Fake::behaving(program, &model.path(), move |_, number, path, right| {
            match path == path_of(program) && number < 2 {
                true => fail(right),
                false => right,
            }
        });
        let mut engine = model.engine(kind(program), &[&server]).unwrap();
        let found = sample(&mut engine, &mut model, 0).unwrap();
        let ids = |all: &[Completion]| all.iter().map(|completion| completion.ids.clone()).collect::<Vec<_>>();
        assert_eq!(ids(&found), ids(&expected), "a retry has the same seed");
        assert!(server.requests(path_of(program)).len() > PROMPTS);
    }
}
