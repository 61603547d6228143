//! The environments of a run, by name.

use crate::agent::Agent;
use crate::agent_program::AgentProgram;
use crate::built_in::{Calculator, WordGuess};
use crate::config::{BuiltIn, EnvironmentConfig, Source};
use crate::described::Described;
use crate::environment::{Environment, Failure, Outcome};
use crate::error::{Error, Result, check};
#[cfg(feature = "http")]
use crate::openenv::OpenEnv;
use crate::program::EnvironmentProgram;
use grpo_data::Item;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The column of a row that names its environment.
const COLUMN: &str = "environment";

/// The environments of a run. A row names its environment in the column `environment`, unless there is only one.
///
/// ```
/// use grpo_agents::{Calculator, Environments};
/// use std::sync::Arc;
///
/// let environments = Environments::from_list(vec![("calculator".into(), Arc::new(Calculator::default()))]);
/// assert_eq!(environments.of_row(&grpo_data::Item::new("6 x 7?")).unwrap(), 0);
/// ```
#[derive(Clone, Default)]
pub struct Environments {
    list: Vec<(String, Kind)>,
    /// The tools of each environment, if they were set.
    tools: Option<Vec<Option<Value>>>,
    /// The counters of each environment; the last entry counts rows without a known environment.
    counters: Vec<Counters>,
}

/// The maximum number of kinds of causes that are remembered.
const MOST_CAUSES: usize = 64;
/// The number of failed conversations after which an environment that has never answered one ends the run.
const MOST_WITHOUT_ANSWER: u64 = 2;

/// The conversations of an environment.
#[derive(Clone, Debug, Default)]
struct Counters {
    /// `true` if it has answered in a conversation to the end.
    has_answered: bool,
    failures: u64,
    failures_in_a_row: u64,
    /// The last cause of a failure.
    cause: String,
    /// The causes that were logged, without their numbers.
    logged: Vec<String>,
    /// The number of rollouts with failures.
    failing_rollouts: u64,
}

impl Counters {
    /// Counts a failure, and logs its cause if it is the first one of its kind.
    fn count(&mut self, name: &str, failure: &Failure) {
        self.failures += 1;
        self.failures_in_a_row += 1;
        let cause = failure.to_string();
        if !failure.is_consequence() {
            let kind: String = cause.chars().filter(|c| !c.is_ascii_digit()).collect();
            if self.logged.len() < MOST_CAUSES && !self.logged.contains(&kind) {
                tracing::warn!("the environment `{name}` has failed, and its conversation is left out: {cause}");
                self.logged.push(kind);
            }
        }
        if !failure.is_consequence() || self.cause.is_empty() {
            self.cause = cause;
        }
    }

    /// Logs the number of failures of a rollout, of the first rollouts and then of fewer and fewer.
    fn log_rollout(&mut self, name: &str, failed: u64, consequences: u64, all: u64) {
        self.failing_rollouts += 1;
        if self.failing_rollouts.is_power_of_two() {
            let following = if consequences > 0 {
                format!(", {consequences} of them because their program had failed in another one")
            } else {
                String::new()
            };
            tracing::warn!(
                "the environment `{name}` has failed in {failed} of {} ({} in a row){following}; the last cause: {}",
                grpo_files::counted(all, "conversation"),
                self.failures_in_a_row,
                self.cause
            );
        }
    }
}

/// What answers the messages of the assistant.
#[derive(Clone)]
pub(crate) enum Kind {
    /// An environment, turn by turn.
    Turns(Arc<dyn Environment>),
    /// An agent, which holds the conversation itself.
    Agent(Arc<dyn Agent>),
}

impl Kind {
    /// Returns the environment. A program is started, and a server connected to, with its first conversation.
    ///
    /// # Errors
    /// [`Error::Config`] with the key; [`Error::Program`] for a missing program or environment variable.
    fn open(config: &EnvironmentConfig, name: &str) -> Result<Self> {
        Ok(match config.source(name)? {
            Source::BuiltIn(BuiltIn::Calculator) => Self::Turns(Arc::new(Calculator::default())),
            Source::BuiltIn(BuiltIn::WordGuess) => Self::Turns(Arc::new(WordGuess::default())),
            Source::Server => Self::Turns(server(config, name)?),
            Source::Program => Self::Turns(Arc::new(EnvironmentProgram::new(name, config)?)),
            Source::Agent => Self::Agent(Arc::new(AgentProgram::new(name, config)?)),
        })
    }

