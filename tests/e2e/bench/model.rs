//! `grpo bench configs/bench/generate.yaml`, on a tiny model.

use super::{document, number, numbers};
use crate::support::{Call, Runs, Said, assert_has, grpo, refuse, repository};
use serde_json::Value;

const SMALL: [&str; 6] = [
    "rounds=2",
    "generation.rows=[1, 3]",
    "generation.prompts=[5]",
    "generation.tokens=4",
    "update={rows: 4, prompt: 5, completion: 6}",
    "threads=1",
];

fn configuration() -> String {
    repository("configs/bench/generate.yaml")
}

fn call(settings: &[&str]) -> Call {
    let model = format!("model={}", repository("tests/checkpoints/qwen2"));
    grpo(["bench", &configuration()]).set([model.as_str()]).set(SMALL).set(settings)
}

fn bench(settings: &[&str], arguments: &[&str]) -> Said {
    call(settings).args(arguments).output()
}

fn case<'a>(report: &'a Value, name: &str) -> &'a Value {
    let cases = report["cases"].as_array().expect("problems");
    cases.iter().find(|case| case["name"] == name).unwrap_or_else(|| panic!("{name} of {report:#}"))
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn generation_and_update_have_times_rates_memory_and_a_floor() {
    let folder = Runs::new(&[]);
    let logs = folder.text("logs");
    let report = document(&bench(&[], &["--json", "--log-dir", &logs]), 0);
    let names: Vec<&str> =
        report["cases"].as_array().expect("problems").iter().filter_map(|case| case["name"].as_str()).collect();
    let of = |dtype| ["rows1-prompt5", "rows3-prompt5", "update"].map(|size| format!("generate-{dtype}-{size}"));
    assert_eq!(names, [of("f32"), of("bf16")].concat());
    for dtype in ["f32", "bf16"] {
        for rows in [1, 3] {
            let case = case(&report, &format!("generate-{dtype}-rows{rows}-prompt5"));
            assert_eq!(
                (&case["work"], &case["dtype"], &case["rows"]),
                (&"generation".into(), &dtype.into(), &rows.into())
            );
            let grpo = &case["variants"]["grpo"];
            assert_eq!(grpo["status"], "measured", "{grpo:#}");
            // Every round is a process of its own with the same seed.
            assert_eq!(grpo["digests"].as_array().map(Vec::len), Some(1), "{grpo:#}");
            for name in ["first_token_s", "first_token_processor_s", "all_tokens_s"] {
                assert_eq!(numbers(&grpo[name]["all"]).len(), 2, "{name} of {grpo:#}");
            }
            // All tokens after the first ones are decoded between the first token and the end.
            let [first, all, rates] =
                ["first_token_s", "all_tokens_s", "tokens_per_s"].map(|name| numbers(&grpo[name]["all"]));
            for ((first, all), rate) in first.iter().zip(all).zip(rates) {
                // Of 4 tokens, one is the first.
                let decoded = f64::from(rows) * 3.0;
                assert!(*first > 0.0 && (rate * (all - first) / decoded - 1.0).abs() < 1e-6, "{grpo:#}");
            }
            for name in ["first_token_s", "tokens_per_s", "bytes_per_s", "flops_per_s"] {
                assert!(number(&case["floor"], &format!("/{name}/median")) > 0.0, "{name} of {case:#}");
            }
            assert_eq!(case["variants"]["vllm"]["status"], "not_offered");
        }
        let case = case(&report, &format!("generate-{dtype}-update"));
        assert_eq!((&case["work"], &case["completion"]), (&"update".into(), &6.into()));
        let grpo = &case["variants"]["grpo"];
        let (steps, rates, shares) =
            (numbers(&grpo["step_s"]["all"]), numbers(&grpo["tokens_per_s"]["all"]), numbers(&grpo["mfu"]["all"]));
        assert_eq!(steps.len(), 2);
        for (round, step) in steps.iter().enumerate() {
            assert!((step * rates[round] / 44.0 - 1.0).abs() < 1e-9, "{grpo:#}");
            // The peak of the same round is behind both.
            let floor = numbers(&case["floor"]["step_s"]["all"])[round];
            assert!((step * shares[round] / floor - 1.0).abs() < 1e-9, "{case:#}");
        }
        assert!(number(grpo, "/grad_norm") > 1e-3 && grpo["digests"] == serde_json::json!([]), "{grpo:#}");
        // vLLM does not train.
        assert!(case["variants"].get("vllm").is_none() && case["variants"]["transformers"]["status"] == "not_offered");
        if cfg!(target_os = "linux") {
            assert!(number(grpo, "/peak_bytes/median") > 1e6);
        }
    }
    let logged = folder.read("logs/generate-f32-update/grpo/metrics.jsonl");
    let logged: Vec<Value> = logged.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let steps = numbers(&case(&report, "generate-f32-update")["variants"]["grpo"]["step_s"]["all"]);
    assert_eq!(logged.iter().map(|row| number(row, "/bench~1step_s")).collect::<Vec<_>>(), steps);
}

