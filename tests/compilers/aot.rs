//! Memory and time estimates of the loss by the compilers of TPUs and GPUs, and installation of their plugins.
//!
//! The bounds are claims of the README. They are checked with the real compilers, which need no device.

use crate::support::{command, grpo_with, refused, stderr, stdout};
use pjrt::install::{Kind, install};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;

/// Returns the path of `configs/bench/NAME.yaml` in this repository.
fn config(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/bench").join(name).with_extension("yaml");
    path.display().to_string()
}

fn run(kind: Kind, arguments: &[&str]) -> Output {
    grpo_with(kind, arguments).output().expect("the binary starts")
}

/// Compiles and expects every assertion to hold.
fn compile(kind: Kind, arguments: &[&str], assertions: &[&str]) -> Value {
    let mut all = vec!["aot", "--json"];
    all.extend(arguments);
    assertions.iter().for_each(|assertion| all.extend(["--assert", assertion]));
    let output = run(kind, &all);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{}{}", stdout(&output), stderr(&output));
    serde_json::from_str(&stdout(&output)).expect("JSON")
}

#[test]
fn fused_on_v6e_takes_a_twelfth_of_the_baseline_and_less_time() {
    let fused = config("fused");
    let mut arguments = vec![fused.as_str(), "--target", "v6e:2x4"];
    let variants = ["fused", "fused_frozen_head", "fused_min_memory", "materialised"];
    variants.iter().for_each(|variant| arguments.extend(["--variants", variant]));
    let document = compile(
        Kind::Tpu,
        &arguments,
        &[
            "fused.temp_bytes <= 630e6",
            "fused.estimate_seconds <= materialised.estimate_seconds",
            "fused_min_memory.temp_bytes <= 260e6",
            // The baseline has its known size, and estimates are not below the floor.
            "materialised.temp_bytes >= 7.4e9",
            "materialised.temp_bytes <= 7.6e9",
            "fused.estimate_seconds >= fused.floor.seconds",
            "fused.flops >= fused.floor.flops",
            "fused_frozen_head.estimate_seconds <= fused.estimate_seconds * 0.75",
            // Gradients are updated in place.
            "fused.output_bytes <= fused.alias_bytes * 1.001",
        ],
    );
    for variant in variants {
        let report = &document["variants"][variant];
        for field in ["argument_bytes", "temp_bytes", "code_bytes", "flops", "bytes_accessed", "estimate_seconds"] {
            assert!(report[field].as_f64().is_some_and(|number| number > 0.0), "{variant}.{field}: {report}");
        }
        assert!(report["estimate_cycles"].as_f64().is_some_and(|cycles| cycles > 1e6), "{variant}: {report}");
    }
    let fused = &document["variants"]["fused"];
    assert_eq!((&fused["blocking"]["token_chunks"], &fused["loops"][0]["trips"]), (&2048.into(), &4.into()));
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
        let mut variants = vec!["--variants", "logits", "--variants", "logits_entropy", "--variants", "logits_mosaic"];
        if baseline {
            assertions.push("materialised.temp_bytes >= 2.4e9");
            variants.extend(["--variants", "materialised"]);
        }
        let name = config(name);
        let document =
            compile(Kind::Tpu, &[&[name.as_str(), "--target", "v6e:2x4"], &variants[..]].concat(), &assertions);
        // The compiler does not estimate a kernel's cycles.
        let kernels = &document["variants"]["logits_mosaic"];
        assert!(kernels["estimate_cycles"].is_null() && kernels["estimate_seconds"].is_f64(), "{kernels}");
    }
}

#[test]
fn fused_on_an_h200_takes_a_tenth_of_the_baseline() {
    let name = config("fused");
    let chosen = ["--variants", "fused", "--variants", "fused_min_memory", "--variants", "materialised"];
    let arguments = [&[name.as_str(), "--target", "h200"][..], &chosen].concat();
    let claims =
        ["fused.temp_bytes <= 0.7e9", "fused_min_memory.temp_bytes <= 0.26e9", "materialised.temp_bytes >= 7.4e9"];
    let document = compile(Kind::Cuda, &arguments, &claims);
    let fused = &document["variants"]["fused"];
    assert!(fused["estimate_seconds"].is_null(), "{fused}");
    assert!(fused["no_estimate"].as_str().is_some_and(|reason| reason.contains("cost analysis")), "{fused}");
    for target in ["a100", "h100", "b200"] {
        compile(Kind::Cuda, &[&name, "--target", target, "--variants", "fused"], &["fused.temp_bytes <= 0.7e9"]);
    }
}

/// A variant, which `plan` chooses by default, and a shape that compiles in a second on any number of devices.
const SMALL: [&str; 6] = [
    "--variants",
    "fused",
    "--set",
    "shape={tokens: 256, hidden: 128, vocab: 1000}",
    "--set",
    "variants.fused.tiling={token_chunk: 64}",
];

#[test]
fn fused_compiles_for_a_mesh() {
    let arguments = [&["--target", "v6e:2x4", "--set", "mesh={data: 2, vocab: 4}"][..], &SMALL].concat();
    let document = compile(Kind::Tpu, &arguments, &["fused.code_bytes > 0"]);
    // 128 tokens per device in chunks of 64.
    assert_eq!(document["variants"]["fused"]["loops"][0]["trips"], 2);
    let arguments = [&["aot", "--target", "v6e:1x1", "--set", "mesh.data=2"][..], &SMALL].concat();
    let text = refused(&arguments, &run(Kind::Tpu, &arguments));
    assert!(text.contains("mesh of 2 x 1") && text.contains("larger slice"), "{text}");
}

