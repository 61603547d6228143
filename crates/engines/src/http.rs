//! Requests to one server, and the failures that a retry can help.

use crate::config::{ServerConfig, base_url};
use crate::error::{Error, Result, check};
use grpo_files::{Secrets, printable_line, redact_url};
use serde_json::{Value, json};
use std::io::Read;
use std::time::Duration;

/// The maximum length in bytes of a reply that has no completions.
pub(crate) const MAX_REPLY: u64 = 4 << 20;
/// The maximum number of bytes that are read of a refusal.
const MAX_REFUSAL: u64 = 1 << 12;
/// The maximum number of characters of a reply in an error.
const SHOWN: usize = 300;

/// A connection to a server.
pub(crate) struct Http {
    base: String,
    /// The address for messages.
    pub(crate) shown: String,
    agent: ureq::Agent,
    authorization: Option<String>,
    secrets: Secrets,
}

/// A reply with a status below 500.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) text: String,
}

/// The reason why a request has no usable reply.
#[derive(Debug)]
pub(crate) enum Fault {
    /// A retry may help, after the time that the server asks for, if it does.
    Temporary { message: String, after: Option<Duration> },
    /// A retry is useless.
    Permanent(String),
    /// The server no longer has the weights: it was restarted, or another program has replaced them.
    Forgotten(String),
}

impl Fault {
    pub(crate) fn temporary(message: impl Into<String>) -> Self {
        Self::Temporary { message: message.into(), after: None }
    }

    pub(crate) fn message(&self) -> &str {
        match self {
            Self::Temporary { message, .. } | Self::Permanent(message) | Self::Forgotten(message) => message,
        }
    }
}

