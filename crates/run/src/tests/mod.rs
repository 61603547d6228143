use super::*;
use data::TaskMixture;
use data::task::Comparison;
use rewards::{RewardFn, RewardInput, Rewards};
use std::sync::Arc;
use trainer::Parts;

mod best_model;
mod changed;
mod diverged;
mod failing;
mod logs;
mod moved;

fn config() -> TrainConfig {
    let mut config = TrainConfig::built_in();
    config.model.shape_mut().hidden_size = 16;
    config.model.shape_mut().intermediate_size = 16;
    config.model.shape_mut().num_hidden_layers = 1;
    config.warmup.steps = 3;
    config.warmup.batch_size = 4;
    config.warmup.until_pass_at_1 = None;
    config.grpo.max_steps = 4;
    config.grpo.prompts_per_step = 2;
    config.grpo.num_generations = 2;
    config.eval.num_problems = Some(4);
    config.eval.num_generations = 1;
    config.eval.eval_steps = 2;
    config.run.save_steps = 2;
    config.run.log_completions_steps = 4;
    // Independent of the test's environment.
    config.wandb.mode = Some(grpo_sinks::wandb::Mode::Disabled);
    config
}

/// Records events, and stops the run after one of them.
struct Recorder<'a> {
    heard: Vec<String>,
    stop: &'a AtomicBool,
    stop_after: &'static str,
}

impl Observer for Recorder<'_> {
    fn event(&mut self, event: Event<'_>) {
        let text = match event {
            Event::Started { resumed, .. } => format!("started {resumed:?}"),
            Event::Phase { kind: RowKind::Eval, .. } => return,
            Event::Phase { kind, done, steps } => format!("{kind:?} {done}/{steps}"),
            Event::Row(row) => format!("{:?} {}", row.phase, row.step),
            Event::Completions(rows) => format!("{} completions", rows.len()),
            Event::Exported(path) => format!("exported {}", path.file_name().unwrap().to_string_lossy()),
            Event::Saved(path) => format!("saved {}", path.file_name().unwrap().to_string_lossy()),
            Event::Note(text) => format!("note {text}"),
        };
        if text == self.stop_after {
            self.stop.store(true, Ordering::Relaxed);
        }
        self.heard.push(text);
    }
}

/// Calls a function after a row.
struct After<'a>(&'static str, &'a dyn Fn());

impl Observer for After<'_> {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Row(row) = event
            && format!("{:?} {}", row.phase, row.step) == self.0
        {
            (self.1)();
        }
    }
}

/// Runs until after a row, then stops with a checkpoint.
fn stopped_after(config: TrainConfig, path: &Path, row: &'static str) {
    let (_, ending) = record(&mut Run::start(config, Some(path)).unwrap(), row);
    assert!(matches!(ending, Ending::Stopped { .. }));
}

fn finish(run: &mut Run) -> Result<Ending> {
    run.run(&mut (), &AtomicBool::new(false))
}

fn weights(run: &Path) -> Vec<u8> {
    std::fs::read(run.join("checkpoints/step-000004/model.safetensors")).unwrap()
}

fn assignments(of: &[&str]) -> Vec<String> {
    of.iter().map(|assignment| (*assignment).to_owned()).collect()
}

fn record(run: &mut Run, stop_after: &'static str) -> (Vec<String>, Ending) {
    let stop = AtomicBool::new(false);
    let mut recorder = Recorder { heard: Vec::new(), stop: &stop, stop_after };
    let ending = run.run(&mut recorder, &stop).unwrap();
    (recorder.heard, ending)
}

#[test]
fn a_run_reports_its_events_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::start(config(), Some(&folder.path().join("a"))).unwrap();
    let (heard, ending) = record(&mut run, "");
    let expected = [
        "started None",
        "Warmup 0/3",
        "Warmup 1",
        "Warmup 2",
        "saved warmup-000002",
        "Warmup 3",
        "Eval 0",
        "saved step-000000",
        "Grpo 0/4",
        "Grpo 1",
        "Grpo 2",
        "Eval 2",
        "saved step-000002",
        "Grpo 3",
        "Grpo 4",
        "4 completions",
        "Eval 4",
        "saved step-000004",
    ];
    assert_eq!(heard, expected);
    assert!(matches!(ending, Ending::Finished(summary) if summary.steps == 4));
}

