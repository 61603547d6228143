//! `grpo plan` of a run by the cost model alone.

use crate::support::{Call, Runs, assert_has, grpo, repository};
use serde_json::Value;

/// A model that compiles and is planned at once.
const RUN: &str = "run: { name: small }
model: { vocab_size: 512, hidden_size: 128, intermediate_size: 512, num_hidden_layers: 4, num_attention_heads: 4, \
num_key_value_heads: 2, max_position_embeddings: 256 }
rollout: { max_completion_length: 64, batch_size: 8 }
grpo: { prompts_per_step: 2, num_generations: 4, gradient_accumulation_steps: 2 }
";

fn plan(config: &str, target: &str) -> Call {
    grpo(["plan", config, "--target", target, "--compile", "0"])
}

#[test]
fn plan_of_a_shipped_run_ranks_meshes_and_prints_their_keys() {
    for name in ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-8b", "llama-3.1-8b"] {
        let config = repository(&format!("configs/aot/{name}.yaml"));
        for target in ["v6e:2x4", "v5p:2x2x2", "h100x8"] {
            let text = plan(&config, target).succeed();
            assert_has(&text, &[name, target, "fsdp 8", "fsdp 4 x tensor 2", "full", "not measurements"]);
            assert_has(&text, &["--compile 0", "cost model alone", "The best settings, "]);
            // Eight copies of a large model do not fit.
            let is_large = ["qwen2.5-7b", "qwen3-8b", "llama-3.1-8b"].contains(&name);
            assert_eq!(text.contains("does not fit"), is_large, "{text}");
            assert_eq!(text.contains("Left out"), name != "qwen3-8b" && name != "llama-3.1-8b", "{text}");
            // The first row of the first table is the best.
            let first = text.lines().skip_while(|line| !line.starts_with('─')).nth(1).expect("a row");
            assert!(first.starts_with("fsdp 8 ") || target == "h100x8", "{text}");
        }
    }
}

#[test]
fn planned_yaml_is_a_configuration_that_train_accepts() {
    let folder = Runs::new(&[]);
    let config = folder.write("run.yaml", RUN);
    let text = plan(&config, "v6e:2x2").succeed();
    let (_, yaml) = text.split_once("The best settings").and_then(|(_, rest)| rest.split_once("\n\n")).expect("YAML");
    let planned = folder.write("planned.yaml", yaml);
    let printed = grpo(["train", "--config", &planned, "--print-config"]).succeed();
    let document = plan(&config, "v6e:2x2").args(["--json"]).exit(0).json();
    let best = &document["best"];
    assert_eq!(best["yaml"], yaml);
    let printed: Value = serde_saphyr::from_str(&printed).expect("YAML");
    for (section, key) in [
        ("policy", "device"),
        ("policy", "mesh"),
        ("policy", "recompute_granularity"),
        ("policy", "recompute_num_layers"),
        ("rollout", "mesh"),
        ("grpo", "gradient_accumulation_steps"),
    ] {
        assert_eq!(printed[section][key], best["keys"][section][key], "{section}.{key}");
    }
    // The planned run has the planned meshes.
    let set = |key: &str, value: &Value| ["--set".to_owned(), format!("{key}={value}")];
    let sets = [set("policy.mesh", &best["mesh"]), set("rollout.mesh", &best["rollout_mesh"])].concat();
    let again = grpo(["plan", &config, "--print-config"]).args(sets).succeed();
    let again: Value = serde_saphyr::from_str(&again).expect("YAML");
    assert_eq!(again["policy"]["mesh"], best["mesh"]);
}

#[test]
fn plan_as_json_has_a_version_and_all_candidates() {
    let folder = Runs::new(&[]);
    let config = folder.write("run.yaml", RUN);
    let document = plan(&config, "v6e:2x4").args(["--json"]).exit(0).json();
    let keys = |value: &Value| value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
    let mut expected = vec![
        "best",
        "candidates",
        "chip",
        "devices",
        "fitting",
        "format",
        "illegal",
        "memory_bytes",
        "name",
        "not_compiled",
        "parameters",
        "sequences",
        "target",
        "tokens",
    ];
    expected.sort_unstable();
    let mut found = keys(&document);
    found.sort_unstable();
    assert_eq!(found, expected);
    assert_eq!((&document["format"], &document["devices"]), (&"grpo-plan/1".into(), &8.into()));
    let candidates = document["candidates"].as_array().expect("candidates");
    assert_eq!(document["fitting"][1], candidates.len());
    let mut found = keys(&candidates[0]);
    found.sort_unstable();
    assert_eq!(
        found,
        [
            "compiled",
            "fits",
            "gradient_accumulation_steps",
            "memory_bytes",
            "mesh",
            "micro_batch",
            "recompute_granularity",
            "recompute_num_layers",
            "rollout",
            "rollout_mesh",
            "score",
            "step_seconds",
            "update",
        ]
    );
    assert!(candidates.iter().all(|c| c["compiled"].is_null() && c["step_seconds"].as_f64() > Some(0.0)));
    // Meshes of eight devices: with tensor 1, 2 and 4, which copies key/value heads; four query heads do not divide by 8.
    let mut meshes: Vec<String> = candidates.iter().map(|c| c["mesh"].to_string()).collect();
    meshes.sort();
    meshes.dedup();
    let illegal = document["illegal"].as_array().expect("groups");
    let left_out: usize = illegal.iter().map(|group| group["meshes"].as_array().map_or(0, Vec::len)).sum();
    assert_eq!((meshes.len(), left_out), (9, 1), "{illegal:?}");
    assert_has(&illegal[0]["reason"].to_string(), &["policy.mesh.tensor", "key/value heads", ": 1, 2, 4, got 8"]);
    let short = plan(&config, "v6e:2x4").args(["--json", "--top", "2"]).exit(0).json();
    assert_eq!(short["candidates"].as_array().map(Vec::len), Some(2));
    assert_eq!(short["fitting"], document["fitting"]);
}