    /// Returns the environment for a process that starts no conversations: programs, servers and environment variables may be missing.
    ///
    /// # Errors
    /// [`Error::Config`] with the key.
    fn described(config: &EnvironmentConfig, name: &str) -> Result<Self> {
        Ok(match config.source(name)? {
            Source::Agent => Self::Agent(Arc::new(Described(None))),
            Source::BuiltIn(BuiltIn::Calculator) => {
                Self::Turns(Arc::new(Described(Calculator::default().tools().cloned())))
            }
            Source::BuiltIn(BuiltIn::WordGuess) => Self::Turns(Arc::new(Described(None))),
            Source::Server | Source::Program => Self::Turns(Arc::new(Described(config.tools.clone()))),
        })
    }
}

/// Returns an environment that is a server.
#[cfg(feature = "http")]
fn server(config: &EnvironmentConfig, name: &str) -> Result<Arc<dyn Environment>> {
    Ok(Arc::new(OpenEnv::new(name, config)?))
}

#[cfg(not(feature = "http"))]
fn server(config: &EnvironmentConfig, name: &str) -> Result<Arc<dyn Environment>> {
    let key = format!("environments.{name}.url");
    let found = grpo_files::redact_url(config.url.as_deref().unwrap_or_default());
    let expected = "no server, or a build with the feature `http` of grpo-agents".to_owned();
    Err(grpo_files::KeyError { key, expected, found }.into())
}

impl Environments {
    /// Returns the environments of a configuration. Programs are started with their first conversation.
    ///
    /// # Errors
    /// [`Error::Config`] with the key; [`Error::Program`] for a missing program.
    pub fn new(config: &BTreeMap<String, EnvironmentConfig>) -> Result<Self> {
        Self::from_config(config, Kind::open)
    }

    /// Returns the environments of a configuration for a process in which none of them is started, such as those that follow process 0 of a
    /// run. The programs, servers and environment variables that the configuration names need not exist.
    ///
    /// # Errors
    /// [`Error::Config`] with the key.
    pub fn described(config: &BTreeMap<String, EnvironmentConfig>) -> Result<Self> {
        Self::from_config(config, Kind::described)
    }

    fn from_config(
        config: &BTreeMap<String, EnvironmentConfig>,
        kind: impl Fn(&EnvironmentConfig, &str) -> Result<Kind>,
    ) -> Result<Self> {
        let list = config.iter().map(|(name, environment)| {
            let legal = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
            let is_name = (1..=100).contains(&name.len()) && name.chars().all(legal);
            let expected = "names of 1 to 100 letters, digits, `-` and `_`";
            check(is_name, "environments", expected, format!("`{name}`"))?;
            Ok((name.clone(), kind(environment, name)?))
        });
        Ok(Self::from_kinds(list.collect::<Result<_>>()?))
    }

    /// Returns environments of your own, by name.
    pub fn from_list(list: Vec<(String, Arc<dyn Environment>)>) -> Self {
        Self::from_kinds(list.into_iter().map(|(name, environment)| (name, Kind::Turns(environment))).collect())
    }

    /// Returns agents of your own, by name.
    pub fn from_agents(list: Vec<(String, Arc<dyn Agent>)>) -> Self {
        Self::from_kinds(list.into_iter().map(|(name, agent)| (name, Kind::Agent(agent))).collect())
    }

    fn from_kinds(list: Vec<(String, Kind)>) -> Self {
        Self { counters: vec![Counters::default(); list.len() + 1], tools: None, list }
    }

    /// Returns `true` if there are none: completions then have one turn.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns `true` if one of them is an agent: the run then has an endpoint.
    pub fn has_agents(&self) -> bool {
        self.list.iter().any(|(_, kind)| matches!(kind, Kind::Agent(_)))
    }

    /// Returns the tools of the environment at `index`, a result of [`Environments::of_row`]; `None` if it has none or is an agent.
    pub fn tools(&self, index: usize) -> Option<&Value> {
        match &self.tools {
            Some(tools) => tools.get(index)?.as_ref(),
            None => self.get(index)?.1.tools(),
        }
    }

