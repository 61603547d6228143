//! `grpo bench`: the machinery on this CPU, models, and what is particular to devices.

mod model;
mod pjrt;

use crate::support::{Runs, Said, assert_has, grpo, json, refuse, signal};
use serde_json::Value;
use std::io::{BufRead, BufReader};

/// Two of our variants, the oracle among them, and what else there may be.
const TINY: &str = "
name: tiny
shape: { batch: 2, tokens: 12, hidden: 16, vocab: 50 }
dtype: f32
rounds: { warmup: 1, steps: 3 }
variants:
  fused: { threads: 1 }
  reference: { implementation: reference, threads: 1 }
";

/// A peer in ten lines of Python's standard library: it knows nothing of the loss, but speaks the protocol.
const PEER: &str = r#"
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    if "plan" in request:
        head = request["plan"]["tensors"]["lm_head"]
        assert os.path.getsize(head["path"]) == 4 * head["shape"][0] * head["shape"][1]
        loss = request["plan"]["config"]["loss"]
        assert (loss["epsilon_low"], loss["epsilon_high"]) == (0.2, 0.2), loss
        reply = {"planned": {"bytes": {"inputs": 3968}, "version": "standard library"}}
    else:
        reply = {"stepped": {"seconds": 0.25, "loss": 5.0, "high_water": 1048576, "unknown": None}}
    print(json.dumps(reply), flush=True)
"#;

fn bench(text: &str, arguments: &[&str]) -> Said {
    let folder = Runs::new(&[]);
    grpo(["bench", &folder.write("config.yaml", text)]).args(arguments).output()
}

#[track_caller]
fn document(said: &Said, code: i32) -> Value {
    assert_eq!(said.code, Some(code), "{said}");
    said.json()
}

/// The only problem of a document.
fn case(document: &Value) -> &Value {
    assert_eq!(document["cases"].as_array().map(Vec::len), Some(1));
    &document["cases"][0]
}

fn number(value: &Value, path: &str) -> f64 {
    value.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} of {value:#}"))
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|number| number.as_f64().expect("a number")).collect()
}

