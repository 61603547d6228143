//! `grpo report`: a page of runs that were really made.

use crate::support::{Runs, assert_has, grpo, names, refuse, succeed};
use serde_json::Value;

const SHORT: [&str; 4] = ["warmup.steps=4", "grpo.max_steps=6", "eval.eval_steps=3", "run.log_completions_steps=2"];

/// The page without style and script, and the data of the script.
fn parts(html: &str) -> (String, Value) {
    let (head, rest) = html.split_once("<style>").expect("a style");
    let (_, rest) = rest.split_once("</style>").expect("its end");
    let (body, rest) = rest.split_once("<script type=\"application/json\" id=\"data\">").expect("data");
    let (data, rest) = rest.split_once("</script>").expect("its end");
    let (_, end) = rest.rsplit_once("</script>").expect("the script's end");
    let markup = format!("{}{body}{end}", head.trim_start_matches("<!DOCTYPE html>"));
    (markup, serde_json::from_str(data).expect("JSON"))
}

#[test]
fn two_runs_are_shown_on_one_page() {
    let (first, second) = (Runs::new(&SHORT), Runs::new(&[&SHORT[..], &["loss.beta=0.04", "seed=9"]].concat()));
    first.train("a");
    second.train("b");
    let before = names(&first.path("a"));
    let out = first.write("both.html", "something else");
    let report = |out: &str| succeed(["report", &first.text("a"), &second.text("b"), "--out", out]);
    let text = report(&out);
    assert!(text.starts_with(&format!("wrote {out} (2 runs, ")), "{text}");
    assert_eq!(names(&first.path("a")), before, "a run's folder is only read");

    let page = first.read("both.html");
    let (markup, data) = parts(&page);
    let document = roxmltree::Document::parse(&markup).expect("well-formed");
    let texts = |tag: &str| -> Vec<String> {
        let found = document.descendants().filter(|node| node.has_tag_name(tag));
        found.map(|node| node.descendants().filter(|n| n.is_text()).filter_map(|n| n.text()).collect()).collect()
    };
    assert_eq!(texts("code"), ["loss.beta", "seed"], "the keys that differ");
    assert!(!markup.contains("class=\"note\" role"), "whole runs need no notes");
    let cells = texts("td");
    assert_eq!(cells.iter().filter(|cell| *cell == "finished").count(), 2, "{cells:?}");

    let names: Vec<&str> =
        data["runs"].as_array().expect("runs").iter().filter_map(|run| run["name"].as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    for run in ["/runs/0", "/runs/1"].map(|path| data.pointer(path).expect("a run")) {
        for (phase, metric, points) in [
            ("warmup", "loss", 4),
            ("grpo", "reward", 6),
            ("grpo", "tokens/s", 6),
            ("grpo", "timing_s/gen", 6),
            ("eval", "eval/pass@1", 3),
        ] {
            let curve = run["phases"][phase]["curves"][metric]["mean"].as_array();
            assert_eq!(curve.map(Vec::len), Some(points), "{phase} {metric}");
        }
        let samples = run["samples"].as_array().expect("samples");
        let steps: Vec<u64> = samples.iter().filter_map(|sample| sample["step"].as_u64()).collect();
        assert!([2, 4, 6].iter().all(|step| steps.contains(step)), "{steps:?}");
        for field in ["prompt", "completion", "answer", "reward", "rewards", "advantage"] {
            assert!(samples.iter().all(|sample| sample["fields"].get(field).is_some()), "{field}");
        }
        let correct = |sample: &Value| sample["fields"]["rewards"]["correct"] == sample["fields"]["reward"];
        assert!(samples.iter().all(correct), "the only reward function of tiny.yaml, with weight 1");
    }
    // The same page through a pipe.
    assert_eq!(report("-"), page);
}

#[test]
fn what_cannot_be_shown_or_written_is_said_and_costs_nothing() {
    let runs = Runs::new(&SHORT);
    runs.train("a");
    let (run, out) = (runs.text("a"), runs.write("page.html", "mine"));
    let error = refuse(["report", &run, &runs.text("none"), "--out", &out]);
    assert_has(&error, &["/none: it cannot be opened"]);
    assert_eq!(runs.read("page.html"), "mine");
    let error = refuse(&["report", &run, "--out", &runs.text("nowhere/page.html")]);
    assert_has(&error, &["nowhere/page.html", "cannot be used"]);

    // Without --out nothing is replaced but a page of an earlier call.
    let here = runs.path("here");
    std::fs::create_dir(&here).expect("a folder");
    let report = || grpo(["report", &run]).at(&here);
    runs.write("here/report.html", "mine");
    assert_has(&report().refuse(), &["report.html exists and was not made by grpo"]);
    std::fs::remove_file(here.join("report.html")).expect("a file");
    for _ in 0..2 {
        report().succeed();
    }
    assert_eq!(names(&here), ["report.html"]);

    // A row that is being written.
    runs.write("a/metrics.jsonl", runs.read("a/metrics.jsonl") + "{\"phase\":\"grpo\",\"st");
    assert_has(&report().exit(0).stderr, &["a: metrics.jsonl: line 14, the last one, is cut off"]);
}
