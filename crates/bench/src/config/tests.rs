//! Tests of legal configurations, and of errors for illegal ones.

use super::*;
use crate::model::ModelBenchConfig;
use grpo_files::{Layers, to_yaml};

fn read(text: &str) -> Result<BenchConfig> {
    let config: BenchConfig = Layers::new().text("text", text)?.resolve()?;
    config.validate()?;
    config.names().iter().try_for_each(|name| config.check(name))?;
    Ok(config)
}

fn refused(text: &str) -> String {
    let error = read(text).expect_err(text);
    let mut words = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        words = format!("{words}: {error}");
        source = error.source();
    }
    words
}

#[test]
fn dtypes_have_the_names_of_torch_too() {
    for (name, dtype) in [("bfloat16", "bf16"), ("float32", "f32"), ("fp32", "f32")] {
        let config = read(&format!("{{ dtype: {name}, variants: {{ fused: {{}} }} }}")).unwrap();
        assert_eq!(config.dtype.name(), dtype);
    }
    assert!(refused("dtype: float16").contains("float16"));
}

#[test]
fn configurations_of_the_repository_are_legal() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/bench");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("an entry").path();
        let layers = Layers::new().file(&path).expect("YAML");
        if ModelBenchConfig::fits(&layers) {
            let config: ModelBenchConfig = layers.resolve().expect("a configuration");
            config.validate().unwrap_or_else(|error| panic!("{}: {error:?}", path.display()));
            continue;
        }
        let config: BenchConfig = layers.resolve().expect("a configuration");
        config.validate().unwrap_or_else(|error| panic!("{}: {error:?}", path.display()));
        for (name, case) in config.cases() {
            // Checks variants that are compiled; variants of the CPU backend are checked when they are planned.
            let compiled = |variant: &&&str| case.backend(variant).is_ok_and(|b| b != BackendName::Cpu);
            let checked = case.names().iter().filter(compiled).try_for_each(|variant| case.check(variant));
            checked.unwrap_or_else(|error| panic!("{name} of {}: {error:?}", path.display()));
        }
        let again = Layers::new().text("printed", &to_yaml(&config).expect("YAML")).expect("YAML");
        assert_eq!(again.resolve::<BenchConfig>().expect("a configuration"), config);
        files += 1;
    }
    assert!(files >= 11, "{files} files");
}

#[test]
fn variants_can_be_changed_and_added_from_outside() {
    let layers = Layers::new().text("file", "variants: { fused: { tiling: { token_chunk: 512 } } }").expect("YAML");
    let set = ["variants.fused.tiling.token_chunk=1024", "variants.dense.implementation=reference"];
    let config: BenchConfig = layers.set(&set.map(String::from)).expect("legal").resolve().expect("legal");
    assert_eq!(config.names(), ["dense", "fused"]);
    assert_eq!(config.variant("fused").expect("there").request.tiling.token_chunk, Some(1024));
}

#[test]
fn shapes_and_dtypes_give_one_problem_each() {
    let text = "name: scaling\nshape: { batch: 2, tokens: 4, hidden: 8, vocab: 16 }\nshapes: { small: {}, tall: { tokens: 64 } }
dtypes: [bf16, f32]\nvariants: { a: {}, b: { dtype: bf16, backend: 'pjrt:cpu' } }";
    let config: BenchConfig = Layers::new().text("text", text).expect("YAML").resolve().expect("legal");
    config.validate().expect("legal");
    let cases = config.cases();
    let names: Vec<&str> = cases.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["scaling-small-bf16", "scaling-small-f32", "scaling-tall-bf16", "scaling-tall-f32"]);
    let tall = &cases[3].1;
    assert_eq!((tall.shape.tokens, tall.shape.hidden, tall.dtype), (64, Some(8), Dtype::F32));
    assert_eq!((tall.dtype_of("a"), tall.dtype_of("b")), (Dtype::F32, Dtype::Bf16));
    assert_eq!(tall.backend("a").expect("legal"), BackendName::Cpu);
    assert_eq!(tall.backend("b").expect("legal").to_string(), "pjrt:cpu");
    // Only one problem at a time can be compiled.
    assert!(config.variant("a").expect_err("four problems").to_string().contains("small, tall, bf16, f32"));
}

#[test]
fn zero_is_a_legal_value_of_every_knob() {
    let text =
        "inputs: { seed: 0, logit_std: 0, old_logp_noise: 0, ref_logp_noise: 0 }\nrounds: { warmup: 0, steps: 0 }
loss: { epsilon_low: 0, epsilon_high: 0, beta: 0 }\nvariants: { a: { threads: 0 } }";
    let config = read(text).expect("legal");
    assert_eq!((config.loss.epsilon_high, config.rounds.steps, config.inputs.logit_std), (Some(0.0), 0, 0.0));
}

#[test]
fn variant_without_a_program_is_named() {
    for (text, words) in [
        ("", &["variants", "at least one"][..]),
        ("shape: { tokenz: 3 }", &["shape.tokenz", "tokens"]),
        ("shape: { tokens: 0 }\nvariants: { a: {} }", &["shape.tokens"]),
        ("variants: { a: { tilling: {} } }", &["variants.a", "tilling", "tiling"]),
        ("variants: { a.b: {} }", &["a.b"]),
        ("backend: gpu\nvariants: { a: {} }", &["backend", "`gpu`", "pjrt:cuda"]),
        ("variants: { a: { backend: tpu } }", &["variants.a.backend", "`tpu`", "pjrt:tpu"]),
        ("variants: { a: { threads: 100000 } }", &["variants.a.threads", "at most", "100000"]),
        ("variants: { a: { isa: avx1 } }", &["variants.a.isa", "`avx1`", "avx2"]),
        ("variants: { a: { command: [] } }", &["variants.a.command"]),
        ("inputs: { old_logp_noise: -1 }\nvariants: { a: {} }", &["inputs.old_logp_noise", "-1"]),
        (
            "inputs: { kept_ids: 9 }\nshape: { vocab: 8 }\nvariants: { a: {} }",
            &["inputs.kept_ids", "at most the vocabulary of 8"],
        ),
        ("shapes: { big: { tokens: 0 } }\nvariants: { a: {} }", &["shape.tokens"]),
        ("dtypes: []\nvariants: { a: {} }", &["dtypes", "at least one"]),
        ("variants: { a: { pass: gradient_in_place } }", &["variant `a`", "given logits"]),
        ("dtype: f32\nvariants: { a: { numerics: { logits: bf16 } } }", &["variant `a`", "bf16"]),
        ("shape: { hidden: null }\nvariants: { a: {} }", &["variant `a`", "no head"]),
        ("variants: { a: { tiling: { workspace_budget: 10 } } }", &["variant `a`", "budget"]),
    ] {
        let found = refused(text);
        assert!(words.iter().all(|word| found.contains(word)), "{text}: {found}");
    }
}
