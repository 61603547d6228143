//! Terminals, pipes and machines are treated as what they are.

use crate::support::{Call, Runs, assert_has, batch, grpo, json, names, rows};
use console::{measure_text_width, strip_ansi_codes};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Returns the output of a call that must succeed to a terminal with this number of columns.
pub(crate) fn on_terminal(columns: u16, Call(mut command): Call) -> String {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    grantpt(&terminal).expect("granted");
    unlockpt(&terminal).expect("unlocked");
    let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&terminal, size).expect("a size");
    let name = ptsname(&terminal, vec![]).expect("a name");
    let name = PathBuf::from(std::ffi::OsString::from_vec(name.into_bytes()));
    let side = || File::options().read(true).write(true).open(&name).expect("the other side");
    command.env("TERM", "xterm").stdout(side()).stderr(side());
    let mut child = command.spawn().expect("the binary starts");
    // Its sides of the terminal are the last ones when it ends; then reading does, with an error.
    drop(command);
    let (mut text, mut master) = (vec![], File::from(terminal));
    let mut chunk = [0; 4096];
    while let Ok(len @ 1..) = master.read(&mut chunk) {
        text.extend_from_slice(&chunk[..len]);
    }
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(child.wait().expect("it ends").success(), "{text}");
    text
}

#[test]
fn a_table_is_a_list_on_a_narrow_terminal_and_whole_in_a_pipe() {
    let parity = || grpo(["parity", &batch("c01_grpo_token_full"), "--implementation", "fused"]);
    let piped = parity().output().stdout;
    assert!(piped.contains("implementation   against") && piped.contains('─'), "{piped}");
    assert_eq!(on_terminal(80, parity()).replace('\r', ""), piped, "the table has room");
    let narrow = on_terminal(40, parity()).replace('\r', "");
    assert_has(&narrow, &["implementation: fused\nagainst: expected\ntensor: loss\n"]);
    // The first line is the file's name.
    let mut tables = narrow.lines().skip(1).take_while(|line| !line.starts_with("PASS"));
    assert!(tables.all(|line| measure_text_width(line) <= 40), "{narrow}");

    let list = on_terminal(40, grpo(["plugin", "list"])).replace('\r', "");
    assert!(list.contains("kind: cpu\nPJRT API: -\n") && !list.contains('─'), "{list}");
}

/// A full disk behind standard output fails a command after its work; the error says what is complete.
#[test]
#[cfg(target_os = "linux")]
fn a_full_standard_output_says_what_is_complete() {
    let full = |Call(mut command): Call| {
        command.stdout(File::options().write(true).open("/dev/full").expect("/dev/full"));
        Call(command).exit(2).stderr
    };
    let runs = Runs::new(&["warmup.steps=1", "grpo.max_steps=1"]);
    let text = full(runs.tiny("a"));
    let found = "cannot write to standard output: No space left on device";
    assert_has(&text, &["the run is complete, and ", "a/summary.json has its results", found]);
    assert!(runs.path("a/summary.json").is_file(), "{text}");
    let page = runs.text("page.html");
    let text = full(grpo(["report", &runs.text("a"), "--out", &page]));
    assert_has(&text, &["the page ", "page.html is complete: cannot write to standard output"]);
    assert!(runs.path("page.html").is_file(), "{text}");
    let text = full(grpo(["train", "--print-config"]));
    assert_has(&text, &["error: cannot write to standard output: No space left on device"]);
}

