//! GET requests to the hub, with token, redirects, ranges and time-outs.

use super::Hub;
use std::io::Read;
use std::time::{Duration, Instant};
use ureq::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, LOCATION, RANGE,
};
use ureq::http::{HeaderMap, HeaderName, HeaderValue, Uri};

/// The limit of redirects per request.
const MAX_REDIRECTS: usize = 10;
/// The minimum transfer rate in bytes per second; a slower one counts as a stall.
const MIN_RATE: u64 = 1024;
/// The read size in bytes.
const CHUNK: usize = 1 << 16;

/// The failure of a request or a download.
#[derive(Debug)]
pub(super) enum Failure {
    /// The connection broke off, or the server is overloaded. Another attempt may succeed.
    Broken(String),
    /// The server sent nothing, or less than the minimum rate, for the duration of the time-out.
    Stalled(String),
    /// An error status.
    Status(u16),
    /// An error that another attempt cannot fix.
    Final(String),
}

/// A client of one hub.
pub(super) struct Client {
    endpoint: Uri,
    token: Option<HeaderValue>,
    agent: ureq::Agent,
    /// For the listing of a model, and the size and the ETag of a file.
    pub(super) metadata: Timeout,
    /// For the content of a file.
    pub(super) content: Timeout,
}

/// A time-out, and the environment variable that sets it.
#[derive(Clone, Copy)]
pub(super) struct Timeout {
    limit: Duration,
    variable: &'static str,
}

/// A response that is neither a redirect nor an error: 200, 206, or 416 for a range beyond the file.
pub(super) struct Answer {
    pub(super) status: u16,
    /// The headers of the last response.
    headers: HeaderMap,
    /// The headers of the redirects before it.
    redirects: Vec<HeaderMap>,
    body: ureq::Body,
    /// The scheme and host that sent the body.
    host: String,
    timeout: Timeout,
}

/// The range of a file in a response (`Content-Range`).
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ContentRange {
    /// The index of the first byte; `None` for a range beyond the file.
    pub(super) start: Option<u64>,
    /// The size of the whole file, if known.
    pub(super) total: Option<u64>,
}

impl Client {
    pub(super) fn new(hub: &Hub) -> Result<Self, Failure> {
        let endpoint: Option<Uri> = hub.endpoint.parse().ok().filter(is_http);
        let endpoint = endpoint.ok_or_else(|| {
            let found = without_secrets(&hub.endpoint);
            Failure::Final(format!("HF_ENDPOINT: expected http://HOST or https://HOST, got {found:?}"))
        })?;
        let token = hub.token.as_ref().map(|token| {
            let mut value = HeaderValue::try_from(format!("Bearer {token}"))
                .map_err(|_| Failure::Final("HF_TOKEN: expected printable ASCII characters".into()))?;
            value.set_sensitive(true);
            Ok(value)
        });
        let metadata = Timeout { limit: hub.etag_timeout, variable: "HF_HUB_ETAG_TIMEOUT" };
        let content = Timeout { limit: hub.download_timeout, variable: "HF_HUB_DOWNLOAD_TIMEOUT" };
        if let Some(Timeout { variable, .. }) = [metadata, content].iter().find(|timeout| timeout.limit.is_zero()) {
            return Err(Failure::Final(format!("{variable}: expected a number of seconds above 0")));
        }
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // `get` follows redirects and decides for each host whether to send the token.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("grpo/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Ok(Self { endpoint, token: token.transpose()?, agent, metadata, content })
    }

    /// Returns the endpoint for messages, without user name and password.
    pub(super) fn shown(&self) -> String {
        shown(&self.endpoint) + self.endpoint.path().trim_end_matches('/')
    }

