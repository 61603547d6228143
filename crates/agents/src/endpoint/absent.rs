//! The endpoint of a build without the feature `http`.

use super::request::{Asked, Held, Job, KEY, Rules};
use crate::error::{Error, Result};
use std::net::SocketAddr;

/// An OpenAI-compatible endpoint, which a build without the feature `http` cannot open.
#[derive(Debug)]
pub enum Endpoint {}

impl Endpoint {
    /// Opens no endpoint.
    ///
    /// # Errors
    /// Always [`Error::Config`], which names the feature.
    pub fn open(address: Option<&str>, _: Rules) -> Result<Self> {
        let expected = "no agents, or a build with the feature `http` of grpo-agents".to_owned();
        let found = address.unwrap_or("an agent").to_owned();
        Err(grpo_files::KeyError { key: KEY.into(), expected, found }.into())
    }

    /// Returns the address.
    pub fn address(&self) -> SocketAddr {
        match *self {}
    }

    /// Returns the base URL for agents on this machine.
    pub fn base_url(&self) -> String {
        match *self {}
    }

    /// Lets agents hold conversations.
    ///
    /// # Errors
    /// None, because there is no endpoint.
    pub fn hold<E: From<Error>>(
        &self,
        _: &[Job<'_>],
        _: impl FnMut(Vec<Asked>) -> std::result::Result<(), E>,
    ) -> std::result::Result<Held, E> {
        match *self {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EnvironmentConfig, Environments};

    #[test]
    fn errors_without_http_name_the_feature() {
        let endpoint = Endpoint::open(Some("127.0.0.1:8000"), Rules::default()).unwrap_err();
        let config = EnvironmentConfig { url: Some("http://user:secret@localhost".into()), ..Default::default() };
        let server = Environments::new(&[("game".to_owned(), config)].into()).unwrap_err();
        for (error, key) in [(endpoint, "`rollout.endpoint`"), (server, "`environments.game.url`")] {
            let text = error.to_string();
            assert!(text.contains(key) && text.contains("feature `http` of grpo-agents"), "{text}");
            assert!(!text.contains("secret"), "{text}");
        }
    }
}
