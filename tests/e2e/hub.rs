//! A run of a model by its name, from Hugging Face's cache on this machine and without a network.
#![cfg(unix)]

use crate::support::{Runs, command, refused, stderr, stdout};
use crate::tiny_model::{arguments, prepare, tensors, train};
use std::path::Path;
use std::process::Output;

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

/// The binary with `home` as the home of Hugging Face's programs, and a hub that nobody answers for.
fn at_home(home: &str, arguments: &[String], variables: &[(&str, &str)]) -> Output {
    let mut command = command(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    command.env("HF_HOME", home).env("HF_ENDPOINT", "http://127.0.0.1:1").envs(variables.iter().copied());
    command.output().expect("the binary starts")
}

#[test]
fn a_model_is_read_from_the_cache_by_its_name() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    fill_cache(&runs.path("home"), &runs.path("model"));
    let home = runs.text("home");
    let named = format!("model={NAME}");
    let succeed = |arguments: &[String]| {
        let output = at_home(&home, arguments, &[]);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{}{}", stdout(&output), stderr(&output));
    };
    succeed(&arguments(&runs, "model", "named", &[&named, "grpo.max_steps=1"]));
    let exported = runs.path("named/model");
    let card = std::fs::read_to_string(exported.join("README.md")).unwrap();
    assert!(card.contains(&format!("base_model: \"{NAME}\"\n")), "{card}");
    for entry in std::fs::read_dir(&exported).unwrap() {
        let file = entry.unwrap().path();
        assert!(!file.is_symlink(), "{} is a file of its own", file.display());
    }
    // By its commit, and going on: the run is that of the folder, to the bit.
    let revision = format!("model_revision={COMMIT}");
    succeed(&arguments(&runs, "model", "pinned", &[&named, &revision]));
    let resume = ["train", "--resume", &runs.text("named"), "--set", "grpo.max_steps=2"].map(str::to_owned);
    succeed(&resume);
    train(&runs, "model", "folder", &[]);
    let of_folder = tensors(&runs.path("folder/model"));
    assert_ne!(of_folder, tensors(&runs.path("model")), "it was trained");
    assert!(tensors(&exported) == of_folder && tensors(&runs.path("pinned/model")) == of_folder);
}

#[test]
fn what_the_cache_has_not_is_said_offline() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let (home, offline) = (runs.text("home"), [("HF_HUB_OFFLINE", "1")]);
    fill_cache(&runs.path("home"), &runs.path("model"));
    let refuse = |settings: &[&str]| {
        let arguments = arguments(&runs, "model", "run", settings);
        let text = refused(&["train"], &at_home(&home, &arguments, &offline));
        assert!(text.contains("nothing is downloaded, because HF_HUB_OFFLINE"), "{text}");
        assert!(!runs.path("run").exists(), "nothing is left behind: {text}");
        text
    };
    let text = refuse(&["model=organisation/other"]);
    assert!(text.contains("model \"organisation/other\" was not found"), "{text}");
    assert!(text.contains("there is no folder organisation/other"), "{text}");
    assert!(text.contains(&format!("the cache {home}/hub has no models--organisation--other")), "{text}");
    let named = format!("model={NAME}");
    let text = refuse(&[&named, "model_revision=v2"]);
    assert!(text.contains("has no revision v2 of it"), "{text}");
    // A download that was interrupted.
    let snapshot = runs.path("home/hub/models--organisation--tiny-qwen3/snapshots").join(COMMIT);
    std::fs::remove_file(snapshot.join("model.safetensors").canonicalize().unwrap()).unwrap();
    let text = refuse(&[&named]);
    assert!(text.contains("the cache has only a part of it") && text.contains("no model.safetensors"), "{text}");
}

#[test]
fn programs_of_a_run_are_made_of_a_configuration_without_weights() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    // Neither in the folder nor in the cache are there weights, and nobody answers for the hub.
    for entry in std::fs::read_dir(runs.path("model")).unwrap() {
        let file = entry.unwrap().path();
        if file.file_name().unwrap() != "config.json" {
            std::fs::remove_file(file).unwrap();
        }
    }
    fill_cache(&runs.path("home"), &runs.path("model"));
    std::fs::write(runs.path("run.yaml"), "rollout: { max_completion_length: 56 }\n").unwrap();
    let aot = |model: &str, more: &[&str]| {
        let (config, model) = (runs.text("run.yaml"), format!("model={model}"));
        // A file that is no plugin: nothing here is compiled.
        let all = [&["aot", &config, "--target", "v6e", "--plugin", &config, "--set", &model][..], more].concat();
        at_home(&runs.text("home"), &all.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>(), &[])
    };
    for model in [NAME, &runs.text("model")] {
        // The programs are there, and this one is not among them.
        let text = refused(&["aot"], &aot(model, &["--variants", "nothing"]));
        assert!(text.contains("no program `nothing`: there are gradient, score, apply, prefill"), "{text}");
        // What a prompt counts as is said, where nothing says it: the context of 256 tokens without the completion.
        let files = format!("data.files={}", runs.text("rows.jsonl"));
        let compiled =
            ["--variants", "apply", "--set", &files, "--set", "rewards.regex={vowel: {pattern: '[aeiou]{2}'}}"];
        let text = stderr(&aot(model, &compiled));
        assert!(text.contains("data.max_prompt_length is not set") && text.contains("count as 200 tokens"), "{text}");
        let limited = stderr(&aot(model, &[&compiled[..], &["--set", "data.max_prompt_length=64"]].concat()));
        assert!(limited.contains("`apply`") && !limited.contains("data.max_prompt_length"), "{limited}");
    }
}

