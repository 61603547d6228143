//! Scores completions: reads JSON lines with `answer` and `completion`, and writes one line per input with the reward of each function.
//!
//! `cargo run --release -p grpo-rewards --example judge -- '{"math": 1}' < rows.jsonl`
//!
//! The argument is the section `rewards` of a configuration in JSON. `scripts/measure_rewards.py` calls it.

use grpo_data::Item;
use grpo_rewards::{RewardInput, Rewards};
use serde_json::{Map, Value, json};
use std::error::Error;
use std::io::{BufRead, Write};
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let section = std::env::args().nth(1).unwrap_or_else(|| r#"{"math": 1}"#.to_owned());
    let rewards = Rewards::new(&serde_json::from_str(&section)?)?;
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let row: Value = serde_json::from_str(&line?)?;
        let item = Item::new("").with_answer(row["answer"].as_str().unwrap_or_default());
        let completion = row["completion"].as_str().unwrap_or_default();
        let input = RewardInput::new(&item, completion);
        let began = Instant::now();
        let judged = rewards.score(&[input]).remove(0);
        let names = rewards.names().map(str::to_owned);
        let mut judged: Map<String, Value> = names.zip(judged.terms.into_iter().map(Value::from)).collect();
        judged.insert("seconds".into(), json!(began.elapsed().as_secs_f64()));
        writeln!(out, "{}", Value::Object(judged))?;
    }
    Ok(())
}
