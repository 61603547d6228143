//! Compiles the programs for TPUs that are not present: every implementation, pass, blocking, ratio level and mesh
//! gives a program that a v6e can run.

use grpo_backend_tpu::aot::{Analysis, Compiler, Target, Variant, user_cache};
use grpo_backend_tpu::compile_options::options_for;
use grpo_backend_tpu::plugins::{self, Kind};
use grpo_backend_tpu::program::{MeshShape, MosaicBlocks, Numerics, Pass, Spec};
use grpo_core::{
    Dtype, Error, GradientSpec, HeadLayout, Implementation, LossConfig, PlanRequest, PolicySpec, Tiling, TokenBatch,
};
use grpo_pjrt::CompileOptions;
use grpo_stablehlo::{Builder, TensorType};
use std::sync::LazyLock;

fn loss(json: &str) -> LossConfig {
    LossConfig::from_json(json).unwrap()
}

fn grpo() -> LossConfig {
    loss(r#"{"loss_type": "grpo", "epsilon_high": 0.28, "beta": 0.04, "entropy_coef": 0.02, "temperature": 0.9}"#)
}

fn gspo() -> LossConfig {
    loss(r#"{"loss_type": "gspo", "beta": 0.1}"#)
}

fn chunks(size: usize) -> Tiling {
    Tiling { token_chunk: Some(size), ..Tiling::default() }
}

fn panels(size: usize) -> Tiling {
    Tiling { vocab_block: Some(size), ..Tiling::default() }
}

const N: usize = 256;
const H: usize = 128;
const V: usize = 1024;

fn compiler() -> &'static Compiler {
    static COMPILER: LazyLock<Compiler> = LazyLock::new(|| {
        plugins::install(Kind::Tpu, |_| {}).expect("the TPU compiler can be installed");
        let compiler = Compiler::open(Target::parse("v6e:2x4").unwrap(), None).unwrap();
        compiler.with_cache(user_cache().expect("this user has a cache"))
    });
    &COMPILER
}

fn analyse(name: &str, variant: &Variant) -> Analysis {
    let program = variant.program(&variant.spec().unwrap()).unwrap().module.to_string();
    let analysis = compiler().analyse(&program, &options_for(Kind::Tpu, variant.mesh.devices()));
    let analysis = analysis.unwrap_or_else(|error| panic!("{name}: {error}"));
    println!("{name}: {analysis:?}");
    analysis
}

fn compile(name: &str, variant: &Variant) {
    let spec = variant.spec().unwrap();
    let report = analyse(name, variant);
    let bytes = |elements: usize| elements as u64;
    // The shards that a device stores.
    let MeshShape { data, tensor } = spec.mesh;
    let (n, v, h) = (bytes(spec.padded_tokens() / data), bytes(spec.padded_vocab() / tensor), bytes(H));
    let input = variant.request.policy.dtype().bytes() as u64;
    let given = matches!(variant.request.policy, PolicySpec::Logits { .. });
    let inputs = if given { input * n * v } else { input * (n * h + v * h) };
    assert!(report.argument_bytes >= inputs, "{name}: arguments of {inputs} bytes at least");
    // Gradients reuse the memory of their accumulators.
    let donated = match (variant.pass, given) {
        (Pass::Gradient, true) => 4 * n * v,
        (Pass::Gradient, false) => 4 * (n * h + v * h),
        (Pass::GradientInPlace, _) => input * n * v,
        _ => 0,
    };
    assert!(report.alias_bytes >= donated, "{name}: {donated} bytes are donated");
    // A loose bound: a small multiple of dense logits, their gradient and the inputs' gradients.
    assert!(report.temp_bytes <= 16 * (n * v + n * h + v * h), "{name}: temp {}", report.temp_bytes);
    assert!(report.code_bytes > 0, "{name}");
    // No device receives the whole head: loops keep the vocabulary sharded.
    let received = report.traffic.bytes();
    assert!(received < (4 * V * H) as f64, "{name}: {:?}", report.traffic);
    assert!((received > 0.0) == (spec.mesh.devices() > 1), "{name}: {:?}", report.traffic);
}

fn variant(loss: LossConfig, implementation: Implementation, tiling: Tiling, mesh: MeshShape, pass: Pass) -> Variant {
    let dtype = Dtype::Bf16;
    Variant {
        request: PlanRequest {
            loss: loss.into(),
            implementation,
            tiling,
            max_tokens: N,
            policy: PolicySpec::Hidden { hidden: H, vocab: V, dtype, layout: HeadLayout::VocabHidden, bias: false },
            gradients: GradientSpec::default(),
        },
        numerics: Numerics::default(),
        mosaic: None,
        mesh,
        pass,
        build: Spec::program,
    }
}

const ONE: MeshShape = MeshShape { data: 1, tensor: 1 };
const GRID: MeshShape = MeshShape { data: 2, tensor: 4 };

#[test]
fn every_program_of_hidden_states_compiles() {
    let tilings = [
        ("chunks", Implementation::Fused, chunks(96)),
        ("panels", Implementation::Fused, panels(384)),
        ("reference", Implementation::Reference, Tiling::default()),
    ];
    for (level, loss) in [("token", grpo()), ("sequence", gspo())] {
        for (name, implementation, tiling) in &tilings {
            for (mesh, kind) in [(ONE, Pass::Score), (ONE, Pass::Gradient), (GRID, Pass::Gradient)] {
                let variant = variant(loss.clone(), *implementation, tiling.clone(), mesh, kind);
                compile(&format!("{name} {level} {kind:?} {mesh:?}"), &variant);
            }
        }
    }
}

#[test]
fn every_program_of_logits_compiles() {
    for (mesh, kind) in
        [(ONE, Pass::Score), (ONE, Pass::Gradient), (ONE, Pass::GradientInPlace), (GRID, Pass::GradientInPlace)]
    {
        for loss in [grpo(), gspo()] {
            let mut variant = variant(loss, Implementation::Logits, Tiling::default(), mesh, kind);
            // A prime vocabulary, which no number of devices divides.
            variant.request.policy = PolicySpec::Logits { vocab: 1013, dtype: Dtype::Bf16 };
            compile(&format!("logits {kind:?} {mesh:?}"), &variant);
        }
    }
}

#[test]
fn every_rounding_layout_and_bias_compiles() {
    let plain = loss(r#"{"loss_type": "cispo", "epsilon_high": 1.3}"#);
    for (i, tiling) in [chunks(96), panels(384)].into_iter().enumerate() {
        let mut variant = variant(plain.clone(), Implementation::Fused, tiling, ONE, Pass::Gradient);
        variant.request.policy = PolicySpec::Hidden {
            hidden: H,
            vocab: 1013,
            dtype: Dtype::Bf16,
            layout: HeadLayout::HiddenVocab,
            bias: true,
        };
        variant.request.gradients.bias = true;
        variant.numerics = Numerics {
            logits: Dtype::Bf16,
            dlogits: Dtype::Bf16,
            entropy: i == 0,
            exact_ratio: i == 0,
            ..variant.numerics
        };
        compile(&format!("rounded {:?}", variant.numerics), &variant);
    }
}

/// A softcap is fused: it needs no copy of the logits, precomputed or of a tile.
#[test]
fn a_softcap_needs_no_extra_memory() {
    let policy = PolicySpec::Logits { vocab: 8192, dtype: Dtype::Bf16 };
    for (name, implementation, tiling, kind) in [
        ("logits", Implementation::Logits, Tiling::default(), Pass::GradientInPlace),
        ("chunks", Implementation::Fused, chunks(96), Pass::Gradient),
    ] {
        let temp = |final_logit_softcapping: Option<f64>| {
            let loss = LossConfig { final_logit_softcapping, logit_scale: 1.5, ..grpo() };
            let mut variant = variant(loss, implementation, tiling.clone(), ONE, kind);
            if name == "logits" {
                variant.request.policy = policy;
            }
            analyse(&format!("{name} {kind:?} cap {final_logit_softcapping:?}"), &variant).temp_bytes
        };
        let (plain, capped) = (temp(None), temp(Some(30.0)));
        assert!(capped <= plain + plain / 4 + (64 << 10), "{name} {kind:?}: {capped} bytes, {plain} without a softcap");
    }
}

/// TPU kernels support one factor for all logits only.
#[test]
fn tpu_kernels_refuse_unsupported_losses() {
    let kernels = |loss: LossConfig| {
        let mut variant = variant(loss, Implementation::Logits, Tiling::default(), ONE, Pass::Gradient);
        variant.request.policy = PolicySpec::Logits { vocab: V, dtype: Dtype::Bf16 };
        variant.mosaic = Some(MosaicBlocks::default());
        variant.spec().unwrap()
    };
    for (loss, expected) in [
        (LossConfig { final_logit_softcapping: Some(30.0), ..grpo() }, "TPU kernels with final_logit_softcapping 30"),
        (LossConfig { logit_scale: -0.5, ..grpo() }, "TPU kernels with logit_scale -0.5"),
    ] {
        let error = kernels(loss).program(Pass::Gradient).map(drop).expect_err("a refusal");
        assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains(expected), "{error}");
    }
    let spec = kernels(LossConfig { logit_scale: 0.25, ..grpo() });
    assert!(spec.program(Pass::Gradient).is_ok());
    let on_mesh = Spec { mesh: GRID, ..spec.clone() };
    let error = on_mesh.program(Pass::Gradient).map(drop).expect_err("a refusal").to_string();
    assert!(error.contains("TPU kernels on a mesh of data 2 x tensor 4"), "{error}");
    let batch = TokenBatch::packed(vec![1, 2], vec![0, 2]).unwrap();
    assert!(spec.check_batch(&batch).is_ok());
    let batch = batch.with_temperatures(vec![0.7, 1.0]).unwrap();
    let error = spec.check_batch(&batch).expect_err("a refusal");
    assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains("`temperatures`"), "{error}");
    assert!(Spec { mosaic: None, ..spec }.check_batch(&batch).is_ok());
}

