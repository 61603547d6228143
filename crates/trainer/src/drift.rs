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
    /// Looks at the mismatch metrics of a step. `max_staleness` is the number of steps that completions may be behind.
    pub(crate) fn watch(&mut self, report: &StepReport, max_staleness: u64) {
        let Some(mean) = report.metrics.value("sampling/sampling_logp_difference/mean") else { return };
        if mean < self.warned.map_or(LARGE, |warned| 2.0 * warned) {
            return;
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
        tracing::warn!(
            "step {}: the sampler's log-probabilities differ from the policy's by {mean:.3} nats per token \
             (sampling/sampling_logp_difference/mean), and much of the step may be masked or weighted down; {reason}",
            report.step
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_core::Metrics;

    #[test]
    fn each_doubling_of_a_large_difference_is_noticed_once() {
        let mut drift = Drift::default();
        let mut noticed = Vec::new();
        for mean in [0.01, 0.09, 0.11, 0.12, 0.21, 0.3, 0.5, 0.02] {
            let mut metrics = Metrics::default();
            metrics.mean("sampling/sampling_logp_difference/mean", mean, 1.0);
            let before = drift.warned;
            drift.watch(
                &StepReport {
                    step: 1,
                    metrics,
                    samples: vec![],
                    tokens: 0,
                    times: Default::default(),
                    speed: Default::default(),
                },
                0,
            );
            noticed.push(drift.warned != before);
        }
        assert_eq!(noticed, [false, false, true, false, false, true, false, false]);
        drift.watch(
            &StepReport {
                step: 1,
                metrics: Metrics::default(),
                samples: vec![],
                tokens: 0,
                times: Default::default(),
                speed: Default::default(),
            },
            0,
        );
        assert_eq!(drift.warned, Some(0.3));
    }
}
