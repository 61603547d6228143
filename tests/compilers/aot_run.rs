//! Compiler reports of a run's executables, and refusals before compilation.

use crate::support::{Call, Runs, Said, assert_has, grpo, repository, split_progress};
use grpo_pjrt::install::Kind;
use serde_json::Value;

const RUN: &str = "run: { name: small }
model: { vocab_size: 512, hidden_size: 128, intermediate_size: 512, num_hidden_layers: 3, num_attention_heads: 2, \
num_key_value_heads: 1, max_position_embeddings: 256 }
policy: { device: 'pjrt:tpu', dtype: bfloat16 }
rollout: { max_completion_length: 64, batch_size: 8 }
grpo: { prompts_per_step: 2, num_generations: 4, gradient_accumulation_steps: 2 }
";

/// Calls `grpo aot` for one device with [`RUN`] and returns the output, which ends with `code`.
fn aot(kind: Kind, code: i32, change: impl FnOnce(Call) -> Call) -> Said {
    let folder = Runs::new(&[]);
    let target = if kind == Kind::Tpu { "v6e" } else { "h200" };
    change(grpo(["aot", &folder.write("config.yaml", RUN), "--target", target]).plugin(kind)).exit(code)
}

fn claims<'a>(claims: &[&'a str]) -> Vec<&'a str> {
    claims.iter().flat_map(|claim| ["--assert", claim]).collect()
}

/// Settings with which an update has one micro-batch.
const ONE_MICRO_BATCH: [&str; 2] = ["grpo.gradient_accumulation_steps=1", "grpo.prompts_per_step=1"];

/// Returns the seconds of an update and of its parts, whose sum is the update.
fn shares(times: &Value) -> (f64, Vec<f64>) {
    let shares = times["shares"].as_array().expect("shares").iter().map(|s| s[1].as_f64().expect("seconds"));
    let (update, shares) = (times["update_seconds"].as_f64().expect("seconds"), shares.collect::<Vec<_>>());
    assert!((shares.iter().sum::<f64>() - update).abs() < 1e-6 * update, "{times}");
    (update, shares)
}

