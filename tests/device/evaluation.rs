//! Calls of plans, and comparisons with the oracle.

use grpo_backend_cpu::oracle::Evaluation;
use grpo_backend_tpu::PjrtBackend;
use grpo_core::parity::{Comparison, Tolerances, Values};
use grpo_core::{Dtype, GradientSpec, GradsMut, LossConfig, LossPlan, Metrics, PlanRequest, Scores};
use grpo_testkit::Case;
use grpo_testkit::margin::{assert_below, assert_below_without_margin};

/// Results of calls; gradients include the initial content of the buffers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Output {
    pub(crate) loss: f64,
    pub(crate) scores: Scores,
    pub(crate) metrics: Metrics,
    pub(crate) hidden: Option<Vec<f32>>,
    pub(crate) lm_head: Option<Vec<f32>>,
    pub(crate) bias: Option<Vec<f32>>,
}

/// Returns the initial content of a gradient's buffer, in proportion to the largest expected entry.
fn begun(largest: f64, elements: usize) -> Vec<f32> {
    (0..elements).map(|i| (largest * ((i * 5 % 7) as f64 - 3.0) / 6.0) as f32).collect()
}

/// Returns the largest magnitude.
pub(crate) fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |m, x| m.max(x.abs()))
}

impl Output {
    /// Creates nonzero buffers for the gradients in `spec`.
    pub(crate) fn begin(expected: &Evaluation<f64>, spec: GradientSpec) -> Self {
        let buffer = |wanted: bool, list: &[f64]| wanted.then(|| begun(largest(list), list.len()));
        Self {
            hidden: buffer(spec.hidden, &expected.grad_hidden),
            lm_head: buffer(spec.lm_head, &expected.grad_lm_head),
            bias: buffer(spec.bias, &expected.grad_bias),
            ..Self::default()
        }
    }

    pub(crate) fn grads(&mut self) -> GradsMut<'_> {
        GradsMut {
            hidden: self.hidden.as_mut().map(Into::into),
            lm_head: self.lm_head.as_mut().map(Into::into),
            bias: self.bias.as_mut().map(Into::into),
            logits: None,
        }
    }

    /// Adds the results of a call.
    pub(crate) fn add(&mut self, plan: &mut dyn LossPlan, case: &Case) {
        let result = plan.value_and_grad(case.policy(), &case.batch, self.grads()).unwrap();
        self.loss += result.loss;
        self.scores = result.scores;
        self.metrics.merge(&result.metrics);
    }

    fn values(&self) -> Values {
        let wide = |list: &[f32]| list.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        Values {
            loss: Some(self.loss),
            logp: Some(wide(&self.scores.logp)),
            entropy: Some(wide(&self.scores.entropy)),
            grad_hidden: self.hidden.as_deref().map(wide),
            grad_lm_head: self.lm_head.as_deref().map(wide),
            grad_bias: self.bias.as_deref().map(wide),
            grad_logits: None,
        }
    }

    /// Compares everything with the oracle within `tolerances`; the buffers initially held `begin`.
    pub(crate) fn assert_is(
        &self,
        name: &str,
        case: &Case,
        expected: &Evaluation<f64>,
        begin: &Self,
        tolerances: &Tolerances,
    ) {
        let sum = |list: &[f64], begin: &Option<Vec<f32>>| {
            begin.as_ref().map(|b| b.iter().zip(list).map(|(b, g)| f64::from(*b) + g).collect::<Vec<_>>())
        };
        let truth = Values {
            loss: Some(expected.loss),
            logp: Some(expected.logp.clone()),
            entropy: Some(expected.entropy.clone()),
            grad_hidden: sum(&expected.grad_hidden, &begin.hidden),
            grad_lm_head: sum(&expected.grad_lm_head, &begin.lm_head),
            grad_bias: sum(&expected.grad_bias, &begin.bias),
            grad_logits: None,
        };
        let active = case.batch.active_rows();
        let comparisons = truth.compare(&self.values(), active, expected.magnitude, tolerances);
        assert_eq!(comparisons.len(), 3 + [&begin.hidden, &begin.lm_head, &begin.bias].iter().flat_map(|b| *b).count());
        report(name, &comparisons);
        for i in (0..case.tokens()).filter(|i| !case.batch.is_active(*i)) {
            assert_eq!((self.scores.logp[i], self.scores.entropy[i]), (0.0, 0.0), "{name}: scores of masked token {i}");
            if let (Some(found), Some(begin)) = (&self.hidden, &begin.hidden) {
                let row = i * case.h..(i + 1) * case.h;
                assert_eq!(found[row.clone()], begin[row], "{name}: gradient of masked token {i}");
            }
        }
        assert_metrics(name, &self.metrics, &expected.metrics);
    }
}

