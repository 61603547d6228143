//! The section `rewards` of a run's configuration.

use crate::answer::{AnswerFrom, AnswerRule};
use crate::built_in::{
    Choice, Correct, Environment, Exact, Json, JsonConfig, Length, LengthConfig, MathEquivalence, Normalized, Numeric,
    Partial, Regex, RegexConfig, SoftOverlongPunishment, TagCount, Terminated, ThinkFormat,
};
use crate::error::{Result, check};
#[cfg(feature = "http")]
use crate::external::Http;
use crate::external::{HttpConfig, Program, ProgramConfig};
use crate::reward_fn::RewardFn;
use grpo_core::rewards::SoftOverlong;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::collections::BTreeMap;

/// The reward functions of a run with their weights. A weight of 0, the default of every function, disables it. The reward is the weighted
/// sum.
///
/// A function without settings is a key with its weight (`rewards.math=1`); a function with settings is a section
/// (`rewards.json.block=true`). Regular expressions, programs and endpoints have one section each, under the name that metrics use
/// (`rewards.programs.judge.timeout=30`).
///
/// ```
/// let config = grpo_rewards::RewardConfig { correct: 1.0, think_format: 0.25, ..Default::default() };
/// let rewards = grpo_rewards::Rewards::new(&config)?;
/// assert_eq!(rewards.names().collect::<Vec<_>>(), ["correct", "think_format"]);
/// # Ok::<(), grpo_rewards::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RewardConfig {
    /// The weight of [`crate::Correct`]: 1 for a correct completion, according to its task or [`crate::math::equivalent`].
    pub correct: f32,
    /// The weight of [`crate::Partial`]: partial credit in [0, 1], per character unless the task defines its own.
    pub partial: f32,
    /// The weight of [`crate::Terminated`]: 1 if the completion ended by itself (EOS) within the length limit, else 0.
    pub terminated: f32,
    /// The weight of [`crate::Environment`]: the sum of the rewards that the environment of a conversation has given.
    pub environment: f32,
    /// The weight of [`crate::Exact`]: 1 if the answer is the same text as the reference answer.
    pub exact: f32,
    /// The weight of [`crate::Normalized`]: like `exact`, but ignores case, punctuation and articles.
    pub normalized: f32,
    /// The weight of [`crate::Numeric`]: 1 if the answer is the same number as the reference answer.
    pub numeric: f32,
    /// The tolerance of `numeric`: relative to the reference, and absolute for references below 1.
    #[default(1e-6)]
    pub numeric_tolerance: f64,
    /// The weight of [`crate::MathEquivalence`]: 1 if the answer is mathematically equivalent to the reference answer.
    pub math: f32,
    /// The weight of [`crate::Choice`]: 1 if the answer is the letter of the reference answer, for multiple choice.
    pub choice: f32,
    /// The weight of [`crate::ThinkFormat`]: 1 if the whole completion is `<think>...</think><answer>...</answer>`.
    pub think_format: f32,
    /// The weight of [`crate::TagCount`]: a quarter for each of these four tags that appears exactly once.
    pub tag_count: f32,
    /// The part of a completion that `correct`, `exact`, `normalized`, `numeric`, `math` and `choice` take as its answer. For rows of
    /// built-in tasks, `correct` scores the whole completion.
    pub answer_from: AnswerFrom,
    /// `true` if the answer is only searched after the last thought of a completion, such as after `</think>`.
    #[default(true)]
    pub answer_after_think: bool,
    /// The reward [`crate::Json`] for valid JSON; `None` disables it.
    pub json: Option<JsonConfig>,
    /// The reward [`crate::Length`] for a target length; `None` disables it.
    pub length: Option<LengthConfig>,
    /// The penalty for completions near the length limit, in tokens including EOS (DAPO). Its weight is its `penalty_factor`; `None`
    /// disables it.
    pub soft_overlong_punishment: Option<SoftOverlong>,
    /// Regular expressions by name: 1 if the completion matches.
    pub regex: BTreeMap<String, RegexConfig>,
    /// Programs by name, which score completions over JSON lines.
    pub programs: BTreeMap<String, ProgramConfig>,
    /// HTTP endpoints by name, which score completions.
    pub http: BTreeMap<String, HttpConfig>,
    /// The number of consecutive completions that a function may fail to score before the run ends, at least 1. Until then, a completion
    /// without a score is left out of its step.
    #[default(256)]
    pub max_consecutive_failures: u64,
}

impl RewardConfig {
    /// Checks every field, and that the programs exist. [`crate::Rewards::new`] also checks that there is at least one reward.
    ///
    /// # Errors
    /// [`crate::Error::Config`] with the key; [`crate::Error::Overlong`] for the penalty; [`crate::Error::Program`] for a missing program.
    pub fn validate(&self) -> Result<()> {
        self.terms(0).map(drop)
    }

