//! How the next token is chosen, and the distribution that it is sampled from.

use crate::error::{Error, Result};
use grpo_rng::Purpose;
use std::collections::HashSet;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// The most likely token; ties go to the smallest id.
    Greedy,
    /// A sample from softmax(logits / temperature), after `processors` have masked tokens. Sample i of a request has its own random stream
    /// (seed, purpose, step, first + i), so its tokens do not depend on other samples.
    Random {
        /// The temperature T, above 0.
        temperature: f64,
        /// Processors of the logits before and after the division by the temperature; none by default.
        processors: LogitsProcessors,
        /// The seed of the run.
        seed: u64,
        /// The use of the samples.
        purpose: Purpose,
        /// The step of the run.
        step: u64,
        /// The number of samples drawn by earlier requests of this step.
        first: u64,
    },
}

/// The logits processors of `transformers`, with the same names, definitions and order: repetition penalty, temperature, top_k, top_p,
/// min_p. `None` means off.
///
/// ```
/// use grpo_policy::LogitsProcessors;
///
/// // Two of four tokens remain.
/// let top_k = LogitsProcessors { top_k: Some(2), ..Default::default() };
/// let scores = top_k.scores(&[0.0, 3.0, 1.0, 2.0], 0.5, &Default::default());
/// assert_eq!(scores, [f64::NEG_INFINITY, 6.0, f64::NEG_INFINITY, 4.0]);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LogitsProcessors {
    /// Divides logits above 0, and multiplies logits below 0, of every token that occurs in the prompt or the completion so far (CTRL,
    /// arXiv 1909.05858). Must be above 0; 1 is off.
    pub repetition_penalty: Option<f64>,
    /// Number of most likely tokens to keep; tokens that tie with the last of them are kept, too. 0 is off.
    pub top_k: Option<usize>,
    /// The smallest set of most likely tokens whose total probability is at least this value is kept; in [0, 1] (nucleus sampling, arXiv
    /// 1904.09751). 1 is off.
    pub top_p: Option<f64>,
    /// Tokens are kept if their probability is at least this share, in [0, 1], of the largest probability (arXiv 2407.01082). 0 is off.
    pub min_p: Option<f64>,
}

impl LogitsProcessors {
    /// Checks the range of every value.
    ///
    /// # Errors
    /// [`Error::Argument`] with the name of the value.
    pub fn validate(&self) -> Result<()> {
        let in_unit = |value: f64| (0.0..=1.0).contains(&value);
        for (name, value, legal, expected) in [
            (
                "repetition_penalty",
                self.repetition_penalty,
                (|p| p.is_finite() && p > 0.0) as fn(f64) -> bool,
                "above 0",
            ),
            ("top_p", self.top_p, in_unit, "in [0, 1]"),
            ("min_p", self.min_p, in_unit, "in [0, 1]"),
        ] {
            if let Some(value) = value.filter(|value| !legal(*value)) {
                return Err(Error::argument(name, format!("a number {expected}"), value));
            }
        }
        Ok(())
    }

    /// Returns the active processors as (name, value, value that means off). Processors that are `None` or off are left out.
    pub fn active(&self) -> Vec<(&'static str, f64, f64)> {
        let options = [
            ("repetition_penalty", self.repetition_penalty, 1.0),
            ("top_k", self.top_k.map(|k| k as f64), 0.0),
            ("top_p", self.top_p, 1.0),
            ("min_p", self.min_p, 0.0),
        ];
        let active = options.into_iter().filter_map(|(name, value, off)| Some((name, value?, off)));
        active.filter(|(_, value, off)| value != off).collect()
    }

    /// Returns `true` if the repetition penalty is on, which needs the tokens so far.
    pub fn penalises_repetition(&self) -> bool {
        self.repetition_penalty.is_some_and(|penalty| penalty != 1.0)
    }

