//! Terminals, pipes and machines are treated as what they are.

use crate::support::{Runs, command, grpo, json, names, rows, stderr, stdout, tiny};
use console::{measure_text_width, strip_ansi_codes};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn batch() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    folder.join("c01_grpo_token_full.safetensors").display().to_string()
}

/// What the binary writes to a terminal of so many columns.
pub(crate) fn on_terminal(columns: u16, arguments: &[&str]) -> String {
    on_terminal_of(columns, command(arguments))
}

/// What a command writes to a terminal of so many columns.
pub(crate) fn on_terminal_of(columns: u16, mut command: Command) -> String {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    grantpt(&terminal).expect("granted");
    unlockpt(&terminal).expect("unlocked");
    let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&terminal, size).expect("a size");
    let name = ptsname(&terminal, vec![]).expect("a name");
    let name = PathBuf::from(std::ffi::OsString::from_vec(name.into_bytes()));
    let side = || File::options().read(true).write(true).open(&name).expect("the other side");
    command.env("TERM", "xterm").stdout(side()).stderr(side()).stdin(Stdio::null());
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
    let batch = batch();
    let arguments = ["parity", &batch, "--implementation", "fused"];
    let piped = stdout(&grpo(&arguments));
    assert!(piped.contains("implementation   against") && piped.contains('─'), "{piped}");
    let wide = on_terminal(80, &arguments);
    assert_eq!(wide.replace('\r', ""), piped, "the table has room");
    let narrow = on_terminal(40, &arguments).replace('\r', "");
    assert!(narrow.contains("implementation: fused\nagainst: expected\ntensor: loss\n"), "{narrow}");
    // The first line is the file's name.
    let mut tables = narrow.lines().skip(1).take_while(|line| !line.starts_with("PASS"));
    assert!(tables.all(|line| measure_text_width(line) <= 40), "{narrow}");

    let list = on_terminal(40, &["plugin", "list"]).replace('\r', "");
    assert!(list.contains("kind: cpu\nPJRT API: -\n") && !list.contains('─'), "{list}");
}

#[test]
fn sampled_completions_are_a_table_on_a_terminal_and_nothing_in_a_pipe() {
    let tiny = tiny().display().to_string();
    let runs = Runs::new(&[]);
    let rewards = "rewards={correct: 1, terminated: 0.5}";
    let settings = ["warmup.steps=1", "grpo.max_steps=2", "run.log_completions_steps=1", rewards];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    let (first, second) = (runs.text("a"), runs.text("b"));
    let train = |run| [vec!["train", &tiny, "--run-dir", run], settings.clone()].concat();
    let text = on_terminal(100, &train(&first));
    let text = strip_ansi_codes(&text).into_owned();
    let header: Vec<Vec<&str>> = text
        .split(['\r', '\n'])
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|words| words.first() == Some(&"step") && words.contains(&"prompt"))
        .collect();
    let expected = ["step", "prompt", "completion", "right", "correct", "terminated", "reward", "advantage"];
    assert_eq!(
        header.iter().map(|words| &words[..8.min(words.len())]).collect::<Vec<_>>(),
        [&expected[..]; 2],
        "{text}"
    );
    let piped = stdout(&grpo(&train(&second)));
    assert!(!piped.contains("advantage"), "{piped}");
    let rows = rows(&runs.path("b").join("completions.jsonl"));
    assert!(rows.iter().all(|row| row["rewards"]["correct"].is_number() && row["rewards"]["terminated"].is_number()));
}

#[test]
fn the_line_of_progress_fits_and_is_made_of_whole_fields() {
    let tiny = tiny().display().to_string();
    for columns in [30, 80] {
        let runs = Runs::new(&[]);
        let settings = ["--set", "grpo.max_steps=12", "--set", "run.log_completions_steps=0"];
        let text = on_terminal(columns, &[&["train", &tiny, "--run-dir", &runs.text("a")], &settings[..]].concat());
        let mut shown = 0;
        let mut widest = 0;
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
    let mut command = command(&["parity", &batch()]);
    // The one thing that is sure to be said.
    let output = command.env("RAYON_NUM_THREADS", "many").output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("RAYON_NUM_THREADS=many"), "{}", stderr(&output));
    for text in [stdout(&output), stderr(&output)] {
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }
    let runs = Runs::new(&[]);
    let tiny = tiny().display().to_string();
    let run = runs.text("a");
    let mut command = crate::support::command(&["train", &tiny, "--run-dir", &run, "--set", "grpo.max_steps=1"]);
    let output = command.env("GRPO_LOG", "info").output().expect("the binary starts");
    assert!(stderr(&output).contains("saved") && !stderr(&output).contains('\u{1b}'), "{:?}", stderr(&output));
    assert!(!stdout(&output).contains('\u{1b}'), "{:?}", stdout(&output));
}

#[test]
fn no_environment_starts_more_threads_than_the_machine_can_use() {
    let runs = Runs::new(&[]);
    let (tiny, run) = (tiny().display().to_string(), runs.text("a"));
    let mut command = command(&["train", &tiny, "--run-dir", &run, "--set", "grpo.max_steps=1"]);
    let output = command.env("RAYON_NUM_THREADS", "100000").output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let most = backend_cpu::most_threads();
    let said = format!("RAYON_NUM_THREADS=100000 is more than this machine can use: {most} threads are started");
    assert!(stderr(&output).contains(&said), "{}", stderr(&output));
    assert!(!rows(&runs.path("a").join("metrics.jsonl")).is_empty());
    let checkpoints = runs.path("a").join("checkpoints");
    let name = names(&checkpoints).into_iter().find(|name| name.starts_with("step-")).expect("a checkpoint");
    let state = json(&checkpoints.join(name).join("state.json"));
    assert_eq!(state["threads"].as_u64(), Some(most as u64), "{state}");
}
