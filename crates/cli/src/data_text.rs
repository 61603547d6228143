//! Formats the output of `grpo data`.

use crate::data::{File, Row, Summary, Tried};
use crate::table::Sheet;
use crate::terminal;
use grpo_files::{counted, printable, printable_line};
use std::fmt::Write;

/// The limit of bars of a histogram.
const BARS: usize = 12;

/// The maximum number of characters of a completion in a line.
const SHOWN: usize = 40;

/// Formats the rows of a summary, without rewards. Writing to a string cannot fail.
pub(crate) fn rows(summary: &Summary) -> String {
    let columns = terminal::columns().unwrap_or(terminal::USUAL_COLUMNS);
    let mut out = String::new();
    for file in &summary.files {
        out.push_str(&file_text(file));
    }
    if summary.special_text > 0 {
        let _ = writeln!(
            out,
            "note: {} {} text that is written like a special token; it is encoded as text",
            counted(summary.special_text, "prompt"),
            if summary.special_text == 1 { "has" } else { "have" }
        );
    }
    let limit = summary.max_prompt_length.map_or(String::new(), |limit| format!("; at most {limit} are taken"));
    let _ = writeln!(
        out,
        "\ntokens of {}: {}{limit}",
        counted(summary.prompt_lengths.len(), "prompt"),
        lengths(&summary.prompt_lengths)
    );
    out.push_str(&histogram(&summary.prompt_lengths, summary.max_prompt_length, "dropped", columns));
    if !summary.completion_lengths.is_empty() {
        out.push_str(&completions(&summary.completion_lengths, summary.max_completion_length, columns));
    }
    if summary.sources.len() > 1 {
        let mut table = Sheet::new(["source", "rows"], 1..2).named();
        for (source, rows) in &summary.sources {
            table.row([source.clone(), rows.to_string()]);
        }
        let _ = writeln!(out, "\n{}", table.text());
    }
    for (index, row) in summary.prompts.iter().enumerate() {
        out.push_str(&prompt(index + 1, row));
    }
    out
}

/// Formats the heading of the results of [`tried`] for a number of rows.
pub(crate) fn trial(rows: usize) -> String {
    let rows = if rows == 1 { "a row".to_owned() } else { format!("{rows} rows, which have different columns") };
    format!("\neach reward function on {rows} (right answer, or an empty text: reward):\n")
}

/// Formats the result of a reward function on one row.
pub(crate) fn tried(tried: &Tried) -> String {
    let Tried { reward, section, completion, value, failure } = tried;
    let mut shown: String = completion.chars().take(SHOWN).collect();
    if shown.len() < completion.len() {
        shown.push_str("...");
    }
    let result = match (failure, value) {
        (Some(failure), _) => {
            let section = section.as_ref().map_or(String::new(), |section| format!("{section}: "));
            format!("failed: {section}{failure}")
        }
        (None, Some(value)) => value.to_string(),
        (None, None) => "no reward".to_owned(),
    };
    format!("  {reward} (\"{}\"): {result}\n", printable_line(&shown))
}

/// Formats the rewards of a summary's reference answers.
pub(crate) fn judged(summary: &Summary) -> String {
    let mut out = String::new();
    if let Some(column) = &summary.likely_answer_column {
        let _ = writeln!(
            out,
            "\nnote: rows have no right answer in column `answer`; `{column}` looks like one of answers, which \
             `--set data.answer_column={column}` shows and scores here"
        );
    }
    if summary.completion_lengths.is_empty() {
        out.push_str("\nno reference answers in the inspected rows: nothing to score\n");
    }
    if summary.rewards.is_empty() {
        return out;
    }
    let mut table = Sheet::new(["reward", "of the row's", "rows", "mean", "no reward", "failed"], 2..6);
    for judged in &summary.rewards {
        let mean = judged.mean.map_or("-".into(), |mean| format!("{mean:.3}"));
        let (rows, none, failed) = (judged.rows.to_string(), judged.none.to_string(), judged.failed.to_string());
        table.row([judged.reward.clone(), judged.of.to_owned(), rows, mean, none, failed]);
    }
    let _ = writeln!(out, "\nrewards of reference answers:\n{}", table.text());
    for judged in &summary.rewards {
        if let Some(failure) = &judged.failure {
            let _ = writeln!(out, "{}: {failure}", judged.reward);
        }
    }
    out
}

fn file_text(file: &File) -> String {
    let File { path, rows, training, held_out, dropped } = file;
    let rows = counted(*rows, "row");
    let mut out = format!("{}: {rows}, {training} to train on, {held_out} held out\n", path.display());
    for (reason, count) in dropped {
        let _ = writeln!(out, "  {count} dropped: {reason}");
    }
    out
}

