//! A run of a model by its name, from Hugging Face's cache on this machine and without a network.
#![cfg(unix)]

use crate::support::{Call, Runs, assert_has, grpo, names, repository};
use crate::tiny_model::{call, tensors, train};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const NAME: &str = "organisation/tiny-qwen3";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The model folder `model` as `huggingface_hub` keeps it below `home`: files in blobs, and links to them in the snapshot of a commit.
fn fill_cache(home: &Path, model: &Path) {
    let cached = home.join("hub/models--organisation--tiny-qwen3");
    let snapshot = cached.join("snapshots").join(COMMIT);
    for folder in [&cached.join("blobs"), &cached.join("refs"), &snapshot] {
        std::fs::create_dir_all(folder).unwrap();
    }
    std::fs::write(cached.join("refs/main"), COMMIT).unwrap();
    for (number, file) in std::fs::read_dir(model).unwrap().enumerate() {
        let (file, blob) = (file.unwrap(), format!("{number:040x}"));
        std::fs::copy(file.path(), cached.join("blobs").join(&blob)).unwrap();
        std::os::unix::fs::symlink(Path::new("../../blobs").join(blob), snapshot.join(file.file_name())).unwrap();
    }
}

/// Adds `home` in `runs` as the home of Hugging Face's programs, and a hub that does not answer.
fn at_home(runs: &Runs, call: Call) -> Call {
    call.env("HF_HOME", runs.path("home")).env("HF_ENDPOINT", "http://127.0.0.1:1")
}

#[test]
fn a_model_is_read_from_the_cache_by_its_name() {
    let runs = Runs::small();
    fill_cache(&runs.path("home"), &runs.path("model"));
    let named = format!("model={NAME}");
    at_home(&runs, call(&runs, "model", "named", &[&named, "grpo.max_steps=1"])).succeed();
    let exported = runs.path("named/model");
    assert_has(&runs.read("named/model/README.md"), &[&format!("base_model: \"{NAME}\"\n")]);
    for entry in std::fs::read_dir(&exported).unwrap() {
        let file = entry.unwrap().path();
        assert!(!file.is_symlink(), "{} is a file of its own", file.display());
    }
    // By its commit, and going on: the run is that of the folder, to the bit.
    let revision = format!("model_revision={COMMIT}");
    at_home(&runs, call(&runs, "model", "pinned", &[&named, &revision])).succeed();
    at_home(&runs, runs.resume("named").set(["grpo.max_steps=2"])).succeed();
    train(&runs, "model", "folder", &[]);
    let of_folder = tensors(&runs.path("folder/model"));
    assert_ne!(of_folder, tensors(&runs.path("model")), "it was trained");
    assert!(tensors(&exported) == of_folder && tensors(&runs.path("pinned/model")) == of_folder);
}

/// Covers the names of a training and an evaluation split; a run of the files, and of the names with one more step after resuming, is the same.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_data_set_is_read_from_the_cache_by_its_name() {
    let runs = Runs::small();
    let cached = runs.path("home/hub/datasets--organisation--rows");
    let snapshot = cached.join("snapshots").join(COMMIT);
    std::fs::create_dir_all(snapshot.join("data")).unwrap();
    std::fs::create_dir_all(cached.join("refs")).unwrap();
    std::fs::write(cached.join("refs/main"), COMMIT).unwrap();
    std::fs::write(snapshot.join("README.md"), "---\nconfigs:\n- config_name: a\n  data_files: data/a*\n---\n")
        .unwrap();
    std::fs::copy(runs.path("rows.jsonl"), snapshot.join("data/a.jsonl")).unwrap();
    let offline = |call: Call| at_home(&runs, call).env("HF_HUB_OFFLINE", "1");
    let named = "data.files={path: organisation/rows, config: a, name: rows}";
    offline(call(&runs, "model", "named", &[named, "grpo.max_steps=1"])).succeed();
    assert_has(&runs.read("named/config.yaml"), &[&format!("{COMMIT}/data/a.jsonl")]);
    offline(runs.resume("named").set(["grpo.max_steps=2"])).succeed();
    train(&runs, "model", "folder", &[]);
    assert!(tensors(&runs.path("named/model")) == tensors(&runs.path("folder/model")));
    let text = offline(call(&runs, "model", "other", &["data.files={path: organisation/rows, split: dev}"])).refuse();
    assert_has(&text, &["data set organisation/rows", "no split \"dev\"", "the splits are train"]);
    assert!(!runs.path("other").exists());
}

