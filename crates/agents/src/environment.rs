//! The trait of environments.

use grpo_data::Item;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The largest number of messages of a reply.
const MOST_MESSAGES: usize = 256;

/// An environment of conversations, such as a set of tools or a game. Implement it to train on your own; the [crate documentation](crate) has
/// an example.
pub trait Environment: Send + Sync {
    /// Returns the tools that the model may call, a list of functions as JSON schemas; `None` if there are none, or rows bring them.
    fn tools(&self) -> Option<&Value> {
        None
    }

    /// Returns the number of workers, which answer at the same time. A conversation stays with its worker.
    fn workers(&self) -> usize {
        1
    }

    /// Starts a conversation about a row with worker number `worker`.
    ///
    /// # Errors
    /// A failure leaves the conversation out of the step. It is counted.
    fn reset(&self, row: &Item, worker: usize) -> Result<Start, Failure>;
}

/// The start of a conversation.
pub struct Start {
    /// Messages that follow the row's messages. If both sides of the boundary are messages of the user, they are joined.
    pub messages: Vec<Value>,
    /// The conversation.
    pub episode: Box<dyn Episode>,
}

/// A conversation with an environment. It is dropped when the conversation is over, also if the environment does not end it.
pub trait Episode: Send {
    /// Answers a message of the assistant: an object with `role`, `content` (its text without tool calls) and, if it calls tools,
    /// `tool_calls` in OpenAI's form, with the arguments as an object.
    ///
    /// # Errors
    /// See [`Environment::reset`].
    fn step(&mut self, message: &Value) -> Result<Reply, Failure>;

    /// Ends the conversation, and checks that its replies were those of its environment. It is called once, after all conversations that
    /// were open at the same time.
    ///
    /// # Errors
    /// See [`Environment::reset`].
    fn end(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

/// The answer of an environment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// The next messages: objects with `role` (`tool`, `user` or `system`) and `content`, a text. A message with `is_error: true` is the
    /// result of a tool call that failed.
    pub messages: Vec<Value>,
    /// The reward of the step; the reward of a conversation is their sum.
    pub reward: Option<f32>,
    /// `true` if the conversation is over. Its last messages are then not read.
    pub done: bool,
}

/// The reason why an environment failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    message: String,
    is_consequence: bool,
}

impl Failure {
    /// Returns a failure with a message for users.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), is_consequence: false }
    }

    /// Returns the failure of a conversation whose environment has failed in another conversation, which has the cause.
    pub fn consequence(message: impl Into<String>) -> Self {
        Self { is_consequence: true, ..Self::new(message) }
    }

    /// Returns `true` if another conversation has the cause.
    pub fn is_consequence(&self) -> bool {
        self.is_consequence
    }
}

/// The part of an environment in a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// The model has reached a limit before the environment was asked.
    #[default]
    NotAsked,
    /// The environment has answered every message.
    Answered,
    /// The environment has failed.
    Failed(Failure),
}

/// Checks that a reward is a finite number.
///
/// # Errors
/// A failure with the number.
pub(crate) fn check_reward(reward: Option<f32>) -> Result<(), Failure> {
    match reward.filter(|reward| !reward.is_finite()) {
        None => Ok(()),
        Some(found) => Err(Failure::new(format!("expected a finite reward, got {found}"))),
    }
}

impl Reply {
    /// Checks the form of the messages, and that the reward is finite.
    ///
    /// # Errors
    /// A failure that names the expected form.
    pub fn check(&self) -> Result<(), Failure> {
        check_messages(&self.messages)?;
        check_reward(self.reward)
    }
}

/// Checks that messages of an environment have a role and a text.
///
/// # Errors
/// A failure that names the expected form.
pub fn check_messages(messages: &[Value]) -> Result<(), Failure> {
    if messages.len() > MOST_MESSAGES {
        return Err(Failure::new(format!("expected at most {MOST_MESSAGES} messages, got {}", messages.len())));
    }
    let legal = |message: &Value| {
        let role = message.get("role").and_then(Value::as_str);
        role.is_some_and(|role| ["tool", "user", "system"].contains(&role))
            && message.get("content").is_some_and(Value::is_string)
    };
    match messages.iter().find(|message| !legal(message)) {
        None => Ok(()),
        Some(message) => {
            let expected = "messages with `role` (tool, user or system) and `content`, a text";
            let found: String = message.to_string().chars().take(200).collect();
            Err(Failure::new(format!("expected {expected}, got {found}")))
        }
    }
}
