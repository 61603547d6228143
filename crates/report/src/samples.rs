//! Selects rows of completions.jsonl that fit on a page, evenly spread over the run.

use crate::error::Result;
use crate::lines::{Reading, each_row};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// The length limit of a sample's text in characters.
const MAX_TEXT: usize = 6000;

/// A sampled completion. Its texts are untrusted.
#[derive(Debug, Serialize)]
pub(crate) struct Sample {
    pub step: u64,
    /// The trainer's fields: `prompt`, `completion`, `answer`, `reward`, `rewards`, `advantage`, ...
    pub fields: Map<String, Value>,
    /// The number of characters that were cut off from a field's text.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub cut: BTreeMap<String, usize>,
}

#[derive(Debug, Default)]
pub(crate) struct Samples {
    pub rows: Vec<Sample>,
    /// The number of samples in the file.
    pub found: u64,
    /// The number of steps in the file.
    pub steps: usize,
}

#[derive(Deserialize)]
struct StepOnly {
    step: u64,
}

impl Samples {
    /// Reads the samples of a run, with at most about `budget` bytes.
    pub(crate) fn read(path: &Path, budget: usize) -> Result<(Self, Reading)> {
        let mut index = Vec::new();
        let reading = each_row(path, |row: StepOnly, length| {
            index.push((row.step, length.min(3 * MAX_TEXT)));
            Ok(())
        })?;
        let (chosen, steps) = choose(&index, budget);
        let (mut number, mut rows) = (0, Vec::with_capacity(chosen.len()));
        each_row(path, |mut fields: Map<String, Value>, _| {
            // Only rows of the first pass, because the file may have grown since.
            let step = fields.remove("step").and_then(|step| step.as_u64()).ok_or("it has no step")?;
            if chosen.contains(&number) {
                let mut sample = Sample { step, fields, cut: BTreeMap::new() };
                sample.shorten();
                rows.push(sample);
            }
            number += 1;
            Ok(())
        })?;
        rows.sort_by_key(|sample| sample.step);
        Ok((Self { rows, found: index.len() as u64, steps }, reading))
    }

    /// Describes how many samples are not on the page; `None` if all are.
    pub(crate) fn left_out(&self) -> Option<String> {
        let left = self.found.saturating_sub(self.rows.len() as u64);
        let shown: HashSet<u64> = self.rows.iter().map(|sample| sample.step).collect();
        (left > 0).then(|| {
            let (found, shown, steps) = (self.found, shown.len(), self.steps);
            format!("{left} of {found} samples are left out to keep the page small: it has those of {shown} of {steps} steps")
        })
    }
}

impl Sample {
    fn shorten(&mut self) {
        for (name, value) in &mut self.fields {
            if value.is_array() || (value.is_object() && name != "rewards") {
                *value = Value::String(text_of(value));
            }
            let Value::String(text) = value else { continue };
            if let Some((end, _)) = text.char_indices().nth(MAX_TEXT) {
                self.cut.insert(name.clone(), text[end..].chars().count());
                text.truncate(end);
            }
        }
    }
}

/// Formats a list as paragraphs: chat messages with their roles, strings as they are, other values as JSON.
fn text_of(value: &Value) -> String {
    let paragraph = |item: &Value| match (item, item.get("role"), item.get("content")) {
        (Value::String(text), _, _) => text.clone(),
        (Value::Object(map), Some(Value::String(role)), Some(Value::String(content))) if map.len() == 2 => {
            format!("{role}: {content}")
        }
        _ => item.to_string(),
    };
    match value.as_array() {
        Some(list) => list.iter().map(paragraph).collect::<Vec<_>>().join("\n"),
        None => value.to_string(),
    }
}

/// Returns the indices of rows that fit into `budget` bytes, and the number of steps in the file: all rows of as many steps as possible,
/// evenly spread, including the first and the last step; of a single step that is too large, its first rows.
fn choose(index: &[(u64, usize)], budget: usize) -> (HashSet<usize>, usize) {
    let mut steps = BTreeMap::<u64, Vec<(usize, usize)>>::new();
    for (place, (step, bytes)) in index.iter().enumerate() {
        steps.entry(*step).or_default().push((place, *bytes));
    }
    let steps: Vec<Vec<(usize, usize)>> = steps.into_values().collect();
    let total = steps.len();
    let spread = |count: usize| (0..count).map(move |i| if count < 2 { 0 } else { i * (total - 1) / (count - 1) });
    let cost = |i: usize| steps[i].iter().map(|(_, bytes)| bytes).sum::<usize>();
    let fits = |count: usize| spread(count).map(cost).sum::<usize>() <= budget;
    // The size does not always decrease with the number of steps, so counts are tried from above, a tenth less each time.
    let mut count = total;
    while count > 2 && !fits(count) {
        count -= (count / 10).max(1);
    }
    let per_step = if fits(count) { usize::MAX } else { budget / count };
    let mut chosen = HashSet::new();
    for i in spread(count) {
        let mut left = per_step;
        for (rank, (place, bytes)) in steps[i].iter().enumerate() {
            // At least one sample of each step, whatever its length.
            if rank > 0 && *bytes > left {
                break;
            }
            left = left.saturating_sub(*bytes);
            chosen.insert(*place);
        }
    }
    (chosen, total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampled_steps_are_complete_and_evenly_spread() {
        let index: Vec<(u64, usize)> = (0..1000).map(|row| (1 + row / 4, 100)).collect();
        let (all, steps) = choose(&index, usize::MAX);
        assert_eq!((all.len(), steps), (1000, 250));
        let (chosen, _) = choose(&index, 20_000);
        assert!(chosen.len() > 170 && chosen.len() <= 200, "{}", chosen.len());
        let shown: std::collections::BTreeSet<u64> = chosen.iter().map(|place| index[*place].0).collect();
        assert_eq!(shown.len() * 4, chosen.len());
        assert!(shown.contains(&1) && shown.contains(&250));
        let gaps: Vec<u64> = shown.iter().zip(shown.iter().skip(1)).map(|(a, b)| b - a).collect();
        assert!(gaps.iter().all(|gap| (4..=7).contains(gap)), "{gaps:?}");
    }

    #[test]
    fn a_single_large_step_shows_its_first_samples() {
        let index = [(1, 100), (1, 100), (1, 100)];
        assert_eq!(choose(&index, 250).0, HashSet::from([0, 1]));
        assert_eq!(choose(&index, 0).0, HashSet::from([0]));
        assert_eq!(choose(&[], 250), (HashSet::new(), 0));
    }

    #[test]
    fn long_texts_are_cut_at_characters_and_the_rest_is_counted() {
        let fields = Map::from_iter([
            ("completion".to_owned(), Value::String("é".repeat(MAX_TEXT + 5))),
            ("messages".to_owned(), serde_json::json!([{ "role": "user", "content": "a" }, "b", { "role": "tool" }])),
        ]);
        let mut sample = Sample { step: 1, fields, cut: BTreeMap::new() };
        sample.shorten();
        assert_eq!(sample.fields["completion"], "é".repeat(MAX_TEXT));
        assert_eq!(sample.cut, BTreeMap::from([("completion".to_owned(), 5)]));
        assert_eq!(sample.fields["messages"], "user: a\nb\n{\"role\":\"tool\"}");
    }
}
