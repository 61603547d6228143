//! Inputs of one dtype with the oracle's results, and the comparisons of gradients.

use super::differences::{Differences, Point, gradient};
use crate::error::{Error, Result};
use crate::parity::{Evaluated, Row, call, call_in_place, oracle_at, widen, widened};
use grpo_backend_cpu::oracle;
use grpo_backend_tpu::aot::Variant;
use grpo_backend_tpu::program::Pass;
use grpo_bench::config::{BenchConfig, ShapeConfig};
use grpo_bench::cpu::policy;
use grpo_bench::inputs::{self, Inputs};
use grpo_core::parity::{Tolerances, Values};
use grpo_core::{Advantages, Backend, Dtype, HeadLayout, PolicyOutput, PolicySpec, Tensor};
use half::bf16;
use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;

/// Tolerance of the oracle's gradients against finite differences, relative to the largest entry. Differences reach 1e-10, and 3e-9 at a
/// low temperature or with a large KL term; a wrong formula is off by orders of magnitude more.
pub(super) const TOLERANCE: f64 = 1e-6;

/// Largest number of entries per tensor for finite differences, each of which takes two evaluations.
const MOST_ENTRIES: usize = 600;

/// Number of seeds tried for inputs with clipped ratios: for 8 tokens, every tenth seed clips on both sides.
const SEEDS: u64 = 50;

/// Largest change of a log-probability by rounding to f32.
const ROUNDING: f64 = 4e-6;

/// Inputs with the oracle's results.
pub(super) struct Problem {
    config: BenchConfig,
    inputs: Inputs,
    point: Point,
    pub(super) oracle: Evaluated,
}

/// The comparison of gradients with finite differences.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub(super) rows: Vec<Row>,
    /// Entries whose step crosses a kink of the loss.
    pub(super) kinks: usize,
    pub(super) notes: Vec<String>,
}

impl Problem {
    /// Creates the problem of `config` in its dtype, with or without a bias, with the first seed that clips ratios on both
    /// sides: with few tokens a branch of the loss may be untested. Without such a seed among the next few, uses the configuration's seed.
    ///
    /// # Errors
    /// The errors of [`Problem::new`].
    pub(super) fn draw(config: &BenchConfig, has_bias: bool) -> Result<Self> {
        let first = Self::new(config, has_bias)?;
        if first.has_all_branches() || config.inputs.on_policy {
            return Ok(first);
        }
        let mut config = config.clone();
        for _ in 1..SEEDS {
            config.inputs.seed = config.inputs.seed.wrapping_add(1);
            let problem = Self::new(&config, has_bias)?;
            if problem.has_all_branches() {
                return Ok(problem);
            }
        }
        Ok(first)
    }

    /// Creates the problem of `config` with its seed. Old log-probabilities are the oracle's plus noise.
    ///
    /// # Errors
    /// [`Error::File`] if the inputs cannot be written; the errors of the oracle.
    pub(super) fn new(config: &BenchConfig, has_bias: bool) -> Result<Self> {
        let folder = tempfile::tempdir().map_err(|e| Error::io("create", &std::env::temp_dir(), e))?;
        let mut files = inputs::write_policy(config, folder.path())?;
        files.extend(inputs::write_batch(config, folder.path())?);
        let mut inputs = Inputs::load(config, &files)?;
        let point = Point::new(&inputs.policy, config.layout, config.shape.vocab, has_bias);
        if inputs::has_other_policies(config) {
            let logp = oracle::score(&config.loss, &point.policy(), &inputs.batch)?.logp;
            let logp: Vec<f32> = logp.into_iter().map(|logp| logp as f32).collect();
            files.extend(inputs::write_other_policies(config, &logp, folder.path())?);
            inputs = Inputs::load(config, &files)?;
        }
        let oracle = oracle_at(&config.loss, &point.policy(), &inputs.batch)?;
        Ok(Self { config: config.clone(), inputs, point, oracle })
    }

    /// Returns the seed of the inputs.
    pub(super) fn seed(&self) -> u64 {
        self.config.inputs.seed
    }

    /// Returns shares of clipped ratios under TRL's names.
    fn clipped(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let names = ["clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio"];
        names.into_iter().filter_map(|name| Some((name, self.oracle.metrics.value(name)?)))
    }

