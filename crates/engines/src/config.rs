//! The section `rollout.server` and the key `rollout.engine`.

use crate::error::{Result, check};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::collections::BTreeSet;
use std::path::PathBuf;
#[cfg(feature = "http")]
use std::time::Duration;

/// The largest number of servers.
const MAX_SERVERS: usize = 1 << 10;
/// The largest time of a request in seconds: a week.
const MAX_SECONDS: f64 = 7.0 * 86_400.0;
/// The largest number of retries.
const MAX_RETRIES: u32 = 1 << 10;

/// The program that samples completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// The policy itself, on its own device.
    #[default]
    Policy,
    /// Servers of vLLM.
    Vllm,
    /// Servers of SGLang.
    Sglang,
}

impl EngineKind {
    /// Returns `true` if completions are sampled by servers.
    pub fn is_server(self) -> bool {
        self != Self::Policy
    }

    /// Returns the name in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
        }
    }
}

/// The servers that sample completions.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// The addresses of the servers, e.g. `http://127.0.0.1:8000`; a `/v1` at the end is ignored. All have the same model, and requests are
    /// spread over them.
    pub base_urls: Vec<String>,
    /// The name of the environment variable with the API key of the servers; `None` sends none.
    pub api_key_env: Option<String>,
    /// The name by which the servers know the model; `None` is their only one.
    pub model: Option<String>,
    /// The time in seconds for a request and its response, which includes the sampling of all completions of a prompt.
    #[default(600.0)]
    pub timeout: f64,
    /// The number of retries of a request after a timeout, a failed connection, or a status of 429 or 500 to 599. Waits grow from half a
    /// second to a minute, so that the default outlasts a restart of two minutes.
    #[default(8)]
    pub retries: u32,
    /// The folder through which weights reach the servers, which must see it under the same path; `None` is the system's folder for
    /// temporary files.
    pub weights_dir: Option<PathBuf>,
}

impl ServerConfig {
    /// Checks every key.
    ///
    /// # Errors
    /// [`crate::Error::Config`].
    pub fn validate(&self) -> Result<()> {
        let (key, count) = ("rollout.server.base_urls", self.base_urls.len());
        let expected = "the address of at least one server, e.g. `base_urls: [http://127.0.0.1:8000]`";
        check(count > 0, key, expected, "none")?;
        check(count <= MAX_SERVERS, key, &format!("at most {MAX_SERVERS} addresses"), count)?;
        let trimmed: BTreeSet<&str> = self.base_urls.iter().map(|url| base_url(url)).collect();
        check(trimmed.len() == count, key, "different addresses", "the same address twice")?;
        let has_empty = [&self.api_key_env, &self.model].into_iter().flatten().any(|text| text.trim().is_empty());
        check(!has_empty, "rollout.server", "names that are not empty", "an empty text")?;
        let legal = self.timeout > 0.0 && self.timeout <= MAX_SECONDS;
        check(legal, "rollout.server.timeout", "seconds, more than 0 and at most a week", self.timeout)?;
        let few = self.retries <= MAX_RETRIES;
        Ok(check(few, "rollout.server.retries", &format!("at most {MAX_RETRIES}"), self.retries)?)
    }

    /// Returns the time for a request.
    #[cfg(feature = "http")]
    pub(crate) fn time(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout).unwrap_or(Duration::from_secs(600))
    }
}

/// Returns an address without `/v1` at its end, which clients of OpenAI's API add: the servers have other routes beside it.
pub(crate) fn base_url(url: &str) -> &str {
    let url = url.trim_end_matches('/');
    url.strip_suffix("/v1").unwrap_or(url).trim_end_matches('/')
}
