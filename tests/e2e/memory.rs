//! What a training takes is said before it is loaded, and it is what the training takes.

use crate::support::{Runs, command, rows, stderr};
use crate::tiny_model::{arguments, prepare_shape};
use models::ModelConfig;

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
fn the_table_of_memory_is_what_the_process_takes() {
    for micro_batches in ["2", "1"] {
        compare(&format!("grpo.gradient_accumulation_steps={micro_batches}"));
    }
}

fn compare(micro_batches: &str) {
    let runs = Runs::new(&[]);
    let shape = ModelConfig {
        vocab_size: 8192,
        hidden_size: 384,
        intermediate_size: 1024,
        num_hidden_layers: 5,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        max_position_embeddings: 256,
        tie_word_embeddings: false,
        ..ModelConfig::default()
    };
    prepare_shape(&runs, &shape);
    // Most ids are none of the tokenizer's, so that a completion is empty or not.
    let rewards = "rewards.regex={text: {pattern: '.'}}";
    let arguments = arguments(&runs, "model", "a", &[rewards, micro_batches, "run.save_steps=0", "loss.beta=0"]);
    let mut command = command(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let output = command.env("GRPO_LOG", "info").env("RAYON_NUM_THREADS", "2").output().expect("the binary starts");
    let text = stderr(&output);
    assert!(output.status.success(), "{text}");
    let updates = rows(&runs.path("a/metrics.jsonl"));
    let updates = updates.iter().filter(|row| row["phase"] == "grpo" && row["grad_norm"].as_f64() > Some(1e-3)).count();
    assert_eq!(updates, 2, "both steps have gradients:\n{text}");
    let total = text.lines().find_map(|line| line.trim().strip_prefix("total (")?.split_once(") "));
    let (_, total) = total.unwrap_or_else(|| panic!("a table:\n{text}"));
    // The kernel's own count, VmHWM.
    let (_, most) = text.split_once("the most memory that this process took: ").expect("the most");
    let (said, taken) = (bytes(total), bytes(most.lines().next().expect("a line")));
    assert!(said > 4.0 * shape.parameter_count() as f64 * 4.0, "{text}");
    let off = (said - taken).abs();
    let [said, taken] = [said, taken].map(|bytes| bytes / MB);
    assert!(off <= 0.1 * taken * MB, "{said:.0} MB were said, {taken:.0} MB taken with {micro_batches}:\n{text}");
    println!("{micro_batches}: {said:.0} MB said, {taken:.0} taken");
}
