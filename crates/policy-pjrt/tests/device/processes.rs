//! A policy on a mesh over the devices of several processes. XLA's CPU plugin has no communication between processes, so threads
//! simulate them: each has some of eight virtual devices as its own, uploads and reads their shards only, and launches together with the
//! others.

use crate::mesh_support::{config, eight, policy, rules, sequences};
use crate::mesh_training::train;
use crate::support::{state, weights, whole};
use grpo_backend_tpu::plugins::Kind;
use grpo_distributed::{Options, Store};
use grpo_models::LoraConfig;
use grpo_policy::{OptimizerSettings, Policy, PolicyState, StepLoss};
use grpo_policy_pjrt::decoder::AxisRules;
use grpo_policy_pjrt::{DeviceTensor, DeviceWeights, PjrtPolicyOptions, Runtime};
use grpo_stablehlo::Dtype;
use grpo_testkit::xla_cpu::{mesh_flags, program_cache};
use rstest::rstest;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;

/// Calls `run` in every process of a simulation, whose `owners` are the processes of the devices, and returns the results.
fn in_processes<T: Send>(owners: &[usize], run: impl Fn(&Arc<Store>, Runtime) -> T + Sync) -> Vec<T> {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let clients = eight().client().simulated_processes(owners);
    let processes = clients.len();
    let in_process = |(process, client): (usize, grpo_pjrt::Client)| {
        let store = Arc::new(Store::open(&Options::new(&address, processes, process), &[]).unwrap());
        let runtime = Runtime::of_process(Kind::Cpu, client, &store).unwrap();
        let runtime = runtime.with_compile_cache(program_cache());
        let flags = mesh_flags().into_iter();
        let runtime = flags.fold(runtime, |runtime, (flag, value)| runtime.with_compile_flag(flag, value));
        let result = run(&store, runtime);
        store.close().unwrap();
        result
    };
    thread::scope(|scope| {
        let threads = clients.into_iter().enumerate().map(|each| scope.spawn(|| in_process(each)));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The devices of two hosts, and devices that are not in the order of the processes, as in a TPU slice.
const OWNERS: [[usize; 8]; 2] = [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 2, 2, 0, 1]];

#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::of_two_hosts(OWNERS[0], None, None)]
#[ignore = "GRPO_TESTS=all"]
#[case::in_another_order(
    OWNERS[1],
    Some(LoraConfig { r: 2, ..LoraConfig::default() }),
    Some(rules(&[("data", 4), ("tensor", 2)]))
)]
fn training_and_sampling_over_processes_match_one_process_bit_for_bit(
    #[case] owners: [usize; 8],
    #[case] lora: Option<LoraConfig>,
    #[case] rollout_rules: Option<AxisRules>,
) {
    let mesh = rules(&[("data", 2), ("fsdp", 2), ("tensor", 2)]);
    let options = PjrtPolicyOptions { rollout_rules, ..PjrtPolicyOptions::default() };
    let train_on = |runtime: Runtime| {
        let runtime = runtime.on_mesh(mesh.clone()).unwrap();
        train(policy(&runtime, lora.as_ref(), options.clone()))
    };
    let expected = train_on(eight().clone());
    for found in in_processes(&owners, |_, runtime| train_on(runtime)) {
        assert!(found == expected, "{owners:?}, LoRA: {}", lora.is_some());
    }
}

#[test]
fn a_state_moves_between_one_and_several_processes_bit_for_bit() {
    let (adamw, all) = (OptimizerSettings::default(), sequences());
    let trained = |runtime: &Runtime| {
        let mut policy = policy(runtime, None, PjrtPolicyOptions::default());
        policy.freeze_ref_policy().unwrap();
        policy.accumulate(&[whole(&all)], StepLoss::CrossEntropy { tokens: 5 }).unwrap();
        assert!(policy.apply(0.02).unwrap().applied);
        state(&policy)
    };
    let fsdp = rules(&[("fsdp", 8)]);
    let expected = trained(&eight().clone().on_mesh(fsdp.clone()).unwrap());
    let [of_policy, of_ref, optimizer] = &expected;
    let found = in_processes(&OWNERS[1], |_, runtime| {
        let runtime = runtime.on_mesh(fsdp.clone()).unwrap();
        let mut second = policy(&runtime, None, PjrtPolicyOptions::default());
        let imported = PolicyState {
            policy: of_policy,
            ref_policy: Some(of_ref),
            optimizer,
            optimizer_steps: 1,
            optimizer_settings: &adamw,
        };
        second.import(&imported).unwrap();
        (trained(&runtime), state(&second))
    });
    for (of_training, imported) in found {
        assert!(of_training == expected && imported == expected);
    }
}

