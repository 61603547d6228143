//! What a run leaves in its folder.

use crate::support::{Runs, assert_has, grpo, json, names, rows};

const SHORT: [&str; 4] = ["warmup.steps=4", "grpo.max_steps=6", "eval.eval_steps=3", "run.save_steps=2"];

#[test]
fn a_run_leaves_everything_that_is_promised() {
    let runs = Runs::new(&[&SHORT[..], &["run.log_completions_steps=2", "loss.beta=0.01"]].concat());
    let text = runs.train("a");
    assert_has(&text, &["warm-up", "eval at step 0", "grpo", "pass@1", "before GRPO", "after GRPO", "curves.svg"]);
    assert!(!text.contains('\u{1b}'), "no terminal codes where there is no terminal: {text:?}");
    let run = runs.path("a");
    let files = [
        "checkpoints",
        "completions.jsonl",
        "config.recorded.yaml",
        "config.yaml",
        "curves.svg",
        "fingerprint.json",
        "metrics.jsonl",
        "summary.json",
    ];
    assert_eq!(names(&run).into_iter().filter(|n| !n.starts_with('.')).collect::<Vec<_>>(), files);

    let of = |phase: &str| runs.phase("a", phase);
    let steps = |phase: &str| of(phase).iter().map(|r| r["step"].as_u64().expect("a number")).collect::<Vec<_>>();
    assert_eq!(steps("warmup"), [1, 2, 3, 4]);
    assert_eq!(steps("grpo"), [1, 2, 3, 4, 5, 6]);
    assert_eq!(steps("eval"), [0, 3, 6]);
    for row in of("grpo") {
        for name in [
            "reward",
            "reward_std",
            "rewards/correct/mean",
            "rewards/correct/std",
            "loss",
            "kl",
            "entropy",
            "clip_ratio/low_mean",
            "clip_ratio/high_mean",
            "clip_ratio/region_mean",
            "grad_norm",
            "learning_rate",
            "completions/mean_length",
            "completions/min_length",
            "completions/max_length",
            "completions/mean_terminated_length",
            "completions/clipped_ratio",
            "num_tokens",
            "step_time",
            "timing_s/gen",
            "timing_s/reward",
            "timing_s/ref",
            "timing_s/adv",
            "timing_s/update_actor",
            "tokens_per_second/gen",
            "tokens_per_second/update_actor",
            "mfu",
            "frac_reward_zero_std",
        ] {
            assert!(row[name].is_number(), "{name} in {row}");
        }
    }
    assert!(of("eval").iter().all(|row| row["eval/pass@1"].is_number() && row["eval/reward"].is_number()));
    let tokens: Vec<_> = of("grpo").iter().map(|r| r["num_tokens"].as_f64()).collect();
    assert!(tokens.is_sorted(), "num_tokens counts from the beginning: {tokens:?}");

    let completions = rows(&run.join("completions.jsonl"));
    assert_eq!(completions.iter().map(|r| r["step"].clone()).collect::<std::collections::HashSet<_>>().len(), 3);
    for key in ["prompt", "completion", "reward", "advantage", "answer"] {
        assert!(!completions[0][key].is_null(), "{key}");
    }

    let summary = json(&run.join("summary.json"));
    assert_eq!(
        (summary["steps"].as_u64(), summary["warmup_steps"].as_u64(), &summary["seed"]),
        (Some(6), Some(4), &0.into())
    );
    assert_eq!(summary["eval_before"]["pass@1"], of("eval")[0]["eval/pass@1"]);
    assert_eq!(summary["eval_after"]["pass@1"], of("eval")[2]["eval/pass@1"]);
    for key in ["reward_first", "reward_last", "tokens", "seconds"] {
        assert!(summary[key].is_number(), "{key} in {summary}");
    }
    assert_eq!(names(&run.join("checkpoints")), ["step-000002", "step-000004", "step-000006"]);
    let checkpoint =
        ["SHA256SUMS", "model.safetensors", "optimizer.safetensors", "reference.safetensors", "state.json"];
    assert_eq!(names(&run.join("checkpoints/step-000006")), checkpoint);
    assert_has(
        &runs.read("a/curves.svg"),
        &["held-out pass@1", "KL(policy || reference)", "warm-up", "clip ratio", "entropy"],
    );
}

#[test]
fn a_run_is_never_overwritten() {
    let runs = Runs::new(&SHORT);
    runs.train("a");
    let before = runs.read("a/metrics.jsonl");
    assert_has(&grpo(["train", "--run-dir", &runs.text("a")]).refuse(), &["holds a run already", "--resume"]);
    assert_eq!(runs.read("a/metrics.jsonl"), before);
    // A run that is done can be resumed: there is nothing left to do but to say so.
    assert_has(&runs.resume("a").succeed(), &["before GRPO"]);
    assert_eq!(runs.read("a/metrics.jsonl"), before);
}

#[test]
fn quiet_is_quiet() {
    let runs = Runs::new(&["warmup.steps=1", "grpo.max_steps=1"]);
    assert_eq!(runs.tiny("a").args(["--quiet"]).succeed(), "");
}
