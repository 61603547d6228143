//! The sections `optimizer` and `warmup.optimizer`: AdamW, its limits, and the learning rate schedule.

use grpo_policy::OptimizerSettings;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The shape of the learning rate after its linear warm-up, with the names and formulas of `transformers`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedulerType {
    /// The learning rate stays at `learning_rate`.
    Constant,
    /// Like `constant`: every schedule here starts with a warm-up.
    ConstantWithWarmup,
    /// The learning rate falls on a line to `min_lr_ratio x learning_rate`.
    #[default]
    Linear,
    /// The learning rate falls on half a cosine (`num_cycles` of 0.5) to `min_lr_ratio x learning_rate`.
    Cosine,
    /// Like `cosine`, to `min_lr` or to `min_lr_rate x learning_rate`; one of them must be set.
    CosineWithMinLr,
    /// The learning rate falls on half a cosine to 0, `num_cycles` (1) times.
    CosineWithRestarts,
    /// The learning rate falls to `lr_end` (1e-7) as the power `power` (1) of the share of remaining steps.
    Polynomial,
    /// The learning rate falls as 1 / sqrt(step), from `timescale` on: the warm-up steps, or 10 000 steps without a warm-up.
    InverseSqrt,
}

/// The parameters of a schedule, `lr_scheduler_kwargs` of `transformers`. A key of another schedule is refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LrSchedulerKwargs {
    /// The final learning rate of `cosine_with_min_lr`.
    pub min_lr: Option<f64>,
    /// The final learning rate of `cosine_with_min_lr`, relative to `learning_rate`.
    pub min_lr_rate: Option<f64>,
    /// The final learning rate of `polynomial`.
    pub lr_end: Option<f64>,
    /// The power of `polynomial`.
    pub power: Option<f64>,
    /// The number of waves of a cosine, or of restarts.
    pub num_cycles: Option<f64>,
    /// The number of steps of `inverse_sqrt`, counted from its peak, after which the learning rate is 1 / sqrt(2) of the largest one.
    pub timescale: Option<f64>,
}

impl LrSchedulerKwargs {
    /// Returns the keys that are set, each with the schedules that use it.
    pub(super) fn given(&self) -> impl Iterator<Item = (&'static str, f64, &'static [LrSchedulerType])> {
        use LrSchedulerType::{Cosine, CosineWithMinLr, CosineWithRestarts, InverseSqrt, Polynomial};
        let keys: [(_, _, &[_]); 6] = [
            ("min_lr", self.min_lr, &[CosineWithMinLr]),
            ("min_lr_rate", self.min_lr_rate, &[CosineWithMinLr]),
            ("lr_end", self.lr_end, &[Polynomial]),
            ("power", self.power, &[Polynomial]),
            ("num_cycles", self.num_cycles, &[Cosine, CosineWithMinLr, CosineWithRestarts]),
            ("timescale", self.timescale, &[InverseSqrt]),
        ];
        keys.into_iter().filter_map(|(key, value, of)| Some((key, value?, of)))
    }
}

/// An optimizer with clipping by the global norm and a learning rate schedule. The defaults are the values of TRL's `GRPOConfig`.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The largest learning rate.
    #[default(1e-6)]
    pub learning_rate: f64,
    /// The update rule and the limits of the gradient.
    #[serde(flatten)]
    pub settings: OptimizerSettings,
    /// The number of updates skipped in a row, at least 1, at which the run ends with an error.
    #[default(10)]
    pub max_consecutive_skips: u64,
    /// The share of all steps, in [0, 1], during which the learning rate rises from 0.
    pub warmup_ratio: f64,
    /// The number of updates during which the learning rate rises from 0; a value below 1 is a share of all updates. As in `transformers`, the
    /// first update has a learning rate of 0, which `warmup_ratio` avoids. Only one of the two keys may be set.
    pub warmup_steps: f64,
    /// The shape of the learning rate after that.
    pub lr_scheduler_type: LrSchedulerType,
    /// The parameters of the schedule, with the names of `transformers`.
    pub lr_scheduler_kwargs: LrSchedulerKwargs,
    /// The learning rate at which linear and cosine end, as a share of the largest one, in [0, 1].
    pub min_lr_ratio: f64,
}