    /// Requests `path` of the endpoint, follows redirects and returns the final response. The token is only sent to the endpoint's scheme, host
    /// and port.
    pub(super) fn get(&self, path: &str, range: Option<&str>, timeout: Timeout) -> Result<Answer, Failure> {
        let limit = Some(timeout.limit);
        let mut uri = format!("{}{path}", self.endpoint.to_string().trim_end_matches('/'))
            .parse::<Uri>()
            .map_err(|error| Failure::Final(format!("{path:?} is no path of an address: {error}")))?;
        let mut redirects = Vec::new();
        loop {
            let host = shown(&uri);
            let mut request = self
                .agent
                .get(uri.clone())
                .header(ACCEPT_ENCODING, "identity")
                .config()
                .timeout_resolve(limit)
                .timeout_connect(limit)
                .timeout_send_request(limit)
                .timeout_recv_response(limit)
                .timeout_per_read(limit)
                .build();
            if let Some(token) = self.token.as_ref().filter(|_| origin(&uri) == origin(&self.endpoint)) {
                request = request.header(AUTHORIZATION, token);
            }
            if let Some(range) = range {
                request = request.header(RANGE, range);
            }
            let response = request.call().map_err(|error| failure(error, &host, timeout))?;
            let (parts, body) = response.into_parts();
            let status = parts.status.as_u16();
            match status {
                200 | 206 | 416 => {
                    let headers = parts.headers;
                    if let Some(encoding) = text(&headers, CONTENT_ENCODING).filter(|name| *name != "identity") {
                        let what =
                            format!("{host} sends content with the encoding {encoding:?}, which was not asked for");
                        return Err(Failure::Final(what));
                    }
                    return Ok(Answer { status, headers, redirects, body, host, timeout });
                }
                301 | 302 | 303 | 307 | 308 => {}
                429 | 500.. => return Err(Failure::Broken(format!("{host} answers with status {status}"))),
                _ => return Err(Failure::Status(status)),
            }
            if redirects.len() == MAX_REDIRECTS {
                return Err(Failure::Final(format!("{host} redirects more than {MAX_REDIRECTS} times")));
            }
            uri = target(&uri, text(&parts.headers, LOCATION)).map_err(Failure::Final)?;
            redirects.push(parts.headers);
        }
    }
}

impl Answer {
    /// Returns the value of a header from the first response that has it, starting with the first redirect, because the hub describes a file in
    /// the redirect to its storage host.
    pub(super) fn first(&self, name: &'static str) -> Option<&str> {
        let name = HeaderName::from_static(name);
        self.redirects.iter().chain([&self.headers]).find_map(|headers| text(headers, name.clone()))
    }

    /// Returns `ETag` of the last response.
    pub(super) fn etag(&self) -> Option<&str> {
        text(&self.headers, ETAG)
    }

    /// Returns `Content-Length` of the last response.
    pub(super) fn length(&self) -> Option<u64> {
        text(&self.headers, CONTENT_LENGTH)?.parse().ok()
    }

    /// Returns `Content-Range` of the last response.
    pub(super) fn content_range(&self) -> Option<ContentRange> {
        content_range(text(&self.headers, CONTENT_RANGE)?)
    }

    /// Returns the scheme and host that sent the response.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Passes the body to `write` and returns its number of bytes. Reading stops at `limit` + 1 bytes.
    ///
    /// # Errors
    /// [`Failure::Stalled`] if the rate is below [`MIN_RATE`] for the duration of the time-out; [`Failure::Broken`] if the connection
    /// fails; the errors of `write`.
    pub(super) fn read(self, limit: u64, mut write: impl FnMut(&[u8]) -> Result<(), Failure>) -> Result<u64, Failure> {
        let Self { body, host, timeout, .. } = self;
        let mut reader = body.into_with_config().limit(u64::MAX).reader().take(limit.saturating_add(1));
        let mut chunk = vec![0; CHUNK];
        let (mut count, mut window) = (0, (Instant::now(), 0));
        loop {
            let read = match reader.read(&mut chunk) {
                Ok(0) => return Ok(count),
                Ok(read) => read,
                Err(error) => {
                    let error = match ureq::Error::from(error) {
                        ureq::Error::Io(error) => {
                            Failure::Broken(format!("the connection to {host} broke off: {error}"))
                        }
                        other => failure(other, &host, timeout),
                    };
                    return Err(error);
                }
            };
            write(&chunk[..read])?;
            count += read as u64;
            window.1 += read as u64;
            let elapsed = window.0.elapsed();
            if elapsed >= timeout.limit {
                if (window.1 as f64) < MIN_RATE as f64 * elapsed.as_secs_f64() {
                    return Err(stalled(&host, timeout));
                }
                window = (Instant::now(), 0);
            }
        }
    }
}

fn failure(error: ureq::Error, host: &str, timeout: Timeout) -> Failure {
    use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    match error {
        ureq::Error::Timeout(_) => stalled(host, timeout),
        ureq::Error::Io(error)
            if [BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof].contains(&error.kind()) =>
        {
            Failure::Broken(format!("the connection to {host} broke off: {error}"))
        }
        error => Failure::Final(format!("{host} cannot be read from: {error}")),
    }
}

