//! The loop trains a custom policy that is not a decoder and uses no tensor library.

use super::scored;
use super::support::Latin1;
use grpo_core::{LossOutput, Scores};
use grpo_data::{Dataset, Item};
use grpo_models::{CharTokenizer, NamedTensor, Tokenizer};
use grpo_policy::{
    Completion, CompletionSampler, Error, OptimizerSettings, Policy, PolicyState, Result, RolloutRequest,
    SequenceBatch, StateGroup, StepLoss, TensorSink, TensorSource, UpdateReport, Weights,
};
use grpo_rewards::Rewards;
use grpo_trainer::{Parts, Phase, TrainConfig, Trainer};
use std::borrow::Cow;
use std::iter::repeat_n;
use std::sync::{Arc, Mutex};

/// A policy with one logit per token, independent of the context: softmax over V weights, trained by plain gradient descent.
#[derive(Clone)]
pub(crate) struct Unigram {
    /// The tokens that it was trained on.
    pub(crate) trained_on: Arc<Mutex<Vec<i64>>>,
    logits: Vec<f32>,
    ref_logits: Option<Vec<f32>>,
    gradient: Vec<f64>,
    steps: u64,
    /// The number of tokens without scores that [`Policy::accumulate`] returns too few.
    missing_scores: usize,
    remembered: Option<Box<Unigram>>,
}

impl Unigram {
    pub(crate) fn new() -> Self {
        let (logits, gradient) = (vec![0.0; CharTokenizer::VOCAB_SIZE], vec![0.0; CharTokenizer::VOCAB_SIZE]);
        Self {
            trained_on: Arc::default(),
            logits,
            ref_logits: None,
            gradient,
            steps: 0,
            missing_scores: 0,
            remembered: None,
        }
    }
}

/// Returns softmax(logits).
fn probabilities(logits: &[f32]) -> Vec<f64> {
    let weights: Vec<f64> = logits.iter().map(|logit| f64::from(*logit).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / total).collect()
}

impl Policy for Unigram {
    fn context_length(&self) -> usize {
        64
    }

    fn num_parameters(&self) -> usize {
        self.logits.len()
    }

    fn generate(&mut self, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        let mut completions = Vec::new();
        for prompt in request.prompts.iter().flat_map(|prompt| repeat_n(prompt, request.num_generations)) {
            let mut sampler = CompletionSampler::new(request, completions.len(), prompt);
            while sampler.next_input().is_some() {
                sampler.extend(&self.logits)?;
            }
            completions.push(sampler.finish());
        }
        Ok(completions)
    }

