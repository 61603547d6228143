//! Updates of weights, and servers that lose them.

use super::*;
use rstest::rstest;
use std::sync::atomic::{AtomicBool, Ordering};

#[rstest]
fn completions_follow_every_update(
    #[values(Program::Vllm, Program::Sglang)] program: Program,
    #[values(Model::new, Model::adapted)] model: fn() -> Model,
) {
    let mut model = model();
    let server = Fake::start(program, &model.path());
    let mut engine = model.engine(kind(program), &[&server]).unwrap();
    for version in 0..4 {
        model.change(20 + version);
        engine.update_weights(&model.policy, version).unwrap();
        let completions = sample(&mut engine, &mut model, version).unwrap();
        assert!(completions.iter().all(|completion| completion.weight_versions[0].version == version));
        assert!(difference(&mut model, &completions) < 1e-4, "version {version}");
    }
}

#[rstest]
fn old_adapters_and_folders_are_removed(#[values(Program::Vllm, Program::Sglang)] program: Program) {
    let mut model = Model::adapted();
    let server = Fake::start(program, &model.path());
    let mut engine = model.engine(kind(program), &[&server]).unwrap();
    let folders = |model: &Model| {
        let root = std::fs::read_dir(model.folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let root =
            root.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("grpo-")).collect::<Vec<_>>();
        root.first().map_or(0, |root| std::fs::read_dir(root).unwrap().count())
    };
    let mut names = Vec::new();
    for version in 0..5 {
        model.change(version);
        engine.update_weights(&model.policy, version).unwrap();
        names.extend(server.adapters());
        assert!(server.adapters().len() <= 2, "{:?}", server.adapters());
        assert_eq!(folders(&model), 1);
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 5, "every version has a name of its own: {names:?}");
    drop(engine);
    assert_eq!(folders(&model), 0);
}

#[rstest]
fn pending_completions_keep_their_adapter_while_later_ones_are_loaded(
    #[values(Program::Vllm, Program::Sglang)] program: Program,
) {
    let mut model = Model::adapted();
    let server = Fake::start(program, &model.path());
    let mut engine = model.engine(kind(program), &[&server]).unwrap();
    let prompts = prompts();
    model.change(1);
    engine.update_weights(&model.policy, 1).unwrap();
    let request = request(&prompts, sampling(0));
    let pending = engine.start(&request).unwrap();
    model.change(2);
    engine.update_weights(&model.policy, 2).unwrap();
    let later = sample(&mut engine, &mut model, 1).unwrap();
    assert!(difference(&mut model, &later) < 1e-4);
    let earlier = pending.wait(&request).unwrap();
    assert!(earlier.iter().all(|completion| completion.weight_versions[0].version == 1));
    model.change(1);
    assert!(difference(&mut model, &earlier) < 1e-4);
}

#[test]
fn weights_of_vllm_are_replaced_while_it_is_paused_and_its_cache_is_reset() {
    let mut model = Model::new();
    let server = Fake::start(Program::Vllm, &model.path());
    let mut engine = model.engine(EngineKind::Vllm, &[&server]).unwrap();
    model.change(1);
    let before = server.paths().len();
    engine.update_weights(&model.policy, 1).unwrap();
    let expected =
        ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume", "/weight_info"];
    assert_eq!(server.paths()[before..], expected);
}

/// Servers that report the weights of completions, and servers that do not, such as vLLM 0.32.
#[rstest]
fn restarted_servers_get_the_weights_again(
    #[values(Program::Vllm, Program::Sglang)] program: Program,
    #[values(Model::new, Model::adapted)] model: fn() -> Model,
    #[values(false, true)] reports: bool,
) {
    let mut model = model();
    let server = Fake::behaving(program, &model.path(), move |_, _, _, right| match right {
        fake::Reply::Say(200, text) if !reports => fake::Reply::Say(200, text.replace("weight_versions", "ignored")),
        right => right,
    });
    let mut engine = model.engine(kind(program), &[&server]).unwrap();
    model.change(9);
    engine.update_weights(&model.policy, 1).unwrap();
    let expected = sample(&mut engine, &mut model, 0).unwrap();
    server.restart();
    assert_eq!(sample(&mut engine, &mut model, 0).unwrap(), expected);
}

