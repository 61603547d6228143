//! Servers that do not fit a run are refused with the flag to set.

use super::*;
use rstest::rstest;
use serde_json::{Value, json};
#[cfg(feature = "https")]
use std::io::{Read, Write};

type Change = fn(&mut Value);

#[rstest]
#[case::old("vLLM 0.32 or later", "0.31.9", |info: &mut Value| info["version"] = json!("0.31.9"))]
#[case::no_version("vLLM 0.32 or later", "got", |info: &mut Value| info["version"] = json!(null))]
#[case::context("--max-model-len 20", "a context of 16 tokens", |info: &mut Value| info["max_model_len"] = json!(16))]
#[case::logprobs("--logprobs-mode processed_logprobs", "raw_logprobs",
    |info: &mut Value| info["vllm_config"]["model_config"]["logprobs_mode"] = json!("raw_logprobs"))]
#[case::quantized("not quantized", "fp8", |info: &mut Value| info["vllm_config"]["model_config"]["quantization"] = json!("fp8"))]
fn vllm_that_does_not_fit_is_refused(#[case] fix: &str, #[case] found: &str, #[case] change: Change) {
    let model = Model::new();
    let server = Fake::start(Program::Vllm, &model.path()).with_info(change);
    let error = model.engine(EngineKind::Vllm, &[&server]).err().unwrap().to_string();
    assert!(error.contains(fix) && error.contains(found) && error.contains(&server.url), "{error}");
}

/// A reload on a CPU leaves a copy of the head at the old weights, if the folder has no head.
#[test]
fn vllm_on_a_cpu_is_refused_for_all_weights_of_a_tied_model() {
    let on_cpu = |info: &mut Value| info["vllm_config"]["device_config"] = json!({"device": "cpu"});
    let tied = |model: &Model| {
        let path = model.path().join("config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        config["tie_word_embeddings"] = json!(true);
        std::fs::write(path, config.to_string()).unwrap();
    };
    let model = Model::new();
    let server = Fake::start(Program::Vllm, &model.path()).with_info(on_cpu);
    model.engine(EngineKind::Vllm, &[&server]).unwrap();
    let on_gpu = Fake::start(Program::Vllm, &model.path());
    tied(&model);
    let error = model.engine(EngineKind::Vllm, &[&server]).err().unwrap().to_string();
    assert!(error.contains("tie_word_embeddings: true") && error.contains("train `lora`"), "{error}");
    model.engine(EngineKind::Vllm, &[&on_gpu]).unwrap();
    let model = Model::adapted();
    let server = Fake::start(Program::Vllm, &model.path()).with_info(on_cpu);
    tied(&model);
    model.engine(EngineKind::Vllm, &[&server]).unwrap();
}

#[rstest]
#[case::no_adapters("--enable-lora --max-lora-rank 4 --max-loras 3", |info: &mut Value| info["vllm_config"]["lora_config"] = json!(null))]
#[case::rank("--max-lora-rank 4", |info: &mut Value| info["vllm_config"]["lora_config"]["max_lora_rank"] = json!(2))]
#[case::few("--max-loras 3", |info: &mut Value| info["vllm_config"]["lora_config"]["max_loras"] = json!(2))]
fn vllm_without_room_for_adapters_is_refused(#[case] fix: &str, #[case] change: Change) {
    let model = Model::adapted();
    let server = Fake::start(Program::Vllm, &model.path()).with_info(change);
    let error = model.engine(EngineKind::Vllm, &[&server]).err().unwrap().to_string();
    assert!(error.contains(fix), "{error}");
}

#[rstest]
#[case::context("--context-length 20", |info: &mut Value| info["context_length"] = json!(16))]
#[case::seeds("--enable-deterministic-inference", |info: &mut Value| info["enable_deterministic_inference"] = json!(false))]
#[case::adapters("--enable-lora --max-lora-rank 4 --max-loras-per-batch 3", |info: &mut Value| info["enable_lora"] = json!(false))]
fn sglang_that_does_not_fit_is_refused(#[case] fix: &str, #[case] change: Change) {
    let model = Model::adapted();
    let server = Fake::start(Program::Sglang, &model.path()).with_info(change);
    let error = model.engine(EngineKind::Sglang, &[&server]).err().unwrap().to_string();
    assert!(error.contains(fix), "{error}");
}

/// Whether another run has replaced the weights below the adapters could not be seen.
#[rstest]
fn adapters_need_a_server_that_names_its_weights(#[values(Program::Vllm, Program::Sglang)] program: Program) {
    let nameless = |model: &Model| {
        Fake::behaving(program, &model.path(), |_, _, path, right| match path {
            "/weight_info" | "/model_info" => fake::Reply::json(json!({})),
            _ => right,
        })
    };
    let model = Model::adapted();
    let error = model.engine(kind(program), &[&nameless(&model)]).err().unwrap().to_string();
    assert!(error.contains("below the adapters") && error.contains("no name of the weights"), "{error}");
    // Whole models get a name with every update.
    let model = Model::new();
    model.engine(kind(program), &[&nameless(&model)]).unwrap();
}

#[test]
fn another_model_is_refused_by_name() {
    let model = Model::new();
    for program in [Program::Vllm, Program::Sglang] {
        let server = Fake::start(program, &model.path());
        let config = ServerConfig { model: Some("other".into()), ..model.config(&[&server]) };
        let error = ServerEngine::open(kind(program), &config, model.run()).err().unwrap().to_string();
        assert!(error.contains("`other`") && error.contains("rollout.server.model"), "{error}");
        let config = ServerConfig { model: Some("m".into()), ..model.config(&[&server]) };
        ServerEngine::open(kind(program), &config, model.run()).unwrap();
    }
}

#[test]
fn routes_for_updates_need_a_variable() {
    let model = Model::new();
    let server = Fake::behaving(Program::Vllm, &model.path(), |_, _, path, right| match path {
        "/server_info" => fake::Reply::Say(404, "{\"detail\":\"Not Found\"}".into()),
        _ => right,
    });
    let error = model.engine(EngineKind::Vllm, &[&server]).err().unwrap().to_string();
    assert!(error.contains("VLLM_SERVER_DEV_MODE=1"), "{error}");
}

#[rstest]
#[case("ftp://localhost", "http:// or https://")]
#[case("localhost:8000", "http:// or https://")]
#[case("http://localhost:8000/v1?key=1", "without a query")]
#[case("http://localhost:8000/v1/completions", "without the path of a request")]
#[case("http://localhost:8000/generate/", "without the path of a request")]
fn invalid_addresses_are_refused(#[case] url: &str, #[case] words: &str) {
    let model = Model::new();
    let config = ServerConfig { base_urls: vec![url.into()], ..ServerConfig::default() };
    let error = ServerEngine::open(EngineKind::Vllm, &config, model.run()).err().unwrap().to_string();
    assert!(error.contains("rollout.server.base_urls") && error.contains(words), "{error}");
}

/// Clients of OpenAI's API have addresses that end with `/v1`.
#[rstest]
fn v1_at_the_end_of_an_address_is_ignored(#[values("/v1", "/v1/", "/")] end: &str) {
    let mut model = Model::new();
    let server = Fake::start(Program::Vllm, &model.path());
    let config = ServerConfig { base_urls: vec![format!("{}{end}", server.url)], ..model.config(&[&server]) };
    let mut engine = ServerEngine::open(EngineKind::Vllm, &config, model.run()).unwrap();
    sample(&mut engine, &mut model, 0).unwrap();
    let twice = ServerConfig { base_urls: vec![server.url.clone(), format!("{}{end}", server.url)], ..config };
    let error = twice.validate().unwrap_err().to_string();
    assert!(error.contains("the same address twice"), "{error}");
}

#[cfg(feature = "https")]
#[test]
fn https_to_a_server_of_http_names_the_scheme() {
    let model = Model::new();
    // As HTTP servers answer a request that they cannot read.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
    });
    let server = Fake::start(Program::Vllm, &model.path());
    let config = ServerConfig { base_urls: vec![url], ..model.config(&[&server]) };
    let error = ServerEngine::open(EngineKind::Vllm, &config, model.run()).err().unwrap().to_string();
    assert!(error.contains("the server speaks http: write http://"), "{error}");
}