/// Prints the largest differences, and fails if one is too large.
pub(crate) fn report(name: &str, comparisons: &[Comparison]) {
    for c in comparisons {
        assert_within(&format!("{name}, {}", c.name), c.max_rel, c.tolerance);
        assert!(c.passed(), "{name}: {c:#?}");
    }
}

/// Fails if `off` exceeds `bound`. A bound of at least 2^-8 is the rounding of results to bf16, and needs no margin.
pub(crate) fn assert_within(what: &str, off: f64, bound: f64) {
    if bound < 1.0 / 256.0 {
        assert_below(what, off, bound);
    } else {
        assert_below_without_margin(what, off, bound, "results are rounded to bf16 on every processor");
    }
}

/// Asserts equal names, sums and counts.
pub(crate) fn assert_metrics(name: &str, found: &Metrics, expected: &Metrics) {
    let names = |metrics: &Metrics| metrics.values().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{name}");
    for (metric, value) in expected.values() {
        let off = found.value(metric).unwrap() - value;
        assert_below(&format!("{name}, {metric}"), off.abs(), 1e-5);
    }
}

/// Evaluates `case` with `plan` and checks that loss, scores, metrics and gradients (added to the buffers) match the oracle, that
/// `score` and the loss return the same scores, and that masked tokens are unchanged.
pub(crate) fn check(name: &str, plan: &mut dyn LossPlan, case: &Case, loss: &LossConfig, spec: GradientSpec) -> Output {
    let expected = case.oracle(loss);
    for (what, list, wanted) in
        [("hidden", &expected.grad_hidden, spec.hidden), ("lm_head", &expected.grad_lm_head, spec.lm_head)]
    {
        assert!(!wanted || largest(list) > 1e-3, "{name}: a gradient of {what} that is next to nothing proves nothing");
    }
    let begin = Output::begin(&expected, spec);
    let mut output = begin.clone();
    output.add(plan, case);
    output.assert_is(name, case, &expected, &begin, &Tolerances::of(case.dtype()));
    assert_same(name, &plan.score(case.policy(), &case.batch).unwrap(), &output.scores);
    output
}

/// Like [`check`], for a plan of `backend`.
pub(crate) fn check_on(backend: &PjrtBackend, name: &str, case: &Case, request: &PlanRequest) {
    let mut plan = backend.plan_on_device(request).unwrap();
    check(name, &mut plan, case, &request.loss, request.gradients);
}

/// Computes the loss, and compares the results with `expected` within `tolerances`.
pub(crate) fn assert_matches(
    name: &str,
    plan: &mut dyn LossPlan,
    case: &Case,
    expected: &Evaluation<f64>,
    tolerances: &Tolerances,
) -> Output {
    let begin = Output::begin(expected, GradientSpec::default());
    let mut output = begin.clone();
    output.add(plan, case);
    output.assert_is(name, case, expected, &begin, tolerances);
    output
}

/// Asserts that `score` and the loss return the same for one input; log-probabilities, from which ratios are computed, bit for bit.
pub(crate) fn assert_same(name: &str, scored: &Scores, seen: &Scores) {
    assert_eq!(scored.logp, seen.logp, "{name}: score and loss see other log-probabilities");
    for (a, b) in scored.entropy.iter().zip(&seen.entropy) {
        // XLA may round a sum of products differently in two executables.
        assert!((a - b).abs() <= 2.0 * f32::EPSILON * b.abs(), "{name}: score and loss see entropies {a} and {b}");
    }
}

/// Both dtypes.
pub(crate) const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];
