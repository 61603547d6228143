//! Memory and time estimates of the loss by the compilers of TPUs and GPUs, and installation of their plugins.
//!
//! The bounds are claims of the README. They are checked with the real compilers, which need no device.

use crate::support::{Call, Runs, assert_has, grpo, repository, succeed};
use grpo_pjrt::install::{Kind, install};
use serde_json::Value;
use std::path::PathBuf;

/// Returns the path of `configs/bench/NAME.yaml` in this repository.
fn config(name: &str) -> String {
    repository(&format!("configs/bench/{name}.yaml"))
}

/// Compiles variants and expects every assertion to hold.
fn compile(kind: Kind, arguments: &[&str], variants: &[&str], assertions: &[&str]) -> Value {
    let call = grpo(["aot", "--json"]).args(arguments).plugin(kind);
    let call = call.args(variants.iter().flat_map(|variant| ["--variants", variant]));
    call.args(assertions.iter().flat_map(|assertion| ["--assert", assertion])).exit(0).json()
}

/// Compiles the loss of a step for a TPU, and expects the fields of every variant.
fn fused_on_v6e(variants: &[&str], assertions: &[&str]) -> Value {
    let document = compile(Kind::Tpu, &[&config("fused"), "--target", "v6e:2x4"], variants, assertions);
    for variant in variants {
        let report = &document["variants"][variant];
        for field in ["argument_bytes", "temp_bytes", "code_bytes", "flops", "bytes_accessed", "estimate_seconds"] {
            assert!(report[field].as_f64().is_some_and(|number| number > 0.0), "{variant}.{field}: {report}");
        }
        assert!(report["estimate_cycles"].as_f64().is_some_and(|cycles| cycles > 1e6), "{variant}: {report}");
    }
    document
}

#[test]
fn fused_on_v6e_takes_a_twelfth_of_the_baseline_and_less_time() {
    let document = fused_on_v6e(
        &["fused", "materialised"],
        &[
            "fused.temp_bytes <= 630e6",
            "fused.estimate_seconds <= materialised.estimate_seconds",
            // The baseline has its known size, and estimates are not below the floor.
            "materialised.temp_bytes >= 7.4e9",
            "materialised.temp_bytes <= 7.6e9",
            "fused.estimate_seconds >= fused.floor.seconds",
            "fused.flops >= fused.floor.flops",
            // Gradients are updated in place.
            "fused.output_bytes <= fused.alias_bytes * 1.001",
        ],
    );
    let fused = &document["variants"]["fused"];
    assert_eq!((&fused["blocking"]["token_chunks"], &fused["loops"][0]["trips"]), (&2048.into(), &4.into()));
}

#[test]
#[ignore = "GRPO_TESTS=all: two further programs, half a minute of compilation each"]
fn a_frozen_head_on_v6e_takes_less_time_and_min_memory_less_workspace() {
    fused_on_v6e(
        &["fused", "fused_frozen_head", "fused_min_memory"],
        &[
            "fused_min_memory.temp_bytes <= 260e6",
            "fused_frozen_head.estimate_seconds <= fused.estimate_seconds * 0.75",
        ],
    );
}

#[test]
fn logits_on_v6e_need_no_workspace_with_xla_or_mosaic() {
    // One aligned and one unaligned vocabulary.
    for (name, baseline) in [("logits-b1-t4096-v151936", true), ("logits-b4-t1024-v151643", false)] {
        let mut assertions = vec![
            "logits.temp_bytes <= 1e6",
            "logits.estimate_seconds <= 3.2e-3",
            "logits_entropy.temp_bytes <= 1e6",
            "logits_mosaic.temp_bytes <= 1e6",
        ];
        let mut variants = vec!["logits", "logits_entropy", "logits_mosaic"];
        if baseline {
            assertions.push("materialised.temp_bytes >= 2.4e9");
            variants.push("materialised");
        }
        let document = compile(Kind::Tpu, &[&config(name), "--target", "v6e:2x4"], &variants, &assertions);
        // The compiler does not estimate a kernel's cycles.
        let kernels = &document["variants"]["logits_mosaic"];
        assert!(kernels["estimate_cycles"].is_null() && kernels["estimate_seconds"].is_f64(), "{kernels}");
    }
}

