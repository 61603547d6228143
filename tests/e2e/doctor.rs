//! `grpo doctor` finds problems that a test has made, and shows no secret.

use crate::http::serve;
use crate::manners::on_terminal;
use crate::support::{Call, Runs, Said, assert_has, grpo};
use console::{measure_text_width, strip_ansi_codes};
use grpo_pjrt::install::Kind;
use serde_json::{Value, json};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Every check of a machine where nothing is missing.
const CHECKS: [&str; 23] = [
    "program.build",
    "processor.model",
    "processor.kernels",
    "threads.number",
    "memory.available",
    "memory.control_group",
    "memory.ulimits",
    "memory.huge_pages",
    "plugins.cpu",
    "plugins.tpu",
    "plugins.cuda",
    "python.interpreter",
    "python.pip",
    "python.index",
    "caches.plugins",
    "caches.programs",
    "caches.analyses",
    "caches.hub",
    "disk.caches",
    "disk.hub",
    "disk.here",
    "hub.access",
    "hub.token",
];

/// A user without plugins, caches, Python and network. The time limit allows for a busy machine.
fn doctor(runs: &Runs) -> Call {
    limited(runs, "300")
}

/// Like [`doctor`], with a time limit in seconds.
fn limited(runs: &Runs, seconds: &str) -> Call {
    let call =
        grpo(["doctor", "--time-limit", seconds]).env("HOME", runs.path("")).env("XDG_CACHE_HOME", runs.path("cache"));
    call.env("HF_HUB_OFFLINE", "1").env("PATH", "/nowhere").at(&runs.path(""))
}

/// Returns the document of a call, whose exit code must agree with its problems.
#[track_caller]
fn report(call: Call) -> Value {
    let said = call.args(["--json"]).output();
    let report = said.json();
    let checks = report["checks"].as_array().expect("checks");
    for check in checks {
        let keys: Vec<&String> = check.as_object().expect("an object").keys().collect();
        assert_eq!(keys, ["id", "status", "found", "advice", "values"], "{check}");
        assert!(check["values"].is_object() && !check["found"].as_str().expect("text").is_empty(), "{check}");
        assert!(check["status"] != "problem" || check["advice"].is_string(), "a problem without advice: {check}");
    }
    let count = |status: &str| checks.iter().filter(|check| check["status"] == status).count();
    assert_eq!((&report["problems"], &report["notes"]), (&json!(count("problem")), &json!(count("note"))));
    assert_eq!(said.code, Some(i32::from(count("problem") > 0)), "{said}");
    assert!(!said.stderr.contains("panicked"), "{said}");
    report
}

#[track_caller]
fn check<'a>(report: &'a Value, id: &str) -> &'a Value {
    let mut checks = report["checks"].as_array().expect("checks").iter();
    checks.find(|check| check["id"] == id).unwrap_or_else(|| panic!("no {id} in {report}"))
}

