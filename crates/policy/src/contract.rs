//! Tests that every [`Policy`] must pass. Needs the feature `contract`; [`contract_tests!`](crate::contract_tests) runs them.
//!
//! A model of random weights is trained on two short sequences. Numbers are compared with other numbers of the same policy only.

use crate::{
    Error, LogitsProcessors, MOMENT_CODES, MOMENT_SCALES, MOMENTS, OptimizerName, OptimizerSettings, Policy,
    PolicyState, Result, RolloutRequest, Sampling, Sequence, SequenceBatch, StateGroup, StepLoss, Weights, export_all,
    token_batch,
};
use grpo_core::batch::{SamplingMask, TokenWeights, ValueTargets};
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Advantages, LossConfig, TokenBatch};
use grpo_models::{LoraConfig, ModelConfig, NamedTensor, TargetModules};
use grpo_rng::Purpose;

/// The number of completion tokens of both sequences.
const TOKENS: usize = 5;
const SUPERVISED: StepLoss = StepLoss::CrossEntropy { tokens: TOKENS };

/// A policy that is tested.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The model, with random weights.
    pub config: ModelConfig,
    /// The loss.
    pub loss: LossConfig,
    /// Fresh adapters.
    pub lora: Option<LoraConfig>,
    /// A value head with its loss.
    pub of_values: Option<ValueLossConfig>,
}

/// An implementation of [`Policy`] that is tested.
pub trait Fixture {
    /// The largest difference between log-probabilities of [`Policy::score`] and [`Policy::accumulate`].
    const SCORE_TOLERANCE: f32;

    /// The largest difference between log-probabilities of [`Policy::generate`] and [`Policy::score`].
    const SAMPLER_TOLERANCE: f32 = 1e-4;

    /// Creates a policy; equal setups give equal policies.
    ///
    /// # Errors
    /// An invalid setup.
    fn policy(setup: &Setup) -> Result<Box<dyn Policy>>;
}

