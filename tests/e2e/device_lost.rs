//! A device that is lost in the middle of a step: the run ends with the command that goes on, and the command goes on.

use crate::support::{assert_has, named_call, names, tiny};
use grpo_core::{LossOutput, Scores};
use grpo_files::Layers;
use grpo_pjrt::install::{Kind, install};
use grpo_policy::{
    Completion, OptimizerSettings, Policy, PolicyState, Result, RolloutRequest, SequenceBatch, StateGroup, StepLoss,
    TensorSink, TensorSource, UpdateReport, Weights,
};
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
use grpo_run::Run;
use grpo_trainer::{TrainConfig, Trainer};
use std::sync::atomic::AtomicBool;

/// Defines methods that call the wrapped policy.
macro_rules! forward {
    ($(fn $name:ident($self:ident: $receiver:ty $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {$(
        fn $name($self: $receiver $(, $argument: $type)*) -> $result {
            $self.policy.$name($($argument),*)
        }
    )*};
}

/// A policy on a device whose weights are gone in the second step of GRPO, as those of a device that is lost are.
struct Lost {
    policy: PjrtPolicy,
    steps: usize,
}

impl Policy for Lost {
    fn step(&mut self, batches: &[SequenceBatch<'_>], loss: StepLoss, rate: f64) -> Result<(LossOutput, UpdateReport)> {
        if matches!(loss, StepLoss::Grpo) {
            self.steps += 1;
            if self.steps == 2 {
                self.policy.weights()?.tensors()[0].shards()[0].delete().expect("the buffer was there");
            }
        }
        self.policy.step(batches, loss, rate)
    }
    forward! {
        fn num_parameters(self: &Self) -> usize;
        fn context_length(self: &Self) -> usize;
        fn generate(self: &mut Self, request: &RolloutRequest<'_>) -> Result<Vec<Completion>>;
        fn score(self: &mut Self, of: Weights, batches: &[SequenceBatch<'_>]) -> Result<Scores>;
        fn accumulate(self: &mut Self, batches: &[SequenceBatch<'_>], loss: StepLoss) -> Result<LossOutput>;
        fn apply(self: &mut Self, rate: f64) -> Result<UpdateReport>;
        fn skip(self: &mut Self) -> Result<UpdateReport>;
        fn reset_optimizer(self: &mut Self, config: &OptimizerSettings) -> Result<()>;
        fn optimizer_steps(self: &Self) -> u64;
        fn has_ref_policy(self: &Self) -> bool;
        fn freeze_ref_policy(self: &mut Self) -> Result<()>;
        fn mix_ref_policy(self: &mut Self, alpha: f64) -> Result<()>;
        fn begin(self: &mut Self) -> Result<()>;
        fn commit(self: &mut Self) -> ();
        fn roll_back(self: &mut Self) -> Result<()>;
        fn export(self: &Self, group: StateGroup, sink: &mut dyn TensorSink) -> Result<()>;
        fn import_weights(self: &mut Self, weights: &dyn TensorSource) -> Result<()>;
        fn import(self: &mut Self, state: &PolicyState<'_>) -> Result<()>;
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_device_that_is_lost_in_a_step_leaves_a_run_that_the_named_command_goes_on_with() {
    let settings = [
        "warmup.steps=2",
        "warmup.batch_size=8",
        "grpo.max_steps=3",
        "grpo.prompts_per_step=4",
        "loss.entropy_coef=0.1", // a gradient at every step
        "eval.num_problems=4",
        "eval.eval_steps=0",
        "run.save_steps=1",
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run");
    let layers = Layers::new().file(tiny().as_ref()).expect("the configuration is read");
    let layers = layers.set(&settings.map(str::to_owned)).expect("the settings are legal");
    let host = TrainConfig::from_layers(layers).expect("the configuration is legal");

    // The weights of the seed, on XLA's CPU.
    let mut parts = grpo_setup::parts(&host).expect("the parts of the host");
    let mut weights = Vec::new();
    parts.policy.export_model(&mut weights).expect("the weights of the host");
    let installed = install(Kind::Cpu, |_| {}).expect("the plugin can be installed");
    let runtime = Runtime::open(Kind::Cpu, Some(&installed.path)).expect("the CPU opens");
    let quick = grpo_testkit::xla_cpu::QUICK.iter();
    let runtime = quick.fold(runtime, |runtime, (flag, value)| runtime.with_compile_flag(flag, *value));
    let (shape, options) = (host.model.shape().expect("a new model"), PjrtPolicyOptions::default());
    let policy = PjrtPolicy::from_tensors(&runtime, shape, &weights, host.loss(), options).expect("a policy");
    let mut config = host.clone();
    config.policy.device = grpo_run_config::PolicyDevice::PjrtCpu;
    parts.policy = Box::new(Lost { policy, steps: 0 });

    let trainer = Trainer::with_parts(config, parts).expect("a trainer");
    let mut run = Run::start_with(trainer, Some(&path)).expect("a run folder");
    let error = run.run(&mut (), &AtomicBool::new(false)).expect_err("the device is lost");
    drop(run);
    let text = error.to_string();
    assert!(matches!(error, grpo_run::Error::PolicyFailed { .. }), "{text}");
    assert_has(&text, &["running `", "is intact", "last good checkpoint is step-000001"]);
    let last = || names(&path.join("checkpoints")).into_iter().rfind(|name| name.starts_with("step-"));
    assert_eq!(last().as_deref(), Some("step-000001"));

    // The command that the error names.
    named_call(&text).quick_cpu().succeed();
    assert_eq!(last().as_deref(), Some("step-000003"));
    assert!(path.join("summary.json").exists());
}
