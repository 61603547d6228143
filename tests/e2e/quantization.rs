//! Runs with `policy.quantization`: training, resuming and export, on the host and on a device.

use crate::support::{Runs, assert_has, grpo, succeed};
use crate::tiny_model::{call, prepare_shape, small, tensors, train};
use grpo_models::{
    Adapter, Dtype, ExportOptions, FolderWriter, ModelConfig, ModelFolder, Quantization, QuantizedMatrix,
};

/// A model whose matrices can be quantised on a device.
fn runs() -> Runs {
    let runs = Runs::new(&[]);
    let shape = ModelConfig { hidden_size: 64, intermediate_size: 64, head_dim: Some(32), ..small() };
    prepare_shape(&runs, &shape);
    runs
}

fn settings(device: &str, format: &str) -> [String; 4] {
    let learning_rate = "optimizer.learning_rate=0.0001".to_owned();
    [
        format!("policy.device={device}"),
        format!("policy.quantization={format}"),
        "lora={r: 2}".to_owned(),
        learning_rate,
    ]
}

/// Returns the tensors of the adapter that a run exported.
fn adapter(runs: &Runs, run: &str) -> Vec<Vec<f32>> {
    let base = ModelFolder::open(&runs.path("model")).unwrap();
    let adapter = Adapter::open(&runs.path(run).join("model"), base.config()).unwrap();
    let of = |matrix| [adapter.lora_a(matrix).unwrap().to_vec(), adapter.lora_b(matrix).unwrap().to_vec()];
    adapter.matrices().iter().flat_map(of).collect()
}