/// Starts a local hub that serves the files of `model` under every name. Returns its address and the list of requested paths.
fn serve(model: std::path::PathBuf) -> (String, std::sync::Arc<std::sync::Mutex<Vec<String>>>) {
    use std::io::{BufRead, BufReader, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let asked = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let log = std::sync::Arc::clone(&asked);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut first = String::new();
            let _ = reader.read_line(&mut first);
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
                line.clear();
            }
            let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
            log.lock().unwrap().push(path.clone());
            let names: Vec<String> = std::fs::read_dir(&model)
                .unwrap()
                .map(|file| file.unwrap().file_name().into_string().unwrap())
                .collect();
            let name = path.rsplit('/').next().unwrap_or_default();
            let (etag, body) = if path.starts_with("/api/models/") {
                let files: Vec<_> = names.iter().map(|name| serde_json::json!({"rfilename": name})).collect();
                ("0".repeat(40), serde_json::json!({"sha": COMMIT, "siblings": files}).to_string().into_bytes())
            } else {
                let number = names.iter().position(|known| known == name).unwrap();
                (format!("file-{number}"), std::fs::read(model.join(name)).unwrap())
            };
            let head = format!(
                "HTTP/1.1 200 OK\r\nETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            let _ = stream.write_all(head.as_bytes());
            if !first.starts_with("HEAD") {
                let _ = stream.write_all(&body);
            }
        }
    });
    (address, asked)
}

#[test]
fn no_weights_are_asked_for_before_everything_else_is_right() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let (address, asked) = serve(runs.path("model"));
    let home = runs.text("home");
    let ask = |arguments: &[String]| at_home(&home, arguments, &[("HF_ENDPOINT", &address)]);
    let weights = || asked.lock().unwrap().iter().any(|path| path.contains("safetensors"));
    let rows = runs.text("rows.jsonl");
    let data = ["data", &rows, "--model", NAME].map(str::to_owned);
    let output = ask(&data);
    assert_eq!(output.status.code(), Some(0), "{}{:?}", stderr(&output), asked.lock().unwrap());
    assert!(!weights() && asked.lock().unwrap().iter().any(|path| path.ends_with("/tokenizer.json")));
    let out = runs.text("train.yaml");
    let output = ask(&["init", "--model", NAME, "--data", &rows, "--out", &out].map(str::to_owned));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let written = std::fs::read_to_string(&out).unwrap();
    assert!(written.contains(&format!("model: {NAME}\n")) && !weights(), "{written}");
    let named = format!("model={NAME}");
    for (setting, words) in [
        ("data.files=/nowhere.jsonl", "`data.files`"),
        ("data.files=openai/gsm8k", "load_dataset('openai/gsm8k'"),
        ("data.prompt_column=problem", "data: { prompt_column: "),
        ("data.chat_template=/nowhere.jinja", "`data.chat_template`"),
        ("eval.num_problems=64", "`eval.num_problems`"),
        ("rewards.programs={judge: {command: [nobody]}}", "rewards.programs.judge.command"),
        ("rewards.http={judge: {url: localhost}}", "rewards.http.judge.url"),
        ("rollout.max_completion_length=999", "`rollout.max_completion_length`"),
    ] {
        let text = refused(&[setting], &ask(&arguments(&runs, "model", "run", &[&named, setting])));
        assert!(text.contains(words), "{setting}: {text}");
        assert!(!weights(), "{setting}: {:?}", asked.lock().unwrap());
    }
    // A folder that cannot be made: a file is in its place.
    let text = refused(&[], &ask(&arguments(&runs, "model", "rows.jsonl/run", &[&named])));
    assert!(text.contains("rows.jsonl/run") && !weights(), "{text}");
    let output = ask(&arguments(&runs, "model", "run", &[&named, "grpo.max_steps=1"]));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(weights());
    let text = stdout(&output);
    for words in [
        "model      organisation/tiny-qwen3: ",
        "all of them trained",
        "rows       ",
        "(default)",
        "memory     ",
        "clipped ",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains("0 warm-up steps"), "{text}");
}

/// The README's train.yaml, on 50 rows and a small model.
#[test]
fn the_configuration_of_the_readme_runs_on_fifty_rows() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    let (_, yaml) = readme.split_once("```yaml\n# train.yaml\n").expect("the README has a train.yaml");
    std::fs::write(runs.path("train.yaml"), yaml.split_once("```").unwrap().0).unwrap();
    let rows = std::fs::read_to_string(runs.path("rows.jsonl")).unwrap();
    let fifty: String = rows.lines().take(50).map(|line| format!("{line}\n")).collect();
    std::fs::write(runs.path("train.jsonl"), fifty).unwrap();
    let model = format!("model={}", runs.text("model"));
    let mut command = command(&["train", "train.yaml", "--set", &model, "--set", "grpo.max_steps=2"]);
    // A context of 256 tokens has no room for completions of 256.
    command.args(["--set", "rollout.max_completion_length=16"]).current_dir(runs.path("."));
    let output = command.output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    assert!(runs.path("runs/mine-001/model").is_dir());
}
