//! The compiler's numbers of a run's plan.

use crate::support::{Runs, Said, assert_has, grpo};
use grpo_pjrt::install::Kind;

const RUN: &str = "run: { name: small }
model: { vocab_size: 512, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 4, num_attention_heads: 4, \
num_key_value_heads: 2, max_position_embeddings: 256 }
policy: { dtype: bfloat16, mesh: auto, devices: 3 }
rollout: { max_completion_length: 64, batch_size: 8 }
grpo: { prompts_per_step: 2, num_generations: 4 }
";

fn plan(kind: Kind, target: &str, more: &[&str], code: i32) -> Said {
    let folder = Runs::new(&[]);
    grpo(["plan", &folder.write("config.yaml", RUN), "--target", target]).args(more).plugin(kind).exit(code)
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn best_meshes_are_compiled_and_the_numbers_are_beside_the_predictions() {
    let document = plan(Kind::Tpu, "v6e:2x2", &["--compile", "2", "--json"], 0).json();
    let candidates = document["candidates"].as_array().expect("candidates");
    let compiled: Vec<_> = candidates.iter().filter(|candidate| !candidate["compiled"].is_null()).collect();
    assert_eq!(compiled.len(), 2, "{document}");
    assert_ne!(compiled[0]["mesh"], compiled[1]["mesh"]);
    assert!(document["not_compiled"].is_null());
    for candidate in &compiled {
        let numbers = &candidate["compiled"];
        assert_eq!(numbers["fits"], true, "{numbers}");
        for program in ["update", "decode"] {
            assert!(numbers[format!("{program}_seconds")].as_f64() > Some(0.0), "{numbers}");
        }
        // Weights and two moments, four bytes each, over the devices.
        let parameters = document["parameters"].as_f64().expect("a number");
        assert!(numbers["memory_bytes"].as_f64() > Some(12.0 * parameters / 4.0), "{numbers}");
    }
    // Compiled candidates come first, and the first one is the best.
    let steps: Vec<Option<f64>> = (0..2).map(|i| candidates[i]["compiled"]["step_seconds"].as_f64()).collect();
    assert!(steps[0] > Some(0.0) && steps[0] <= steps[1], "{steps:?}");
    assert_eq!(candidates[0]["mesh"], document["best"]["mesh"], "{document}");

    let said = plan(Kind::Tpu, "v6e:2x2", &["--compile", "2", "--recompile"], 0);
    // Two programs of each mesh: an update and a decode step.
    for number in 1..=4 {
        assert_has(&said.stderr, &[&format!("({number} of 4)"), &format!("({number} of 4 done)")]);
    }
    assert_has(&said.stderr, &["4 programs of 2 meshes are compiled", "--compile 0"]);
    assert_eq!(said.stderr.matches(" of 4 done)").count(), 4, "{}", said.stderr);
    let text = said.stdout;
    let (predicted, compiled) = text.split_once("Every mesh with the compiler's numbers").expect("two tables");
    assert!(predicted.contains("by the cost model") && !predicted.contains("compiled update"), "{text}");
    let first = compiled.lines().skip_while(|line| !line.starts_with('─')).nth(1).expect("a row");
    let (_, best) = text
        .split_once("The best settings, ")
        .and_then(|(rest, best)| Some((rest, best.split(':').next()?)))
        .expect("settings");
    assert!(first.starts_with(&format!("{best} ")), "{text}");
    assert_has(&text, &["compiled update", "compiled decode", "compiled memory"]);
    assert_has(&text, &["leave out the links", "The best settings"]);
    assert!(!text.contains("cost model alone"), "{text}");
}

#[test]
#[ignore = "GRPO_TESTS=all: XLA's CUDA compiler"]
fn gpus_report_bytes_without_times() {
    // One host, and two hosts of eight.
    for target in ["h100x2", "h100x16"] {
        let document = plan(Kind::Cuda, target, &["--compile", "1", "--json"], 0).json();
        let candidates = document["candidates"].as_array().expect("candidates");
        let compiled = candidates.iter().find(|candidate| !candidate["compiled"].is_null()).expect("one");
        let numbers = &compiled["compiled"];
        assert!(numbers["update_seconds"].is_null() && numbers["decode_seconds"].is_null(), "{target}: {compiled}");
        assert!(numbers["memory_bytes"].as_f64() > Some(0.0), "{target}: {compiled}");
    }
}