#[test]
fn a_stopped_run_resumes_with_the_same_result() {
    for (stop_after, saved) in [("Warmup 1", "warmup-000001"), ("Warmup 3", "warmup-000003"), ("Grpo 3", "step-000003")]
    {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let (_, ending) = record(&mut Run::start(config(), Some(&path)).unwrap(), stop_after);
        assert!(matches!(ending, Ending::Stopped { checkpoint } if checkpoint.ends_with(saved)));
        let (heard, ending) = record(&mut Run::resume(&path, None, &[]).unwrap(), "");
        assert!(heard[0].starts_with("started Some"), "{heard:?}");
        assert!(matches!(ending, Ending::Finished(_)));

        let whole = folder.path().join("whole");
        record(&mut Run::start(config(), Some(&whole)).unwrap(), "");
        let weights = |run: &Path| std::fs::read(run.join("checkpoints/step-000004/model.safetensors")).unwrap();
        assert!(weights(&path) == weights(&whole), "stopped after {stop_after}");
    }
}

#[test]
fn custom_tasks_and_rewards_can_be_trained() {
    struct Short;
    impl RewardFn for Short {
        fn name(&self) -> &str {
            "short"
        }
        fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
            Some(-(input.completion.len() as f32))
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let dataset = TaskMixture::from_tasks(vec![(Arc::new(Comparison { max_number: 50 }), 1.0)], 0.1, 0).unwrap();
    let rewards = Rewards::from_terms(vec![(Box::new(Short), 1.0)]).unwrap();
    let mut config = config();
    config.rollout.batch_size = 8;
    let parts = Parts { dataset: Box::new(dataset), rewards, ..Parts::from_config(&config).unwrap() };
    let trainer = Trainer::with_parts(config, parts).unwrap();
    let mut run = Run::start_with(trainer, Some(&folder.path().join("a"))).unwrap();
    run.run(&mut (), &AtomicBool::new(false)).unwrap();
    let rows: Vec<MetricsRow> = read_rows(&run.dir().metrics_path()).unwrap();
    assert!(rows.iter().any(|row| row.get("rewards/short/mean").is_some_and(|r| r < 0.0)));
}

#[test]
fn an_invalid_configuration_leaves_no_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let mut bad = config();
    bad.model.shape_mut().hidden_size = 15;
    assert!(Run::start(bad, Some(&path)).is_err());
    assert!(!path.exists());
}

#[test]
fn a_failed_resume_truncates_no_log_and_a_finished_run_never_starts_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let mut run = Run::start(config(), Some(&path)).unwrap();
    run.run(&mut (), &AtomicBool::new(false)).unwrap();
    drop(run);
    let metrics = std::fs::read(path.join("metrics.jsonl")).unwrap();

    std::fs::remove_file(path.join("completions.jsonl")).unwrap();
    let error = Run::resume(&path, Some("step-000002"), &[]).err().unwrap().to_string();
    assert!(error.contains("completions.jsonl"), "{error}");
    assert_eq!(std::fs::read(path.join("metrics.jsonl")).unwrap(), metrics);

    std::fs::remove_dir_all(path.join("checkpoints")).unwrap();
    let error = Run::resume(&path, None, &[]).err().unwrap().to_string();
    assert!(error.contains("checkpoints are gone"), "{error}");
    assert_eq!(std::fs::read(path.join("metrics.jsonl")).unwrap(), metrics);
}

#[test]
fn resuming_from_an_earlier_checkpoint_renames_later_results() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let finish = |mut run: Run| run.run(&mut (), &AtomicBool::new(false)).unwrap();
    finish(Run::start(config(), Some(&path)).unwrap());
    let summary = std::fs::read(path.join("summary.json")).unwrap();
    let metrics = std::fs::read(path.join("metrics.jsonl")).unwrap();

    let run = Run::resume(&path, Some("step-000002"), &[]).unwrap();
    assert!(!path.join("summary.json").exists());
    assert_eq!(std::fs::read(path.join("summary.json.old-1")).unwrap(), summary);
    drop(run);

    // Killed before a checkpoint: the run starts over and renames the existing rows.
    std::fs::remove_dir_all(path.join("checkpoints")).unwrap();
    std::fs::write(path.join("metrics.jsonl"), &metrics).unwrap();
    let run = Run::resume(&path, None, &[]).unwrap();
    assert_eq!(std::fs::read(path.join("metrics.jsonl.old-1")).unwrap(), metrics);
    finish(run);
    assert!(path.join("summary.json").exists());
}

