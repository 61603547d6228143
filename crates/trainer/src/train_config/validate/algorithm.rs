//! What surrounds the loss: which settings go together, and which need what this trainer does not have.

use super::check;
use crate::error::Result;
use crate::train_config::TrainConfig;
use grpo_core::advantages::{AdvantageEstimator as E, Whitening};

/// The largest number of generation batches of a step.
const MAX_GENERATION_BATCHES: usize = 1 << 20;

impl TrainConfig {
    /// Advantages, the KL in the reward, dynamic sampling, the adaptive entropy bonus and the moving reference.
    pub(super) fn validate_algorithm(&self) -> Result<()> {
        self.validate_advantages()?;
        let grpo = &self.grpo;
        if grpo.use_kl_in_reward {
            let coef = grpo.kl_ctrl.kl_coef;
            check(coef.is_finite() && coef >= 0.0, "grpo.kl_ctrl.kl_coef", "a finite number >= 0", coef)?;
            // Target and horizon, and whether a step is too much for the horizon.
            grpo.kl_ctrl.controller().update(0.0, grpo.sequences())?;
        }
        if grpo.filter_groups.enable {
            let filter = &grpo.filter_groups;
            let batches = filter.max_num_gen_batches;
            check(
                (1..=MAX_GENERATION_BATCHES).contains(&batches),
                "grpo.filter_groups.max_num_gen_batches",
                &format!("1 to {MAX_GENERATION_BATCHES}: without a limit a policy that has collapsed samples for ever"),
                batches,
            )?;
            filter.keep.filter(&[], grpo.num_generations)?;
        }
        if let Some(controller) = grpo.entropy_controller(&self.loss) {
            controller.validate()?;
        }
        if grpo.sync_ref_model {
            check(
                self.needs_ref_policy(),
                "grpo.sync_ref_model",
                "a reference that could move: loss.beta other than 0, or grpo.use_kl_in_reward",
                "neither",
            )?;
            let alpha = grpo.ref_model_mixup_alpha;
            check((0.0..=1.0).contains(&alpha), "grpo.ref_model_mixup_alpha", "in [0, 1]", alpha)?;
            let steps = grpo.ref_model_sync_steps;
            check(steps > 0, "grpo.ref_model_sync_steps", "at least 1", steps)?;
        }
        Ok(())
    }

    /// Whether this trainer has what the estimator needs.
    fn validate_advantages(&self) -> Result<()> {
        let advantages = &self.grpo.advantages;
        check(
            advantages.reward_weights.is_empty(),
            "grpo.advantages.reward_weights",
            "nothing: the weights of reward functions are those of the section rewards",
            format!("{:?}", advantages.reward_weights),
        )?;
        advantages.validate()?;
        let missing = match advantages.estimator {
            E::Gae => Some("values of tokens, and this trainer has no critic"),
            E::OptimalTokenBaseline | E::TirOptimalTokenBaseline => {
                Some("sums of squared probabilities, and scoring gives log-probabilities and entropies only")
            }
            E::Gdpo if self.grpo.use_kl_in_reward => {
                Some("the reward of each function, of which a KL in the reward (grpo.use_kl_in_reward) is none")
            }
            _ => None,
        };
        check(
            missing.is_none(),
            "grpo.advantages.estimator",
            "an estimator that this trainer can feed",
            format!("{:?}, which needs {}", advantages.estimator, missing.unwrap_or_default()),
        )?;
        let per_token = advantages.estimator == E::Remax && self.grpo.use_kl_in_reward;
        check(
            !(per_token && advantages.whitening() == Whitening::Sequences),
            "grpo.advantages.whiten",
            "tokens or none: remax gives one advantage per token where the KL is in the reward",
            "sequences",
        )?;
        check(
            !advantages.compares_within_groups() || self.grpo.num_generations > 1,
            "grpo.num_generations",
            "at least 2: these advantages compare the completions of one prompt",
            self.grpo.num_generations,
        )
    }
}
