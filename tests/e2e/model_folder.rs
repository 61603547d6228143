//! A run of a model folder in Hugging Face's layout: what it reads, what it leaves.

use crate::support::{Runs, assert_has, grpo, json, refuse, succeed};
use crate::tiny_model::{call, prepare_shape, small, tensors, train};
use grpo_models::{Adapter, ModelConfig, ModelFolder};
use serde_json::{Value, json};

fn evaluations(runs: &Runs, run: &str) -> Vec<f64> {
    let rows = runs.phase(run, "eval");
    rows.iter().map(|row| row["eval/reward"].as_f64().expect("a mean reward")).collect()
}

#[test]
fn what_a_run_leaves_is_a_model_that_the_next_run_reads() {
    let runs = Runs::small();
    assert_has(&train(&runs, "model", "a", &[]), &["a/model"]);
    let left = runs.path("a/model");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let (before, after) = (std::fs::read(runs.path("model").join(file)), std::fs::read(left.join(file)));
        assert_eq!(before.unwrap(), after.unwrap(), "{file} is not carried byte for byte");
    }
    assert_has(&runs.read("a/model/README.md"), &["library_name: transformers", "max_steps: 2"]);
    assert_ne!(tensors(&left), tensors(&runs.path("model")), "it was trained");
    let rows = runs.metrics("a");
    assert!(rows.iter().any(|row| row["phase"] == "grpo" && row["grad_norm"].as_f64() > Some(1e-3)), "{rows:?}");
    // The reference is the model that was read: the policy is it before the first update, and no longer after.
    let kl: Vec<f64> = rows.iter().filter_map(|row| row["kl"].as_f64()).collect();
    assert!(kl.len() == 2 && kl[0].abs() < 1e-6 && kl[1] > 1e-5, "{kl:?}");
    // Stopped after its first step, it goes on to the same bits.
    train(&runs, "model", "stopped", &["grpo.max_steps=1"]);
    runs.resume("stopped").set(["grpo.max_steps=2"]).succeed();
    assert_eq!(tensors(&runs.path("stopped/model")), tensors(&left));
    // The next run begins with the evaluation that this one has ended with.
    train(&runs, "a/model", "b", &["grpo.max_steps=1"]);
    assert_eq!(evaluations(&runs, "a").last(), evaluations(&runs, "b").first());
    // An earlier checkpoint is exported apart, nothing is written over.
    let (first, again) = (runs.text("first"), runs.text("a"));
    succeed(["export", &again, "--from", "step-000000", "--to", &first]);
    assert_eq!(tensors(&runs.path("first")), tensors(&runs.path("model")), "nothing was trained by then");
    assert_has(&refuse(["export", &again, "--to", &first]), &["first"]);
}

#[test]
fn adapters_are_trained_resumed_exported_and_merged() {
    let runs = Runs::small();
    let lora = ["lora.r=4", "grpo.max_steps=3"];
    train(&runs, "model", "whole", &lora);
    train(&runs, "model", "a", &["lora.r=4", "grpo.max_steps=1"]);
    runs.resume("a").set(["grpo.max_steps=3"]).succeed();
    let shape = ModelFolder::open(&runs.path("model")).unwrap().config().clone();
    let of_run = |name: &str| {
        let adapter = Adapter::open(&runs.path(name).join("model"), &shape).unwrap();
        let matrices = adapter.matrices().iter().map(|matrix| adapter.lora_b(matrix).unwrap().to_vec());
        matrices.collect::<Vec<_>>()
    };
    assert_eq!(of_run("whole"), of_run("a"), "a run that was stopped ends with the same adapters");
    assert!(of_run("a").concat().iter().any(|value| *value != 0.0));
    // Merged, it is a whole model, whose matrices differ and whose norms do not.
    succeed(["export", &runs.text("a"), "--set", "export.merge_adapters=true", "--to", &runs.text("merged")]);
    let [merged, before] = ["merged", "model"].map(|folder| tensors(&runs.path(folder)));
    for (parameter, (a, b)) in shape.parameters().iter().zip(merged.iter().zip(&before)) {
        assert_eq!(a != b, parameter.name.contains("_proj.weight"), "{}", parameter.name);
    }
}

#[test]
fn an_adapter_of_a_tied_head_is_merged_into_a_head_of_its_own() {
    let runs = Runs::new(&[]);
    prepare_shape(&runs, &ModelConfig { tie_word_embeddings: true, ..small() });
    let head = "lora={r: 2, target_modules: [q_proj, lm_head]}";
    train(&runs, "model", "a", &[head, "export.merge_adapters=true"]);
    let [before, after] = ["model", "a/model"].map(|folder| ModelFolder::open(&runs.path(folder)).unwrap());
    // Of config.json one field has changed.
    let tied = before.config();
    assert_eq!(*after.config(), ModelConfig { tie_word_embeddings: false, ..tied.clone() });
    let mut expected = json(&runs.path("model/config.json"));
    expected["tie_word_embeddings"] = false.into();
    assert_eq!(json(&runs.path("a/model/config.json")), expected);
    // The embedding stays what it is, and the head is it with its adapter.
    let (stored, merged) = (before.weights().unwrap(), after.weights().unwrap());
    let of = |weights: &grpo_models::Weights, name: &str| weights.tensor(name).unwrap().to_vec();
    let embedding = of(&stored, "model.embed_tokens.weight");
    assert_eq!(of(&merged, "model.embed_tokens.weight"), embedding);
    // An adapter of the same run, and another merge of it.
    let adapter = runs.text("adapter");
    succeed(["export", &runs.text("a"), "--set", "export.merge_adapters=false", "--to", &adapter]);
    let adapter = Adapter::open(&runs.path("adapter"), tied).unwrap();
    let matrix = adapter.matrices().iter().find(|matrix| matrix.name == "lm_head").unwrap();
    let (a, b) = (adapter.lora_a(matrix).unwrap().to_vec(), adapter.lora_b(matrix).unwrap().to_vec());
    let (scale, width) = (adapter.config().scaling() as f32, tied.hidden_size);
    let mut largest = 0f32;
    for (at, (found, embedding)) in of(&merged, "lm_head.weight").iter().zip(&embedding).enumerate() {
        let (row, column) = (at / width, at % width);
        let added = scale * (b[2 * row] * a[column] + b[2 * row + 1] * a[width + column]);
        assert!((found - embedding - added).abs() < 1e-6, "{found} for {embedding} + {added}");
        largest = largest.max(added.abs());
    }
    assert!(largest > 1e-3, "the head was trained");
    // The next run goes on from it.
    train(&runs, "a/model", "b", &["grpo.max_steps=1"]);
}

