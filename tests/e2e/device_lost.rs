//! A device that is lost in the middle of a step: the run ends with the command that goes on, and the command goes on.

use crate::support::{grpo_with_quick_cpu, names, stderr, stdout, tiny};
use grpo_core::{LossOutput, Scores};
use grpo_files::Layers;
use grpo_run::Run;
use pjrt::install::{Kind, install};
use policy::{
    AdamWConfig, Completion, Policy, PolicyState, Result, RolloutRequest, SequenceBatch, StateGroup, StepLoss,
    TensorSink, TensorSource, UpdateReport, Weights,
};
use policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
use std::sync::atomic::AtomicBool;
use trainer::{Parts, TrainConfig, Trainer};

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
                self.policy.weights()?.buffers()[0].delete().expect("the buffer was there");
            }
        }
        self.policy.step(batches, loss, rate)
    }
    fn num_parameters(&self) -> usize {
        self.policy.num_parameters()
    }
    fn context_length(&self) -> usize {
        self.policy.context_length()
    }
    fn generate(&mut self, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        self.policy.generate(request)
    }
    fn score(&mut self, of: Weights, batches: &[SequenceBatch<'_>]) -> Result<Scores> {
        self.policy.score(of, batches)
    }
    fn accumulate(&mut self, batches: &[SequenceBatch<'_>], loss: StepLoss) -> Result<LossOutput> {
        self.policy.accumulate(batches, loss)
    }
    fn apply(&mut self, rate: f64) -> Result<UpdateReport> {
        self.policy.apply(rate)
    }
    fn skip(&mut self) -> Result<UpdateReport> {
        self.policy.skip()
    }
    fn reset_optimizer(&mut self, config: &AdamWConfig) -> Result<()> {
        self.policy.reset_optimizer(config)
    }
    fn optimizer_steps(&self) -> u64 {
        self.policy.optimizer_steps()
    }
    fn has_ref_policy(&self) -> bool {
        self.policy.has_ref_policy()
    }
    fn freeze_ref_policy(&mut self) -> Result<()> {
        self.policy.freeze_ref_policy()
    }
    fn mix_ref_policy(&mut self, alpha: f64) -> Result<()> {
        self.policy.mix_ref_policy(alpha)
    }
    fn begin(&mut self) -> Result<()> {
        self.policy.begin()
    }
    fn commit(&mut self) {
        self.policy.commit();
    }
    fn roll_back(&mut self) -> Result<()> {
        self.policy.roll_back()
    }
    fn export(&self, group: StateGroup, sink: &mut dyn TensorSink) -> Result<()> {
        self.policy.export(group, sink)
    }
    fn import_weights(&mut self, weights: &dyn TensorSource) -> Result<()> {
        self.policy.import_weights(weights)
    }
    fn import(&mut self, state: &PolicyState<'_>) -> Result<()> {
        self.policy.import(state)
    }
}

#[test]
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
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("run");
    let layers = Layers::new().file(&tiny()).expect("the configuration is read");
    let layers = layers.set(&settings.map(str::to_owned)).expect("the settings are legal");
    let host = TrainConfig::from_layers(layers).expect("the configuration is legal");

    // The weights of the seed, on XLA's CPU.
    let parts = Parts::from_config(&host).expect("the parts of the host");
    let mut weights = Vec::new();
    parts.policy.export_model(&mut weights).expect("the weights of the host");
    let installed = install(Kind::Cpu, |_| {}).expect("the plugin can be installed");
    let runtime = Runtime::open(Kind::Cpu, Some(&installed.path)).expect("the CPU opens");
    let quick = testkit::xla_cpu::QUICK.iter();
    let runtime = quick.fold(runtime, |runtime, (flag, value)| runtime.with_compile_flag(flag, *value));
    let (shape, options) = (host.model.shape().expect("a new model"), PjrtPolicyOptions::default());
    let policy = PjrtPolicy::from_tensors(&runtime, shape, &weights, host.loss(), options).expect("a policy");
    let mut config = host.clone();
    config.policy.device = run_config::PolicyDevice::PjrtCpu;
    let parts = Parts { policy: Box::new(Lost { policy, steps: 0 }), ..parts };

    let trainer = Trainer::with_parts(config, parts).expect("a trainer");
    let mut run = Run::start_with(trainer, Some(&path)).expect("a run folder");
    let error = run.run(&mut (), &AtomicBool::new(false)).expect_err("the device is lost");
    drop(run);
    let text = error.to_string();
    assert!(matches!(error, grpo_run::Error::PolicyFailed { .. }), "{text}");
    for words in ["running `", "is intact", "last good checkpoint is step-000001"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let last = || names(&path.join("checkpoints")).into_iter().rfind(|name| name.starts_with("step-"));
    assert_eq!(last().as_deref(), Some("step-000001"));

    // The command as it stands there.
    let (_, way) = text.split_once("`grpo ").expect("a command");
    let (way, _) = way.split_once('`').expect("its end");
    let way: Vec<&str> = way.split(' ').collect();
    let output = grpo_with_quick_cpu(&way).output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{way:?}\n{}{}", stdout(&output), stderr(&output));
    assert_eq!(last().as_deref(), Some("step-000003"));
    assert!(path.join("summary.json").exists());
}
