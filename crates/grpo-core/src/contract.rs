//! Tests that every [`Backend`] must pass. Needs the feature `contract`; [`contract_tests!`](crate::contract_tests) runs them.
//!
//! Expected numbers come from a dense evaluation in f64 on the host, with derivatives of [`LossConfig::token_losses`]. Transforms of logits
//! are tested if the backend declares them ([`Backend::applies`]); if not, a loss that needs them must be refused.
//!
//! Legend: N tokens, H hidden size, V vocabulary.

use crate::batch::SamplingMask;
use crate::parity::{Comparison, Tolerances};
use crate::{
    Backend, CustomLoss, Dtype, Error, GradientSpec, Grads, GrpoLoss, GrpoLossBuilder, LogitTransform, LossConfig,
    LossOutput, PolicyInput, Scores, TemperatureMode, TokenBatch,
};

const N: usize = 9;
const H: usize = 6;
const V: usize = 17;
/// The row that the mask excludes.
const MASKED: usize = 5;

/// A backend that is tested.
pub trait Fixture {
    /// The backend.
    type Backend: Backend + Clone + 'static;

    /// Creates the backend.
    fn backend() -> Self::Backend;

    /// Returns the largest allowed differences for f32 inputs.
    fn tolerances() -> Tolerances {
        Tolerances::of(Dtype::F32).with_dlogits(Self::backend().dlogits(Dtype::F32))
    }
}

/// Runs every test of [`contract`](crate::contract) on a [`Fixture`](crate::contract::Fixture), or the tests behind `:`. A backend without
/// precomputed logits omits the tests of logits in this way.
///
/// ```
/// use grpo_backend_cpu::CpuBackend;
///
/// struct Cpu;
///
/// impl grpo_core::contract::Fixture for Cpu {
///     type Backend = CpuBackend;
///
///     fn backend() -> CpuBackend {
///         CpuBackend::new()
///     }
/// }
///
/// grpo_core::contract_tests!(Cpu);
/// ```
#[macro_export]
macro_rules! contract_tests {
    ($fixture:ty) => {
        $crate::contract_tests!(
            $fixture: losses_and_gradients_match_a_dense_evaluation, logits_match_a_dense_evaluation,
            logits_are_overwritten_with_their_gradient, scores_equal_the_scores_of_the_loss_bit_for_bit,
            gradients_are_added, masked_rows_are_neither_read_nor_written, a_frozen_head_has_no_gradient,
            declared_transforms_of_logits_are_applied, undeclared_transforms_of_logits_are_refused,
            custom_losses_have_the_gradients_of_built_in_losses, batches_of_any_size_are_computed,
            wrong_arguments_are_errors_and_leave_gradients_unchanged,
        );
    };
    ($fixture:ty: $($test:ident),* $(,)?) => {
        $(
            #[test]
            fn $test() {
                $crate::contract::$test::<$fixture>();
            }
        )*
    };
}

/// A batch with a policy of hidden states, head and bias, and the logits of the same numbers.
struct Case {
    config: LossConfig,
    batch: TokenBatch,
    hidden: Vec<f32>,
    lm_head: Vec<f32>,
    bias: Vec<f32>,
    logits: Vec<f32>,
}

/// Returns reproducible numbers in (-1, 1).
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32) - 1.0
    };
    (0..count).map(|_| next()).collect()
}

impl Case {
    fn new(config: LossConfig) -> Self {
        let targets = (0..N).map(|row| (row * 7 % V) as i64).collect();
        let mask: Vec<f32> = (0..N).map(|row| f32::from(u8::from(row != MASKED))).collect();
        let logps = |seed| numbers(N, seed).iter().map(|x| x * 0.4 - 2.8).collect::<Vec<_>>();
        let batch = TokenBatch::packed(targets, vec![0, 4, 7, N])
            .and_then(|batch| batch.with_mask(&mask))
            .and_then(|batch| batch.with_advantages(vec![1.0, -0.7, 0.4]))
            .and_then(|batch| batch.with_old_logp(logps(1)))
            .and_then(|batch| batch.with_ref_logp(logps(2)));
        let batch = batch.unwrap_or_else(|error| panic!("the batch of the contract: {error}"));
        let mut case = Self {
            config,
            batch,
            hidden: numbers(N * H, 3),
            lm_head: numbers(V * H, 4),
            bias: numbers(V, 5),
            logits: vec![0.0; N * V],
        };
        let rounded = (0..N).flat_map(|row| case.dense_logits(row)).map(|z| z as f32).collect();
        case.logits = rounded;
        case
    }