#[test]
fn failed_assertion_exits_with_1_after_programs_are_written() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let emitted = folder.path().join("new");
    let emit = emitted.display().to_string();
    let arguments =
        [&["aot", "--target", "v6e", "--emit", &emit, "--assert", "fused.argument_bytes <= 1"][..], &SMALL].concat();
    let output = run(Kind::Tpu, &arguments);
    assert_eq!(output.status.code(), Some(1), "{}{}", stdout(&output), stderr(&output));
    let text = stdout(&output);
    for words in ["64 tokens", "DOES NOT HOLD: fused.argument_bytes <= 1", "estimate", "not measurements", "floor"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let program = std::fs::read_to_string(emitted.join("fused.mlir")).expect("the program is written");
    assert!(program.contains("stablehlo.while") && program.contains("tensor<1000x128xbf16>"), "{program}");
}

#[test]
fn plan_fits_the_device_and_prints_its_configuration() {
    let arguments = [&["plan", "--json", "--target", "v6e"][..], &SMALL[2..], &["--hbm", "2MB"]].concat();
    let output = run(Kind::Tpu, &arguments);
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    let plan: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let best = &plan["best"];
    assert!(best["total_bytes"].as_u64().is_some_and(|total| total <= 2_000_000), "{plan}");
    let line = plan["config_line"].as_str().expect("a line");
    let config: Value = serde_json::to_value(serde_saphyr::from_str::<Value>(line).expect("YAML")).expect("JSON");
    assert_eq!(config["tiling"]["token_chunk"], best["blocking"]["token_chunks"], "{line}");
    let arguments = [&["plan", "--target", "v6e"][..], &SMALL[2..], &["--hbm", "1kB"]].concat();
    let text = refused(&arguments, &run(Kind::Tpu, &arguments));
    assert!(text.contains("at least") && text.contains("1.0 kB"), "{text}");
}

#[test]
fn tiles_of_a_plan_are_named_while_they_are_compiled() {
    let arguments =
        [&["plan", "--json", "--recompile", "--target", "v6e"][..], &SMALL[2..], &["--hbm", "2MB"]].concat();
    let output = run(Kind::Tpu, &arguments);
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    assert!(serde_json::from_str::<Value>(&stdout(&output)).is_ok(), "standard output is a document");
    let text = stderr(&output);
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("compiling ")).collect();
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
        let arguments = [&["aot"][..], arguments].concat();
        let text = refused(&arguments, &run(Kind::Tpu, &arguments));
        assert!(words.iter().all(|word| text.contains(word)), "{arguments:?}: {text}");
    }
    let output = command(&["aot", "--print-config", "--set", "shape.tokens=77"]).output().expect("starts");
    assert!(stdout(&output).contains("tokens: 77"), "{}{}", stdout(&output), stderr(&output));
}

#[test]
fn aot_without_a_plugin_prints_the_install_command() {
    let empty = tempfile::tempdir().expect("a temporary folder");
    for (target, words) in [("v6e", "grpo plugin install tpu"), ("h200", "grpo plugin install cuda")] {
        let arguments = ["aot", "--target", target];
        let output = command(&arguments).env("XDG_CACHE_HOME", empty.path()).output().expect("starts");
        let text = refused(&arguments, &output);
        assert!(text.contains(words) && text.contains("GRPO_PJRT_PLUGIN"), "{text}");
    }
    let output = command(&["plugin", "list"]).env("XDG_CACHE_HOME", empty.path()).output().expect("starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("grpo plugin install cpu"), "{}", stdout(&output));
}

#[test]
fn a_plugin_of_another_platform_is_refused() {
    let cpu = install(Kind::Cpu, |_| {}).expect("the plugin can be installed").path;
    let arguments = [&["aot", "--target", "v6e"][..], &SMALL].concat();
    let output = command(&arguments).env("GRPO_PJRT_PLUGIN", &cpu).output().expect("starts");
    assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
    assert!(stderr(&output).contains("xla_cpu_pjrt.so"), "{}", stderr(&output));
}

#[test]
fn plugin_install_and_list_manage_the_cache() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    // pip uses this machine's configuration and packages.
    let with_cache = |arguments: &[&str]| {
        let mut command = command(arguments);
        command.envs(std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("GRPO")));
        command.env("XDG_CACHE_HOME", cache.path()).output().expect("the binary starts")
    };
    for verb in ["installed cpu", "already there: cpu"] {
        let output = with_cache(&["plugin", "install", "cpu"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(stdout(&output).contains(verb), "{}", stdout(&output));
        let path = PathBuf::from(stdout(&output).lines().last().expect("a path"));
        assert!(path.starts_with(cache.path()) && path.is_file(), "{}", path.display());
    }
    let force = ["plugin", "install", "cpu", "--force"];
    for (arguments, reason) in [(&force[..3], "found 3 bytes"), (&force, "a new copy was asked for")] {
        let installed = stdout(&with_cache(&force[..3]));
        let library = installed.lines().last().expect("a path");
        if arguments.len() == 3 {
            std::fs::write(library, "bad").expect("damaged");
        }
        let output = with_cache(arguments);
        assert!(stdout(&output).contains("installed again: cpu"), "{}{}", stdout(&output), stderr(&output));
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    }
    let output = with_cache(&["plugin", "list", "--json"]);
    let plugins: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let [cpu, tpu, cuda] = [0, 1, 2].map(|i| &plugins[i]);
    assert_eq!((&cpu["kind"], &cpu["platform"], &cpu["api_version"]), (&"cpu".into(), &"cpu".into(), &"0.81".into()));
    assert!(cpu["devices"].as_array().is_some_and(|devices| !devices.is_empty()), "{cpu}");
    for plugin in [tpu, cuda] {
        assert!(plugin["path"].is_null() && plugin["note"].is_string(), "{plugin}");
    }
    assert_eq!(with_cache(&["plugin", "install", "gpu"]).status.code(), Some(2));
}
