//! The generated part of a loss's page: defaults by system, and numbers.

use super::defaults::{Property, SYSTEMS, minimal, properties, word};
use super::examples::{Sequence, examples};
use super::folder;
use super::page::{marked, number, spoken, table};
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::batch::PolicyValues;
use grpo_core::batch::TokenWeights;
use grpo_core::{Advantages, LossConfig, LossType, TokenBatch};
use std::collections::BTreeMap;

/// Returns the module documentation of a loss as Markdown.
pub(crate) fn written(loss: LossType) -> String {
    let name = loss.name();
    let path = folder("crates/grpo-core/src/objective").join(format!("{name}.rs"));
    let source = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let lines = source.lines().take_while(|line| line.starts_with("//!"));
    let text: Vec<&str> = lines.map(|line| line.trim_start_matches("//!").strip_prefix(' ').unwrap_or("")).collect();
    let heading = format!("# {name}");
    assert_eq!(text.first(), Some(&heading.as_str()), "{}: the documentation begins with its heading", path.display());
    links(&text.join("\n"))
}

/// Converts links of rustdoc and file names to links between pages.
fn links(text: &str) -> String {
    let text = text.replace("](crate::LossConfig::prepare)", "](../../crates/grpo-core/src/prepare.rs)");
    let mut parts = text.split("](super::");
    let mut linked = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (target, rest) = part.split_once(')').expect("a link ends");
        linked += &format!("]({target}.md){rest}");
    }
    let code = linked.split('`').enumerate().map(|(i, piece)| {
        let is_code = i % 2 == 1;
        let file = piece.strip_prefix("configs/loss/").and_then(|file| file.strip_suffix(".yaml")).filter(|_| is_code);
        let page = piece.strip_prefix("docs/losses/").filter(|_| is_code);
        match (file, page) {
            (Some(preset), _) => (format!("[{preset}](../../{piece})"), false),
            (_, Some(page)) => (format!("[{}]({page})", page.split(".md").next().unwrap_or_default()), false),
            _ => (piece.to_owned(), is_code),
        }
    });
    code.map(|(text, is_code)| if is_code { format!("`{text}`") } else { text }).collect()
}

/// Returns the first paragraph of a loss's page.
fn summary(loss: LossType) -> String {
    let text = written(loss);
    text.split("\n\n").nth(1).expect("a first paragraph").replace('\n', " ")
}

/// Returns the list of losses.
pub(crate) fn index() -> String {
    let rows = LossType::ALL.iter().map(|loss| [format!("[{0}]({0}.md)", loss.name()), summary(*loss)]);
    table(&["page", "summary"], rows)
}

/// Returns the page of a loss.
pub(crate) fn page(loss: LossType) -> String {
    format!("{}\n\n## From the code\n\n{}\n", written(loss), marked(&generated(loss)))
}

fn generated(loss: LossType) -> String {
    let legend = "B: sequences; B': sequences with active tokens; |y|: active tokens of a sequence; N: active tokens of \
                  the step ([aggregation](aggregation.md)).";
    let numbers_of = "Loss and gradient of one sequence, computed by this library as the mean over its tokens for every \
                      average, without KL and entropy terms.";
    let mut text = format!("### Defaults by system\n\n{}\n{legend}\n\n### Numbers\n\n{numbers_of}\n", defaults(loss));
    for (json, sequences) in examples(loss) {
        text += &format!("\n`{}`\n\n{}", spoken(&json), numbers(&json, &sequences));
    }
    text
}

fn defaults(loss: LossType) -> String {
    let (mut columns, mut notes) = (Vec::<(String, Vec<Property>)>::new(), BTreeMap::<String, Vec<String>>::new());
    for system in SYSTEMS {
        let name = word(system);
        match minimal(loss, system) {
            Ok((config, needed)) => {
                if let Some(reason) = needed {
                    notes
                        .entry(format!("needs a key without a default, here with the value of an example: {reason}"))
                        .or_default()
                        .push(format!("`{name}`"));
                }
                columns.push((name, properties(&config)));
            }
            Err(reason) => notes.entry(format!("refused: {reason}")).or_default().push(format!("`{name}`")),
        }
    }
    let head: Vec<&str> = ["`semantics`"].into_iter().chain(columns.iter().map(|(name, _)| name.as_str())).collect();
    let rows = (0..columns[0].1.len()).map(|i| {
        let cells = columns.iter().map(|(_, properties)| properties[i].1.clone());
        [columns[0].1[i].0.to_owned()].into_iter().chain(cells).collect::<Vec<_>>()
    });
    let table = table(&head, rows);
    let notes: String = notes.iter().map(|(note, systems)| format!("* {}: {note}\n", systems.join(", "))).collect();
    if notes.is_empty() { table } else { format!("{table}\n{notes}") }
}

/// Returns loss and gradient of `sequences`.
fn numbers(json: &str, sequences: &[Sequence]) -> String {
    let config = LossConfig::from_json(json).unwrap();
    let tokens: Vec<(f64, f64)> = sequences.iter().flat_map(|s| s.tokens.clone()).collect();
    let mut offsets = vec![0];
    let mut share = Vec::new();
    for sequence in sequences {
        let length = sequence.tokens.len();
        offsets.push(offsets.last().unwrap() + length);
        share.extend(vec![1.0 / length as f64; length]);
    }
    let logp: Vec<f64> = tokens.iter().map(|token| token.1).collect();
    let advantages = sequences.iter().map(|s| s.advantage as f32).collect();
    let batch = TokenBatch::packed(vec![0; tokens.len()], offsets.clone())
        .and_then(|batch| batch.with_advantages(Advantages::PerSequence(advantages)))
        .and_then(|batch| batch.with_old_logp(tokens.iter().map(|token| token.0 as f32).collect()))
        .and_then(|batch| {
            batch.with_weights(TokenWeights { policy: share.clone(), kl: share, ..TokenWeights::zeros(tokens.len()) })
        })
        .unwrap();
    let values = PolicyValues { logp: logp.clone(), entropy: vec![0.0; tokens.len()] };
    let batch = config.prepare(&batch, |_| Ok::<_, grpo_core::Error>(values)).unwrap();
    let evaluator = Evaluator::new(&config, &batch).unwrap();
    let mut rows = Vec::new();
    for (sequence, span) in sequences.iter().zip(offsets.windows(2).map(|pair| pair[0]..pair[1])) {
        let mut totals = evaluator.totals();
        let (mut dlogp, mut dentropy) = (vec![0.0; span.len()], vec![0.0; span.len()]);
        let entropy = vec![0.0; span.len()];
        evaluator.evaluate(span.clone(), &logp[span], &entropy, &mut dlogp, &mut dentropy, &mut totals);
        let loss = evaluator.finish(totals).loss;
        let list = |values: &mut dyn Iterator<Item = f64>| values.map(number).collect::<Vec<_>>().join(", ");
        let of = |f: fn(&(f64, f64)) -> f64| list(&mut sequence.tokens.iter().map(f));
        rows.push([
            number(sequence.advantage),
            of(|token| token.0),
            of(|token| token.1),
            of(|token| (token.1 - token.0).exp()),
            number(loss),
            list(&mut dlogp.iter().copied()),
        ]);
    }
    table(&["A", "o", "l", "e^(l - o)", "loss", "dL/dl"], rows)
}
