//! Writing configurations in Rust: the keys that are set most often, one after the other.

use super::{ImportanceSamplingLevel, KlEstimator, LossAggMode, LossConfig, Semantics};

macro_rules! setters {
    ($($(#[$doc:meta])* $key:ident: $type:ty = $value:expr,)*) => {
        /// The keys that are set most often; all others are fields.
        ///
        /// ```
        /// use grpo_core::{KlEstimator, LossConfig};
        ///
        /// let config = LossConfig::dapo().epsilon_high(0.28).beta(0.04).kl_estimator(KlEstimator::K3);
        /// assert_eq!(config.ratio_high(), 1.28);
        ///
        /// // Any other key, and those of single losses.
        /// let mut config = LossConfig { top_entropy_quantile: 0.2, ..LossConfig::sapo() };
        /// config.parameters.sapo.temperature_neg = 1.1;
        /// config.validate()?; // as every backend does before it plans
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
    /// Says whose meanings and defaults the keys have.
    semantics: Semantics = semantics,
    /// Sets the level of the importance ratio.
    importance_sampling_level: ImportanceSamplingLevel = Some(importance_sampling_level),
    /// Sets the lower clip: the ratio is held above 1 - epsilon_low.
    epsilon_low: f64 = Some(epsilon_low),
    /// Sets the upper clip: the ratio is held below 1 + epsilon_high (TRL's cispo: below epsilon_high).
    epsilon_high: f64 = Some(epsilon_high),
    /// Sets the cap on the ratio that the clip leaves open above (two-sided clipping).
    delta: f64 = Some(delta),
    /// Sets c of the dual clip: with a negative advantage the loss is at most -A c.
    clip_ratio_c: f64 = Some(clip_ratio_c),
    /// Sets the weight of the KL term to the reference; above 0 the batch needs `ref_logp`.
    beta: f64 = beta,
    /// Sets the estimator of the KL term.
    kl_estimator: KlEstimator = kl_estimator,
    /// Sets the weight of the entropy bonus.
    entropy_coef: f64 = entropy_coef,
    /// Sets the temperature T that completions were sampled at.
    temperature: f64 = temperature,
    /// Sets verl's aggregation.
    loss_agg_mode: LossAggMode = Some(loss_agg_mode),
    /// Sets the constant length of dr_grpo, in tokens.
    max_completion_length: usize = Some(max_completion_length),
}
