//! Rewards that fail while a run runs.

use super::*;
use rewards::RewardFailure;

/// Judges until it is told to fail.
struct Judge(Arc<AtomicBool>);

impl RewardFn for Judge {
    fn name(&self) -> &str {
        "judge"
    }
    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        Some(input.completion_len as f32)
    }
    fn score_batch(&self, inputs: &[RewardInput<'_>]) -> Vec<std::result::Result<Option<f32>, RewardFailure>> {
        let fails = self.0.load(Ordering::Relaxed);
        let score = |input| if fails { Err(RewardFailure::new("no connection")) } else { Ok(self.score(input)) };
        inputs.iter().map(score).collect()
    }
}

#[test]
fn a_reward_that_fails_too_often_ends_the_run_with_a_checkpoint_that_it_goes_on_from() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let mut config = config();
    (config.run.save_steps, config.run.log_completions_steps) = (0, 1);
    // A step has four completions, so it is the second one that fails which ends the run.
    config.rewards.max_consecutive_failures = 8;
    let fails = Arc::new(AtomicBool::new(false));
    let parts = || Parts {
        rewards: Rewards::from_terms(vec![(Box::new(Judge(Arc::clone(&fails))), 1.0)]).unwrap(),
        ..Parts::from_config(&config).unwrap()
    };
    let mut run = Run::start_with(Trainer::with_parts(config.clone(), parts()).unwrap(), Some(&path)).unwrap();
    let fail = || fails.store(true, Ordering::Relaxed);
    let error = run.run(&mut After("Grpo 1", &fail), &AtomicBool::new(false)).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::RewardsFailed { .. }), "{text}");
    assert!(text.contains("`judge`") && text.contains("no connection"), "{text}");
    assert!(
        text.contains("step-000002") && text.contains(&format!("grpo train --resume {}", path.display())),
        "{text}"
    );
    assert!(path.join("checkpoints/step-000002/model.safetensors").exists() && path.join("curves.svg").exists());
    let rows: Vec<MetricsRow> = read_rows(&path.join("metrics.jsonl")).unwrap();
    let steps: Vec<_> = rows.iter().filter(|row| row.phase == RowKind::Grpo).collect();
    assert_eq!(steps.iter().map(|row| row.get("rewards/judge/failures")).collect::<Vec<_>>(), [None, Some(4.0)]);
    let samples = std::fs::read_to_string(path.join("completions.jsonl")).unwrap();
    assert!(samples.contains("\"reward_failures\":[\"judge: no connection\"]"), "{samples}");
}