#[test]
fn analyses_are_cached_by_program_target_and_options() {
    plugins::install(Kind::Tpu, |_| {}).expect("the TPU compiler can be installed");
    let folder = tempfile::tempdir().unwrap();
    let open = |target: &str| Compiler::open(Target::parse(target).unwrap(), None).unwrap();
    let compiler = open("v6e").with_cache(folder.path().join("not yet there"));
    let f = Builder::new();
    let x = f.argument("x", TensorType::new(grpo_stablehlo::Dtype::F32, [8, 128]));
    let program = f.finish("double", &[("twice", &(&x + &x))]).unwrap().to_string();
    let options = CompileOptions::default();
    let first = compiler.analyse(&program, &options).unwrap();
    assert!(!first.from_cache && first.total_bytes() > 8 * 128 * 4 && first.cost.is_ok(), "{first:?}");
    assert_eq!(compiler.analyse(&program, &options).unwrap(), Analysis { from_cache: true, ..first.clone() });

    // Other options, programs and targets have other entries.
    let other = options.clone().with("xla_allow_excess_precision", false);
    assert!(!compiler.analyse(&program, &other).unwrap().from_cache);
    assert!(!compiler.analyse(&program.replace("double", "twice"), &options).unwrap().from_cache);
    let v5e = open("v5e").with_cache(folder.path().join("not yet there"));
    assert!(!v5e.analyse(&program, &options).unwrap().from_cache);
    assert!(!open("v6e").analyse(&program, &options).unwrap().from_cache);

    // Damaged entries are recompiled and replaced.
    for entry in std::fs::read_dir(folder.path().join("not yet there")).unwrap() {
        std::fs::write(entry.unwrap().path(), "damage").unwrap();
    }
    assert!(!compiler.analyse(&program, &options).unwrap().from_cache);
    assert!(compiler.analyse(&program, &options).unwrap().from_cache);
    let nowhere = open("v6e").with_cache("/dev/null/folder");
    assert!(!nowhere.analyse(&program, &options).unwrap().from_cache);
}