    fn builder(&self) -> GrpoLossBuilder {
        GrpoLoss::builder(self.config.clone()).head(H, V).bias().max_tokens(N)
    }

    fn policy(&self) -> PolicyInput<'_> {
        PolicyInput::head_with_bias(&self.hidden, &self.lm_head, &self.bias)
    }

    /// Returns the logits of a row, hidden x lm_head^T + bias.
    fn dense_logits(&self, row: usize) -> Vec<f64> {
        let product = |j: usize| -> f64 {
            (0..H).map(|k| f64::from(self.hidden[row * H + k]) * f64::from(self.lm_head[j * H + k])).sum()
        };
        (0..V).map(|j| product(j) + f64::from(self.bias[j])).collect()
    }

    /// Computes loss and gradients densely, from the hidden states or from the logits.
    fn expected(&self, from_logits: bool) -> Expected {
        let rows: Vec<Option<Row>> = (0..N).map(|row| self.row(row, from_logits)).collect();
        let per_row = |value: fn(&Row) -> f64| rows.iter().map(|row| row.as_ref().map_or(0.0, value) as f32).collect();
        let scores = Scores { logp: per_row(|row| row.logp), entropy: per_row(|row| row.entropy) };
        let losses = ok("token_losses", self.config.token_losses(&self.batch, &scores));
        let mut dlogits = vec![0.0; N * V];
        for (row, softmax) in rows.iter().enumerate().filter_map(|(row, softmax)| Some((row, softmax.as_ref()?))) {
            let (dlogp, dentropy) = (losses.dlogp[row] * softmax.logp_factor, losses.dentropy[row]);
            for (j, (p, slope)) in
                softmax.probabilities.iter().zip(&softmax.slopes).enumerate().filter(|(_, (p, _))| **p > 0.0)
            {
                let by_logp = f64::from(u8::from(j == softmax.target)) - p;
                let by_entropy = -p * (p.ln() + softmax.entropy);
                dlogits[row * V + j] = slope * (dlogp * by_logp + dentropy * by_entropy);
            }
        }
        let sum = |rows: usize, columns: usize, term: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
            (0..rows * columns).map(|i| term(i / columns, i % columns)).collect()
        };
        let dhidden = sum(N, H, &|n, k| (0..V).map(|j| dlogits[n * V + j] * f64::from(self.lm_head[j * H + k])).sum());
        let dlm_head = sum(V, H, &|j, k| (0..N).map(|n| dlogits[n * V + j] * f64::from(self.hidden[n * H + k])).sum());
        let dbias = sum(1, V, &|_, j| (0..N).map(|n| dlogits[n * V + j]).sum());
        Expected { loss: losses.loss.iter().sum(), scores, dhidden, dlm_head, dbias, dlogits }
    }

    /// Computes the distribution of a row; `None` if it is masked.
    fn row(&self, row: usize, from_logits: bool) -> Option<Row> {
        let (config, target) = (&self.config, usize::try_from(self.batch.targets()[row]).unwrap_or(0));
        if !self.batch.is_active(row) {
            return None;
        }
        let logits = match from_logits {
            true => self.logits[row * V..(row + 1) * V].iter().map(|z| f64::from(*z)).collect(),
            false => self.dense_logits(row),
        };
        let factors = config.temperature_factors(self.batch.temperature(row));
        let transformed = |z: &f64| {
            let scaled = config.logit_scale * z;
            let (value, slope) = match config.final_logit_softcapping {
                Some(cap) => (cap * (scaled / cap).tanh(), 1.0 - (scaled / cap).tanh().powi(2)),
                None => (scaled, 1.0),
            };
            (factors.logits * value, factors.logits * config.logit_scale * slope)
        };
        let (values, slopes): (Vec<f64>, Vec<f64>) = logits.iter().map(transformed).unzip();
        let is_kept = |j: usize| self.batch.kept(row).is_none_or(|ids| ids.contains(&(j as u32)));
        let weights: Vec<f64> = (0..V).map(|j| if is_kept(j) { values[j].exp() } else { 0.0 }).collect();
        let total: f64 = weights.iter().sum();
        let probabilities: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
        let entropy = -probabilities.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>();
        let logp = factors.logp * (values[target] - total.ln());
        Some(Row { target, logp, entropy, probabilities, slopes, logp_factor: factors.logp })
    }
}

