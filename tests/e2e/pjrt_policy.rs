//! `policy.device`: the same run with its weights on a device, here XLA's CPU.

use crate::manners::on_terminal_of;
use crate::support::{
    Runs, assert_same_run, grpo_with, grpo_with_quick_cpu, names, refuse, refused, rows, split_progress, stderr,
    stdout, tiny,
};
use crate::tiny_model::{arguments, prepare_shape, small, tensors};
use models::{Adapter, ModelConfig, ModelFolder};
use pjrt::install::Kind;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Small enough for programs that compile for longer than they run.
const SETTINGS: [&str; 12] = [
    "warmup.steps=4",
    "warmup.batch_size=16",
    "grpo.max_steps=4",
    "grpo.prompts_per_step=4",
    "grpo.gradient_accumulation_steps=2",
    "grpo.num_iterations=2",
    "loss.beta=0.02",
    "grpo.sync_ref_model=true",
    "grpo.ref_model_sync_steps=3",
    "eval.num_problems=8",
    "eval.eval_steps=2",
    "run.save_steps=2",
];

/// The same with adapters and a value head: what is trained beside a model that is not.
const BESIDE_A_MODEL: [&str; 12] = [
    "lora={r: 4, target_modules: [q_proj, down_proj, lm_head]}",
    "warmup.optimizer.learning_rate=2.0e-2", // learns to answer
    "grpo.advantages.estimator=gae",
    "warmup.steps=4",
    "warmup.batch_size=16",
    "grpo.max_steps=4",
    "grpo.prompts_per_step=4",
    "grpo.gradient_accumulation_steps=2",
    "grpo.num_iterations=2",
    "loss.beta=0.02",
    "eval.num_problems=8",
    "run.save_steps=2",
];

/// The binary with the compiler's defaults, as users have it.
fn by_default(arguments: &[&str]) -> Command {
    grpo_with(Kind::Cpu, arguments)
}

/// Trains to the end on `device`.
fn train(run: &Path, device: &str, settings: &[&str]) {
    train_with(grpo_with_quick_cpu, run, device, settings);
}

fn train_with(start: fn(&[&str]) -> Command, run: &Path, device: &str, settings: &[&str]) {
    let (config, run) = (tiny().display().to_string(), run.display().to_string());
    let device = format!("policy.device={device}");
    let mut all = vec!["train", "--config", &config, "--run-dir", &run, "--set", &device];
    all.extend(settings.iter().flat_map(|setting| ["--set", setting]));
    succeed_with(start, &all);
}

fn succeed(arguments: &[&str]) -> String {
    succeed_with(grpo_with_quick_cpu, arguments)
}

fn succeed_with(start: fn(&[&str]) -> Command, arguments: &[&str]) -> String {
    let output = start(arguments).output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{}{}", stdout(&output), stderr(&output));
    stdout(&output)
}

#[test]
fn a_run_learns_the_same_on_a_device_and_goes_on_there_bit_for_bit() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    train_with(by_default, &path("host"), "host", &SETTINGS);
    train_with(by_default, &path("whole"), "pjrt:cpu", &SETTINGS);
    let of = |name: &str| rows(&path(name).join("metrics.jsonl"));
    let (host, device) = (of("host"), of("whole"));
    assert_eq!(host.len(), device.len());
    let host_rows = host.len();
    assert_same_warmup(&host, &device, 1e-4);
    // On policy the first update has ratios of exactly 1, and clips nothing.
    let first = device.iter().find(|row| row["phase"] == "grpo").expect("a step of GRPO");
    assert!(first["grad_norm"].as_f64().is_some_and(|norm| norm > 0.0), "{first}");

    train_with(by_default, &path("again"), "pjrt:cpu", &SETTINGS);
    assert_same_run(&path("whole"), &path("again"));
    let again = path("again").display().to_string();
    let text = succeed_with(by_default, &["train", "--resume", &again, "--from", "step-000002"]);
    assert!(text.contains("continued from step-000002"), "{text}");
    assert_same_run(&path("whole"), &path("again"));

    // A run that began on the host goes on there.
    let host = path("host").display().to_string();
    let resume = ["train", "--resume", &host, "--from", "step-000002", "--set", "policy.device=pjrt:cpu"];
    let text = succeed_with(by_default, &resume);
    assert!(text.contains("continued from step-000002") && text.contains("policy.device"), "{text}");
    assert_eq!(of("host").len(), host_rows);
}

