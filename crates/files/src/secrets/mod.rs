//! Secrets of a configuration: `${NAME}` references, and redaction of everything that leaves a run.
//!
//! Only the `config.yaml` of a run has the original values. Configurations in all other files, pages, logs and messages pass through
//! [`redact`], texts through [`Secrets::hide`].
//!
//! | place | hidden |
//! |---|---|
//! | `headers` and `env`, and keys such as `api_key`, `password` or `token` | every value |
//! | `command` | the arguments, except names of options (`--key`, `-m` with its module), of files (`judge.py`) and of their functions (`judge.py:score`) |
//! | `url`, and any other text that is an address | user and password, query, fragment |
//!
//! A value that consists of references to the environment (`${JUDGE_KEY}`, `Bearer ${JUDGE_KEY}`) is not a secret and is kept.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::collections::BTreeSet;

/// The text that replaces a secret.
pub const HIDDEN: &str = "(hidden)";

/// The minimum length in bytes of a secret that is searched for in texts; shorter ones would match by chance.
const SHORTEST: usize = 6;
/// The minimum length for a part of a secret, such as the token of a header or the password of an address.
const SHORTEST_PART: usize = 8;
/// The extensions that identify an argument as a file name.
const FILES: &[&str] = &[
    "bash", "cfg", "csv", "ini", "jar", "js", "json", "jsonl", "lua", "md", "mjs", "php", "pl", "py", "r", "rb", "sh",
    "toml", "ts", "txt", "yaml", "yml",
];

/// The error of expanding references.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExpandError {
    /// The environment lacks this variable.
    #[error("the environment has no variable {0} (`$${{{0}}}` stands for the text `${{{0}}}`)")]
    Missing(String),
    /// The variable's value is not UTF-8.
    #[error("the environment variable {0} is not UTF-8")]
    NotText(String),
    /// The value was hidden when the configuration was printed.
    #[error(
        "the value was left out when this configuration was printed: write it, or `${{NAME}}` for a variable of the environment"
    )]
    Hidden,
}

/// Known secrets, to be hidden in texts such as the output of a program or the response of a server.
///
/// ```
/// use grpo_files::Secrets;
///
/// let mut secrets = Secrets::of(&serde_json::json!({ "headers": { "Authorization": "Bearer abc-123-def" } }));
/// assert_eq!(secrets.hide("401: no user has the token abc-123-def"), "401: no user has the token (hidden)");
/// // `PATH` exists in every environment.
/// let path = secrets.expand("${PATH}")?;
/// assert_eq!(secrets.hide(&path), "(hidden)");
/// # Ok::<(), grpo_files::ExpandError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Secrets {
    known: BTreeSet<String>,
}

impl Secrets {
    /// Returns the secrets in `config`.
    pub fn of<T: Serialize>(config: &T) -> Self {
        // A configuration that cannot be serialised is never shown as text.
        serde_json::to_value(config).map(|mut value| redact(&mut value)).unwrap_or_default()
    }

    /// Returns `text` with `${NAME}` replaced by environment variables, whose values are then treated as secrets. `$${NAME}` stands for
    /// `${NAME}`; any other `$` is kept.
    ///
    /// # Errors
    /// [`ExpandError`].
    pub fn expand(&mut self, text: &str) -> Result<String, ExpandError> {
        if text.contains(HIDDEN) {
            return Err(ExpandError::Hidden);
        }
        let mut expanded = String::with_capacity(text.len());
        for part in parts(text) {
            match part {
                Part::Text(text) => expanded.push_str(text),
                Part::Escaped(reference) => expanded.push_str(reference),
                Part::Variable(name) => {
                    let value = std::env::var(name).map_err(|error| match error {
                        std::env::VarError::NotPresent => ExpandError::Missing(name.to_owned()),
                        std::env::VarError::NotUnicode(_) => ExpandError::NotText(name.to_owned()),
                    })?;
                    self.add(&value);
                    expanded.push_str(&value);
                }
            }
        }
        Ok(expanded)
    }

    /// Adds the secrets of `other`.
    pub fn extend(&mut self, other: Self) {
        self.known.extend(other.known);
    }

    /// Returns `text` with each secret replaced by [`HIDDEN`].
    pub fn hide(&self, text: &str) -> String {
        let mut longest_first: Vec<&String> =
            self.known.iter().filter(|secret| text.contains(secret.as_str())).collect();
        longest_first.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        longest_first.iter().fold(text.to_owned(), |text, secret| text.replace(secret.as_str(), HIDDEN))
    }