#[test]
fn plan_refuses_unknown_targets_and_runs_that_do_not_fit() {
    let folder = Runs::new(&[]);
    let config = folder.write("run.yaml", RUN);
    for (target, words) in [
        ("v9", &["`v9`", "v4, v5e, v5p, v6e, tpu7x", "a100, h100, h200, b200"][..]),
        ("v6e:3x5", &["`v6e:3x5`", "v6e has the shapes 1x1, 2x2, 2x4"]),
        ("v5p:2x4", &["`v5p:2x4`", "2x2x1, 2x2x2", "4x4x8"]),
        ("h100x0", &["`h100x0`", "h100x8"]),
    ] {
        assert_has(&plan(&config, target).refuse(), words);
    }
    let big = repository("configs/aot/qwen2.5-7b.yaml");
    let said = plan(&big, "v6e").exit(2);
    assert_has(&said.stdout, &["one device", "does not fit", "0 of"]);
    assert_has(&said.stderr, &["no mesh of v6e fits", "least memory is 1", "GB per device", "33.54 GB may be used"]);
    assert_has(&said.stderr, &["a target with more devices", "grpo.gradient_accumulation_steps", "policy.dtype"]);
    // A limit of one's own.
    let said = plan(&config, "v6e").args(["--hbm", "1MB"]).exit(2);
    assert_has(&said.stderr, &["no mesh of v6e fits", "1.0 MB may be used"]);
    assert_has(&plan(&big, "v6e:2x4").args(["--hbm", "90GB"]).succeed(), &["90.000 GB for programs"]);
    let benchmark = repository("configs/bench/fused.yaml");
    assert_has(&plan(&benchmark, "v6e").refuse(), &["--compile", "configs/train/", "benchmark"]);
    let call = grpo(["plan", &config, "--target", "v6e", "--variant", "fused"]);
    assert_has(&call.refuse(), &["--variant", "configs/bench/"]);
}

#[test]
fn plan_without_a_plugin_reports_the_cost_model_alone() {
    let folder = Runs::new(&[]);
    let config = folder.write("run.yaml", RUN);
    let call = |more: &[&str]| {
        grpo(["plan", &config, "--target", "v6e:2x2"]).args(more).env("XDG_CACHE_HOME", folder.path(""))
    };
    assert_has(&call(&[]).succeed(), &["cost model alone", "grpo plugin install tpu", "The best settings"]);
    assert_has(&call(&["--compile", "1"]).refuse(), &["grpo plugin install tpu"]);
    assert_has(&call(&["--plugin", "/nowhere.so"]).refuse(), &["/nowhere.so"]);
}

#[test]
fn the_cost_model_is_printed_before_anything_is_compiled() {
    let folder = Runs::new(&[]);
    let (config, library) = (folder.write("run.yaml", RUN), folder.write("plugin.so", "no library"));
    // The compiler cannot start; its table is printed all the same.
    let call = |more: &[&str]| grpo(["plan", &config, "--target", "v6e:2x2", "--plugin", &library]).args(more).exit(2);
    let said = call(&["--compile", "2"]);
    assert_has(&said.stdout, &["by the cost model", "mesh", "rollout time", "fsdp 4"]);
    assert!(!said.stdout.contains("The best settings"), "{}", said.stdout);
    let announced = said.stderr.lines().next().expect("a line");
    assert_has(announced, &["of 2 meshes are compiled for v6e:2x2 (", "fsdp 4", "--compile 0"]);
    assert_has(&said.stderr, &["error: "]);
    // A document for programs is printed at the end.
    assert_eq!(call(&["--json"]).stdout, "");
}
