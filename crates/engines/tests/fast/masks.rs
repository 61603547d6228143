//! Completions with the ids that tokens were sampled from, `rollout.replay_sampling_mask` of a run.

use super::*;
use fake::Reply;
use grpo_policy::LogitsProcessors;
use rstest::rstest;
use serde_json::{Value, json};

/// The path of samples with masks.
fn path_of(program: Program) -> &'static str {
    match program {
        Program::Vllm => "/inference/v1/generate",
        Program::Sglang => "/generate",
    }
}

/// A server that returns masks and changes the JSON of its completions.
fn server(program: Program, model: &Model, change: impl Fn(&mut Value) + Send + Sync + 'static) -> Fake {
    let fake = Fake::behaving(program, &model.path(), move |_, _, path, right| match right {
        Reply::Say(200, text) if path == path_of(program) => {
            let mut value: Value = serde_json::from_str(&text).unwrap();
            change(&mut value);
            Reply::json(value)
        }
        right => right,
    });
    fake.with_info(|info| info["vllm_config"]["model_config"]["return_sampling_mask"] = true.into())
}

fn open(model: &Model, server: &Fake, program: Program) -> grpo_engines::Result<ServerEngine> {
    let run = Run { sampling_masks: true, ..model.run() };
    ServerEngine::open(kind(program), &model.config(&[server]), run)
}

/// Returns random sampling with top-k 3.
fn top_k() -> Sampling {
    let Sampling::Random { seed, purpose, .. } = sampling(0) else { unreachable!() };
    let processors = LogitsProcessors { top_k: Some(3), ..LogitsProcessors::default() };
    Sampling::Random { temperature: 0.7, processors, seed, purpose, step: 0, first: 0 }
}

/// Samples top-k tokens with their masks.
fn sample_masked(engine: &mut ServerEngine, model: &mut Model) -> grpo_policy::Result<Vec<Completion>> {
    let prompts = prompts();
    let request = RolloutRequest { return_sampling_mask: true, ..request(&prompts, top_k()) };
    engine.generate(&mut model.policy, &request)
}

#[rstest]
fn completions_have_the_ids_that_their_tokens_were_sampled_from(
    #[values(Program::Vllm, Program::Sglang)] program: Program,
) {
    let mut model = Model::new();
    let server = server(program, &model, |_| {});
    let mut engine = open(&model, &server, program).unwrap();
    let completions = sample_masked(&mut engine, &mut model).unwrap();
    for (index, completion) in completions.iter().enumerate() {
        assert_eq!(completion.sampling_mask.tokens(), completion.ids.len());
        let prompt = &prompts()[index / PER_PROMPT];
        let mut rows: Vec<Vec<f64>> = Vec::new();
        let mut see = |_: usize, logits: &[f32]| {
            rows.extend(logits.chunks(24).map(|row| row.iter().map(|logit| f64::from(*logit) / 0.7).collect()));
        };
        model.policy.logits(&[&prompt[..], &completion.ids].concat(), &mut see).unwrap();
        for (position, (id, logp)) in completion.ids.iter().zip(&completion.logps).enumerate() {
            let (row, kept) = (&rows[prompt.len() - 1 + position], completion.sampling_mask.kept(position).unwrap());
            assert!(kept.len() == 3 && kept.contains(id), "{kept:?}");
            let lse = kept.iter().map(|id| row[*id as usize].exp()).sum::<f64>().ln();
            // Over the kept ids, and not over the vocabulary.
            assert!((row[*id as usize] - lse - f64::from(*logp)).abs() < 1e-4, "{logp}");
        }
    }
    let body = server.requests(path_of(program)).pop().unwrap();
    let params = if program == Program::Vllm { &body["sampling_params"] } else { &body["sampling_params"][0] };
    assert_eq!((&params["top_k"], params["temperature"].as_f64()), (&json!(3), Some(0.7)));
}

/// A vLLM that returns masks refuses greedy requests, and SGLang returns masks only where a request asks for them.
#[rstest]
fn greedy_completions_have_no_masks(#[values(Program::Vllm, Program::Sglang)] program: Program) {
    let mut model = Model::new();
    let masked = server(program, &model, |_| {});
    let mut engine = open(&model, &masked, program).unwrap();
    let prompts = prompts();
    let greedy = request(&prompts, Sampling::Greedy);
    let found = engine.generate(&mut model.policy, &greedy).unwrap();
    let plain = Fake::start(program, &model.path());
    let expected = model.engine(kind(program), &[&plain]).unwrap().generate(&mut model.policy, &greedy).unwrap();
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!((&found.ids, found.sampling_mask.tokens()), (&expected.ids, 0));
    }
    let request = RolloutRequest { return_sampling_mask: true, ..greedy };
    let error = engine.generate(&mut model.policy, &request).unwrap_err().to_string();
    assert!(error.contains("expected random completions"), "{error}");
}

type Change = fn(&mut Value);

