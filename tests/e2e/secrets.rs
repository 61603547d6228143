//! Secrets of a configuration stay in config.yaml, whatever a run does with them and however it ends.

use crate::http::serve;
use crate::support::{Call, Runs, Said, assert_has, files, grpo, wait_for_end, wait_until};
use crate::tiny_model::call;
use std::path::Path;

/// Starts an endpoint that returns 1 for every completion. At `/echo` it returns the request.
fn endpoint() -> String {
    serve(|head, body| {
        if head.starts_with("POST /echo") {
            return (400, String::new(), head.into());
        }
        let body: serde_json::Value = serde_json::from_slice(body).expect("JSON");
        let count = body["inputs"].as_array().map_or(0, Vec::len);
        (200, String::new(), serde_json::json!({ "rewards": vec![1.0; count] }).to_string().into())
    })
}

/// The sections of a configuration with secrets wherever there may be some.
fn settings(runs: &Runs, address: &str, path: &str, script: &str) -> Vec<String> {
    let program = runs.write("judge.sh", script);
    vec![
        format!(
            "rewards.programs={{p: {{command: [/bin/sh, {program}, --api-key, S3CR3T-arg, --token=S3CR3T-opt], env: {{OPENAI_API_KEY: \
             S3CR3T-env, JUDGE_TOKEN: S3CR3T-tok}}}}}}"
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

/// Trains the small model with logs of everything.
fn train(runs: &Runs, name: &str, settings: &[String]) -> Call {
    logged(call(runs, "model", name, &[]).set(settings))
}

fn logged(call: Call) -> Call {
    call.with_path().env("GRPO_LOG", "trace")
}

/// Fails where a secret stands: as it is, or as basic authentication sends it.
fn assert_clean(what: &str, bytes: &[u8]) {
    for secret in ["S3CR3T", "dTpTM0NSM1QtdXJs"] {
        let at = bytes.windows(secret.len()).position(|window| window == secret.as_bytes());
        let place = at.map(|at| String::from_utf8_lossy(&bytes[at.saturating_sub(80)..(at + 40).min(bytes.len())]));
        assert_eq!(place, None, "{what}");
    }
}

fn assert_clean_output(said: &Said) {
    assert_clean("standard output", said.stdout.as_bytes());
    assert_clean("standard error", said.stderr.as_bytes());
}

/// Checks the output of a call that ends with `code`, and the files of a run except its config.yaml.
fn assert_clean_run(call: Call, code: i32, folder: &Path) -> Said {
    let said = call.exit(code);
    assert_clean_output(&said);
    for path in files(folder).iter().filter(|path| !path.ends_with("config.yaml")) {
        assert_clean(&path.display().to_string(), &std::fs::read(path).expect("a file"));
    }
    said
}

#[test]
fn secrets_of_a_run_stand_in_its_config_yaml_and_nowhere_else() {
    use std::os::unix::fs::PermissionsExt;
    let runs = Runs::small();
    let settings = settings(&runs, &endpoint(), "ok", JUDGE);
    let run = runs.path("a");
    assert_clean_run(train(&runs, "a", &settings), 0, &run);
    let config = || runs.read("a/config.yaml");
    assert!(config().contains("S3CR3T-auth"), "the run needs it");
    let mode = std::fs::metadata(run.join("config.yaml")).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_has(&runs.read("a/model/README.md"), &["Authorization: (hidden)", "--api-key"]);

    let printed = train(&runs, "a", &settings).args(["--print-config"]).exit(0);
    assert_clean_output(&printed);
    assert_has(&printed.stdout, &["OPENAI_API_KEY: (hidden)"]);

    // The run resumes with another key, and the key's value is not in the record of the change.
    let settings = ["grpo.max_steps=3", "rewards.http.j.headers.X-Api-Key=S3CR3T-other"];
    assert_clean_run(logged(runs.resume("a").set(settings)), 0, &run);
    assert!(config().contains("S3CR3T-other"));
    assert_has(&runs.read("a/changes.jsonl"), &["rewards.http.j.headers.X-Api-Key"]);
    // The error about a key that may not change shows no secrets.
    assert_clean_run(logged(runs.resume("a").set(["rewards.http.j.weight=2"])), 2, &run);

    let folder = runs.text("a");
    logged(grpo(["report", &folder, "--out", &runs.text("a/report.html")])).succeed();
    assert_clean_run(logged(grpo(["export", &folder, "--to", &runs.text("a/again")])), 0, &run);
}

#[test]
fn a_run_that_fails_shows_no_secret_and_its_error_is_in_the_report() {
    let runs = Runs::small();
    // The program answers the probe, and then prints its environment and arguments.
    let script = "read -r l; echo 1; read -r l; echo \"$OPENAI_API_KEY $JUDGE_TOKEN $2 $3\" | tee /dev/stderr; exit 1";
    let script = format!(
        "if [ -e \"$0.done\" ]; then echo \"$OPENAI_API_KEY $2\" | tee /dev/stderr; exit 1; fi; touch \"$0.done\"; {script}"
    );
    let settings = settings(&runs, &endpoint(), "ok", &script);
    let failing = train(&runs, "a", &settings).set(["rewards.max_consecutive_failures=4"]);
    assert_clean_run(failing, 2, &runs.path("a"));
    assert_has(&runs.read("a/failure.json"), &["has failed to judge 4 completions"]);
    let page = grpo(["report", &runs.text("a"), "--out", "-"]).succeed();
    assert_has(&page, &["ended with an error", "has failed to judge 4 completions"]);
    assert_clean("the page", page.as_bytes());

    // An endpoint that returns the headers fails the probe, and nothing is left behind.
    let settings = self::settings(&runs, &endpoint(), "echo", JUDGE);
    let said = train(&runs, "b", &settings).exit(2);
    assert_has(&said.stderr, &["status 400", "(hidden)"]);
    assert_clean_output(&said);
    assert!(!runs.path("b").exists());
    // Neither do values of a wrong type, nor settings that cannot be read.
    for bad in [
        "rewards.http.j.headers=S3CR3T-x",
        "rewards.programs={p: {command: judge.py --key S3CR3T-x}}",
        "rewards.http={j: {headers: {A: S3CR3T-x",
    ] {
        assert_clean_output(&grpo(["train", "--set", bad]).exit(2));
    }
}

#[test]
fn text_of_others_moves_no_cursor_in_errors_and_logs() {
    let runs = Runs::small();
    let script = "printf '\\033]0;pwn\\007\\342\\200\\256 odd\\n' >&2; printf '\\033[2J\\342\\200\\256\\n'";
    let settings = settings(&runs, &endpoint(), "ok", script);
    let text = train(&runs, "a", &settings).exit(2).stderr;
    assert!(!text.contains(['\u{1b}', '\u{7}', '\u{202e}']) && text.contains("\\u{1b}"), "{text:?}");
}

#[test]
fn programs_end_when_the_run_is_killed() {
    let runs = Runs::small();
    let ids = runs.path("ids");
    let hang = "trap '' TERM INT HUP; sleep 1000 & read -r l; echo 1; read -r l";
    let text = format!("{hang}; echo \"$$ $!\" > {0}.new; mv {0}.new {0}; while :; do sleep 1; done", ids.display());
    let judge = format!("rewards.programs={{judge: {{command: [/bin/sh, {}]}}}}", runs.write("hang.sh", text));
    let mut child = call(&runs, "model", "a", &[&judge]).with_path().spawn();
    wait_until(&mut child, "a question to the program", || ids.exists());
    child.kill().expect("SIGKILL");
    child.wait().expect("an end");
    runs.read("ids").split_whitespace().for_each(wait_for_end);
}