#[test]
fn sampled_completions_are_a_table_on_a_terminal_and_nothing_in_a_pipe() {
    let rewards = "rewards={correct: 1, terminated: 0.5}";
    let runs = Runs::new(&["warmup.steps=1", "grpo.max_steps=2", "run.log_completions_steps=1", rewards]);
    let text = on_terminal(100, runs.tiny("a"));
    let text = strip_ansi_codes(&text).into_owned();
    let header: Vec<Vec<&str>> = text
        .split(['\r', '\n'])
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|words| words.first() == Some(&"step") && words.contains(&"prompt"))
        .collect();
    let expected = ["step", "prompt", "completion", "right", "correct", "terminated", "reward", "advantage"];
    let found: Vec<_> = header.iter().map(|words| &words[..8.min(words.len())]).collect();
    assert_eq!(found, [&expected[..]; 2], "{text}");
    let piped = runs.train("b");
    assert!(!piped.contains("advantage"), "{piped}");
    let rows = rows(&runs.path("b/completions.jsonl"));
    assert!(rows.iter().all(|row| row["rewards"]["correct"].is_number() && row["rewards"]["terminated"].is_number()));
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_line_of_progress_fits_and_is_made_of_whole_fields() {
    for columns in [30, 80] {
        let runs = Runs::new(&["grpo.max_steps=12", "run.log_completions_steps=0"]);
        let text = on_terminal(columns, runs.tiny("a"));
        let (mut shown, mut widest) = (0, 0);
        let lines = text.split(['\r', '\n']).map(|line| strip_ansi_codes(line).chars().collect::<Vec<char>>());
        // What is said above the bar is filled up with blanks to the terminal's last column, and the bar follows.
        let rows = lines.flat_map(|line| line.chunks(columns.into()).map(String::from_iter).collect::<Vec<String>>());
        for row in rows {
            let line = row.trim_end();
            // Lines of the bar have the position that lines of the log have not.
            if !["/12", "/15"].iter().any(|steps| line.contains(steps)) {
                continue;
            }
            shown += 1;
            widest = widest.max(measure_text_width(line));
            let fields = line.trim_start().split("  ").filter(|field| !field.is_empty());
            for field in fields {
                let field = field.trim();
                let number = |text: &str| text.parse::<f64>().is_ok();
                let is_whole = match field.split(' ').collect::<Vec<_>>().as_slice() {
                    ["GRPO" | "warm-up"] => true,
                    [time, "left"] => time.ends_with(['s', 'm', 'h']),
                    ["reward" | "loss" | "entropy" | "kl", value] => number(value) && value.contains('.'),
                    [speed, "tok/s"] => number(speed.trim_end_matches(['k', 'M'])),
                    ["length", tokens] => number(tokens),
                    ["clipped", share, "%"] | ["no", "signal", share, "%"] => number(share),
                    ["evaluating", "held-out", "problems", "..."] => true,
                    [one] if one.contains('/') => one.ends_with("/12") || one.ends_with("/15"),
                    [bar] => bar.chars().count() == 12 && bar.chars().all(|c| "━╸─".contains(c)),
                    _ => false,
                };
                assert!(is_whole, "{columns}: `{field}` of {line:?}");
            }
        }
        assert!(shown > 2 && widest <= usize::from(columns), "{columns}: {shown} lines, at most {widest} columns");
    }
}

#[test]
fn a_pipe_gets_no_colours() {
    // The one thing that is sure to be said.
    let parity = grpo(["parity", &batch("c01_grpo_token_full")]).env("RAYON_NUM_THREADS", "many").exit(0);
    assert_has(&parity.stderr, &["RAYON_NUM_THREADS=many"]);
    let runs = Runs::new(&["grpo.max_steps=1"]);
    let train = runs.tiny("a").env("GRPO_LOG", "info").exit(0);
    assert_has(&train.stderr, &["saved"]);
    for said in [parity, train] {
        assert!(!said.to_string().contains('\u{1b}'), "{said:?}");
    }
}

#[test]
fn no_environment_starts_more_threads_than_the_machine_can_use() {
    let runs = Runs::new(&["grpo.max_steps=1"]);
    let said = runs.tiny("a").env("RAYON_NUM_THREADS", "100000").exit(0).stderr;
    let most = grpo_backend_cpu::most_threads();
    let warning = format!("RAYON_NUM_THREADS=100000 is more than this machine can use: {most} threads are started");
    assert_has(&said, &[&warning]);
    assert!(!runs.metrics("a").is_empty());
    let checkpoints = runs.path("a/checkpoints");
    let name = names(&checkpoints).into_iter().find(|name| name.starts_with("step-")).expect("a checkpoint");
    let state = json(&checkpoints.join(name).join("state.json"));
    assert_eq!(state["threads"].as_u64(), Some(most as u64), "{state}");
}
