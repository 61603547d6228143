//! What a training takes is said before it is loaded, and it is what the training takes.

use crate::support::{Call, Runs, assert_has, grpo};
use crate::tiny_model::{call, prepare_shape, small};
use grpo_models::ModelConfig;

const MB: f64 = 1e6;

/// The number of bytes that `text` says, such as `12.5 MB`.
fn bytes(text: &str) -> f64 {
    let (number, unit) = text.trim().split_once(' ').unwrap_or_else(|| panic!("{text:?} is no size"));
    let number: f64 = number.parse().unwrap_or_else(|_| panic!("{text:?} is no size"));
    match unit {
        "MB" => number * MB,
        "GB" => number * 1000.0 * MB,
        _ => panic!("{text:?} is no size of a model"),
    }
}

/// Weights, moments and gradients of 60 MB each, beside which nothing that a run always has counts.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_table_of_memory_is_what_the_process_takes() {
    compare("grpo.gradient_accumulation_steps=2", "adamw", 16, None);
    compare("grpo.gradient_accumulation_steps=1", "adamw", 16, None);
    // Two bytes and two scales per block in place of eight bytes.
    compare("grpo.gradient_accumulation_steps=2", "adamw_8bit", 10, None);
}

/// Activations of long rows, which take more than the weights, and the free memory between them.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn the_table_of_memory_holds_for_long_prompts() {
    compare("grpo.gradient_accumulation_steps=2", "adamw", 16, Some(2500));
}

/// Compares the table with the process, which takes at least `per_weight` bytes for each weight. Prompts have `prompt` tokens, or a few.
fn compare(micro_batches: &str, optimizer: &str, per_weight: usize, prompt: Option<usize>) {
    let runs = Runs::new(&[]);
    let shape = ModelConfig {
        vocab_size: 8192,
        hidden_size: 384,
        intermediate_size: 1024,
        num_hidden_layers: 5,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        max_position_embeddings: 4096,
        tie_word_embeddings: false,
        ..ModelConfig::default()
    };
    prepare_shape(&runs, &shape);
    if let Some(tokens) = prompt {
        // A token per character.
        let row = |i: usize| format!("{{\"question\": \"{i}{}\", \"answer\": \"1\"}}\n", "7".repeat(tokens));
        runs.write("rows.jsonl", (10..50).map(row).collect::<String>());
    }
    // Most ids are none of the tokenizer's, so that a completion is empty or not.
    let rewards = "rewards.regex={text: {pattern: '.'}}";
    let optimizer = format!("optimizer.name={optimizer}");
    let call = call(&runs, "model", "a", &[rewards, micro_batches, &optimizer, "run.save_steps=0", "loss.beta=0"]);
    let text = call.env("GRPO_LOG", "info").env("RAYON_NUM_THREADS", "2").exit(0).stderr;
    let steps = runs.phase("a", "grpo");
    assert!(steps.len() == 2 && steps.iter().all(|row| row["grad_norm"].as_f64() > Some(1e-3)), "{steps:?}");
    let total = text.lines().find_map(|line| line.trim().strip_prefix("total (")?.split_once(") "));
    let (_, total) = total.unwrap_or_else(|| panic!("a table:\n{text}"));
    // The kernel's own count, VmHWM.
    let (_, most) = text.split_once("the most memory that this process took: ").expect("the most");
    let (said, taken) = (bytes(total), bytes(most.lines().next().expect("a line")));
    assert!(said > (per_weight as u64 * shape.parameter_count()) as f64, "{text}");
    let off = (said - taken).abs();
    let [said, taken] = [said, taken].map(|bytes| bytes / MB);
    assert!(
        off <= 0.1 * taken * MB,
        "{said:.0} MB were said, {taken:.0} MB taken with {micro_batches} and {optimizer}:\n{text}"
    );
    println!("{micro_batches}, {optimizer}: {said:.0} MB said, {taken:.0} taken");
}

/// Limits the address space: to more than a refusal needs, and less than the refused settings need.
fn limited(call: Call) -> Call {
    call.env("RAYON_NUM_THREADS", "2").limited("-v 6000000")
}

/// Returns the error of a limited call.
fn refusal(call: Call) -> String {
    let text = limited(call).exit(2).stderr;
    assert!(text.contains("error: ") && !text.contains("panicked") && !text.contains("allocation"), "{text}");
    text
}

