//! Rewards, policies and devices that fail during the run.

use super::*;
use grpo_policy::{Completion, Policy, RolloutEngine, RolloutRequest};
use grpo_rewards::{RewardFailure, RewardFn, RewardInput, Rewards};
use std::sync::Arc;

/// A reward that fails once the flag is set.
struct Judge(Arc<AtomicBool>);

impl RewardFn for Judge {
    fn name(&self) -> &str {
        "judge"
    }
    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        Some(input.completion_len() as f32)
    }
    fn score_batch(&self, inputs: &[RewardInput<'_>]) -> Vec<std::result::Result<Option<f32>, RewardFailure>> {
        let fails = self.0.load(Ordering::Relaxed);
        let score = |input| if fails { Err(RewardFailure::new("no connection")) } else { Ok(self.score(input)) };
        inputs.iter().map(score).collect()
    }
}

/// Returns the error of a run whose parts fail after a row. `replace` replaces parts by ones that fail once its flag is set.
fn failed_after(
    config: TrainConfig,
    path: &Path,
    row: &'static str,
    replace: impl FnOnce(Arc<AtomicBool>, &mut Parts),
) -> Error {
    let fails = Arc::new(AtomicBool::new(false));
    let mut parts = grpo_setup::parts(&config).unwrap();
    replace(Arc::clone(&fails), &mut parts);
    let mut run = Run::start_with(Trainer::with_parts(config, parts).unwrap(), Some(path)).unwrap();
    run.run(&mut after(row, || fails.store(true, Ordering::Relaxed)), &AtomicBool::new(false)).unwrap_err()
}

#[test]
fn a_reward_that_fails_too_often_ends_the_run_with_a_checkpoint() {
    let (_folder, path) = run_path();
    let mut config = config();
    (config.run.save_steps, config.run.log_completions_steps) = (0, 1);
    // A step has four completions, so the second failing step ends the run.
    config.rewards.max_consecutive_failures = 8;
    let error = failed_after(config, &path, "Grpo 1", |fails, parts| {
        parts.rewards = Rewards::from_terms(vec![(Box::new(Judge(fails)), 1.0)]).unwrap();
    });
    let text = error.to_string();
    assert!(matches!(error, Error::RewardsFailed { .. }), "{text}");
    for words in ["`judge`", "no connection", "step-000002", &format!("grpo train --resume {}", path.display())] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(path.join("checkpoints/step-000002/model.safetensors").exists() && path.join("curves.svg").exists());
    let steps = metrics(&path).into_iter().filter(|row| row.phase == RowKind::Grpo);
    assert_eq!(steps.map(|row| row.get("rewards/judge/failures")).collect::<Vec<_>>(), [None, Some(4.0)]);
    let samples = std::fs::read_to_string(path.join("completions.jsonl")).unwrap();
    assert!(samples.contains("\"reward_failures\":[\"judge: no connection\"]"), "{samples}");
}

/// A generator that fails once the flag is set.
struct Device(Arc<AtomicBool>, fn() -> grpo_policy_pjrt::Error);

impl RolloutEngine for Device {
    fn generate(
        &mut self,
        policy: &mut dyn Policy,
        request: &RolloutRequest<'_>,
    ) -> grpo_policy::Result<Vec<Completion>> {
        match self.0.load(Ordering::Relaxed) {
            true => Err((self.1)().into()),
            false => policy.generate(request),
        }
    }
}

/// Returns the error of a run whose device fails after this row.
fn lost_after(config: TrainConfig, path: &Path, row: &'static str, error: fn() -> grpo_policy_pjrt::Error) -> Error {
    failed_after(config, path, row, |fails, parts| parts.engine = Box::new(Device(fails, error)))
}

#[test]
fn a_failing_device_ends_the_run_with_the_resume_command() {
    let (_folder, path) = run_path();
    let error = lost_after(config(), &path, "Grpo 3", || grpo_policy_pjrt::Error::Lost);
    assert!(matches!(error, Error::PolicyFailed { .. }), "{error}");
    let text = error.to_string();
    let command = format!("`grpo train --resume {} --from step-000002`", path.display());
    for words in ["lost the weights", "is intact", "last good checkpoint is step-000002", &command] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(path.join("curves.svg").exists() && !path.join("summary.json").exists());
    // The suggested command finishes the run, with the result of an undisturbed one.
    finish(&mut Run::resume(&path, Some("step-000002"), &[]).unwrap()).unwrap();
    assert_undisturbed(config(), &path);
}

#[test]
fn a_device_failure_before_the_first_checkpoint_starts_the_run_over() {
    let (_folder, path) = run_path();
    let mut config = config();
    config.run.save_steps = 0;
    let text = lost_after(config, &path, "Warmup 3", || grpo_policy_pjrt::Error::Lost).to_string();
    assert!(text.contains("no checkpoint yet") && text.contains("`grpo train --resume "), "{text}");
    finish(&mut resume(&path, &[]).unwrap()).unwrap();
}

#[test]
fn non_finite_logits_of_a_device_count_as_divergence() {
    let (_folder, path) = run_path();
    let not_finite = || grpo_policy_pjrt::Error::NotFinite { sample: 1, token: 2 };
    let error = lost_after(config(), &path, "Grpo 3", not_finite);
    assert!(matches!(error, Error::Diverged { .. }), "{error}");
    let text = error.to_string();
    for words in ["logits of sample 1", "last finite checkpoint is step-000002", "step-000002 --set optimizer"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}
