//! Completions of servers that behave.

use super::*;
use rstest::rstest;
use std::collections::BTreeSet;

#[rstest]
fn completions_have_the_log_probabilities_of_the_policy(
    #[values(Program::Vllm, Program::Sglang)] program: Program,
    #[values(Model::new, Model::adapted)] model: fn() -> Model,
) {
    let mut model = model();
    let server = Fake::start(program, &model.path());
    let mut engine = model.engine(kind(program), &[&server]).unwrap();
    model.change(7);
    engine.update_weights(&model.policy, 3).unwrap();
    let completions = sample(&mut engine, &mut model, 0).unwrap();
    assert_eq!(completions.len(), PROMPTS * PER_PROMPT);
    assert!(completions.iter().any(|completion| completion.truncated));
    for completion in &completions {
        let ends = completion.ids.last() == Some(&STOP);
        assert_eq!(completion.truncated, !ends);
        let span = completion.weight_versions[0];
        assert_eq!((span.version, span.start, span.end), (3, 0, completion.ids.len()));
    }
    assert!(difference(&mut model, &completions) < 1e-4);
    // The same weights as before are another policy.
    model.change(8);
    assert!(difference(&mut model, &completions) > 0.1);
}

#[rstest]
fn seeds_repeat_and_differ_between_prompts_steps_and_completions(
    #[values(Program::Vllm, Program::Sglang)] program: Program,
) {
    let mut model = Model::new();
    let server = Fake::start(program, &model.path());
    let mut engine = model.engine(kind(program), &[&server]).unwrap();
    let first = sample(&mut engine, &mut model, 0).unwrap();
    assert_eq!(sample(&mut engine, &mut model, 0).unwrap(), first);
    let other = sample(&mut engine, &mut model, 1).unwrap();
    assert!(first.iter().zip(&other).any(|(a, b)| a.ids != b.ids));
    let seeds: Vec<u64> = match program {
        Program::Vllm => server.requests("/v1/completions").iter().map(|body| body["seed"].as_u64().unwrap()).collect(),
        Program::Sglang => {
            let bodies = server.requests("/generate");
            let all = bodies.iter().flat_map(|body| body["sampling_params"].as_array().unwrap().clone());
            all.map(|params| params["sampling_seed"].as_u64().unwrap()).collect()
        }
    };
    // Two of three requests have the same seeds.
    let per_request = if program == Program::Vllm { PROMPTS } else { PROMPTS * PER_PROMPT };
    assert_eq!(seeds.len(), 3 * per_request);
    let distinct: BTreeSet<u64> = seeds.iter().copied().collect();
    assert_eq!(distinct.len(), 2 * per_request);
    assert!(distinct.iter().all(|seed| *seed < 1 << 62));
    let of_prompts: Vec<u64> = distinct.iter().copied().step_by(per_request / PROMPTS).collect();
    assert!(of_prompts.windows(2).all(|pair| pair[1] - pair[0] > 1000), "completion i of a prompt has seed + i");
}

#[rstest]
fn greedy_completions_are_sampled_once_per_prompt(#[values(Program::Vllm, Program::Sglang)] program: Program) {
    let mut model = Model::new();
    let server = Fake::start(program, &model.path());
    let mut engine = model.engine(kind(program), &[&server]).unwrap();
    let prompts = prompts();
    let request = request(&prompts, Sampling::Greedy);
    let completions = engine.generate(&mut model.policy, &request).unwrap();
    let own = model.policy.generate(&request).unwrap();
    assert_eq!(
        completions.iter().map(|completion| &completion.ids).collect::<Vec<_>>(),
        own.iter().map(|completion| &completion.ids).collect::<Vec<_>>()
    );
    assert_eq!(completions[0], completions[1]);
}

