//! The settings of HTTP endpoints that score completions.

use super::message::{batch_size, timeout};
use crate::reward_fn::one;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The settings of an HTTP reward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpConfig {
    /// The address to which completions are posted: `http://` or, with the feature `https`, `https://`. `${NAME}` here and in headers is an
    /// environment variable, so that secrets need not be in files. Redirects are not followed.
    pub url: String,
    /// The weight of the reward.
    #[serde(default = "one")]
    pub weight: f32,
    /// The maximum number of completions per request.
    #[serde(default = "batch_size")]
    pub batch_size: usize,
    /// The time in seconds for a request and its response.
    #[serde(default = "timeout")]
    pub timeout: f64,
    /// The number of retries of a request after a timeout, a failed connection, or a status of 429 or 500 to 599.
    #[serde(default = "retries")]
    pub retries: u32,
    /// The maximum number of concurrent requests.
    #[serde(default = "concurrency")]
    pub concurrency: usize,
    /// The headers of each request.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

fn retries() -> u32 {
    5
}
fn concurrency() -> usize {
    4
}

impl HttpConfig {
    /// Returns the settings of an endpoint, with the defaults.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            weight: one(),
            batch_size: batch_size(),
            timeout: timeout(),
            retries: retries(),
            concurrency: concurrency(),
            headers: BTreeMap::new(),
        }
    }
}