    /// Adds a value and its parts, which messages may quote.
    fn add(&mut self, secret: &str) {
        self.add_whole(secret);
        let separates = |c: char| c.is_whitespace() || matches!(c, ';' | ',' | '=' | '&' | '"' | '\'');
        for part in secret.split(separates).filter(|part| part.len() >= SHORTEST_PART) {
            self.add_whole(part);
        }
    }

    fn add_whole(&mut self, secret: &str) {
        let secret = secret.trim();
        if secret.len() < SHORTEST || secret == HIDDEN {
            return;
        }
        self.known.insert(secret.to_owned());
        // The value as quoted by JSON and Rust.
        let quoted = Value::from(secret).to_string();
        self.known.insert(quoted[1..quoted.len() - 1].to_owned());
        self.known.insert(secret.escape_debug().to_string());
    }

    /// Adds the literal parts of a value between its references.
    fn add_literals(&mut self, text: &str) {
        if is_reference(text) {
            return;
        }
        for part in parts(text) {
            if let Part::Text(text) | Part::Escaped(text) = part {
                self.add(text);
            }
        }
    }

    /// Adds a script argument (`sh -c "..."`) and those of its words that look like keys. Other words may appear in messages.
    fn add_script(&mut self, script: &str) {
        self.add_whole(script);
        let separates = |c: char| c.is_whitespace() || "=&;,:|<>()\"'`".contains(c);
        let mixed = |word: &&str| {
            word.contains(|c: char| c.is_ascii_digit()) && word.contains(|c: char| c.is_ascii_alphabetic())
        };
        for word in script.split(separates).filter(|word| word.len() >= SHORTEST_PART && !is_file(word)).filter(mixed) {
            self.add_whole(word);
        }
    }

    /// Adds `user:password` of an address as written, decoded, and as sent over HTTP.
    fn add_userinfo(&mut self, userinfo: &str) {
        let decoded = percent_decoded(userinfo);
        // The form of HTTP basic authentication.
        self.add_whole(&STANDARD.encode(&decoded));
        for text in [userinfo, &decoded] {
            self.add_whole(text);
            let password = text.split_once(':').map_or(text, |(_, password)| password);
            self.add_literals(password);
        }
    }
}

/// Replaces the secrets of a configuration by [`HIDDEN`] and returns them.
///
/// ```
/// let mut config = serde_json::json!({ "command": ["python3", "judge.py", "--key", "abc"], "url": "http://a:b@host/score?key=c" });
/// grpo_files::redact(&mut config);
/// let expected = serde_json::json!({ "command": ["python3", "judge.py", "--key", "(hidden)"], "url": "http://(hidden)@host/score?(hidden)" });
/// assert_eq!(config, expected);
/// ```
pub fn redact(config: &mut Value) -> Secrets {
    let mut secrets = Secrets::default();
    walk(config, ValueKind::Plain, &mut secrets);
    secrets
}

/// Returns `config` without its secrets, and `true` if it has any.
///
/// # Errors
/// Returns an error if serde cannot serialise `config` or deserialise the result.
pub fn redacted<T: Serialize + DeserializeOwned>(config: &T) -> Result<(T, bool), serde_json::Error> {
    let whole = serde_json::to_value(config)?;
    let mut shown = whole.clone();
    redact(&mut shown);
    let has_secrets = shown != whole;
    Ok((serde_json::from_value(shown)?, has_secrets))
}

/// Replaces the secrets in the value of the dotted `key` of a configuration.
pub fn redact_at(key: &str, value: &mut Value) {
    let place = key.split('.').fold(ValueKind::Plain, |place, part| place.of(part));
    walk(value, place, &mut Secrets::default());
}

/// Returns an address without user, password, query and fragment.
///
/// ```
/// assert_eq!(grpo_files::redact_url("http://me:pw@host:80/a@b?key=c"), "http://(hidden)@host:80/a@b?(hidden)");
/// ```
pub fn redact_url(url: &str) -> String {
    shown_url(url, &mut Secrets::default())
}

#[derive(Clone, Copy)]
enum ValueKind {
    Plain,
    /// Every value is secret.
    Secret,
    /// A program and its arguments.
    Command,
    /// An address, even if it has another form.
    Url,
}

