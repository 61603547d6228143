//! An HTTP endpoint that scores completions.

use super::http_config::HttpConfig;
use super::message::{answer, expand, parsed, question, seconds, shown};
use super::score_batches;
use crate::error::{Result, check};
use crate::reward_fn::{RewardFailure, RewardFn, RewardInput, Score};
use grpo_files::{Secrets, long_integers_as_digits, redact_url};
use grpo_rng::{Purpose, stable_hash, stream};
use rand::RngExt;
use serde_json::{Value, json};
use std::io::Read;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The maximum length of a response in bytes, plus [`MAX_ENTRY`] per completion.
const MAX_RESPONSE: u64 = 1 << 20;
/// The number of bytes per completion in a response.
const MAX_ENTRY: u64 = 1 << 16;
/// The maximum number of bytes that are read of an error response.
const MAX_ERROR: u64 = 1 << 12;
/// The mean delay before the first retry of a request; it doubles with every retry.
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
/// The maximum mean delay, and the maximum delay that a server can request (`Retry-After`).
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// The maximum number of concurrent requests.
const MAX_CONCURRENCY: usize = 256;

/// A reward function that is an HTTP endpoint.
///
/// It posts `{"inputs": [...]}`, with the objects that a [`crate::Program`] receives as lines, and expects `{"rewards": [...]}` with one
/// entry per input, in order: a number, `null`, `true` (1), `false` (0), `{"reward": one of these}` or `{"error": "why"}`.
///
/// ```no_run
/// use grpo_rewards::{Http, HttpConfig, Rewards};
///
/// let judge = Http::new("judge", HttpConfig::new("http://localhost:8000/score"), 0)?;
/// let rewards = Rewards::from_terms(vec![(Box::new(judge), 1.0)])?;
/// # Ok::<(), grpo_rewards::Error>(())
/// ```
pub struct Http {
    name: String,
    url: String,
    /// The address as written in the configuration, for messages.
    shown_url: String,
    headers: Vec<(String, String)>,
    /// Values that are hidden in messages, even if the server's response contains them.
    secrets: Secrets,
    batch_size: usize,
    retries: u32,
    concurrency: usize,
    agent: ureq::Agent,
    seed: u64,
    requests: AtomicU64,
}

/// The reason why a request failed.
struct Refusal {
    message: String,
    /// `None` if a retry is useless; otherwise the delay that the server requests, if any.
    again: Option<Option<Duration>>,
}