/// The distribution of a row.
struct Row {
    target: usize,
    logp: f64,
    entropy: f64,
    probabilities: Vec<f64>,
    /// Derivative of each transformed logit by the logit.
    slopes: Vec<f64>,
    /// Factor of the log-softmax in `logp`.
    logp_factor: f64,
}

struct Expected {
    loss: f64,
    scores: Scores,
    dhidden: Vec<f64>,
    dlm_head: Vec<f64>,
    dbias: Vec<f64>,
    dlogits: Vec<f64>,
}

/// Loss functions that differ for a head: per token, with a ratio per sequence, with KL and entropy terms.
fn configurations() -> [LossConfig; 3] {
    let terms = |config: LossConfig| LossConfig { entropy_coef: 0.05, ..config.epsilon_high(0.28).beta(0.1) };
    [LossConfig::dapo().epsilon_high(0.28), terms(LossConfig::grpo()), terms(LossConfig::gspo())]
}

#[track_caller]
fn ok<T>(what: &str, result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("{what}: {error}"))
}

#[track_caller]
fn build<F: Fixture>(builder: GrpoLossBuilder) -> GrpoLoss {
    ok("build", builder.build(&F::backend()))
}

#[track_caller]
fn assert_close(what: &str, expected: &[f64], found: &[f32], floor: f64, tolerance: f64) {
    let found: Vec<f64> = found.iter().map(|value| f64::from(*value)).collect();
    let comparison = Comparison::new(what, expected, &found, floor, tolerance);
    assert!(comparison.passed(), "{comparison:?}");
}

#[track_caller]
fn assert_output<F: Fixture>(case: &Case, expected: &Expected, output: &LossOutput) {
    let (tolerances, scale) = (F::tolerances(), expected.loss.abs().max(1.0));
    assert!(
        (output.loss - expected.loss).abs() <= tolerances.loss * scale,
        "loss {} and {}",
        output.loss,
        expected.loss
    );
    let active = |values: &[f32]| case.batch.active_rows().iter().map(|row| values[*row]).collect::<Vec<_>>();
    let wide = |values: &[f32]| active(values).iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
    assert_close("logp", &wide(&expected.scores.logp), &active(&output.scores.logp), 1.0, tolerances.logp);
    assert_close("entropy", &wide(&expected.scores.entropy), &active(&output.scores.entropy), 1.0, tolerances.entropy);
}

#[track_caller]
fn assert_step<F: Fixture>(case: &Case) {
    let (expected, tolerances) = (case.expected(false), F::tolerances());
    let (output, grads) = ok("step", build::<F>(case.builder()).step_owned(case.policy(), &case.batch));
    assert_output::<F>(case, &expected, &output);
    let found = [("hidden", grads.hidden, &expected.dhidden), ("lm_head", grads.lm_head, &expected.dlm_head)];
    for (name, found, expected) in found.into_iter().chain([("bias", grads.bias, &expected.dbias)]) {
        assert_close(name, expected, &found.unwrap_or_default(), 0.0, tolerances.gradient);
    }
}

/// Loss, scores and gradients of hidden states, head and bias.
pub fn losses_and_gradients_match_a_dense_evaluation<F: Fixture>() {
    configurations().into_iter().for_each(|config| assert_step::<F>(&Case::new(config)));
}

