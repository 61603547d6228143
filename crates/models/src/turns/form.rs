//! The form of tool calls and their results that a chat template takes.

use grpo_files::long_integers_as_digits;
use serde_json::{Value, json};
use std::borrow::Cow;

/// The form of calls and results.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    /// `true` if the arguments of a call are JSON text, as in OpenAI's API, and not an object.
    has_text_arguments: bool,
    /// `true` if the results of tools are a message of the user.
    has_user_results: bool,
}

impl Form {
    /// All forms, the usual one first.
    pub(super) const ALL: [Self; 4] = [
        Self { has_text_arguments: false, has_user_results: false },
        Self { has_text_arguments: true, has_user_results: false },
        Self { has_text_arguments: false, has_user_results: true },
        Self { has_text_arguments: true, has_user_results: true },
    ];

    /// Returns messages in this form.
    pub(super) fn applied(self, messages: &[Value]) -> Cow<'_, [Value]> {
        if !self.has_text_arguments && !self.has_user_results {
            return Cow::Borrowed(messages);
        }
        let mut formed: Vec<Value> = Vec::with_capacity(messages.len());
        for message in messages {
            let mut message = message.clone();
            if self.has_text_arguments {
                for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
                    let arguments = &mut call["function"]["arguments"];
                    if arguments.is_object() {
                        *arguments = long_integers_as_digits(arguments.to_string()).into();
                    }
                }
            }
            if self.has_user_results {
                if message["role"] == "tool" {
                    message = json!({"role": "user", "content": message["content"]});
                }
                if let Some(last) = formed.last_mut()
                    && last["role"] == "user"
                    && message["role"] == "user"
                    && let (Some(before), Some(behind)) = (last["content"].as_str(), message["content"].as_str())
                {
                    last["content"] = format!("{before}\n{behind}").into();
                    continue;
                }
            }
            formed.push(message);
        }
        Cow::Owned(formed)
    }
}

/// Adds the tool's name to results whose `tool_call_id` is the id of a call in `calls`, as some templates write it. OpenAI's clients leave it
/// out.
pub fn with_names(results: &mut [Value], calls: &[Value]) {
    for result in results.iter_mut().filter(|message| message["role"] == "tool" && message["name"].is_null()) {
        let id = &result["tool_call_id"];
        let call = calls.iter().find(|call| !id.is_null() && call["id"] == *id);
        if let Some(name) = call.map(|call| call["function"]["name"].clone()) {
            result["name"] = name;
        }
    }
}