#[test]
fn a_run_with_products_in_bf16_learns_and_goes_on_bit_for_bit() {
    // The reference policy of the second step's checkpoint is one that was mixed. An update is one micro-batch, and one program.
    let mixed = SETTINGS.map(|setting| match setting.split('=').next() {
        Some("grpo.ref_model_sync_steps") => "grpo.ref_model_sync_steps=2",
        Some("grpo.gradient_accumulation_steps") => "grpo.gradient_accumulation_steps=1",
        _ => setting,
    });
    let settings = [&mixed[..], &["policy.dtype=bfloat16"]].concat();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    let of = |name: &str| rows(&path(name).join("metrics.jsonl"));
    train(&path("host"), "host", &SETTINGS);
    train(&path("whole"), "pjrt:cpu", &settings);
    let (host, device) = (of("host"), of("whole"));
    assert_eq!(host.len(), device.len());
    assert_same_warmup(&host, &device, 3e-2);
    for row in device.iter().filter(|row| row["phase"] == "grpo") {
        assert!(row["grad_norm"].as_f64().is_some_and(|norm| norm > 0.0), "{row}");
    }
    train(&path("again"), "pjrt:cpu", &settings);
    let again = path("again").display().to_string();
    let text = succeed(&["train", "--resume", &again, "--from", "step-000002"]);
    assert!(text.contains("continued from step-000002"), "{text}");
    assert_same_run(&path("whole"), &path("again"));
}

/// What does not depend on samples is the same, to a share of `tolerance`: the losses of imitation.
fn assert_same_warmup(host: &[Value], device: &[Value], tolerance: f64) {
    let in_warmup = |row: &&Value| row["phase"] == "warmup";
    let mut compared = 0;
    for (host, device) in host.iter().filter(in_warmup).zip(device.iter().filter(in_warmup)) {
        for key in ["loss", "grad_norm", "learning_rate"] {
            let Some(expected) = host[key].as_f64() else { continue };
            let found = device[key].as_f64().expect("a number");
            assert!((found - expected).abs() <= tolerance * expected.abs(), "{key}: {found} on the device, {expected}");
            compared += 1;
        }
    }
    assert_eq!(compared, 3 * 4);
}

#[test]
fn adapters_and_a_value_head_learn_on_a_device_and_go_on_there_bit_for_bit() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    let of = |name: &str| rows(&path(name).join("metrics.jsonl"));
    train(&path("host"), "host", &BESIDE_A_MODEL);
    train(&path("whole"), "pjrt:cpu", &BESIDE_A_MODEL);
    let (host, device) = (of("host"), of("whole"));
    assert_eq!(host.len(), device.len());
    let host_rows = host.len();
    assert_same_warmup(&host, &device, 1e-4);
    let mut steps = 0;
    for row in device.iter().filter(|row| row["phase"] == "grpo") {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
        assert!(number("value_loss") > 0.0 && number("grad_norm") > 0.0 && number("kl").is_finite(), "{row}");
        steps += 1;
    }
    assert_eq!(steps, 4);

    train(&path("again"), "pjrt:cpu", &BESIDE_A_MODEL);
    let again = path("again").display().to_string();
    succeed(&["train", "--resume", &again, "--from", "step-000002"]);
    assert_same_run(&path("whole"), &path("again"));

    // From the host to the device, and back.
    let host = path("host").display().to_string();
    for device in ["policy.device=pjrt:cpu", "policy.device=host"] {
        let text = succeed(&["train", "--resume", &host, "--from", "step-000002", "--set", device]);
        assert!(text.contains("continued from step-000002"), "{text}");
        assert_eq!(of("host").len(), host_rows);
    }
}

#[test]
fn adapters_of_a_folder_are_trained_on_a_device_and_leave_a_folder_of_peft() {
    let runs = Runs::new(&[]);
    prepare_shape(&runs, &ModelConfig { tie_word_embeddings: true, ..small() });
    let lora = "lora={r: 4, target_modules: '.*_proj|lm_head'}";
    let train = arguments(&runs, "model", "a", &[lora, "policy.device=pjrt:cpu"]);
    succeed(&train.iter().map(String::as_str).collect::<Vec<_>>());
    let shape = ModelFolder::open(&runs.path("model")).expect("a model").config().clone();
    let adapter = Adapter::open(&runs.path("a").join("model"), &shape).expect("an adapter");
    let moved = |matrix| adapter.lora_b(matrix).expect("B").to_vec().iter().any(|value| *value != 0.0);
    assert!(adapter.matrices().len() == 15 && adapter.matrices().iter().all(moved));
    // Merged on the device as on the host.
    for device in ["pjrt:cpu", "host"] {
        let (run, to, device) = (runs.text("a"), runs.text(device), format!("policy.device={device}"));
        succeed(&["export", &run, "--set", "export.merge_adapters=true", "--set", &device, "--to", &to]);
    }
    let of = |name: &str| tensors(&runs.path(name));
    for (found, expected) in of("pjrt:cpu").into_iter().zip(of("host")) {
        let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(found.len() == expected.len() && off < 1e-6, "off by {off}");
    }
    assert_ne!(of("host"), of("model"));
    assert_eq!(of("host").len(), of("model").len() + 1, "the head is no longer the embedding");
}