fn stalled(host: &str, timeout: Timeout) -> Failure {
    Failure::Stalled(format!(
        "{host} sent less than {MIN_RATE} bytes per second for {} s, which is the limit ({} in seconds raises it)",
        timeout.limit.as_secs_f64(),
        timeout.variable
    ))
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

fn is_http(uri: &Uri) -> bool {
    matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some_and(|host| !host.is_empty())
}

/// Returns scheme, host and port of an address.
fn origin(uri: &Uri) -> (String, String, u16) {
    let scheme = uri.scheme_str().unwrap_or_default().to_ascii_lowercase();
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    (scheme, uri.host().unwrap_or_default().to_ascii_lowercase(), port)
}

/// Returns scheme, host and port for messages. Path and query are left out because they may contain signatures of file stores.
fn shown(uri: &Uri) -> String {
    let port = uri.port_u16().map_or_else(String::new, |port| format!(":{port}"));
    format!("{}://{}{port}", uri.scheme_str().unwrap_or_default(), uri.host().unwrap_or_default())
}

/// Returns an invalid address without a possible password.
fn without_secrets(address: &str) -> &str {
    let address = address.rsplit('@').next().unwrap_or_default();
    address.split(['?', '#']).next().unwrap_or_default()
}

/// Returns the target of a redirect from `base`.
fn target(base: &Uri, location: Option<&str>) -> Result<Uri, String> {
    let host = shown(base);
    let location = location.ok_or_else(|| format!("{host} redirects without saying where to"))?;
    let scheme = base.scheme_str().unwrap_or_default();
    let absolute = match location {
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => {
            format!("{scheme}://{}{location}", base.authority().map_or("", |authority| authority.as_str()))
        }
        _ => location.to_owned(),
    };
    let uri = absolute.parse::<Uri>().ok().filter(is_http);
    let uri = uri.ok_or_else(|| format!("{host} redirects to something other than an address of HTTP"))?;
    if base.scheme_str() == Some("https") && uri.scheme_str() != Some("https") {
        return Err(format!("{host} redirects to {}, which is not encrypted", shown(&uri)));
    }
    Ok(uri)
}

/// Parses `bytes FIRST-LAST/TOTAL`, where `*` stands for a missing or unknown value.
fn content_range(value: &str) -> Option<ContentRange> {
    let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let start = match range {
        "*" => None,
        range => Some(range.split_once('-')?.0.parse().ok()?),
    };
    let total = match total {
        "*" => None,
        total => Some(total.parse().ok()?),
    };
    Some(ContentRange { start, total })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_must_lead_to_http_addresses() {
        let base: Uri = "https://user:secret@hub.example:8443/a/b?c=d".parse().unwrap();
        let to = |location: &str| target(&base, Some(location)).map(|uri| uri.to_string());
        assert_eq!(to("/x?y=z").unwrap(), "https://user:secret@hub.example:8443/x?y=z");
        assert_eq!(to("//cdn.example/x").unwrap(), "https://cdn.example/x");
        assert_eq!(to("https://cdn.example/x").unwrap(), "https://cdn.example/x");
        assert!(to("http://hub.example:8443/x").unwrap_err().contains("not encrypted"));
        for other in ["", "*", "?", "x/y", "file:///etc/passwd", "ftp://hub.example/x", "https://", "http:///x"] {
            let error = to(other).unwrap_err();
            assert!(error.contains("https://hub.example:8443") && !error.contains("secret"), "{other}: {error}");
        }
        assert!(target(&base, None).unwrap_err().contains("without saying where to"));
    }

    #[test]
    fn origins_consist_of_scheme_host_and_port() {
        let of = |address: &str| origin(&address.parse().unwrap());
        assert_eq!(of("https://Hub.example/a"), of("https://hub.example:443/b?c"));
        let others = ["http://hub.example", "https://hub.example:444", "https://hub.example.org", "https://127.0.0.1"];
        for other in others {
            assert_ne!(of("https://hub.example"), of(other), "{other}");
        }
    }

    #[test]
    fn content_ranges_are_parsed() {
        let range = |start, total| Some(ContentRange { start, total });
        assert_eq!(content_range("bytes 5-9/10"), range(Some(5), Some(10)));
        assert_eq!(content_range("bytes 5-9/*"), range(Some(5), None));
        assert_eq!(content_range("bytes */0"), range(None, Some(0)));
        for other in ["5-9/10", "bytes 5/10", "bytes -9/10", "bytes 5-9/x", "items 1-2/3"] {
            assert_eq!(content_range(other), None, "{other}");
        }
    }
}
