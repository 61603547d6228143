//! Secrets of a configuration stay in config.yaml, whatever a run does with them and however it ends.

use crate::support::{Runs, command, grpo, stderr, stdout};
use crate::tiny_model::{arguments, prepare};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Output;

/// Starts an endpoint that returns 1 for every completion. At `/echo` it returns the request.
fn endpoint() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| drop(answer(&stream))));
    address
}

fn answer(mut stream: &TcpStream) -> std::io::Result<()> {
    let (mut reader, mut head, mut length) = (BufReader::new(stream), String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line == "\r\n" {
            break;
        }
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        head.push_str(&line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let (status, text) = if head.starts_with("POST /echo") {
        (400, head)
    } else {
        let body: serde_json::Value = serde_json::from_slice(&body)?;
        let count = body["inputs"].as_array().map_or(0, Vec::len);
        (200, serde_json::json!({ "rewards": vec![1.0; count] }).to_string())
    };
    let length = text.len();
    write!(stream, "HTTP/1.1 {status} Said\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}")
}

/// The sections of a configuration with secrets wherever there may be some.
fn settings(runs: &Runs, address: &str, path: &str, script: &str) -> Vec<String> {
    let program = runs.path("judge.sh");
    std::fs::write(&program, script).expect("a script");
    vec![
        format!(
            "rewards.programs={{p: {{command: [/bin/sh, {}, --api-key, S3CR3T-arg, --token=S3CR3T-opt], env: {{OPENAI_API_KEY: \
             S3CR3T-env, JUDGE_TOKEN: S3CR3T-tok}}}}}}",
            program.display()
        ),
        format!(
            "rewards.http={{j: {{url: 'http://u:S3CR3T-url@{address}/{path}?api_key=S3CR3T-query', retries: 0, headers: {{Authorization: \
             Bearer S3CR3T-auth, X-Api-Key: S3CR3T-xkey, Cookie: id=S3CR3T-cookie}}}}}}"
        ),
        "wandb={mode: offline}".to_owned(),
        "logging.tensorboard=true".to_owned(),
    ]
}

const JUDGE: &str = "while read -r l; do echo \"$OPENAI_API_KEY $2 $3\" >&2; echo 1; done";

/// `arguments`, with logs of everything.
fn run(arguments: &[String]) -> Output {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    command(&arguments).env("PATH", path).env("GRPO_LOG", "trace").output().expect("the binary starts")
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() { files(&path, found) } else { found.push(path) }
    }
}

/// Fails where a secret stands: as it is, or as basic authentication sends it.
fn assert_clean(what: &str, bytes: &[u8]) {
    for secret in ["S3CR3T", "dTpTM0NSM1QtdXJs"] {
        let at = bytes.windows(secret.len()).position(|window| window == secret.as_bytes());
        let place = at.map(|at| String::from_utf8_lossy(&bytes[at.saturating_sub(80)..(at + 40).min(bytes.len())]));
        assert_eq!(place, None, "{what}");
    }
}

fn assert_clean_run(output: &Output, folder: &Path) {
    assert_clean("standard output", &output.stdout);
    assert_clean("standard error", &output.stderr);
    let mut found = vec![];
    files(folder, &mut found);
    for path in found.iter().filter(|path| !path.ends_with("config.yaml")) {
        assert_clean(&path.display().to_string(), &std::fs::read(path).expect("a file"));
    }
}

#[test]
fn secrets_of_a_run_stand_in_its_config_yaml_and_nowhere_else() {
    use std::os::unix::fs::PermissionsExt;
    let runs = Runs::new(&[]);
    prepare(&runs);
    let settings = settings(&runs, &endpoint(), "ok", JUDGE);
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let mut train = arguments(&runs, "model", "a", &settings);
    let output = run(&train);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_clean_run(&output, &runs.path("a"));
    let config = runs.path("a/config.yaml");
    assert!(std::fs::read_to_string(&config).expect("a configuration").contains("S3CR3T-auth"), "the run needs it");
    assert_eq!(std::fs::metadata(&config).expect("a file").permissions().mode() & 0o777, 0o600);
    let card = std::fs::read_to_string(runs.path("a/model/README.md")).expect("a card");
    assert!(card.contains("Authorization: (hidden)") && card.contains("--api-key"), "{card}");

    train.push("--print-config".to_owned());
    let output = run(&train);
    assert_clean_run(&output, Path::new("/nonexistent"));
    assert!(stdout(&output).contains("OPENAI_API_KEY: (hidden)"), "{}", stdout(&output));

    // It goes on with another key, which is recorded without being named.
    let resume = ["train", "--resume", &runs.text("a"), "--set", "grpo.max_steps=3", "--set"].map(str::to_owned);
    let key = "rewards.http.j.headers.X-Api-Key=S3CR3T-other".to_owned();
    let output = run(&[&resume[..], &[key]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_clean_run(&output, &runs.path("a"));
    assert!(std::fs::read_to_string(&config).expect("a configuration").contains("S3CR3T-other"));
    let changes = std::fs::read_to_string(runs.path("a/changes.jsonl")).expect("changes");
    assert!(changes.contains("rewards.http.j.headers.X-Api-Key"), "{changes}");
    // The error about a key that may not change shows no secrets.
    let output = run(&["train", "--resume", &runs.text("a"), "--set", "rewards.http.j.weight=2"].map(str::to_owned));
    assert_eq!(output.status.code(), Some(2));
    assert_clean_run(&output, &runs.path("a"));

    let output = run(&["report", &runs.text("a"), "--out", &runs.text("a/report.html")].map(str::to_owned));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let output = run(&["export", &runs.text("a"), "--to", &runs.text("a/again")].map(str::to_owned));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_clean_run(&output, &runs.path("a"));
}

#[test]
fn a_run_that_fails_shows_no_secret_and_its_error_is_in_the_report() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    // The program answers the probe, and then prints its environment and arguments.
    let script = "read -r l; echo 1; read -r l; echo \"$OPENAI_API_KEY $JUDGE_TOKEN $2 $3\" | tee /dev/stderr; exit 1";
    let script = format!(
        "if [ -e \"$0.done\" ]; then echo \"$OPENAI_API_KEY $2\" | tee /dev/stderr; exit 1; fi; touch \"$0.done\"; {script}"
    );
    let settings = settings(&runs, &endpoint(), "ok", &script);
    let mut settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    settings.push("rewards.max_consecutive_failures=4");
    let output = run(&arguments(&runs, "model", "a", &settings));
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert_clean_run(&output, &runs.path("a"));
    let failure = std::fs::read_to_string(runs.path("a/failure.json")).expect("what ended the run");
    assert!(failure.contains("has failed to judge 4 completions"), "{failure}");
    let output = grpo(&["report", &runs.text("a"), "--out", "-"]);
    let page = stdout(&output);
    assert!(page.contains("ended with an error") && page.contains("has failed to judge 4 completions"), "{page}");
    assert_clean("the page", page.as_bytes());

    // An endpoint that says headers again fails the probe, and nothing is left behind.
    let settings = self::settings(&runs, &endpoint(), "echo", JUDGE);
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let output = run(&arguments(&runs, "model", "b", &settings));
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("status 400") && stderr(&output).contains("(hidden)"), "{}", stderr(&output));
    assert_clean_run(&output, &runs.path("b"));
    // Neither do values of a wrong type, nor settings that cannot be read.
    for bad in [
        "rewards.http.j.headers=S3CR3T-x",
        "rewards.programs={p: {command: judge.py --key S3CR3T-x}}",
        "rewards.http={j: {headers: {A: S3CR3T-x",
    ] {
        let output = grpo(&["train", "--set", bad]);
        assert_eq!(output.status.code(), Some(2), "{bad}");
        assert_clean_run(&output, Path::new("/nonexistent"));
    }
}

#[test]
fn text_of_others_moves_no_cursor_in_errors_and_logs() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let script = "printf '\\033]0;pwn\\007\\342\\200\\256 odd\\n' >&2; printf '\\033[2J\\342\\200\\256\\n'";
    let settings = settings(&runs, &endpoint(), "ok", script);
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let output = run(&arguments(&runs, "model", "a", &settings));
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let text = stderr(&output);
    assert!(!text.contains(['\u{1b}', '\u{7}', '\u{202e}']) && text.contains("\\u{1b}"), "{text:?}");
}