#[test]
fn programs_are_named_while_they_are_compiled_and_not_when_they_come_from_the_cache() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let config = tiny().display().to_string();
    let arguments = |run: &str, cache: &str| -> Vec<String> {
        let settings = ["policy.device=pjrt:cpu", "warmup.steps=0", "grpo.max_steps=1", "data.held_out_fraction=0"];
        let cache = format!("policy.compile_cache={}", path(cache));
        let all = ["train", "--config", &config, "--run-dir", &path(run), "--set", &cache].map(str::to_owned);
        all.into_iter().chain(settings.iter().flat_map(|setting| ["--set".to_owned(), (*setting).to_owned()])).collect()
    };
    let command = |run: &str, cache: &str, more: &[&str]| {
        let all = arguments(run, cache);
        grpo_with_quick_cpu(&all.iter().map(String::as_str).chain(more.iter().copied()).collect::<Vec<_>>())
    };
    let said = |run: &str, cache: &str, more: &[&str]| {
        let output = command(run, cache, more).output().expect("the binary starts");
        assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
        assert!(!stdout(&output).contains("compil"), "standard output is for results: {}", stdout(&output));
        stderr(&output)
    };
    let text = said("first", "one", &[]);
    assert!(!text.contains(['\r', '\u{1b}']), "a log has lines: {text:?}");
    let (lines, _) = split_progress(&text);
    let mut count = 0;
    for (i, line) in lines.iter().enumerate() {
        let Some((name, facts)) = line.strip_prefix("compiling ").and_then(|rest| rest.split_once(" (")) else {
            continue;
        };
        count += 1;
        assert!(facts.starts_with(&format!("program {count}, ")) && facts.ends_with("B of StableHLO)"), "{line}");
        let end = lines[i + 1..].iter().find(|line| line.starts_with("compiled "));
        assert!(
            end.is_some_and(|end| end.starts_with(&format!("compiled {name} in ")) && end.ends_with(" s")),
            "{text}"
        );
    }
    for name in ["gradient", "adamw", "rollout_prefill", "rollout_decode"] {
        assert!(lines.iter().any(|line| line.starts_with(&format!("compiling {name} ("))), "{name}: {text}");
    }
    assert!(count < 30, "small programs have no lines: {text}");

    let again = said("second", "one", &[]);
    assert!(split_progress(&again).0.is_empty(), "programs of the cache are not compiled: {again}");
    let quiet = said("third", "two", &["--quiet"]);
    assert!(split_progress(&quiet).0.is_empty(), "{quiet}");

    // On a terminal the time of a program moves on one line.
    let text = on_terminal_of(100, command("fourth", "three", &[]));
    let text = console::strip_ansi_codes(&text).into_owned();
    let lines: Vec<&str> = text.split(['\r', '\n']).filter(|line| line.contains("compiling ")).collect();
    assert!(lines.iter().any(|line| line.contains("compiling gradient  ") && line.contains("  program ")), "{text}");
    assert!(lines.iter().all(|line| console::measure_text_width(line) <= 100), "{lines:?}");
    assert!(!text.contains("compiled "), "a program that is done leaves no line: {text}");
}

#[test]
fn what_derivatives_compute_again_changes_no_number() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let warmup = |name: &str, settings: &[&str]| {
        let run = folder.path().join(name);
        let common = ["model.num_hidden_layers=4", "warmup.steps=4", "warmup.batch_size=16", "grpo.max_steps=0"];
        train(&run, "pjrt:cpu", &[&common, settings].concat());
        rows(&run.join("metrics.jsonl"))
    };
    let expected = warmup("full", &[]);
    for (name, settings) in [
        // Of attention that is materialised everything is computed again.
        ("attention", &["policy.recompute_granularity=except_attention", "policy.attention=blockwise"][..]),
        ("selective", &["policy.recompute_granularity=selective"]),
        ("none", &["policy.recompute_granularity=none"]),
        ("groups", &["policy.recompute_num_layers=2"]),
    ] {
        assert_same_warmup(&expected, &warmup(name, settings), 1e-5);
    }
}

