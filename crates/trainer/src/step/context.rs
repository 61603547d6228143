//! The inputs and state of a step.

use crate::ahead::Ahead;
use crate::coefficients::Coefficients;
use crate::parts::Parts;
use crate::updates::Updates;
use grpo_core::LossConfig;
use grpo_rewards::Failures;
use grpo_run_config::TrainConfig;

/// The inputs and state of a step.
pub(crate) struct StepContext<'a> {
    pub(crate) config: &'a TrainConfig,
    /// The configuration of the loss, from [`TrainConfig::loss`].
    pub(crate) loss: &'a LossConfig,
    /// The policy needs a reference policy if a KL to it is configured.
    pub(crate) parts: &'a mut Parts,
    /// Counts of consecutive failures of reward functions, over all steps.
    pub(crate) failures: &'a mut Failures,
    pub(crate) updates: &'a mut Updates,
    pub(crate) coefficients: &'a mut Coefficients,
    /// Batches that are sampled in the background.
    pub(crate) ahead: &'a mut Ahead,
}