    /// Returns the rule that finds the answer of a completion.
    pub fn answer_rule(&self) -> AnswerRule {
        AnswerRule { from: self.answer_from, after_think: self.answer_after_think }
    }

    /// Returns the rewards with nonzero weights, and their weights. This is the only list of built-in rewards; each is named by its key.
    /// Starts no programs.
    pub(crate) fn terms(&self, seed: u64) -> Result<Vec<(Box<dyn RewardFn>, f32)>> {
        let most = self.max_consecutive_failures;
        check(most > 0, "rewards.max_consecutive_failures", "at least 1", most)?;
        let tolerance = self.numeric_tolerance;
        let expected = "a finite number >= 0";
        check(tolerance.is_finite() && tolerance >= 0.0, "rewards.numeric_tolerance", expected, tolerance)?;
        let answer = self.answer_rule();
        let mut terms: Vec<(Box<dyn RewardFn>, f32)> = vec![
            (Box::new(Correct { answer }), self.correct),
            (Box::new(Partial), self.partial),
            (Box::new(Terminated), self.terminated),
            (Box::new(Environment), self.environment),
            (Box::new(Exact { answer }), self.exact),
            (Box::new(Normalized { answer }), self.normalized),
            (Box::new(Numeric { answer, tolerance }), self.numeric),
            (Box::new(MathEquivalence { answer }), self.math),
            (Box::new(Choice { answer }), self.choice),
            (Box::new(ThinkFormat), self.think_format),
            (Box::new(TagCount), self.tag_count),
        ];
        if let Some(json) = &self.json {
            terms.push((Box::new(Json(json.clone())), json.weight));
        }
        if let Some(length) = self.length {
            check(length.target > 0, "rewards.length.target", "at least 1", length.target)?;
            terms.push((Box::new(Length(length)), length.weight));
        }
        if let Some(overlong) = self.soft_overlong_punishment {
            terms.push((Box::new(SoftOverlongPunishment::new(overlong)?), 1.0));
        }
        for (term, weight) in &terms {
            check(weight.is_finite(), &format!("rewards.{}", term.name()), "a finite number", weight)?;
        }
        for (name, regex) in &self.regex {
            check_name("regex", name, regex.weight)?;
            terms.push((Box::new(Regex::new(name, &regex.pattern)?), regex.weight));
        }
        for (name, program) in self.programs.iter().filter(|(_, program)| program.weight != 0.0) {
            check_name("programs", name, program.weight)?;
            terms.push((Box::new(Program::new(name, program.clone())?), program.weight));
        }
        for (name, http) in self.http.iter().filter(|(_, http)| http.weight != 0.0) {
            check_name("http", name, http.weight)?;
            terms.push((endpoint(name, http, seed)?, http.weight));
        }
        let names: Vec<&str> = terms.iter().map(|(term, _)| term.name()).collect();
        if let Some(twice) = (1..names.len()).find(|i| names[..*i].contains(&names[*i])) {
            check(false, "rewards", "a name of its own for each reward", format!("`{}` twice", names[twice]))?;
        }
        terms.retain(|(_, weight)| *weight != 0.0);
        Ok(terms)
    }
}

/// Returns the reward function that is an HTTP endpoint.
#[cfg(feature = "http")]
fn endpoint(name: &str, config: &HttpConfig, seed: u64) -> Result<Box<dyn RewardFn>> {
    Ok(Box::new(Http::new(name, config.clone(), seed)?))
}

#[cfg(not(feature = "http"))]
fn endpoint(name: &str, config: &HttpConfig, _: u64) -> Result<Box<dyn RewardFn>> {
    let (key, found) = (format!("rewards.http.{name}"), grpo_files::redact_url(&config.url));
    let expected = "no endpoint, or a build with the feature `http` of grpo-rewards".to_owned();
    Err(grpo_files::KeyError { key, expected, found }.into())
}

/// Checks a name, which becomes a part of metrics and keys.
fn check_name(section: &str, name: &str, weight: f32) -> Result<()> {
    let legal = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let ok = (1..=100).contains(&name.len()) && name.chars().all(legal);
    check(ok, &format!("rewards.{section}"), "names of 1 to 100 letters, digits, `-` and `_`", format!("`{name}`"))?;
    Ok(check(weight.is_finite(), &format!("rewards.{section}.{name}.weight"), "a finite number", weight)?)
}

#[cfg(all(test, not(feature = "http")))]
mod tests {
    use super::*;
    use crate::Rewards;

    #[test]
    fn an_endpoint_without_http_is_an_error_that_names_the_feature() {
        let http = [("judge".to_owned(), HttpConfig::new("http://user:secret@localhost"))].into();
        let text = Rewards::new(&RewardConfig { http, ..RewardConfig::default() }).err().unwrap().to_string();
        assert!(text.contains("rewards.http.judge") && text.contains("feature `http` of grpo-rewards"), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}