fn resumes_and_merges(device: &str, format: &str) {
    let runs = runs();
    let settings = settings(device, format);
    let with = |more: &[&'static str]| -> Vec<String> {
        settings.iter().cloned().chain(more.iter().map(|setting| (*setting).to_owned())).collect()
    };
    let start = |name: &str, settings: &[String]| {
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        call(&runs, "model", name, &settings).quick_cpu().env("GRPO_LOG", "info").exit(0).stderr
    };
    let log = start("whole", &with(&[]));
    assert_has(&log, &[&format!("quantised weights ({format})"), "adapters (float32)"]);
    start("parts", &with(&["grpo.max_steps=1"]));
    runs.resume("parts").set(["grpo.max_steps=2"]).quick_cpu().succeed();
    assert_eq!(adapter(&runs, "parts"), adapter(&runs, "whole"));
    assert!(adapter(&runs, "whole").iter().flatten().any(|value| *value != 0.0));

    // The adapter is merged into the weights of the folder, at the end of a run and by `grpo export`.
    let log = start("merged", &with(&["export.merge_adapters=true"]));
    assert_has(&log, &["merged into the weights of the model's folder", format]);
    succeed(["export", &runs.text("whole"), "--set", "export.merge_adapters=true", "--to", &runs.text("exported")]);
    let merged = tensors(&runs.path("merged/model"));
    assert!(merged == tensors(&runs.path("exported")));
    let base = tensors(&runs.path("model"));
    assert_ne!(merged, base);
    let off = |(merged, base): (&Vec<f32>, &Vec<f32>)| {
        merged.iter().zip(base).map(|(merged, base)| (merged - base).abs()).fold(0.0, f32::max)
    };
    let off = merged.iter().zip(&base).map(off).fold(0.0, f32::max);
    // Two updates move the weights by far less than the error of 4 bits of weights up to 0.2, at most 0.03.
    assert!(off < 0.003, "{off}");
    assert_has(&runs.read("merged/model/README.md"), &[&format!("LoRA adapters on {format} weights")]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_quantised_run_resumes_bit_for_bit_and_merges_into_the_weights_of_the_folder() {
    for format in ["int8", "nf4"] {
        resumes_and_merges("host", format);
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_quantised_run_on_a_device_resumes_bit_for_bit_and_merges_into_the_weights_of_the_folder() {
    resumes_and_merges("pjrt:cpu", "nf4");
}

/// Writes the model to the folder `name`, with the dequantised values of its quantised matrices.
fn dequantize(runs: &Runs, quantization: Quantization, name: &str) {
    let source = ModelFolder::open(&runs.path("model")).unwrap();
    let (config, weights) = (source.config(), source.weights().unwrap());
    let of_layer = |layer: usize| {
        let matrices = config.layer_matrices(layer).into_iter();
        matrices.map(move |matrix| format!("model.layers.{layer}.{}.weight", matrix.name))
    };
    let matrices: Vec<String> = (0..config.num_hidden_layers).flat_map(of_layer).collect();
    let options = ExportOptions { dtype: Dtype::F32, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(&runs.path(name), config, Some(&source), options).unwrap();
    for parameter in config.parameters() {
        let mut values = weights.tensor(&parameter.name).unwrap().to_vec();
        if matrices.contains(&parameter.name) {
            let shape = parameter.shape[..].try_into().unwrap();
            values = QuantizedMatrix::new(quantization, &values, shape).dequantized();
        }
        writer.write(&parameter.name, &values).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn a_quantised_run_has_the_entropy_of_a_run_with_dequantised_weights() {
    let runs = runs();
    let entropy = |model: &str, format: &str| {
        let run = format!("{model}-{format}");
        train(&runs, model, &run, &["lora={r: 2}", &format!("policy.quantization={format}"), "grpo.max_steps=1"]);
        runs.metrics(&run).iter().find_map(|row| row["entropy"].as_f64()).expect("an entropy")
    };
    let exact = entropy("model", "null");
    for quantization in [Quantization::Int8, Quantization::Nf4] {
        let (format, model) = (quantization.name(), format!("of-{}", quantization.name()));
        dequantize(&runs, quantization, &model);
        let [found, expected] = [entropy("model", format), entropy(&model, "null")];
        assert!((found - expected).abs() < 1e-5 * expected, "{format}: {found} {expected}");
        assert!((exact - expected).abs() > 1e-4 * expected, "{format}: {exact} {expected}");
    }
}

/// Returns the bytes after `words` in a text, such as `12.5 MB`.
fn bytes_after(text: &str, words: &str) -> f64 {
    let (_, rest) = text.split_once(words).unwrap_or_else(|| panic!("{words:?} in {text}"));
    let line = rest.lines().next().unwrap_or_default();
    let line = line.split_once(") ").map_or(line, |(_, size)| size);
    let (number, unit) = line.trim().split_once(' ').unwrap_or_else(|| panic!("{line:?} is no size"));
    let number: f64 = number.parse().unwrap_or_else(|_| panic!("{line:?} is no size"));
    number * if unit == "GB" { 1e9 } else { 1e6 }
}

/// The matrices of layers take 75 MB in f32, mapped, and as much again packed for sampling.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn quantised_runs_take_less_memory_as_their_tables_say() {
    let runs = Runs::new(&[]);
    let shape = ModelConfig {
        vocab_size: 512,
        hidden_size: 512,
        intermediate_size: 2048,
        num_hidden_layers: 5,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        max_position_embeddings: 256,
        ..small()
    };
    prepare_shape(&runs, &shape);
    let of = |format: &str| {
        let settings = ["lora={r: 2}", &format!("policy.quantization={format}"), "run.save_steps=0", "loss.beta=0"];
        let call = call(&runs, "model", format, &settings).env("RAYON_NUM_THREADS", "2").env("GRPO_LOG", "info");
        let text = call.exit(0).stderr;
        (bytes_after(&text, "total ("), bytes_after(&text, "the most memory that this process took: "))
    };
    let [(exact, most), int8, nf4] = ["null", "int8", "nf4"].map(of);
    let matrices: usize = (0..5).flat_map(|layer| shape.layer_matrices(layer)).map(|of| of.input * of.output).sum();
    for (name, bits, (said, taken)) in [("int8", 8.0, int8), ("nf4", 4.5, nf4)] {
        let saved = matrices as f64 * (64.0 - bits) / 8.0;
        // The total is that of the largest phase, which may be another one.
        let share = (exact - said) / saved;
        assert!((0.7..1.05).contains(&share), "{name}: {exact} {said} {saved}");
        assert!(
            most - taken > 0.7 * saved,
            "{name}: the run took {most} without and {taken} with, said to save {saved}"
        );
    }
}

#[test]
fn unsupported_combinations_are_refused_before_weights_are_read() {
    let runs = runs();
    // Whatever fails, fails before the weights are read.
    std::fs::write(runs.path("model/model.safetensors"), "no weights").unwrap();
    let error = call(&runs, "model", "a", &["policy.quantization=nf4"]).refuse();
    assert_has(&error, &["`policy.quantization`: expected null, or a run with the section `lora`", "got nf4"]);
    let error = call(&runs, "model", "a", &["lora={r: 2}", "policy.quantization=fp4"]).refuse();
    assert_has(&error, &["policy.quantization", "int8", "nf4"]);
    let new = ["train", "--run-dir", &runs.text("a")];
    let error = grpo(new).set(["lora={r: 2}", "policy.quantization=nf4"]).refuse();
    assert_has(&error, &["`policy.quantization`: expected null, or a pretrained `model`"]);
    let runs = Runs::new(&[]);
    prepare_shape(&runs, &ModelConfig { hidden_size: 48, ..small() });
    std::fs::write(runs.path("model/model.safetensors"), "no weights").unwrap();
    let error =
        call(&runs, "model", "a", &["lora={r: 2}", "policy.quantization=nf4", "policy.device=pjrt:cpu"]).refuse();
    assert_has(&error, &["`policy.quantization`", "a multiple of 8 rows and of 64 columns", "model.layers.0."]);
    assert!(!runs.path("a").exists());
}
