//! The environments of a run, by name.

use crate::agent::Agent;
use crate::config::EnvironmentConfig;
use crate::environment::{Environment, Failure};
use crate::error::{Error, Result, check};
use data::Item;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The column of a row that names its environment.
const COLUMN: &str = "environment";

/// The environments of a run. A row names its environment in the column `environment`, unless there is only one.
///
/// ```
/// use agents::{Calculator, Environments};
/// use std::sync::Arc;
///
/// let environments = Environments::from_list(vec![("calculator".into(), Arc::new(Calculator::default()))]);
/// assert_eq!(environments.of_row(&data::Item::new("6 x 7?")).unwrap(), 0);
/// ```
#[derive(Clone, Default)]
pub struct Environments {
    list: Vec<(String, Kind)>,
    /// The tools of each environment, if they were set.
    tools: Option<Vec<Option<Value>>>,
    /// The consecutive failures of each environment; the last entry counts rows without a known environment.
    failures_in_a_row: Vec<u64>,
}

/// What answers the messages of the assistant.
#[derive(Clone)]
pub(crate) enum Kind {
    /// An environment, turn by turn.
    Turns(Arc<dyn Environment>),
    /// An agent, which holds the conversation itself.
    Agent(Arc<dyn Agent>),
}

impl Environments {
    /// Returns the environments of a configuration. Programs are started with their first conversation.
    ///
    /// # Errors
    /// [`Error::Config`] with the key; [`Error::Program`] for a missing program.
    pub fn new(config: &BTreeMap<String, EnvironmentConfig>) -> Result<Self> {
        Self::from_config(config, EnvironmentConfig::environment)
    }

    /// Returns the environments of a configuration for a process in which none of them is started, such as those that follow process 0 of a
    /// run. The programs, servers and environment variables that the configuration names need not exist.
    ///
    /// # Errors
    /// [`Error::Config`] with the key.
    pub fn described(config: &BTreeMap<String, EnvironmentConfig>) -> Result<Self> {
        Self::from_config(config, EnvironmentConfig::described)
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
        Self { failures_in_a_row: vec![0; list.len() + 1], tools: None, list }
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

    /// Counts a conversation of the environment at `index`, and its failure. `None` counts rows without a known environment.
    ///
    /// # Errors
    /// [`Error::TooManyFailures`] if `most` consecutive conversations failed.
    pub fn count(&mut self, index: Option<usize>, failure: Option<&str>, most: u64) -> Result<()> {
        let name = index.and_then(|index| self.list.get(index)).map_or("of an unknown name", |(name, _)| name);
        let at = index.unwrap_or(self.list.len());
        let Some(in_a_row) = self.failures_in_a_row.get_mut(at) else { return Ok(()) };
        let Some(failure) = failure else {
            *in_a_row = 0;
            return Ok(());
        };
        *in_a_row += 1;
        if in_a_row.is_power_of_two() {
            tracing::warn!(
                "the environment `{name}` has failed ({in_a_row} in a row), and its row is left out: {failure}"
            );
        }
        if *in_a_row >= most {
            let (failures, last) = (*in_a_row, failure.to_owned());
            return Err(Error::TooManyFailures { name: name.to_owned(), failures, last });
        }
        Ok(())
    }
}

impl std::fmt::Debug for Environments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.list.iter().map(|(name, _)| name)).finish()
    }
}
