use super::*;
use crate::Sink;
use crate::wandb::{Options, Wandb};
use std::os::unix::fs::PermissionsExt;

const ID: &str = "abcd1234";

fn run() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { dir: dir.path().to_owned(), id: ID.into(), project: "p".into(), ..Options::default() };
    let mut run = Wandb::open(&options, &serde_json::Map::new()).unwrap();
    run.finish(0).unwrap();
    let part = run.folder().to_owned();
    (dir, part)
}

/// Creates a program `wandb` that runs `script`, in a folder for `PATH`.
fn program(script: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("wandb");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// Returns the error of an upload with this `PATH`, with or without a key, and with a time limit.
fn refusal(path: &Path, key: bool, limit: Duration) -> String {
    let (dir, part) = run();
    let environment = |name: &str| match name {
        "PATH" => Some(path.as_os_str().to_owned()),
        "WANDB_API_KEY" => key.then(|| "k".into()),
        _ => None,
    };
    let error = upload_with(dir.path(), ID, &environment, limit).unwrap_err().to_string();
    assert!(error.ends_with(&format!("wandb sync {}", part.display())), "{error}");
    assert!(part.join("run-abcd1234.wandb").exists());
    error
}

#[test]
fn upload_names_the_missing_requirement() {
    let program = program("exit 0");
    let error = refusal(Path::new("/nonexistent"), true, LIMIT);
    assert!(error.contains("no program `wandb` on PATH"), "{error}");
    let error = refusal(program.path(), false, LIMIT);
    assert!(error.contains("WANDB_API_KEY") && error.contains("api.wandb.ai"), "{error}");
}

#[test]
fn upload_error_quotes_the_program() {
    let failing = program("echo 'wandb: ERROR the server is gone'; exit 3");
    let error = refusal(failing.path(), true, LIMIT);
    assert!(error.contains("the server is gone") && error.contains("exit status: 3"), "{error}");
    // A part that is not marked as uploaded was not uploaded.
    let error = refusal(program("echo 'half of it'").path(), true, LIMIT);
    assert!(error.contains("half of it") && error.contains("sync.log"), "{error}");
    let error = refusal(program("exec sleep 60").path(), true, Duration::from_millis(200));
    assert!(error.contains("did not end"), "{error}");
}

#[test]
fn uploaded_parts_are_not_uploaded_again() {
    let (dir, part) = run();
    let marking = program(r#"shift; for part; do touch "$part/run-abcd1234.wandb.synced"; done"#);
    let path = std::env::join_paths([marking.path(), Path::new("/bin"), Path::new("/usr/bin")]).unwrap();
    let environment = |name: &str| match name {
        "PATH" => Some(path.clone()),
        "WANDB_API_KEY" => Some("k".into()),
        _ => None,
    };
    upload_with(dir.path(), ID, &environment, LIMIT).unwrap();
    assert!(part.join("run-abcd1234.wandb.synced").exists());
    // Without pending parts, no requirement is missing.
    upload_with(dir.path(), ID, &|_| None, LIMIT).unwrap();
}

#[test]
fn upload_finds_a_key_in_netrc() {
    let home = tempfile::tempdir().unwrap();
    let netrc = home.path().join(".netrc");
    let find = |url: Option<&str>| {
        find_key(&|name| match name {
            "HOME" => Some(home.path().as_os_str().to_owned()),
            "WANDB_BASE_URL" => url.map(OsString::from),
            _ => None,
        })
    };
    assert!(find(None).is_err());
    std::fs::write(&netrc, "machine api.wandb.ai\n  login user\n  password key\n").unwrap();
    assert!(find(None).is_ok());
    let error = find(Some("https://wandb.example:8080/x")).unwrap_err();
    assert!(error.contains("wandb.example:8080"), "{error}");
    std::fs::write(&netrc, "machine wandb.example:8080 login user password key").unwrap();
    assert!(find(Some("https://wandb.example:8080/x")).is_ok());
}

#[test]
fn sync_command_is_quoted_for_a_shell() {
    assert_eq!(quote("runs/a-001/wandb"), "runs/a-001/wandb");
    assert_eq!(quote("my run's"), r"'my run'\''s'");
}