impl Http {
    /// Returns a connection to the server at `url`. Sends no request.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid address or a missing environment variable.
    pub(crate) fn new(url: &str, config: &ServerConfig) -> Result<Self> {
        let key = "rollout.server.base_urls";
        let (base, shown) = (base_url(url), redact_url(url));
        let parsed: Option<ureq::http::Uri> = base.parse().ok();
        let scheme = parsed.as_ref().and_then(|url| url.host().and(url.scheme_str()));
        let is_http = matches!(scheme, Some("http" | "https")) && parsed.as_ref().is_some_and(|u| u.query().is_none());
        check(is_http, key, "addresses with http:// or https://, without a query", &shown)?;
        let is_route = ["/completions", "/models", "/generate", "/health"].iter().any(|route| base.ends_with(route));
        check(!is_route, key, "addresses of servers, without the path of a request", &shown)?;
        if scheme == Some("https") && !cfg!(feature = "https") {
            let expected = "addresses with http://, or a build with the feature `https` of grpo-cli";
            check(false, key, expected, &shown)?;
        }
        let mut secrets = Secrets::of(&json!({ "url": url }));
        let mut authorization = None;
        if let Some(name) = &config.api_key_env {
            let expected = "the name of an environment variable with the API key";
            let value = std::env::var(name).unwrap_or_default();
            let legal = !value.is_empty() && ureq::http::HeaderValue::try_from(&value).is_ok();
            check(legal, "rollout.server.api_key_env", expected, format!("{name}, which is not set or not legal"))?;
            secrets.extend(Secrets::of(&json!({ "api_key": value })));
            authorization = Some(format!("Bearer {value}"));
        }
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(config.time()))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_idle_connections_per_host(64)
            .user_agent(concat!("grpo/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Ok(Self { base: base.to_owned(), shown, agent, authorization, secrets })
    }

    /// Returns the reply to a GET request.
    pub(crate) fn get(&self, path: &str) -> Result<Reply, Fault> {
        let mut request = self.agent.get(format!("{}{path}", self.base));
        if let Some(value) = &self.authorization {
            request = request.header("Authorization", value);
        }
        self.read(path, request.call(), MAX_REPLY)
    }

    /// Returns the reply to a POST request, of at most `limit` bytes.
    pub(crate) fn post(&self, path: &str, body: &Value, limit: u64) -> Result<Reply, Fault> {
        let mut request = self.agent.post(format!("{}{path}", self.base)).content_type("application/json");
        if let Some(value) = &self.authorization {
            request = request.header("Authorization", value);
        }
        self.read(path, request.send(body.to_string()), limit)
    }

    /// Returns the JSON of a reply with status 200.
    pub(crate) fn json(&self, path: &str, reply: Reply) -> Result<Value, Fault> {
        let text = self.ok(path, reply)?;
        let expected = |error| Fault::Permanent(format!("{path}: expected JSON, got `{}` ({error})", self.show(&text)));
        serde_json::from_str(&text).map_err(expected)
    }

    /// Returns the text of a reply with status 200.
    pub(crate) fn ok(&self, path: &str, reply: Reply) -> Result<String, Fault> {
        match reply.status {
            200 => Ok(reply.text),
            401 | 403 => {
                let fix = "rollout.server.api_key_env names the variable with the key";
                Err(Fault::Permanent(format!("{path}: status {}: {}; {fix}", reply.status, self.show(&reply.text))))
            }
            status => Err(Fault::Permanent(format!("{path}: status {status}: {}", self.show(&reply.text)))),
        }
    }

    /// Returns the beginning of a text of the server, on one line and without secrets.
    pub(crate) fn show(&self, text: &str) -> String {
        let line = printable_line(&self.secrets.hide(text.trim())).to_string();
        match line.char_indices().nth(SHOWN) {
            Some((end, _)) => format!("{}...", &line[..end]),
            None => line,
        }
    }

    fn read(
        &self,
        path: &str,
        response: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
        limit: u64,
    ) -> Result<Reply, Fault> {
        let failed = |error: &ureq::Error| {
            let message = format!("{path}: {}", self.show(&error.to_string()));
            // The error of rustls for bytes that are no TLS.
            if self.base.starts_with("https") && message.contains("InvalidContentType") {
                let fix =
                    "the server speaks http: write http:// in the place of https:// into rollout.server.base_urls";
                return Fault::Permanent(format!("{message}; {fix}"));
            }
            match error {
                ureq::Error::Timeout(_)
                | ureq::Error::Io(_)
                | ureq::Error::ConnectionFailed
                | ureq::Error::HostNotFound
                | ureq::Error::Protocol(_) => Fault::temporary(message),
                _ => Fault::Permanent(message),
            }
        };
        let mut response = response.map_err(|error| failed(&error))?;
        let status = response.status();
        if status.is_redirection() {
            let fix = "redirects are not followed: write the final address into rollout.server.base_urls";
            return Err(Fault::Permanent(format!("{path}: status {status}, and {fix}")));
        }
        if status.as_u16() == 429 || status.is_server_error() {
            let after =
                response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.trim().parse().ok());
            let mut body = Vec::new();
            // The received part of an interrupted reply is shown, too.
            let _ = response.body_mut().as_reader().take(MAX_REFUSAL).read_to_end(&mut body);
            let message = format!("{path}: status {status}: {}", self.show(&String::from_utf8_lossy(&body)));
            return Err(Fault::Temporary { message, after: after.map(Duration::from_secs) });
        }
        // A few compressed bytes could become more than the memory.
        let encoding = response.headers().get("content-encoding").and_then(|value| value.to_str().ok());
        if encoding.is_some_and(|encoding| !matches!(encoding.trim(), "" | "identity")) {
            return Err(Fault::Permanent(format!("{path}: expected a reply that is not compressed")));
        }
        let bytes = response.body_mut().with_config().limit(limit).read_to_vec().map_err(|error| match error {
            ureq::Error::BodyExceedsLimit(_) => {
                Fault::Permanent(format!("{path}: expected a reply of at most {limit} bytes, got more"))
            }
            error => failed(&error),
        })?;
        let text = String::from_utf8(bytes).map_err(|_| Fault::Permanent(format!("{path}: expected UTF-8")))?;
        Ok(Reply { status: status.as_u16(), text })
    }
}

/// Returns an [`Error`] for a fault after some attempts.
pub(crate) fn ended(server: &str, fault: Fault, attempts: u32) -> Error {
    let server = server.to_owned();
    match fault {
        Fault::Temporary { message, .. } | Fault::Forgotten(message) => {
            Error::Unavailable { server, message, attempts }
        }
        Fault::Permanent(message) => Error::Reply { server, message },
    }
}