#[test]
fn a_model_that_cannot_be_trained_leaves_no_run() {
    let runs = Runs::small();
    let config = runs.read("model/config.json").replace("\"silu\"", "\"gelu\"");
    let weights = std::fs::read(runs.path("model/model.safetensors")).unwrap();
    // The last weight is NaN.
    let not_finite = [&weights[..weights.len() - 4], &f32::NAN.to_le_bytes()].concat();
    for (file, expected, content) in [
        ("config.json", "hidden_act", config.as_bytes()),
        ("tokenizer.json", "tokenizer.json", b"{}"),
        ("model.safetensors", "truncated", &weights[..20_000]),
        ("model.safetensors", "holds NaN at index", &not_finite),
    ] {
        let path = runs.path("model").join(file);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, content).unwrap();
        for settings in [&[][..], &["lora.r=4"]] {
            assert_has(&call(&runs, "model", "a", settings).refuse(), &[expected]);
            assert!(!runs.path("a").exists(), "{file}");
        }
        std::fs::write(&path, whole).unwrap();
    }
}

#[test]
fn a_new_model_larger_than_memory_is_refused_before_it_is_made() {
    let runs = Runs::new(&[]);
    let sizes = ["model.hidden_size=32768", "model.intermediate_size=131072", "model.num_hidden_layers=64"];
    let text = grpo(["train", "--run-dir", &runs.text("a")]).set(sizes).exit(2).stderr;
    assert_has(&text, &[" GB are free: `lora` (adapters", "weights (float32)"]);
    assert!(!runs.path("a").exists());
}

#[test]
fn a_stored_model_larger_than_memory_is_refused_before_it_is_read() {
    let runs = Runs::small();
    // 35 thousand million weights, which the file does not hold: it is as long, and has a hole where they would be.
    let shape = ModelConfig { hidden_size: 8192, intermediate_size: 32768, num_hidden_layers: 40, ..small() };
    let mut config = json(&runs.path("model/config.json"));
    config["hidden_size"] = shape.hidden_size.into();
    config["intermediate_size"] = shape.intermediate_size.into();
    config["num_hidden_layers"] = shape.num_hidden_layers.into();
    runs.write("model/config.json", config.to_string());
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for parameter in shape.parameters() {
        let begin = end;
        end += 2 * parameter.len() as u64;
        let tensor = json!({"dtype": "BF16", "shape": parameter.shape, "data_offsets": [begin, end]});
        header.insert(parameter.name, tensor);
    }
    let header = Value::Object(header).to_string();
    let start = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let path = runs.write("model/model.safetensors", &start);
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(start.len() as u64 + end).unwrap();

    let text = call(&runs, "model", "a", &[]).exit(2).stderr;
    assert_has(&text, &["709.4", " GB of memory are needed", " GB are free: `lora` (adapters"]);
    assert_has(&text, &["weights (float32)", "first moments (float32)", "gradients (float32)"]);
    assert!(!runs.path("a").exists());
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_run_reads_its_prompts_through_the_chat_template_of_its_configuration() {
    let runs = Runs::small();
    // Completions of one token: whatever else is counted are prompts.
    let short = ["grpo.max_steps=1", "rollout.max_completion_length=1"];
    let tokens = |name: &str, settings: &[&str]| {
        train(&runs, "model", name, &[&short, settings].concat());
        runs.phase(name, "grpo")[0]["num_tokens"].as_f64().unwrap() as u64
    };
    let plain = tokens("plain", &[]);
    // `<think>\n\n</think>\n\n` in each of 16 prompts: two tokens of their own and what is between and behind them.
    let silent = tokens("silent", &["data.chat_template_kwargs={enable_thinking: false}"]);
    assert!(silent >= plain + 16 * 4 && (silent - plain).is_multiple_of(16), "{plain} {silent}");
    // A template that insists on its variable: both keys are in the run, and in the run that goes on.
    let template = "{% if not tone %}{{ raise_exception('no tone') }}{% endif %}{{ messages[0].content }} {{ tone }}";
    let of_file = format!("data.chat_template={}", runs.write("mine.jinja", template));
    let text = call(&runs, "model", "refused", &short).set([&of_file]).refuse();
    assert_has(&text, &["mine.jinja", "no tone"]);
    assert!(!runs.path("refused").exists());
    let mine = tokens("mine", &[&of_file, "data.chat_template_kwargs={tone: calm}"]);
    assert!(mine < plain, "{plain} {mine}");
    runs.resume("mine").set(["grpo.max_steps=2"]).succeed();
}