    fn score(&mut self, of: Weights, batches: &[SequenceBatch<'_>]) -> Result<Scores> {
        let logits = match of {
            Weights::Policy => &self.logits,
            Weights::RefPolicy => self.ref_logits.as_ref().expect("the run has a reference policy"),
        };
        let p = probabilities(logits);
        let entropy = -p.iter().map(|p| p * p.ln()).sum::<f64>() as f32;
        let targets = batches.iter().flat_map(|batch| batch.tokens.targets());
        let logp: Vec<f32> = targets.map(|id| p[*id as usize].ln() as f32).collect();
        Ok(Scores { entropy: vec![entropy; logp.len()], logp })
    }

    /// Computes on-policy GRPO and cross-entropy by hand: the gradient of -weight x logp of each token.
    fn accumulate(&mut self, batches: &[SequenceBatch<'_>], loss: StepLoss) -> Result<LossOutput> {
        let p = probabilities(&self.logits);
        let mut output = LossOutput::default();
        output.scores = self.score(Weights::Policy, batches)?;
        let tokens = output.scores.logp.len().saturating_sub(self.missing_scores);
        output.scores.logp.truncate(tokens);
        output.scores.entropy.truncate(tokens);
        for batch in batches {
            let tokens = &batch.tokens;
            self.trained_on.lock().unwrap().extend(tokens.targets());
            for sequence in 0..tokens.sequences() {
                for row in tokens.range(sequence) {
                    let id = tokens.targets()[row] as usize;
                    let weight = match loss {
                        StepLoss::CrossEntropy { tokens } => 1.0 / tokens as f64,
                        StepLoss::Grpo => {
                            let of_update = tokens.weights().expect("the loop weighs the tokens of an update");
                            f64::from(tokens.advantage(sequence, row)) * of_update.policy[row]
                        }
                    };
                    output.loss -= weight * p[id].ln();
                    for (token, gradient) in self.gradient.iter_mut().enumerate() {
                        *gradient += weight * (p[token] - f64::from(u8::from(token == id)));
                    }
                }
            }
        }
        Ok(output)
    }

    fn apply(&mut self, learning_rate: f64) -> Result<UpdateReport> {
        for (logit, gradient) in self.logits.iter_mut().zip(&self.gradient) {
            *logit -= (learning_rate * gradient) as f32;
        }
        self.steps += 1;
        Ok(UpdateReport { applied: true, ..self.skip()? })
    }

    fn skip(&mut self) -> Result<UpdateReport> {
        let grad_norm = self.gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
        self.gradient.fill(0.0);
        Ok(UpdateReport { grad_norm, applied: false })
    }

    fn reset_optimizer(&mut self, _: &OptimizerSettings) -> Result<()> {
        self.gradient.fill(0.0);
        self.steps = 0;
        Ok(())
    }

    fn optimizer_steps(&self) -> u64 {
        self.steps
    }

    fn has_ref_policy(&self) -> bool {
        self.ref_logits.is_some()
    }

    fn freeze_ref_policy(&mut self) -> Result<()> {
        self.ref_logits = Some(self.logits.clone());
        Ok(())
    }

    fn mix_ref_policy(&mut self, _: f64) -> Result<()> {
        Err(Error::argument("mix_ref_policy", "a reference policy that stays", "one that moves"))
    }

    fn begin(&mut self) -> Result<()> {
        self.remembered = None;
        self.remembered = Some(Box::new(self.clone()));
        Ok(())
    }

    fn commit(&mut self) {
        self.remembered = None;
    }

    fn roll_back(&mut self) -> Result<()> {
        let before = self.remembered.take().ok_or_else(|| Error::state("the policy", "a state", "none"))?;
        *self = *before;
        self.skip().map(drop)
    }

    fn export(&self, group: StateGroup, sink: &mut dyn TensorSink) -> Result<()> {
        let data = match group {
            StateGroup::Weights(Weights::Policy) => Some(&self.logits),
            StateGroup::Weights(Weights::RefPolicy) => self.ref_logits.as_ref(),
            StateGroup::Optimizer => None,
        };
        data.map_or(Ok(()), |data| {
            sink.tensor(NamedTensor { name: "logits".into(), shape: vec![data.len()], data: data.clone() })
        })
    }

    fn import(&mut self, state: &PolicyState<'_>) -> Result<()> {
        self.import_weights(state.policy)?;
        self.ref_logits = state.ref_policy.map(|tensors| tensors.values("logits")).transpose()?.map(Cow::into_owned);
        self.steps = state.optimizer_steps;
        Ok(())
    }

    fn import_weights(&mut self, weights: &dyn TensorSource) -> Result<()> {
        self.logits = weights.values("logits")?.into_owned();
        Ok(())
    }
}

/// A policy with the required methods only.
struct Minimal(Unigram);

impl Policy for Minimal {
    fn context_length(&self) -> usize {
        self.0.context_length()
    }

    fn num_parameters(&self) -> usize {
        self.0.num_parameters()
    }

    fn generate(&mut self, request: &RolloutRequest<'_>) -> Result<Vec<Completion>> {
        self.0.generate(request)
    }

    fn score(&mut self, of: Weights, batches: &[SequenceBatch<'_>]) -> Result<Scores> {
        self.0.score(of, batches)
    }

    fn accumulate(&mut self, batches: &[SequenceBatch<'_>], loss: StepLoss) -> Result<LossOutput> {
        self.0.accumulate(batches, loss)
    }

    fn apply(&mut self, learning_rate: f64) -> Result<UpdateReport> {
        self.0.apply(learning_rate)
    }

    fn skip(&mut self) -> Result<UpdateReport> {
        self.0.skip()
    }

    fn reset_optimizer(&mut self, config: &OptimizerSettings) -> Result<()> {
        self.0.reset_optimizer(config)
    }

    fn optimizer_steps(&self) -> u64 {
        self.0.optimizer_steps()
    }
}

/// A data set with the required methods only: the same prompt again and again.
struct Prompts(u64);

impl Dataset for Prompts {
    fn next_batch(&mut self, count: usize) -> grpo_data::Result<Vec<Item>> {
        self.0 += count as u64;
        Ok(vec![Item::new("7"); count])
    }

    fn cursor(&self) -> u64 {
        self.0
    }

    fn set_cursor(&mut self, cursor: u64) {
        self.0 = cursor;
    }
}

fn config() -> TrainConfig {
    let mut config = TrainConfig::built_in();
    config.warmup.steps = 0;
    config.rollout.max_completion_length = Some(4);
    config.grpo.max_steps = 30;
    config.grpo.prompts_per_step = 16;
    config.eval.num_problems = Some(4);
    config.optimizer.learning_rate = 10.0;
    config
}

/// A reward of 1 for every `7`, which no task asks for.
fn sevens() -> Rewards {
    scored("sevens", |input| Some(input.completion.matches('7').count() as f32))
}

fn run(config: TrainConfig) -> Trainer {
    let mut parts = grpo_setup::parts(&config).unwrap();
    (parts.policy, parts.rewards) = (Box::new(Unigram::new()), sevens());
    Trainer::with_parts(config, parts).unwrap()
}

/// Starts a run whose policy and data set have the required methods only.
fn minimal(settings: impl FnOnce(&mut TrainConfig)) -> grpo_trainer::Result<Trainer> {
    let mut config = TrainConfig::default();
    config.rollout.max_completion_length = Some(4);
    config.optimizer.learning_rate = 10.0;
    settings(&mut config);
    let parts = Parts::new(Minimal(Unigram::new()), CharTokenizer, Prompts(0), sevens());
    Trainer::with_parts(config, parts)
}

#[test]
fn required_methods_are_enough_to_train() {
    let mut run = minimal(|_| ()).unwrap();
    let rewards: Vec<f64> = (0..30).map(|_| run.grpo_step().unwrap().metric("reward")).collect();
    assert!(rewards[0] < 0.3 && rewards[29] > 1.0, "{rewards:?}");
    assert!(run.held_out().is_empty());
}

#[test]
fn a_policy_that_returns_no_scores_is_an_error() {
    for missing_scores in [1, usize::MAX] {
        let mut parts = grpo_setup::parts(&config()).unwrap();
        (parts.policy, parts.rewards) = (Box::new(Unigram { missing_scores, ..Unigram::new() }), sevens());
        let error = Trainer::with_parts(config(), parts).unwrap().grpo_step().unwrap_err().to_string();
        assert!(
            error.starts_with("Policy::accumulate: expected scores with a value of logp for each of the "),
            "{error}"
        );
    }
}

#[test]
fn runs_that_need_optional_methods_name_the_missing_capability() {
    let failure = |run: grpo_trainer::Result<Trainer>| run.and_then(|mut run| run.grpo_step()).unwrap_err().to_string();
    let error = failure(minimal(|config| config.loss.beta = 0.1));
    assert!(error.contains("expected a policy with a reference policy, for loss.beta"), "{error}");
    let error = failure(minimal(|config| config.grpo.num_iterations = 2));
    assert!(error.contains("expected a policy with roll back"), "{error}");
    let error = minimal(|_| ()).unwrap().state().unwrap_err().to_string();
    assert!(error.contains("export: expected a policy with checkpoints"), "{error}");
    let warmup = |config: &mut TrainConfig| (config.warmup.steps, config.warmup.until_pass_at_1) = (5, Some(0.5));
    let error = failure(minimal(warmup));
    assert!(error.contains("warmup.until_pass_at_1") && error.contains("Dataset::probe"), "{error}");
}

#[test]
fn a_custom_tokenizer_must_match_the_vocabulary_size() {
    let mut config = config();
    config.grpo.max_steps = 1;
    let refused = |config: &TrainConfig, tokenizer: Box<dyn Tokenizer>| {
        grpo_setup::parts_with_tokenizer(config, tokenizer).err().expect("another number of tokens").to_string()
    };
    let wider = || Box::new(Latin1 { vocab_size: 128 });
    assert!(refused(&config, wider()).contains("model.vocab_size"));
    config.model.shape_mut().vocab_size = 128;
    assert!(refused(&config, Box::new(CharTokenizer)).contains("model.vocab_size"));
    let mut parts = grpo_setup::parts_with_tokenizer(&config, wider()).unwrap();
    parts.policy = Box::new(Unigram::new());
    let mut run = Trainer::with_parts(config, parts).unwrap();
    assert!(run.grpo_step().unwrap().metric("reward").is_finite());
}

#[test]
fn a_custom_policy_learns_from_rewards() {
    let mut run = run(config());
    let mut rewards = Vec::new();
    while run.phase() == Phase::Grpo {
        rewards.push(run.grpo_step().unwrap().metric("reward"));
    }
    assert!(rewards[0] < 0.3 && rewards[29] > 1.0, "{rewards:?}");
    let logits = &run.state().unwrap().policy[0].data;
    let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
    assert_eq!(CharTokenizer.decode(&[best as u32]).unwrap(), "7");
}

#[test]
fn a_custom_policy_is_warmed_up_and_restored() {
    let mut config = config();
    config.warmup.steps = 2;
    config.warmup.optimizer.learning_rate = 1.0;
    config.loss.beta = 0.1;
    let mut first = run(config.clone());
    let losses = [first.warmup_step().unwrap().loss, first.warmup_step().unwrap().loss];
    // The first loss is that of a uniform distribution; the second is lower.
    assert!((losses[0] - 53f64.ln()).abs() < 1e-6 && losses[1] < losses[0] - 0.05, "{losses:?}");
    first.grpo_step().unwrap();
    let mut second = run(config);
    second.restore(&first.state().unwrap()).unwrap();
    first.grpo_step().unwrap();
    second.grpo_step().unwrap();
    assert_eq!(first.state().unwrap(), second.state().unwrap());
}

#[test]
fn a_failed_step_restores_a_custom_policy() {
    let mut config = config();
    config.loss.beta = 0.1;
    // Mixing fails after the first update.
    config.grpo.sync_ref_model = true;
    config.grpo.ref_model_sync_steps = 1;
    let mut run = run(config);
    let before = run.state().unwrap();
    let error = run.grpo_step().unwrap_err().to_string();
    assert!(error.contains("a reference policy that stays"), "{error}");
    assert_eq!(run.state().unwrap(), before);
}