/// Runs every test of [`contract`](crate::contract) on a [`Fixture`](crate::contract::Fixture), or the tests behind `:`. Every test gets the
/// attribute in front of the fixture.
#[macro_export]
macro_rules! contract_tests {
    ($(#[$attribute:meta])? $fixture:ty) => {
        $crate::contract_tests!(
            $(#[$attribute])? $fixture:
            scores_match_the_loss_and_use_the_requested_weights,
            scores_of_a_sampling_mask_are_the_log_probabilities_of_the_sampler,
            a_failed_accumulation_leaves_no_gradient,
            gradients_accumulate_until_an_update,
            a_supervised_step_lowers_its_loss,
            an_update_that_is_not_finite_changes_nothing,
            states_are_restored_bit_for_bit_by_import_and_roll_back,
            eight_bit_moments_are_restored_bit_for_bit_and_only_with_their_optimizer,
            states_of_other_optimizers_are_restored_bit_for_bit,
            training_with_eight_bit_moments_is_close_to_f32_moments,
            a_missing_reference_policy_is_an_error,
            a_value_head_is_trained_with_the_policy_and_saved,
            a_value_head_needs_value_targets_and_vice_versa,
            only_adapters_are_trained_and_the_reference_is_the_model_without_them,
            checkpoints_have_the_tensors_of_transformers_and_peft,
        );
    };
    ($fixture:ty: $($test:ident),* $(,)?) => {
        $($crate::contract_tests!(@ $fixture, $test);)*
    };
    (#[$attribute:meta] $fixture:ty: $($test:ident),* $(,)?) => {
        $($crate::contract_tests!(@ #[$attribute] $fixture, $test);)*
    };
    (@ $(#[$attribute:meta])? $fixture:ty, $test:ident) => {
        #[test]
        $(#[$attribute])?
        fn $test() {
            $crate::contract::$test::<$fixture>();
        }
    };
}

impl Default for Setup {
    fn default() -> Self {
        let config = ModelConfig {
            hidden_size: 16,
            intermediate_size: 16,
            num_hidden_layers: 2,
            initializer_range: 0.3,
            ..ModelConfig::default()
        };
        let loss = LossConfig { beta: 0.1, ..LossConfig::default() };
        Self { config, loss, lora: None, of_values: None }
    }
}

fn fresh<F: Fixture>() -> Box<dyn Policy> {
    F::policy(&Setup::default()).unwrap()
}

/// Returns two sequences with two and three completion tokens.
pub fn sequences() -> [Sequence; 2] {
    let of = |prompt: &[u32], completion: &[u32]| Sequence { prompt: prompt.to_vec(), completion: completion.to_vec() };
    [of(&[1, 5, 6], &[7, 2]), of(&[1, 9], &[8, 10, 2])]
}

/// Returns the sequences in micro-batches of `size`, with all inputs of a loss and ratios on both sides of the clip range. Freezes the
/// reference policy.
pub fn batches<'a>(policy: &mut dyn Policy, sequences: &'a [Sequence], size: usize) -> Vec<SequenceBatch<'a>> {
    policy.freeze_ref_policy().unwrap();
    let now = policy.score(Weights::RefPolicy, &plain(sequences, sequences.len())).unwrap().logp;
    let shifted = |by: [f32; TOKENS]| now.iter().zip(by).map(|(logp, by)| logp + by).collect::<Vec<_>>();
    let (old, of_ref) = (shifted([-0.5, 0.05, -0.5, 0.5, -0.05]), shifted([0.3, -0.2, 0.1, -0.4, 0.0]));
    let (mut first, mut parts) = (0, plain(sequences, size));
    for (part, advantages) in parts.iter_mut().zip([1.5, -0.5].chunks(size)) {
        let tokens = first..first + part.tokens.tokens();
        first = tokens.end;
        let batch = part.tokens.clone().with_advantages(Advantages::PerSequence(advantages.to_vec())).unwrap();
        let batch = batch.with_old_logp(old[tokens.clone()].to_vec()).unwrap();
        part.tokens = batch.with_ref_logp(of_ref[tokens].to_vec()).unwrap();
    }
    parts
}

/// Returns the sequences in micro-batches of `size`, without inputs of the GRPO loss.
fn plain(sequences: &[Sequence], size: usize) -> Vec<SequenceBatch<'_>> {
    let of = |sequences| SequenceBatch { routed_experts: &[], sequences, tokens: token_batch(sequences).unwrap() };
    sequences.chunks(size).map(of).collect()
}

/// Returns the weights of both policies and the moments.
fn state(policy: &dyn Policy) -> [Vec<NamedTensor>; 3] {
    let of = StateGroup::Weights;
    [of(Weights::Policy), of(Weights::RefPolicy), StateGroup::Optimizer].map(|group| export_all(policy, group).unwrap())
}

fn import(policy: &mut dyn Policy, state: &[Vec<NamedTensor>; 3], steps: u64) -> Result<()> {
    import_with(policy, state, steps, &OptimizerSettings::default())
}

fn import_with(
    policy: &mut dyn Policy,
    [weights, of_ref, moments]: &[Vec<NamedTensor>; 3],
    optimizer_steps: u64,
    optimizer_settings: &OptimizerSettings,
) -> Result<()> {
    policy.import(&PolicyState {
        policy: weights,
        ref_policy: Some(of_ref),
        optimizer: moments,
        optimizer_steps,
        optimizer_settings,
    })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn train(policy: &mut dyn Policy, parts: &[SequenceBatch<'_>], loss: StepLoss) -> f64 {
    let loss = policy.accumulate(parts, loss).unwrap().loss;
    assert!(policy.apply(0.02).unwrap().applied);
    loss
}

pub fn scores_match_the_loss_and_use_the_requested_weights<F: Fixture>() {
    let (mut policy, sequences) = (fresh::<F>(), sequences());
    let mut parts = batches(&mut *policy, &sequences, 1);
    let scores = policy.score(Weights::Policy, &parts).unwrap();
    assert_eq!(scores.logp.len(), TOKENS);
    let mut first = 0;
    for part in &mut parts {
        let old = scores.logp[first..first + part.tokens.tokens()].to_vec();
        first += old.len();
        part.tokens = part.tokens.clone().with_old_logp(old).unwrap();
    }
    let output = policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    for (found, expected) in output.scores.logp.iter().zip(&scores.logp) {
        assert!((found - expected).abs() <= F::SCORE_TOLERANCE, "{found} {expected}");
    }
    assert_eq!(output.metrics.value("clip_ratio/region_mean"), Some(0.0));
    // The reference policy has equal weights, but they are not updated.
    policy.apply(0.1).unwrap();
    assert_ne!(bits(&policy.score(Weights::Policy, &parts).unwrap().logp), bits(&scores.logp));
    assert_eq!(bits(&policy.score(Weights::RefPolicy, &parts).unwrap().logp), bits(&scores.logp));
}

pub fn scores_of_a_sampling_mask_are_the_log_probabilities_of_the_sampler<F: Fixture>() {
    let temperature = 0.8;
    let loss = LossConfig { temperature, ..LossConfig::default() };
    let mut policy = F::policy(&Setup { loss, ..Setup::default() }).unwrap();
    let (prompts, off) = ([vec![1, 5, 6], vec![1, 9]], LogitsProcessors::default());
    for processors in [
        LogitsProcessors { top_k: Some(4), ..off },
        LogitsProcessors { top_p: Some(0.7), ..off },
        LogitsProcessors { min_p: Some(0.2), ..off },
        off,
    ] {
        let purpose = Purpose::Rollout;
        let request = RolloutRequest {
            prompts: &prompts,
            num_generations: 3,
            max_completion_length: 6,
            stop_ids: &[2],
            stop: None,
            sampling: Sampling::Random { temperature, processors, seed: 3, purpose, step: 0, first: 0 },
            return_sampling_mask: true,
            return_routed_experts: false,
            turn: None,
        };
        let completions = policy.generate(&request).unwrap();
        let (mut mask, mut sequences, mut logps) = (SamplingMask::default(), Vec::new(), Vec::new());
        for (i, completion) in completions.into_iter().enumerate() {
            assert_eq!(completion.sampling_mask.tokens(), completion.ids.len(), "{processors:?}");
            mask.extend(&completion.sampling_mask);
            logps.extend(completion.logps);
            sequences.push(Sequence { prompt: prompts[i / 3].clone(), completion: completion.ids });
        }
        let is_truncated = (0..mask.tokens()).any(|token| mask.kept(token).is_some());
        assert_eq!(is_truncated, processors != off, "{processors:?}");
        let whole = token_batch(&sequences).unwrap();
        let batch = whole.clone().with_sampling_mask(mask).unwrap();
        let mut score = |batch: &TokenBatch| {
            let parts = [SequenceBatch { routed_experts: &[], sequences: &sequences, tokens: batch.clone() }];
            policy.score(Weights::Policy, &parts).unwrap().logp
        };
        let (scores, of_whole) = (score(&batch), score(&whole));
        let off_by = |scores: &[f32]| scores.iter().zip(&logps).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off_by(&scores) < F::SAMPLER_TOLERANCE, "{processors:?}: {}", off_by(&scores));
        assert_eq!(off_by(&of_whole) > 0.1, processors != off, "{processors:?}: {}", off_by(&of_whole));
        // The loss sees the same log-probabilities.
        let batch = batch.with_advantages(vec![1.0, -0.5, 0.5, 2.0, -1.0, 0.1]).unwrap();
        let batch = batch.with_old_logp(scores.clone()).unwrap();
        let parts = [SequenceBatch { routed_experts: &[], sequences: &sequences, tokens: batch }];
        let output = policy.accumulate(&parts, StepLoss::Grpo).unwrap();
        let pairs = output.scores.logp.iter().zip(&scores);
        pairs.for_each(|(found, expected)| assert!((found - expected).abs() <= F::SCORE_TOLERANCE));
        if F::SCORE_TOLERANCE == 0.0 {
            let ratios = ["is_ratio/min", "is_ratio/max"].map(|name| output.metrics.value(name));
            assert_eq!(ratios, [Some(1.0); 2], "{processors:?}");
        }
        assert!(policy.skip().unwrap().grad_norm > 0.0);
    }
}

pub fn a_failed_accumulation_leaves_no_gradient<F: Fixture>() {
    let (mut policy, sequences) = (fresh::<F>(), sequences());
    let mut parts = batches(&mut *policy, &sequences, 1);
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    // The second micro-batch has a token outside the vocabulary.
    let unknown = [Sequence { prompt: vec![1, 9999], ..sequences[1].clone() }];
    parts[1].sequences = &unknown;
    let error = policy.accumulate(&parts, StepLoss::Grpo).unwrap_err().to_string();
    assert!(error.contains("9999"), "{error}");
    assert!(policy.apply(0.1).is_err(), "there is nothing to apply");
}

pub fn gradients_accumulate_until_an_update<F: Fixture>() {
    let (mut policy, sequences) = (fresh::<F>(), sequences());
    let parts = batches(&mut *policy, &sequences, 1);
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    let whole = policy.skip().unwrap().grad_norm;
    assert!(whole > 0.0);
    assert_eq!(policy.skip().unwrap().grad_norm, 0.0, "the gradient was dropped before");
    // One call with both micro-batches equals one call for each.
    parts.chunks(1).for_each(|part| drop(policy.accumulate(part, StepLoss::Grpo).unwrap()));
    assert_eq!(policy.skip().unwrap().grad_norm.to_bits(), whole.to_bits());
    assert!(matches!(policy.apply(0.1), Err(Error::Argument { operation: "apply", .. })));
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    let report = policy.apply(0.1).unwrap();
    assert!(report.applied && (report.grad_norm - whole).abs() <= 1e-6 * whole && policy.optimizer_steps() == 1);
    assert_eq!(policy.skip().unwrap().grad_norm, 0.0);
}

pub fn a_supervised_step_lowers_its_loss<F: Fixture>() {
    let (mut policy, sequences) = (fresh::<F>(), sequences());
    let parts = plain(&sequences, 1);
    let before = train(&mut *policy, &parts, SUPERVISED);
    assert!(train(&mut *policy, &parts, SUPERVISED) < before - 0.01);
}

pub fn an_update_that_is_not_finite_changes_nothing<F: Fixture>() {
    let setup = Setup { loss: LossConfig::default(), ..Setup::default() };
    let (mut policy, sequences) = (F::policy(&setup).unwrap(), sequences());
    let part = plain(&sequences, 2);
    train(&mut *policy, &part, SUPERVISED);
    let before = state(&*policy);
    // The update would make weights infinite.
    policy.accumulate(&part, SUPERVISED).unwrap();
    let error = policy.apply(1e38).unwrap_err();
    assert!(matches!(&error, Error::NotFinite { what, step: 2 } if what.contains("weights")), "{error}");
    assert_eq!((state(&*policy), policy.optimizer_steps()), (before.clone(), 1));
    let mut large = plain(&sequences, 2);
    let advantages = Advantages::PerSequence(vec![1e30, -1e30]);
    large[0].tokens = large[0].tokens.clone().with_advantages(advantages).unwrap();
    // With a limit, updates above it are skipped; the squared gradient of the first one overflows f32.
    let adamw = OptimizerSettings { skip_grad_norm: Some(1e-3), ..OptimizerSettings::default() };
    policy.reset_optimizer(&adamw).unwrap();
    for (batch, loss) in [(&large, StepLoss::Grpo), (&part, SUPERVISED)] {
        policy.accumulate(batch, loss).unwrap();
        let report = policy.apply(0.01).unwrap();
        assert!(!report.applied && report.grad_norm > 1e-3);
    }
    assert_eq!((&state(&*policy)[0], policy.optimizer_steps()), (&before[0], 0));
    assert!(state(&*policy)[2].is_empty(), "before the first step there are no moments");
}

pub fn states_are_restored_bit_for_bit_by_import_and_roll_back<F: Fixture>() {
    let (mut policy, sequences) = (fresh::<F>(), sequences());
    let parts = batches(&mut *policy, &sequences, 1);
    let step = |policy: &mut dyn Policy| {
        train(policy, &parts, StepLoss::Grpo);
        policy.mix_ref_policy(0.5).unwrap();
    };
    step(&mut *policy);
    let before = state(&*policy);
    policy.begin().unwrap();
    step(&mut *policy);
    policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    assert_ne!(state(&*policy), before);
    policy.roll_back().unwrap();
    assert_eq!(state(&*policy), before);
    assert_eq!((policy.optimizer_steps(), policy.skip().unwrap().grad_norm), (1, 0.0));
    assert!(matches!(policy.roll_back(), Err(Error::State { .. })), "no state is saved");

    // After an import of the tensors in another order, the next step is the same.
    let mut other = fresh::<F>();
    let mut reversed = before.clone();
    reversed.iter_mut().for_each(|tensors| tensors.reverse());
    let untouched = state(&*other);
    for group in 0..3 {
        let (mut short, mut renamed, mut turned) = (reversed.clone(), reversed.clone(), reversed.clone());
        short[group].pop();
        renamed[group][0].name = "layers.0.attn.qkv_proj.weight".into();
        turned[group].iter_mut().find(|tensor| tensor.shape.len() == 2).unwrap().shape.swap(0, 1);
        // A square matrix is the same in both orientations.
        let wrong = [short, renamed, turned].into_iter().filter(|wrong| *wrong != reversed);
        for wrong in wrong {
            assert!(matches!(import(&mut *other, &wrong, 1), Err(Error::State { .. })));
            assert_eq!(state(&*other), untouched, "a failed import changed the state");
        }
    }
    assert!(matches!(import(&mut *other, &reversed, 0), Err(Error::State { .. })), "moments before the first step");
    import(&mut *other, &reversed, 1).unwrap();
    assert_eq!(state(&*other), before);
    step(&mut *policy);
    step(&mut *other);
    assert_eq!(state(&*other), state(&*policy));
}

/// Returns setups in which some tensors have 8-bit moments: rows of less than a block, of one block and a part, and adapters of such a
/// model.
fn with_eight_bit_moments() -> Vec<Setup> {
    let of = |hidden_size| {
        let config = Setup::default().config;
        Setup { config: ModelConfig { hidden_size, intermediate_size: 64, ..config }, ..Setup::default() }
    };
    let (_, lora) = adapted();
    let lora = LoraConfig { r: 14, ..lora };
    vec![of(64), of(320), Setup { lora: Some(lora), ..of(320) }]
}

fn eight_bit() -> OptimizerSettings {
    OptimizerSettings { name: OptimizerName::AdamW8bit, ..OptimizerSettings::default() }
}

pub fn eight_bit_moments_are_restored_bit_for_bit_and_only_with_their_optimizer<F: Fixture>() {
    let sequences = sequences();
    for setup in with_eight_bit_moments() {
        let mut policy = F::policy(&setup).unwrap();
        policy.reset_optimizer(&eight_bit()).unwrap();
        let parts = batches(&mut *policy, &sequences, 1);
        let step = |policy: &mut dyn Policy| train(policy, &parts, StepLoss::Grpo);
        for _ in 0..2 {
            step(&mut *policy);
        }
        let before = state(&*policy);
        let named = |prefix: &str| before[2].iter().filter(|tensor| tensor.name.starts_with(prefix)).count();
        for prefix in [MOMENT_CODES, MOMENT_SCALES].concat() {
            assert!(named(prefix) > 0, "{prefix}");
        }
        assert!(MOMENTS.iter().all(|prefix| named(prefix) > 0), "small tensors have f32 moments");
        policy.begin().unwrap();
        step(&mut *policy);
        assert_ne!(state(&*policy), before);
        policy.roll_back().unwrap();
        assert_eq!(state(&*policy), before);

        let mut other = F::policy(&setup).unwrap();
        let untouched = state(&*other);
        let error = import(&mut *other, &before, 2).unwrap_err().to_string();
        assert!(error.contains("expected float32 moments") && error.contains("got 8-bit moments"), "{error}");
        let mut spoilt = before.clone();
        let codes = spoilt[2].iter_mut().find(|tensor| tensor.name.starts_with(MOMENT_CODES[0])).unwrap();
        codes.data[3] = 256.0;
        assert!(matches!(import_with(&mut *other, &spoilt, 2, &eight_bit()), Err(Error::State { .. })));
        assert_eq!(state(&*other), untouched, "a failed import changed the state");
        import_with(&mut *other, &before, 2, &eight_bit()).unwrap();
        assert_eq!(state(&*other), before);
        step(&mut *policy);
        step(&mut *other);
        assert_eq!(state(&*other), state(&*policy));

        let mut single = F::policy(&setup).unwrap();
        let parts = batches(&mut *single, &sequences, 1);
        train(&mut *single, &parts, StepLoss::Grpo);
        let error = import_with(&mut *other, &state(&*single), 1, &eight_bit()).unwrap_err().to_string();
        assert!(error.contains("adamw_8bit") && error.contains("got float32 moments"), "{error}");
        // A reset returns to f32 moments.
        other.reset_optimizer(&OptimizerSettings::default()).unwrap();
        train(&mut *other, &parts, StepLoss::Grpo);
        assert!(state(&*other)[2].iter().all(|tensor| MOMENTS.iter().any(|prefix| tensor.name.starts_with(prefix))));
    }
}

pub fn states_of_other_optimizers_are_restored_bit_for_bit<F: Fixture>() {
    let sequences = sequences();
    for name in OptimizerName::ALL.into_iter().filter(|name| !name.is_eight_bit() && *name != OptimizerName::default())
    {
        let config = OptimizerSettings { name, weight_decay: 0.1, ..OptimizerSettings::default() };
        let (mut policy, mut other) = (fresh::<F>(), fresh::<F>());
        policy.reset_optimizer(&config).unwrap();
        let parts = batches(&mut *policy, &sequences, 1);
        let step = |policy: &mut dyn Policy| train(policy, &parts, StepLoss::Grpo);
        step(&mut *policy);
        step(&mut *policy);
        let before = state(&*policy);
        policy.begin().unwrap();
        step(&mut *policy);
        assert_ne!(state(&*policy), before);
        policy.roll_back().unwrap();
        assert_eq!(state(&*policy), before);
        let error = import(&mut *other, &before, 2).unwrap_err().to_string();
        assert!(error.contains("expected float32 moments (optimizer.name: adamw)"), "{error}");
        import_with(&mut *other, &before, 2, &config).unwrap();
        assert_eq!(state(&*other), before);
        step(&mut *policy);
        step(&mut *other);
        assert_eq!(state(&*other), state(&*policy));
    }
}

pub fn training_with_eight_bit_moments_is_close_to_f32_moments<F: Fixture>() {
    let sequences = sequences();
    let parts = plain(&sequences, 1);
    for setup in with_eight_bit_moments() {
        let losses = [OptimizerSettings::default(), eight_bit()].map(|adamw| {
            let mut policy = F::policy(&setup).unwrap();
            policy.reset_optimizer(&adamw).unwrap();
            [(); 8].map(|()| {
                let loss = policy.accumulate(&parts, SUPERVISED).unwrap().loss;
                assert!(policy.apply(1e-3).unwrap().applied);
                loss
            })
        });
        let [single, of_eight_bit] = losses;
        assert!(single[7] < 0.9 * single[0], "{single:?}");
        // The first update does not depend on how its moments are stored.
        let is_close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-5 * a;
        assert!(single[..2].iter().zip(&of_eight_bit).all(is_close), "{single:?} {of_eight_bit:?}");
        assert_ne!(single[7], of_eight_bit[7], "both have f32 moments");
        assert!((single[7] - of_eight_bit[7]).abs() < 0.1 * (single[0] - single[7]), "{single:?} {of_eight_bit:?}");
    }
}

pub fn a_missing_reference_policy_is_an_error<F: Fixture>() {
    let (mut policy, sequences) = (fresh::<F>(), sequences());
    assert!(!policy.has_ref_policy());
    let parts = plain(&sequences, 2);
    for error in [policy.score(Weights::RefPolicy, &parts).unwrap_err(), policy.mix_ref_policy(0.5).unwrap_err()] {
        assert!(error.to_string().contains("freeze_ref_policy"), "{error}");
    }
    let [weights, of_ref, moments] = state(&*policy);
    assert_eq!(policy.num_parameters(), weights.iter().map(|tensor| tensor.data.len()).sum::<usize>());
    assert!(of_ref.is_empty() && moments.is_empty());
}

/// Returns a policy with a value head, and its batches with old values and returns: two of five values are clipped.
fn critic<F: Fixture>(sequences: &[Sequence]) -> (Box<dyn Policy>, Vec<SequenceBatch<'_>>) {
    let setup = Setup { of_values: Some(ValueLossConfig::default()), ..Setup::default() };
    let mut policy = F::policy(&setup).unwrap();
    let mut parts = batches(&mut *policy, sequences, 1);
    for (part, returns) in parts.iter_mut().zip([[0.5, 1.0, 0.0], [-1.0, 0.5, 1.0]]) {
        let tokens = part.tokens.tokens();
        let (old_values, returns) = ([0.0, 0.4, -0.05][..tokens].to_vec(), returns[..tokens].to_vec());
        let batch = part.tokens.clone().with_value_targets(ValueTargets { old_values, returns }).unwrap();
        let weights = TokenWeights { policy: vec![0.2; tokens], ..TokenWeights::zeros(tokens) };
        part.tokens = batch.with_weights(weights).unwrap();
    }
    (policy, parts)
}

pub fn a_value_head_is_trained_with_the_policy_and_saved<F: Fixture>() {
    let sequences = sequences();
    let (mut policy, parts) = critic::<F>(&sequences);
    assert!(policy.has_value_head());
    assert_eq!(policy.values(&parts).unwrap(), [0.0; TOKENS], "a new value head returns 0");
    let first = policy.accumulate(&parts, StepLoss::Grpo).unwrap();
    // The values 0 are clipped for each second token, whose old value is 0.4: (0.2 - 1)^2 < 1 and (0.2 - 0.5)^2 < 0.25, so the unclipped
    // squares count.
    let squares = [0.25, 1.0, 1.0, 0.25, 1.0];
    assert!((first.value_loss - 0.5 * squares.iter().sum::<f64>() / 5.0).abs() < 1e-6, "{}", first.value_loss);
    assert_eq!(first.metrics.value("value_pred_mean"), Some(0.0));
    assert!((first.metrics.value("return_mean").unwrap() - 0.4).abs() < 1e-6);
    policy.apply(0.05).unwrap();
    let values = policy.values(&parts).unwrap();
    assert!(values.iter().all(|value| *value != 0.0), "{values:?}");
    // The reference policy has no value head, but can be mixed.
    policy.freeze_ref_policy().unwrap();
    policy.mix_ref_policy(0.5).unwrap();
    let saved = state(&*policy);
    let [weights, of_ref, moments] = &saved;
    let named = |name: &str| weights.iter().find(|tensor| tensor.name == name).unwrap();
    assert_eq!(named("value_head.weight").shape, [16, 1]);
    assert!(named("value_head.bias").data[0] > 0.0, "most returns are above 0");
    assert!(of_ref.iter().all(|tensor| !tensor.name.starts_with("value_head")));
    assert_eq!(of_ref.len() + 2, weights.len());
    assert!(moments.iter().any(|tensor| tensor.name == "exp_avg.value_head.weight"));

    let (mut resumed, _) = critic::<F>(&sequences);
    import(&mut *resumed, &saved, 1).unwrap();
    train(&mut *policy, &parts, StepLoss::Grpo);
    train(&mut *resumed, &parts, StepLoss::Grpo);
    assert_eq!(bits(&policy.values(&parts).unwrap()), bits(&resumed.values(&parts).unwrap()));
}

pub fn a_value_head_needs_value_targets_and_vice_versa<F: Fixture>() {
    let sequences = sequences();
    let (mut critic, parts) = critic::<F>(&sequences);
    let mut policy = fresh::<F>();
    assert!(!policy.has_value_head());
    assert!(matches!(policy.values(&parts), Err(Error::NoValueHead)));
    policy.freeze_ref_policy().unwrap();
    assert!(matches!(policy.accumulate(&parts, StepLoss::Grpo), Err(Error::NoValueHead)));
    let bare = batches(&mut *policy, &sequences, 1);
    let error = critic.accumulate(&bare, StepLoss::Grpo).unwrap_err().to_string();
    assert!(error.contains("value head") && error.contains("returns"), "{error}");
    critic.accumulate(&bare, SUPERVISED).unwrap();
    let invalid = ValueLossConfig { vf_coef: f64::NAN, ..ValueLossConfig::default() };
    let error = F::policy(&Setup { of_values: Some(invalid), ..Setup::default() }).err().unwrap().to_string();
    assert!(error.contains("vf_coef"), "{error}");
}

/// Returns a setup with adapters of all matrices.
fn adapted() -> (Setup, LoraConfig) {
    let target_modules = TargetModules::Pattern("all-linear".into());
    let lora = LoraConfig { r: 3, lora_alpha: 6.0, target_modules, ..LoraConfig::default() };
    (Setup { lora: Some(lora.clone()), ..Setup::default() }, lora)
}

pub fn only_adapters_are_trained_and_the_reference_is_the_model_without_them<F: Fixture>() {
    let ((setup, lora), sequences) = (adapted(), sequences());
    let (mut plain_policy, mut policy) = (fresh::<F>(), F::policy(&setup).unwrap());
    let parts = plain(&sequences, 1);
    let score = |policy: &mut dyn Policy, of| policy.score(of, &parts).unwrap().logp;
    let before = score(&mut *plain_policy, Weights::Policy);
    // B is zero, so a fresh adapter does not change the outputs.
    let fresh = score(&mut *policy, Weights::Policy);
    assert!(fresh.iter().zip(&before).all(|(a, b)| (a - b).abs() <= 1e-6), "{fresh:?} {before:?}");
    policy.freeze_ref_policy().unwrap();
    let parameters = lora.parameters(&setup.config).unwrap();
    assert_eq!(policy.num_parameters(), parameters.iter().map(grpo_models::Parameter::len).sum::<usize>());
    let losses = [0; 3].map(|_| train(&mut *policy, &parts, SUPERVISED));
    assert!(losses[1] < losses[0] && losses[2] < losses[1] - 0.01, "{losses:?}");
    assert_ne!(score(&mut *policy, Weights::Policy), before);
    assert_eq!(score(&mut *policy, Weights::RefPolicy), before, "the base model changed");
    let text = policy.mix_ref_policy(0.5).unwrap_err().to_string();
    assert!(text.contains("LoRA"), "{text}");
    let text = plain_policy.export_adapter(&mut Vec::new()).unwrap_err().to_string();
    assert!(text.contains("LoRA"), "{text}");

    // A checkpoint has the adapters and their moments, and training continues bit for bit.
    let saved = state(&*policy);
    let mut other = F::policy(&setup).unwrap();
    let (untouched, mut short) = (state(&*other), saved.clone());
    short[2].pop();
    assert!(matches!(import(&mut *other, &short, 3), Err(Error::State { .. })));
    assert_eq!(state(&*other), untouched, "a failed import changed the state");
    import(&mut *other, &saved, 3).unwrap();
    assert!(other.has_ref_policy());
    train(&mut *policy, &parts, SUPERVISED);
    train(&mut *other, &parts, SUPERVISED);
    assert_eq!(state(&*other), state(&*policy));
    assert_eq!(score(&mut *other, Weights::RefPolicy), before);

    // Roll back restores the adapters.
    policy.begin().unwrap();
    train(&mut *policy, &parts, SUPERVISED);
    assert_ne!(state(&*policy), state(&*other));
    policy.roll_back().unwrap();
    assert_eq!(state(&*policy), state(&*other));
}

pub fn checkpoints_have_the_tensors_of_transformers_and_peft<F: Fixture>() {
    let listed = |parameters: Vec<grpo_models::Parameter>| {
        let mut all: Vec<_> = parameters.into_iter().map(|parameter| (parameter.name, parameter.shape)).collect();
        all.sort();
        all
    };
    let found = |tensors: Vec<NamedTensor>| {
        listed(
            tensors.into_iter().map(|NamedTensor { name, shape, .. }| grpo_models::Parameter { name, shape }).collect(),
        )
    };
    let (with_adapters, lora) = adapted();
    let tied = |config: ModelConfig| ModelConfig { tie_word_embeddings: true, qk_norm: true, ..config };
    let all = Setup { config: tied(Setup::default().config), ..Setup::default() };
    let sequences = sequences();
    for (setup, expected) in [
        (Setup::default(), Setup::default().config.parameters()),
        (all.clone(), all.config.parameters()),
        (with_adapters, lora.parameters(&Setup::default().config).unwrap()),
    ] {
        let mut policy = F::policy(&setup).unwrap();
        policy.freeze_ref_policy().unwrap();
        train(&mut *policy, &plain(&sequences, 1), SUPERVISED);
        let [weights, of_ref, moments] = state(&*policy);
        let reference = if setup.lora.is_some() { Vec::new() } else { setup.config.parameters() };
        assert_eq!(found(of_ref), listed(reference));
        for prefix in ["exp_avg.", "exp_avg_sq."] {
            let of_prefix = moments.iter().filter_map(|tensor| {
                let name = tensor.name.strip_prefix(prefix)?.to_owned();
                Some(NamedTensor { name, ..tensor.clone() })
            });
            assert_eq!(found(of_prefix.collect()), listed(expected.clone()));
        }
        let (mut model, mut adapter) = (Vec::new(), Vec::new());
        policy.export_model(&mut model).unwrap();
        assert_eq!(found(model.clone()), listed(setup.config.parameters()));
        let mut trained = model;
        if setup.lora.is_some() {
            policy.export_adapter(&mut adapter).unwrap();
            trained = adapter;
        }
        // Folders and checkpoints have the same values.
        let sorted = |mut tensors: Vec<NamedTensor>| {
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            tensors
        };
        assert_eq!(sorted(trained), sorted(weights.clone()));
        assert_eq!(found(weights), listed(expected));
    }
}