#[rstest]
#[case::no_mask("a sampling mask), got none", |v: &mut Value| v["choices"][0]["sampling_mask"] = json!(null))]
#[case::few("a sampling mask for each of", |v: &mut Value| drop(v["choices"][0]["sampling_mask"].as_array_mut().unwrap().pop()))]
#[case::unknown_id("in a sampling mask, got 24", |v: &mut Value| v["choices"][0]["sampling_mask"][0][0] = json!(24))]
#[case::negative_id("expected another reply", |v: &mut Value| v["choices"][0]["sampling_mask"][0][0] = json!(-1))]
#[case::without_the_token("at position 0 in its sampling mask, got 0 other ids", |v: &mut Value| v["choices"][0]["sampling_mask"][0] = json!([]))]
#[case::other_ids("those of other ids", |v: &mut Value| v["choices"][0]["logprobs"]["content"][0]["token_id"] = json!(99))]
#[case::no_logprobs("expected another reply", |v: &mut Value| v["choices"][0]["logprobs"] = json!({}))]
#[case::other_prompt("the prompt of the request", |v: &mut Value| v["prompt_token_ids"] = json!([3]))]
#[case::other_model("completions of the model `m`, got `n`", |v: &mut Value| v["model"] = json!("n"))]
fn invalid_masks_of_vllm_end_the_run(#[case] words: &str, #[case] change: Change) {
    let mut model = Model::new();
    let server = server(Program::Vllm, &model, change);
    let error = sample_masked(&mut open(&model, &server, Program::Vllm).unwrap(), &mut model).unwrap_err().to_string();
    assert!(error.contains(words) && error.contains(&server.url), "{words}: {error}");
}

#[rstest]
#[case::old("expected output_token_sampling_logprobs", |v: &mut Value| drop(v[0]["meta_info"].as_object_mut().unwrap().remove("output_token_sampling_logprobs")))]
#[case::few_logps("a log-probability for each", |v: &mut Value| drop(v[0]["meta_info"]["output_token_sampling_logprobs"].as_array_mut().unwrap().pop()))]
#[case::no_mask("a sampling mask), got none", |v: &mut Value| v[0]["meta_info"]["output_token_sampling_mask"] = json!(null))]
#[case::null_entry("expected a list of completions", |v: &mut Value| v[0]["meta_info"]["output_token_sampling_mask"][0] = json!(null))]
#[case::many("a sampling mask for each of", |v: &mut Value| v[0]["meta_info"]["output_token_sampling_mask"].as_array_mut().unwrap().push(json!([1])))]
#[case::huge_id("in a sampling mask, got 18446744073709551615", |v: &mut Value| v[0]["meta_info"]["output_token_sampling_mask"][0][0] = json!(u64::MAX))]
fn invalid_masks_of_sglang_end_the_run(#[case] words: &str, #[case] change: Change) {
    let mut model = Model::new();
    let server = server(Program::Sglang, &model, change);
    let mut engine = open(&model, &server, Program::Sglang).unwrap();
    let error = sample_masked(&mut engine, &mut model).unwrap_err().to_string();
    assert!(error.contains(words), "{words}: {error}");
}

#[test]
fn vllm_without_the_flags_for_masks_is_refused_with_them() {
    let mut model = Model::new();
    let plain = Fake::start(Program::Vllm, &model.path());
    let error = open(&model, &plain, Program::Vllm).err().unwrap().to_string();
    for words in ["rollout.replay_sampling_mask", "--return-sampling-mask --enable-scale-out", &plain.url] {
        assert!(error.contains(words), "{words}: {error}");
    }
    let with_masks = server(Program::Vllm, &model, |_| {});
    let unmasked = ServerEngine::open(kind(Program::Vllm), &model.config(&[&with_masks]), model.run());
    let error = unmasked.err().unwrap().to_string();
    assert!(
        error.contains("without `--return-sampling-mask`") && error.contains("rollout.replay_sampling_mask"),
        "{error}"
    );
    let disabled = server(Program::Vllm, &model, |_| {}).with_info(|info| info["enable_scale_out"] = false.into());
    let mut engine = open(&model, &disabled, Program::Vllm).unwrap();
    let error = sample_masked(&mut engine, &mut model).unwrap_err().to_string();
    assert!(error.contains("--enable-scale-out") && error.contains("Scale-out endpoints are disabled"), "{error}");
}

/// A vLLM that returns masks lists the ids of every token, also if a request does not need them. The bound of a reply is 1 MiB, and for each token
/// 1 KiB and 12 bytes per id that may be listed.
#[rstest]
// One completion of 8 tokens behind 3; tokens of the same probability as the last of top-k 1 make up to 16 ids.
#[case::greedy(Sampling::Greedy, 11, 16)]
// Two completions; 48 ids are more than the vocabulary.
#[case::top_k(top_k(), 19, 24)]
fn replies_have_room_for_masks_that_were_not_requested(
    #[case] sampling: Sampling,
    #[case] tokens: usize,
    #[case] listed: usize,
    #[values(Program::Vllm, Program::Sglang)] program: Program,
    #[values(false, true)] sampling_masks: bool,
) {
    let mut model = Model::new();
    let prompts = [vec![1, 5, 9]];
    let most = (1 << 20) + tokens * (1024 + if sampling_masks { 12 * listed } else { 0 });
    let mut sample = |length: usize| {
        let server = Fake::behaving(program, &model.path(), move |_, _, path, right| match right {
            Reply::Say(200, text) if [path_of(program), "/v1/completions"].contains(&path) => {
                let spaces = " ".repeat(length - text.len());
                Reply::Say(200, text + &spaces)
            }
            right => right,
        });
        let server = server.with_info(|info| {
            info["vllm_config"]["model_config"]["return_sampling_mask"] = sampling_masks.into();
        });
        let run = Run { sampling_masks, ..model.run() };
        let mut engine = ServerEngine::open(kind(program), &model.config(&[&server]), run).unwrap();
        engine.generate(&mut model.policy, &request(&prompts, sampling))
    };
    for completion in sample(most - 1).unwrap() {
        assert!(!completion.ids.is_empty() && completion.sampling_mask.tokens() == 0);
    }
    let error = sample(most + 1).unwrap_err().to_string();
    assert!(error.contains(&format!("expected a reply of at most {most} bytes")), "{error}");
}