    /// Returns the scores `[V]` of `logits: [V]`. The next token is sampled from the softmax of the scores; masked tokens have a score of
    /// minus infinity. `seen` holds the tokens of the prompt and of the completion so far; only the repetition penalty reads it.
    ///
    /// Of tokens that tie at the edge of top_p, those with the smallest ids are masked first, as `transformers` does on a CPU.
    pub fn scores(&self, logits: &[f32], temperature: f64, seen: &HashSet<u32>) -> Vec<f64> {
        let mut scores: Vec<f64> = logits.iter().map(|logit| f64::from(*logit) / temperature).collect();
        if let Some(penalty) = self.repetition_penalty.filter(|penalty| *penalty != 1.0) {
            let penalty = penalty as f32;
            for id in seen.iter().map(|id| *id as usize).filter(|id| *id < logits.len()) {
                let logit = if logits[id] < 0.0 { logits[id] * penalty } else { logits[id] / penalty };
                scores[id] = f64::from(logit) / temperature;
            }
        }
        if let Some(k) = self.top_k.filter(|k| (1..scores.len()).contains(k)) {
            let mut order = scores.clone();
            let (_, edge, _) = order.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
            let edge = *edge;
            leave_out(&mut scores, |score| score < edge);
        }
        if let Some(p) = self.top_p.filter(|p| *p < 1.0) {
            nucleus(&mut scores, p);
        }
        if let Some(share) = self.min_p.filter(|share| *share > 0.0) {
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            leave_out(&mut scores, |score| (score - max).exp() < share);
        }
        scores
    }
}

fn leave_out(scores: &mut [f64], of: impl Fn(f64) -> bool) {
    scores.iter_mut().filter(|score| of(**score)).for_each(|score| *score = f64::NEG_INFINITY);
}

/// Masks the least likely tokens whose probabilities sum to at most 1 - p; the most likely token always remains.
fn nucleus(scores: &mut [f64], p: f64) {
    let mut ids: Vec<usize> = (0..scores.len()).filter(|id| scores[*id] > f64::NEG_INFINITY).collect();
    ids.sort_by(|a, b| scores[*a].total_cmp(&scores[*b]));
    let Some((last, rest)) = ids.split_last() else { return };
    let max = scores[*last];
    let weight = |score: f64| (score - max).exp();
    let total: f64 = ids.iter().map(|id| weight(scores[*id])).sum();
    let mut sum = 0.0;
    for id in rest {
        sum += weight(scores[*id]);
        if sum > (1.0 - p) * total {
            break;
        }
        scores[*id] = f64::NEG_INFINITY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct Case {
        name: String,
        logits: Vec<f32>,
        seen: HashSet<u32>,
        temperature: f64,
        repetition_penalty: Option<f64>,
        top_k: Option<usize>,
        top_p: Option<f64>,
        min_p: Option<f64>,
        probabilities: Vec<f64>,
    }

    #[test]
    fn distributions_match_transformers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/sampling.json");
        let cases: Vec<Case> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert!(cases.len() > 20);
        let mut left_out = 0;
        for case in cases {
            let Case { repetition_penalty, top_k, top_p, min_p, .. } = case;
            let processors = LogitsProcessors { repetition_penalty, top_k, top_p, min_p };
            processors.validate().unwrap();
            let scores = processors.scores(&case.logits, case.temperature, &case.seen);
            let total: f64 = scores.iter().map(|score| score.exp()).sum();
            assert_eq!(scores.len(), case.probabilities.len());
            for (id, (score, want)) in scores.iter().zip(&case.probabilities).enumerate() {
                let found = score.exp() / total;
                assert!((found - want).abs() < 2e-6, "{}: token {id} has {found}, expected {want}", case.name);
                assert_eq!(found == 0.0, *want == 0.0, "{}: token {id}", case.name);
                left_out += usize::from(found == 0.0);
            }
        }
        assert!(left_out > 50, "{left_out}");
    }

    #[test]
    fn out_of_range_values_are_named() {
        for (processors, name) in [
            (LogitsProcessors { top_p: Some(1.5), ..Default::default() }, "top_p"),
            (LogitsProcessors { min_p: Some(f64::NAN), ..Default::default() }, "min_p"),
            (LogitsProcessors { repetition_penalty: Some(0.0), ..Default::default() }, "repetition_penalty"),
        ] {
            assert!(processors.validate().unwrap_err().to_string().contains(name), "{name}");
        }
    }
}
