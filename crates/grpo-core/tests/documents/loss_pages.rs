//! The generated part of a loss's page: defaults by system, and numbers.

use crate::defaults::{Property, SYSTEMS, minimal, properties, word};
use crate::examples::{Sequence, examples};
use crate::page::{number, spoken, table};
use grpo_core::evaluate::Evaluator;
use grpo_core::factors::PolicyValues;
use grpo_core::weights::TokenWeights;
use grpo_core::{Advantages, LossConfig, LossType, TokenBatch};
use std::collections::BTreeMap;

pub(crate) fn generated(loss: LossType) -> String {
    let legend = "B: sequences; B': those with active tokens; |y|: active tokens of a sequence; N: active tokens of \
                  the step ([aggregation](aggregation.md)).";
    let numbers_of = "The code's own for a sequence alone, the mean over its tokens whatever the loss's average; \
                      without KL and entropy.";
    let mut text = format!("### Defaults by system\n\n{}\n{legend}\n\n### Numbers\n\n{numbers_of}\n", defaults(loss));
    for (json, sequences) in examples(loss) {
        text += &format!("\n`{}`\n\n{}", spoken(json), numbers(json, &sequences));
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
                        .entry(format!("needs a value, here that of an example: {reason}"))
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

/// Loss and gradient of `sequences`.
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
