//! `grpo gradcheck`: what it prints, what it returns.

use crate::support::{Call, assert_has, grpo, repository};
use grpo_pjrt::install::Kind;

fn gradcheck(file: &str) -> Call {
    grpo(["gradcheck", &repository(&format!("configs/bench/{file}.yaml"))])
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_files_of_this_cpu_pass() {
    for (name, problems) in [("s1", 2), ("s4", 2), ("scaling", 7)] {
        let text = gradcheck(name).succeed();
        assert_has(&text, &[&format!("PASS: {problems} problems"), "reduced from", "differences", "score"]);
        assert!(!text.contains("FAIL"), "{text}");
    }
}

#[test]
fn a_document_tells_sizes_seeds_and_numbers() {
    let limits = ["--seed=3", "--max-tokens=5", "--max-hidden=7", "--max-vocab=40"];
    let call = gradcheck("s2").args(["--json", "--variants=fused", "--set=dtypes=[f32]"]).args(limits);
    let document = call.exit(0).json();
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
#[ignore = "GRPO_TESTS=all"]
fn zeros_and_missing_variants_end_with_1() {
    for (arguments, words) in [
        (&["--set=inputs.logit_std=0"][..], "grad_hidden of the oracle is zero everywhere"),
        (&["--set=variants.fused.numerics.logits=bf16", "--variants=fused"], "`fused` was requested"),
    ] {
        assert_has(&gradcheck("s1").args(arguments).exit(1).stdout, &[words, "FAIL: 2 problems"]);
    }
}

#[test]
fn bad_input_is_one_line() {
    for (arguments, words) in [
        (&["--variants=fusd"][..], &["`fusd`", "fused_32mib"][..]),
        (&["--max-vocab=0"], &["--max-vocab", "at least 1"]),
        (&["--set=loss.loss_type=dr_grpo"], &["max_completion_length"]),
        (&["--set=shape.tokenz=1"], &["tokenz", "tokens"]),
    ] {
        assert_has(&gradcheck("s1").args(arguments).refuse(), words);
    }
}

/// Rounded once, logits have an oracle of their own.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn programs_that_round_are_held_against_what_they_round() {
    let arguments = ["--set=backend=pjrt:cpu", "--variants=fused,fused_frozen_head,score", "--json"];
    let document = gradcheck("fused").args(arguments).plugin(Kind::Cpu).exit(0).json();
    let rows = document["cases"][0]["inputs"][0]["rows"].as_array().expect("rows");
    let logp = rows.iter().filter(|row| row["name"] == "logp").map(|row| row["max_abs"].as_f64().expect("a number"));
    assert_eq!(logp.map(|off| assert!(off < 1e-4, "{off}")).count(), 3);
}