#[test]
fn run_is_compiled_for_a_tpu_with_a_report_per_program() {
    let claims = claims(&[
        "gradient.temp_bytes <= 100e6",
        "memory.total_bytes >= memory.train_bytes",
        // Accumulators, weights and moments are updated in place.
        "apply.output_bytes <= apply.alias_bytes * 1.01",
        "times.utilisation <= 1",
        "times.step_seconds >= times.update_seconds",
    ]);
    let document = aot(Kind::Tpu, 0, |call| call.args(["--json"]).args(claims)).json();
    for name in ["gradient", "score", "apply", "prefill", "head", "half_mlp"] {
        let report = &document["programs"][name];
        for field in ["argument_bytes", "code_bytes", "estimate_seconds", "program_bytes", "compile_processor_seconds"]
        {
            assert!(report[field].as_f64().is_some_and(|number| number > 0.0), "{name}.{field}: {report}");
        }
    }
    // 2 micro-batches of 4 rows with 192 prompt tokens and 64 completion tokens.
    let sizes = &document["sizes"];
    assert_eq!([&sizes["rows"], &sizes["length"], &sizes["tokens"]], [4, 256, 256], "{sizes}");
    let loops = document["programs"]["gradient"]["loops"].as_array().expect("loops");
    assert!(loops.iter().any(|l| l["trips"] == 3 && l["body_seconds"].as_f64() > Some(0.0)), "{loops:?}");
    let times = &document["times"];
    assert_eq!(shares(times).1.len(), 5, "{times}");
    assert!(times["rollout_tokens_per_second"].as_f64() > Some(0.0), "{times}");

    let text = aot(Kind::Tpu, 0, |call| call).stdout;
    assert_has(&text, &["gradient", "Most is on the device during", "tokens/s"]);
    assert_has(&text, &["% of the peak", "optimizer", "not measurements"]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn slices_of_several_hosts_are_compiled_and_the_shards_of_each_process_are_reported() {
    let folder = Runs::new(&[]);
    let config = folder.write("config.yaml", RUN);
    // A slice of 4 x 4 chips stays in the order of ids; the other one has a ring of neighbours.
    let by_id: Vec<u64> = (0..16).collect();
    for (target, expected, processes) in [("v6e:4x4", &by_id[..], 4), ("v5p:2x2x2", &[0, 1, 3, 2, 6, 7, 5, 4], 2)] {
        let devices = expected.len();
        let aot = |mesh: &str, more: &[&str]| {
            let call =
                grpo(["aot", &config, "--target", target]).plugin(Kind::Tpu).set([format!("policy.mesh={mesh}")]);
            call.args(more).exit(0)
        };
        let fsdp = aot("{fsdp: -1}", &["--json", "--variants", "gradient,apply,prefill,admit"]).json();
        assert!(fsdp["programs"]["gradient"]["traffic"].is_object(), "{fsdp}");
        let data = aot("{data: -1}", &["--json", "--variants", "score"]).json();
        let total = fsdp["sizes"]["parameters"].as_u64().expect("weights");
        let (mut in_mesh, mut sum) = (vec![], 0);
        for (index, process) in fsdp["processes"].as_array().expect("processes").iter().enumerate() {
            assert_eq!(process["process_index"], index);
            let of_process = process["devices"].as_array().expect("devices");
            assert_eq!(of_process.len(), devices / processes, "{process}");
            let ids = of_process.iter().map(|id| id.as_u64().expect("an id"));
            let coordinates = process["coordinates"].as_array().expect("coordinates");
            let positions = coordinates.iter().map(|along| along[1].as_u64().expect("a position along fsdp"));
            in_mesh.extend(positions.zip(ids));
            sum += process["weights"].as_u64().expect("a number of weights");
        }
        in_mesh.sort_unstable();
        assert!(in_mesh.iter().copied().eq((0..).zip(expected.iter().copied())), "{target}: {in_mesh:?}");
        // Norms are not sharded.
        assert!(sum >= total && sum < total + total / 50, "{target}: {sum} of {total} weights");
        let copies = data["processes"].as_array().expect("processes");
        assert!(copies.len() == processes && copies.iter().all(|process| process["weights"] == total), "{data}");
        let text = aot("{fsdp: -1}", &["--variants", "score"]).stdout;
        assert_has(&text, &["places in the mesh of training", &format!("0,{},0", devices - 1)]);
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn programs_of_a_run_are_named_while_they_are_compiled() {
    let compile = |more: &[&str]| {
        let said = aot(Kind::Tpu, 0, |call| call.args(["--variants", "score,admit", "--json"]).args(more));
        // Standard output is a document.
        said.json();
        said.stderr
    };
    let text = compile(&["--recompile"]);
    assert!(!text.contains(['\r', '\u{1b}']), "{text:?}");
    assert_eq!(split_progress(&text).1, Vec::<&str>::new(), "{text}");
    // Both are compiled at the same time, so either begins first.
    let begun = |number: &str| {
        text.contains(&format!("compiling score {number}")) || text.contains(&format!("compiling admit {number}"))
    };
    assert!(begun("(1 of 2)") && begun("(2 of 2)"), "{text}");
    for start in ["compiling score (", "compiling admit (", "compiled score in ", "compiled admit in "] {
        assert!(text.lines().any(|line| line.starts_with(start)), "{start}: {text}");
    }
    assert!(text.contains("(1 of 2 done)") && text.trim_end().ends_with("(2 of 2 done)"), "{text}");
    // What the cache remembers is said in short.
    compile(&[]);
    let text = compile(&[]);
    assert!(text.contains("score was compiled before (") && !text.contains("compiled score in"), "{text}");
}

#[test]
fn update_of_one_micro_batch_is_one_executable() {
    let claims = claims(&[
        "step.output_bytes <= step.alias_bytes * 1.01",
        "times.utilisation <= 1",
        "times.step_seconds >= times.update_seconds",
    ]);
    let document = aot(Kind::Tpu, 0, |call| call.args(["--json"]).set(ONE_MICRO_BATCH).args(claims)).json();
    assert!(document["programs"].get("gradient").is_none(), "{}", document["programs"]);
    let (times, memory) = (&document["times"], &document["memory"]);
    let state = memory["state"].as_array().expect("parts");
    assert!(state.iter().all(|part| part[0] != "sums of gradients") && state.len() >= 3, "{memory}");
    assert!(memory["totals"].get("apply").is_none() && memory["totals"]["step"].as_f64() > Some(0.0), "{memory}");
    let seconds = |name: &str| document["programs"][name]["estimate_seconds"].as_f64().expect("seconds");
    let (update, shares) = shares(times);
    assert!((update - seconds("step")).abs() < 1e-9 && shares.last() == Some(&seconds("apply")), "{times}");
}

#[test]
#[ignore = "GRPO_TESTS=all: XLA's CUDA compiler"]
fn run_is_compiled_for_a_gpu() {
    let of = |settings: &[&str], more: &[&str]| {
        let said = aot(Kind::Cuda, 0, |call| call.args(["--json"]).set(settings).args(more));
        said.json()["programs"].clone()
    };
    let programs = of(&[], &[]);
    for name in ["gradient", "score", "apply", "prefill", "admit"] {
        assert!(programs[name]["total_bytes"].as_f64() > Some(0.0), "{name}: {programs}");
    }
    assert!(programs.as_object().expect("programs").keys().any(|name| name.starts_with("decode")), "{programs}");
    let one = of(&ONE_MICRO_BATCH, &["--variants", "step"]);
    assert!(one["step"]["alias_bytes"].as_f64() > Some(0.0), "{one}");
}

/// Expects claims about programs of a published model: compiler, target, model, and the claims. The bounds are somewhat above the values in
/// BENCHMARKS.md.
fn holds((kind, target, model, asserted): (Kind, &str, &str, &[&str])) {
    let (program, _) = asserted[0].split_once('.').expect("a claim about a program");
    let config = repository(&format!("configs/aot/{model}.yaml"));
    let call = grpo(["aot", &config, "--target", target, "--json", "--variants", program]);
    let call = call.set(["rollout.max_completion_length=1024"]).args(claims(asserted)).plugin(kind);
    let one = if program == "step" { &[&["data.max_prompt_length=1"], &ONE_MICRO_BATCH[..]].concat()[..] } else { &[] };
    let document = call.set(one).exit(0).json();
    assert_eq!(document["assertions"].as_array().map(Vec::len), Some(asserted.len()), "{document}");
    assert_eq!(document["sizes"]["tokens_per_call"], 16, "{}", document["sizes"]);
}

#[test]
fn qwen_steps_stay_within_memory_and_time_bounds() {
    // The step written in JAX takes 9.63 GB and an estimated 143 ms.
    holds((Kind::Tpu, "v6e", "qwen2.5-0.5b", &["step.total_bytes <= 9.2e9", "step.estimate_seconds <= 0.107"]));
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn qwen_rollouts_stay_within_time_bounds() {
    // 16 tokens of 64 sequences, 1.6 ms each.
    holds((Kind::Tpu, "v6e", "qwen2.5-0.5b", &["decode_768.estimate_seconds <= 0.0256"]));
}

#[test]
#[ignore = "GRPO_TESTS=all: XLA's CUDA compiler"]
fn qwen_steps_stay_within_the_memory_of_gpus() {
    holds((Kind::Cuda, "h200", "qwen2.5-0.5b", &["step.temp_bytes <= 3.9e9"]));
    holds((Kind::Cuda, "h200", "qwen2.5-1.5b", &["step.temp_bytes <= 8.5e9"]));
}

#[test]
fn aot_refuses_an_illegal_run_before_compiling() {
    let folder = Runs::new(&[]);
    let cases: [(&str, &[&str], &[&str]); 10] = [
        ("nothing: 1\n", &[], &["configs/train/", "configs/bench/", "`nothing`"]),
        ("model: a\nshape: { tokens: 1 }\n", &[], &["`model`", "`shape`"]),
        ("model: /nowhere/qwen\n", &[], &["/nowhere/qwen"]),
        (RUN, &["--target", "v6f"], &["`v6f`", "v6e:2x4", "h200"]),
        (RUN, &["--target", "v6e:2x4", "--set", "policy.mesh={fsdp: 16}"], &["policy.mesh", "at most 8 devices", "16"]),
        (RUN, &["--target", "v6e:2x4", "--set", "policy.mesh={tensor: 8}"], &["policy.mesh.tensor", "key/value heads"]),
        (
            RUN,
            &["--target", "v6e:4x4", "--set", "policy.mesh={fsdp: 8}"],
            &["policy.mesh", "all 16 devices", "4 processes"],
        ),
        (RUN, &["--variants", "gradients"], &["`gradients`", "gradient, score, apply"]),
        (RUN, &["--set", "lora={r: 4, target_modules: [c_proj]}"], &["LoRA target", "o_proj"]),
        (RUN, &["--assert", "gradiant.temp_bytes <= 1"], &["`gradiant`", "memory and times"]),
    ];
    for (text, more, words) in cases {
        let target = if more.contains(&"--target") { &[][..] } else { &["--target", "v6e"] };
        let call = grpo(["aot", &folder.write("config.yaml", text)]).args(target).args(more);
        assert_has(&call.plugin(Kind::Tpu).refuse(), words);
    }
}

#[test]
#[ignore = "GRPO_TESTS=all: two minutes of compilation"]
fn run_that_does_not_fit_reports_its_memory_and_options() {
    // 1.3e9 weights: one copy fits, two do not.
    let shape = "model={vocab_size: 151936, hidden_size: 8192, intermediate_size: 256, num_hidden_layers: 1, \
                 num_attention_heads: 64, num_key_value_heads: 8, max_position_embeddings: 256, tie_word_embeddings: true}";
    // A single update needs no copy to return to.
    let twice = "grpo.num_iterations=2";
    let said = aot(Kind::Tpu, 2, |call| call.set([shape, twice]));
    assert_has(&said.stderr, &["`apply`", "33.54 GB", "policy.can_roll_back", "grpo.gradient_accumulation_steps"]);
    assert_has(&said.stdout, &["Most is on the device during apply"]);
}