#[test]
fn programs_end_when_the_run_is_killed() {
    let runs = Runs::new(&[]);
    prepare(&runs);
    let (ids, script) = (runs.path("ids"), runs.path("hang.sh"));
    let hang = "trap '' TERM INT HUP; sleep 1000 & read -r l; echo 1; read -r l";
    let text = format!("{hang}; echo \"$$ $!\" > {0}.new; mv {0}.new {0}; while :; do sleep 1; done", ids.display());
    std::fs::write(&script, text).expect("a script");
    let judge = format!("rewards.programs={{judge: {{command: [/bin/sh, {}]}}}}", script.display());
    let arguments = arguments(&runs, "model", "a", &[&judge]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut child =
        command(&arguments).env("PATH", std::env::var_os("PATH").unwrap_or_default()).spawn().expect("starts");
    crate::support::wait_until(&mut child, "a question to the program", || ids.exists());
    child.kill().expect("SIGKILL");
    child.wait().expect("an end");
    let ids = std::fs::read_to_string(&ids).expect("numbers of processes");
    let limit = std::time::Instant::now() + std::time::Duration::from_secs(30);
    for id in ids.split_whitespace() {
        let stat = Path::new("/proc").join(id).join("stat");
        while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z")) {
            assert!(std::time::Instant::now() < limit, "process {id} still runs");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}
