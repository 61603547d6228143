//! On XLA's CPU, where times mean nothing and everything else is as on an accelerator.

use super::{case, document, number};
use crate::support::{Call, Runs, Said, assert_has, batch, grpo, json, repository};
use grpo_pjrt::install::Kind;
use serde_json::Value;
use std::process::{Command, Stdio};

/// A problem in which every variant is tiny.
const TINY: &str = "
name: tiny
shape: { batch: 2, tokens: 12, hidden: 16, vocab: 50 }
variants:
  fused:
    numerics: &bf16 { logits: bf16, dlogits: bf16 }
    tiling: { token_chunk: 8 }
  sums_in_bf16:
    numerics: { logits: bf16, dlogits: bf16, gradients: bf16 }
  panels:
    numerics: *bf16
    tiling: { vocab_block: 16 }
  frozen:
    gradients: { lm_head: false }
  materialised:
    implementation: reference
    pass: materialised
    numerics: *bf16
  score:
    pass: score
";

const LOGITS: &str = "
name: logits
shape: { batch: 2, tokens: 12, hidden: null, vocab: 50 }
loss: { beta: 0.1 }
variants:
  in_place: { implementation: logits, pass: gradient_in_place }
  added: { implementation: logits }
  materialised: { implementation: reference, pass: materialised }
  kernels: { implementation: logits, pass: gradient_in_place, mosaic: {} }
";