#[test]
fn missing_keys_and_dead_servers_are_reported() {
    let model = Model::new();
    let server = Fake::start(Program::Vllm, &model.path());
    let config = ServerConfig { api_key_env: Some("GRPO_TEST_NO_SUCH_KEY".into()), ..model.config(&[&server]) };
    let error = ServerEngine::open(EngineKind::Vllm, &config, model.run()).err().unwrap().to_string();
    assert!(error.contains("rollout.server.api_key_env") && error.contains("GRPO_TEST_NO_SUCH_KEY"), "{error}");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://user:secret-word@{}", listener.local_addr().unwrap());
    drop(listener);
    let config = ServerConfig { base_urls: vec![url], retries: 1, ..ServerConfig::default() };
    let error = ServerEngine::open(EngineKind::Vllm, &config, model.run()).err().unwrap().to_string();
    assert!(error.contains("after 2 attempts") && error.contains("rollout.server.retries"), "{error}");
    assert!(!error.contains("secret-word"), "{error}");
    let refused =
        Fake::behaving(Program::Vllm, &model.path(), |_, _, _, _| fake::Reply::Say(401, "Unauthorized".into()));
    let error = model.engine(EngineKind::Vllm, &[&refused]).err().unwrap().to_string();
    assert!(error.contains("status 401") && error.contains("rollout.server.api_key_env"), "{error}");
    let error =
        ServerEngine::open(EngineKind::Policy, &model.config(&[&server]), model.run()).err().unwrap().to_string();
    assert!(error.contains("`rollout.engine`"), "{error}");
}

/// A server whose weights an earlier run has replaced cannot have adapters to its model.
#[rstest]
fn adapters_are_refused_over_the_weights_of_another_run(#[values(Program::Vllm, Program::Sglang)] program: Program) {
    let mut whole = Model::new();
    let server = Fake::start(program, &whole.path());
    let mut engine = whole.engine(kind(program), &[&server]).unwrap();
    sample(&mut engine, &mut whole, 0).unwrap();
    let adapted = Model::adapted();
    let error = adapted.engine(kind(program), &[&server]).err().unwrap().to_string();
    assert!(error.contains("another run has replaced its weights"), "{error}");
    server.restart();
    adapted.engine(kind(program), &[&server]).unwrap();
}