#[test]
fn variants_take_turns_see_the_same_and_tell_everything() {
    let report = document(&bench(TINY, &["--json"]), 0);
    for path in ["/version", "/date", "/machine/system"] {
        assert!(report.pointer(path).is_some_and(|v| v.as_str().is_some_and(|s| !s.is_empty())), "{path}");
    }
    let case = case(&report);
    assert_eq!((&case["name"], &case["config"]["shape"]["vocab"]), (&"tiny".into(), &50.into()));
    let (fused, reference) = (&case["variants"]["fused"], &case["variants"]["reference"]);
    let product = 2.0 * 24.0 * 50.0 * 16.0;
    for variant in [fused, reference] {
        assert_eq!(variant["status"], "measured", "{variant}");
        assert_eq!(variant["agrees"], true, "{variant}");
        let times = numbers(&variant["step_ms"]["all"]);
        assert_eq!(times.len(), 3);
        assert!(number(variant, "/step_ms/min") <= number(variant, "/step_ms/p50"));
        assert_eq!(number(variant, "/useful_flops"), 3.0 * product);
        assert!((number(variant, "/tokens_per_second") * number(variant, "/step_ms/p50") - 24e3).abs() < 1e-3);
        // The floor is the fastest rate of this machine, measured in the same rounds.
        let floor = &case["floors"][variant["floor"].as_str().expect("a floor")];
        assert!(floor["rate_of"] == "FLOP" && numbers(&floor["began_s"]).len() == 3, "{floor}");
        let floor_ms = 1e3 * 3.0 * product / number(floor, "/rate_per_second");
        assert!((number(variant, "/floor_ms") / floor_ms - 1.0).abs() < 1e-9);
        assert!((number(variant, "/share_of_floor") * number(variant, "/times_floor") - 1.0).abs() < 1e-9);
        // What the seed system calls them.
        for (seed, ours) in [
            ("bench/step_s_mean", 1e-3 * number(variant, "/step_ms/mean")),
            ("bench/step_s_p50", 1e-3 * number(variant, "/step_ms/p50")),
            ("bench/step_s_p90", 1e-3 * number(variant, "/step_ms/p90")),
            ("avg_step_ms", number(variant, "/step_ms/mean")),
            ("bench/compile_s", number(variant, "/plan_seconds")),
            ("first_call_s", number(variant, "/first_call_seconds")),
            ("mem/inputs_bytes", 4.0 * 16.0 * (24.0 + 50.0)),
            ("mem/workspace_bytes", number(variant, "/bytes/workspace")),
        ] {
            let seed = variant[seed].as_f64().unwrap_or_else(|| panic!("{seed} of {variant:#}"));
            assert!((seed - ours).abs() <= 1e-12 * ours.abs(), "{seed} and {ours}");
        }
        // dhidden and dlm_head, and two numbers per token.
        assert_eq!(number(variant, "/bytes/outputs"), 4.0 * 16.0 * (24.0 + 50.0) + 8.0 * 24.0);
        assert!(number(variant, "/bytes/workspace") > 0.0);
        if cfg!(target_os = "linux") {
            assert!(number(variant, "/bytes/high_water") < 64e6 && variant["mem_after_alloc"].is_u64());
            assert!(variant["mem_after_run"].is_u64());
        }
    }
    // One after the other, in every round.
    let (a, b) = (numbers(&fused["began_s"]), numbers(&reference["began_s"]));
    let mut turns: Vec<(f64, char)> = a.iter().map(|at| (*at, 'a')).chain(b.iter().map(|at| (*at, 'b'))).collect();
    turns.sort_by(|a, b| a.0.total_cmp(&b.0));
    let turns: String = turns.iter().map(|(_, who)| *who).collect();
    assert!(["ababab", "bababa"].contains(&turns.as_str()), "{turns}");
    let loss = number(fused, "/loss");
    assert!(loss.abs() > 1e-3 && (loss - number(reference, "/loss")).abs() < 1e-6, "{loss}");
    let norms = fused["grad_norms"].as_object().expect("norms");
    assert!(norms.len() == 2 && norms.values().all(|norm| norm.as_f64().is_some_and(|norm| norm > 1e-3)), "{norms:?}");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn problems_are_shapes_by_dtypes_and_files() {
    let folder = Runs::new(&[]);
    let logits = "name: given\nshape: { batch: 1, tokens: 6, hidden: null, vocab: 20 }\nloss: { beta: 0.1 }
variants: { in_place: { implementation: logits, pass: gradient_in_place }, added: { implementation: logits }, score: { implementation: logits, pass: score } }";
    let files = [folder.write("a.yaml", TINY), folder.write("b.yaml", logits)];
    let bench = |files: &[String], steps: &str| {
        let shapes = ["shapes.wide.vocab=70", "dtypes=[f32, bf16]"];
        grpo(["bench", "--steps", steps, "--warmup", "0", "--json"]).set(shapes).args(files)
    };
    let report = bench(&files, "1").exit(0).json();
    let cases = report["cases"].as_array().expect("problems");
    let names: Vec<&str> = cases.iter().map(|case| case["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["tiny-wide-f32", "tiny-wide-bf16", "given-wide-f32", "given-wide-bf16"]);
    for case in cases {
        assert_eq!(case["config"]["shape"]["vocab"], 70);
        for (name, variant) in case["variants"].as_object().expect("variants") {
            assert_eq!(variant["status"], "measured", "{name} {variant}");
            let expected = if name == "score" { Value::Null } else { true.into() };
            assert_eq!(variant["agrees"], expected, "{name} {variant}");
        }
    }
    // Given logits are read, and their gradient written: twice 6 x 70 x 2 bytes.
    let given = &cases[3];
    let floor = &given["floors"]["read_write_bf16"];
    assert_eq!(floor["rate_of"], "B");
    let floor_ms = 1e3 * 2.0 * 840.0 / number(floor, "/rate_per_second");
    assert!((number(&given["variants"]["in_place"], "/floor_ms") / floor_ms - 1.0).abs() < 1e-9);
    assert_eq!(given["variants"]["score"]["floor"], "read_bf16");
    // Across problems too; two files of the same name would be two problems of the same name.
    let across = ["--assert", "tiny-wide-f32/fused.bytes.inputs == tiny-wide-bf16/fused.bytes.inputs * 2"];
    bench(&files[..1], "0").args(across).succeed();
    assert_has(&refuse(["bench", &files[0], &files[0]]), &["`tiny` twice"]);
}

#[test]
fn claims_become_exit_codes() {
    let assert = |claim: &str| bench(TINY, &["--steps", "1", "--assert", claim, "--json"]);
    let report = document(&assert("fused.useful_flops == reference.useful_flops"), 0);
    assert_eq!((&report["assertions"][0]["holds"], &report["assertions"][0]["case"]), (&true.into(), &"tiny".into()));
    let report = document(&assert("fused.step_ms.p50 < reference.step_ms.p50 * 0"), 1);
    assert_eq!(report["assertions"][0]["holds"], false);
    for (claim, word) in [
        ("fused.step_ms.p50 < ", "fused.step_ms.p50 < "),
        ("fussed.step_ms.p50 < 1", "`fussed`"),
        ("other/fused.step_ms.p50 < 1", "`other/fused`"),
        ("fused.step_ms.p51 < 1", "p51"),
    ] {
        let output = assert(claim);
        assert_eq!(output.code, Some(2), "{claim}");
        assert!(output.stderr.contains(word), "{claim}: {}", output.stderr);
    }
    // What was not timed holds in no direction.
    document(&bench(TINY, &["--steps", "0", "--assert", "fused.step_ms.p50 >= 0", "--json"]), 1);
}

#[test]
fn zero_is_a_value_like_any_other() {
    let zeros = "
inputs: { seed: 0, logit_std: 0, old_logp_noise: 0, ref_logp_noise: 0 }
loss: { epsilon_low: 0, epsilon_high: 0 }
";
    let folder = Runs::new(&[]);
    let file = folder.text("report.json");
    let arguments = ["--steps", "0", "--warmup", "0", "--seed", "0", "--markdown", "--out", &file];
    let said = bench(&format!("{TINY}{zeros}"), &arguments);
    assert_eq!(said.code, Some(0), "{said}");
    assert!(said.stdout.lines().any(|line| line.starts_with("| fused ")), "{said}");
    let report = json(&folder.path("report.json"));
    let case = case(&report);
    assert_eq!([&case["config"]["inputs"]["old_logp_noise"], &case["config"]["loss"]["epsilon_high"]], [0.0, 0.0]);
    let fused = &case["variants"]["fused"];
    assert!(["step_ms", "bench/step_s_p50", "floor"].iter().all(|field| fused[field].is_null()), "{fused}");
    assert!(number(fused, "/first_call_seconds") > 0.0);
    // On policy, too, everything can be measured.
    document(&bench(TINY, &["--set", "inputs.on_policy=true", "--set", "loss.epsilon_low=0", "--json"]), 0);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_step_is_taken_apart_by_kind_of_work() {
    let text = format!(
        "{TINY}
  where: {{ threads: 1, profile: true }}
  dense: {{ implementation: reference, profile: true }}
"
    );
    let report = document(&bench(&text, &["--json"]), 0);
    let variants = &case(&report)["variants"];
    let shares = variants["where"]["work_shares"].as_object().expect("shares");
    let names: Vec<&str> = shares.keys().map(String::as_str).collect();
    assert_eq!(names, ["gradients", "packing", "products", "statistics", "waiting"]);
    let values: Vec<f64> = shares.values().filter_map(Value::as_f64).collect();
    assert!(
        (values.iter().sum::<f64>() - 1.0).abs() < 1e-9 && values[..4].iter().all(|share| *share > 0.0),
        "{values:?}"
    );
    assert_eq!(variants["fused"]["work_shares"], serde_json::json!({}));
    assert_eq!(variants["dense"]["status"], "not_offered");
    assert_has(&bench(&text, &[]).stdout, &["where spends its threads' time on "]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn what_fails_is_named_and_the_rest_goes_on() {
    let text = format!(
        "{TINY}
  unsupported: {{ numerics: {{ logits: bf16 }} }}
  greedy: {{ tiling: {{ workspace_budget: 10 }} }}
  killed: {{ command: [sh, -c, 'read plan; echo these are its last words >&2; kill -9 $$'] }}
  mumbling: {{ command: [sh, -c, 'read plan; echo what'] }}
  missing: {{ command: [/no/such/program] }}
"
    );
    let report = document(&bench(&text, &["--json"]), 1);
    let variants = &case(&report)["variants"];
    for (name, status, words) in [
        ("unsupported", "not_offered", "numerics"),
        ("greedy", "failed", "budget"),
        ("killed", "failed", "these are its last words"),
        ("mumbling", "failed", "`what`"),
        ("missing", "failed", "/no/such/program"),
    ] {
        assert_eq!(variants[name]["status"], status, "{name}: {variants:#}");
        assert!(variants[name]["error"].as_str().is_some_and(|e| e.contains(words)), "{name}: {}", variants[name]);
    }
    assert!(["fused", "reference"].iter().all(|name| variants[name]["status"] == "measured"), "{variants:#}");
    let output = bench(&text, &["--variants", "fused,unsupported", "--steps", "1"]);
    // Who asks for it by name is not served.
    assert_eq!(output.code, Some(1));
    assert!(output.stdout.contains("unsupported: ") && !output.stdout.contains("greedy"), "{}", output.stdout);
    assert!(output.stdout.lines().all(|line| line.chars().count() <= 100 || line.contains("grpo")), "{output}");
    document(&bench(&text, &["--variants", "fused", "--steps", "1", "--json"]), 0);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_program_of_somebody_else_takes_turns_and_is_checked() {
    let folder = Runs::new(&[]);
    let script = folder.write("peer.py", PEER);
    let text = format!("{TINY}  peer: {{ command: ['python3', '{script}'] }}\n");
    let bench = grpo(["bench", &folder.write("config.yaml", &text), "--json"]).with_path();
    let report = bench.exit(0).json();
    let peer = &case(&report)["variants"]["peer"];
    assert_eq!([&peer["status"], &peer["backend"], &peer["version"]], ["measured", "peer", "standard library"]);
    // It says what it was told to say, and its loss is another than ours.
    assert_eq!((number(peer, "/step_ms/p90"), number(peer, "/bytes/high_water")), (250.0, 1_048_576.0));
    assert_eq!(peer["agrees"], false);
    assert!(number(peer, "/times_floor") > 1.0);
    let table = grpo(["bench", &folder.text("config.yaml")]).with_path().output().stdout;
    assert_has(&table, &["! peer does not agree: loss 5.0"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_plot_is_a_picture_with_every_name_and_panel() {
    let folder = Runs::new(&[]);
    let file = folder.text("plot.svg");
    let output = bench(TINY, &["--set", "dtypes=[bf16, f32]", "--steps", "1", "--plot", &file]);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    let svg = folder.read("plot.svg");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert_has(&svg, &["tiny-bf16", "tiny-f32", "fused", "reference", "median step (ms)"]);
    let points = |svg: &str| svg.matches("<circle").count();
    // Two variants in each of two panels, whatever else is drawn.
    assert!(points(&svg) >= 4, "{}", points(&svg));
    let nothing = bench(TINY, &["--steps", "0", "--plot", &file]);
    assert_eq!(nothing.code, Some(0), "{nothing}");
    let empty = folder.read("plot.svg");
    assert!(empty.contains("nothing was timed") && points(&empty) == 0);
}

#[test]
fn what_cannot_be_measured_is_refused_with_what_could() {
    let folder = Runs::new(&[]);
    let config = folder.write("config.yaml", TINY);
    for (option, value, words) in [
        ("--backend", "gpu", &["`gpu`", "pjrt:cuda"][..]),
        ("--set", "shape.tokens=0", &["shape.tokens"]),
        ("--set", "shape.tokenz=1", &["tokens"]),
        ("--variants", "fusd", &["`fusd`", "fused"]),
        ("--set", "inputs.old_logp_noise=-1", &["inputs.old_logp_noise"]),
        ("--peers-venv", "/no/such/folder", &["peers/README.md"]),
        ("--plot", "plot.png", &[".svg"]),
    ] {
        assert_has(&refuse(["bench", &config, option, value]), words);
    }
    for bad in [["--steps", "-1"], ["--warmup", "many"], ["--seed", "1.5"]] {
        assert_has(&grpo(["bench", &config]).args(bad).exit(2).stderr, &bad[..1]);
    }
}

/// Inputs may be gigabytes: none may stay behind.
#[test]
#[cfg(unix)]
fn what_is_stopped_leaves_nothing_behind() {
    let folder = Runs::new(&[]);
    let config = folder.write("config.yaml", TINY.replace("steps: 3", "steps: 1000000"));
    let temporary = folder.path("temporary");
    std::fs::create_dir(&temporary).expect("a folder");
    let mut child = grpo(["bench", &config]).env("TMPDIR", &temporary).spawn();
    let mut said = BufReader::new(child.stderr.take().expect("piped")).lines().map_while(Result::ok);
    assert!(said.any(|line| line.contains("round 2 of")), "no round was begun");
    signal(&child, rustix::process::Signal::TERM);
    let rest: Vec<String> = said.collect();
    assert_eq!(child.wait().expect("an ending").code(), Some(2), "{rest:?}");
    assert!(rest.iter().any(|line| line.contains("stopped before the end")), "{rest:?}");
    assert_eq!(std::fs::read_dir(&temporary).expect("the folder").count(), 0);
}
