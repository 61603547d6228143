//! Batches that an engine samples while the policy trains.

use super::scored;
use grpo_data::task::Addition;
use grpo_models::{CharTokenizer, Tokenizer};
use grpo_policy::{Completion, Pending, Policy, RolloutEngine, RolloutRequest, WeightVersion};
use grpo_trainer::{Error, TrainConfig, Trainer};
use std::sync::{Arc, Mutex};

/// An event of the engine.
#[derive(Clone, Debug, PartialEq)]
enum Event {
    /// The engine got these weights.
    Weights(u64),
    /// A batch was started, with its prompts.
    Started(Vec<Vec<u32>>),
    /// The completions of a batch were wanted, with its prompts.
    Wanted(Vec<Vec<u32>>),
    /// Prompts were completed at once.
    Generated(usize),
}

/// An engine that records its calls. Completions have the version that `version` makes from the current one.
#[derive(Clone)]
struct Recorder {
    events: Arc<Mutex<Vec<Event>>>,
    current: u64,
    version: fn(u64) -> u64,
}

impl Recorder {
    fn new(version: fn(u64) -> u64) -> Self {
        Self { events: Arc::default(), current: 0, version }
    }

    fn events(&self) -> Vec<Event> {
        std::mem::take(&mut self.events.lock().unwrap())
    }
}

fn completions(request: &RolloutRequest<'_>, version: u64) -> grpo_policy::Result<Vec<Completion>> {
    let one = |index: usize| {
        let ids =
            [CharTokenizer.encode(if index.is_multiple_of(2) { "7" } else { "8" })?, vec![CharTokenizer::EOS]].concat();
        let weight_versions = vec![WeightVersion { version, start: 0, end: ids.len() }];
        let logps = vec![-1.0; ids.len()];
        Ok(Completion { weight_versions, ..Completion::sampled(ids, logps, false) })
    };
    (0..request.prompts.len() * request.num_generations).map(one).collect()
}

impl RolloutEngine for Recorder {
    fn generate(&mut self, _: &mut dyn Policy, request: &RolloutRequest<'_>) -> grpo_policy::Result<Vec<Completion>> {
        self.events.lock().unwrap().push(Event::Generated(request.prompts.len()));
        completions(request, self.current)
    }

    fn update_weights(&mut self, _: &dyn Policy, version: u64) -> grpo_policy::Result<()> {
        self.current = version;
        self.events.lock().unwrap().push(Event::Weights(version));
        Ok(())
    }

    fn start(&mut self, request: &RolloutRequest<'_>) -> grpo_policy::Result<Pending> {
        self.events.lock().unwrap().push(Event::Started(request.prompts.to_vec()));
        let (events, version) = (Arc::clone(&self.events), (self.version)(self.current));
        Ok(Pending::new(move |request| {
            events.lock().unwrap().push(Event::Wanted(request.prompts.to_vec()));
            completions(request, version)
        }))
    }
}

fn config(max_staleness: u64) -> TrainConfig {
    let mut config = TrainConfig::built_in();
    config.warmup.steps = 0;
    config.rollout.max_staleness = max_staleness;
    config.rollout.max_completion_length = Some(4);
    config.grpo.max_steps = 4;
    (config.grpo.prompts_per_step, config.grpo.num_generations) = (2, 2);
    config.grpo.gradient_accumulation_steps = 1;
    config.eval.num_problems = Some(2);
    config
}

fn run(max_staleness: u64, engine: impl RolloutEngine + 'static) -> Trainer {
    let task = Arc::new(Addition { max_number: 99, zero_pad: false });
    let mut parts = grpo_setup::parts(&config(0)).unwrap().with_engine(engine);
    parts.rewards = scored("sevens", |input| Some(f32::from(u8::from(input.completion == "7"))));
    parts.dataset = Box::new(grpo_data::TaskMixture::from_tasks(vec![(task, 1.0)], 0.1, 0).unwrap());
    Trainer::with_parts(config(max_staleness), parts).unwrap()
}

/// Returns the prompts of the events that `select` selects, in order.
fn prompts(events: &[Event], select: fn(&Event) -> Option<&Vec<Vec<u32>>>) -> Vec<Vec<Vec<u32>>> {
    events.iter().filter_map(select).cloned().collect()
}

