use super::*;
use grpo_trainer::Parts;
use tempfile::TempDir;

mod best_model;
mod changed;
mod diverged;
mod failing;
mod logs;
mod moved;

fn config() -> TrainConfig {
    let mut config = TrainConfig::built_in();
    let shape = config.model.shape_mut();
    (shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers) = (16, 16, 1);
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

/// Returns an observer that calls a function after a row.
fn after(row: &'static str, act: impl Fn()) -> impl FnMut(Event<'_>) {
    move |event: Event<'_>| {
        if let Event::Row(found) = event
            && format!("{:?} {}", found.phase, found.step) == row
        {
            act();
        }
    }
}

/// Returns a temporary folder, and the path of a run in it.
fn run_path() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    (folder, path)
}

/// Runs until after a row, then stops with a checkpoint, whose name is returned.
fn stopped_after(config: TrainConfig, path: &Path, row: &'static str) -> String {
    match record(&mut Run::start(config, Some(path)).unwrap(), row).1 {
        Ending::Stopped { checkpoint } => checkpoint.file_name().unwrap().to_str().unwrap().to_owned(),
        Ending::Finished(_) => panic!("the run ended before {row}"),
    }
}

/// Runs to the end.
fn finish(run: &mut Run) -> Result<Summary> {
    match run.run(&mut (), &AtomicBool::new(false))? {
        Ending::Finished(summary) => Ok(*summary),
        Ending::Stopped { checkpoint } => panic!("stopped at {}", checkpoint.display()),
    }
}

/// Returns a new run after its end.
fn trained(config: TrainConfig, path: &Path) -> Run {
    let mut run = Run::start(config, Some(path)).unwrap();
    finish(&mut run).unwrap();
    run
}

/// Resumes from the newest checkpoint with changed keys.
fn resume(path: &Path, set: &[&str]) -> Result<Run> {
    Run::resume(path, None, &assignments(set))
}

fn weights(run: &Path) -> Vec<u8> {
    std::fs::read(run.join("checkpoints/step-000004/model.safetensors")).unwrap()
}

/// Fails unless the run in `path` has the weights of a run of `config` that is not disturbed.
fn assert_undisturbed(config: TrainConfig, path: &Path) {
    let whole = path.with_file_name("whole");
    trained(config, &whole);
    assert!(weights(path) == weights(&whole));
}

fn metrics(run: &Path) -> Vec<MetricsRow> {
    read_rows(&run.join("metrics.jsonl")).unwrap()
}

/// Replaces a text in a file of a run.
fn edit(path: &Path, file: &str, from: &str, to: &str) {
    let file = path.join(file);
    let yaml = std::fs::read_to_string(&file).unwrap();
    assert!(yaml.contains(from), "{from} is not in {yaml}");
    std::fs::write(&file, yaml.replace(from, to)).unwrap();
}

fn assignments(of: &[&str]) -> Vec<String> {
    of.iter().map(|assignment| (*assignment).to_owned()).collect()
}

/// Runs to the end, or until after an event. Returns all events.
fn record(run: &mut Run, stop_after: &str) -> (Vec<String>, Ending) {
    let (stop, mut heard) = (AtomicBool::new(false), Vec::new());
    let mut recorder = |event: Event<'_>| {
        let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        let text = match event {
            Event::Started { resumed, .. } => format!("started {resumed:?}"),
            Event::Phase { kind: RowKind::Eval, .. } => return,
            Event::Phase { kind, done, steps } => format!("{kind:?} {done}/{steps}"),
            Event::Row(row) => format!("{:?} {}", row.phase, row.step),
            Event::Completions(rows) => format!("{} completions", rows.len()),
            Event::Exported(path) => format!("exported {}", name(path)),
            Event::Saved(path) => format!("saved {}", name(path)),
            Event::Note(text) => format!("note {text}"),
        };
        stop.fetch_or(text == stop_after, Ordering::Relaxed);
        heard.push(text);
    };
    let ending = run.run(&mut recorder, &stop).unwrap();
    (heard, ending)
}

#[test]
fn a_run_reports_its_events_in_order() {
    let (_folder, path) = run_path();
    let (heard, ending) = record(&mut Run::start(config(), Some(&path)).unwrap(), "");
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
    for (row, saved) in [("Warmup 1", "warmup-000001"), ("Warmup 3", "warmup-000003"), ("Grpo 3", "step-000003")] {
        let (_folder, path) = run_path();
        assert_eq!(stopped_after(config(), &path, row), saved);
        let (heard, _) = record(&mut resume(&path, &[]).unwrap(), "");
        assert!(heard[0].starts_with("started Some"), "{heard:?}");
        assert_undisturbed(config(), &path);
    }
}

#[test]
fn a_run_with_eight_bit_moments_resumes_with_the_same_result() {
    let (_folder, path) = run_path();
    let mut config = config();
    let shape = config.model.shape_mut();
    (shape.hidden_size, shape.intermediate_size) = (64, 64);
    for optimizer in [&mut config.optimizer, &mut config.warmup.optimizer] {
        optimizer.settings.name = grpo_models::OptimizerName::AdamW8bit;
    }
    let checkpoint = stopped_after(config.clone(), &path, "Grpo 2");
    let moments = std::fs::read(path.join("checkpoints").join(checkpoint).join("optimizer.safetensors")).unwrap();
    let moments = String::from_utf8_lossy(&moments);
    let codes = r#""exp_avg_sq_codes.model.layers.0.self_attn.q_proj.weight":{"dtype":"U8""#;
    assert!(moments.contains(codes), "{}", moments.chars().take(4000).collect::<String>());
    finish(&mut resume(&path, &[]).unwrap()).unwrap();
    assert_undisturbed(config, &path);
}

