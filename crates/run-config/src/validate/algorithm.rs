//! Checks the settings around the loss: valid combinations, and features that this trainer lacks.

use crate::{Result, TrainConfig, check};
use grpo_core::advantages::{AdvantageEstimator as E, Whitening};
use grpo_core::objective::ValueLossConfig;

/// The maximum number of generation batches of a step.
const MAX_GENERATION_BATCHES: usize = 1 << 20;

impl TrainConfig {
    /// Checks advantages, the KL in the reward, dynamic sampling, the adaptive entropy bonus and the synced reference policy.
    pub(super) fn validate_algorithm(&self) -> Result<()> {
        self.validate_advantages()?;
        let grpo = &self.grpo;
        if grpo.use_kl_in_reward {
            let coef = grpo.kl_ctrl.kl_coef;
            check(coef.is_finite() && coef >= 0.0, "grpo.kl_ctrl.kl_coef", "a finite number >= 0", coef)?;
            // Checks target and horizon, and that a step is not too large for the horizon.
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
            filter.keep.filter(&[0.0; 0], grpo.num_generations)?;
            check(
                grpo.num_generations > 1 || !filter.keep.drop_zero_variance,
                "grpo.filter_groups.enable",
                "false: with grpo.num_generations 1 the rewards of every group are equal, and no group would be kept",
                true,
            )?;
        }
        if let Some(controller) = grpo.entropy_controller(&self.loss) {
            controller.validate()?;
        }
        if grpo.sync_ref_model {
            let adapters = "false with `lora`: the reference is the model without adapters, which does not move";
            check(self.lora.is_none(), "grpo.sync_ref_model", adapters, true)?;
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

    /// Checks that this trainer provides the inputs of the estimator.
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
        let per_token = match advantages.estimator {
            E::Gae => Some("gae gives one advantage per token"),
            E::Remax if self.grpo.use_kl_in_reward => {
                Some("remax gives one advantage per token where the KL is in the reward")
            }
            _ => None,
        };
        check(
            per_token.is_none() || advantages.whitening() != Whitening::Sequences,
            "grpo.advantages.whiten",
            &format!("tokens or none: {}", per_token.unwrap_or_default()),
            "sequences",
        )?;
        self.validate_values()?;
        check(
            !advantages.compares_within_groups() || self.grpo.num_generations > 1,
            "grpo.num_generations",
            "at least 2: these advantages compare the completions of one prompt",
            self.grpo.num_generations,
        )
    }

    /// Checks PPO's value loss: valid combinations, and that it is only set if values are trained.
    fn validate_values(&self) -> Result<()> {
        let (grpo, default) = (&self.grpo, ValueLossConfig::default());
        let Some(of_values) = grpo.value_loss() else {
            let owner = "left out: there are values with grpo.advantages.estimator gae only";
            check(grpo.vf_coef == default.vf_coef, "grpo.vf_coef", owner, grpo.vf_coef)?;
            let range = grpo.cliprange_value;
            return check(range == default.cliprange_value, "grpo.cliprange_value", owner, format!("{range:?}"));
        };
        of_values.validate()?;
        let loss = self.loss.loss_type;
        check(
            !loss.traits().is_of_sequences,
            "loss.loss_type",
            "a loss that has an advantage for each token, which is what gae gives",
            loss.name(),
        )
    }
}