impl OptimizerConfig {
    /// Returns the learning rate of the update after `step` updates of `total_steps`.
    ///
    /// ```
    /// let optimizer = grpo_run_config::OptimizerConfig { warmup_ratio: 0.1, ..Default::default() };
    /// assert_eq!(optimizer.learning_rate_at(10, 100), optimizer.learning_rate);
    /// ```
    pub fn learning_rate_at(&self, step: u64, total_steps: u64) -> f64 {
        let Self {
            learning_rate,
            warmup_ratio,
            warmup_steps,
            lr_scheduler_type,
            ref lr_scheduler_kwargs,
            min_lr_ratio,
            ..
        } = *self;
        let (step, total) = (step as f64, total_steps as f64);
        let (rise, first) = match warmup_steps {
            0.0 => ((warmup_ratio * total).ceil(), 1.0),
            share if share < 1.0 => ((share * total).ceil(), 0.0),
            steps => (steps.trunc(), 0.0),
        };
        if step < rise {
            return learning_rate * (step + first) / rise;
        }
        let done = ((step - rise) / (total - rise).max(1.0)).min(1.0);
        let LrSchedulerKwargs { min_lr, min_lr_rate, lr_end, power, num_cycles, timescale } = *lr_scheduler_kwargs;
        let wave = |cycles: f64| (0.5 * (1.0 + (std::f64::consts::TAU * cycles * done).cos())).max(0.0);
        let (share, least) = match lr_scheduler_type {
            LrSchedulerType::Constant | LrSchedulerType::ConstantWithWarmup => return learning_rate,
            LrSchedulerType::Linear => (1.0 - done, min_lr_ratio),
            LrSchedulerType::Cosine => (wave(num_cycles.unwrap_or(0.5)), min_lr_ratio),
            LrSchedulerType::CosineWithMinLr => {
                let least = min_lr.map(|min_lr| min_lr / learning_rate).or(min_lr_rate).unwrap_or(min_lr_ratio);
                (wave(num_cycles.unwrap_or(0.5)), least)
            }
            LrSchedulerType::CosineWithRestarts if done >= 1.0 => (0.0, min_lr_ratio),
            LrSchedulerType::CosineWithRestarts => {
                let place = (num_cycles.unwrap_or(1.0) * done).fract();
                (0.5 * (1.0 + (std::f64::consts::PI * place).cos()), min_lr_ratio)
            }
            LrSchedulerType::Polynomial => {
                let end = lr_end.unwrap_or(1e-7);
                return (learning_rate - end) * (1.0 - done).powf(power.unwrap_or(1.0)) + end;
            }
            LrSchedulerType::InverseSqrt => {
                let scale = timescale.unwrap_or(if rise > 0.0 { rise } else { 10_000.0 });
                return learning_rate / ((step + scale - rise) / scale).sqrt();
            }
        };
        learning_rate * (least + (1.0 - least) * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schedule_rises_then_falls_to_its_floor() {
        let with = |lr_scheduler_type| {
            let config = OptimizerConfig {
                learning_rate: 1.0,
                warmup_ratio: 0.1,
                min_lr_ratio: 0.2,
                lr_scheduler_type,
                ..Default::default()
            };
            move |step| config.learning_rate_at(step, 100)
        };
        let cosine = with(LrSchedulerType::Cosine);
        assert!((cosine(0) - 0.1).abs() < 1e-12);
        assert_eq!(cosine(10), 1.0);
        assert!((cosine(55) - 0.6).abs() < 1e-12);
        assert!((cosine(100) - 0.2).abs() < 1e-12);
        assert!((cosine(1000) - 0.2).abs() < 1e-12);
        assert!((with(LrSchedulerType::Linear)(55) - 0.6).abs() < 1e-12);
        assert_eq!(with(LrSchedulerType::Constant)(99), 1.0);
    }

    #[test]
    fn settings_of_the_rule_stand_in_the_section_and_unknown_keys_are_refused() {
        let read = |text: &str| serde_json::from_str::<OptimizerConfig>(text);
        let config = read(r#"{"learning_rate": 0.5, "adam_beta1": 0.8}"#).unwrap();
        assert_eq!((config.learning_rate, config.settings.adam_beta1, config.settings.adam_beta2), (0.5, 0.8, 0.999));
        assert_eq!(read(&serde_json::to_string(&config).unwrap()).unwrap(), config);
        let error = read(r#"{"adam_beta3": 0.8}"#).unwrap_err().to_string();
        assert!(error.contains("unknown field `adam_beta3`"), "{error}");
    }

    /// `[name, keys, learning rates]` from `transformers.get_scheduler` (tests/golden/schedules.py).
    #[test]
    fn learning_rates_match_transformers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/schedules.json");
        #[derive(Deserialize)]
        struct Case {
            settings: OptimizerConfig,
            total_steps: u64,
            learning_rates: Vec<f64>,
        }
        let cases: Vec<Case> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert!(cases.len() >= 20);
        for Case { settings, total_steps, learning_rates } in cases {
            settings.validate("optimizer").unwrap();
            for (step, want) in learning_rates.into_iter().enumerate() {
                let found = settings.learning_rate_at(step as u64, total_steps);
                assert!(
                    (found - want).abs() <= 1e-9 * settings.learning_rate,
                    "{settings:?}, step {step}: {found}, expected {want}"
                );
            }
        }
    }
}
