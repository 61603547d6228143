//! `grpo parity --model`: decoders against what transformers computes.

use crate::support::{grpo, grpo_with, grpo_with_quick_cpu, refuse, stderr, stdout, succeed};
use pjrt::install::{Kind, install};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const ALL: [&str; 7] = ["qwen2", "qwen2_5_sharded", "qwen2_pad", "qwen3", "qwen3_f16", "llama3", "llama3_bf16"];

fn folder(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/checkpoints").join(name).display().to_string()
}

fn expected(name: &str) -> String {
    format!("{}/expected.safetensors", folder(name))
}

/// The tensors of a file, to be changed and written again.
#[derive(Clone)]
struct Tensors {
    metadata: HashMap<String, String>,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Tensors {
    fn of(name: &str) -> Self {
        let bytes = std::fs::read(expected(name)).expect("the file is there");
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("safetensors");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let tensors = file.tensors().into_iter();
        let tensors = tensors.map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())));
        Self { metadata: header.metadata().clone().expect("metadata"), tensors: tensors.collect() }
    }

    fn only(mut self, names: &[&str]) -> Self {
        self.tensors.retain(|name, _| names.contains(&name.as_str()));
        self
    }

    fn get(&mut self, name: &str) -> &mut (Dtype, Vec<usize>, Vec<u8>) {
        self.tensors.get_mut(name).expect("a tensor of that name")
    }

    /// Adds `by` to an entry of an f32 tensor.
    fn shift(mut self, name: &str, at: usize, by: f32) -> Self {
        let bytes = &mut self.get(name).2[4 * at..4 * at + 4];
        let value = f32::from_le_bytes((&*bytes).try_into().expect("four bytes"));
        bytes.copy_from_slice(&(value + by).to_le_bytes());
        self
    }

    fn rename(mut self, from: &str, to: &str) -> Self {
        let tensor = self.tensors.remove(from).expect("a tensor of that name");
        self.tensors.insert(to.to_owned(), tensor);
        self
    }

    fn write(&self, folder: &tempfile::TempDir) -> String {
        let views = self.tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).expect("as many bytes as the shape says"))
        });
        let bytes = safetensors::serialize(views, Some(self.metadata.clone())).expect("serialised");
        let path: PathBuf = folder.path().join("file.safetensors");
        std::fs::write(&path, bytes).expect("written");
        path.display().to_string()
    }
}

#[test]
fn every_family_passes() {
    for name in ALL {
        let text = succeed(&["parity", "--model", &folder(name), &expected(name)]);
        assert!(text.contains("PASS: 1 file, ") && !text.contains("FAIL"), "{name}: {text}");
        for row in ["logits ", "logits, cached", "loss ", "grad.model.layers.0.self_attn.k_proj.weight"] {
            assert!(text.contains(row), "{name}: {row}: {text}");
        }
    }
    let document: Value =
        serde_json::from_str(&succeed(&["parity", "--model", &folder("qwen3"), &expected("qwen3"), "--json"]))
            .expect("JSON");
    assert_eq!(document["passed"], true);
    let rows = document["files"][0]["rows"].as_array().expect("rows");
    // Two for the logits, one for the loss, one for each of the 24 parameters.
    assert_eq!(rows.len(), 27);
    assert!(rows.iter().all(|row| row["implementation"] == "host" && row["max_rel"].as_f64() < Some(1e-5)), "{rows:?}");
}

#[test]
fn every_family_passes_on_a_device() {
    for name in ALL {
        let arguments = ["parity", "--model", &folder(name), "--device", "pjrt:cpu", &expected(name)];
        let output = grpo_with(Kind::Cpu, &arguments).output().expect("the binary starts");
        let text = stdout(&output);
        assert_eq!(output.status.code(), Some(0), "{name}: {text}{}", stderr(&output));
        assert!(text.contains("PASS: 1 file, ") && !text.contains("host"), "{name}: {text}");
        for row in ["logits ", "logits, cached", "loss ", "grad.model.layers.0.self_attn.k_proj.weight"] {
            let line = text.lines().find(|line| line.contains(row));
            assert!(line.is_some_and(|line| line.starts_with("pjrt:cpu ")), "{name}: {row}: {text}");
        }
    }
}