/// Fails unless the check has this status, and its finding and advice have all of `words`.
#[track_caller]
fn assert_check(report: &Value, id: &str, status: &str, words: &[&str]) {
    let check = check(report, id);
    assert_eq!(check["status"], status, "{check}");
    assert_has(&format!("{} {}", check["found"], check["advice"]), words);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_machine_with_a_plugin_python_and_a_hub_has_every_check() {
    let runs = Runs::new(&[]);
    let address = serve(|_, _| (401, String::new(), b"{}".to_vec()));
    let hub = format!("http://{address}");
    let call = || {
        let call = grpo(["doctor", "--time-limit", "300"]).plugin(Kind::Cpu).with_path().at(&runs.path(""));
        call.env("HOME", runs.path("")).env("HF_ENDPOINT", &hub).env("HF_HUB_CACHE", runs.path(""))
    };
    let report = report(call());
    assert_eq!(report["format"], "grpo-doctor/1");
    let ids: Vec<&str> = report["checks"].as_array().expect("checks").iter().filter_map(|c| c["id"].as_str()).collect();
    assert_eq!(ids, CHECKS);
    assert_check(&report, "plugins.cpu", "ok", &["PJRT API 0.", " (cpu), "]);
    let plugin = &check(&report, "plugins.cpu")["values"];
    assert_eq!(
        (&plugin["state"], &plugin["platform"], &plugin["kind"]),
        (&json!("ready"), &json!("cpu"), &json!("cpu"))
    );
    assert_check(&report, "hub.access", "ok", &[&format!("{hub} responds")]);
    assert_check(&report, "hub.token", "ok", &["none"]);
    assert!(check(&report, "memory.available")["values"]["total_bytes"].as_u64() > Some(1 << 28), "{report}");
    assert!(check(&report, "caches.plugins")["values"]["bytes"].as_u64() > Some(1 << 20), "{report}");
    let kernels = &check(&report, "processor.kernels")["values"];
    assert_eq!(kernels["chosen"], grpo_backend_cpu::Isa::detect().name());
    assert_check(&report, "python.interpreter", "ok", &["3."]);

    // The lines have the same checks.
    let text = call().output().stdout;
    for check in report["checks"].as_array().expect("checks") {
        let (group, name) = check["id"].as_str().and_then(|id| id.split_once('.')).expect("a name");
        let (_, lines) = text.split_once(&format!("\n{group}\n")).expect("a group");
        let status = check["status"].as_str().expect("text");
        let line = lines.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        assert!(line.into_iter().any(|words| words.starts_with(&[status, name])), "{check}\n{text}");
    }
}

#[test]
fn without_plugins_python_and_network_there_are_notes_only() {
    let runs = Runs::new(&[]);
    let report = report(doctor(&runs));
    assert_eq!(report["problems"], 0, "{report}");
    assert_check(&report, "plugins.cpu", "note", &["not installed", "`grpo plugin install cpu`"]);
    assert_check(&report, "python.interpreter", "note", &["no `python3` on PATH", "install Python 3"]);
    assert_check(&report, "hub.access", "note", &["HF_HUB_OFFLINE"]);
    assert_check(&report, "caches.hub", "ok", &["empty", &runs.text("cache/huggingface/hub")]);
    // A user without a home.
    let homeless = self::report(grpo(["doctor"]).env("PATH", "/nowhere").env("HF_HUB_OFFLINE", "1").at(&runs.path("")));
    assert_check(&homeless, "caches.plugins", "note", &["set HOME or XDG_CACHE_HOME"]);
}

/// Compiles a library with a function `GetPjrtApi` of this body.
fn library(runs: &Runs, name: &str, body: &str) -> String {
    let source = runs.write(&format!("{name}.c"), format!("void *GetPjrtApi(void) {{ {body} }}\n"));
    let path = runs.text(&format!("{name}.so"));
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-w", "-o", &path, &source]).output().expect("a C compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    path
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn plugins_that_crash_hang_or_are_none_are_problems() {
    let runs = Runs::new(&[]);
    let text = runs.write("text.so", "not a library");
    let crashing = library(&runs, "crashing", "__builtin_trap(); return 0;");
    let hanging = library(&runs, "hanging", "volatile int on = 1; while (on) {} return 0;");
    let missing = runs.text("missing.so");
    for (path, seconds, words) in [
        (&text, "300", "it is no shared library"),
        (&crashing, "300", "the plugin has ended its process (signal: "),
        (&hanging, "3", "the plugin does not load within 3 s"),
        (&missing, "300", "there is no such file"),
    ] {
        let report = report(limited(&runs, seconds).env("GRPO_PJRT_PLUGIN", path));
        assert_check(&report, "plugins.named", "problem", &["GRPO_PJRT_PLUGIN", path, words, "or unset it"]);
        let ids = report["checks"].as_array().expect("checks").iter().filter_map(|check| check["id"].as_str());
        assert_eq!(ids.filter(|id| id.starts_with("plugins.")).count(), 1, "{report}");
    }
}

#[test]
fn a_damaged_plugin_needs_python_and_says_how_to_install_it_again() {
    let runs = Runs::new(&[]);
    let library = "cache/grpo/plugins/cpu-0.0.1/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so";
    std::fs::create_dir_all(runs.path(library).parent().expect("a folder")).expect("a folder");
    runs.write(library, "planted");
    let report = report(doctor(&runs));
    assert_check(&report, "plugins.cpu", "problem", &["no list of its files", "run `grpo plugin install cpu --force`"]);
    assert_eq!(check(&report, "plugins.cpu")["values"]["state"], "unusable");
    assert_check(&report, "python.interpreter", "problem", &["no `python3` on PATH", "install Python 3"]);
    // The size of the cache counts the damaged file.
    assert_eq!(check(&report, "caches.plugins")["values"]["bytes"], "planted".len());
}

#[test]
fn python_without_pip_and_an_index_that_does_not_respond_are_named() {
    let runs = Runs::new(&[]);
    let python = |script: &str| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::create_dir_all(runs.path("bin")).expect("a folder");
        let path = runs.write("bin/python3", format!("#!/bin/sh\n{script}\n"));
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("a mode");
        report(doctor(&runs).env("PATH", runs.path("bin")))
    };
    let interpreter = "if [ \"$1\" = -c ]; then echo /usr/bin/python3; echo 3.11.7; exit 0; fi";
    let report = python(&format!("{interpreter}; echo 'No module named pip' >&2; exit 1"));
    assert_check(&report, "python.interpreter", "ok", &["3.11.7, /usr/bin/python3"]);
    assert_check(&report, "python.pip", "note", &["python3 has no pip", "`python3-pip`"]);
    // pip shows the address of its index, with a password.
    let pip = "if [ \"$3\" = --version ]; then echo 'pip 23.2.1 from /x'; exit 0; fi";
    let broken = "echo 'ERROR: https://user:S3CR3T@index.example/simple: no answer' >&2; exit 1";
    let report = python(&format!("{interpreter}; {pip}; {broken}"));
    assert_check(&report, "python.pip", "ok", &["23.2.1"]);
    assert_check(&report, "python.index", "note", &["pip config list", "-m pip index versions"]);
    assert!(!report.to_string().contains("S3CR3T"), "{report}");
    let report = python("exit 7");
    assert_check(&report, "python.interpreter", "note", &["`python3` does not work: exit status: 7"]);
}

#[test]
fn caches_that_are_no_folders_are_problems() {
    let runs = Runs::new(&[]);
    std::fs::create_dir_all(runs.path("cache/grpo/aot")).expect("a folder");
    let programs = runs.write("cache/grpo/programs", "a file");
    let hub = runs.write("hub", "a file");
    runs.write("cache/grpo/aot/entry", [0; 1500]);
    let report = report(doctor(&runs).env("HF_HUB_CACHE", &hub));
    assert_check(&report, "caches.programs", "problem", &[&programs, "Not a directory", "set XDG_CACHE_HOME"]);
    assert_check(&report, "caches.hub", "problem", &[&hub, "set HF_HUB_CACHE"]);
    assert_check(&report, "caches.analyses", "ok", &["1.5 kB in 1 file"]);
}

/// Returns the address of a port that nobody listens to.
fn closed_port() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    format!("http://{}", listener.local_addr().expect("an address"))
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_hub_that_does_not_respond_is_a_problem_unless_it_is_switched_off() {
    let runs = Runs::new(&[]);
    let address = closed_port();
    let online = || doctor(&runs).env("HF_HUB_OFFLINE", "0");
    let closed = report(online().env("HF_ENDPOINT", &address));
    assert_check(&closed, "hub.access", "problem", &[&address, "HF_HUB_OFFLINE=1"]);
    assert_eq!(check(&closed, "hub.access")["values"]["is_reachable"], false);
    // A server that never answers.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = format!("http://{}", listener.local_addr().expect("an address"));
    let silent = report(limited(&runs, "2").env("HF_HUB_OFFLINE", "0").env("HF_ENDPOINT", silent));
    assert_check(&silent, "hub.access", "problem", &["does not respond within 2 s"]);
    assert_check(&report(online().env("HF_ENDPOINT", "nowhere")), "hub.access", "problem", &["http://HOST"]);

    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let address = serve(move |_, _| {
        count.fetch_add(1, Ordering::Relaxed);
        (404, String::new(), vec![])
    });
    let address = format!("http://{address}");
    for name in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"] {
        let report = report(online().env("HF_ENDPOINT", &address).env(name, "1"));
        assert_check(&report, "hub.access", "note", &["not asked"]);
    }
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    assert_check(&report(online().env("HF_ENDPOINT", &address)), "hub.access", "ok", &["responds"]);
    assert_eq!(asked.load(Ordering::Relaxed), 1);
}