impl ValueKind {
    fn of(self, key: &str) -> Self {
        let key = key.to_lowercase().replace('-', "_");
        match key.as_str() {
            _ if matches!(self, Self::Secret) => self,
            "headers" | "env" => Self::Secret,
            "command" => Self::Command,
            _ if is_secret(&key) => Self::Secret,
            _ if key == "url" || key.ends_with("_url") => Self::Url,
            _ => Self::Plain,
        }
    }
}

/// Returns `true` if the key names a credential. `max_tokens`, `pad_token` and the like are not credentials.
fn is_secret(key: &str) -> bool {
    let ends = ["api_key", "password", "secret", "authorization", "auth_token", "access_token", "hf_token", "bearer"];
    key == "token" || key == "cookie" || ends.iter().any(|end| key.ends_with(end))
}

fn walk(value: &mut Value, place: ValueKind, secrets: &mut Secrets) {
    match value {
        Value::Object(map) => map.iter_mut().for_each(|(key, value)| walk(value, place.of(key), secrets)),
        Value::Array(list) if matches!(place, ValueKind::Command) => command(list, secrets),
        Value::Array(list) => list.iter_mut().for_each(|value| walk(value, place, secrets)),
        Value::String(text) => {
            let shown = match place {
                ValueKind::Secret => shown_secret(text, secrets),
                ValueKind::Command => shown_program(text, secrets),
                ValueKind::Url => shown_url(text, secrets),
                ValueKind::Plain if is_url(text) => shown_url(text, secrets),
                ValueKind::Plain => return,
            };
            *text = shown;
        }
        Value::Number(_) | Value::Bool(_) if matches!(place, ValueKind::Secret) => *value = HIDDEN.into(),
        Value::Null | Value::Number(_) | Value::Bool(_) => {}
    }
}

fn command(list: &mut [Value], secrets: &mut Secrets) {
    let mut after_m = false;
    for (index, value) in list.iter_mut().enumerate() {
        let Value::String(text) = value else {
            walk(value, ValueKind::Secret, secrets);
            continue;
        };
        let is_module = std::mem::replace(&mut after_m, text == "-m");
        let shown = match index {
            0 => shown_program(text, secrets),
            _ if is_module && is_name(text) => continue,
            _ => shown_argument(text, secrets),
        };
        *text = shown;
    }
}

fn shown_secret(text: &str, secrets: &mut Secrets) -> String {
    secrets.add_literals(text);
    if text.is_empty() || is_reference(text) { text.to_owned() } else { HIDDEN.to_owned() }
}

/// Returns the name of a program without arguments that were written into the same string after a blank.
fn shown_program(text: &str, secrets: &mut Secrets) -> String {
    match text.split_once(char::is_whitespace) {
        Some((program, arguments)) if !arguments.trim().is_empty() => {
            secrets.add_literals(arguments);
            format!("{program} {HIDDEN}")
        }
        _ if is_url(text) => shown_url(text, secrets),
        _ => text.to_owned(),
    }
}

fn shown_argument(text: &str, secrets: &mut Secrets) -> String {
    let is_short = text.len() <= 2 && text.starts_with('-');
    if is_short || is_file(text) {
        return text.to_owned();
    }
    match text.split_once('=') {
        Some((name, value)) if is_option(name) => format!("{name}={}", shown_secret(value, secrets)),
        None if is_option(text) => text.to_owned(),
        _ if is_url(text) => shown_url(text, secrets),
        _ if text.contains(char::is_whitespace) => {
            secrets.add_script(text);
            HIDDEN.to_owned()
        }
        _ => shown_secret(text, secrets),
    }
}

/// Returns `true` if an argument is an option, such as `--api-key`.
fn is_option(text: &str) -> bool {
    let name = text.strip_prefix("--").unwrap_or_default();
    name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || "-_".contains(c))
}

/// Returns `true` if an argument is a module name, such as `my_rewards.judge`.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "_.".contains(c))
}

/// Returns `true` if an argument is a file name, such as `rewards/judge.py`, or names functions of a file, such as `judge.py:score,length`.
fn is_file(text: &str) -> bool {
    let is_function = |name: &str| !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit()) && is_name(name);
    let (text, functions) = text.split_once(':').map_or((text, None), |(file, names)| (file, Some(names)));
    if functions.is_some_and(|names| !names.split(',').all(is_function)) {
        return false;
    }
    let legal = |c: char| c.is_alphanumeric() || "/._-~".contains(c);
    let extension = text.rsplit_once('.').map(|(_, extension)| extension.to_lowercase()).unwrap_or_default();
    text.chars().all(legal) && FILES.contains(&extension.as_str())
}