#[test]
fn sinks_continue_on_resume_and_do_not_change_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    let mut with_sinks = config();
    with_sinks.logging.tensorboard = true;
    with_sinks.wandb.mode = Some(grpo_sinks::wandb::Mode::Offline);
    let (_, ending) = record(&mut Run::start(with_sinks, Some(&path)).unwrap(), "Grpo 3");
    assert!(matches!(ending, Ending::Stopped { .. }));
    // The group of W&B may change, and the run resumes from before rows that the sinks already have.
    let yaml = std::fs::read_to_string(path.join("config.yaml")).unwrap();
    assert!(yaml.contains("group: null"));
    std::fs::write(path.join("config.yaml"), yaml.replace("group: null", "group: g")).unwrap();
    let (heard, _) = record(&mut Run::resume(&path, Some("step-000002"), &[]).unwrap(), "");
    let parts: Vec<_> = std::fs::read_dir(path.join("wandb")).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(parts.len(), 2);
    let note = heard.last().unwrap();
    assert!(note.starts_with("note upload with: wandb sync "), "{note}");
    assert!(parts.iter().all(|part| note.contains(part.to_str().unwrap())), "{note}");
    assert_eq!(std::fs::read_dir(path.join("tensorboard")).unwrap().count(), 2);

    // A finished run adds nothing.
    let (heard, _) = record(&mut Run::resume(&path, None, &[]).unwrap(), "");
    assert!(!heard.iter().any(|line| line.starts_with("note")), "{heard:?}");
    assert_eq!(std::fs::read_dir(path.join("tensorboard")).unwrap().count(), 2);

    let plain = folder.path().join("plain");
    record(&mut Run::start(config(), Some(&plain)).unwrap(), "");
    let weights = |run: &Path| std::fs::read(run.join("checkpoints/step-000004/model.safetensors")).unwrap();
    assert!(weights(&path) == weights(&plain));
}

#[test]
fn a_sink_that_cannot_be_opened_is_an_error_before_any_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    std::fs::create_dir(&path).unwrap();
    let mut config = config();
    config.wandb.mode = Some(grpo_sinks::wandb::Mode::Offline);
    std::fs::write(path.join("wandb"), "a file").unwrap();
    let mut run = Run::start(config, Some(&path)).unwrap();
    let error = run.run(&mut (), &AtomicBool::new(false)).unwrap_err().to_string();
    assert!(error.contains("wandb"), "{error}");
    assert_eq!(std::fs::metadata(path.join("metrics.jsonl")).unwrap().len(), 0);
}

#[test]
fn a_wandb_folder_that_cannot_be_written_leaves_no_run() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = (folder.path().join("a"), folder.path().join("file"));
    std::fs::write(&file, "").unwrap();
    let mut config = config();
    config.wandb.mode = Some(grpo_sinks::wandb::Mode::Offline);
    config.wandb.dir = Some(file.join("runs"));
    let error = Run::start(config.clone(), Some(&path)).err().unwrap().to_string();
    assert!(error.contains("file/runs/wandb"), "{error}");
    assert!(!path.exists());
    // A folder to which nothing is written need not exist.
    config.wandb.mode = Some(grpo_sinks::wandb::Mode::Disabled);
    Run::start(config, Some(&path)).unwrap();
}

#[test]
fn a_run_with_too_few_groups_can_resume_with_a_higher_limit() {
    let folder = tempfile::tempdir().unwrap();
    let (path, whole) = (folder.path().join("a"), folder.path().join("whole"));
    let with_limit = |max_num_gen_batches| {
        let mut config = config();
        config.rewards.partial = 1.0;
        config.grpo.filter_groups.enable = true;
        config.grpo.filter_groups.max_num_gen_batches = max_num_gen_batches;
        config
    };
    let mut run = Run::start(with_limit(1), Some(&path)).unwrap();
    let error = run.run(&mut (), &AtomicBool::new(false)).unwrap_err();
    assert!(matches!(error, Error::Trainer(trainer::Error::TooFewGroups { batches: 1, .. })), "{error}");
    assert!(path.join("curves.svg").exists());
    drop(run);

    let yaml = std::fs::read_to_string(path.join("config.yaml")).unwrap();
    assert!(yaml.contains("max_num_gen_batches: 1\n"));
    std::fs::write(path.join("config.yaml"), yaml.replace("max_num_gen_batches: 1\n", "max_num_gen_batches: 500\n"))
        .unwrap();
    record(&mut Run::resume(&path, None, &[]).unwrap(), "");
    record(&mut Run::start(with_limit(500), Some(&whole)).unwrap(), "");
    let weights = |run: &Path| std::fs::read(run.join("checkpoints/step-000004/model.safetensors")).unwrap();
    assert!(weights(&path) == weights(&whole));
}
