//! The paths of the endpoint, and the requests behind them.

use super::connection::Head;
use super::events::Body;
use super::fields::Fields;
use super::hold::{Event, MOST_PARALLEL, Open, Shared};
use super::http::{Answer, Handler};
use super::request::{ApiError, Asked, MODEL};
use super::{chat, completions, messages, responses};
use serde_json::{Value, json};
use std::result::Result;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const COUNT_TOKENS: &str = "/v1/messages/count_tokens";
const MODELS: &str = "/v1/models";
/// The paths of requests for the policy.
const POSTS: [&str; 5] = [CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS];

/// Returns the description of the model, in the form of OpenAI and Anthropic.
fn model() -> Value {
    let created = "1970-01-01T00:00:00Z";
    json!({
        "id": MODEL, "object": "model", "created": 0, "owned_by": "grpo", "type": "model", "display_name": MODEL, "created_at": created,
    })
}

impl Handler for Shared {
    fn admit(&self, head: &Head) -> Result<(), ApiError> {
        self.conversation(head.key.as_deref())?;
        let is_model = head.path.strip_prefix(MODELS).is_some_and(|name| name.strip_prefix('/') == Some(MODEL));
        let expected = match head.path.as_str() {
            path if POSTS.contains(&path) => "POST",
            MODELS => "GET",
            _ if is_model => "GET",
            path => {
                let posts = POSTS.join(", ");
                let message =
                    format!("there is no {path}: the endpoint has POST {posts}, GET {MODELS} and GET {MODELS}/{MODEL}");
                return Err(ApiError::new(404, message));
            }
        };
        match head.method == expected {
            true => Ok(()),
            false => Err(ApiError::new(405, format!("{} expects {expected}, got {}", head.path, head.method))),
        }
    }

    fn answer(&self, head: &Head, body: &[u8]) -> Result<Answer, ApiError> {
        let read = || Fields::read(body, &self.rules, &self.named);
        let parsed = match head.path.as_str() {
            CHAT => chat::parse(&read()?)?,
            COMPLETIONS => completions::parse(&read()?)?,
            RESPONSES => responses::parse(&read()?)?,
            MESSAGES => messages::parse(&read()?, false)?,
            COUNT_TOKENS => messages::parse(&read()?, true)?,
            MODELS => {
                let list = json!({"object": "list", "data": [model()], "has_more": false, "first_id": MODEL, "last_id": MODEL});
                return Ok(list.into());
            }
            _ => return Ok(model().into()),
        };
        let Open { job, clock, events } = self.conversation(head.key.as_deref())?;
        let (reply, replied) = channel();
        let Some(_waiting) = clock.wait(MOST_PARALLEL) else {
            let message = format!("a conversation has at most {MOST_PARALLEL} requests at the same time");
            return Err(ApiError::new(429, message).with_code("too_many_requests"));
        };
        let closed = || ApiError::new(404, "the conversation of this key has ended").with_code("conversation_closed");
        events.send(Event::Asked(Asked { job, request: parsed.request, reply })).map_err(|_| closed())?;
        drop(events);
        let (reply, receipt) = replied.recv().map_err(|_| closed())?;
        let body: Body = (parsed.render)(&reply?, self.responses.fetch_add(1, Ordering::Relaxed));
        Ok(Answer { body, receipt: Some(receipt) })
    }

    fn error(&self, head: Option<&Head>, error: &ApiError) -> Value {
        match head.is_some_and(|head| head.path.starts_with(MESSAGES)) {
            true => messages::error(error),
            false => error.openai(),
        }
    }
}
