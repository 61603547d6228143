//! Setters for the most common keys of a configuration.

use super::{ImportanceSamplingLevel, KlEstimator, LossAggMode, LossConfig, Semantics};

macro_rules! setters {
    ($($(#[$doc:meta])* $key:ident: $type:ty = $value:expr,)*) => {
        /// Setters for the most common keys; the other keys are fields.
        ///
        /// ```
        /// use grpo_core::{KlEstimator, LossConfig};
        ///
        /// let config = LossConfig::dapo().epsilon_high(0.28).beta(0.04).kl_estimator(KlEstimator::K3);
        /// assert_eq!(config.ratio_high(), 1.28);
        ///
        /// // Other keys, and keys of single losses, are fields.
        /// let mut config = LossConfig { top_entropy_quantile: 0.2, ..LossConfig::sapo() };
        /// config.parameters.sapo.temperature_neg = 1.1;
        /// config.validate()?; // every backend does this before it plans
        /// # Ok::<(), grpo_core::Error>(())
        /// ```
        impl LossConfig {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $key(mut self, $key: $type) -> Self {
                    self.$key = $value;
                    self
                }
            )*
        }
    };
}

setters! {
    /// Sets the system whose meanings and defaults apply.
    semantics: Semantics = semantics,
    /// Sets the level of the importance ratio.
    importance_sampling_level: ImportanceSamplingLevel = Some(importance_sampling_level),
    /// Sets the lower clip: the ratio is clipped at 1 - epsilon_low.
    epsilon_low: f64 = Some(epsilon_low),
    /// Sets the upper clip: the ratio is clipped at 1 + epsilon_high (TRL's cispo: at epsilon_high).
    epsilon_high: f64 = Some(epsilon_high),
    /// Sets the cap on the ratio for negative advantages, which PPO's clip does not bound above (two-sided clipping).
    delta: f64 = Some(delta),
    /// Sets c of the dual clip: with a negative advantage the loss is at most -A c.
    clip_ratio_c: f64 = Some(clip_ratio_c),
    /// Sets the weight of the KL term to the reference policy; if it is not 0 the batch needs `ref_logp`.
    beta: f64 = beta,
    /// Sets the estimator of the KL term.
    kl_estimator: KlEstimator = kl_estimator,
    /// Sets the weight of the entropy bonus.
    entropy_coef: f64 = entropy_coef,
    /// Sets the temperature T at which completions were sampled.
    temperature: f64 = temperature,
    /// Sets verl's aggregation.
    loss_agg_mode: LossAggMode = Some(loss_agg_mode),
    /// Sets the constant length of dr_grpo, in tokens.
    max_completion_length: usize = Some(max_completion_length),
}