/// Loss, scores and gradients of precomputed logits.
pub fn logits_match_a_dense_evaluation<F: Fixture>() {
    for config in configurations() {
        let (case, mut dlogits) = (Case::new(config), vec![0.0; N * V]);
        let loss = build::<F>(GrpoLoss::builder(case.config.clone()).logits(V));
        let (expected, output) = (case.expected(true), loss.step_logits(&case.logits, &case.batch, &mut dlogits));
        assert_output::<F>(&case, &expected, &ok("step_logits", output));
        assert_close("logits", &expected.dlogits, &dlogits, 0.0, F::tolerances().gradient);
    }
}

/// A step in place overwrites logits with their gradient, and masked rows with 0.
pub fn logits_are_overwritten_with_their_gradient<F: Fixture>() {
    let case = Case::new(configurations()[1].clone());
    let loss = build::<F>(GrpoLoss::builder(case.config.clone()).logits(V));
    let (expected, mut logits) = (case.expected(true), case.logits.clone());
    assert_output::<F>(&case, &expected, &ok("step", loss.step_logits_in_place(&mut logits, &case.batch)));
    assert_close("logits", &expected.dlogits, &logits, 0.0, F::tolerances().gradient);
    assert_eq!(logits[MASKED * V..(MASKED + 1) * V], [0.0; V], "the gradient of a masked row");
}

/// Scores equal the log-probabilities of the loss, so an on-policy ratio is exactly 1.
pub fn scores_equal_the_scores_of_the_loss_bit_for_bit<F: Fixture>() {
    let case = Case::new(LossConfig::dapo());
    let loss = build::<F>(case.builder());
    let scores = ok("score", loss.score_policy(case.policy(), &case.batch));
    let batch = ok("with_old_logp", case.batch.clone().with_old_logp(scores.logp.clone()));
    let (output, _) = ok("step", loss.step_owned(case.policy(), &batch));
    assert_eq!(output.scores.logp, scores.logp);
    assert_eq!(output.metrics.value("is_ratio/max"), Some(1.0));
}

/// A step adds to the buffers of the caller.
pub fn gradients_are_added<F: Fixture>() {
    let (case, tolerance) = (Case::new(LossConfig::dapo()), F::tolerances().gradient);
    let (expected, loss) = (case.expected(false), build::<F>(case.builder()));
    let (mut dhidden, mut dlm_head, mut dbias) = (vec![1.0; N * H], vec![1.0; V * H], vec![1.0; V]);
    let grads = Grads::new(&mut dhidden, &mut dlm_head).with_bias(&mut dbias);
    ok("step", loss.step_policy(case.policy(), &case.batch, grads));
    let found = [
        ("hidden", dhidden, expected.dhidden),
        ("lm_head", dlm_head, expected.dlm_head),
        ("bias", dbias, expected.dbias),
    ];
    for (name, found, expected) in found {
        let sums: Vec<f64> = expected.iter().map(|gradient| 1.0 + gradient).collect();
        assert_close(name, &sums, &found, 0.0, tolerance);
    }
}

/// NaN in a masked row has no effect, and its gradient does not change.
pub fn masked_rows_are_neither_read_nor_written<F: Fixture>() {
    let mut case = Case::new(LossConfig::dapo());
    let loss = build::<F>(case.builder());
    let (expected, _) = ok("step", loss.step_owned(case.policy(), &case.batch));
    case.hidden[MASKED * H..(MASKED + 1) * H].fill(f32::NAN);
    let (mut dhidden, mut dlm_head, mut dbias) = (vec![7.0; N * H], vec![0.0; V * H], vec![0.0; V]);
    let grads = Grads::new(&mut dhidden, &mut dlm_head).with_bias(&mut dbias);
    let output = ok("step", loss.step_policy(case.policy(), &case.batch, grads));
    assert_eq!((output.loss, output.scores.logp), (expected.loss, expected.scores.logp));
    assert_eq!(dhidden[MASKED * H..(MASKED + 1) * H], [7.0; H]);
    assert!(dlm_head.iter().chain(&dbias).all(|gradient| gradient.is_finite()));
}

