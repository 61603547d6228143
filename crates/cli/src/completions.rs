//! Formats sampled completions as a table. They are untrusted and may be long.

use crate::table::Sheet;
use grpo_run::jsonl::CompletionRow;
use std::collections::BTreeSet;

/// The length limits of prompts and completions in characters; longer texts are shortened.
const MOST: (usize, usize) = (240, 480);

/// Returns the completions of a step as a table with a column for each reward function, as wide as `columns` allow.
pub(crate) fn text(rows: &[CompletionRow], columns: Option<usize>) -> String {
    let names: BTreeSet<&String> = rows.iter().flat_map(|row| row.rewards.keys()).collect();
    // A single function with weight 1 equals the total reward.
    let plain = |name: &&String| rows.iter().any(|row| row.rewards.get(*name).copied().flatten() != row.reward);
    let names: Vec<&String> = names.into_iter().filter(plain).collect();
    let mut header = vec!["step", "prompt", "completion", "right"];
    header.extend(names.iter().map(|name| name.as_str()));
    header.extend(["reward", "advantage"]);
    let numbers = 4..header.len();
    let mut table = Sheet::new(header, numbers).with_texts(1..4);
    for row in rows {
        let cut = if row.truncated { " (cut off)" } else { "" };
        let mut cells = vec![
            row.step.to_string(),
            // The end of a prompt has the question, after the parts that all prompts share.
            shown(&row.prompt, 0, MOST.0),
            // The beginning of a completion, and its end with the answer.
            format!("{}{cut}", shown(&row.completion, MOST.1 / 2, MOST.1)),
            shown(&row.answer, MOST.0 / 2, MOST.0),
        ];
        let number = |reward: Option<f32>| reward.map_or("-".into(), |reward| format!("{reward:.2}"));
        cells.extend(names.iter().map(|name| number(row.rewards.get(*name).copied().flatten())));
        cells.extend([number(row.reward), format!("{:+.2}", row.advantage)]);
        table.row(cells);
    }
    table.fitted(columns)
}

/// Returns `text`; a text of more than `most` characters is reduced to its first `head` characters and its last ones.
fn shown(text: &str, head: usize, most: usize) -> String {
    let text = text.trim();
    let count = text.chars().count();
    if count <= most {
        return text.to_owned();
    }
    let left = count - most;
    let begin: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(head + left).collect();
    let gap = if begin.is_empty() { "" } else { " " };
    format!("{begin}{gap}[... {left} characters ...] {end}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use console::measure_text_width;
    use std::collections::BTreeMap;

    fn row(prompt: &str, completion: &str, rewards: &[(&str, Option<f32>)]) -> CompletionRow {
        CompletionRow {
            step: 40,
            task: "math".to_owned(),
            prompt: prompt.to_owned(),
            answer: "42".to_owned(),
            completion: completion.to_owned(),
            truncated: true,
            reward: Some(0.75),
            rewards: rewards.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect::<BTreeMap<_, _>>(),
            advantage: -0.5,
            reward_failures: Vec::new(),
            weight_versions: Vec::new(),
        }
    }

    #[test]
    fn completions_wrap_text_and_have_a_column_per_reward() {
        let words = "so many words ".repeat(20);
        let rows = [
            row("What is six times seven?", &words, &[("correct", Some(0.5)), ("format", None)]),
            row("\u{1b}[2J\u{202e}", "two\nlines", &[("correct", Some(1.0)), ("format", Some(0.25))]),
        ];
        for columns in [100, 120, 200] {
            let text = text(&rows, Some(columns));
            assert!(text.lines().all(|line| measure_text_width(line.trim_end()) <= columns), "{columns}:\n{text}");
            let header: Vec<&str> = text.lines().next().unwrap().split_whitespace().collect();
            assert_eq!(header, ["step", "prompt", "completion", "right", "correct", "format", "reward", "advantage"]);
            assert!(text.contains('─') && text.contains("-0.50") && text.contains("0.25"), "{text}");
            assert!(!text.contains(['\u{1b}', '\u{202e}']), "{text:?}");
        }
        // Too narrow for columns of text.
        let list = text(&rows, Some(50));
        assert!(list.starts_with("step: 40\nprompt: What is six times seven?\ncompletion: so many"), "{list}");
        assert!(list.lines().all(|line| measure_text_width(line) <= 50), "{list}");
    }

    #[test]
    fn a_single_unweighted_reward_has_no_column_of_its_own() {
        let text = text(&[row("a", "b", &[("correct", Some(0.75))])], None);
        assert!(!text.contains("correct") && text.contains("reward"), "{text}");
    }

    #[test]
    fn long_texts_show_beginning_and_end() {
        let letters: String = ('a'..='z').collect();
        assert_eq!(shown(&letters, 0, 5), "[... 21 characters ...] vwxyz");
        assert_eq!(shown(&letters, 2, 5), "ab [... 21 characters ...] xyz");
        assert_eq!(shown("  a b\n", 2, 5), "a b");
    }
}
