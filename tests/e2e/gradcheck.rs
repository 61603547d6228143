//! `grpo gradcheck`: what it prints, what it returns.

use crate::support::{grpo, grpo_with, refuse, stderr, stdout, succeed};
use pjrt::install::Kind;
use serde_json::Value;
use std::path::Path;

fn file(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/bench").join(name).display().to_string()
}

#[test]
fn the_files_of_this_cpu_pass() {
    for (name, problems) in [("s1.yaml", 2), ("s4.yaml", 2), ("scaling.yaml", 7)] {
        let text = succeed(&["gradcheck", &file(name)]);
        assert!(text.contains(&format!("PASS: {problems} problems")) && text.contains("reduced from"), "{text}");
        assert!(text.contains("differences") && text.contains("score") && !text.contains("FAIL"), "{text}");
    }
}

#[test]
fn a_document_tells_sizes_seeds_and_numbers() {
    let text = succeed(&[
        "gradcheck",
        &file("s2.yaml"),
        "--json",
        "--variants=fused",
        "--set=dtypes=[f32]",
        "--seed=3",
        "--max-tokens=5",
        "--max-hidden=7",
        "--max-vocab=40",
    ]);
    let document: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(document["passed"], true);
    let case = &document["cases"][0];
    assert_eq!((&case["name"], &case["shape"]["hidden"]), (&"s2-f32".into(), &7.into()));
    assert_eq!((&case["shape"]["tokens"], &case["reduced_from"]["tokens"]), (&5.into(), &1024.into()));
    assert!(case["inputs"][0]["seed"].as_u64().is_some_and(|seed| seed >= 3), "{case}");
    let rows = case["inputs"][0]["rows"].as_array().expect("rows");
    let of = |name: &str| rows.iter().filter(|row| row["implementation"] == name).count();
    assert_eq!((of("oracle"), of("fused"), rows.len()), (3, 5, 8));
    for row in rows {
        assert!(row["max_rel"].as_f64().expect("a number") <= row["tolerance"].as_f64().expect("a number"), "{row}");
    }
}

#[test]
fn zeros_and_missing_variants_end_with_1() {
    for (arguments, words) in [
        (&["--set=inputs.logit_std=0"][..], "grad_hidden of the oracle is zero everywhere"),
        (&["--set=variants.fused.numerics.logits=bf16", "--variants=fused"], "`fused` was requested"),
    ] {
        let s1 = file("s1.yaml");
        let output = grpo(&[&["gradcheck", &s1], arguments].concat());
        assert_eq!(output.status.code(), Some(1), "{}{}", stdout(&output), stderr(&output));
        assert!(stdout(&output).contains(words) && stdout(&output).contains("FAIL: 2 problems"), "{}", stdout(&output));
    }
}

#[test]
fn bad_input_is_one_line() {
    let s1 = file("s1.yaml");
    for (arguments, words) in [
        (&["--variants=fusd"][..], &["`fusd`", "fused_32mib"][..]),
        (&["--max-vocab=0"], &["--max-vocab", "at least 1"]),
        (&["--set=loss.loss_type=dr_grpo"], &["max_completion_length"]),
        (&["--set=shape.tokenz=1"], &["tokenz", "tokens"]),
    ] {
        let text = refuse(&[&["gradcheck", &s1], arguments].concat());
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

/// Rounded once, logits have an oracle of their own.
#[test]
fn programs_that_round_are_held_against_what_they_round() {
    let arguments = ["--set=backend=pjrt:cpu", "--variants=fused,fused_frozen_head,score", "--json"];
    let fused = file("fused.yaml");
    let mut command = grpo_with(Kind::Cpu, &[&["gradcheck", fused.as_str()], &arguments[..]].concat());
    let output = command.output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    let document: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let rows = document["cases"][0]["inputs"][0]["rows"].as_array().expect("rows");
    let logp = rows.iter().filter(|row| row["name"] == "logp").map(|row| row["max_abs"].as_f64().expect("a number"));
    assert_eq!(logp.map(|off| assert!(off < 1e-4, "{off}")).count(), 3);
}
