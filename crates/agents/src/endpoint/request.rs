//! Conversations, requests and replies of the endpoint, in the form that all of its protocols share, and their errors.

use crate::agent::Agent;
use crate::environment::Failure;
use crate::error::Result;
use grpo_data::Item;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// The key of the address.
pub(super) const KEY: &str = "rollout.endpoint";
/// The name of the model. A client may write any other name, too.
pub(crate) const MODEL: &str = "policy";

/// The sampling of the run, which a request does not change.
#[derive(Clone, Debug)]
pub struct Rules {
    /// `rollout.temperature`.
    pub temperature: f64,
    /// `rollout.top_p`.
    pub top_p: f64,
    /// `rollout.stop`.
    pub stop: Vec<String>,
    /// `rollout.endpoint_strict`: `true` if fields that would not be honoured are refused.
    pub is_strict: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, stop: Vec::new(), is_strict: false }
    }
}

/// An error of the endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The status of the response.
    pub status: u16,
    /// The text for users.
    pub message: String,
    /// The field of the request that is wrong.
    pub param: Option<String>,
    /// The name of the error.
    pub code: Option<&'static str>,
}

impl ApiError {
    /// Returns an error with a status and a message.
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// Returns an error about a field of the request, with status 400.
    pub fn param(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(400, message) }
    }

    /// Returns the error with the name `code`.
    #[must_use]
    pub fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }
}

/// A request for the next message of the assistant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatRequest {
    /// The messages: `role` (`system`, `user`, `assistant` or `tool`), `content`, a text; if they have them `tool_calls`, with arguments as an
    /// object, `tool_call_id` and `name`.
    pub messages: Vec<Value>,
    /// The tools that the model may call, a list of functions as JSON schemas.
    pub tools: Option<Value>,
    /// `false` if the text is not searched for calls.
    pub calls_tools: bool,
    /// `true` if the client expects at least one tool call.
    pub requires_call: bool,
    /// `true` if the client expects JSON, with these keys at the top if there are any.
    pub json: Option<Vec<String>>,
    /// Texts at which the answer ends, in addition to those of the run; it does not contain them.
    pub stop: Vec<String>,
    /// The maximum number of tokens of the message.
    pub max_tokens: Option<usize>,
    /// `true` if the text of the only message is the prompt, without the chat template.
    pub is_text: bool,
    /// `true` if only the number of tokens before the answer is asked for.
    pub counts_only: bool,
}

/// A message of the assistant for a client.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatReply {
    /// The message, as in [`ChatRequest::messages`]; its tool calls have an `id`.
    pub message: Value,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
    /// The text of [`ChatRequest::stop`] that has ended the message.
    pub stop: Option<String>,
    /// The number of tokens before the message.
    pub prompt_tokens: usize,
    /// The text and the log-probability (nats) of each token of the message.
    pub tokens: Vec<(String, f32)>,
}

/// A conversation that an agent is to hold.
pub struct Job<'a> {
    /// The agent. Jobs of the same agent share its workers.
    pub agent: Arc<dyn Agent>,
    /// The row.
    pub row: &'a Item,
}

/// The results of [`super::Endpoint::hold`].
#[derive(Debug, Default)]
pub struct Held {
    /// The rewards of the jobs, or their failures.
    pub outcomes: Vec<std::result::Result<Option<f32>, Failure>>,
    /// The time in which no request was being answered.
    pub waited: Duration,
}

/// A request of an agent. Its client is answered with an error if it is dropped.
#[derive(Debug)]
pub struct Asked {
    /// The index of the job.
    pub job: usize,
    /// The request.
    pub request: ChatRequest,
    pub(super) reply: Sender<Replied>,
}

/// The reply to a request, and the sender of its receipt.
pub(super) type Replied = (std::result::Result<ChatReply, ApiError>, Sender<bool>);

/// The delivery of a reply to its client.
#[derive(Debug)]
pub struct Delivery(Receiver<bool>);

impl Delivery {
    /// Waits until the reply was written. Returns `false` if the client no longer waits for it, the conversation has ended, or the reply was an
    /// error.
    pub fn is_complete(self) -> bool {
        self.0.recv().unwrap_or(false)
    }
}

impl Asked {
    /// Returns a request of another process, whose answer nobody reads.
    pub fn unread(job: usize, request: ChatRequest) -> Self {
        Self { job, request, reply: channel().0 }
    }

    /// Answers the request. An agent that has ended does not read it.
    pub fn answer(self, reply: std::result::Result<ChatReply, ApiError>) -> Delivery {
        let (receipt, delivered) = channel();
        let _ = self.reply.send((reply, receipt));
        Delivery(delivered)
    }
}

/// Reads an address.
///
/// # Errors
/// [`crate::Error::Config`].
pub fn socket_address(address: &str) -> Result<SocketAddr> {
    address.parse().map_err(|_| {
        let expected = "an address with a port, such as 127.0.0.1:8000".to_owned();
        grpo_files::KeyError { key: KEY.into(), expected, found: format!("`{address}`") }.into()
    })
}