#[test]
fn batches_of_later_steps_are_started_before_a_step_waits() {
    let engine = Recorder::new(|version| version);
    let mut run = run(2, engine.clone());
    let mut order = Vec::new();
    let mut staleness = Vec::new();
    for _ in 0..4 {
        let report = run.grpo_step().unwrap();
        staleness.push(report.metric("sampling/staleness"));
        assert_eq!(report.metrics.value("sampling/stale_completions"), Some(0.0));
        assert!(report.samples.iter().all(|sample| sample.weight_versions.len() == 1));
        order.push(engine.events());
    }
    let kinds = |events: &[Event]| {
        let kind = |event: &Event| match event {
            Event::Weights(version) => format!("weights {version}"),
            Event::Started(_) => "start".to_owned(),
            Event::Wanted(_) => "wait".to_owned(),
            Event::Generated(_) => "generate".to_owned(),
        };
        events.iter().map(kind).collect::<Vec<_>>()
    };
    assert_eq!(kinds(&order[0]), ["weights 0", "start", "start", "start", "wait"]);
    assert_eq!(kinds(&order[1]), ["weights 1", "start", "wait"]);
    // No batch is started that no step would use.
    assert_eq!(kinds(&order[2]), ["weights 2", "wait"]);
    assert_eq!(kinds(&order[3]), ["weights 3", "wait"]);
    assert_eq!(staleness, [0.0, 1.0, 2.0, 2.0]);
    let all = order.concat();
    let started = prompts(&all, |event| if let Event::Started(prompts) = event { Some(prompts) } else { None });
    let wanted = prompts(&all, |event| if let Event::Wanted(prompts) = event { Some(prompts) } else { None });
    assert_eq!(started, wanted, "batches are trained on in the order of their start");
}

#[test]
fn completions_that_are_too_old_are_dropped_counted_and_sampled_again() {
    let engine = Recorder::new(|version| version.saturating_sub(2));
    let mut run = run(1, engine.clone());
    let mut dropped = Vec::new();
    for _ in 0..4 {
        let report = run.grpo_step().unwrap();
        dropped.push(report.metric("sampling/stale_completions"));
        let oldest = report.samples.iter().map(|sample| sample.weight_versions[0].version).min().unwrap();
        assert!(report.step - 1 - oldest <= 1, "step {}: {oldest}", report.step);
    }
    // Steps 3 and 4 have batches of weights 1 and 2, which the engine calls 0.
    assert_eq!(dropped, [0.0, 0.0, 4.0, 4.0]);
    let again = engine.events().into_iter().filter(|event| matches!(event, Event::Generated(_))).collect::<Vec<_>>();
    assert_eq!(again, [Event::Generated(2), Event::Generated(2)]);
}

/// An engine whose completions of a batch in the background have different weights: those of the first prompt old ones at the second place,
/// all others those of the start.
#[derive(Clone)]
struct Partly(Recorder);

impl RolloutEngine for Partly {
    fn generate(
        &mut self,
        policy: &mut dyn Policy,
        request: &RolloutRequest<'_>,
    ) -> grpo_policy::Result<Vec<Completion>> {
        self.0.generate(policy, request)
    }

    fn update_weights(&mut self, policy: &dyn Policy, version: u64) -> grpo_policy::Result<()> {
        self.0.update_weights(policy, version)
    }

    fn start(&mut self, _: &RolloutRequest<'_>) -> grpo_policy::Result<Pending> {
        let version = self.0.current;
        Ok(Pending::new(move |request| {
            let mut all = completions(request, version)?;
            all[1].weight_versions[0].version = version.saturating_sub(1);
            Ok(all)
        }))
    }
}

#[test]
fn only_the_prompts_of_stale_completions_are_sampled_again() {
    let recorder = Recorder::new(|version| version);
    let mut run = run(1, Partly(recorder.clone()));
    let mut reports = Vec::new();
    for _ in 0..4 {
        let report = run.grpo_step().unwrap();
        let versions: Vec<u64> = report.samples.iter().map(|sample| sample.weight_versions[0].version).collect();
        reports.push((report.metric("sampling/stale_completions"), versions));
    }
    // The batch of step n, from 1 on, was started with the weights of step n - 1. In steps 3 and 4, one completion is two steps old: both
    // completions of its prompt are sampled again, and the other prompt keeps its own.
    assert_eq!(reports[0], (0.0, vec![0; 4]));
    assert_eq!(reports[1], (0.0, vec![0; 4]));
    assert_eq!(reports[2], (1.0, vec![2, 2, 1, 1]));
    assert_eq!(reports[3], (1.0, vec![3, 3, 2, 2]));
    let again = recorder.events().into_iter().filter(|event| matches!(event, Event::Generated(_))).collect::<Vec<_>>();
    assert_eq!(again, [Event::Generated(1), Event::Generated(1)]);
}

