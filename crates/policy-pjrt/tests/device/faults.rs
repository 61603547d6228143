//! Device faults: each is an error that names the fix, and no existing data is lost.

use crate::checkpoint::Checkpoint;
use crate::mesh_support::eight;
use crate::support::{cross_entropy, on_device, runtime, state, whole};
use grpo_backend_tpu::plugins::Kind;
use grpo_core::readable_bytes;
use grpo_models::{ExportOptions, FolderWriter, MemoryTable, ModelConfig, NamedTensor};
use grpo_policy::{Policy, TensorSink};
use grpo_policy_pjrt::decoder::AxisRules;
use grpo_policy_pjrt::{DeviceWeights, Error, PjrtPolicy, PjrtPolicyOptions, Runtime};
use grpo_stablehlo::{Builder, CustomCall, Dtype, Mesh, TensorType};
use std::fs;
use std::path::Path;

#[test]
fn weights_that_do_not_fit_the_model_are_errors() {
    let checkpoint = Checkpoint::open("qwen2");
    let (config, weights) = (checkpoint.config(), &checkpoint.weights);
    let error = DeviceWeights::from_weights(runtime(), config, weights, Dtype::F16).unwrap_err();
    assert!(error.to_string().contains("f32 or bf16") && error.to_string().contains("f16"), "{error}");
    let other = ModelConfig { num_hidden_layers: config.num_hidden_layers + 1, ..config.clone() };
    let error = DeviceWeights::from_weights(runtime(), &other, weights, Dtype::F32).unwrap_err();
    assert!(matches!(error, Error::Model(grpo_models::Error::MissingTensors { .. })), "{error}");
    let error = DeviceWeights::from_tensors(runtime(), config, &[], Dtype::F32).unwrap_err();
    assert!(error.to_string().contains("model.embed_tokens.weight"), "{error}");
}

