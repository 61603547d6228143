//! Checkpoints and model folders are copied to and from a device, and to and from a mesh of eight, tensor by tensor: the host allocates
//! less than two of the largest tensors. Only Rust's allocations are counted; the "device" memory of XLA's CPU is not.

use grpo_models::{
    Adapter, AdapterOptions, AdapterWriter, Dtype, ExportOptions, FolderWriter, LoraConfig, ModelConfig,
};
use grpo_models::{ModelFolder, NamedTensor, TargetModules};
use grpo_pjrt::install::{Kind, install};
use grpo_policy::{OptimizerSettings, Policy, PolicyState, Sequence, SequenceBatch, StepLoss, token_batch};
use grpo_policy_pjrt::decoder::{AxisRules, Compute};
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
use grpo_run::checkpoint::{CheckpointId, Checkpoints, FORMAT, SavedState};
use grpo_stablehlo::Mesh;
use grpo_testkit::allocations::{Allocated, Counting, measured};
use grpo_testkit::xla_cpu::{QUICK, program_cache};
use grpo_trainer::Counters;
use std::path::Path;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Fails unless `f` allocates less than two tensors of `largest` f32 values at its peak, in addition to earlier allocations.
#[track_caller]
fn streams<T>(what: &str, largest: usize, f: impl FnOnce() -> T) -> T {
    let (out, Allocated { peak, .. }) = measured(f);
    let tensor = 4 * largest;
    println!("{what}: {peak} bytes at the peak, {:.3} of the largest tensor of {tensor}", peak as f64 / tensor as f64);
    assert!(peak < 2 * tensor, "{what}: {peak} bytes at the peak, the largest tensor has {tensor}");
    out
}

const LENGTH: usize = 6;

fn shape([vocab_size, hidden_size, intermediate_size]: [usize; 3]) -> ModelConfig {
    ModelConfig {
        vocab_size,
        hidden_size,
        intermediate_size,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 2 * LENGTH,
        tie_word_embeddings: false,
        ..ModelConfig::default()
    }
}

fn weights(parameter: &grpo_models::Parameter) -> Vec<f32> {
    let is_norm = parameter.shape.len() == 1;
    (0..parameter.len()).map(|i| if is_norm { 1.0 } else { 0.02 * ((i % 1009) as f32).sin() }).collect()
}