#[test]
fn checkpoints_neither_skip_nor_repeat_rows() {
    let rows = |engine: &Recorder| {
        prompts(&engine.events(), |event| if let Event::Wanted(prompts) = event { Some(prompts) } else { None })
    };
    let whole = Recorder::new(|version| version);
    let mut uninterrupted = run(2, whole.clone());
    for _ in 0..4 {
        uninterrupted.grpo_step().unwrap();
    }
    let (first, second) = (Recorder::new(|version| version), Recorder::new(|version| version));
    let mut begun = run(2, first.clone());
    for _ in 0..2 {
        begun.grpo_step().unwrap();
    }
    let state = begun.state().unwrap();
    let mut in_turn = run(0, Recorder::new(|version| version));
    for _ in 0..2 {
        in_turn.grpo_step().unwrap();
    }
    assert_eq!(state.counters.data_cursor, in_turn.counters().data_cursor, "pending batches are not done");
    let mut resumed = run(2, second.clone());
    resumed.restore(&state).unwrap();
    for _ in 0..2 {
        resumed.grpo_step().unwrap();
    }
    assert_eq!(rows(&whole), [rows(&first), rows(&second)].concat());
    assert_eq!(resumed.counters().data_cursor, uninterrupted.counters().data_cursor);
}

#[test]
fn engines_get_weights_before_samples_whenever_they_have_changed() {
    let engine = Recorder::new(|version| version);
    let mut run = run(0, engine.clone());
    run.evaluate().unwrap();
    run.evaluate().unwrap();
    let updates = |engine: &Recorder| {
        let events = engine.events().into_iter();
        events
            .filter_map(|event| if let Event::Weights(version) = event { Some(version) } else { None })
            .collect::<Vec<_>>()
    };
    assert_eq!(updates(&engine), [0], "unchanged weights are not sent again");
    run.grpo_step().unwrap();
    assert!(updates(&engine).is_empty());
    run.evaluate().unwrap();
    run.grpo_step().unwrap();
    assert_eq!(updates(&engine), [1]);
    let state = run.state().unwrap();
    run.load_weights(&state.policy).unwrap();
    run.evaluate().unwrap();
    assert_eq!(updates(&engine), [2]);
    run.restore(&state).unwrap();
    run.evaluate().unwrap();
    assert_eq!(updates(&engine), [2], "restored weights may be others");
}

#[test]
fn pending_batches_of_other_weights_are_dropped() {
    let engine = Recorder::new(|version| version);
    let mut run = run(1, engine.clone());
    run.grpo_step().unwrap();
    let state = run.state().unwrap();
    run.load_weights(&state.policy).unwrap();
    engine.events();
    let report = run.grpo_step().unwrap();
    assert_eq!(report.metric("sampling/staleness"), 0.0);
    let started = engine.events().into_iter().filter(|event| matches!(event, Event::Started(_))).count();
    assert_eq!(started, 2);
}

/// Returns an engine's completions only while the caller waits.
struct Waits;

impl RolloutEngine for Waits {
    fn generate(&mut self, _: &mut dyn Policy, request: &RolloutRequest<'_>) -> grpo_policy::Result<Vec<Completion>> {
        completions(request, 0)
    }
}

#[test]
fn engines_that_cannot_sample_in_the_background_are_refused() {
    let error = run(1, Waits).grpo_step().unwrap_err().to_string();
    assert!(error.contains("rollout.max_staleness"), "{error}");
    let error = grpo_setup::trainer(config(1)).err().unwrap();
    assert!(matches!(error, grpo_setup::Error::Trainer(Error::Config(_))), "{error}");
    assert!(error.to_string().contains("`rollout.max_staleness`: expected 0, or rollout.engine vllm"), "{error}");
}