#[test]
fn what_the_cache_has_not_is_said_offline() {
    let runs = Runs::small();
    fill_cache(&runs.path("home"), &runs.path("model"));
    let refuse = |settings: &[&str]| {
        let text = at_home(&runs, call(&runs, "model", "run", settings)).env("HF_HUB_OFFLINE", "1").refuse();
        assert_has(&text, &["nothing is downloaded, because HF_HUB_OFFLINE"]);
        assert!(!runs.path("run").exists(), "nothing is left behind: {text}");
        text
    };
    let text = refuse(&["model=organisation/other"]);
    let cache = format!("the cache {}/hub has no models--organisation--other", runs.text("home"));
    let model = ["model \"organisation/other\" was not found", "there is no folder organisation/other", &cache];
    assert_has(&text, &model);
    let named = format!("model={NAME}");
    assert_has(&refuse(&[&named, "model_revision=v2"]), &["has no revision v2 of it"]);
    // A download that was interrupted.
    let snapshot = runs.path("home/hub/models--organisation--tiny-qwen3/snapshots").join(COMMIT);
    std::fs::remove_file(snapshot.join("model.safetensors").canonicalize().unwrap()).unwrap();
    let text = refuse(&[&named]);
    assert_has(&text, &["the cache has only a part of it", "no model.safetensors"]);
}

#[test]
fn programs_of_a_run_are_made_of_a_configuration_without_weights() {
    let runs = Runs::small();
    // Neither in the folder nor in the cache are there weights, and nobody answers for the hub.
    for entry in std::fs::read_dir(runs.path("model")).unwrap() {
        let file = entry.unwrap().path();
        if file.file_name().unwrap() != "config.json" {
            std::fs::remove_file(file).unwrap();
        }
    }
    fill_cache(&runs.path("home"), &runs.path("model"));
    runs.write("run.yaml", "rollout: { max_completion_length: 56 }\n");
    for model in [NAME, &runs.text("model")] {
        let (config, model) = (runs.text("run.yaml"), format!("model={model}"));
        // A file that is no plugin: nothing here is compiled.
        let aot = |variants: &str| {
            let call = grpo(["aot", &config, "--target", "v6e", "--plugin", &config, "--variants", variants]);
            at_home(&runs, call.set([&model]))
        };
        let text = aot("nothing").refuse();
        assert_has(&text, &["no program `nothing`: there are gradient, score, apply, prefill"]);
        // Without a limit, a prompt counts as the context of 256 tokens without the completion.
        let files = format!("data.files={}", runs.text("rows.jsonl"));
        let apply = || aot("apply").set([&files, "rewards.regex={vowel: {pattern: '[aeiou]{2}'}}"]);
        let text = apply().output().stderr;
        assert_has(&text, &["data.max_prompt_length is not set", "count as 200 tokens"]);
        let limited = apply().set(["data.max_prompt_length=64"]).output().stderr;
        assert!(limited.contains("`apply`") && !limited.contains("data.max_prompt_length"), "{limited}");
    }
}