fn write_folder(target: &Path, shape: &ModelConfig) {
    let options = ExportOptions { dtype: Dtype::F32, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(target, shape, None, options).unwrap();
    for parameter in shape.parameters() {
        writer.write(&parameter.name, &weights(&parameter)).unwrap();
    }
    writer.finish().unwrap();
}

fn export_folder(policy: &PjrtPolicy, target: &Path, shape: &ModelConfig, dtype: Dtype) {
    let options = ExportOptions { dtype, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(target, shape, None, options).unwrap();
    policy.export_model(&mut |tensor: NamedTensor| Ok(writer.write(&tensor.name, &tensor.data)?)).unwrap();
    writer.finish().unwrap();
}

fn saved(position: CheckpointId) -> SavedState {
    SavedState {
        format: FORMAT.into(),
        position: position.to_string(),
        counters: Counters::default(),
        coefficients: Default::default(),
        seed: 0,
        config_sha256: String::new(),
        threads: 1,
        seconds: 0.0,
        metrics_bytes: 0,
        completions_bytes: 0,
        best: None,
    }
}

fn train(policy: &mut PjrtPolicy) {
    let sequences = [Sequence { prompt: vec![3; LENGTH / 2], completion: vec![5; LENGTH / 2] }];
    let batch = SequenceBatch { routed_experts: &[], sequences: &sequences, tokens: token_batch(&sequences).unwrap() };
    policy.accumulate(&[batch], StepLoss::CrossEntropy { tokens: LENGTH / 2 }).unwrap();
    policy.apply(1e-3).unwrap();
}

/// Checks saving and restoring a checkpoint: a policy after one step, its moments and its reference policy.
fn check_points(folder: &Path, policy: &PjrtPolicy, fresh: impl Fn() -> PjrtPolicy, largest: usize) {
    let checkpoints = Checkpoints::new(folder.to_owned());
    let write = |step, policy: &dyn Policy| {
        let position = CheckpointId::Grpo(step);
        streams("a checkpoint that is written", largest, || {
            checkpoints
                .write(position, &saved(position), &|group, sink| policy.export(group, sink), |_| Ok(()))
                .unwrap()
        })
    };
    let first = write(1, policy);
    let mut again = fresh();
    streams("a checkpoint that is read", largest, || {
        let (_, state) = checkpoints.read(CheckpointId::Grpo(1)).unwrap();
        again
            .import(&PolicyState {
                policy: &state.policy,
                ref_policy: Some(&state.ref_policy),
                optimizer: &state.optimizer,
                optimizer_steps: 1,
                optimizer_settings: &OptimizerSettings::default(),
            })
            .unwrap();
    });
    let second = write(2, &again);
    // Loads other weights alone, from the start of the run.
    let start = write(0, &fresh());
    streams("weights that are read", largest, || {
        let (_, state) = checkpoints.read(CheckpointId::Grpo(0)).unwrap();
        again.import_weights(&state.policy).unwrap();
    });
    let third = write(3, &again);
    let same = |a: &Path, b: &Path, file| std::fs::read(a.join(file)).ok() == std::fs::read(b.join(file)).ok();
    assert!(!same(&first, &start, "model.safetensors") && same(&third, &start, "model.safetensors"));
    for file in ["model.safetensors", "optimizer.safetensors", "reference.safetensors"] {
        assert!(same(&second, &first, file), "{file} is not what it was");
        assert!(file == "model.safetensors" || same(&third, &first, file), "{file} is not what it was");
    }
}

/// Returns the largest of `numbers`.
fn largest(numbers: impl IntoIterator<Item = usize>) -> usize {
    numbers.into_iter().max().unwrap()
}

/// Opens one device, and a mesh of eight.
fn runtimes() -> [Runtime; 2] {
    let installed = install(Kind::Cpu, |_| {}).expect("XLA's CPU plugin can be installed");
    let mesh = Mesh::new("mesh", [("fsdp", 4), ("tensor", 2)]).unwrap();
    let eight = Runtime::open_mesh(Kind::Cpu, Some(&installed.path), AxisRules::new(&mesh)).expect("8 devices");
    let one = Runtime::new(Kind::Cpu, eight.client().clone()).unwrap();
    [one, eight].map(|runtime| {
        let quick = QUICK.iter().fold(runtime, |runtime, (flag, value)| runtime.with_compile_flag(flag, *value));
        quick.with_compile_cache(program_cache())
    })
}

/// Embedding and head are the largest tensors.
const EMBEDDING: (&str, [usize; 3]) = ("embedding", [1 << 16, 64, 64]);
/// Gate and up are the largest tensors.
const MLP: (&str, [usize; 3]) = ("mlp", [64, 256, 1 << 13]);

// Only one test runs in a process, because the counters are global.
#[test]
fn checkpoints_and_model_folders_are_streamed_by_tensor() {
    if !grpo_testkit::tier::includes("grpo-run device_memory: other dtypes, one device, and adapters") {
        let [_, eight] = runtimes();
        let folder = tempfile::tempdir().unwrap();
        return models_are_streamed(&eight, folder.path(), EMBEDDING, Compute::Bf16);
    }
    for runtime in runtimes() {
        println!("devices: {}", runtime.devices().len());
        let folder = tempfile::tempdir().unwrap();
        for (named, compute) in [(EMBEDDING, Compute::F32), (EMBEDDING, Compute::Bf16), (MLP, Compute::F32)] {
            models_are_streamed(&runtime, folder.path(), named, compute);
        }
        adapters_are_streamed(&runtime, folder.path());
    }
}

fn models_are_streamed(runtime: &Runtime, folder: &Path, (name, sizes): (&str, [usize; 3]), compute: Compute) {
    println!("{name} {compute:?}");
    let path = |name: &str| folder.join(name);
    let shape = &shape(sizes);
    if !path(name).exists() {
        write_folder(&path(name), shape);
    }
    let in_model = largest(shape.parameters().iter().map(grpo_models::Parameter::len));
    let options = PjrtPolicyOptions { compute, ..PjrtPolicyOptions::default() };
    let fresh = || {
        let folder = ModelFolder::open(&path(name)).unwrap();
        let (weights, loss) = (folder.weights().unwrap(), grpo_core::LossConfig::default());
        PjrtPolicy::from_weights(runtime, folder.config(), &weights, loss, options.clone()).unwrap()
    };
    let mut policy = streams("a model folder that is read", in_model, fresh);
    policy.freeze_ref_policy().unwrap();
    train(&mut policy);
    check_points(&path(&format!("{name}-{compute:?}")), &policy, fresh, in_model);
    let target = path(&format!("{name}-{compute:?}-model"));
    streams("a model folder that is written", in_model, || {
        export_folder(&policy, &target, shape, Dtype::F32);
    });
}

/// Adapters, alone and merged into the model in `folder`. B of the head is the largest adapter tensor.
fn adapters_are_streamed(runtime: &Runtime, folder: &Path) {
    let path = |name: &str| folder.join(name);
    let (name, sizes) = EMBEDDING;
    let shape = &shape(sizes);
    let target_modules = TargetModules::Names(vec!["q_proj".into(), "lm_head".into()]);
    let lora = LoraConfig { r: 32, target_modules, ..LoraConfig::default() };
    let base = || {
        let folder = ModelFolder::open(&path(name)).unwrap();
        let (options, loss) = (PjrtPolicyOptions::default(), grpo_core::LossConfig::default());
        PjrtPolicy::from_weights(runtime, shape, &folder.weights().unwrap(), loss, options).unwrap()
    };
    let fresh = || base().with_lora(&lora, 1).unwrap();
    let mut policy = fresh();
    policy.freeze_ref_policy().unwrap();
    train(&mut policy);
    println!("adapters");
    let of_adapters = largest(lora.parameters(shape).unwrap().iter().map(grpo_models::Parameter::len));
    check_points(&path("adapters"), &policy, fresh, of_adapters);
    let adapter = path("adapter");
    streams("an adapter that is written", of_adapters, || {
        let mut writer = AdapterWriter::create(&adapter, &lora, shape, None, AdapterOptions::default()).unwrap();
        policy.export_adapter(&mut |tensor: NamedTensor| Ok(writer.write(&tensor.name, &tensor.data)?)).unwrap();
        writer.finish().unwrap();
    });
    let base = base();
    streams("an adapter that is read", of_adapters, || {
        base.with_adapter(&Adapter::open(&adapter, shape).unwrap()).unwrap();
    });
    streams("a merged model that is written", shape.vocab_size * shape.hidden_size, || {
        export_folder(&policy, &path("merged"), shape, Dtype::Bf16);
    });
}