fn bench(text: &str, arguments: &[&str]) -> Said {
    let folder = Runs::new(&[]);
    let config = folder.write("config.yaml", text);
    let call = grpo(["bench", &config, "--backend", "pjrt:cpu", "--steps", "3", "--warmup", "1"]);
    call.args(arguments).plugin(Kind::Cpu).output()
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn every_variant_is_measured_over_its_floor_and_sees_the_same_loss() {
    let report = document(&bench(TINY, &["--json"]), 0);
    let report = case(&report);
    for path in ["kind", "platform_version", "plugin"] {
        let value = &report["devices"]["pjrt:cpu"][path];
        assert!(value.as_str().is_some_and(|text| !text.is_empty()), "{path}");
    }
    assert_eq!(report["rounds"], serde_json::json!({ "warmup": 1, "steps": 3 }));
    let product = 2.0 * 24.0 * 50.0 * 16.0;
    let loss = number(report, "/variants/fused/loss");
    assert!(loss.abs() > 1e-3, "inputs without a gradient: {loss}");
    let variants = report["variants"].as_object().expect("variants");
    assert_eq!(variants.len(), 6);
    for (name, variant) in variants {
        assert_eq!(variant["status"], "measured", "{name}: {variant}");
        let seconds = |field| 1e-3 * number(variant, &format!("/step_ms/{field}"));
        assert!(0.0 < seconds("min") && seconds("min") <= seconds("p50") && seconds("p50") <= seconds("p90"), "{name}");
        assert_eq!(variant.pointer("/step_ms/all").and_then(Value::as_array).map(Vec::len), Some(3));
        assert!(number(variant, "/plan_seconds") > 0.0 && number(variant, "/first_call_seconds") > 0.0);
        assert!((number(variant, "/tokens_per_second") * seconds("p50") - 24.0).abs() < 1e-6);
        assert!(number(variant, "/compiled_bytes/arguments") > 0.0);
        let (products, floor) = match name.as_str() {
            "score" => (1.0, None),
            "frozen" => (2.0, Some("floor_hidden")),
            _ => (3.0, Some("floor_hidden_lm_head")),
        };
        assert_eq!(number(variant, "/useful_flops"), products * product, "{name}");
        assert_eq!(variant["floor"].as_str(), floor, "{name}");
        if let Some(floor) = floor {
            let times = 1e3 * seconds("p50") / number(&report["floors"][floor], "/step_ms/p50");
            assert!((number(variant, "/times_floor") - times).abs() < 1e-9, "{name}");
            let found = number(variant, "/loss");
            assert!((found - loss).abs() < 0.02 * loss.abs().max(0.1), "{name}: {found}, not {loss}");
            assert_eq!(variant["agrees"], true, "{name}: {variant}");
        }
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn logits_in_place_are_put_back_before_every_step() {
    let report = document(&bench(LOGITS, &["--json"]), 0);
    let report = case(&report);
    let losses = ["in_place", "added", "materialised"].map(|v| number(report, &format!("/variants/{v}/loss")));
    for loss in losses {
        // After three steps and more: gradients in place of the logits would have another loss.
        assert!((loss - losses[2]).abs() < 1e-4 * losses[2].abs().max(0.1), "{losses:?}");
    }
    assert_eq!(report["variants"]["in_place"]["floor"], "floor_logits");
    let kernels = &report["variants"]["kernels"];
    assert_eq!(kernels["status"], "not_offered");
    assert!(kernels["error"].as_str().is_some_and(|error| error.contains("TPU kernels")), "{kernels}");
    // Who asks for it by name is not served.
    document(&bench(LOGITS, &["--json", "--variants", "kernels"]), 1);
}

#[test]
fn backends_meet_in_one_run_and_agree() {
    let text = "
name: meeting
shape: { batch: 2, tokens: 12, hidden: 16, vocab: 50 }
dtype: f32
rounds: { warmup: 0, steps: 2 }
variants:
  here: {}
  there: { backend: 'pjrt:cpu' }
  # What only the other has.
  threads: { backend: 'pjrt:cpu', threads: 2 }
  rounded: { numerics: { dlogits: bf16 } }
";
    let folder = Runs::new(&[]);
    let config = folder.write("config.yaml", text);
    let output = grpo(&["bench", &config, "--json"]).plugin(Kind::Cpu).output();
    let report = document(&output, 0);
    let variants = &case(&report)["variants"];
    for (name, backend) in [("here", "cpu"), ("there", "pjrt:cpu")] {
        let variant = &variants[name];
        assert_eq!([&variant["status"], &variant["backend"]], ["measured", backend]);
        assert!(variant["agrees"] == true && number(variant, "/bytes/high_water") >= 0.0, "{variant}");
        assert_eq!(number(variant, "/bytes/inputs"), 4.0 * (24.0 + 50.0) * 16.0);
    }
    for (name, word) in [("threads", "threads"), ("rounded", "numerics")] {
        assert_eq!(variants[name]["status"], "not_offered");
        assert!(variants[name]["error"].as_str().is_some_and(|error| error.contains(word)), "{name}: {variants}");
    }
}

/// Everything of the script that needs no GPU.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_script_for_gpus_runs_from_end_to_end() {
    let folder = Runs::new(&[]);
    let (config, out) = (folder.write("tiny.yaml", TINY), folder.path("out"));
    let Call(with_cache) = grpo([""; 0]).plugin(Kind::Cpu);
    let mut script = Command::new("bash");
    script.args([&repository("scripts/gpu.sh"), "--grpo", env!("CARGO_BIN_EXE_grpo"), "--backend", "pjrt:cpu"]);
    script.args(["--parity", &batch("c05_grpo_sequence_kl_t07"), "--config", &config, "--steps", "2"]);
    script.args(["--warmup", "0", "--no-peers", "--peak-tflops", "1", "--out"]).arg(&out);
    // Whole steps of a decoder that this CPU has no trouble with.
    let shape =
        ["hidden_size=64", "intermediate_size=192", "num_hidden_layers=2", "num_attention_heads=4", "vocab_size=512"];
    script.args(shape.iter().flat_map(|number| ["--shape", number]));
    let run =
        ["rollout.max_completion_length=8", "grpo.prompts_per_step=2", "grpo.max_steps=3", "policy.dtype=float32"];
    script.args(run.iter().flat_map(|key| ["--train", key]));
    script.envs(with_cache.get_envs().filter_map(|(name, value)| Some((name, value?)))).stdin(Stdio::null());
    let said: Said = script.output().expect("bash is there").into();
    assert_eq!(said.code, Some(0), "{said}");
    let table = folder.read("out/bench.md");
    assert_eq!(said.stdout.trim_end(), table.trim_end());
    assert_has(
        &table,
        &[
            "PASS",
            "| fused ",
            "| floor_hidden_lm_head ",
            "| materialised ",
            "scripts/gpu.sh --grpo",
            "## Whole steps",
            "| grpo |",
        ],
    );
    let report = json(&out.join("tiny.json"));
    assert_eq!(case(&report)["variants"]["fused"]["status"], "measured");
}