fn is_url(text: &str) -> bool {
    let Some((scheme, _)) = text.split_once("://") else { return false };
    !text.contains(char::is_whitespace)
        && !scheme.is_empty()
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+.-".contains(c))
}

fn shown_url(text: &str, secrets: &mut Secrets) -> String {
    let (scheme, rest) = text.find("://").map_or(("", text), |at| text.split_at(at + 3));
    let (before, tail) = rest.find(['?', '#']).map_or((rest, ""), |at| rest.split_at(at));
    let (authority, path) = before.find('/').map_or((before, ""), |at| before.split_at(at));
    let authority = match authority.rsplit_once('@') {
        Some((userinfo, host)) => {
            let password = userinfo.split_once(':').map_or(userinfo, |(_, password)| password);
            if is_reference(password) {
                authority.to_owned()
            } else {
                secrets.add_userinfo(userinfo);
                format!("{HIDDEN}@{host}")
            }
        }
        // `user:pass` cut by an unencoded `/`, `?` or `#` of the password.
        None if !is_host(authority) => {
            secrets.add_userinfo(rest.rsplit_once('@').map_or(rest, |(userinfo, _)| userinfo));
            return format!("{scheme}{HIDDEN}");
        }
        None => authority.to_owned(),
    };
    let mut shown = format!("{scheme}{authority}{path}");
    if let Some(mark) = tail.chars().next() {
        let values: Vec<&str> = tail
            .split(['?', '#', '&'])
            .skip(1)
            .map(|pair| pair.split_once('=').map_or(pair, |(_, value)| value))
            .collect();
        if values.iter().all(|value| value.is_empty() || is_reference(value)) {
            shown.push_str(tail);
        } else {
            for value in values {
                secrets.add_literals(value);
                secrets.add_literals(&percent_decoded(value));
            }
            shown.push(mark);
            shown.push_str(HIDDEN);
        }
    }
    shown
}

/// Returns `true` if the text is a host with an optional port.
fn is_host(text: &str) -> bool {
    let port = text.rsplit_once(':').map_or("", |(_, port)| port);
    text.ends_with(']') || port.bytes().all(|byte| byte.is_ascii_digit()) || is_reference(port)
}

/// A part of a value: literal text, `$${NAME}` or `${NAME}`.
enum Part<'a> {
    Text(&'a str),
    /// `${NAME}`, written as `$${NAME}`.
    Escaped(&'a str),
    Variable(&'a str),
}

fn parts(text: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let (mut begin, mut from) = (0, 0);
    while let Some(at) = text[from..].find("${").map(|at| from + at) {
        let Some(length) = text[at + 2..].find('}') else { break };
        let (name, end) = (&text[at + 2..at + 2 + length], at + 3 + length);
        if !is_variable(name) {
            from = at + 2;
            continue;
        }
        let is_escaped = text[begin..at].ends_with('$');
        parts.push(Part::Text(&text[begin..at - usize::from(is_escaped)]));
        parts.push(if is_escaped { Part::Escaped(&text[at..end]) } else { Part::Variable(name) });
        (begin, from) = (end, end);
    }
    parts.push(Part::Text(&text[begin..]));
    parts
}

fn is_variable(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Returns `true` if a value consists of references to the environment and an optional authentication scheme.
fn is_reference(text: &str) -> bool {
    let (mut variables, mut literal) = (0, String::new());
    for part in parts(text) {
        match part {
            Part::Variable(_) => variables += 1,
            Part::Text(text) | Part::Escaped(text) => literal.push_str(text),
        }
    }
    let literal = literal.trim().to_lowercase();
    variables > 0 && matches!(literal.as_str(), "" | ":" | "basic" | "bearer" | "token")
}

fn percent_decoded(text: &str) -> String {
    let (bytes, mut decoded, mut at) = (text.as_bytes(), Vec::new(), 0);
    while at < bytes.len() {
        let code = bytes.get(at + 1..at + 3).and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()).filter(|_| bytes[at] == b'%') {
            Some(byte) => (decoded.push(byte), at += 3).0,
            None => (decoded.push(bytes[at]), at += 1).0,
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests;
