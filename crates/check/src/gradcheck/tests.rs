//! Tests that gradcheck finds wrong gradients and accepts correct ones.

use super::problem::{Problem, Verdict};
use super::{CaseReport, Limits, Options, conclude, run};
use grpo_backend_cpu::CpuBackend;
use grpo_bench::config::BenchConfig;
use grpo_core::batch::TokenBatch;
use grpo_core::parity::Values;
use grpo_core::{
    Backend, Dtype, GradsMut, LogitTransform, LossOutput, LossPlan, MemoryReport, PlanRequest, PolicyInput, Result,
    Scores, TensorMut,
};
use grpo_files::Layers;
use rstest::rstest;

const SMALL: &str = "
name: small
shape: { batch: 3, tokens: 6, hidden: 5, vocab: 21 }
dtype: f32
loss: { beta: 0.1, entropy_coef: 0.05 }
variants: { fused: { gradients: { bias: true } } }
";

fn config(text: &str, set: &[&str]) -> BenchConfig {
    let layers = Layers::new().text("text", text).expect("YAML");
    let set: Vec<String> = set.iter().map(|set| (*set).to_owned()).collect();
    layers.set(&set).expect("legal").resolve().expect("a configuration")
}

fn problem(set: &[&str]) -> Problem {
    Problem::draw(&config(SMALL, set), true).expect("a problem")
}

fn failed(verdict: &Verdict) -> Vec<(&str, usize)> {
    let rows = verdict.rows.iter().filter(|row| !row.passed);
    rows.map(|row| (row.comparison.name.as_str(), row.comparison.at)).collect()
}

type Edit = fn(&mut [f64]);

/// Returns the index of the largest entry.
fn largest(values: &[f64]) -> usize {
    (0..values.len()).max_by(|a, b| values[*a].abs().total_cmp(&values[*b].abs())).expect("entries")
}

#[rstest]
#[case::grpo(&[])]
#[case::bnpo(&["loss.loss_type=bnpo", "loss.delta=1.4"])]
#[case::dr_grpo(&["loss.loss_type=dr_grpo", "loss.max_completion_length=9"])]
#[case::dapo(&["loss.loss_type=dapo", "loss.kl_estimator=k2", "loss.temperature=0.3"])]
#[case::cispo(&["loss.loss_type=cispo", "loss.epsilon_high=1.1"])]
#[case::gspo(&["loss.loss_type=gspo", "loss.epsilon_low=0.04", "loss.epsilon_high=0.05"])]
#[case::cispo_on_policy(&["loss.loss_type=cispo", "loss.epsilon_high=1.1", "inputs.on_policy=true"])]
#[case::gspo_on_policy(&["loss.loss_type=gspo", "inputs.on_policy=true"])]
// Exponents beyond 20 saturate, their derivatives do not.
#[case::saturated(&["inputs.old_logp_noise=12", "inputs.ref_logp_noise=12"])]
fn right_gradients_pass_and_wrong_ones_are_found(#[case] set: &[&str]) {
    let problem = problem(set);
    let right = &problem.oracle.values;
    let verdict = problem.differences(right).expect("differences");
    assert!(failed(&verdict).is_empty(), "{:#?}", verdict.rows);
    assert_eq!(verdict.rows.len(), 4);
    type Part = fn(&mut Values) -> &mut Option<Vec<f64>>;
    let parts: [(&str, Part); 3] = [
        ("grad_hidden", |v| &mut v.grad_hidden),
        ("grad_lm_head", |v| &mut v.grad_lm_head),
        ("grad_bias", |v| &mut v.grad_bias),
    ];
    let edits: [Edit; 3] = [|g| g[largest(g)] *= 1.0 + 1e-5, |g| g[7] += 1e-5 * g[largest(g)], |g| g.fill(0.0)];
    for (name, part) in parts {
        for edit in edits {
            let mut wrong = right.clone();
            edit(part(&mut wrong).as_mut().expect("the gradient is there"));
            let verdict = problem.differences(&wrong).expect("differences");
            let names: Vec<&str> = failed(&verdict).into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, [name]);
        }
    }
}