/// A plugin for XLA's CPU, and a cache of its own for compiled programs.
fn command_with_cache(cache: &Path, arguments: &[&str]) -> Command {
    let plugin = install(Kind::Cpu, |_| {}).expect("the plugin can be installed").path;
    let mut command = grpo_with_quick_cpu(arguments);
    command.env("GRPO_PJRT_PLUGIN", plugin).env("XDG_CACHE_HOME", cache);
    command
}

fn with_cache(cache: &Path, arguments: &[&str]) -> Output {
    command_with_cache(cache, arguments).output().expect("the binary starts")
}

#[test]
fn all_policies_that_open_here_are_checked_and_a_breach_is_seen_on_each() {
    let directory = tempfile::tempdir().expect("a temporary folder");
    let (model, name) = (folder("qwen3"), "expected.grad.model.norm.weight");
    let wanted = ["ids", "mask", "expected.loss", name];
    let file = Tensors::of("qwen3").only(&wanted).write(&directory);
    let cache = directory.path().join("cache");
    let output = with_cache(&cache, &["parity", "--model", &model, &file, "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    let document: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let rows = document["files"][0]["rows"].as_array().expect("rows");
    let by: Vec<_> = rows.iter().map(|row| row["implementation"].as_str().expect("a name")).collect();
    assert_eq!(by, ["host", "host", "pjrt:cpu", "pjrt:cpu"]);
    // The plugin is one for the CPU: the others are not silently left out.
    let notes: Vec<_> = document["notes"].as_array().expect("notes").iter().filter_map(Value::as_str).collect();
    assert_eq!(notes.len(), 2, "{notes:?}");
    for (kind, note) in ["pjrt:tpu", "pjrt:cuda"].iter().zip(["tpu", "cuda"]) {
        let note = notes.iter().find(|line| line.contains(note)).expect("a note");
        assert!(note.starts_with(&format!("not checked on {kind}: ")) && note.contains("`cpu`"), "{note}");
    }

    let elsewhere = tempfile::tempdir().expect("a temporary folder");
    let changed = Tensors::of("qwen3").only(&wanted).shift(name, 3, 1e-2).write(&elsewhere);
    let output = with_cache(&cache, &["parity", "--model", &model, "--device", "pjrt:cpu", &changed]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}{}", stderr(&output));
    assert!(text.contains("FAIL at 3: expected") && text.matches("FAIL at").count() == 1, "{text}");
    let output = with_cache(&cache, &["parity", "--model", &model, &changed]);
    let text = stdout(&output);
    assert_eq!((output.status.code(), text.matches("FAIL at 3").count()), (Some(1), 2), "{text}");
    assert!(text.contains("note: not checked on pjrt:tpu: "), "{text}");

    // Programs in the cache that are damaged are made again, with a warning.
    let programs: Vec<PathBuf> = std::fs::read_dir(cache.join("grpo/programs"))
        .expect("a folder of programs")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    assert!(!programs.is_empty());
    for program in &programs {
        let bytes = std::fs::read(program).expect("a program");
        std::fs::write(program, &bytes[..bytes.len() / 2]).expect("written");
    }
    for warns in [true, false] {
        let output = with_cache(&cache, &["parity", "--model", &model, "--device", "pjrt:cpu", &file]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(0), "{}{said}", stdout(&output));
        assert_eq!(said.contains("it is compiled again"), warns, "{said}");
    }

    // Other flags of the compiler in the environment: other programs.
    let entries = || std::fs::read_dir(cache.join("grpo/programs")).expect("a folder of programs").count();
    let before = entries();
    let again = ["parity", "--model", &model, "--device", "pjrt:cpu", &file];
    let mut other = command_with_cache(&cache, &again);
    let output = other.env("XLA_FLAGS", "--xla_backend_optimization_level=1").output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    assert!(entries() > before, "{before} programs as before");
}

#[test]
fn a_device_that_is_asked_for_and_cannot_be_used_is_an_error() {
    let (model, file) = (folder("qwen2"), expected("qwen2"));
    let text = refuse(&["parity", "--model", &model, "--device", "pjrt:cpu", &file]);
    assert!(text.contains("pjrt:cpu") && text.contains("HOME"), "{text}");
    let plugin = ["parity", "--model", &model, &file, "--device", "pjrt:cpu", "--plugin", "/nowhere.so"];
    assert!(refuse(&plugin).contains("/nowhere.so"));
    assert!(refuse(&["parity", "--model", &model, &file, "--plugin", "/nowhere.so"]).contains("--device"));
    assert_eq!(grpo(&["parity", "--model", &model, &file, "--device", "pjrt:gpu"]).status.code(), Some(2));
    assert_eq!(grpo(&["parity", &file, "--device", "pjrt:cpu"]).status.code(), Some(2), "without --model");
}

#[test]
fn an_adapter_is_compared_with_peft() {
    let (model, adapter, file) = (folder("llama3"), folder("llama3_lora"), expected("llama3_lora"));
    let text = succeed(&["parity", "--model", &model, "--adapter", &adapter, &file]);
    assert!(
        text.contains("grad.base_model.model.lm_head.lora_A.weight") && text.contains("25 comparisons, 0 out"),
        "{text}"
    );
    let on_device = ["parity", "--model", &model, "--adapter", &adapter, &file, "--device", "pjrt:cpu"];
    let output = grpo_with_quick_cpu(&on_device).output().expect("the binary starts");
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    assert!(text.contains("25 comparisons, 0 out") && !text.contains("host"), "{text}");
    let text = refuse(&["parity", "--model", &model, &file]);
    assert!(text.contains("lora_A"), "{text}");
    assert_eq!(grpo(&["parity", "--model", &model, "--adapter", &adapter, &expected("llama3")]).status.code(), Some(2));
    refuse(&["parity", "--model", &folder("qwen3"), "--adapter", &adapter, &file]);
}

#[test]
fn any_subset_is_enough() {
    let directory = tempfile::tempdir().expect("a temporary folder");
    let model = folder("qwen2");
    let embedding = "expected.grad.model.embed_tokens.weight";
    for (names, comparisons) in [
        (&["ids", "mask", "expected.loss"][..], "1 comparison, 0 out"),
        (&["ids", "mask", "expected.logits"], "2 comparisons, 0 out"),
        (&["ids", "mask", embedding, "expected.grad.model.layers.1.self_attn.k_proj.bias"], "2 comparisons, 0 out"),
    ] {
        let file = Tensors::of("qwen2").only(names).write(&directory);
        let text = succeed(&["parity", "--model", &model, &file]);
        assert!(text.contains(comparisons), "{text}");
    }
    // The head of a tied model is its embedding.
    let file = Tensors::of("qwen2").only(&["ids", "mask", embedding]).rename(embedding, "expected.grad.lm_head.weight");
    let text = succeed(&["parity", "--model", &model, &file.write(&directory)]);
    assert!(text.contains("grad.lm_head.weight"), "{text}");
    // Without a mask all ids count: those of the padding change the loss.
    let file = Tensors::of("qwen2").only(&["ids", "expected.loss"]).write(&directory);
    assert_eq!(grpo(&["parity", "--model", &model, &file]).status.code(), Some(1));
    // What is behind a sequence does not.
    let mut file = Tensors::of("qwen2");
    let vocab = file.get("expected.logits").1[2];
    let last = file.get("expected.logits").1[1] * vocab * 3 - 1;
    let mut file = file.shift("expected.logits", last, f32::NAN);
    let ids = &mut file.get("ids").2;
    let end = ids.len() - 8;
    ids[end..].copy_from_slice(&(-100_i64).to_le_bytes());
    succeed(&["parity", "--model", &model, &file.write(&directory)]);
}

#[test]
fn a_changed_number_ends_with_1_and_is_named() {
    let directory = tempfile::tempdir().expect("a temporary folder");
    for (tensor, at, by, row) in [
        ("expected.logits", 1000, 1e-3, "logits, cached"),
        ("expected.loss", 0, 1e-3, "loss"),
        (
            "expected.grad.model.layers.1.self_attn.q_norm.weight",
            5,
            1e-3,
            "grad.model.layers.1.self_attn.q_norm.weight",
        ),
    ] {
        let file = Tensors::of("qwen3").shift(tensor, at, by).write(&directory);
        let output = grpo(&["parity", "--model", &folder("qwen3"), &file]);
        let text = stdout(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        let line = text.lines().find(|line| line.contains(row)).expect("its row");
        assert!(line.contains(&format!("FAIL at {at}: expected")) && text.contains("FAIL: 1 file, "), "{text}");
        assert_eq!(text.matches("FAIL at").count(), if tensor == "expected.logits" { 2 } else { 1 }, "{text}");
        // A wider bound takes it.
        let wide = ["parity", "--model", &folder("qwen3"), &file, "--tolerance=0.1", "--gradient-tolerance=0.1"];
        succeed(&wide);
    }
    // Another model: the weights of one family under the configuration of another are refused before anything is computed.
    let output = grpo(&["parity", "--model", &folder("llama3"), &expected("llama3_bf16")]);
    assert_ne!(output.status.code(), Some(0));
}

#[test]
fn bad_files_are_one_line() {
    let directory = tempfile::tempdir().expect("a temporary folder");
    let good = || Tensors::of("qwen3");
    let with = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = good();
        change(&mut tensors);
        tensors
    };
    let gradient = "expected.grad.model.layers.0.self_attn.q_proj.weight";
    let cases: [(Tensors, &[&str]); 14] = [
        (
            good().rename(gradient, "expected.grad.model.layers.0.self_attn.q_prj.weight"),
            &["q_prj", "did you mean", "self_attn.q_proj.weight"],
        ),
        (good().rename("expected.loss", "expected.los"), &["expected.los`", "expected.loss"]),
        (with(&|t| t.get(gradient).1.reverse()), &[gradient, "[64, 48]", "[48, 64]"]),
        (with(&|t| t.get("expected.logits").1 = vec![4, 256, 24]), &["expected.logits", "[4, 24, 256]"]),
        (good().shift(gradient, 7, f32::NAN), &[gradient, "NaN", "index 7"]),
        (good().shift("expected.logits", 9, f32::INFINITY), &["expected.logits", "inf", "index 9"]),
        (with(&|t| t.get("ids").2[8..16].copy_from_slice(&256_i64.to_le_bytes())), &["[0, 1]", "256", "vocabulary"]),
        (with(&|t| t.get("ids").2[8..16].copy_from_slice(&(-1_i64).to_le_bytes())), &["[0, 1]", "-1"]),
        (with(&|t| t.get("mask").2[0] = 0), &["mask", "padding on the right"]),
        (with(&|t| t.get("mask").2[0] = 2), &["mask", "[0, 0]", "0 or 1"]),
        (with(&|t| t.get("mask").2.fill(0)), &["mask", "nothing to compare"]),
        (good().only(&["ids", "mask"]), &["nothing to compare", "expected.logits"]),
        (good().only(&["mask", "expected.loss"]), &["`ids`"]),
        (with(&|t| drop(t.metadata.insert("format".into(), "pt".into()))), &["grpo-model/1", "got pt"]),
    ];
    for (tensors, words) in cases {
        let text = refuse(&["parity", "--model", &folder("qwen3"), &tensors.write(&directory)]);
        assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
    }
    let batch = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/trl_grpo_default.safetensors");
    let text = refuse(&["parity", "--model", &folder("qwen3"), &batch.display().to_string()]);
    assert!(text.contains("grpo-model/1"), "{text}");
    let cut = directory.path().join("cut.safetensors");
    let bytes = std::fs::read(expected("qwen3")).expect("the file is there");
    for length in [0, 5, 100, bytes.len() - 1] {
        std::fs::write(&cut, &bytes[..length]).expect("written");
        refuse(&["parity", "--model", &folder("qwen3"), &cut.display().to_string()]);
    }
    for arguments in [
        &["parity", "--model", "/nowhere", &expected("qwen3")][..],
        &["parity", "--model", &folder("qwen3"), "/nowhere"],
        &["parity", "--model", &folder("qwen3"), "/dev/zero"],
    ] {
        refuse(arguments);
    }
}