    fn has_all_branches(&self) -> bool {
        self.clipped().all(|(_, share)| share > 0.0)
    }

    /// Describes the inputs, to show which branches of the loss are tested.
    pub(super) fn notes(&self) -> Result<Vec<String>> {
        let shares = self.clipped().map(|(name, share)| format!("{name} {share:.2}")).collect::<Vec<_>>().join(", ");
        let mut notes = vec![format!("inputs of seed {}: {shares}", self.seed())];
        if !self.has_all_branches() {
            notes.push(
                "a branch of the clip is idle: smaller loss.epsilon_low and loss.epsilon_high, a larger inputs.old_logp_noise \
                 or more tokens would use it"
                    .into(),
            );
        }
        let differences = Differences::new(&self.config.loss, &self.inputs.batch, self.point.clone())?;
        if self.inputs.batch.old_logp().is_some() && differences.has_kink_within(ROUNDING) {
            notes.push(
                "a ratio is so close to a bound of the clip that rounding to f32 decides its branch, and a correct implementation \
                 may have another gradient: choose other bounds, another inputs.old_logp_noise or another --seed"
                    .into(),
            );
        }
        Ok(notes)
    }

    /// Returns messages about oracle gradients that are zero despite nonzero advantages: an implementation without gradients would agree.
    pub(super) fn zero_gradients(&self) -> Vec<String> {
        let (Advantages::PerSequence(advantages) | Advantages::PerToken(advantages)) = self.inputs.batch.advantages();
        let is_zero =
            |name: &str| gradient(&self.oracle.values, name).is_some_and(|values| values.iter().all(|x| *x == 0.0));
        let zero = self.point.names().into_iter().filter(|name| advantages.iter().any(|a| *a != 0.0) && is_zero(name));
        let explain = |name| {
            format!(
                "{name} of the oracle is zero everywhere although advantages are not, so nothing is checked: leave some \
                 ratios unclipped (loss.epsilon_low, loss.epsilon_high, inputs.old_logp_noise, another --seed), \
                 inputs.logit_std above 0 and a vocabulary of 2 or more"
            )
        };
        zero.map(explain).collect()
    }

    /// Compares `found`, gradients of the loss, with finite differences.
    ///
    /// # Errors
    /// The errors of the oracle.
    pub(super) fn differences(&self, found: &Values) -> Result<Verdict> {
        let mut differences = Differences::new(&self.config.loss, &self.inputs.batch, self.point.clone())?;
        let loss = differences.loss_row(found.loss, self.oracle.magnitude);
        let mut verdict = Verdict { rows: vec![loss], ..Verdict::default() };
        for (tensor, name) in self.point.names().into_iter().enumerate() {
            let all = gradient(found, name).unwrap_or_default();
            let entries = self.entries(tensor, all);
            let (row, kinks) = differences.row(tensor, all, &entries, 0.0)?;
            verdict.rows.push(row);
            verdict.kinks += kinks;
            if entries.len() < all.len() {
                let (few, many, seed) = (entries.len(), all.len(), self.config.inputs.seed);
                verdict.notes.push(format!(
                    "differences of {name}: {few} of {many} entries, drawn by seed {seed}, and the largest among them"
                ));
            }
        }
        Ok(verdict)
    }

    /// Returns the entries of a gradient for finite differences, in order.
    fn entries(&self, tensor: usize, gradient: &[f64]) -> Vec<usize> {
        if gradient.len() <= MOST_ENTRIES {
            return (0..gradient.len()).collect();
        }
        let mut random = ChaCha8Rng::seed_from_u64(self.config.inputs.seed);
        random.set_stream(tensor as u64);
        let mut entries = sample(&mut random, gradient.len(), MOST_ENTRIES).into_vec();
        let largest = (0..gradient.len()).max_by(|a, b| gradient[*a].abs().total_cmp(&gradient[*b].abs()));
        entries.extend(largest.filter(|largest| !entries.contains(largest)));
        entries.sort_unstable();
        entries
    }

