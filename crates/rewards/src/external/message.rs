//! Messages to and from external reward functions.

use crate::error::{Error, Result, check};
use crate::reward_fn::{RewardFailure, RewardInput, Score};
use grpo_data::Prompt;
use grpo_files::{Secrets, UniqueKeys};
use serde_json::{Value, json};
use std::time::Duration;

/// The maximum number of characters of an answer in an error.
const SHOWN: usize = 200;
/// The maximum number of characters of an error that a program or an endpoint reports.
const SHOWN_ERROR: usize = 600;

/// Returns a completion as an object: `id`, `prompt` (text, or a list of messages), `completion`, `answer` (text or null), `answers` (a
/// list of all reference answers), `columns`, `source`, `truncated`, `completion_ids` and `completion_tokens`; for conversations also `messages`.
pub(super) fn question(id: usize, input: &RewardInput<'_>) -> Value {
    let prompt = match &input.item.prompt {
        Prompt::Text(text) | Prompt::Rendered(text) => Value::from(text.as_str()),
        Prompt::Messages { messages, .. } => Value::from(messages.clone()),
    };
    let mut question = json!({
        "id": id,
        "prompt": prompt,
        "completion": input.completion,
        "answer": input.item.answer,
        "answers": input.item.answers().collect::<Vec<_>>(),
        "columns": *input.item.columns,
        "source": *input.item.source,
        "truncated": input.truncated,
        "completion_ids": input.completion_ids,
        "completion_tokens": input.completion_len(),
    });
    if let Some(conversation) = input.conversation {
        question["messages"] = conversation.messages.clone().into();
    }
    question
}

/// Parses JSON. Duplicate keys are an error, because the intended value is unknown.
///
/// # Errors
/// An error of serde_json.
pub fn parsed(text: &str) -> serde_json::Result<Value> {
    let value = serde_json::from_str(text)?;
    serde_json::from_str::<UniqueKeys>(text).map(|UniqueKeys| value)
}

/// Parses the answer for completion `id`: a number, true (1), false (0), null, `{"reward": NUMBER, true, false or null}` or `{"error":
/// TEXT}`; the objects may have the key `id`. `secrets` are hidden in messages. Anything else, or the answer for another completion, is an
/// error, and all later answers are unreliable.
///
/// # Errors
/// The reason why the answer is invalid.
pub fn answer(id: usize, value: &Value, secrets: &Secrets) -> Result<Score, String> {
    let expected = "expected a number, null, true, false, {\"reward\": one of these} or {\"error\": text}";
    let garbage = || format!("{expected}, got `{}`", shown(&value.to_string(), secrets));
    match value {
        Value::Null => Ok(Ok(None)),
        Value::Bool(right) => Ok(Ok(Some(f32::from(*right)))),
        Value::Number(number) => {
            let number = number.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
            number.map(|number| Ok(Some(number))).ok_or_else(garbage)
        }
        Value::Object(object) => {
            if let Some(other) = object.get("id").filter(|other| other.as_u64() != Some(id as u64)) {
                return Err(format!("expected the answer for the completion with id {id}, got id {other}"));
            }
            match (object.get("reward"), object.get("error")) {
                (_, Some(error)) if !error.is_null() => {
                    let text = error.as_str().map_or_else(|| error.to_string(), str::to_owned);
                    Ok(Err(RewardFailure::new(format!("it says: {}", beginning(&text, secrets, SHOWN_ERROR)))))
                }
                (Some(reward @ (Value::Null | Value::Bool(_) | Value::Number(_))), _) => answer(id, reward, secrets),
                _ => Err(garbage()),
            }
        }
        _ => Err(garbage()),
    }
}

/// Returns the beginning of an external text, on one line and without secrets.
pub fn shown(text: &str, secrets: &Secrets) -> String {
    beginning(text, secrets, SHOWN)
}

fn beginning(text: &str, secrets: &Secrets, length: usize) -> String {
    let line = secrets.hide(text.trim()).replace(['\n', '\r'], " ");
    match line.char_indices().nth(length) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

const MAX_SECONDS: f64 = 365.0 * 86_400.0;

// Shared defaults of programs and endpoints.
pub(super) fn batch_size() -> usize {
    64
}
pub(super) fn timeout() -> f64 {
    60.0
}

/// Replaces the references to environment variables in `text`, the value of `key`. The variables' values become secrets.
///
/// # Errors
/// [`Error::Reference`] for a missing variable.
pub fn expand(key: &str, text: &str, secrets: &mut Secrets) -> Result<String> {
    secrets.expand(text).map_err(|source| Error::Reference { key: key.to_owned(), source })
}

/// Returns the time of `key` in seconds.
///
/// # Errors
/// [`Error::Config`] unless it is more than 0 and at most a year.
pub fn seconds(key: &str, value: f64) -> Result<Duration> {
    let legal = Some(value).filter(|value| *value > 0.0 && *value <= MAX_SECONDS);
    let time = legal.and_then(|value| Duration::try_from_secs_f64(value).ok());
    check(time.is_some(), key, "seconds, more than 0 and at most a year", value)?;
    Ok(time.unwrap_or_default())
}