/// A frozen head has no gradient, and the gradient of hidden states is the same.
pub fn a_frozen_head_has_no_gradient<F: Fixture>() {
    let case = Case::new(LossConfig::dapo());
    let loss = build::<F>(case.builder().gradients(GradientSpec { hidden: true, lm_head: false, bias: false }));
    let (_, grads) = ok("step", loss.step_owned(case.policy(), &case.batch));
    assert!(grads.lm_head.is_none() && grads.bias.is_none());
    let (found, expected) = (grads.hidden.unwrap_or_default(), case.expected(false));
    assert_close("hidden", &expected.dhidden, &found, 0.0, F::tolerances().gradient);
}

/// Returns cases that need `transform`.
fn needing(transform: LogitTransform) -> Vec<Case> {
    let with = |change: &dyn Fn(&mut LossConfig)| {
        let mut config = configurations()[1].clone();
        change(&mut config);
        Case::new(config)
    };
    let with_batch = |change: &dyn Fn(TokenBatch) -> Result<TokenBatch, Error>| {
        let mut case = Case::new(configurations()[1].clone());
        case.batch = ok("the batch of the contract", change(case.batch));
        case
    };
    match transform {
        LogitTransform::Temperature => [TemperatureMode::ScaleLogits, TemperatureMode::ScaleLogprobs]
            .map(|mode| with(&|config| (config.temperature, config.temperature_mode) = (0.7, Some(mode))))
            .into(),
        LogitTransform::LogitScale => vec![with(&|config| config.logit_scale = 1.7)],
        LogitTransform::Softcap => vec![with(&|config| config.final_logit_softcapping = Some(1.5))],
        LogitTransform::TokenTemperatures => vec![with_batch(&|batch| {
            let temperatures = (0..N).map(|row| 0.6 + 0.1 * row as f32).collect();
            batch.with_temperatures(temperatures)
        })],
        LogitTransform::SamplingMask => vec![with_batch(&|batch| {
            // Each token has its target and the two ids behind it; the first one has the whole vocabulary.
            let ids: Vec<u32> = batch.targets()[1..]
                .iter()
                .flat_map(|target| (0..3).map(move |next| (*target as u32 + next) % V as u32))
                .collect();
            let offsets: Vec<usize> = [0, 0].into_iter().chain((1..N).map(|row| 3 * row)).collect();
            batch.with_sampling_mask(SamplingMask::new(&offsets, &ids)?)
        })],
    }
}

/// The results change as declared.
pub fn declared_transforms_of_logits_are_applied<F: Fixture>() {
    for transform in LogitTransform::ALL.into_iter().filter(|transform| F::backend().applies(*transform)) {
        needing(transform).iter().for_each(assert_step::<F>);
    }
}

/// [`GrpoLoss`] refuses a loss that the backend would compute without the transform.
pub fn undeclared_transforms_of_logits_are_refused<F: Fixture>() {
    for transform in LogitTransform::ALL {
        for case in needing(transform) {
            let step = |loss: GrpoLoss| loss.step_owned(case.policy(), &case.batch);
            let result = case.builder().build(&F::backend()).and_then(step);
            match (F::backend().applies(transform), result) {
                (true, result) => drop(ok("a declared transform", result)),
                (false, result) => {
                    assert!(matches!(result, Err(Error::Unsupported { .. })), "{transform:?}: {result:?}")
                }
            }
        }
    }
}

