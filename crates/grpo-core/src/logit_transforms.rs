//! Transforms between logits and the softmax, which a backend declares.

use crate::batch::TokenBatch;
use crate::config::LossConfig;

/// A transform of logits before the softmax, or of its result. A backend declares the transforms that it applies
/// ([`crate::Backend::applies`]); a loss that needs another one is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LogitTransform {
    /// [`LossConfig::temperature`] other than 1, in both modes.
    Temperature,
    /// Temperatures of single tokens ([`TokenBatch::with_temperatures`]).
    TokenTemperatures,
    /// [`LossConfig::logit_scale`] other than 1.
    LogitScale,
    /// [`LossConfig::final_logit_softcapping`].
    Softcap,
    /// The sampler's ids ([`TokenBatch::with_sampling_mask`]).
    SamplingMask,
}

impl LogitTransform {
    /// All transforms.
    pub const ALL: [Self; 5] =
        [Self::Temperature, Self::TokenTemperatures, Self::LogitScale, Self::Softcap, Self::SamplingMask];

    /// Returns `true` if `config` and `batch` need the transform.
    pub(crate) fn is_needed(self, config: &LossConfig, batch: Option<&TokenBatch>) -> bool {
        match self {
            Self::Temperature => config.temperature != 1.0,
            Self::LogitScale => config.logit_scale != 1.0,
            Self::Softcap => config.final_logit_softcapping.is_some(),
            Self::TokenTemperatures => batch.is_some_and(|batch| batch.temperatures().is_some()),
            Self::SamplingMask => batch.is_some_and(|batch| batch.sampling_mask().is_some()),
        }
    }

    /// Returns the setting that needs the transform.
    pub(crate) fn setting(self) -> &'static str {
        match self {
            Self::Temperature => "a temperature other than 1",
            Self::TokenTemperatures => "temperatures of tokens (TokenBatch::with_temperatures)",
            Self::LogitScale => "a logit_scale other than 1",
            Self::Softcap => "final_logit_softcapping",
            Self::SamplingMask => "a sampling mask (TokenBatch::with_sampling_mask)",
        }
    }
}
