//! Checks of sampled completions: a reply of a server is not trusted.

use grpo_core::batch::SamplingMask;
use grpo_policy::{Completion, RolloutRequest, WeightVersion};

/// A completion as a server reports it.
#[derive(Debug)]
pub(crate) struct Sampled {
    pub(crate) ids: Vec<u64>,
    pub(crate) logps: Vec<f64>,
    pub(crate) finish: Finish,
    /// The weights of the tokens, by name; `None` if the server does not report them.
    pub(crate) weights: Option<Vec<NamedSpan>>,
    /// The ids that each token was sampled from; `None` if the server does not report them.
    pub(crate) masks: Option<Vec<Vec<u64>>>,
}

/// Tokens of the same weights, which have a name on the server.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
pub(crate) struct NamedSpan {
    pub(crate) version: String,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// The reason why a completion ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Finish {
    /// A stop token or a stop text.
    Stop,
    /// The length limit.
    Length,
    /// Anything else: the completion is not complete.
    Other(String),
}

impl Finish {
    /// Returns the reason by the name that both protocols use.
    pub(crate) fn named(name: &str) -> Self {
        match name {
            "stop" => Self::Stop,
            "length" => Self::Length,
            other => Self::Other(other.to_owned()),
        }
    }
}

/// The largest log-probability of a token, which rounding can make of a probability of 1. It counts as 0.
const ROUNDING: f64 = 1e-5;

/// The limits of valid completions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) vocab_size: usize,
    pub(crate) max_tokens: usize,
    /// `true` if a completion needs the ids that each token was sampled from.
    pub(crate) masks: bool,
}

/// Checks the ids, log-probabilities and length of a completion, its sampling mask, and the spans of its weights. `version` returns the version
/// of weights by name, `None` for unknown weights.
///
/// # Errors
/// A text with the expected and the found value.
pub(crate) fn checked(
    sampled: Sampled,
    limits: Limits,
    version: impl Fn(&str) -> Option<u64>,
) -> Result<Completion, String> {
    let Sampled { ids, logps, finish, weights, masks } = sampled;
    let length = ids.len();
    if !(1..=limits.max_tokens).contains(&length) {
        return Err(format!("expected 1 to {} tokens in a completion, got {length}", limits.max_tokens));
    }
    if logps.len() != length {
        return Err(format!("expected a log-probability for each of {length} tokens, got {}", logps.len()));
    }
    if let Some(id) = ids.iter().find(|id| **id >= limits.vocab_size as u64) {
        return Err(format!("expected token ids below {}, the size of the vocabulary, got {id}", limits.vocab_size));
    }
    if let Some(logp) = logps.iter().find(|logp| !(**logp <= ROUNDING && (**logp as f32).is_finite())) {
        return Err(format!("expected log-probabilities that are finite and at most 0, got {logp}"));
    }
    if finish == Finish::Length && length < limits.max_tokens {
        let expected = format!("expected {} tokens in a completion that reached its length", limits.max_tokens);
        return Err(format!("{expected}, got {length}"));
    }
    let sampling_mask = match limits.masks {
        true => checked_mask(&ids, masks, limits.vocab_size)?,
        false => SamplingMask::default(),
    };
    let mut weight_versions = Vec::new();
    for span in weights.unwrap_or_default() {
        let begins = weight_versions.last().map_or(0, |last: &WeightVersion| last.end);
        if span.start != begins || span.end <= span.start || span.end > length {
            return Err(format!("expected contiguous weight_versions of {length} tokens, got {span:?}"));
        }
        let version = version(&span.version).ok_or_else(|| format!("the weights `{}` are unknown", span.version))?;
        weight_versions.push(WeightVersion { version, start: span.start, end: span.end });
    }
    if weight_versions.last().is_some_and(|last| last.end != length) {
        return Err(format!("expected weight_versions of all {length} tokens, got {weight_versions:?}"));
    }
    let ids = ids.into_iter().map(|id| id as u32).collect();
    let logps = logps.into_iter().map(|logp| logp.min(0.0) as f32).collect();
    let completion = Completion::sampled(ids, logps, finish == Finish::Length);
    Ok(Completion { weight_versions, sampling_mask, ..completion })
}

/// Checks the ids that the tokens `ids` were sampled from.
fn checked_mask(ids: &[u64], masks: Option<Vec<Vec<u64>>>, vocab_size: usize) -> Result<SamplingMask, String> {
    let masks = masks.ok_or("expected the ids that each token was sampled from (a sampling mask), got none")?;
    if masks.len() != ids.len() {
        return Err(format!("expected a sampling mask for each of {} tokens, got {}", ids.len(), masks.len()));
    }
    let mut checked = SamplingMask::default();
    for (position, (id, kept)) in ids.iter().zip(masks).enumerate() {
        if let Some(id) = kept.iter().find(|id| **id >= vocab_size as u64) {
            return Err(format!(
                "expected ids below {vocab_size}, the size of the vocabulary, in a sampling mask, got {id}"
            ));
        }
        if !kept.contains(id) {
            let count = kept.len();
            return Err(format!(
                "expected token {id} at position {position} in its sampling mask, got {count} other ids"
            ));
        }
        let mut kept: Vec<u32> = kept.into_iter().map(|id| id as u32).collect();
        kept.sort_unstable();
        kept.dedup();
        // A mask of the whole vocabulary is an empty one.
        checked.push(if kept.len() == vocab_size { &[] } else { &kept });
    }
    Ok(checked)
}