#[test]
fn every_sampling_option_is_sent_because_servers_have_defaults_of_their_own() {
    let mut model = Model::new();
    let server = Fake::start(Program::Vllm, &model.path());
    let mut engine = model.engine(EngineKind::Vllm, &[&server]).unwrap();
    sample(&mut engine, &mut model, 0).unwrap();
    let body = server.requests("/v1/completions").remove(0);
    for (name, value) in
        [("top_p", 1.0), ("top_k", -1.0), ("min_p", 0.0), ("repetition_penalty", 1.0), ("temperature", 0.7)]
    {
        assert_eq!(body[name].as_f64(), Some(value), "{name}");
    }
    assert_eq!((&body["ignore_eos"], &body["stop_token_ids"]), (&true.into(), &vec![STOP].into()));
    let processors = grpo_policy::LogitsProcessors {
        top_k: Some(3),
        top_p: Some(0.9),
        min_p: Some(0.1),
        repetition_penalty: Some(1.2),
    };
    let Sampling::Random { seed, purpose, .. } = sampling(0) else { unreachable!() };
    let random = Sampling::Random { temperature: 0.5, processors, seed, purpose, step: 0, first: 0 };
    let prompts = prompts();
    engine.generate(&mut model.policy, &request(&prompts, random)).unwrap();
    let body = server.requests("/v1/completions").pop().unwrap();
    for (name, value) in
        [("top_p", 0.9), ("top_k", 3.0), ("min_p", 0.1), ("repetition_penalty", 1.2), ("temperature", 0.5)]
    {
        assert_eq!(body[name].as_f64(), Some(value), "{name}");
    }
}

/// Ends completions at token 4.
#[derive(Debug)]
struct Four(Vec<String>);

impl grpo_policy::StopCondition for Four {
    fn is_met(&self, completion: &[u32]) -> grpo_policy::Result<bool> {
        Ok(completion.contains(&4))
    }

    fn texts(&self) -> &[String] {
        &self.0
    }
}

#[test]
fn stop_texts_are_sent_and_completions_are_cut_where_the_run_sees_them() {
    let mut model = Model::new();
    let server = Fake::start(Program::Vllm, &model.path());
    let mut engine = model.engine(EngineKind::Vllm, &[&server]).unwrap();
    let (prompts, stop) = (prompts(), Four(vec!["4".into()]));
    let request = RolloutRequest { stop: Some(&stop), num_generations: 16, ..request(&prompts, sampling(0)) };
    let completions = engine.generate(&mut model.policy, &request).unwrap();
    assert!(completions.iter().any(|completion| completion.ids.last() == Some(&4)));
    for completion in &completions {
        assert!(!completion.ids[..completion.ids.len() - 1].contains(&4), "nothing is behind the stop");
        assert_eq!(completion.truncated, ![STOP, 4].contains(completion.ids.last().unwrap()));
        assert_eq!(completion.logps.len(), completion.ids.len());
        assert_eq!(completion.weight_versions[0].end, completion.ids.len());
    }
    assert_eq!(server.requests("/v1/completions")[0]["stop"], serde_json::json!(["4"]));
}

#[test]
fn requests_carry_the_key_of_the_environment() {
    // `PATH` exists in every environment, and is no legal key only if it has line breaks.
    let mut model = Model::new();
    let server = Fake::start(Program::Vllm, &model.path());
    let config = ServerConfig { api_key_env: Some("PATH".into()), ..model.config(&[&server]) };
    let mut engine = ServerEngine::open(EngineKind::Vllm, &config, model.run()).unwrap();
    sample(&mut engine, &mut model, 0).unwrap();
    let expected = format!("authorization: bearer {}", std::env::var("PATH").unwrap().to_lowercase());
    assert!(server.heads().iter().all(|head| head.contains(&expected)), "{:?}", server.heads()[0]);
}

#[test]
fn requests_are_spread_over_all_servers() {
    let mut model = Model::new();
    let servers = [Fake::start(Program::Vllm, &model.path()), Fake::start(Program::Vllm, &model.path())];
    let mut engine = model.engine(EngineKind::Vllm, &[&servers[0], &servers[1]]).unwrap();
    model.change(4);
    let mut all = Vec::new();
    for step in 0..8 {
        all.extend(sample(&mut engine, &mut model, step).unwrap());
    }
    let counts = servers.each_ref().map(|server| server.requests("/v1/completions").len());
    assert_eq!(counts.iter().sum::<usize>(), 8 * PROMPTS);
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    for completions in all.chunks(PROMPTS * PER_PROMPT) {
        assert!(difference(&mut model, completions) < 1e-4);
    }
}