#[test]
#[ignore = "GRPO_TESTS=all: XLA's CUDA compiler"]
fn fused_on_an_h200_takes_a_tenth_of_the_baseline() {
    let name = config("fused");
    let claims =
        ["fused.temp_bytes <= 0.7e9", "fused_min_memory.temp_bytes <= 0.26e9", "materialised.temp_bytes >= 7.4e9"];
    let variants = ["fused", "fused_min_memory", "materialised"];
    let document = compile(Kind::Cuda, &[&name, "--target", "h200"], &variants, &claims);
    let fused = &document["variants"]["fused"];
    assert!(fused["estimate_seconds"].is_null(), "{fused}");
    assert!(fused["no_estimate"].as_str().is_some_and(|reason| reason.contains("cost analysis")), "{fused}");
    for target in ["a100", "h100", "b200"] {
        compile(Kind::Cuda, &[&name, "--target", target], &["fused"], &["fused.temp_bytes <= 0.7e9"]);
    }
}

/// A shape that compiles in a second on any number of devices.
const SMALL: [&str; 2] = ["shape={tokens: 256, hidden: 128, vocab: 1000}", "variants.fused.tiling={token_chunk: 64}"];

/// Calls `grpo aot` for a TPU on the small shape with one variant.
fn aot(target: &str) -> Call {
    grpo(["aot", "--target", target, "--variants", "fused"]).set(SMALL).plugin(Kind::Tpu)
}

/// Calls `grpo plan`, whose default is the same variant, within `memory`.
fn plan(memory: &str) -> Call {
    grpo(["plan", "--target", "v6e", "--hbm", memory]).set(SMALL).plugin(Kind::Tpu)
}

#[test]
fn fused_compiles_for_a_mesh() {
    let mesh = aot("v6e:2x4").set(["mesh={data: 2, tensor: 4}"]).args(["--json", "--assert", "fused.code_bytes > 0"]);
    // Every device has all 256 tokens, in chunks of 64.
    assert_eq!(mesh.exit(0).json()["variants"]["fused"]["loops"][0]["trips"], 4);
    assert_has(&aot("v6e:1x1").set(["mesh.data=2"]).refuse(), &["mesh data 2 x tensor 1", "larger slice"]);
}

#[test]
fn failed_assertion_exits_with_1_after_programs_are_written() {
    let folder = Runs::new(&[]);
    let call = aot("v6e").args(["--emit", &folder.text("new"), "--assert", "fused.argument_bytes <= 1"]);
    let text = call.exit(1).stdout;
    let failed = "DOES NOT HOLD: fused.argument_bytes <= 1";
    assert_has(&text, &["64 tokens", failed, "estimate", "not measurements", "floor"]);
    assert_has(&folder.read("new/fused.mlir"), &["stablehlo.while", "tensor<1000x128xbf16>"]);
}