/// Every ratio is at or near a bound of the clip: a step in either direction leaves a branch.
#[rstest]
#[case::on_it(&["inputs.on_policy=true"])]
#[case::next_to_it(&["inputs.old_logp_noise=0"])]
fn kinks_do_not_fail_and_do_not_hide_wrong_gradients(#[case] set: &[&str]) {
    let problem = problem(&[set, &["loss.epsilon_low=0"]].concat());
    let verdict = problem.differences(&problem.oracle.values).expect("differences");
    assert!(failed(&verdict).is_empty(), "{:#?}", verdict.rows);
    assert!(verdict.kinks > 50, "{}", verdict.kinks);
    let mut wrong = problem.oracle.values.clone();
    wrong.grad_lm_head.as_mut().expect("a head")[33] += 1e-3;
    let verdict = problem.differences(&wrong).expect("differences");
    assert_eq!(failed(&verdict), [("grad_lm_head", 33)]);
    // With old log-probabilities rounded to f32, an implementation may take the other branch.
    let is_near = set.contains(&"inputs.old_logp_noise=0");
    assert_eq!(problem.notes().expect("notes").iter().any(|note| note.contains("rounding to f32")), is_near);
}

#[test]
fn sampled_entries_include_the_largest() {
    let problem = Problem::draw(&config(SMALL, &["shape.hidden=40", "variants.fused.gradients.bias=false"]), false);
    let problem = problem.expect("a problem");
    let mut wrong = problem.oracle.values.clone();
    let head = wrong.grad_lm_head.as_mut().expect("a head");
    let at = largest(head);
    head[at] *= 1.0 + 1e-5;
    let verdict = problem.differences(&wrong).expect("differences");
    assert_eq!(failed(&verdict), [("grad_lm_head", at)]);
    let entries: Vec<usize> = verdict.rows.iter().map(|row| row.comparison.entries).collect();
    assert!(matches!(entries[..], [1, 600 | 601, 600 | 601]), "{entries:?}");
    assert_eq!(verdict.notes.len(), 2, "{:?}", verdict.notes);
}

/// The CPU backend with a wrong gradient.
struct Wrong(Mistake);

struct WrongPlan(Box<dyn LossPlan>, Mistake);

type Mistake = fn(&mut [f32]);

impl Backend for Wrong {
    fn name(&self) -> &str {
        "wrong"
    }

    fn applies(&self, transform: LogitTransform) -> bool {
        CpuBackend::new().applies(transform)
    }

    fn plan(&self, request: &PlanRequest) -> Result<Box<dyn LossPlan>> {
        Ok(Box::new(WrongPlan(CpuBackend::new().with_dlogits(Dtype::F32).plan(request)?, self.0)))
    }
}

impl LossPlan for WrongPlan {
    fn score(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch) -> Result<Scores> {
        self.0.score(policy, batch)
    }

    fn value_and_grad(&mut self, policy: PolicyInput<'_>, batch: &TokenBatch, g: GradsMut<'_>) -> Result<LossOutput> {
        let GradsMut { hidden, lm_head: Some(TensorMut::F32(lm_head)), bias, logits } = g else {
            panic!("a gradient of the head on the host");
        };
        let grads = GradsMut { hidden, lm_head: Some(TensorMut::F32(&mut *lm_head)), bias, logits };
        let output = self.0.value_and_grad(policy, batch, grads)?;
        (self.1)(lm_head);
        Ok(output)
    }

    fn value_and_grad_in_place(&mut self, logits: TensorMut<'_>, batch: &TokenBatch) -> Result<LossOutput> {
        self.0.value_and_grad_in_place(logits, batch)
    }

    fn memory(&self) -> MemoryReport {
        self.0.memory()
    }
}

#[rstest]
fn implementation_with_a_wrong_gradient_fails(#[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype) {
    let config = BenchConfig { dtype, ..config(SMALL, &[]) };
    let problem = Problem::draw(&config, true).expect("a problem");
    let variant = config.variant("fused").expect("there");
    let mistakes: [(Mistake, &[&str]); 4] = [
        (|_| (), &[]),
        (|g| g[7] += 1e-3 * g.iter().fold(0.0, |m: f32, x| x.abs().max(m)), &["grad_lm_head"]),
        (|g| g.iter_mut().for_each(|x| *x *= 1.001), &["grad_lm_head"]),
        (|g| g.fill(0.0), &["grad_lm_head"]),
    ];
    for (mistake, expected) in mistakes {
        let rows = problem.implementation("fused", &variant, &Wrong(mistake)).expect("rows");
        let names: Vec<&str> = rows.iter().map(|row| row.comparison.name.as_str()).collect();
        assert_eq!(names, ["loss", "logp", "entropy", "grad_hidden", "grad_lm_head", "grad_bias"]);
        let found: Vec<&str> = rows.iter().filter(|row| !row.passed).map(|row| row.comparison.name.as_str()).collect();
        assert_eq!(found, expected, "{rows:#?}");
    }
}

