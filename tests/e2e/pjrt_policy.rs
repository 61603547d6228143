//! `policy.device`: the same run with its weights on a device, here XLA's CPU.

use crate::manners::on_terminal;
use crate::support::{
    Call, Runs, assert_has, assert_same_run, copy, grpo, named_call, names, refuse, split_progress, tiny,
};
use crate::tiny_model::{call, prepare_shape, small, tensors};
use grpo_models::{Adapter, ModelConfig, ModelFolder};
use grpo_pjrt::install::Kind;
use grpo_testkit::margin::assert_below;
use serde_json::Value;

/// Small enough for programs that compile for longer than they run.
pub(crate) const SETTINGS: [&str; 12] = [
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
pub(crate) const BESIDE_A_MODEL: [&str; 12] = [
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

/// A run on the host and one on a device, and their rows.
pub(crate) struct Pair {
    pub(crate) runs: Runs,
    host: Vec<Value>,
    pub(crate) device: Vec<Value>,
}

/// Trains on the host and on a device, with the same results as far as they do not depend on samples, and resumes the run on
/// the device with the same bits. `on` adds the plugin to a call.
pub(crate) fn train_on_both(settings: &[&str], of_device: &[&str], tolerance: f64, on: fn(Call) -> Call) -> Pair {
    let runs = Runs::new(settings);
    on(runs.tiny("host")).succeed();
    on(runs.tiny("whole").set(["policy.device=pjrt:cpu"]).set(of_device)).succeed();
    let (host, device) = (runs.metrics("host"), runs.metrics("whole"));
    assert_eq!(host.len(), device.len());
    assert_same_warmup(&host, &device, tolerance);
    let steps = device.iter().filter(|row| row["phase"] == "grpo");
    assert!(steps.clone().count() == 4 && steps.clone().all(|row| row["grad_norm"].as_f64() > Some(0.0)), "{device:?}");

    copy(&runs.path("whole"), &runs.path("again"));
    let text = on(runs.resume("again").args(["--from", "step-000002"])).succeed();
    assert_has(&text, &["continued from step-000002"]);
    assert_same_run(&runs.path("whole"), &runs.path("again"));
    Pair { runs, host, device }
}

/// Resumes the run on the host elsewhere.
fn move_host(Pair { runs, host, .. }: &Pair, device: &str, on: fn(Call) -> Call) {
    let setting = format!("policy.device={device}");
    let text = on(runs.resume("host").args(["--from", "step-000002"]).set([setting])).succeed();
    assert_has(&text, &["continued from step-000002", "policy.device"]);
    assert_eq!(runs.metrics("host").len(), host.len());
}

#[test]
fn a_run_learns_the_same_on_a_device_and_goes_on_there_bit_for_bit() {
    // The compiler's defaults, as users have it.
    let by_default = |call: Call| call.plugin(Kind::Cpu);
    let pair = train_on_both(&SETTINGS, &[], 1e-4, by_default);
    by_default(pair.runs.tiny("twice").set(["policy.device=pjrt:cpu"])).succeed();
    assert_same_run(&pair.runs.path("whole"), &pair.runs.path("twice"));
    move_host(&pair, "pjrt:cpu", by_default);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_run_with_products_in_bf16_learns_and_goes_on_bit_for_bit() {
    // The reference policy of the second step's checkpoint is one that was mixed. An update is one micro-batch, and one program.
    let of_device = ["grpo.ref_model_sync_steps=2", "grpo.gradient_accumulation_steps=1", "policy.dtype=bfloat16"];
    train_on_both(&SETTINGS, &of_device, 3e-2, Call::quick_cpu);
}

/// Compares the losses of imitation, which do not depend on samples, within a share of `tolerance`.
fn assert_same_warmup(host: &[Value], device: &[Value], tolerance: f64) {
    let in_warmup = |row: &&Value| row["phase"] == "warmup";
    let mut compared = 0;
    for (host, device) in host.iter().filter(in_warmup).zip(device.iter().filter(in_warmup)) {
        for key in ["loss", "grad_norm", "learning_rate"] {
            let Some(expected) = host[key].as_f64() else { continue };
            let found = device[key].as_f64().expect("a number");
            let off = (found - expected).abs() / expected.abs();
            assert_below(&format!("{key}: {found} on the device, {expected}"), off, tolerance);
            compared += 1;
        }
    }
    assert_eq!(compared, 3 * 4);
}

#[test]
fn adapters_and_a_value_head_learn_on_a_device_and_go_on_there_bit_for_bit() {
    let pair = train_on_both(&BESIDE_A_MODEL, &[], 1e-4, Call::quick_cpu);
    for row in pair.device.iter().filter(|row| row["phase"] == "grpo") {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
        assert!(number("value_loss") > 0.0 && number("kl").is_finite(), "{row}");
    }
    // From the host to the device, and back.
    move_host(&pair, "pjrt:cpu", Call::quick_cpu);
    move_host(&pair, "host", Call::quick_cpu);
}

#[test]
fn adapters_of_a_folder_are_trained_on_a_device_and_leave_a_folder_of_peft() {
    let runs = Runs::new(&[]);
    prepare_shape(&runs, &ModelConfig { tie_word_embeddings: true, ..small() });
    let settings = ["lora={r: 4, target_modules: '.*_proj|lm_head'}", "policy.device=pjrt:cpu"];
    call(&runs, "model", "a", &settings).quick_cpu().succeed();
    let shape = ModelFolder::open(&runs.path("model")).expect("a model").config().clone();
    let adapter = Adapter::open(&runs.path("a").join("model"), &shape).expect("an adapter");
    let moved = |matrix| adapter.lora_b(matrix).expect("B").to_vec().iter().any(|value| *value != 0.0);
    assert!(adapter.matrices().len() == 15 && adapter.matrices().iter().all(moved));
    // Merged on the device as on the host.
    for device in ["pjrt:cpu", "host"] {
        let settings = ["export.merge_adapters=true", &format!("policy.device={device}")];
        grpo(["export", &runs.text("a"), "--to", &runs.text(device)]).set(settings).quick_cpu().succeed();
    }
    let of = |name: &str| tensors(&runs.path(name));
    for (found, expected) in of("pjrt:cpu").into_iter().zip(of("host")) {
        let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert_eq!(found.len(), expected.len());
        assert_below("merged weights", off.into(), 1e-6);
    }
    assert_ne!(of("host"), of("model"));
    assert_eq!(of("host").len(), of("model").len() + 1, "the head is no longer the embedding");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn programs_are_named_while_they_are_compiled_and_not_when_they_come_from_the_cache() {
    let runs = Runs::new(&["policy.device=pjrt:cpu", "warmup.steps=0", "grpo.max_steps=1", "data.held_out_fraction=0"]);
    let train = |run: &str, cache: &str| runs.tiny(run).set([format!("policy.compile_cache={}", runs.text(cache))]);
    let said = |run: &str, cache: &str, more: &[&str]| {
        let said = train(run, cache).quick_cpu().args(more).exit(0);
        assert!(!said.stdout.contains("compil"), "standard output is for results: {said}");
        said.stderr
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

    // On a terminal the time of a program moves on one line. Without the flags for quick compilation, a program takes longer than the line
    // needs to be drawn again.
    let text = on_terminal(100, train("fourth", "three").plugin(Kind::Cpu));
    let text = console::strip_ansi_codes(&text).into_owned();
    let lines: Vec<&str> = text.split(['\r', '\n']).filter(|line| line.contains("compiling ")).collect();
    assert!(lines.iter().any(|line| line.contains("compiling gradient  ") && line.contains("  program ")), "{text}");
    assert!(lines.iter().all(|line| console::measure_text_width(line) <= 100), "{lines:?}");
    assert!(!text.contains("compiled "), "a program that is done leaves no line: {text}");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn what_derivatives_compute_again_changes_no_number() {
    let common = ["model.num_hidden_layers=4", "warmup.steps=4", "warmup.batch_size=16", "grpo.max_steps=0"];
    let runs = Runs::new(&common);
    let warmup = |name: &str, settings: &[&str]| {
        runs.tiny(name).set(["policy.device=pjrt:cpu"]).set(settings).quick_cpu().succeed();
        runs.metrics(name)
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
    for (setting, words) in [
        ("lora={r: 4, target_modules: [c_attn]}", "c_attn"),
        ("grpo.backend=pjrt:cpu", "unknown key `grpo.backend`, did you mean `policy.device`?"),
        ("grpo.plugin=plugin.so", "did you mean `policy.plugin`?"),
        ("grpo.implementation=logits", "grpo.implementation"),
        ("policy.device=pjrt:gpu", "pjrt:cuda"),
        ("policy.recompute_num_layers=3", "the model's 1 layers are a multiple of"),
        ("policy={device: pjrt:cpu, recompute_granularity: none, recompute_num_layers: 2}", "full"),
    ] {
        let call = grpo(["train", &tiny(), "--run-dir", "/nowhere"]).set(["policy.device=pjrt:cpu", setting]);
        assert_has(&call.refuse(), &[words]);
    }
    for (key, value) in [
        ("policy.attention", "blockwise"),
        ("policy.recompute_granularity", "none"),
        ("policy.recompute_num_layers", "2"),
    ] {
        assert_has(&refuse(["train", &tiny(), "--set", &format!("{key}={value}")]), &[key]);
    }
}

#[test]
fn a_model_larger_than_the_device_is_said_before_it_is_made() {
    let runs = Runs::new(&[
        "policy.device=pjrt:cpu",
        "model.hidden_size=65536",
        "model.intermediate_size=262144",
        "model.num_hidden_layers=1000",
    ]);
    let text = runs.tiny("run").quick_cpu().refuse();
    assert_has(&text, &["pjrt:cpu has ", "weights (float32)", "first moments", "keys and values"]);
    assert_has(&text, &["policy.can_roll_back false"]);
    assert!(!runs.path("run").exists());
}

#[test]
fn numbers_that_are_no_longer_finite_end_a_run_as_on_the_host() {
    // 1e40 is beyond f32: the first update leaves no finite weight.
    let runs =
        Runs::new(&["warmup.steps=2", "grpo.max_steps=1", "loss.entropy_coef=0.1", "optimizer.learning_rate=1e40"]);
    let said = ["host", "pjrt:cpu"].map(|device| {
        let text = runs.tiny(device).set([format!("policy.device={device}")]).quick_cpu().refuse();
        assert_has(&text, &["not finite", "the last finite checkpoint is step-000000"]);
        assert_eq!(names(&runs.path(device).join("checkpoints")), ["step-000000"]);
        text.replace(&runs.text(device), "RUN").split_once("`grpo ").map(|(_, way)| way.to_owned())
    });
    assert_eq!(said[0], said[1]);
}

#[test]
fn logits_that_a_device_cannot_sample_from_end_a_run_with_the_way_back() {
    // One update leaves finite weights, whose products are beyond f32 in the rollout of the second step.
    let runs = Runs::new(&[
        "policy.device=pjrt:cpu",
        "warmup.steps=2",
        "grpo.max_steps=2",
        "grpo.prompts_per_step=4",
        "loss.entropy_coef=0.1",
        "optimizer.learning_rate=1e14",
        "eval.num_problems=4",
        "eval.eval_steps=0",
        "run.save_steps=0",
    ]);
    // Without the warnings of the first step, which has little to learn from.
    let text = runs.tiny("run").quick_cpu().env("GRPO_LOG", "error").refuse();
    assert_has(&text, &["logits of sample ", "are not finite", "the last finite checkpoint is step-000000"]);
    named_call(&text.replace("5e13", "1e-4")).quick_cpu().succeed();
    assert!(runs.path("run/summary.json").exists());
}