#[test]
fn plan_fits_the_device_and_prints_its_configuration() {
    let plan_of_2mb = plan("2MB").args(["--json"]).exit(0).json();
    let best = &plan_of_2mb["best"];
    assert!(best["total_bytes"].as_u64().is_some_and(|total| total <= 2_000_000), "{best}");
    let line = plan_of_2mb["config_line"].as_str().expect("a line");
    let config: Value = serde_saphyr::from_str(line).expect("YAML");
    assert_eq!(config["tiling"]["token_chunk"], best["blocking"]["token_chunks"], "{line}");
    assert_has(&plan("1kB").refuse(), &["at least", "1.0 kB"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn tiles_of_a_plan_are_named_while_they_are_compiled() {
    let said = plan("2MB").args(["--json", "--recompile"]).exit(0);
    // Standard output is a document.
    said.json();
    let text = said.stderr;
    let lines: Vec<&str> =
        text.lines().filter(|line| line.starts_with("compiling ") && !line.ends_with(" so far")).collect();
    for (number, line) in (1..).zip(&lines) {
        assert!(line.contains(" tokens (program ") || line.contains(" columns (program "), "{line}");
        assert!(line.contains(&format!("(program {number}, ")) && line.ends_with(" of StableHLO)"), "{line}");
    }
    assert!(lines.len() > 2 && lines[0].contains("256 tokens"), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("compiled ")).count(), lines.len(), "{text}");
}

#[test]
fn aot_refuses_bad_targets_configurations_and_assertions_before_compiling() {
    for (arguments, words) in [
        (&["--target", "v6e:two"][..], &["`v6e:two`", "v6e:2x4", "h200"][..]),
        (&["--target", "tpu"], &["`tpu`"]),
        (&["--target", "v6e", "--variants", "fuse"], &["`fuse`", "fused_min_memory"]),
        (&["--target", "v6e", "--set", "shape.tokns=1"], &["shape.tokns", "did you mean `tokens`"]),
        (&["--target", "v6e", "--set", "variants.fused.tiling.token_chunk=0"], &["variant `fused`", "token_chunk"]),
        (&["--target", "v6e", "--set", "variants.fused.tilling={}"], &["variants.fused", "tilling"]),
        (&["--target", "v6e", "--assert", "fused.temp_bytes"], &["fused.temp_bytes", "VARIANT.FIELD"]),
        (&["--target", "v6e", "--assert", "fussed.temp_bytes <= 1"], &["`fussed`"]),
        (&["/nowhere/a.yaml", "--target", "v6e"], &["/nowhere/a.yaml"]),
        (&["--target", "v6e", "--plugin", "/nowhere/libtpu.so"], &["/nowhere/libtpu.so", "no such file"]),
    ] {
        assert_has(&grpo(["aot"]).args(arguments).plugin(Kind::Tpu).refuse(), words);
    }
    assert_has(&succeed(["aot", "--print-config", "--set", "shape.tokens=77"]), &["tokens: 77"]);
}

#[test]
fn aot_without_a_plugin_prints_the_install_command() {
    let empty = Runs::new(&[]);
    for (target, words) in [("v6e", "grpo plugin install tpu"), ("h200", "grpo plugin install cuda")] {
        let call = grpo(["aot", "--target", target]).env("XDG_CACHE_HOME", empty.path(""));
        assert_has(&call.refuse(), &[words, "GRPO_PJRT_PLUGIN"]);
    }
    let list = grpo(["plugin", "list"]).env("XDG_CACHE_HOME", empty.path("")).succeed();
    assert_has(&list, &["grpo plugin install cpu"]);
}

#[test]
fn a_plugin_of_another_platform_is_refused() {
    let cpu = install(Kind::Cpu, |_| {}).expect("the plugin can be installed").path;
    assert_has(&aot("v6e").env("GRPO_PJRT_PLUGIN", &cpu).exit(2).stderr, &["xla_cpu_pjrt.so"]);
}

#[test]
#[ignore = "GRPO_TESTS=all: XLA's CUDA compiler"]
fn plugin_install_and_list_manage_the_cache() {
    let cache = Runs::new(&[]);
    // pip uses this machine's configuration and packages.
    let plugin = |arguments: &[&str]| {
        let Call(mut command) = grpo(["plugin"]).args(arguments);
        command.envs(std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("GRPO")));
        Call(command).env("XDG_CACHE_HOME", cache.path(""))
    };
    let mut path = PathBuf::new();
    for verb in ["installed cpu", "already there: cpu"] {
        let text = plugin(&["install", "cpu"]).succeed();
        assert_has(&text, &[verb]);
        path = PathBuf::from(text.lines().last().expect("a path"));
        assert!(path.starts_with(cache.path("")) && path.is_file(), "{}", path.display());
    }
    std::fs::write(&path, "bad").expect("damaged");
    for (option, reason) in [(None, "found 3 bytes"), (Some("--force"), "a new copy was asked for")] {
        let said = plugin(&["install", "cpu"]).args(option).exit(0);
        assert_has(&said.stdout, &["installed again: cpu"]);
        assert_has(&said.stderr, &[reason]);
    }
    let plugins = plugin(&["list", "--json"]).exit(0).json();
    let [cpu, tpu, cuda] = [0, 1, 2].map(|i| &plugins[i]);
    assert_eq!((&cpu["kind"], &cpu["platform"], &cpu["api_version"]), (&"cpu".into(), &"cpu".into(), &"0.81".into()));
    assert!(cpu["devices"].as_array().is_some_and(|devices| !devices.is_empty()), "{cpu}");
    for missing in [tpu, cuda] {
        assert!(missing["path"].is_null() && missing["note"].is_string(), "{missing}");
    }
    plugin(&["install", "gpu"]).exit(2);
}