fn only(config: &BenchConfig, options: &Options) -> CaseReport {
    let mut reports = run(config, options, |_| {}).expect("a report");
    assert_eq!(reports.len(), 1);
    reports.remove(0)
}

const MANY: &str = "
name: many
shape: { batch: 7, tokens: 500, hidden: 900, vocab: 5000 }
dtype: bf16
layout: hidden_vocab
variants:
  fused: { threads: 1, isa: portable }
  biased: { implementation: logits, gradients: { bias: true } }
  wide: { dtype: f32, implementation: reference }
  frozen: { gradients: { lm_head: false } }
  score: { pass: score }
  baseline: { implementation: reference, pass: materialised }
  rounded: { numerics: { logits: bf16 } }
  peer: { command: [nobody] }
";

#[test]
fn gradcheck_reduces_sizes_and_names_unchecked_variants() {
    let report = only(&config(MANY, &[]), &Options::default());
    assert!(report.passed, "{report:#?}");
    let full_shape = report.reduced_from.expect("reduced");
    assert_eq!((full_shape.batch, full_shape.vocab), (7, 5000));
    let shape = report.shape;
    assert_eq!((shape.batch, shape.tokens, shape.hidden, shape.vocab), (3, 8, Some(16), 96));
    let not_checked: Vec<&str> = report.not_checked.keys().map(String::as_str).collect();
    assert_eq!(not_checked, ["baseline", "peer", "rounded"]);
    let tensors = |name: &str| {
        let rows = report.inputs.iter().flat_map(|inputs| &inputs.rows).filter(|row| row.implementation == name);
        rows.map(|row| row.comparison.name.as_str()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(tensors("fused"), "loss logp entropy grad_hidden grad_lm_head");
    assert_eq!(tensors("biased"), "loss logp entropy grad_hidden grad_lm_head grad_bias");
    assert_eq!(tensors("wide"), tensors("fused"));
    assert_eq!(tensors("frozen"), "loss logp entropy grad_hidden");
    assert_eq!(tensors("score"), "logp entropy");
    assert_eq!(report.inputs.len(), 3, "bf16, bf16 with a bias, f32");

    let options = Options { variants: vec!["rounded".into(), "fused".into()], ..Options::default() };
    let report = only(&config(MANY, &[]), &options);
    assert!(!report.passed && report.failures[0].contains("`rounded`"), "{:?}", report.failures);
}

#[test]
fn gradcheck_of_precomputed_logits_in_place_or_added() {
    let text = "
name: logits
shape: { batch: 1, tokens: 5, hidden: null, vocab: 30 }
dtypes: [bf16, f32]
variants:
  in_place: { implementation: logits, pass: gradient_in_place }
  added: { implementation: logits }
";
    let options = Options { limits: Limits { vocab: 1000, ..Limits::default() }, ..Options::default() };
    let reports = run(&config(text, &[]), &options, |_| {}).expect("reports");
    assert_eq!(reports.iter().map(|report| report.name.as_str()).collect::<Vec<_>>(), ["logits-bf16", "logits-f32"]);
    for report in reports {
        assert!(report.passed && report.reduced_from.is_none(), "{report:#?}");
        let gradients = report.inputs[0].rows.iter().filter(|row| row.comparison.name == "grad_logits");
        assert_eq!(gradients.count(), 3, "of the oracle, and two variants");
    }
}

#[rstest]
#[case::no_logits("inputs.logit_std=0", "grad_hidden")]
#[case::one_entry("shape.vocab=1", "grad_bias")]
fn zero_expected_gradient_is_a_failure(#[case] set: &str, #[case] name: &str) {
    let report = only(&config(SMALL, &["loss.beta=0", "loss.entropy_coef=0", set]), &Options::default());
    assert!(!report.passed);
    let reported = report.failures.iter().find(|failure| failure.starts_with(name)).expect("a failure that names it");
    assert!(reported.contains("inputs.logit_std") && reported.contains("loss.epsilon_low"), "{reported}");
}

#[test]
fn gradcheck_without_a_checked_variant_is_a_failure() {
    let text = "variants: { peer: { command: [nobody] } }";
    let report = only(&config(text, &[]), &Options::default());
    assert!(!report.passed && report.failures[0].contains("no variant was checked"), "{report:#?}");
    let mut report = CaseReport { failures: vec![], passed: true, ..report };
    conclude(&mut report, &["peer".into()]);
    assert_eq!(report.failures.len(), 2, "{:?}", report.failures);
}
