//! Checks of values and of their combinations.

use super::rejection::rejections;
use super::values::TEMPERATURES;
use super::{
    Bound, ImportanceSamplingLevel, KlImportance, LossAggMode, LossConfig, RolloutIs, SamplerMode, Semantics,
    Threshold, checks,
};
use crate::error::{Error, Result};

fn fail<T>(key: &str, message: impl Into<String>) -> Result<T> {
    Err(Error::of_key(key, message))
}

impl LossConfig {
    /// Checks every field and every combination.
    ///
    /// # Errors
    /// [`Error::Key`] with the key and the reason.
    pub fn validate(&self) -> Result<()> {
        self.validate_numbers()?;
        self.validate_objective()?;
        self.validate_sampler()?;
        self.validate_aggregation()
    }

    fn validate_numbers(&self) -> Result<()> {
        let bound = |bound: Option<Bound>| bound.and_then(Bound::value);
        let finite = [
            ("epsilon_low", self.epsilon_low),
            ("epsilon_high", self.epsilon_high),
            ("delta", self.delta),
            ("clip_ratio_c", self.clip_ratio_c),
            ("beta", Some(self.beta)),
            ("entropy_coef", Some(self.entropy_coef)),
            ("positive_example_nll_weight", Some(self.positive_example_nll_weight)),
            ("off_policy_mask_threshold", self.off_policy_mask_threshold),
            ("temperature", Some(self.temperature)),
            ("logit_scale", Some(self.logit_scale)),
            ("final_logit_softcapping", self.final_logit_softcapping),
        ];
        finite.into_iter().try_for_each(|(name, value)| checks::finite(name, value))?;
        let positive = [
            ("log_ratio_guard", bound(self.log_ratio_guard)),
            ("kl_input_clamp", bound(self.kl_input_clamp)),
            ("kl_output_clamp", bound(self.kl_output_clamp)),
            ("vllm_importance_sampling_clip_max", self.vllm_importance_sampling_clip_max),
            ("rollout_is_threshold", self.rollout_is_threshold.map(|threshold| threshold.high)),
            ("rollout_is_threshold", self.rollout_is_threshold.and_then(|threshold| threshold.low)),
            ("loss_scale_factor", self.loss_scale_factor),
        ];
        positive.into_iter().try_for_each(|(name, value)| checks::positive(name, value))?;
        self.parameters.check()?;
        let counts = [
            ("gradient_accumulation_steps", self.gradient_accumulation_steps),
            ("steps_per_generation", self.steps_per_generation.unwrap_or(1)),
            ("num_processes", self.num_processes),
            ("dp_size", self.dp_size),
            ("num_generations", self.num_generations.unwrap_or(1)),
            ("micro_batch_size", self.micro_batch_size.unwrap_or(1)),
        ];
        if let Some((name, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return fail(name, format!("{name} must be at least 1"));
        }
        let legal = 0.0..=self.traits().largest_epsilon_low;
        if let Some(epsilon) = self.epsilon_low.filter(|epsilon| !legal.contains(epsilon)) {
            return fail("epsilon_low", format!("epsilon_low must lie in [0, 1], got {epsilon}"));
        }
        if let Some(epsilon) = self.epsilon_high.filter(|e| *e < 0.0) {
            return fail("epsilon_high", format!("epsilon_high must not be negative, got {epsilon}"));
        }
        let weights = [("beta", self.beta), ("positive_example_nll_weight", self.positive_example_nll_weight)];
        if let Some((name, value)) = weights.iter().find(|(_, value)| *value < 0.0) {
            return fail(name, format!("{name} must not be negative, got {value}"));
        }
        if !(self.top_entropy_quantile > 0.0 && self.top_entropy_quantile <= 1.0) {
            return fail(
                "top_entropy_quantile",
                format!("top_entropy_quantile must lie in (0, 1], got {}", self.top_entropy_quantile),
            );
        }
        if self.temperature <= 0.0 {
            return fail(
                "temperature",
                format!(
                    "temperature must be above 0, got {}: greedy sampling has no log-probabilities to train on",
                    self.temperature
                ),
            );
        }
        if !TEMPERATURES.contains(&self.temperature) {
            return fail("temperature", format!("temperature must lie in [1e-6, 1e6], got {:e}", self.temperature));
        }
        if !TEMPERATURES.contains(&self.logit_scale.abs()) {
            return fail(
                "logit_scale",
                format!(
                    "logit_scale must lie in [1e-6, 1e6], or below 0 in [-1e6, -1e-6], got {:e}: 1 leaves logits as they are",
                    self.logit_scale
                ),
            );
        }
        if let Some(cap) = self.final_logit_softcapping.filter(|cap| !TEMPERATURES.contains(cap)) {
            return fail(
                "final_logit_softcapping",
                format!(
                    "final_logit_softcapping must lie in [1e-6, 1e6], got {cap:e}: leave it out for logits without a cap"
                ),
            );
        }
        Ok(())
    }

    fn validate_objective(&self) -> Result<()> {
        let name = self.loss_type.name();
        if self.traits().is_of_tokens_only && self.level() != ImportanceSamplingLevel::Token {
            return fail(
                "importance_sampling_level",
                format!(
                    "{name} is defined by token-level ratios: leave importance_sampling_level out, or set it to `token`"
                ),
            );
        }
        self.loss_type.check(self)?;
        if let Some(delta) = self.delta {
            if !self.clips_ratio() {
                return fail(
                    "delta",
                    format!("delta caps the ratio of the clipped objectives; {name} has none: leave it out"),
                );
            }
            if delta <= self.ratio_high() {
                return fail(
                    "delta",
                    format!(
                        "delta ({delta}) must be above 1 + epsilon_high ({}), else it would bind before the clip does",
                        self.ratio_high()
                    ),
                );
            }
        }
        if let Some(c) = self.clip_ratio_c {
            if self.dual_clip().is_none() && self.semantics != Semantics::Verl {
                return fail(
                    "clip_ratio_c",
                    format!("clip_ratio_c belongs to the clipped objectives and to dppo, not to {name}"),
                );
            }
            if c <= 1.0 {
                return fail("clip_ratio_c", format!("clip_ratio_c must be above 1, got {c}"));
            }
        }
        if self.kl_estimator.parts().1 && self.kl_importance() != KlImportance::Off && self.beta != 0.0 {
            return fail(
                "kl_estimator",
                "the estimators with a `+` have the gradient of k2, which a ratio would change: leave \
                 use_bias_correction_kl and kl_importance out, or take the estimator without the `+`",
            );
        }
        let corrects = |importance| importance == KlImportance::Ratio;
        if let (Some(flag), Some(importance)) = (self.use_bias_correction_kl, self.kl_importance)
            && flag != corrects(importance)
        {
            return fail(
                "use_bias_correction_kl",
                format!("use_bias_correction_kl is {flag} and contradicts kl_importance: set one of them"),
            );
        }
        Ok(())
    }

    fn validate_sampler(&self) -> Result<()> {
        let high = self.vllm_importance_sampling_clip_max.unwrap_or(f64::INFINITY);
        if let Some(low) = self.vllm_importance_sampling_clip_min.filter(|low| !(*low >= 0.0 && *low <= high)) {
            return fail(
                "vllm_importance_sampling_clip_min",
                format!(
                    "vllm_importance_sampling_clip_min ({low}) must lie between 0 and vllm_importance_sampling_clip_max ({high})"
                ),
            );
        }
        let Threshold { low, high } = self.rollout_is_threshold.unwrap_or(Threshold { low: None, high: 1.0 });
        let low = low.or((self.rollout_is == Some(RolloutIs::Icepop)).then_some(1.0 / high));
        if let Some(low) = low.filter(|low| *low > high) {
            return fail(
                "rollout_is_threshold",
                format!(
                    "rollout_is_threshold: the lower bound {low} is above the upper one, {high}; a single bound of icepop implies \
                 its reciprocal"
                ),
            );
        }
        let masks_sequences = self.vllm_importance_sampling_mode == SamplerMode::SeqMaskTis;
        if masks_sequences && self.rollout_is.is_none() && self.vllm_importance_sampling_clip_min.is_none() {
            return fail(
                "vllm_importance_sampling_mode",
                "seq_mask_tis bounds the geometric mean of a sequence, which is close to 1, on both sides: set \
                 vllm_importance_sampling_clip_min and clip_max (NeMo-RL suggests 0.999 and 1.002)",
            );
        }
        if self.rollout_is.is_some() && self.vllm_importance_sampling_correction == Some(true) {
            return fail(
                "rollout_is",
                "rollout_is and vllm_importance_sampling_correction correct the same thing: choose one",
            );
        }
        let of_token = self.vllm_importance_sampling_mode.is_of_tokens();
        if self.traits().takes_sampler_ratio && self.vllm_importance_sampling_correction == Some(true) && !of_token {
            return fail(
                "vllm_importance_sampling_mode",
                format!(
                    "{} includes the sampler's ratio in its own weight: vllm_importance_sampling_mode must be a mode per token, \
                 such as token_truncate",
                    self.loss_type.name()
                ),
            );
        }
        rejections(self).map(|_| ())
    }

    /// Returns the settings with the objective of a loss that names an average, under a name that takes `loss_agg_mode`.
    fn without_average(&self) -> &'static str {
        match (self.semantics, self.traits().level) {
            (Semantics::Verl, _) => self.traits().names_average.map_or("its own name", |_| "loss_type vanilla"),
            (_, ImportanceSamplingLevel::Token) => "loss_type grpo",
            _ => "loss_type grpo with importance_sampling_level sequence",
        }
    }