#[test]
fn a_model_that_does_not_fit_is_an_error_before_weights_are_read() {
    let config = ModelConfig {
        hidden_size: 1 << 16,
        intermediate_size: 1 << 18,
        num_hidden_layers: 1000,
        ..ModelConfig::default()
    };
    // There are no weights, so reading one would be another error.
    let error = DeviceWeights::from_tensors(runtime(), &config, &[], Dtype::F32).unwrap_err();
    assert!(matches!(&error, Error::TooLarge { device, .. } if device == "pjrt:cpu"), "{error}");
    let text = error.to_string();
    for words in ["pjrt:cpu has ", "weights (float32)", " TB"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(text.lines().count(), 1);

    let there = runtime().available_memory().unwrap();
    let mut table = MemoryTable::new();
    table.push("all but a little", there / 2);
    runtime().check_memory(table.clone()).unwrap();
    table.push_in("updates", "gradients", 2 * there);
    let text = runtime().check_memory(table).unwrap_err().to_string();
    assert!(text.contains("all but a little") && text.contains("during updates: gradients"), "{text}");
}

#[test]
fn out_of_memory_errors_have_bytes_and_the_program() {
    // 2^48 bytes, more than any process has.
    let shape = [1 << 23, 1 << 23];
    let f = Builder::new();
    let one = f.argument("one", TensorType::scalar(Dtype::F32));
    let all = one.broadcast_in_dim(&shape, &[]);
    drop(one);
    let program = runtime().compile(&f.finish("gradient", &[("all", &all)]).unwrap()).unwrap();
    let one = runtime().upload(&[1.0_f32], &[]).unwrap();
    // A program with a pending argument fails later, when its results are read, and then the bytes come from the plugin's error text. On a
    // busy machine the argument may be pending after it was read.
    let fails_at_once = |_| {
        assert_eq!(one.read::<f32>("one").unwrap(), [1.0]);
        program.run(vec![(&one).into()]).map(|_| ()).err()
    };
    let error = (0..100).find_map(fails_at_once).expect("a program without pending arguments");
    let Error::OutOfMemory { program: Some(program), needed: Some(needed), available: Some(available), .. } = &error
    else {
        panic!("{error}")
    };
    assert!(*needed >= 1 << 48 && *available < 1 << 48);
    let text = error.to_string();
    assert!(program == "gradient" && text.contains("running `gradient`"), "{text}");
    assert!(
        text.contains(&format!("{} needed, {} free", readable_bytes(*needed), readable_bytes(*available))),
        "{text}"
    );
}

#[test]
fn a_compile_error_names_the_program_the_plugin_and_its_versions() {
    let f = Builder::new();
    let one = f.argument("one", TensorType::scalar(Dtype::F32));
    let call = CustomCall { target: "of_a_later_release".into(), ..CustomCall::default() };
    let result = f.custom_call(call, &[&one], &[one.ty().clone()]).swap_remove(0);
    drop(one);
    let error = runtime().compile(&f.finish("decode", &[("result", &result)]).unwrap()).unwrap_err();
    assert!(matches!(&error, Error::Compile { program, .. } if program == "decode"), "{error}");
    let text = error.to_string();
    let (major, minor) = runtime().client().plugin().api_version();
    for words in [
        "`decode`",
        "pjrt:cpu",
        "of_a_later_release",
        &runtime().client().plugin().path().display().to_string(),
        &format!("PJRT API {major}.{minor}"),
        "StableHLO 1.",
        "another release",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn damaged_or_outdated_cache_entries_are_recompiled() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = Runtime::new(Kind::Cpu, runtime().client().clone()).unwrap().with_compile_cache(folder.path());
    let doubled = || {
        let f = Builder::new();
        let x = f.argument("x", TensorType::new(Dtype::F32, [2]));
        let sum = &x + &x;
        drop(x);
        let program = runtime.compile(&f.finish("double", &[("sum", &sum)]).unwrap()).unwrap();
        let x = runtime.upload(&[1.5_f32, -2.0], &[2]).unwrap();
        program.run_one(vec![x.into()]).unwrap().read::<f32>("x").unwrap()
    };
    assert_eq!(doubled(), [3.0, -4.0]);
    let entry = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let good = fs::read(&entry).unwrap();
    let mut older = good.clone();
    older[15] = b'0';
    for damaged in [&good[..good.len() / 3], &older[..], b"", b"something else"] {
        fs::write(&entry, damaged).unwrap();
        assert_eq!(doubled(), [3.0, -4.0]);
        assert!(fs::read(&entry).unwrap().starts_with(&good[..16]), "the entry was replaced");
    }
}

#[test]
fn a_device_failure_during_an_update_is_reported_as_lost_weights() {
    let checkpoint = Checkpoint::open("qwen2");
    let sequences = checkpoint.completions();
    let (batch, imitate) = ([whole(&sequences)], cross_entropy(&sequences));
    for program in ["adamw", "step"] {
        let options = PjrtPolicyOptions { can_roll_back: false, ..PjrtPolicyOptions::default() };
        let mut policy = on_device(&checkpoint, options);
        policy.step(&batch, imitate, 0.1).unwrap();
        let [weights, ..] = state(&policy);
        // Simulate a device failure: delete a buffer.
        let fails = |policy: &PjrtPolicy| policy.weights().unwrap().tensors()[0].shards()[0].delete().unwrap();
        let error = match program {
            "adamw" => {
                policy.accumulate(&batch, imitate).unwrap();
                fails(&policy);
                policy.apply(0.1).unwrap_err()
            }
            _ => {
                fails(&policy);
                policy.step(&batch, imitate, 0.1).unwrap_err()
            }
        };
        assert!(error.to_string().contains(&format!("running `{program}`")), "{error}");
        let lost = |error: grpo_policy::Error| {
            let text = error.to_string();
            assert!(text.contains("lost the weights") && text.contains("last checkpoint"), "{text}");
        };
        lost(policy.export_model(&mut Vec::new()).unwrap_err());
        lost(policy.accumulate(&batch, imitate).unwrap_err());
        lost(policy.step(&batch, imitate, 0.1).unwrap_err());
        lost(policy.freeze_ref_policy().unwrap_err());
        lost(policy.import_weights(&weights).unwrap_err());
        assert!(matches!(policy.logits(&[&[1, 2]], |_, _, _| {}), Err(Error::Lost)));
    }
}

/// A sink that writes tensors into a folder and fails after a number of tensors.
struct Fails {
    writer: FolderWriter,
    after: usize,
}

impl TensorSink for Fails {
    fn tensor(&mut self, tensor: NamedTensor) -> grpo_policy::Result<()> {
        self.after = self.after.checked_sub(1).ok_or(grpo_policy::Error::NoValueHead)?;
        Ok(self.writer.write(&tensor.name, &tensor.data)?)
    }
}

fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<_> =
        entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect();
    files.sort();
    files
}

#[test]
fn errors_on_a_mesh_name_the_device() {
    let runtime = eight();
    let failing = |device: usize| {
        let config = ModelConfig { vocab_size: 32, hidden_size: 16, ..ModelConfig::default() };
        let options = PjrtPolicyOptions::default();
        let policy = PjrtPolicy::new(runtime, &config, 1, grpo_core::LossConfig::default(), options).unwrap();
        let weights = policy.weights().unwrap();
        weights.tensors()[0].shards()[device].delete().unwrap();
        weights.tensors()[0].read::<f32>("the embedding").unwrap_err().to_string()
    };
    // A copy of the first and one of the second round.
    for device in [2, 5] {
        let id = runtime.devices()[device].description().unwrap().id;
        let text = failing(device);
        assert!(text.contains(&format!("reading the embedding from device {id}: ")), "{text}");
    }
    let one = Runtime::new(Kind::Cpu, runtime.client().clone()).unwrap();
    let tensor = one.upload(&[1.0_f32], &[1]).unwrap();
    tensor.shards()[0].delete().unwrap();
    let text = tensor.read::<f32>("a number").unwrap_err().to_string();
    assert!(text.contains("reading a number from the device: "), "{text}");
}

#[test]
fn errors_of_programs_on_a_mesh_name_devices_and_bytes() {
    // A client of its own, without collectives: after a failed launch, collectives of the client hang.
    let path = runtime().client().plugin().path();
    let mesh = Mesh::new("mesh", [("fsdp", 8)]).unwrap();
    let eight = Runtime::open_mesh(Kind::Cpu, Some(path), AxisRules::new(&mesh)).unwrap();
    let f = Builder::new();
    let one = f.argument("one", TensorType::scalar(Dtype::F32));
    // 2^48 bytes on each device.
    let all = one.broadcast_in_dim(&[1 << 23, 1 << 23], &[]);
    let two = &one + &one;
    drop(one);
    let mut module = f.finish("gradient", &[("all", &all), ("two", &two)]).unwrap();
    module.partitions = eight.devices().len();
    let program = eight.compile(&module).unwrap();
    let one = eight.upload(&[1.0_f32], &[]).unwrap();
    // Programs of several devices are launched before their results are allocated.
    let results = program.run(vec![(&one).into()]).unwrap();
    let error = Error::from(results[1].read::<f32>("two").unwrap_err());
    let Error::OutOfMemory { needed: Some(needed), .. } = &error else { panic!("{error}") };
    assert!(*needed >= 1 << 48, "{error}");
    let id = eight.devices()[0].description().unwrap().id;
    assert!(error.to_string().contains(&format!("reading two from device {id}: ")), "{error}");

    one.shards()[5].delete().unwrap();
    let text = program.run(vec![(&one).into()]).unwrap_err().to_string();
    assert!(text.contains("running `gradient` on 8 devices: "), "{text}");
}

#[test]
fn a_failed_export_keeps_the_existing_folder() {
    let checkpoint = Checkpoint::open("qwen2");
    let policy = on_device(&checkpoint, PjrtPolicyOptions::default());
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("model");
    let export = |after: usize| -> grpo_policy::Result<()> {
        let options = ExportOptions { replace: true, ..ExportOptions::default() };
        let writer = FolderWriter::create(&target, checkpoint.config(), Some(&checkpoint.folder), options)?;
        let mut sink = Fails { writer, after };
        policy.export_model(&mut sink)?;
        Ok(sink.writer.finish()?)
    };
    let all = checkpoint.config().parameters().len();
    export(all).unwrap();
    let before = contents(&target);
    assert!(before.iter().any(|(name, bytes)| name == "model.safetensors" && bytes.len() > 1000));
    // Fails before the first tensor, after some, and before the last.
    for after in [0, 5, all - 1] {
        assert!(matches!(export(after), Err(grpo_policy::Error::NoValueHead)));
        assert_eq!(contents(&target), before, "{after}");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1, "nothing else is left");
    }
    // The device fails during the export.
    let weights = policy.weights().unwrap();
    let last = weights.tensors().last().unwrap();
    last.shards()[0].delete().unwrap();
    let error = export(all).unwrap_err().to_string();
    assert!(error.contains("running `") || error.contains("reading "), "{error}");
    assert_eq!(contents(&target), before);
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
}