#[test]
fn a_failed_resume_truncates_no_log_and_a_finished_run_never_starts_over() {
    let (_folder, path) = run_path();
    trained(config(), &path);
    let metrics = std::fs::read(path.join("metrics.jsonl")).unwrap();
    for (gone, words) in [("completions.jsonl", "completions.jsonl"), ("checkpoints", "checkpoints are gone")] {
        std::fs::rename(path.join(gone), path.join("gone")).unwrap();
        let error = resume(&path, &[]).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(std::fs::read(path.join("metrics.jsonl")).unwrap(), metrics);
        std::fs::rename(path.join("gone"), path.join(gone)).unwrap();
    }
}

#[test]
fn resuming_from_an_earlier_checkpoint_renames_later_results() {
    let (_folder, path) = run_path();
    trained(config(), &path);
    let [summary, metrics] = ["summary.json", "metrics.jsonl"].map(|file| std::fs::read(path.join(file)).unwrap());
    drop(Run::resume(&path, Some("step-000002"), &[]).unwrap());
    assert!(!path.join("summary.json").exists());
    assert_eq!(std::fs::read(path.join("summary.json.old-1")).unwrap(), summary);

    // Killed before a checkpoint: the run starts over and renames the existing rows.
    std::fs::remove_dir_all(path.join("checkpoints")).unwrap();
    std::fs::write(path.join("metrics.jsonl"), &metrics).unwrap();
    let mut run = resume(&path, &[]).unwrap();
    assert_eq!(std::fs::read(path.join("metrics.jsonl.old-1")).unwrap(), metrics);
    finish(&mut run).unwrap();
    assert!(path.join("summary.json").exists());
}

#[test]
fn sinks_continue_on_resume_and_do_not_change_the_run() {
    let (_folder, path) = run_path();
    let mut with_sinks = config();
    with_sinks.logging.tensorboard = true;
    with_sinks.wandb.mode = Some(grpo_sinks::wandb::Mode::Offline);
    stopped_after(with_sinks, &path, "Grpo 3");
    // The group of W&B may change, and the run resumes from before rows that the sinks already have.
    let set = assignments(&["wandb.group=g"]);
    let (heard, _) = record(&mut Run::resume(&path, Some("step-000002"), &set).unwrap(), "");
    let parts: Vec<_> = std::fs::read_dir(path.join("wandb")).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(parts.len(), 2);
    let note = heard.last().unwrap();
    assert!(note.starts_with("note upload with: wandb sync "), "{note}");
    assert!(parts.iter().all(|part| note.contains(part.to_str().unwrap())), "{note}");
    assert_eq!(std::fs::read_dir(path.join("tensorboard")).unwrap().count(), 2);

    // A finished run adds nothing.
    let (heard, _) = record(&mut resume(&path, &[]).unwrap(), "");
    assert!(!heard.iter().any(|line| line.starts_with("note")), "{heard:?}");
    assert_eq!(std::fs::read_dir(path.join("tensorboard")).unwrap().count(), 2);
    assert_undisturbed(config(), &path);
}

#[test]
fn a_sink_that_cannot_be_opened_is_an_error_before_any_step() {
    let (_folder, path) = run_path();
    std::fs::create_dir(&path).unwrap();
    let mut config = config();
    config.wandb.mode = Some(grpo_sinks::wandb::Mode::Offline);
    std::fs::write(path.join("wandb"), "a file").unwrap();
    let error = finish(&mut Run::start(config, Some(&path)).unwrap()).unwrap_err().to_string();
    assert!(error.contains("wandb"), "{error}");
    assert_eq!(std::fs::metadata(path.join("metrics.jsonl")).unwrap().len(), 0);
}

#[test]
fn a_wandb_folder_that_cannot_be_written_leaves_no_run() {
    let (folder, path) = run_path();
    let file = folder.path().join("file");
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
    let (_folder, path) = run_path();
    let with_limit = |max_num_gen_batches| {
        let mut config = config();
        config.rewards.partial = 1.0;
        config.grpo.filter_groups.enable = true;
        config.grpo.filter_groups.max_num_gen_batches = max_num_gen_batches;
        config
    };
    let error = finish(&mut Run::start(with_limit(1), Some(&path)).unwrap()).unwrap_err();
    assert!(matches!(error, Error::TooFewGroups { more: 2, .. }), "{error}");
    let command = format!("`grpo train --resume {} --set grpo.filter_groups.max_num_gen_batches=2`", path.display());
    assert!(error.to_string().contains(&command), "{error}");
    assert!(path.join("curves.svg").exists());
    finish(&mut resume(&path, &["grpo.filter_groups.max_num_gen_batches=500"]).unwrap()).unwrap();
    assert_undisturbed(with_limit(500), &path);
}
