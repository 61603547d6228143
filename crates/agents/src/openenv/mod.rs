//! Environments that are servers of OpenEnv, over its WebSocket.

mod connection;
mod message;
mod sessions;

use crate::config::EnvironmentConfig;
use crate::environment::{Environment, Episode, Failure, Reply, Start};
use crate::error::{Result, check};
use connection::Address;
use grpo_data::Item;
use message::{Answer, Refusal};
use serde_json::{Map, Value, json};
use sessions::{Session, Sessions};
use std::sync::Arc;

/// The field of an action with the text of the model, in OpenEnv's template of an environment.
const MESSAGE: &str = "message";

/// An environment that is a server of [OpenEnv](https://github.com/meta-pytorch/OpenEnv).
///
/// Every conversation has a connection, and therefore a session of the server, from the first message to the last. The next conversation resets
/// the session. The messages, one JSON object each:
///
/// ```text
/// -> {"type": "reset", "data": {...}}                        the columns of the row, and its prompt
/// <- {"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}}
/// -> {"type": "step", "data": {"message": "..."}}            the text of the model
/// -> {"type": "step", "data": {"type": "call_tool", "tool_name": ..., "arguments": {...}}}
/// <- {"type": "observation", ...}, or {"type": "error", "data": {"message": ..., "code": ...}}
/// -> {"type": "close"}
/// ```
///
/// A server with tools (MCP) lists them in answer to the action `list_tools`. A server without refuses it, and the text of the model is its action.
///
/// An error of the server ends the conversation without a reward. If only the text of an action is not valid, the model reads the error and
/// goes on. If the server closes the connection, exceeds the time limit or sends anything else, the conversation fails, and the next one has a
/// new connection.
pub struct OpenEnv {
    sessions: Arc<Sessions>,
    form: Arc<Form>,
    workers: usize,
}

/// The fields of actions and observations.
struct Form {
    /// The field with the text of the model; `None` is `message`, unless the server has tools.
    action: Option<String>,
    /// The field that the model reads; `None` is all of them.
    observation: Option<String>,
}

impl OpenEnv {
    /// Returns the environment called `name`. Opens no connection.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for invalid settings; [`crate::Error::Program`] for a missing environment variable.
    pub fn new(name: &str, config: &EnvironmentConfig) -> Result<Self> {
        let section = format!("environments.{name}");
        for (field, value) in [("action", &config.action), ("observation", &config.observation)] {
            let is_named = value.as_ref().is_none_or(|value| !value.is_empty());
            check(is_named, &format!("{section}.{field}"), "the name of a field", "an empty text")?;
        }
        let workers = config.workers(&section)?;
        let sessions = Sessions::new(Address::new(&section, config)?, config.tools.clone());
        let form = Form { action: config.action.clone(), observation: config.observation.clone() };
        Ok(Self { sessions, form: Arc::new(form), workers })
    }
}

impl Environment for OpenEnv {
    fn tools(&self) -> Option<&Value> {
        self.sessions.tools()
    }

    fn workers(&self) -> usize {
        self.workers
    }

    fn reset(&self, row: &Item, _: usize) -> Result<Start, Failure> {
        let (session, observation) = self.sessions.reset(&message::reset(row))?;
        let mut episode =
            Conversation { sessions: Arc::clone(&self.sessions), form: Arc::clone(&self.form), session: Some(session) };
        if observation.done {
            return Err(episode.fail("it has ended the conversation before the first message of the assistant"));
        }
        // The first observation may have other fields than the others, or none.
        let shown = self.form.observation.as_deref();
        let text = match shown.is_some_and(|field| !observation.fields.contains_key(field)) {
            true => String::new(),
            false => observation.text(shown).map_err(|garbage| episode.garbage(&garbage))?,
        };
        let messages = (!text.is_empty()).then(|| json!({"role": "user", "content": text})).into_iter().collect();
        Ok(Start { messages, episode: Box::new(episode) })
    }
}

/// A conversation in a session of the server.
struct Conversation {
    sessions: Arc<Sessions>,
    form: Arc<Form>,
    /// `None` after a failure.
    session: Option<Session>,
}

impl Conversation {
    /// Takes an action.
    fn ask(&mut self, action: &Value) -> Result<Answer, Failure> {
        let session = self.session.take().ok_or_else(|| self.sessions.failure("its session has ended"))?;
        let answer = self.sessions.ask(&session, &message::step(action))?;
        self.session = Some(session);
        Ok(answer)
    }

    /// Ends the session, whose state is unknown after a failure.
    fn fail(&mut self, reason: impl std::fmt::Display) -> Failure {
        self.session = None;
        self.sessions.failure(reason)
    }

    /// Returns the failure for an answer of another form.
    fn garbage(&mut self, garbage: &str) -> Failure {
        self.fail(self.sessions.address.show(garbage))
    }

    fn refused(&mut self, refusal: &Refusal) -> Failure {
        let text = refusal.text(&self.sessions.address);
        let fix = match refusal.is_invalid() {
            true => {
                "; the key `action` of the environment names the field of an action that takes the text of the model"
            }
            false => "",
        };
        self.fail(format!("{text}{fix}"))
    }

    /// Takes the text of the model as an action.
    fn act(&mut self, field: &str, text: &Value) -> Result<Reply, Failure> {
        let action = Value::Object(Map::from_iter([(field.to_owned(), text.clone())]));
        let observation = match self.ask(&action)? {
            Answer::Observation(observation) => observation,
            Answer::Refusal(refusal) => {
                let reasons = refusal.of_text(field).ok_or_else(|| self.refused(&refusal))?;
                let message = json!({"role": "user", "content": format!("error: {reasons}")});
                return Ok(Reply { messages: vec![message], ..Reply::default() });
            }
        };
        let text = observation.text(self.form.observation.as_deref()).map_err(|garbage| self.garbage(&garbage))?;
        // An empty text is an observation, too, unless it is the last one.
        let is_read = !(text.is_empty() && observation.done);
        let messages = is_read.then(|| json!({"role": "user", "content": text})).into_iter().collect();
        Ok(Reply { messages, reward: observation.reward, done: observation.done })
    }

    /// Calls a tool, and adds its result to a reply.
    fn call(&mut self, call: &Value, reply: &mut Reply) -> Result<(), Failure> {
        let observation = match self.ask(&message::call(call))? {
            Answer::Observation(observation) => observation,
            Answer::Refusal(refusal) => return Err(self.refused(&refusal)),
        };
        let result = observation.result(self.form.observation.as_deref()).map_err(|garbage| self.garbage(&garbage))?;
        reply.messages.push(result);
        reply.done = observation.done;
        if let Some(reward) = observation.reward {
            *reply.reward.get_or_insert(0.0) += reward;
        }
        Ok(())
    }
}

impl Episode for Conversation {
    fn step(&mut self, message: &Value) -> Result<Reply, Failure> {
        let mut reply = Reply::default();
        if let Some(calls) = message["tool_calls"].as_array() {
            for call in calls {
                self.call(call, &mut reply)?;
                if reply.done {
                    break;
                }
            }
            return Ok(reply);
        }
        let form = Arc::clone(&self.form);
        match &form.action {
            Some(field) => self.act(field, &message["content"]),
            None if self.sessions.tools().is_none() => self.act(MESSAGE, &message["content"]),
            None => Ok(Reply { done: true, ..reply }),
        }
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            self.sessions.give_back(session);
        }
    }
}
