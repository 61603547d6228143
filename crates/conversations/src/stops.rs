//! The stop tokens and stop texts of a run.

use grpo_models::Tokenizer;
use grpo_policy::StopCondition;
use grpo_run_config::RolloutConfig;

/// The number of tokens that are decoded before a stop text, because the first decoded tokens may lose a space or a part of a character.
const BEFORE: usize = 8;

/// The tokens and texts that end a completion.
pub(crate) struct Stops<'a> {
    /// The stop ids of the tokenizer, and `rollout.stop_token_ids`.
    pub(crate) ids: Vec<u32>,
    tokenizer: &'a dyn Tokenizer,
    /// The texts of `rollout.stop`.
    texts: &'a [String],
    /// The maximum number of tokens of the longest text, plus [`BEFORE`].
    window: usize,
}

impl<'a> Stops<'a> {
    /// Returns the stop tokens and texts of a run.
    pub(crate) fn new(config: &'a RolloutConfig, tokenizer: &'a dyn Tokenizer) -> Self {
        let mut ids = tokenizer.stop_ids();
        let others: Vec<u32> = config.stop_token_ids.iter().copied().filter(|id| !ids.contains(id)).collect();
        ids.extend(others);
        let texts = config.stop.as_deref().unwrap_or_default();
        // Each token of a text has at least one byte.
        let window = texts.iter().map(String::len).max().unwrap_or(0) + BEFORE;
        Self { ids, tokenizer, texts, window }
    }

    /// Returns the condition for stop texts; `None` if there are none.
    pub(crate) fn condition(&self) -> Option<&dyn StopCondition> {
        (!self.texts.is_empty()).then_some(self)
    }
}

impl std::fmt::Debug for Stops<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Stops").field(&self.ids).field(&self.texts).finish()
    }
}

impl StopCondition for Stops<'_> {
    fn is_met(&self, completion: &[u32]) -> grpo_policy::Result<bool> {
        let tail = &completion[completion.len().saturating_sub(self.window)..];
        let text = self.tokenizer.decode_with_special(tail)?;
        Ok(self.texts.iter().any(|stop| text.contains(stop.as_str())))
    }

    fn texts(&self) -> &[String] {
        self.texts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_models::{CharTokenizer, HfTokenizer};

    /// Returns the number of tokens after which a completion of `text` ends.
    fn ends(tokenizer: &dyn Tokenizer, stop: &[&str], text: &str) -> Option<usize> {
        let config =
            RolloutConfig { stop: Some(stop.iter().map(|text| (*text).to_owned()).collect()), ..Default::default() };
        let ids = tokenizer.encode(text).unwrap();
        let stops = Stops::new(&config, tokenizer);
        let condition = stops.condition();
        (1..=ids.len()).find(|length| condition.is_some_and(|condition| condition.is_met(&ids[..*length]).unwrap()))
    }

    #[test]
    fn a_text_ends_a_completion_with_the_token_that_completes_it() {
        let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/chat/qwen3");
        let tokenizer = HfTokenizer::open(fixtures.as_ref(), &[], 512).unwrap();
        for (stop, text) in [
            (vec!["</answer>"], "It is 72 <answer>72</answer> and more"),
            (vec!["\n\nQuestion:"], "72.\n\nQuestion: what?"),
            (vec!["naïve 你好", "nothing"], "a naïve 你好, 世界"),
            (vec!["nothing", "72"], "4872 72"),
            (vec![" a"], "x a"),
        ] {
            let end = ends(&tokenizer, &stop, text).unwrap_or_else(|| panic!("{stop:?} in {text:?}"));
            let ids = tokenizer.encode(text).unwrap();
            let decoded = |length: usize| tokenizer.decode(&ids[..length]).unwrap();
            let holds = |text: String| stop.iter().any(|stop| text.contains(stop));
            assert!(holds(decoded(end)) && !holds(decoded(end - 1)), "{stop:?} in {text:?} at {end}");
        }
        assert_eq!(ends(&tokenizer, &["absent"], "It is 72"), None);
        assert_eq!(ends(&tokenizer, &[], "It is 72"), None);
        assert_eq!(ends(&CharTokenizer, &["12"], "3+9=123"), Some(6));
        // A stop text may be a special token, and it is found far from the start.
        let long = tokenizer.encode(&"word ".repeat(50)).unwrap();
        let special = tokenizer.encode_rendered("<|endoftext|>").unwrap();
        let config = RolloutConfig {
            stop: Some(vec!["<|endoftext|>".into()]),
            stop_token_ids: vec![7, tokenizer.eos_id()],
            ..Default::default()
        };
        let stops = Stops::new(&config, &tokenizer);
        assert_eq!(stops.ids, [tokenizer.stop_ids(), vec![7]].concat());
        let condition = stops.condition().unwrap();
        assert!(!condition.is_met(&long).unwrap() && condition.is_met(&[long, special].concat()).unwrap());
        let error = condition.is_met(&[512]).unwrap_err().to_string();
        assert!(error.contains("512"), "{error}");
    }
}