    /// Compares the results of `variant` on `backend` with the oracle.
    ///
    /// # Errors
    /// The errors of [`Backend::plan`] and of the plan's call.
    pub(super) fn implementation(&self, name: &str, variant: &Variant, backend: &dyn Backend) -> Result<Vec<Row>> {
        let (request, numerics) = (&variant.request, variant.numerics);
        let dtype = request.policy.dtype();
        let mut tolerances = Tolerances::of(dtype).with_dlogits(numerics.dlogits);
        if matches!(request.policy, PolicySpec::Hidden { .. }) {
            tolerances = tolerances.with_dlogits(backend.dlogits(dtype));
        }
        let mut found = match (variant.pass, &self.inputs.policy) {
            (Pass::GradientInPlace, PolicyOutput::Logits(logits)) => {
                // The gradient is stored in the dtype of the logits.
                tolerances = tolerances.with_dlogits(dtype);
                self.in_place(variant, backend, logits.clone())?
            }
            (Pass::Score, _) => {
                let scores = backend.plan(request)?.score(policy(&self.inputs, variant), &self.inputs.batch)?;
                let (logp, entropy) = (Some(widen(&scores.logp)), Some(widen(&scores.entropy)));
                Values { logp, entropy, ..Values::default() }
            }
            _ => {
                let plan = &mut backend.plan(request)?;
                call(plan.as_mut(), request, policy(&self.inputs, variant), &self.inputs.batch)?.values
            }
        };
        if !numerics.entropy {
            found.entropy = None;
        }
        let is_rounded = numerics.logits == Dtype::Bf16 && matches!(request.policy, PolicySpec::Hidden { .. });
        let rounded = if is_rounded { Some(self.of_rounded_logits()?) } else { None };
        let truth = rounded.as_ref().unwrap_or(&self.oracle);
        let magnitude = truth.magnitude.unwrap_or_default();
        let active = self.inputs.batch.active_rows();
        let comparisons = truth.values.compare(&found, active, magnitude, &tolerances);
        Ok(comparisons.into_iter().map(|comparison| Row::new(name, "oracle", comparison)).collect())
    }

    fn in_place(&self, variant: &Variant, backend: &dyn Backend, mut logits: Tensor) -> Result<Values> {
        let mut plan = backend.plan(&variant.request)?;
        let values = call_in_place(plan.as_mut(), logits.as_mut(), &self.inputs.batch)?.values;
        Ok(Values { grad_logits: Some(widened(&logits)), ..values })
    }

    /// Evaluates the oracle on logits rounded to bf16 once, and multiplies the gradients out of them.
    fn of_rounded_logits(&self) -> Result<Evaluated> {
        let ShapeConfig { hidden, vocab: v, .. } = self.config.shape;
        let (n, h) = (self.config.shape.rows(), hidden.unwrap_or_default());
        let [(_, x), (_, w), rest @ ..] = self.point.tensors.as_slice() else {
            return Err(Error::argument("round logits", "hidden states and a head", "logits"));
        };
        let weight = |j: usize, k: usize| match self.config.layout {
            HeadLayout::VocabHidden => j * h + k,
            HeadLayout::HiddenVocab => k * v + j,
        };
        let bias = rest.first().map(|(_, bias)| bias);
        let logit = |i: usize, j: usize| {
            let dot: f64 = (0..h).map(|k| x[i * h + k] * w[weight(j, k)]).sum();
            dot + bias.map_or(0.0, |bias| bias[j])
        };
        let logits: Vec<f64> = (0..n * v).map(|ij| bf16::from_f64(logit(ij / v, ij % v)).to_f64()).collect();
        let given = oracle::Policy::logits(&logits, v);
        let mut oracle = oracle_at(&self.config.loss, &given, &self.inputs.batch)?;
        let dz = oracle.values.grad_logits.take().unwrap_or_default();
        let (mut dx, mut dw, mut db) = (vec![0.0; n * h], vec![0.0; v * h], vec![0.0; v]);
        for (ij, dz) in dz.into_iter().enumerate() {
            let (i, j) = (ij / v, ij % v);
            db[j] += dz;
            for k in 0..h {
                dx[i * h + k] += dz * w[weight(j, k)];
                dw[weight(j, k)] += dz * x[i * h + k];
            }
        }
        let values = &mut oracle.values;
        (values.grad_hidden, values.grad_lm_head, values.grad_bias) = (Some(dx), Some(dw), bias.map(|_| db));
        Ok(oracle)
    }
}
