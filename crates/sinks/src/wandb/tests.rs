use super::*;

fn options(dir: &Path) -> Options {
    Options {
        dir: dir.to_owned(),
        id: "abcd1234".into(),
        project: "p".into(),
        tags: vec!["t".into()],
        ..Options::default()
    }
}

fn records(part: &Path) -> Vec<What> {
    let bytes = std::fs::read(part.join("run-abcd1234.wandb")).unwrap();
    let (records, end) = framing::records(&bytes).unwrap();
    assert_eq!(end as usize, bytes.len());
    records.iter().map(|record| Record::decode(record.as_slice()).unwrap().what.unwrap()).collect()
}

/// Returns `_step` and the series' own step of every row.
fn rows(part: &Path) -> Vec<(i64, String)> {
    let of = |what| match what {
        What::History(history) => {
            let item = history.item.iter().find(|item| item.nested_key[0].ends_with("/global_step")).unwrap();
            Some((history.step.unwrap().num, format!("{} {}", item.nested_key[0], item.value_json)))
        }
        _ => None,
    };
    records(part).into_iter().filter_map(of).collect()
}

#[test]
fn resumed_wandb_run_is_a_new_part_without_repeated_steps() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Wandb::open(&options(dir.path()), &Map::new()).unwrap();
    first.log("warmup", 1, &[("loss", 1.0)]).unwrap();
    first.log("train", 1, &[("loss", f64::NAN)]).unwrap();
    let whole = first.offset;
    first.log("train", 2, &[("loss", 0.5)]).unwrap();
    // The process was killed while it wrote the last record.
    let file = first.folder().join("run-abcd1234.wandb");
    std::fs::write(&file, &std::fs::read(&file).unwrap()[..first.offset as usize - 1]).unwrap();

    let mut second = Wandb::open(&options(dir.path()), &Map::new()).unwrap();
    assert!(std::fs::metadata(&file).unwrap().len() >= whole);
    assert!(second.folder() > first.folder());
    second.log("train", 1, &[("loss", 9.0)]).unwrap();
    second.log("train", 2, &[("loss", 0.5)]).unwrap();
    second.log("eval", 2, &[("pass@1", 0.5)]).unwrap();
    second.finish(0).unwrap();
    assert_eq!(rows(first.folder()), [(0, "warmup/global_step 1".into()), (1, "train/global_step 1".into())]);
    assert_eq!(rows(second.folder()), [(2, "train/global_step 2".into()), (3, "eval/global_step 2".into())]);

    let resumes = |part| records(part).into_iter().any(|what| matches!(what, What::Run(run) if run.resume));
    assert!(!resumes(first.folder()) && resumes(second.folder()));
    assert!(matches!(records(second.folder()).pop(), Some(What::Exit(exit)) if exit.exit_code == 0));
}

#[test]
fn runs_with_other_ids_in_the_same_folder_are_separate() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = Wandb::open(&Options { id: "other".into(), ..options(dir.path()) }, &Map::new()).unwrap();
    other.log("train", 5, &[("loss", 1.0)]).unwrap();
    let mut run = Wandb::open(&options(dir.path()), &Map::new()).unwrap();
    run.log("train", 1, &[("loss", 1.0)]).unwrap();
    assert_eq!(rows(run.folder()), [(0, "train/global_step 1".into())]);
}

#[test]
fn wandb_part_with_other_content_is_named_in_the_error() {
    let dir = tempfile::tempdir().unwrap();
    let part = Wandb::open(&options(dir.path()), &Map::new()).unwrap();
    let file = part.folder().join("run-abcd1234.wandb");
    std::fs::write(&file, "something else").unwrap();
    let error = Wandb::open(&options(dir.path()), &Map::new()).unwrap_err().to_string();
    assert!(error.contains("run-abcd1234.wandb") && error.contains("move it elsewhere"), "{error}");
    // A file without a single byte, after a crash, is valid.
    std::fs::write(&file, "").unwrap();
    assert!(Wandb::open(&options(dir.path()), &Map::new()).is_ok());
}

#[test]
fn run_id_is_created_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("id");
    let id = run_id(&path).unwrap();
    assert_eq!((id.len(), &run_id(&path).unwrap()), (8, &id));
    std::fs::write(&path, "../x").unwrap();
    assert!(run_id(&path).unwrap_err().to_string().contains("../x"));
}
