//! The section `environments` of a run's configuration.

use crate::error::{Result, check};
use grpo_files::KeyError;
use grpo_rewards::programs::MAX_WORKERS;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use smart_default::SmartDefault;
use std::collections::BTreeMap;

/// The settings of an environment: one of `command`, `agent`, `url` and `built_in`.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EnvironmentConfig {
    /// The program and its arguments, which speaks JSON lines. A program without a slash is searched in `PATH`. `${NAME}` here and in `env`
    /// is an environment variable, so that secrets need not be in files; `$${NAME}` is the text `${NAME}`.
    pub command: Vec<String>,
    /// An agent: a program and its arguments, as in `command`, which holds whole conversations and asks `rollout.endpoint` for messages.
    pub agent: Vec<String>,
    /// The address of a server of OpenEnv: `http://` or `ws://`, or, with the feature `https`, `https://` or `wss://`. `${NAME}` here and in
    /// `headers` is an environment variable.
    pub url: Option<String>,
    /// A built-in environment: `calculator` or `word_guess`.
    pub built_in: Option<BuiltIn>,
    /// The tools that the model may call, a list of functions as JSON schemas. The column `tools` of a row takes precedence.
    pub tools: Option<Value>,
    /// The number of parallel processes of a program, or of conversations that a server answers at the same time; each agent has one conversation
    /// at a time.
    #[default(1)]
    pub workers: usize,
    /// The time in seconds that a program has for an answer, including its start, or a server, including the connection; an agent, for its next
    /// request or the end of the conversation.
    #[default(60.0)]
    pub timeout: f64,
    /// Additional environment variables of a program.
    pub env: BTreeMap<String, String>,
    /// The field of an action of OpenEnv that takes the text of the model; `None` is `message`, or none if the server has tools. Without one,
    /// a message without a tool call ends the conversation.
    pub action: Option<String>,
    /// The field of an observation of OpenEnv that the model reads; `None` is all fields but `metadata`, as JSON.
    pub observation: Option<String>,
    /// The HTTP headers of connections to a server.
    pub headers: BTreeMap<String, String>,
}

/// The kind of an environment.
pub(crate) enum Source {
    BuiltIn(BuiltIn),
    Server,
    Program,
    Agent,
}

/// A built-in environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BuiltIn {
    /// [`crate::Calculator`]: a tool that evaluates arithmetic.
    Calculator,
    /// [`crate::WordGuess`]: a game in which the model guesses the word in the row's answer.
    WordGuess,
}

impl EnvironmentConfig {
    /// Returns the kind of the environment, whose other keys belong to this kind.
    ///
    /// # Errors
    /// [`crate::Error::Config`] with the key.
    pub(crate) fn source(&self, name: &str) -> Result<Source> {
        let key = |field: &str| format!("environments.{name}.{field}");
        if let Some(tools) = &self.tools {
            check_tools(&key("tools"), tools)?;
        }
        match (self.built_in, &self.url, self.command.is_empty(), self.agent.is_empty()) {
            (Some(built_in), None, true, true) => {
                let plain = Self { built_in: self.built_in, ..Self::default() };
                check(*self == plain, &key("built_in"), "no other key beside it", "others")?;
                Ok(Source::BuiltIn(built_in))
            }
            (None, Some(_), true, true) => {
                check(self.env.is_empty(), &key("env"), "a program in `command`", "`url`")?;
                Ok(Source::Server)
            }
            (None, None, no_command, no_agent) if no_command != no_agent => {
                let is_set = [self.action.is_some(), self.observation.is_some(), !self.headers.is_empty()];
                for (field, is_set) in ["action", "observation", "headers"].into_iter().zip(is_set) {
                    let found = if no_agent { "`command`" } else { "`agent`" };
                    check(!is_set, &key(field), "a server in `url`", found)?;
                }
                Ok(if no_agent { Source::Program } else { Source::Agent })
            }
            (built_in, url, no_command, no_agent) => {
                let given = [built_in.is_some(), url.is_some(), !no_command, !no_agent];
                let count = given.into_iter().filter(|given| *given).count();
                let expected =
                    "one of `command`, `agent`, `url` and `built_in`, e.g. `{ built_in: calculator }`".to_owned();
                let found = if count == 0 { "none".to_owned() } else { format!("{count} of them") };
                Err(KeyError { key: format!("environments.{name}"), expected, found }.into())
            }
        }
    }
}

impl EnvironmentConfig {
    /// Returns the number of workers of the environment in `section`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for none or too many.
    pub(crate) fn workers(&self, section: &str) -> Result<usize> {
        let (workers, expected) = (self.workers, format!("1 to {MAX_WORKERS}"));
        check((1..=MAX_WORKERS).contains(&workers), &format!("{section}.workers"), &expected, workers)?;
        Ok(workers)
    }
}

/// Checks that tools are a list of functions with names.
fn check_tools(key: &str, tools: &Value) -> Result<()> {
    let name = |tool: &Value| tool.get("function").unwrap_or(tool).get("name").is_some_and(Value::is_string);
    let expected = "a list of tools, e.g. `[{type: function, function: {name: add, parameters: {type: object}}}]`";
    let legal = tools.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(name));
    Ok(check(legal, key, expected, tools)?)
}