    /// Returns the tools of all environments.
    pub fn all_tools(&self) -> Vec<Option<Value>> {
        (0..self.list.len()).map(|index| self.tools(index).cloned()).collect()
    }

    /// Replaces the tools of all environments, so that the processes of a run use the same.
    pub fn set_tools(&mut self, tools: Vec<Option<Value>>) {
        self.tools = Some(tools);
    }

    /// Returns the index of the environment of a row.
    ///
    /// # Errors
    /// A failure for a name that there is not, or for a row without a name if there are several environments.
    pub fn of_row(&self, row: &Item) -> Result<usize, Failure> {
        let names = || self.list.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        match row.columns.get(COLUMN) {
            Some(Value::String(name)) => self.list.iter().position(|(known, _)| known == name).ok_or_else(|| {
                Failure::new(format!("the row has the environment `{name}`, expected one of {}", names()))
            }),
            None | Some(Value::Null) if self.list.len() == 1 => Ok(0),
            other => {
                let found = other.map_or_else(|| "none".to_owned(), Value::to_string);
                let expected = format!("a name in the column `{COLUMN}`, one of {}", names());
                Err(Failure::new(format!("expected {expected}, got {found}")))
            }
        }
    }

    /// Returns the environment at `index`, a result of [`Environments::of_row`]; `None` for an agent.
    pub fn get(&self, index: usize) -> Option<(&str, &Arc<dyn Environment>)> {
        match self.list.get(index)? {
            (name, Kind::Turns(environment)) => Some((name, environment)),
            (_, Kind::Agent(_)) => None,
        }
    }

    /// Returns the agent at `index`, a result of [`Environments::of_row`]; `None` for another environment.
    pub fn agent(&self, index: usize) -> Option<&Arc<dyn Agent>> {
        match self.list.get(index)? {
            (_, Kind::Agent(agent)) => Some(agent),
            (_, Kind::Turns(_)) => None,
        }
    }

    /// Counts the conversations of a rollout, each with the index of its environment (`None` without a known environment), and logs failures.
    /// A conversation in which the environment was not asked is neither a failure nor a success.
    ///
    /// # Errors
    /// [`Error::TooManyFailures`] if `most` consecutive conversations failed; [`Error::NeverAnswered`] if an environment has failed in every
    /// conversation that asked it since the start of the run.
    pub fn count<'a>(
        &mut self,
        conversations: impl IntoIterator<Item = (Option<usize>, &'a Outcome)>,
        most: u64,
    ) -> Result<()> {
        let mut rollout = vec![[0; 3]; self.counters.len()];
        for (index, outcome) in conversations {
            let at = index.filter(|index| *index < self.list.len()).unwrap_or(self.list.len());
            let (counters, [all, failed, consequences]) = (&mut self.counters[at], &mut rollout[at]);
            *all += 1;
            match outcome {
                Outcome::NotAsked => {}
                Outcome::Answered => (counters.has_answered, counters.failures_in_a_row) = (true, 0),
                Outcome::Failed(failure) => {
                    *failed += 1;
                    *consequences += u64::from(failure.is_consequence());
                    counters.count(self.list.get(at).map_or(UNKNOWN, |(name, _)| name), failure);
                    if counters.failures_in_a_row >= most {
                        let (failures, last) = (counters.failures_in_a_row, counters.cause.clone());
                        let name = self.list.get(at).map_or(UNKNOWN, |(name, _)| name).to_owned();
                        return Err(Error::TooManyFailures { name, failures, last });
                    }
                }
            }
        }
        for (at, [all, failed, consequences]) in
            rollout.into_iter().enumerate().filter(|(_, [_, failed, _])| *failed > 0)
        {
            let (counters, name) = (&mut self.counters[at], self.list.get(at).map_or(UNKNOWN, |(name, _)| name));
            counters.log_rollout(name, failed, consequences, all);
            if !counters.has_answered && (failed == all || counters.failures >= MOST_WITHOUT_ANSWER) {
                let (name, failures, cause) = (name.to_owned(), counters.failures, counters.cause.clone());
                return Err(Error::NeverAnswered { name, failures, cause });
            }
        }
        Ok(())
    }
}

/// The name of the environments of rows without a known one, in messages.
const UNKNOWN: &str = "of an unknown name";

impl std::fmt::Debug for Environments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.list.iter().map(|(name, _)| name)).finish()
    }
}
