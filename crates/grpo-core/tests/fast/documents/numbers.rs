//! Gradients of all losses at the same tokens.

use super::examples::{Sequence, covariances, examples, pairs, tokens};
use super::page::{number, spoken, table};
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::batch::{PolicyValues, TokenWeights};
use grpo_core::{Advantages, LossConfig, LossType, TokenBatch};

/// Returns the tables of gradients.
pub(crate) fn generated() -> String {
    let all: Vec<(String, LossConfig)> = LossType::ALL
        .iter()
        .flat_map(|loss| {
            examples(*loss).into_iter().map(|json| (label(*loss, &json), LossConfig::from_json(&json).unwrap()))
        })
        .collect();
    let of_batch = |(_, config): &&(String, LossConfig)| config.selects_tokens();
    let of_sequence = |(_, config): &&(String, LossConfig)| !config.is_token_level();
    let single = rows(all.iter().filter(|row| !of_batch(row)), &tokens());
    let sequences = rows(all.iter().filter(of_sequence), &pairs());
    let selecting: Vec<_> = all.iter().filter(of_batch).collect();
    let columns: Vec<Vec<String>> = selecting
        .iter()
        .map(|(_, config)| gradients(config, &covariances()).iter().map(|cell| list(cell)).collect())
        .collect();
    let covariances = covariances().into_iter().enumerate().map(|(row, sequence)| {
        let (old, logp) = sequence.tokens[0];
        let given = [sequence.advantage, old, logp].map(number);
        given.into_iter().chain(columns.iter().map(|column| column[row].clone())).collect::<Vec<_>>()
    });
    let labels = selecting.iter().map(|(label, _)| label.clone());
    let head: Vec<String> = ["A", "o", "l"].map(String::from).into_iter().chain(labels).collect();
    format!(
        "Sequences of one token with o = -2; the head has A and l - o of the tokens:\n\n{}\nSequences of two tokens, for the losses that share one ratio between \
         them:\n\n{}\nA batch of six sequences of one token, for the losses that select tokens or sequences:\n\n{}",
        table(&head_of(&tokens()), single),
        table(&head_of(&pairs()), sequences),
        table(&head, covariances)
    )
}

/// Returns a link to the page of a loss with the other keys of `json`.
fn label(loss: LossType, json: &str) -> String {
    let name = loss.name();
    let all = spoken(json);
    let keys: Vec<String> =
        all.split(", ").filter(|pair| *pair != format!("loss_type: {name}")).map(|pair| format!("`{pair}`")).collect();
    [format!("[{name}]({name}.md)")].into_iter().chain(keys).collect::<Vec<_>>().join(", ")
}

/// Returns the columns of a table: advantage and log-ratios of each sequence.
fn head_of(sequences: &[Sequence]) -> Vec<String> {
    let cell = |sequence: &Sequence| {
        let ratios: Vec<f64> = sequence.tokens.iter().map(|(old, logp)| ((logp - old) * 1e6).round() / 1e6).collect();
        format!("A = {}: {}", number(sequence.advantage), list(&ratios))
    };
    ["loss".to_owned()].into_iter().chain(sequences.iter().map(cell)).collect()
}

/// Returns a row per list of gradients; losses with the same gradients share a row.
fn rows<'a>(losses: impl Iterator<Item = &'a (String, LossConfig)>, sequences: &[Sequence]) -> Vec<Vec<String>> {
    let mut groups: Vec<(Vec<String>, Vec<&str>)> = Vec::new();
    for (label, config) in losses {
        let cells: Vec<String> = gradients(config, sequences).iter().map(|cell| list(cell)).collect();
        match groups.iter_mut().find(|(other, _)| *other == cells) {
            Some((_, labels)) => labels.push(label),
            None => groups.push((cells, vec![label])),
        }
    }
    groups.into_iter().map(|(cells, labels)| [vec![labels.join("; ")], cells].concat()).collect()
}

fn list(values: &[f64]) -> String {
    values.iter().copied().map(number).collect::<Vec<_>>().join(", ")
}

/// Returns dL/dl of the tokens of each sequence, with the mean over the tokens of a sequence as its loss.
fn gradients(config: &LossConfig, sequences: &[Sequence]) -> Vec<Vec<f64>> {
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
    let evaluator = Evaluator::new(config, &batch).unwrap();
    let gradient = |span: std::ops::Range<usize>| {
        let (mut dlogp, mut dentropy) = (vec![0.0; span.len()], vec![0.0; span.len()]);
        let entropy = vec![0.0; span.len()];
        evaluator.evaluate(span.clone(), &logp[span], &entropy, &mut dlogp, &mut dentropy, &mut evaluator.totals());
        dlogp
    };
    offsets.windows(2).map(|pair| gradient(pair[0]..pair[1])).collect()
}