/// A model with room for a million tokens.
fn prepare_long(runs: &Runs) {
    prepare_shape(runs, &ModelConfig { max_position_embeddings: 1 << 20, ..small() });
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn prompts_of_a_million_tokens_are_refused_by_the_table_of_memory() {
    let runs = Runs::new(&[]);
    prepare_long(&runs);
    // One row among short ones; its tokens are one character each.
    let short = |i: usize| format!("{{\"question\": \"What is {i} + 1?\", \"answer\": \"{}\"}}\n", i + 1);
    let long = format!("{{\"question\": \"{}\", \"answer\": \"1\"}}\n", "7 ".repeat(500_000));
    let rows: String = (0..40).map(short).chain([long]).collect();
    runs.write("rows.jsonl", rows);
    let many = ["grpo.num_generations=64", "grpo.gradient_accumulation_steps=1", "rollout.max_completion_length=4096"];
    for more in [&many[..], &["grpo.num_generations=512", "grpo.gradient_accumulation_steps=1"]] {
        let text = refusal(call(&runs, "model", "a", more));
        assert_has(
            &text,
            &["of memory are needed and ", " are free", "data.max_prompt_length", "keys and values", "activations"],
        );
        assert!(!runs.path("a").exists());
    }
    // The key that the table names.
    limited(call(&runs, "model", "b", &["data.max_prompt_length=200", "grpo.max_steps=1"])).succeed();
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn lengths_and_groups_without_bounds_are_refused_with_their_key() {
    let runs = Runs::new(&[]);
    prepare_long(&runs);
    let (table, mut missed) = ("of memory are needed and ", vec![]);
    for (settings, words) in [
        (&["rollout.max_completion_length=1000000"][..], [table, "rollout.max_completion_length"]),
        (
            &["rollout.max_completion_length=1000000", "grpo.num_generations=1000000", "grpo.prompts_per_step=1"],
            [table, "grpo.num_generations"],
        ),
        (
            &[
                "rollout.max_completion_length=1000000",
                "grpo.num_generations=1048576",
                "grpo.prompts_per_step=1",
                "grpo.gradient_accumulation_steps=1",
                "rollout.batch_size=18446744073709551615",
            ],
            [table, "rollout.batch_size"],
        ),
        (
            &["grpo.num_generations=1000000", "grpo.prompts_per_step=1", "grpo.gradient_accumulation_steps=1"],
            [table, "grpo.num_generations"],
        ),
        (
            &[
                "grpo.prompts_per_step=500000",
                "grpo.num_generations=2",
                "grpo.gradient_accumulation_steps=1",
                "rollout.max_completion_length=2000",
            ],
            [table, "grpo.prompts_per_step"],
        ),
        (
            &["rollout.max_completion_length=1000000000"],
            ["`rollout.max_completion_length`", "less than model.max_position_embeddings"],
        ),
        (&["rollout.max_completion_length=18446744073709551615"], ["`rollout.max_completion_length`", "less than"]),
        (&["grpo.num_generations=1000000000"], ["`grpo.num_generations`", "at most "]),
        (&["grpo.prompts_per_step=1000000000"], ["`grpo.prompts_per_step`", "at most "]),
        (&["grpo.num_generations=18446744073709551615"], ["`grpo.num_generations`", "at most "]),
        (&["eval.num_generations=1000000000"], ["`eval.num_generations`", "at most "]),
        (&["eval.num_problems=1000000000"], ["`eval.num_problems`", "at most "]),
        (&["warmup.batch_size=1000000000", "warmup.steps=1"], ["`warmup.batch_size`", "at most "]),
    ] {
        let said = limited(call(&runs, "model", "a", settings)).output();
        let is_refused = said.code == Some(2) && !said.stderr.contains("panicked");
        if !(is_refused && words.iter().all(|word| said.stderr.contains(word))) {
            missed.push(format!("{settings:?}: {said:?}"));
        }
        assert!(!runs.path("a").exists(), "{settings:?}");
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    // Limits that nothing reaches, and a new model.
    let far = [
        "data.max_prompt_length=1000000000",
        "rollout.batch_size=18446744073709551615",
        "grpo.gradient_accumulation_steps=1000000000",
        "grpo.max_steps=1",
    ];
    limited(call(&runs, "model", "far", &far)).succeed();
    let settings =
        ["model.max_position_embeddings=1048576", "rollout.max_completion_length=1000000", "grpo.num_generations=4096"];
    assert_has(&refusal(grpo(["train", "--run-dir", &runs.text("new")]).set(settings)), &[table]);
}
