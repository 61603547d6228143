//! Folders without a run, and runs with incomplete files.

use crate::support::{Folder, Page, read, rows};
use grpo_report::{Error, Report};

fn refusal(path: &std::path::Path) -> String {
    Report::read(&[path.to_owned()]).unwrap_err().to_string()
}

#[test]
fn folders_without_a_run_are_refused_by_name() {
    let folder = Folder::new();
    let missing = refusal(&folder.path("nothing"));
    assert!(missing.contains("nothing") && missing.contains("cannot be opened"), "{missing}");
    let run = folder.run("runs/b", &[("metrics.jsonl", "")]);
    folder.run("runs/c", &[("config.yaml", "")]);
    let above = refusal(&folder.path("runs"));
    assert!(above.contains("in 2 of its folders") && above.contains("runs/b"), "{above}");
    let empty = refusal(&folder.run::<&str>("empty", &[]));
    assert!(empty.contains("empty: there is no run in it (neither config.yaml nor metrics.jsonl)"), "{empty}");
    let file = refusal(&run.join("metrics.jsonl"));
    assert!(file.contains("metrics.jsonl: expected the folder of a run, got a file"), "{file}");
    assert!(matches!(Report::read(&[]), Err(Error::NoRuns)));

    let other = folder.run("other", &[("metrics.jsonl", "loss 1.0\nloss 0.9\n")]);
    let other = refusal(&other);
    assert!(other.contains("other/metrics.jsonl: none of its 2 lines is a row of a run; line 1: "), "{other}");
    let run = folder.run::<&str>("odd", &[]);
    std::fs::create_dir(run.join("metrics.jsonl")).unwrap();
    assert!(matches!(Report::read(&[run]), Err(Error::File(_))));
}

#[test]
fn a_run_without_rows_is_shown() {
    let folder = Folder::new();
    let files = [("config.yaml", "seed: 3\n"), ("metrics.jsonl", ""), ("completions.jsonl", "")];
    let report = read(&[&folder.run("young", &files)]);
    assert_eq!(report.notes().collect::<Vec<_>>(), ["young: metrics.jsonl has no rows yet"]);
    let page = Page::of(&report);
    assert!(page.texts("td").contains(&"no rows yet".to_owned()), "{}", page.markup);
}

#[test]
fn incomplete_invalid_and_non_finite_lines_are_reported() {
    let folder = Folder::new();
    let metrics = [
        r#"{"phase":"grpo","step":1,"reward":0.25,"kl":null}"#,
        r#"{"phase":"grpo","step":2,"reward":NaN,"kl":-Infinity}"#,
        "\u{0}\u{0}\u{0}",
        r#"{"phase":"grpo","step":3,"reward":"high"}"#,
        r#"{"phase":"grpo","step":4,"reward":0.75,"kl":1e-3}"#,
        r#"{"phase":"grpo","step":5,"rew"#,
    ];
    let completions = "{\"step\":1,\"completion\":\"whole\"}\n{\"step\":1,\"compl";
    let files = [
        ("metrics.jsonl", metrics.join("\n")),
        ("completions.jsonl", completions.to_owned()),
        ("config.yaml", "a: [".to_owned()),
        ("summary.json", "{".to_owned()),
    ];
    let report = read(&[&folder.run("torn", &files)]);
    let notes = report.notes().collect::<Vec<_>>().join("\n");
    for words in [
        "config.yaml cannot be used: ",
        "summary.json cannot be used: ",
        "metrics.jsonl: 2 lines are left out, the first is line 3: ",
        "metrics.jsonl: line 6, the last one, is cut off",
        "values of `grpo` that are not finite, shown as gaps: kl (2), reward (1)",
        "completions.jsonl: line 2, the last one, is cut off",
    ] {
        assert!(notes.contains(words), "{words} is not in\n{notes}");
    }
    let page = Page::of(&report);
    let grpo = &page.data["runs"][0]["phases"]["grpo"];
    assert_eq!(grpo["curves"]["reward"]["mean"], serde_json::json!([0.25, null, 0.75]));
    assert_eq!(grpo["steps"][0]["first"], serde_json::json!([1, 2, 4]));
    assert_eq!(page.data["runs"][0]["samples"][0]["fields"]["completion"], "whole");
    assert!(page.texts("li").iter().any(|note| note.contains("line 6")), "{}", page.markup);
}

#[test]
fn a_last_row_without_its_line_break_counts() {
    let folder = Folder::new();
    let rows = rows("grpo", "reward", [0.5, 1.0]);
    let report = read(&[&folder.run("a", &[("metrics.jsonl", rows.trim_end()), ("config.yaml", "{}")])]);
    assert_eq!(report.notes().count(), 0);
    assert_eq!(Page::of(&report).data["runs"][0]["phases"]["grpo"]["curves"]["reward"]["mean"][1], 1.0);
}

#[test]
fn runs_of_equal_names_get_paths_and_duplicates_are_shown_once() {
    let folder = Folder::new();
    let files = [("metrics.jsonl", rows("grpo", "reward", [1.0]))];
    let (a, b, c) = (folder.run("x/big", &files), folder.run("y/big", &files), folder.run("c", &files));
    let report = read(&[&a, &b, &c, &a.join("../../c")]);
    let names: Vec<String> = report.names().map(Into::into).collect();
    assert_eq!(names, [a.display().to_string(), b.display().to_string(), "c".to_owned()]);
    assert!(report.notes().next().unwrap().contains("was named twice"));
}