/// Ends a completion where the request says so: at the first stop token or stop text. Servers may have sampled past a stop text, or end at
/// tokens that are none of the run's.
///
/// # Errors
/// A text with the expected and the found end, if the server ended the completion without a reason of the request; errors of the stop condition.
pub(crate) fn ended(
    mut completion: Completion,
    request: &RolloutRequest<'_>,
) -> grpo_policy::Result<Result<Completion, String>> {
    let at_token = completion.ids.iter().position(|id| request.stop_ids.contains(id)).map(|index| index + 1);
    let at_text = request.stopped_at(&completion.ids[..at_token.unwrap_or(completion.ids.len())], 0)?;
    let end = at_text.or(at_token);
    if end.is_none() && !completion.truncated && request.stop.is_none() {
        let last = completion.ids.last().copied().unwrap_or_default();
        let fix = "if it is an end of sequence of the model, add it to rollout.stop_token_ids";
        let expected = format!("expected a completion that ends with a stop token ({:?})", request.stop_ids);
        return Ok(Err(format!("{expected}, got one that ends with token {last}; {fix}")));
    }
    let length = end.unwrap_or(completion.ids.len());
    if at_text.is_none() && length < completion.ids.len() {
        return Ok(Err(format!("expected no tokens behind the stop token {}, got more", completion.ids[length - 1])));
    }
    completion.truncate(length);
    completion.truncated = end.is_none();
    Ok(Ok(completion))
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_policy::Sampling;

    const LIMITS: Limits = Limits { vocab_size: 10, max_tokens: 3, masks: false };

    fn sampled(ids: &[u64], logps: &[f64], finish: Finish) -> Sampled {
        Sampled { ids: ids.to_vec(), logps: logps.to_vec(), finish, weights: None, masks: None }
    }

    #[test]
    fn invalid_completions_are_refused_with_what_was_expected() {
        let stop = Finish::Stop;
        for (sampled, words) in [
            (sampled(&[], &[], Finish::Stop), "expected 1 to 3 tokens in a completion, got 0"),
            (sampled(&[1; 4], &[-1.0; 4], Finish::Length), "got 4"),
            (sampled(&[1, 2], &[-1.0], Finish::Stop), "each of 2 tokens, got 1"),
            (sampled(&[1, 10], &[-1.0; 2], Finish::Stop), "below 10, the size of the vocabulary, got 10"),
            (sampled(&[1, u64::MAX], &[-1.0; 2], Finish::Stop), "got 18446744073709551615"),
            (sampled(&[1], &[f64::NAN], Finish::Stop), "finite and at most 0, got NaN"),
            (sampled(&[1], &[0.1], Finish::Stop), "finite and at most 0, got 0.1"),
            (sampled(&[1], &[2e-5], Finish::Stop), "finite and at most 0, got 0.00002"),
            (sampled(&[1], &[f64::NEG_INFINITY], Finish::Stop), "got -inf"),
            (sampled(&[1], &[-1e300], Finish::Stop), "got -1"),
            (sampled(&[1, 2], &[-1.0; 2], Finish::Length), "expected 3 tokens in a completion that reached its length"),
        ] {
            let error = checked(sampled, LIMITS, |_| None).unwrap_err();
            assert!(error.contains(words), "{words}: {error}");
        }
        let completion = checked(sampled(&[1, 9], &[-1.0, 0.0], stop), LIMITS, |_| None).unwrap();
        assert_eq!((completion.ids, completion.logps, completion.truncated), (vec![1, 9], vec![-1.0, 0.0], false));
        let rounded = checked(sampled(&[1, 9], &[1e-7, 9e-6], Finish::Stop), LIMITS, |_| None).unwrap();
        assert_eq!(rounded.logps, [0.0, 0.0]);
    }

    #[test]
    fn sampling_masks_hold_the_sampled_tokens_of_the_vocabulary() {
        let of = |masks: Option<&[&[u64]]>, limits: Limits| {
            let masks = masks.map(|masks| masks.iter().map(|ids| ids.to_vec()).collect());
            let sampled = Sampled { masks, ..sampled(&[4, 9], &[-1.0, 0.0], Finish::Stop) };
            checked(sampled, limits, |_| None).map(|completion| completion.sampling_mask)
        };
        let masked = Limits { masks: true, ..LIMITS };
        let all: Vec<u64> = (0..10).collect();
        let mask = of(Some(&[&[7, 4, 7], &all]), masked).unwrap();
        assert_eq!((mask.tokens(), mask.kept(0), mask.kept(1)), (2, Some(&[4, 7][..]), None));
        for (masks, words) in [
            (None, "a sampling mask), got none"),
            (Some(&[&[4_u64][..]][..]), "for each of 2 tokens, got 1"),
            (Some(&[&[4], &[9], &[9]]), "for each of 2 tokens, got 3"),
            (Some(&[&[4, 10], &[9]]), "below 10, the size of the vocabulary, in a sampling mask, got 10"),
            (Some(&[&[4, u64::MAX], &[9]]), "got 18446744073709551615"),
            (Some(&[&[4], &[3, 5]]), "expected token 9 at position 1 in its sampling mask, got 2 other ids"),
            (Some(&[&[4], &[]]), "got 0 other ids"),
        ] {
            let error = of(masks, masked).unwrap_err();
            assert!(error.contains(words), "{words}: {error}");
        }
        // Masks that were not requested are ignored.
        assert_eq!(of(Some(&[&[99]]), LIMITS).unwrap().tokens(), 0);
    }

    #[test]
    fn spans_of_weights_are_contiguous_and_known() {
        let of = |spans: &[(&str, usize, usize)]| {
            let named = |(version, start, end): &(&str, usize, usize)| NamedSpan {
                version: (*version).into(),
                start: *start,
                end: *end,
            };
            let weights = Some(spans.iter().map(named).collect());
            let sampled = Sampled { weights, ..sampled(&[1, 2, 3], &[-1.0; 3], Finish::Length) };
            checked(sampled, LIMITS, |name| name.strip_prefix("v")?.parse().ok())
        };
        let spans = of(&[("v4", 0, 1), ("v6", 1, 3)]).unwrap().weight_versions;
        assert_eq!(spans.iter().map(|s| (s.version, s.start, s.end)).collect::<Vec<_>>(), [(4, 0, 1), (6, 1, 3)]);
        for (spans, words) in [
            (&[("v4", 1, 3)][..], "contiguous"),
            (&[("v4", 0, 2)], "of all 3 tokens"),
            (&[("v4", 0, 4)], "contiguous"),
            (&[("v4", 0, 2), ("v5", 1, 3)], "contiguous"),
            (&[("v4", 0, 0), ("v5", 0, 3)], "contiguous"),
            (&[("default", 0, 3)], "the weights `default` are unknown"),
        ] {
            let error = of(spans).unwrap_err();
            assert!(error.contains(words), "{words}: {error}");
        }
    }

    /// Meets the condition with token 7.
    #[derive(Debug)]
    struct Seven;

    impl grpo_policy::StopCondition for Seven {
        fn is_met(&self, completion: &[u32]) -> grpo_policy::Result<bool> {
            Ok(completion.last() == Some(&7))
        }
    }

    #[test]
    fn completions_end_at_the_first_stop_of_the_request() {
        let completion = |ids: &[u32], truncated| Completion {
            weight_versions: vec![
                WeightVersion { version: 1, start: 0, end: 1 },
                WeightVersion { version: 2, start: 1, end: ids.len() },
            ],
            ..Completion::sampled(ids.to_vec(), vec![-1.0; ids.len()], truncated)
        };
        let request = RolloutRequest {
            prompts: &[],
            num_generations: 1,
            max_completion_length: 3,
            stop_ids: &[2],
            stop: None,
            sampling: Sampling::Greedy,
            return_sampling_mask: false,
            return_routed_experts: false,
            turn: None,
        };
        let of = |ids: &[u32], truncated, request| ended(completion(ids, truncated), request).unwrap();
        let end = |ids: &[u32], truncated, request| {
            let found = of(ids, truncated, request).unwrap();
            assert_eq!([found.logps.len(), found.mask.len()], [found.ids.len(); 2]);
            assert_eq!(found.weight_versions.last().unwrap().end, found.ids.len());
            (found.ids, found.truncated)
        };
        assert_eq!(end(&[4, 5, 2], false, &request), (vec![4, 5, 2], false));
        // The last token is a stop token, although the server reports the length.
        assert_eq!(end(&[4, 5, 2], true, &request), (vec![4, 5, 2], false));
        assert_eq!(end(&[4, 5, 6], true, &request), (vec![4, 5, 6], true));
        let error = of(&[4, 6], false, &request).unwrap_err();
        assert!(error.contains("ends with token 6") && error.contains("rollout.stop_token_ids"), "{error}");
        assert!(of(&[4, 2, 5], false, &request).unwrap_err().contains("behind the stop token 2"));
        let texts = RolloutRequest { stop: Some(&Seven), ..request };
        assert_eq!(end(&[4, 7, 5], true, &texts), (vec![4, 7], false));
        assert_eq!(end(&[4, 7, 2], false, &texts), (vec![4, 7], false));
        // The server saw another text than the run.
        assert_eq!(end(&[4, 5], false, &texts), (vec![4, 5], true));
    }
}