/// A built-in loss has the same bits as a custom loss with its derivatives.
pub fn custom_losses_have_the_gradients_of_built_in_losses<F: Fixture>() {
    for config in configurations() {
        let case = Case::new(config);
        let loss = build::<F>(case.builder());
        let (expected, expected_grads) = ok("step", loss.step_owned(case.policy(), &case.batch));
        let (mut dhidden, mut dlm_head, mut dbias) = (vec![0.0; N * H], vec![0.0; V * H], vec![0.0; V]);
        let grads = Grads::new(&mut dhidden, &mut dlm_head).with_bias(&mut dbias);
        let built_in = |scores: &Scores| Ok(CustomLoss::from(case.config.token_losses(&case.batch, scores)?));
        let output = ok("step_with", loss.step_with(case.policy(), &case.batch, grads, built_in));
        assert_eq!(output.scores.logp, expected.scores.logp);
        assert!((output.loss - expected.loss).abs() <= F::tolerances().loss * expected.loss.abs().max(1.0));
        let tolerance = F::tolerances().gradient;
        let found =
            [(expected_grads.hidden, dhidden), (expected_grads.lm_head, dlm_head), (expected_grads.bias, dbias)];
        for (expected, found) in found {
            let expected: Vec<f64> = expected.unwrap_or_default().iter().map(|value| f64::from(*value)).collect();
            assert_close("gradient of a custom loss", &expected, &found, 0.0, tolerance);
        }
    }
}

/// Smaller and larger batches than planned, and fully masked ones.
pub fn batches_of_any_size_are_computed<F: Fixture>() {
    let case = Case::new(LossConfig::dapo());
    let loss = build::<F>(GrpoLoss::builder(case.config.clone()).head(H, V).bias().max_tokens(4));
    let (whole, _) = ok("step", loss.step_owned(case.policy(), &case.batch));
    let step = ok("prepare_step", case.config.prepare_step(&case.batch));
    let mut sum = 0.0;
    for sequence in 0..step.sequences() {
        let (rows, part) = (step.range(sequence), step.select_sequences(sequence..sequence + 1));
        let hidden = &case.hidden[rows.start * H..rows.end * H];
        let policy = PolicyInput::head_with_bias(hidden, &case.lm_head, &case.bias);
        sum += ok("step", loss.step_owned(policy, &ok("select_sequences", part))).0.loss;
    }
    assert!((sum - whole.loss).abs() <= F::tolerances().loss * whole.loss.abs().max(1.0), "{sum} and {}", whole.loss);
    let masked = ok("with_mask", case.batch.clone().with_mask(&[0.0; N]));
    let (output, grads) = ok("step", loss.step_owned(case.policy(), &masked));
    assert_eq!(output.loss, 0.0);
    assert!(grads.lm_head.unwrap_or_default().iter().all(|gradient| *gradient == 0.0));
}

/// Wrong lengths, targets outside the vocabulary and missing advantages.
pub fn wrong_arguments_are_errors_and_leave_gradients_unchanged<F: Fixture>() {
    let case = Case::new(LossConfig::dapo());
    let loss = build::<F>(case.builder());
    let (mut dhidden, mut dlm_head, mut dbias) = (vec![7.0; N * H], vec![7.0; V * H], vec![7.0; V]);
    let mut step = |policy: PolicyInput<'_>, batch: &TokenBatch| {
        let grads = Grads::new(&mut dhidden, &mut dlm_head).with_bias(&mut dbias);
        loss.step_policy(policy, batch, grads).map(drop)
    };
    let short = PolicyInput::head_with_bias(&case.hidden[H..], &case.lm_head, &case.bias);
    assert!(matches!(step(short, &case.batch), Err(Error::Shape { .. })), "hidden states of too few tokens");
    assert!(step(PolicyInput::head(&case.hidden, &case.lm_head), &case.batch).is_err(), "no bias");
    let packed = |targets| ok("packed", TokenBatch::packed(targets, vec![0, N]));
    let outside = ok("with_advantages", packed(vec![V as i64; N]).with_advantages(vec![1.0]));
    assert!(matches!(step(case.policy(), &outside), Err(Error::Value { .. })), "targets outside the vocabulary");
    assert_eq!(step(case.policy(), &packed(vec![0; N])), Err(Error::NoAdvantages));
    let unchanged = dhidden.iter().chain(&dlm_head).chain(&dbias).all(|gradient| *gradient == 7.0);
    assert!(unchanged, "gradients after an error");
}
