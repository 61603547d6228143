//! The form of tool calls and their results that a chat template takes.

use serde_json::{Value, json};

/// The number of characters of a call's id, which Mistral's templates demand.
const ID_LENGTH: usize = 9;

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
    pub(super) fn applied(self, messages: &[Value]) -> Vec<Value> {
        let mut formed: Vec<Value> = Vec::with_capacity(messages.len());
        for message in messages {
            let mut message = message.clone();
            if self.has_text_arguments {
                for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
                    let arguments = &mut call["function"]["arguments"];
                    if arguments.is_object() {
                        *arguments = arguments.to_string().into();
                    }
                }
            }
            if self.has_user_results {
                if message["role"] == "tool" {
                    message = json!({"role": "user", "content": message["content"].as_str().unwrap_or_default()});
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
        formed
    }
}

/// Returns the id of a tool call: nine letters and digits, a function of `key`, such as the seed, the conversation, the turn and the index of
/// the call.
///
/// ```
/// let id = models::call_id(&[7, 0, 1]);
/// assert!(id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()));
/// assert_ne!(id, models::call_id(&[7, 0, 2]));
/// ```
pub fn call_id(key: &[u64]) -> String {
    const DIGITS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    // The finalizer of SplitMix64 mixes each part into the hash.
    let mut hash = key.iter().fold(0_u64, |hash, part| {
        let mixed = (hash ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    });
    let mut id = String::with_capacity(ID_LENGTH);
    for _ in 0..ID_LENGTH {
        id.push(char::from(DIGITS[(hash % 36) as usize]));
        hash /= 36;
    }
    id
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