#[test]
fn samples_depend_on_rows_and_gradients_not_on_micro_batches() {
    let of = |settings: &[&str]| document(&bench(settings, &["--json", "--variants", "grpo"]), 0);
    let once = ["rounds=1", "generation.dtypes=[f32]", "update.dtypes=[f32]"];
    let report = of(&once);
    let split = of(&[&once[..], &["generation=null", "update.micro_batches=3"]].concat());
    assert_eq!(split["cases"].as_array().map(Vec::len), Some(1));
    let norm = |report: &Value| number(&case(report, "generate-f32-update")["variants"]["grpo"], "/grad_norm");
    assert!((norm(&report) / norm(&split) - 1.0).abs() < 1e-4, "{} and {}", norm(&report), norm(&split));
    let digests = |rows| &case(&report, &format!("generate-f32-rows{rows}-prompt5"))["variants"]["grpo"]["digests"];
    assert_ne!(digests(1), digests(3));
    assert!(case(&report, "generate-f32-update")["variants"].get("transformers").is_none(), "only grpo was named");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn tables_of_a_model_name_its_systems_and_the_missing_ones() {
    let claim = "generate-f32-rows3-prompt5/grpo.all_tokens_s.median >= generate-f32-rows1-prompt5/grpo.all_tokens_s.median * 0";
    let said = bench(&["rounds=1"], &["--markdown", "--assert", claim]);
    assert_eq!(said.code, Some(0), "{said}");
    assert_has(
        &said.stdout,
        &[
            "| rows ",
            "tokens per processor s",
            "| floor ",
            "| grpo ",
            "Optimizer step",
            " mfu ",
            "transformers: not measured: name its Python environment with --peers-venv",
            "vllm: not measured: name its Python environment with --vllm-venv",
            "holds: generate-f32",
        ],
    );
    // Who asks for a missing system by name is not served.
    assert_eq!(bench(&["rounds=1"], &["--variants", "grpo,vllm"]).code, Some(1));
}

#[test]
fn model_that_cannot_be_measured_is_refused_with_the_fix() {
    let folder = Runs::new(&[]);
    let (file, empty) = (folder.write("file", ""), folder.text("."));
    for (setting, words) in [
        ("model=null", &["`model`", "model folder", "got none"][..]),
        ("model=/no/such/folder", &["`model`", "does not exist"]),
        (&format!("model={file}"), &["`model`", "the file"]),
        (&format!("model={empty}"), &["config.json"]),
        ("generation.rows=[0]", &["generation.rows", "from 1"]),
        ("generation.prompts=[32765]", &["generation.prompts", "at most 32768", "32765 + 4"]),
        ("update.completion=32764", &["update.completion", "at most 32768"]),
        ("update.micro_batches=5", &["update.micro_batches"]),
        ("generation.row=[1]", &["generation", "row"]),
    ] {
        assert_has(&call(&[setting]).refuse(), words);
    }
    for (option, value, words) in [
        ("--variants", "vlm", &["`vlm`", "grpo, transformers, vllm"][..]),
        ("--steps", "3", &["--steps", "rounds"]),
        ("--plot", "plot.svg", &["--plot"]),
        ("--peers-venv", "/no/such/folder", &["peers/README.md"]),
        ("--assert", "other.step_s.median < 1", &["`other`"]),
    ] {
        assert_has(&call(&[]).args([option, value]).refuse(), words);
    }
    let two = [configuration(), repository("configs/bench/s2.yaml")];
    assert_has(&refuse(["bench", &two[0], &two[1]]), &["one configuration of a model"]);
    assert_has(&refuse(["bench", &two[1], "--vllm-venv", &empty]), &["--vllm-venv", "generate.yaml"]);
}

#[test]
#[cfg(unix)]
fn peer_without_its_package_is_named_and_the_rest_is_measured() {
    let folder = Runs::new(&[]);
    // `-S` leaves installed packages out.
    std::fs::create_dir_all(folder.path("venv/bin")).expect("a folder");
    let python = folder.write("venv/bin/python", "#!/bin/sh\nexec python3 -S \"$@\"\n");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&python, mode).expect("permissions");
    let arguments = ["--json", "--vllm-venv", &folder.text("venv")];
    let report = call(&["rounds=1", "generation.rows=[1]", "update=null"]).args(arguments).with_path().exit(0).json();
    let variants = &case(&report, "generate-f32-rows1-prompt5")["variants"];
    assert_eq!(variants["grpo"]["status"], "measured");
    assert_has(&variants["vllm"]["error"].to_string(), &["not installed"]);
}
