//! `grpo parity --model`: decoders against what transformers computes.

use crate::support::{Call, Runs, assert_has, batch, grpo, names, repository};
use grpo_pjrt::install::{Kind, install};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

const ALL: [&str; 31] = [
    "qwen2",
    "qwen2_5_sharded",
    "qwen2_pad",
    "qwen3",
    "qwen3_f16",
    "qwen3_bias",
    "llama3",
    "llama3_bf16",
    "mistral",
    "ministral3",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "phi3",
    "gemma3",
    "qwen2_window",
    "qwen2_yarn",
    "llama_linear",
    "llama_dynamic",
    "gemma3_vision",
    "qwen2_5_vl",
    "qwen3_vl",
    "mistral3",
    "ministral3_vision",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "gemma4",
    "gemma4_vision",
];
const ROWS: [&str; 4] = ["logits ", "logits, cached", "loss ", "grad.model.layers.0.self_attn.o_proj.weight"];

fn folder(name: &str) -> String {
    repository(&format!("tests/checkpoints/{name}"))
}

/// Calls `grpo parity` for the model `name` and a file of expected values.
fn parity(name: &str, file: &str) -> Call {
    grpo(["parity", "--model", &folder(name), file])
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

    fn write(&self, folder: &Runs) -> String {
        let views = self.tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).expect("as many bytes as the shape says"))
        });
        let bytes = safetensors::serialize(views, Some(self.metadata.clone())).expect("serialised");
        folder.write("file.safetensors", bytes)
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn every_family_passes() {
    for name in ALL {
        let host = parity(name, &expected(name)).succeed();
        let device = parity(name, &expected(name)).args(["--device", "pjrt:cpu"]).plugin(Kind::Cpu).succeed();
        for (text, first, other) in [(host, "host ", "pjrt"), (device, "pjrt:cpu ", "host")] {
            assert!(text.contains("PASS: 1 file, ") && !text.contains("FAIL"), "{name}: {text}");
            for row in ROWS {
                let line = text.lines().find(|line| line.contains(row));
                assert!(line.is_some_and(|line| line.starts_with(first)), "{name}: {row}: {text}");
            }
            assert!(!text.lines().any(|line| line.starts_with(other)), "{name}: {text}");
        }
    }
    let document = parity("qwen3", &expected("qwen3")).args(["--json"]).exit(0).json();
    assert_eq!(document["passed"], true);
    let rows = document["files"][0]["rows"].as_array().expect("rows");
    // Two for the logits, one for the loss, one for each of the 24 parameters.
    assert_eq!(rows.len(), 27);
    assert!(rows.iter().all(|row| row["implementation"] == "host" && row["max_rel"].as_f64() < Some(1e-5)), "{rows:?}");
}

#[test]
fn all_policies_that_open_here_are_checked_and_a_breach_is_seen_on_each() {
    let (directory, name) = (Runs::new(&[]), "expected.grad.model.norm.weight");
    let wanted = ["ids", "mask", "expected.loss", name];
    let file = Tensors::of("qwen3").only(&wanted).write(&directory);
    let plugin = install(Kind::Cpu, |_| {}).expect("the plugin can be installed").path;
    // A plugin for XLA's CPU, and a separate cache for compiled programs.
    let parity = |file: &str, more: &[&str]| {
        let call = parity("qwen3", file).args(more).quick_cpu();
        call.env("GRPO_PJRT_PLUGIN", &plugin).env("XDG_CACHE_HOME", directory.path("cache"))
    };
    let on_device = ["--device", "pjrt:cpu"];
    let document = parity(&file, &["--json"]).exit(0).json();
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

    let elsewhere = Runs::new(&[]);
    let changed = Tensors::of("qwen3").only(&wanted).shift(name, 3, 1e-2).write(&elsewhere);
    let text = parity(&changed, &on_device).exit(1).stdout;
    assert!(text.contains("FAIL at 3: expected") && text.matches("FAIL at").count() == 1, "{text}");
    let text = parity(&changed, &[]).exit(1).stdout;
    assert_eq!(text.matches("FAIL at 3").count(), 2, "{text}");
    assert_has(&text, &["note: not checked on pjrt:tpu: "]);

    // Damaged programs in the cache are compiled again, with a warning.
    let programs = directory.path("cache/grpo/programs");
    let entries = names(&programs);
    assert!(!entries.is_empty());
    for entry in &entries {
        let bytes = std::fs::read(programs.join(entry)).expect("a program");
        std::fs::write(programs.join(entry), &bytes[..bytes.len() / 2]).expect("written");
    }
    for warns in [true, false] {
        let said = parity(&file, &on_device).exit(0).stderr;
        assert_eq!(said.contains("it is compiled again"), warns, "{said}");
    }

    // Other flags of the compiler in the environment: other programs.
    parity(&file, &on_device).env("XLA_FLAGS", "--xla_backend_optimization_level=1").succeed();
    assert!(names(&programs).len() > entries.len(), "{entries:?}");
}

#[test]
fn a_device_that_is_asked_for_and_cannot_be_used_is_an_error() {
    let file = expected("qwen2");
    for (arguments, words) in [
        (&["--device", "pjrt:cpu"][..], &["pjrt:cpu", "HOME"][..]),
        (&["--device", "pjrt:cpu", "--plugin", "/nowhere.so"], &["/nowhere.so"]),
        (&["--plugin", "/nowhere.so"], &["--device"]),
    ] {
        assert_has(&parity("qwen2", &file).args(arguments).refuse(), words);
    }
    parity("qwen2", &file).args(["--device", "pjrt:gpu"]).exit(2);
    // Without --model.
    grpo(["parity", &file, "--device", "pjrt:cpu"]).exit(2);
}