#[test]
fn what_a_device_does_not_do_is_refused_by_its_key() {
    let config = tiny().display().to_string();
    let refused = |setting: &str| {
        refuse(&[
            "train",
            "--config",
            &config,
            "--set",
            "policy.device=pjrt:cpu",
            "--set",
            setting,
            "--run-dir",
            "/nowhere",
        ])
    };
    assert!(refused("lora={r: 4, target_modules: [c_attn]}").contains("c_attn"));
    assert!(refused("grpo.backend=pjrt:cpu").contains("unknown key `grpo.backend`, did you mean `policy.device`?"));
    assert!(refused("grpo.plugin=plugin.so").contains("did you mean `policy.plugin`?"));
    assert!(refused("grpo.implementation=logits").contains("grpo.implementation"));
    assert!(refused("policy.device=pjrt:gpu").contains("pjrt:cuda"));
    assert!(refused("policy.recompute_num_layers=3").contains("the model's 1 layers are a multiple of"));
    assert!(
        refused("policy={device: pjrt:cpu, recompute_granularity: none, recompute_num_layers: 2}").contains("full")
    );
    for (key, value) in [
        ("policy.dtype", "bfloat16"),
        ("policy.attention", "blockwise"),
        ("policy.recompute_granularity", "none"),
        ("policy.recompute_num_layers", "2"),
    ] {
        assert!(refuse(&["train", "--config", &config, "--set", &format!("{key}={value}")]).contains(key));
    }
}

#[test]
fn a_model_larger_than_the_device_is_said_before_it_is_made() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (config, run) = (tiny().display().to_string(), folder.path().join("run").display().to_string());
    let mut arguments = vec!["train", "--config", &config, "--run-dir", &run];
    let settings = [
        "policy.device=pjrt:cpu",
        "model.hidden_size=65536",
        "model.intermediate_size=262144",
        "model.num_hidden_layers=1000",
    ];
    settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
    let output = grpo_with_quick_cpu(&arguments).output().expect("the binary starts");
    let text = refused(&arguments, &output);
    for words in
        ["pjrt:cpu has ", "weights (float32)", "first moments", "keys and values", "policy.can_roll_back false"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!folder.path().join("run").exists());
}

#[test]
fn numbers_that_are_no_longer_finite_end_a_run_as_on_the_host() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = tiny().display().to_string();
    // 1e40 is beyond f32: the first update leaves no finite weight.
    let settings = ["warmup.steps=2", "grpo.max_steps=1", "loss.entropy_coef=0.1", "optimizer.learning_rate=1e40"];
    let said = ["host", "pjrt:cpu"].map(|device| {
        let run = folder.path().join(device.replace(':', "_"));
        let (run, device) = (run.display().to_string(), format!("policy.device={device}"));
        let mut arguments = vec!["train", "--config", &config, "--run-dir", &run, "--set", &device];
        settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
        let output = grpo_with_quick_cpu(&arguments).output().expect("the binary starts");
        let text = refused(&arguments, &output).replace(&run, "RUN");
        assert!(text.contains("not finite") && text.contains("the last finite checkpoint is step-000000"), "{text}");
        assert_eq!(names(&Path::new(&run).join("checkpoints")), ["step-000000"]);
        text
    });
    let way = |text: &str| text.split_once("`grpo ").map(|(_, way)| way.to_owned());
    assert_eq!(way(&said[0]), way(&said[1]), "{said:?}");
}

#[test]
fn logits_that_a_device_cannot_sample_from_end_a_run_with_the_way_back() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (config, run) = (tiny().display().to_string(), folder.path().join("run").display().to_string());
    // One update leaves finite weights, whose products are beyond f32 in the rollout of the second step.
    let settings = [
        "policy.device=pjrt:cpu",
        "warmup.steps=2",
        "grpo.max_steps=2",
        "grpo.prompts_per_step=4",
        "loss.entropy_coef=0.1",
        "optimizer.learning_rate=1e14",
        "eval.num_problems=4",
        "eval.eval_steps=0",
        "run.save_steps=0",
    ];
    let mut arguments = vec!["train", "--config", &config, "--run-dir", &run];
    settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
    // Without the warnings of the first step, which has little to learn from.
    let mut command = grpo_with_quick_cpu(&arguments);
    let text = refused(&arguments, &command.env("GRPO_LOG", "error").output().expect("the binary starts"));
    for words in ["logits of sample ", "are not finite", "the last finite checkpoint is step-000000"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let (_, way) = text.split_once("`grpo ").expect("a command");
    let way = way.split_once('`').expect("its end").0.replace("5e13", "1e-4");
    succeed(&way.split(' ').collect::<Vec<_>>());
    assert!(Path::new(&run).join("summary.json").exists());
}