#[test]
fn engines_do_not_sample_without_an_update_that_has_arrived() {
    let mut model = Model::new();
    let is_broken = std::sync::Arc::new(AtomicBool::new(false));
    let broken = std::sync::Arc::clone(&is_broken);
    let server = Fake::behaving(Program::Vllm, &model.path(), move |_, _, path, right| {
        match path == "/collective_rpc" && broken.load(Ordering::Relaxed) {
            true => fake::Reply::Say(500, "Repo id must be in the form".into()),
            false => right,
        }
    });
    let mut engine = model.engine(EngineKind::Vllm, &[&server]).unwrap();
    engine.update_weights(&model.policy, 1).unwrap();
    is_broken.store(true, Ordering::Relaxed);
    let error = engine.update_weights(&model.policy, 2).unwrap_err().to_string();
    for words in ["stays paused", "Repo id must be", "restart the server"] {
        assert!(error.contains(words), "{words}: {error}");
    }
    let prompts = prompts();
    let error = engine.start(&request(&prompts, sampling(0))).unwrap_err().to_string();
    assert!(error.contains("update_weights"), "{error}");
    // A later update repairs the server.
    is_broken.store(false, Ordering::Relaxed);
    model.change(3);
    engine.update_weights(&model.policy, 3).unwrap();
    let completions = sample(&mut engine, &mut model, 0).unwrap();
    assert!(difference(&mut model, &completions) < 1e-4);
}

#[test]
fn folders_that_servers_do_not_see_are_refused() {
    let model = Model::adapted();
    let server = Fake::behaving(Program::Vllm, &model.path(), |_, _, path, right| match path {
        "/v1/load_lora_adapter" => fake::Reply::Say(404, "Loading lora x failed: No adapter found for <path>".into()),
        _ => right,
    });
    let mut engine = model.engine(EngineKind::Vllm, &[&server]).unwrap();
    let error = engine.update_weights(&model.policy, 1).unwrap_err().to_string();
    assert!(error.contains("rollout.server.weights_dir") && error.contains("No adapter found"), "{error}");
    let server = Fake::behaving(Program::Vllm, &model.path(), |_, _, path, right| match path {
        "/v1/load_lora_adapter" => fake::Reply::Say(404, "{\"detail\":\"Not Found\"}".into()),
        _ => right,
    });
    let mut engine = model.engine(EngineKind::Vllm, &[&server]).unwrap();
    let error = engine.update_weights(&model.policy, 1).unwrap_err().to_string();
    assert!(error.contains("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"), "{error}");
}

/// Tests that take seconds: `cargo fast` skips modules of this name.
mod slow {
    use super::*;

    #[rstest]
    fn servers_that_are_down_during_an_update_get_it_before_they_sample(
        #[values(Model::new, Model::adapted)] model: fn() -> Model,
    ) {
        let mut model = model();
        let is_down = std::sync::Arc::new(AtomicBool::new(false));
        let down = std::sync::Arc::clone(&is_down);
        let good = Fake::start(Program::Vllm, &model.path());
        let other =
            Fake::behaving(Program::Vllm, &model.path(), move |_, _, _, right| match down.load(Ordering::Relaxed) {
                true => fake::Reply::Close,
                false => right,
            });
        let mut engine = model.engine(EngineKind::Vllm, &[&good, &other]).unwrap();
        is_down.store(true, Ordering::Relaxed);
        model.change(4);
        engine.update_weights(&model.policy, 1).unwrap();
        let completions = sample(&mut engine, &mut model, 0).unwrap();
        assert!(difference(&mut model, &completions) < 1e-4);
        assert!(other.requests("/v1/completions").is_empty());
        is_down.store(false, Ordering::Relaxed);
        // The server rests after its failure.
        std::thread::sleep(std::time::Duration::from_millis(1100));
        for step in 1..8 {
            let completions = sample(&mut engine, &mut model, step).unwrap();
            assert!(difference(&mut model, &completions) < 1e-4);
        }
        assert!(!other.requests("/v1/completions").is_empty());
    }
}
