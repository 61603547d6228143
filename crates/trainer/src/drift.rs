//! Watches how far the sampler's log-probabilities are from the policy's.

use crate::step::StepReport;

/// The mean difference in nats above which a run warns. Servers that compute in bf16 stay below it, old or wrong weights do not.
const LARGE: f64 = 0.1;

/// Warns when the mean difference is large, and again each time it has doubled.
#[derive(Default)]
pub(crate) struct Drift {
    /// The difference of the last warning.
    warned: Option<f64>,
}

impl Drift {
    /// Logs the [`Drift::warning`] of a step, if there is one.
    pub(crate) fn watch(&mut self, report: &StepReport, max_staleness: u64) {
        if let Some(warning) = self.warning(report, max_staleness) {
            tracing::warn!("{warning}");
        }
    }

    /// Returns the warning of a step for its mismatch metrics. `max_staleness` is the number of steps that completions may be behind.
    fn warning(&mut self, report: &StepReport, max_staleness: u64) -> Option<String> {
        let mean = report.metrics.value("sampling/sampling_logp_difference/mean")?;
        if mean < self.warned.map_or(LARGE, |warned| 2.0 * warned) {
            return None;
        }
        self.warned = Some(mean);
        let reason = match max_staleness {
            0 => {
                "the sampler should have the same weights: compare its dtype, its model and its temperature with the run's"
            }
            _ => {
                "completions are several steps old: lower rollout.max_staleness or the learning rate, or compare the sampler's dtype"
            }
        };
        Some(format!(
            "step {}: the sampler's log-probabilities differ from the policy's by {mean:.3} nats per token \
             (sampling/sampling_logp_difference/mean), and much of the step may be masked or weighted down; {reason}",
            report.step
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_core::Metrics;

    /// Returns the report of a step with this mean difference, or without one.
    fn report(step: u64, mean: Option<f64>) -> StepReport {
        let mut metrics = Metrics::default();
        if let Some(mean) = mean {
            metrics.mean("sampling/sampling_logp_difference/mean", mean, 1.0);
        }
        StepReport { step, metrics, samples: vec![], tokens: 0, times: Default::default(), speed: Default::default() }
    }

    #[test]
    fn each_doubling_of_a_large_difference_warns_once() {
        let mut drift = Drift::default();
        let means = [0.01, 0.09, 0.11, 0.12, 0.21, 0.3, 0.5, 0.02].map(Some).into_iter().chain([None]);
        let warnings = (1..).zip(means).filter_map(|(step, mean)| drift.warning(&report(step, mean), 0));
        let warnings: Vec<String> = warnings.collect();
        let begins: Vec<&str> = warnings.iter().filter_map(|warning| warning.split(" (").next()).collect();
        let of = |step, mean| {
            format!("step {step}: the sampler's log-probabilities differ from the policy's by {mean} nats per token")
        };
        assert_eq!(begins, [of(3, "0.110"), of(6, "0.300")]);
    }

    #[test]
    fn warnings_name_staleness_only_where_completions_may_be_old() {
        let [fresh, old] =
            [0, 1].map(|max_staleness| Drift::default().warning(&report(1, Some(0.2)), max_staleness).unwrap());
        assert!(fresh.contains("compare its dtype, its model and its temperature"), "{fresh}");
        assert!(!fresh.contains("max_staleness"), "{fresh}");
        assert!(old.contains("lower rollout.max_staleness"), "{old}");
    }
}
