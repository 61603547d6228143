//! A run over the devices of two processes, which threads with a store each simulate on XLA's CPU. The leader's folder is that of a run of
//! one process.

use grpo_distributed::{Options, Store};
use grpo_files::Layers;
use grpo_pjrt::install::{Kind, install};
use grpo_policy_pjrt::decoder::AxisRules;
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
use grpo_run::{Ending, Follower, Run};
use grpo_stablehlo::Mesh;
use grpo_testkit::xla_cpu::{QUICK, program_cache};
use grpo_trainer::{TrainConfig, Trainer};
use serde_json::Value;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/train/tiny.yaml");

fn config(max_steps: u64) -> TrainConfig {
    let settings = "{run: {save_steps: 1, save_total_limit: 0, metric_for_best_model: pass@1, load_best_model_at_end: true}, \
         warmup: {steps: 2}, grpo: {prompts_per_step: 4, gradient_accumulation_steps: 2}, eval: {eval_steps: 1, num_problems: 8}, \
         optimizer: {lr_scheduler_type: constant}}";
    let layers = Layers::new().file(TINY.as_ref()).unwrap().text("a test", settings).unwrap();
    let mut config = TrainConfig::from_layers(layers).unwrap();
    config.grpo.max_steps = max_steps;
    config
}

/// Two shards of the weights and two copies of them. The 53 characters of the model are padded.
fn rules() -> AxisRules {
    AxisRules::new(&Mesh::new("mesh", [("data", 2), ("fsdp", 2)]).unwrap())
}

/// The processes of the devices: each has one shard of the weights, twice.
const OWNERS: [usize; 4] = [0, 1, 0, 1];

fn trainer(config: TrainConfig, runtime: &Runtime, store: Option<&Arc<Store>>) -> Trainer {
    let shape = config.model.shape().unwrap();
    let options = PjrtPolicyOptions::default();
    let policy = PjrtPolicy::new(runtime, shape, config.seed, config.loss(), options).unwrap();
    let mut parts = grpo_setup::parts(&config).unwrap();
    (parts.policy, parts.store) = (Box::new(policy), store.cloned());
    Trainer::with_parts(config, parts).unwrap()
}

fn quick(runtime: Runtime) -> Runtime {
    let runtime = QUICK.iter().fold(runtime, |runtime, (flag, value)| runtime.with_compile_flag(flag, *value));
    runtime.with_compile_cache(program_cache())
}

fn finish(mut run: Run) {
    let ending = run.run(&mut (), &AtomicBool::new(false)).unwrap();
    assert!(matches!(ending, Ending::Finished(_)), "{ending:?}");
}

/// Calls `lead` and `follow` in a thread each, on a mesh of the devices of both.
fn in_processes(
    client: &grpo_pjrt::Client,
    lead: impl FnOnce(&Runtime, &Arc<Store>) + Send,
    follow: impl FnOnce(&Runtime, &Arc<Store>) -> Follower + Send,
) {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let [first, second] = <[_; 2]>::try_from(client.simulated_processes(&OWNERS)).unwrap();
    let open = |process: usize, client: grpo_pjrt::Client| {
        let store = Arc::new(Store::open(&Options::new(&address, 2, process), &[]).unwrap());
        let runtime = quick(Runtime::of_process(Kind::Cpu, client, &store).unwrap()).on_mesh(rules()).unwrap();
        (runtime, store)
    };
    thread::scope(|scope| {
        let follower = scope.spawn(|| {
            let (runtime, store) = open(1, second);
            assert!(follow(&runtime, &store).run(&AtomicBool::new(false)).unwrap());
        });
        let (runtime, store) = open(0, first);
        lead(&runtime, &store);
        follower.join().unwrap();
    });
}

/// Returns the rows of metrics.jsonl without times.
fn metrics(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let mut rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for row in rows.iter_mut().filter_map(Value::as_object_mut) {
        row.retain(|key, _| {
            let is_time = ["timing_s/", "tokens_per_second/"].iter().any(|prefix| key.starts_with(prefix));
            !is_time && key != "step_time" && key != "mfu"
        });
    }
    rows
}

#[test]
fn a_run_over_processes_has_the_results_of_one_process_also_after_resuming() {
    let installed = install(Kind::Cpu, |_| {}).expect("XLA's CPU plugin can be installed");
    let one = quick(Runtime::open_mesh(Kind::Cpu, Some(&installed.path), rules()).expect("4 devices"));
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let more = ["grpo.max_steps=4".to_owned()];

    finish(Run::start_with(trainer(config(2), &one, None), Some(&path("one"))).unwrap());
    finish(Run::resume_with(&path("one"), None, &more, |config| Ok(trainer(config, &one, None))).unwrap());
    in_processes(
        one.client(),
        |runtime, store| {
            finish(Run::start_with(trainer(config(2), runtime, Some(store)), Some(&path("two"))).unwrap());
        },
        |runtime, store| Follower::start_with(trainer(config(2), runtime, Some(store))).unwrap(),
    );
    in_processes(
        one.client(),
        |runtime, store| {
            let make = |config| Ok(trainer(config, runtime, Some(store)));
            finish(Run::resume_with(&path("two"), None, &more, make).unwrap());
        },
        |runtime, store| Follower::resume_with(trainer(config(4), runtime, Some(store))).unwrap(),
    );
    assert_eq!(metrics(&path("two")), metrics(&path("one")));
    for step in ["warmup-000001", "step-000000", "step-000002", "step-000004"] {
        for file in ["model.safetensors", "optimizer.safetensors"] {
            let bytes = |run: &str| std::fs::read(path(run).join("checkpoints").join(step).join(file)).unwrap();
            assert!(bytes("one") == bytes("two"), "{step}/{file} differs");
        }
    }
}
