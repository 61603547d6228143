//! Coefficients that adapt during a run, and their state in a checkpoint.

use crate::error::Result;
use grpo_core::controllers::{AdaptiveEntropy, KlController};
use grpo_run_config::TrainConfig;
use serde::{Deserialize, Serialize};

/// The adaptive coefficients of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Coefficients {
    /// The coefficient of the KL penalty in the reward.
    pub(crate) kl: KlController,
    /// The coefficient of the entropy bonus, if it adapts.
    pub(crate) entropy: Option<AdaptiveEntropy>,
}

/// The state of a run's adaptive coefficients between two steps, without the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoefficientState {
    /// The coefficient of the KL penalty in the reward, if it adapts.
    pub kl_coef: Option<Exact>,
    /// The coefficient of the entropy bonus, if it adapts.
    pub entropy_coef: Option<Exact>,
    /// The mean entropy of the last optimizer step in nats, if the bonus depends on it.
    pub last_entropy: Option<Exact>,
}

/// A number that JSON stores exactly: it is written as text, because JSON readers may round numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Exact(pub f64);

impl From<Exact> for String {
    fn from(number: Exact) -> Self {
        number.0.to_string()
    }
}

impl TryFrom<String> for Exact {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        let number: f64 = text.parse().map_err(|_| format!("`{text}` is no number"))?;
        if number.is_finite() { Ok(Self(number)) } else { Err(format!("`{text}` is not finite")) }
    }
}

impl Coefficients {
    /// Returns the coefficients at the start of a run.
    pub(crate) fn new(config: &TrainConfig) -> Self {
        Self { kl: config.grpo.kl_ctrl.controller(), entropy: config.grpo.entropy_controller(&config.loss) }
    }

    /// Returns the state for a checkpoint.
    pub(crate) fn state(&self) -> CoefficientState {
        let moving = match &self.kl {
            KlController::Fixed(_) => None,
            KlController::Adaptive(kl) => Some(kl.kl_coef),
        };
        let entropy = self.entropy.as_ref();
        CoefficientState {
            kl_coef: moving.map(Exact),
            entropy_coef: entropy.map(|e| Exact(e.entropy_coef)),
            last_entropy: entropy.and_then(|e| e.last_entropy).map(Exact),
        }
    }

    /// Restores `state`, which a run with the same configuration saved.
    ///
    /// # Errors
    /// [`grpo_policy::Error::State`] if the state belongs to another configuration.
    pub(crate) fn with_state(mut self, state: &CoefficientState) -> Result<Self> {
        if let (KlController::Adaptive(kl), Some(saved)) = (&mut self.kl, state.kl_coef) {
            kl.kl_coef = saved.0;
        }
        if let (Some(entropy), Some(saved)) = (&mut self.entropy, state.entropy_coef) {
            entropy.entropy_coef = saved.0;
            entropy.last_entropy = state.last_entropy.map(|e| e.0);
        }
        // A part of `state` that this configuration does not have shows as a difference.
        let taken = self.state();
        if taken == *state {
            return Ok(self);
        }
        let expected = format!("those of the configuration, {taken:?}");
        Err(grpo_policy::Error::state("coefficients", expected, format!("{state:?}")).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_run_config::KlControlType;

    fn adaptive() -> Coefficients {
        let mut config = TrainConfig::built_in();
        config.grpo.kl_ctrl.r#type = KlControlType::Adaptive;
        config.grpo.use_adaptive_entropy = true;
        config.loss.entropy_coef = 0.25;
        Coefficients::new(&config)
    }

    #[test]
    fn coefficients_round_trip_through_json_bit_for_bit() {
        let mut moved = adaptive();
        // Numbers that a JSON reader gets wrong if it multiplies by powers of ten.
        for kl in [0.1 + 0.2, 1e-3 * 1.0000000000000002, 5e-324, 1.0 / 3.0, 9.007199254740993e22] {
            let KlController::Adaptive(controller) = &mut moved.kl else { panic!("an adaptive controller") };
            controller.kl_coef = kl;
            moved.entropy.as_mut().unwrap().last_entropy = Some(kl.sqrt());
            let state: CoefficientState =
                serde_json::from_str(&serde_json::to_string(&moved.state()).unwrap()).unwrap();
            assert_eq!(adaptive().with_state(&state).unwrap(), moved);
        }
        assert_eq!(moved.state().entropy_coef, Some(Exact(0.25)));
    }

    #[test]
    fn coefficients_of_another_configuration_are_refused() {
        let fixed = Coefficients::new(&TrainConfig::built_in());
        assert_eq!(fixed.state(), CoefficientState::default());
        assert!(fixed.clone().with_state(&adaptive().state()).is_err());
        assert!(adaptive().with_state(&fixed.state()).is_err());
        for text in ["\"one\"", "\"NaN\"", "1.5"] {
            assert!(serde_json::from_str::<Exact>(text).is_err(), "{text}");
        }
    }
}