#[test]
fn an_adapter_is_compared_with_peft() {
    let (file, adapter) = (expected("llama3_lora"), ["--adapter".into(), folder("llama3_lora")]);
    let text = parity("llama3", &file).args(&adapter).succeed();
    assert_has(&text, &["grad.base_model.model.lm_head.lora_A.weight", "25 comparisons, 0 out"]);
    let text = parity("llama3", &file).args(&adapter).args(["--device", "pjrt:cpu"]).quick_cpu().succeed();
    assert!(text.contains("25 comparisons, 0 out") && !text.lines().any(|line| line.starts_with("host ")), "{text}");
    assert_has(&parity("llama3", &file).refuse(), &["lora_A"]);
    parity("llama3", &expected("llama3")).args(&adapter).exit(2);
    parity("qwen3", &file).args(&adapter).refuse();
}

#[test]
fn a_model_is_checked_on_a_mesh() {
    let on = |mesh| parity("qwen3", &expected("qwen3")).args(["--device", "pjrt:cpu", "--mesh", mesh]).quick_cpu();
    let text = on("data=2,fsdp=2,tensor=2").succeed();
    assert_has(&text, &["pjrt:cpu on ", "logits", "PASS: 1 file"]);
    let error = on("tensor=3").refuse();
    assert_has(&error, &["size", "does not split into 3 parts"]);
    let error = on("tensor=2,experts=2").exit(2);
    assert_has(&error.stderr, &["expected data=N", "experts=2"]);
    parity("qwen3", &expected("qwen3")).args(["--device", "host", "--mesh", "fsdp=2"]).refuse();
}

#[test]
fn any_subset_is_enough() {
    let directory = Runs::new(&[]);
    let of = |names: &[&str]| Tensors::of("qwen2").only(names);
    let embedding = "expected.grad.model.embed_tokens.weight";
    for (names, comparisons) in [
        (&["ids", "mask", "expected.loss"][..], "1 comparison, 0 out"),
        (&["ids", "mask", "expected.logits"], "2 comparisons, 0 out"),
        (&["ids", "mask", embedding, "expected.grad.model.layers.1.self_attn.k_proj.bias"], "2 comparisons, 0 out"),
    ] {
        assert_has(&parity("qwen2", &of(names).write(&directory)).succeed(), &[comparisons]);
    }
    // The head of a tied model is its embedding.
    let file = of(&["ids", "mask", embedding]).rename(embedding, "expected.grad.lm_head.weight");
    assert_has(&parity("qwen2", &file.write(&directory)).succeed(), &["grad.lm_head.weight"]);
    // Without a mask all ids count: those of the padding change the loss.
    parity("qwen2", &of(&["ids", "expected.loss"]).write(&directory)).exit(1);
    // What is behind a sequence does not.
    let mut file = Tensors::of("qwen2");
    let vocab = file.get("expected.logits").1[2];
    let last = file.get("expected.logits").1[1] * vocab * 3 - 1;
    let mut file = file.shift("expected.logits", last, f32::NAN);
    let ids = &mut file.get("ids").2;
    let end = ids.len() - 8;
    ids[end..].copy_from_slice(&(-100_i64).to_le_bytes());
    parity("qwen2", &file.write(&directory)).succeed();
}

#[test]
fn a_changed_number_ends_with_1_and_is_named() {
    let directory = Runs::new(&[]);
    for (tensor, at, row, count) in [
        ("expected.logits", 1000, "logits, cached", 2),
        ("expected.loss", 0, "loss", 1),
        ("expected.grad.model.layers.1.self_attn.q_norm.weight", 5, "grad.model.layers.1.self_attn.q_norm.weight", 1),
    ] {
        let file = Tensors::of("qwen3").shift(tensor, at, 1e-3).write(&directory);
        let text = parity("qwen3", &file).exit(1).stdout;
        let line = text.lines().find(|line| line.contains(row)).expect("its row");
        assert!(line.contains(&format!("FAIL at {at}: expected")) && text.contains("FAIL: 1 file, "), "{text}");
        assert_eq!(text.matches("FAIL at").count(), count, "{text}");
        // A wider bound takes it.
        parity("qwen3", &file).args(["--tolerance=0.1", "--gradient-tolerance=0.1"]).succeed();
    }
    // Weights of one family under the configuration of another are refused before anything is computed.
    assert_ne!(parity("llama3", &expected("llama3_bf16")).output().code, Some(0));
}

#[test]
fn bad_files_are_one_line() {
    let directory = Runs::new(&[]);
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
        assert_has(&parity("qwen3", &tensors.write(&directory)).refuse(), words);
    }
    assert_has(&parity("qwen3", &batch("trl_grpo_default")).refuse(), &["grpo-model/1"]);
    let bytes = std::fs::read(expected("qwen3")).expect("the file is there");
    for length in [0, 5, 100, bytes.len() - 1] {
        parity("qwen3", &directory.write("cut.safetensors", &bytes[..length])).refuse();
    }
    grpo(["parity", "--model", "/nowhere", &expected("qwen3")]).refuse();
    for file in ["/nowhere", "/dev/zero"] {
        parity("qwen3", file).refuse();
    }
}