impl Http {
    /// Returns the reward called `name`. The run's `seed` determines the jitter of retries. Sends no request.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for invalid settings; [`crate::Error::Reference`] for a missing environment variable.
    pub fn new(name: impl Into<String>, config: HttpConfig, seed: u64) -> Result<Self> {
        let name = name.into();
        let key = |field: &str| format!("rewards.http.{name}.{field}");
        let timeout = seconds(&key("timeout"), config.timeout)?;
        check(config.batch_size > 0, &key("batch_size"), "at least 1", config.batch_size)?;
        let concurrency = config.concurrency;
        let expected = format!("1 to {MAX_CONCURRENCY}");
        check((1..=MAX_CONCURRENCY).contains(&concurrency), &key("concurrency"), &expected, concurrency)?;
        let (mut secrets, shown_url) = (Secrets::of(&config), redact_url(&config.url));
        let url = expand(&key("url"), &config.url, &mut secrets)?;
        let parsed: Option<ureq::http::Uri> = url.parse().ok();
        let scheme = parsed.as_ref().and_then(|url| url.host().and(url.scheme_str()));
        // An invalid port is part of a password that should have been percent-encoded.
        let has_port = |url: &ureq::http::Uri| match url.host().zip(url.authority()) {
            Some((host, authority)) => authority.port_u16().is_some() || authority.as_str().ends_with(host),
            None => false,
        };
        let is_http = matches!(scheme, Some("http" | "https")) && parsed.as_ref().is_some_and(has_port);
        check(is_http, &key("url"), "an address with http:// or https://", &shown_url)?;
        if scheme == Some("https") && !cfg!(feature = "https") {
            let expected = "an address with http://, or a build with the feature `https` of grpo-cli";
            check(false, &key("url"), expected, &shown_url)?;
        }
        let mut headers = Vec::new();
        for (header, value) in &config.headers {
            let value = expand(&key(&format!("headers.{header}")), value, &mut secrets)?;
            let legal =
                ureq::http::HeaderName::try_from(header).is_ok() && ureq::http::HeaderValue::try_from(&value).is_ok();
            check(legal, &key("headers"), "names and values that HTTP allows", header)?;
            headers.push((header.clone(), value));
        }
        // Includes resolved variables: the whole address, with its password, may be one variable.
        secrets.extend(Secrets::of(&json!({ "url": url })));
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_idle_connections_per_host(concurrency)
            .user_agent(concat!("grpo/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        let seed = seed ^ stable_hash(&name);
        let (batch_size, retries, requests) = (config.batch_size, config.retries, AtomicU64::new(0));
        Ok(Self { name, url, shown_url, headers, secrets, batch_size, retries, concurrency, agent, seed, requests })
    }

    fn score_chunk(&self, inputs: &[RewardInput<'_>]) -> Vec<Score> {
        let questions: Vec<Value> = inputs.iter().enumerate().map(|(id, input)| question(id, input)).collect();
        let body = long_integers_as_digits(json!({ "inputs": questions }).to_string());
        match self.post_until_answered(&body, inputs.len()).and_then(|text| self.rewards(&text, inputs.len())) {
            Ok(scores) => scores,
            Err(message) => inputs.iter().map(|_| Err(RewardFailure::new(message.clone()))).collect(),
        }
    }

    fn post_until_answered(&self, body: &str, count: usize) -> std::result::Result<String, String> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let mut attempt = 0_u32;
        loop {
            let refusal = match self.post(body, count) {
                Ok(text) => return Ok(text),
                Err(refusal) => refusal,
            };
            let message = format!("{}: {}", self.shown_url, refusal.message);
            match refusal.again {
                Some(_) if attempt == self.retries => {
                    return Err(format!("{message} (after {} attempts)", u64::from(attempt) + 1));
                }
                Some(asked) => {
                    let mean = (FIRST_BACKOFF * (1 << attempt.min(16))).min(MAX_BACKOFF);
                    let jitter = stream(self.seed, Purpose::RewardRetry, number, attempt.into()).random_range(0.5..1.5);
                    let wait = asked.map_or(mean.mul_f64(jitter), |asked| asked.min(MAX_BACKOFF));
                    tracing::info!(reward = self.name, "{message}; once more in {:.1} s", wait.as_secs_f64());
                    std::thread::sleep(wait);
                    attempt += 1;
                }
                None => return Err(message),
            }
        }
    }

    fn post(&self, body: &str, count: usize) -> std::result::Result<String, Refusal> {
        let mut request = self.agent.post(&self.url).content_type("application/json");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let mut response = request.send(body).map_err(|error| {
            let temporary = matches!(
                error,
                ureq::Error::Timeout(_)
                    | ureq::Error::Io(_)
                    | ureq::Error::ConnectionFailed
                    | ureq::Error::HostNotFound
                    | ureq::Error::Protocol(_)
            );
            Refusal { message: shown(&error.to_string(), &self.secrets), again: temporary.then_some(None) }
        })?;
        let status = response.status();
        let header = |name| {
            let value: &ureq::http::HeaderValue = response.headers().get(name)?;
            Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        if status.is_redirection() {
            // On a redirect, a POST could become a GET, and headers with keys could reach another host.
            let location = header("location").map_or("nowhere".into(), |to| shown(&redact_url(&to), &self.secrets));
            let message = format!(
                "status {status} leads to `{location}`, and redirects are not followed: write the final address into \
                 rewards.http.{}.url",
                self.name
            );
            return Err(Refusal { message, again: None });
        }
        if !status.is_success() {
            let wait = header("retry-after").and_then(|value| value.trim().parse().ok());
            let mut said = Vec::new();
            // The received part of an interrupted response is shown too.
            let _ = response.body_mut().as_reader().take(MAX_ERROR).read_to_end(&mut said);
            let said = shown(&String::from_utf8_lossy(&said), &self.secrets);
            let temporary = status.as_u16() == 429 || status.is_server_error();
            let again = temporary.then_some(wait.map(Duration::from_secs));
            return Err(Refusal { message: format!("status {status}: {said}"), again });
        }
        // Compressed responses are rejected, because a few bytes could decompress to more than the memory.
        if let Some(encoding) =
            header("content-encoding").filter(|encoding| !matches!(encoding.trim(), "" | "identity"))
        {
            let found = shown(&encoding, &self.secrets);
            let message = format!("expected a response that is not compressed, got `Content-Encoding: {found}`");
            return Err(Refusal { message, again: None });
        }
        let limit = MAX_RESPONSE + MAX_ENTRY * count as u64;
        let bytes = response.body_mut().with_config().limit(limit).read_to_vec().map_err(|error| Refusal {
            again: matches!(error, ureq::Error::Timeout(_) | ureq::Error::Io(_)).then_some(None),
            message: match error {
                ureq::Error::BodyExceedsLimit(_) => format!("expected a response of at most {limit} bytes, got more"),
                error => format!("the response cannot be read: {}", shown(&error.to_string(), &self.secrets)),
            },
        })?;
        String::from_utf8(bytes).map_err(|error| {
            let text = String::from_utf8_lossy(error.as_bytes());
            let message = format!("expected a response in UTF-8, got `{}`", shown(&text, &self.secrets));
            Refusal { message, again: None }
        })
    }

    fn rewards(&self, text: &str, count: usize) -> std::result::Result<Vec<Score>, String> {
        let expected = format!("{}: expected {{\"rewards\": [...]}} with {count} entries", self.shown_url);
        let value = parsed(text).map_err(|error| {
            format!("{expected}, got `{}` ({})", shown(text, &self.secrets), shown(&error.to_string(), &self.secrets))
        })?;
        let list = value.get("rewards").and_then(Value::as_array);
        let list = list.ok_or_else(|| format!("{expected}, got `{}`", shown(text, &self.secrets)))?;
        if list.len() != count {
            return Err(format!("{expected}, got {}", list.len()));
        }
        let entry =
            |(id, value)| answer(id, value, &self.secrets).unwrap_or_else(|message| Err(RewardFailure::new(message)));
        Ok(list.iter().enumerate().map(entry).collect())
    }
}

impl RewardFn for Http {
    fn name(&self) -> &str {
        &self.name
    }

    fn score(&self, input: &RewardInput<'_>) -> Option<f32> {
        self.score_batch(std::slice::from_ref(input)).pop()?.ok()?
    }

    fn score_batch(&self, inputs: &[RewardInput<'_>]) -> Vec<Score> {
        score_batches(0..self.concurrency, inputs.chunks(self.batch_size), |_, batch| self.score_chunk(batch))
    }
}