/// Starts a local hub that serves the files of `model` under every name. Returns its address and the list of requested paths.
fn serve(model: PathBuf) -> (String, Arc<Mutex<Vec<String>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked);
    let address = crate::http::serve(move |head, _| {
        let path = head.split(' ').nth(1).unwrap_or_default();
        log.lock().unwrap().push(path.to_owned());
        let names = names(&model);
        if path.starts_with("/api/datasets/") {
            return (404, String::new(), vec![]);
        }
        let (etag, body) = if path.starts_with("/api/models/") {
            let files: Vec<_> = names.iter().map(|name| json!({"rfilename": name})).collect();
            ("0".repeat(40), json!({"sha": COMMIT, "siblings": files}).to_string().into_bytes())
        } else {
            let name = path.rsplit('/').next().unwrap_or_default();
            let number = names.iter().position(|known| known == name).unwrap();
            (format!("file-{number}"), std::fs::read(model.join(name)).unwrap())
        };
        (200, format!("ETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\n"), body)
    });
    (format!("http://{address}"), asked)
}

#[test]
fn no_weights_are_asked_for_before_everything_else_is_right() {
    let runs = Runs::small();
    let (address, asked) = serve(runs.path("model"));
    let ask = |call: Call| at_home(&runs, call).env("HF_ENDPOINT", &address);
    let weights = || asked.lock().unwrap().iter().any(|path| path.contains("safetensors"));
    let rows = runs.text("rows.jsonl");
    ask(grpo(["data", &rows, "--model", NAME])).succeed();
    assert!(!weights() && asked.lock().unwrap().iter().any(|path| path.ends_with("/tokenizer.json")));
    ask(grpo(["init", "--model", NAME, "--data", &rows, "--out", &runs.text("train.yaml")])).succeed();
    assert_has(&runs.read("train.yaml"), &[&format!("model: {NAME}\n")]);
    assert!(!weights());
    let named = format!("model={NAME}");
    for (setting, words) in [
        ("data.files=/nowhere.jsonl", "`data.files`"),
        ("data.files=openai/gsm8k", "has no openai/gsm8k with a revision main"),
        ("data.prompt_column=problem", "data: { prompt_column: "),
        ("data.chat_template=/nowhere.jinja", "`data.chat_template`"),
        ("eval.num_problems=64", "`eval.num_problems`"),
        ("rewards.programs={judge: {command: [nobody]}}", "rewards.programs.judge.command"),
        ("rewards.http={judge: {url: localhost}}", "rewards.http.judge.url"),
        ("rollout.max_completion_length=999", "`rollout.max_completion_length`"),
    ] {
        assert_has(&ask(call(&runs, "model", "run", &[&named, setting])).refuse(), &[words]);
        assert!(!weights(), "{setting}: {:?}", asked.lock().unwrap());
    }
    // A folder that cannot be made: a file is in its place.
    assert_has(&ask(call(&runs, "model", "rows.jsonl/run", &[&named])).refuse(), &["rows.jsonl/run"]);
    assert!(!weights());
    let text = ask(call(&runs, "model", "run", &[&named, "grpo.max_steps=1"])).succeed();
    assert!(weights());
    let model = "model      organisation/tiny-qwen3: ";
    assert_has(&text, &[model, "all of them trained", "rows       ", "(default)", "memory     ", "clipped "]);
    assert!(!text.contains("0 warm-up steps"), "{text}");
}

/// The README's train.yaml, on 50 rows and a small model.
#[test]
fn the_configuration_of_the_readme_runs_on_fifty_rows() {
    let runs = Runs::small();
    let readme = std::fs::read_to_string(repository("README.md")).unwrap();
    let (_, yaml) = readme.split_once("```yaml\n# train.yaml\n").expect("the README has a train.yaml");
    runs.write("train.yaml", yaml.split_once("```").unwrap().0);
    let rows = runs.read("rows.jsonl");
    let fifty: String = rows.lines().take(50).map(|line| format!("{line}\n")).collect();
    runs.write("train.jsonl", fifty);
    let model = format!("model={}", runs.text("model"));
    // A context of 256 tokens has no room for completions of 256.
    let settings = [&model, "grpo.max_steps=2", "rollout.max_completion_length=16"];
    grpo(["train", "train.yaml"]).set(settings).at(&runs.path("")).succeed();
    assert!(runs.path("runs/mine-001/model").is_dir());
}