/// Formats the lengths of reference completions, and how many of them exceed the limit.
fn completions(all: &[usize], limit: usize, columns: usize) -> String {
    let mut out = format!("\ntokens of {}: {}\n", counted(all.len(), "right completion"), lengths(all));
    out.push_str(&histogram(all, Some(limit), "cut off", columns));
    let longer = all.iter().filter(|length| **length > limit).count();
    if longer > 0 {
        let _ = writeln!(
            out,
            "note: {longer} of them {} longer than rollout.max_completion_length, {limit}: a completion like {} would be cut off",
            if longer == 1 { "is" } else { "are" },
            if longer == 1 { "it" } else { "them" }
        );
    }
    out
}

/// Formats statistics of lengths.
fn lengths(lengths: &[usize]) -> String {
    let mut sorted = lengths.to_vec();
    sorted.sort_unstable();
    let at = |share: f64| sorted.get((share * sorted.len().saturating_sub(1) as f64).round() as usize).copied();
    let [min, median, p95, max] = [0.0, 0.5, 0.95, 1.0].map(|share| at(share).unwrap_or_default());
    format!("min {min}, median {median}, p95 {p95}, max {max}")
}

/// Draws a bar per range of lengths, at most `columns` wide; bars above `limit` are labelled `beyond`.
fn histogram(lengths: &[usize], limit: Option<usize>, beyond: &str, columns: usize) -> String {
    let (Some(min), Some(max)) = (lengths.iter().min(), lengths.iter().max()) else { return String::new() };
    let width = bar_width(max - min + 1);
    let first = min / width;
    let mut counts = vec![0_usize; max / width - first + 1];
    for length in lengths {
        counts[length / width - first] += 1;
    }
    let most = counts.iter().max().copied().unwrap_or(1).max(1);
    let (digits, numbers) = (max.to_string().len().max(2), most.to_string().len());
    // The label "  12-34  " before a bar, and " 123 dropped" after it.
    let room = columns.saturating_sub(2 * digits + 5 + numbers + beyond.len() + 3).max(1);
    let mut out = String::new();
    for (index, count) in counts.iter().enumerate() {
        let (low, high) = ((first + index) * width, (first + index + 1) * width - 1);
        let bar = (count * room).div_ceil(most);
        let beyond = match limit {
            Some(limit) if low > limit && *count > 0 => format!(" {beyond}"),
            _ => String::new(),
        };
        let _ = writeln!(
            out,
            "  {low:>digits$}-{high:<digits$}  {}{}{count}{beyond}",
            "█".repeat(bar),
            if bar > 0 { " " } else { "" }
        );
    }
    out
}

/// Returns 1, 2 or 5 times a power of ten, such that at most [`BARS`] bars cover `range`.
fn bar_width(range: usize) -> usize {
    let mut scale = 1;
    loop {
        for width in [scale, 2 * scale, 5 * scale] {
            // One more bar may be needed, because the first starts at a multiple of its width.
            if range.div_ceil(width) < BARS {
                return width;
            }
        }
        scale *= 10;
    }
}

fn prompt(number: usize, row: &Row) -> String {
    let answer =
        row.answer.as_deref().map_or("no answer".into(), |answer| format!("answer: {}", printable_line(answer)));
    let tokens = counted(row.tokens, "token");
    format!("\nprompt {number} ({}, {tokens}, {answer})\n{}\n", row.source, printable(&row.prompt))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_bars_fit_the_terminal_and_count_every_value() {
        let lengths: Vec<usize> = (0..1000).map(|i| 20 + i % 97 + (i / 900) * 300).collect();
        for columns in [30, 80, 200] {
            let text = histogram(&lengths, Some(119), "dropped", columns);
            assert!(text.lines().all(|line| line.chars().count() <= columns), "{columns}:\n{text}");
            assert!(text.lines().count() <= BARS);
            let count = |line: &str| line.split_whitespace().find_map(|word| word.parse::<usize>().ok()).unwrap();
            assert_eq!(text.lines().map(count).sum::<usize>(), 1000, "{text}");
            assert_eq!(text.lines().filter(|line| line.ends_with(" dropped")).map(count).sum::<usize>(), 100, "{text}");
        }
        assert_eq!(histogram(&[7], None, "dropped", 80).lines().count(), 1);
        assert_eq!(histogram(&[], None, "dropped", 80), "");
        assert_eq!([1, 12, 13, 100, 1000].map(bar_width), [1, 2, 2, 10, 100]);
    }

    #[test]
    fn escape_codes_in_prompts_are_escaped() {
        let row = Row { source: "a".into(), prompt: "x\u{1b}[31m\ny".into(), tokens: 3, answer: Some("1\n2".into()) };
        assert_eq!(prompt(1, &row), "\nprompt 1 (a, 3 tokens, answer: 1\\n2)\nx\\u{1b}[31m\ny\n");
    }
}