const TOKEN: &str = "hf_S3CR3TxQ7kLmNpWvBzRt";

/// Fails if any six characters of the token, or the password of the endpoint, are in the output.
fn assert_no_secret(said: &Said) {
    let text = said.to_string();
    let parts = (0..=TOKEN.len() - 6).map(|begin| &TOKEN[begin..begin + 6]);
    for part in parts.chain(["PASSW0RD", "dXNlcjpQQVNT"]) {
        assert!(!text.contains(part), "{part} is in: {text}");
    }
}

#[test]
fn the_token_is_sent_to_the_hub_and_shown_nowhere() {
    let runs = Runs::new(&[]);
    let sent = Arc::new(AtomicUsize::new(0));
    let (count, token) = (Arc::clone(&sent), format!("authorization: bearer {}", TOKEN.to_lowercase()));
    let address = serve(move |head, _| {
        let is_sent = head.to_lowercase().contains(&token);
        count.fetch_add(usize::from(is_sent), Ordering::Relaxed);
        let status = if head.contains("/refused/") { 401 } else { 200 };
        // A server that returns the request.
        (status, String::new(), head.as_bytes().to_vec())
    });
    runs.write("token", format!("{TOKEN}\n"));
    for (name, value) in [("HF_TOKEN", TOKEN), ("HUGGING_FACE_HUB_TOKEN", TOKEN), ("HF_HOME", &runs.text(""))] {
        let source = if name == "HF_HOME" { runs.text("token") } else { name.to_owned() };
        for (path, status) in [("", "ok"), ("/refused", "problem")] {
            let call = || {
                let call = doctor(&runs).env("HF_HUB_OFFLINE", "0").env("GRPO_LOG", "trace").env(name, value);
                call.env("HF_ENDPOINT", format!("http://user:PASSW0RD@{address}{path}"))
            };
            let said = call().args(["--json"]).output();
            assert_no_secret(&said);
            assert_check(&said.json(), "hub.token", status, &[&source]);
            assert_eq!(check(&said.json(), "hub.token")["values"]["is_accepted"], status == "ok");
            let said = call().output();
            assert_no_secret(&said);
            assert_has(&said.stdout, &[&format!("from {source}")]);
        }
    }
    assert_eq!(sent.load(Ordering::Relaxed), 12);
    // A token that is no header, a hub that does not respond, and no address.
    for (token, endpoint) in [
        (format!("{TOKEN}\u{e9}"), format!("http://{address}")),
        (TOKEN.to_owned(), closed_port()),
        (TOKEN.to_owned(), "user:PASSW0RD@nowhere".to_owned()),
        (TOKEN.to_owned(), "ftp://user:PASSW0RD@nowhere/a?key=PASSW0RD".to_owned()),
    ] {
        let call = || doctor(&runs).env("HF_HUB_OFFLINE", "0").env("HF_TOKEN", &token).env("HF_ENDPOINT", &endpoint);
        let said = call().args(["--json"]).exit(1);
        assert_no_secret(&said);
        assert_check(&said.json(), "hub.access", "problem", &[]);
        assert_no_secret(&call().exit(1));
    }
}

#[test]
fn lines_fit_a_terminal_and_have_colours_there_only() {
    let runs = Runs::new(&[]);
    let piped = doctor(&runs).exit(0);
    assert!(!piped.to_string().contains('\u{1b}'), "{piped:?}");
    assert!(piped.stdout.ends_with("notes\n"), "{piped}");
    let coloured = on_terminal(80, doctor(&runs)).replace('\r', "");
    assert!(coloured.contains("\u{1b}[32mok"), "{coloured:?}");
    let plain = on_terminal(80, doctor(&runs).env("NO_COLOR", "1"));
    assert!(!plain.contains('\u{1b}'), "{plain:?}");
    for columns in [50, 80] {
        let text = on_terminal(columns, doctor(&runs)).replace('\r', "");
        for line in strip_ansi_codes(&text).lines() {
            // A path is not wrapped, so that it can be copied.
            let is_path = line.split_whitespace().any(|word| word.contains('/'));
            assert!(is_path || measure_text_width(line) <= usize::from(columns), "{columns}: {line:?}");
        }
    }
}