    fn validate_aggregation(&self) -> Result<()> {
        if self.max_completion_length == Some(0) {
            return fail("max_completion_length", "max_completion_length counts tokens and must be at least 1");
        }
        if let Some(instead) = self.traits().names_average
            && (self.semantics == Semantics::Verl || self.loss_agg_mode.is_some())
        {
            let name = self.loss_type.name();
            if self.semantics == Semantics::Verl {
                return fail(
                    "loss_type",
                    format!(
                        "loss_type {name} names an average, which verl sets with loss_agg_mode: use loss_type {instead}"
                    ),
                );
            }
            return fail(
                "loss_agg_mode",
                format!(
                    "loss_type {name} names an average, and loss_agg_mode names another one: leave loss_agg_mode out, or use {}",
                    self.without_average()
                ),
            );
        }
        let modes = [self.agg_mode(), self.kl_agg_mode];
        let takes_factor = modes.contains(&Some(LossAggMode::SeqMeanTokenSumNorm))
            || modes.contains(&Some(LossAggMode::SequenceMeanTokenSumNorm));
        // A loss that names an average refuses loss_agg_mode.
        let set_mode = |average: &str| match self.traits().names_average {
            Some(_) => format!("leave it out, or set loss_agg_mode to {average} and use {}", self.without_average()),
            None => format!("leave it out, or set loss_agg_mode to {average}"),
        };
        if self.loss_scale_factor.is_some() && self.semantics != Semantics::Verl && !takes_factor {
            let average = "seq-mean-token-sum-norm";
            return fail(
                "loss_scale_factor",
                format!("loss_scale_factor belongs to the average {average}: {}", set_mode(average)),
            );
        }
        for (mode, name, key, size) in [
            (LossAggMode::PromptMean, "prompt-mean", "num_generations", self.num_generations),
            (LossAggMode::TokenMeanLegacy, "token-mean-legacy", "micro_batch_size", self.micro_batch_size),
        ] {
            match (modes.contains(&Some(mode)), size) {
                (true, None) => {
                    return fail(key, format!("the average {name} is over groups of {key} sequences: set it"));
                }
                (false, Some(_)) => {
                    return fail(key, format!("{key} belongs to the average {name}: {}", set_mode(name)));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
