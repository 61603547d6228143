//! Checks the sampling settings of rollouts and evaluations.

use crate::{Error, Result, TrainConfig, check};
use grpo_policy::{LogitsProcessors, Sampling};

impl TrainConfig {
    /// Checks the sampling options of the sections `rollout` and `eval`, and the metrics that an evaluation computes from its samples.
    pub(super) fn validate_sampling(&self) -> Result<()> {
        let (rollout, eval) = (&self.rollout, &self.eval);
        let t = rollout.temperature();
        check(t.is_finite() && t > 0.0, "rollout.temperature", "a number above 0", t)?;
        validate_processors("rollout", &rollout.processors())?;
        if rollout.replay_sampling_mask {
            let penalty = rollout.repetition_penalty.unwrap_or(1.0);
            let expected = "1 with rollout.replay_sampling_mask: the loss is over the kept ids, but without a penalty";
            check(penalty == 1.0, "rollout.repetition_penalty", expected, penalty)?;
        }
        let t = eval.temperature.unwrap_or(t);
        check(t.is_finite() && t >= 0.0, "eval.temperature", "a number above 0, or 0 for greedy completions", t)?;
        let greedy = match eval.sampling(rollout, self.seed) {
            Sampling::Greedy => true,
            Sampling::Random { processors, .. } => {
                validate_processors("eval", &processors)?;
                false
            }
        };
        if let Some(penalty) = eval.repetition_penalty.filter(|penalty| greedy && *penalty != 1.0) {
            let expected = "left out with eval.temperature 0: greedy completions take logits as they are";
            check(false, "eval.repetition_penalty", expected, penalty)?;
        }
        let samples = eval.num_generations;
        for &k in &eval.pass_at {
            check(
                (1..=samples).contains(&k) && (k == 1 || !greedy),
                "eval.pass_at",
                &match greedy {
                    true => "nothing above 1 with eval.temperature 0: greedy completions of a problem are all the same"
                        .to_owned(),
                    false => {
                        format!("numbers from 1 to eval.num_generations, {samples}: k of so many samples are chosen")
                    }
                },
                k,
            )?;
        }
        Ok(())
    }
}

/// Checks the ranges of the options of a section.
fn validate_processors(section: &str, processors: &LogitsProcessors) -> Result<()> {
    processors.validate().map_err(|error| match error {
        grpo_policy::Error::Argument { operation, expected, found } => {
            Error::key(format!("{section}.{operation}"), expected, found)
        }
        other => other.into(),
    })
}