#[test]
fn a_process_holds_and_reads_its_own_shards() {
    let mesh = rules(&[("fsdp", 8)]);
    let source = weights(&policy(eight(), None, PjrtPolicyOptions::default()));
    let source: Vec<_> = source.into_values().collect();
    in_processes(&OWNERS[0], |store, runtime| {
        let runtime = runtime.on_mesh(mesh.clone()).unwrap();
        assert_eq!((runtime.devices().len(), runtime.client().addressable_devices().len()), (8, 4));
        let weights = DeviceWeights::from_tensors(&runtime, &config(), &source, Dtype::F32).unwrap();
        for (tensor, parameter) in weights.tensors().iter().zip(weights.table()) {
            assert_eq!(tensor.shards().len(), 4, "{}", parameter.name());
            let first = tensor.shards()[0].device().unwrap().description().unwrap();
            assert_eq!((first.id, first.process_index), (4 * store.process_id() as i32, store.process_id() as i32));
            let split = tensor.shards()[0].num_elements() < parameter.count();
            let read = tensor.read::<f32>(parameter.name());
            assert_eq!(read.is_err(), split, "{}", parameter.name());
            if let Err(error) = read {
                let found = format!("expected {} elements", parameter.count());
                assert!(error.to_string().contains(&found), "{error}");
            }
        }
        let is_eighth =
            |tensor: &DeviceTensor| tensor.shards()[0].num_elements() * 8 == tensor.shape().iter().product::<usize>();
        assert!(weights.tensors().iter().any(|tensor| is_eighth(tensor)));
    });
}

#[test]
fn process_0_alone_uses_the_compile_cache() {
    let folders = [0, 1].map(|_| tempfile::tempdir().unwrap());
    let entries = |process: usize| std::fs::read_dir(folders[process].path()).unwrap().count();
    let mesh = rules(&[("fsdp", 8)]);
    let compiled = || {
        in_processes(&OWNERS[0], |store, runtime| {
            let folder = folders[store.process_id()].path();
            let runtime = runtime.with_compile_cache(folder).on_mesh(mesh.clone()).unwrap();
            weights(&policy(&runtime, None, PjrtPolicyOptions::default()))
        })
    };
    let first = compiled();
    let written = entries(0);
    assert!(written > 0 && entries(1) == 0, "{written} {}", entries(1));
    // The second time, process 0 sends its entries; a damaged one is compiled by all processes and replaced.
    let damaged = std::fs::read_dir(folders[0].path()).unwrap().next().unwrap().unwrap().path();
    std::fs::write(&damaged, "damaged").unwrap();
    assert_eq!(compiled(), first);
    assert_eq!((entries(0), entries(1)), (written, 0));
    assert!(std::fs::read(&damaged).unwrap().len() > 100);
}

#[test]
fn devices_that_do_not_fit_the_processes_are_an_error() {
    let clients = eight().client().simulated_processes(&OWNERS[0]);
    let error = Runtime::new(Kind::Cpu, clients[0].clone()).unwrap_err().to_string();
    assert!(error.contains("devices of one process") && error.contains("8 devices of 2 processes"), "{error}");
    let alone = Arc::new(Store::open(&Options::new("127.0.0.1:0", 1, 0), &[]).unwrap());
    let error = Runtime::of_process(Kind::Cpu, clients[0].clone(), &alone).unwrap_err().to_string();
    assert!(error.contains("devices of 1 processes") && error.contains("8 devices of 2"), "{error}");
    in_processes(&OWNERS[0], |_, runtime| {
        let error = runtime.on_mesh(rules(&[("fsdp", 4)])).unwrap_err().to_string();
        assert!(error.contains("8 devices that all 2 processes have, found a mesh of 4"), "{error}");
    });
}
