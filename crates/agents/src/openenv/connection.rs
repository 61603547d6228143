//! WebSocket connections with a time limit for every question.

use super::message::Answer;
use crate::config::EnvironmentConfig;
use crate::error::{Result, check};
use grpo_files::{Secrets, long_integers_as_digits, redact_url};
use grpo_rewards::programs::{Stop, expand, parsed, seconds, shown};
use serde_json::{Value, json};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tungstenite::client::IntoClientRequest;
use tungstenite::error::CapacityError;
use tungstenite::http::header::{HeaderName, HeaderValue};
use tungstenite::http::uri::{Builder, Uri};
use tungstenite::protocol::{CloseFrame, WebSocketConfig};
use tungstenite::{Error, HandshakeError, Message, WebSocket};

/// The maximum length of a message of a server, in bytes.
pub(super) const MAX_MESSAGE: usize = 4 << 20;
/// The maximum length of everything that a server has not read yet, in bytes.
const MAX_QUESTIONS: usize = 64 << 20;
/// The size of the buffers of a connection, in bytes. A run has a connection for every conversation.
const BUFFER: usize = 8 << 10;
/// The maximum time for messages that have arrived between questions.
const PENDING: Duration = Duration::from_secs(10);
/// The time after which an idle connection is used, because networks drop connections that are silent for a minute or so.
const PING: Duration = Duration::from_secs(20);

/// The address of a server, and how to connect to it.
pub(super) struct Address {
    /// The address of the WebSocket, with the scheme `ws` or `wss`.
    uri: Uri,
    headers: Vec<(HeaderName, HeaderValue)>,
    /// The address as written in the configuration, for messages.
    pub(super) shown: String,
    /// Values that are hidden in messages, even if the server writes them.
    pub(super) secrets: Secrets,
    /// The time for an answer, including the connection.
    pub(super) timeout: Duration,
}

impl Address {
    /// Checks the address, headers and time limit of the environment in `section`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for an invalid value; [`crate::Error::Program`] for a missing environment variable.
    pub(super) fn new(section: &str, config: &EnvironmentConfig) -> Result<Self> {
        let key = |field: &str| format!("{section}.{field}");
        let timeout = seconds(&key("timeout"), config.timeout)?;
        let written = config.url.as_deref().unwrap_or_default();
        let (mut secrets, shown) = (Secrets::of(config), redact_url(written));
        let url = expand(&key("url"), written, &mut secrets)?;
        secrets.extend(Secrets::of(&json!({ "url": url })));
        let uri = web_socket(&url);
        let expected = "an address such as http://127.0.0.1:8000, with http://, https://, ws:// or wss://, and without user, password and query";
        check(uri.is_some(), &key("url"), expected, &shown)?;
        let uri = uri.unwrap_or_default();
        let is_possible = uri.scheme_str() == Some("ws") || cfg!(feature = "https");
        let expected = "an address with http:// or ws://, or a build with the feature `https` of grpo-cli";
        check(is_possible, &key("url"), expected, &shown)?;
        let mut headers = Vec::new();
        for (name, value) in &config.headers {
            let value = expand(&key(&format!("headers.{name}")), value, &mut secrets)?;
            let legal = HeaderName::try_from(name).ok().zip(HeaderValue::try_from(value).ok());
            check(legal.is_some(), &key("headers"), "names and values that HTTP allows", name)?;
            headers.extend(legal);
        }
        Ok(Self { uri, headers, shown, secrets, timeout })
    }

    /// Opens a connection until `deadline`.
    ///
    /// # Errors
    /// [`Stop::Broken`] if there is no server, or it refuses the connection.
    pub(super) fn connect(&self, deadline: Instant) -> Result<Connection, Stop> {
        let broken = |reason: String| Stop::Broken(format!("cannot connect: {}", shown(&reason, &self.secrets)));
        let limit = Limit(Arc::new(Mutex::new(Until { deadline, waits: true })));
        let stream = self.open(&limit).map_err(|error| broken(error.to_string()))?;
        let mut request = self.uri.clone().into_client_request().map_err(|error| broken(error.to_string()))?;
        for (name, value) in &self.headers {
            request.headers_mut().insert(name, value.clone());
        }
        let config = WebSocketConfig::default()
            .read_buffer_size(BUFFER)
            .write_buffer_size(0)
            .max_write_buffer_size(MAX_QUESTIONS)
            .max_message_size(Some(MAX_MESSAGE))
            .max_frame_size(Some(MAX_MESSAGE));
        match tungstenite::client::client_with_config(request, stream, Some(config)) {
            Ok((socket, _)) => Ok(Connection { socket, limit, lost: None, used: Instant::now() }),
            Err(HandshakeError::Failure(Error::Http(response))) => {
                let status = response.status();
                let fix = match status.is_redirection() {
                    true => ", and redirects are not followed: write the final address",
                    false => ", and no WebSocket: is it the address of an OpenEnv server?",
                };
                Err(broken(format!("the server answers with status {status}{fix}")))
            }
            Err(HandshakeError::Failure(error)) => Err(broken(self.reason(error))),
            // A stream with a deadline never asks to be called again.
            Err(HandshakeError::Interrupted(_)) => Err(broken("the handshake was interrupted".into())),
        }
    }

    fn open(&self, limit: &Limit) -> io::Result<Box<dyn Stream>> {
        let host = self.uri.host().unwrap_or_default().trim_matches(['[', ']']);
        let is_secure = self.uri.scheme_str() == Some("wss");
        let port = self.uri.port_u16().unwrap_or(if is_secure { 443 } else { 80 });
        let mut failed = io::Error::new(ErrorKind::NotFound, "the host has no address");
        for address in (host, port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, limit.left()?.0) {
                Ok(socket) => {
                    socket.set_nodelay(true)?;
                    let stream = Timed { socket, limit: limit.clone() };
                    return if is_secure { secure(host, stream) } else { Ok(Box::new(stream)) };
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// Returns the reason of an error, for messages.
    fn reason(&self, error: Error) -> String {
        match error {
            Error::Io(error) if error.kind() == ErrorKind::TimedOut => {
                format!("it has not answered in {} seconds, its timeout", self.timeout.as_secs_f64())
            }
            Error::Io(error) => error.to_string(),
            Error::Capacity(CapacityError::MessageTooLong { .. }) => {
                format!("expected messages of at most {MAX_MESSAGE} bytes, got more")
            }
            error => error.to_string(),
        }
    }

    /// Returns the beginning of a text of the server, without secrets.
    pub(super) fn show(&self, text: &str) -> String {
        shown(text, &self.secrets)
    }
}

/// Returns the address of the WebSocket of a server: the path `/ws`, as OpenEnv has it.
fn web_socket(url: &str) -> Option<Uri> {
    let url: Uri = url.parse().ok()?;
    let scheme = match url.scheme_str()? {
        "http" | "ws" => "ws",
        "https" | "wss" => "wss",
        _ => return None,
    };
    let (host, authority) = (url.host()?, url.authority()?);
    // An authority without a port is the host, unless it has a user.
    let has_port = authority.port_u16().is_some() || authority.as_str() == host;
    if host.is_empty() || !has_port || authority.as_str().contains('@') || url.query().is_some() {
        return None;
    }
    let path = url.path().trim_end_matches('/');
    let path = format!("{}/ws", path.strip_suffix("/ws").unwrap_or(path));
    Builder::new().scheme(scheme).authority(authority.clone()).path_and_query(path).build().ok()
}

/// A connection, with at most one question at a time.
pub(super) struct Connection {
    socket: WebSocket<Box<dyn Stream>>,
    limit: Limit,
    /// The reason why the connection is unusable.
    lost: Option<Stop>,
    /// The time of the last message.
    used: Instant,
}

impl Connection {
    /// Sends a question and returns the answer, a JSON value.
    ///
    /// # Errors
    /// [`Stop::Ended`] if the server has closed the connection; [`Stop::Broken`] for anything else. The connection is unusable then.
    pub(super) fn ask(&mut self, address: &Address, question: &Value, deadline: Instant) -> Result<Value, Stop> {
        self.read_pending(address);
        if let Some(lost) = self.lost.take() {
            return Err(lost);
        }
        self.limit.set(Until { deadline, waits: true });
        // A server that refuses a connection closes it after a message with the reason, which may come before the question.
        let sent = self.socket.send(Message::text(long_integers_as_digits(question.to_string())));
        let answer = match (self.read(address), sent) {
            (Err(Stop::Ended(_)), Err(error)) => Err(Stop::Ended(address.show(&address.reason(error)))),
            (answer, _) => answer,
        };
        self.used = Instant::now();
        answer
    }

    /// Answers the server's pings between questions, and sends one if the connection was silent for long.
    pub(super) fn keep_alive(&mut self, address: &Address) {
        self.read_pending(address);
        if self.lost.is_none() && self.used.elapsed() > PING {
            // If it fails, the next read reports it.
            let _ = self.socket.send(Message::Ping(Default::default()));
            self.used = Instant::now();
        }
    }

    /// Reads the messages that have arrived, without waiting. Messages have no numbers: one that nobody has asked for would be taken for an
    /// answer, so that the connection is unusable then.
    fn read_pending(&mut self, address: &Address) {
        self.limit.set(Until { deadline: Instant::now() + PENDING, waits: false });
        while self.lost.is_none() {
            self.lost = match self.socket.read() {
                Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_)) => continue,
                Err(Error::Io(error)) if error.kind() == ErrorKind::WouldBlock => return,
                Ok(Message::Close(frame)) => Some(ended(frame, address)),
                // The reason for which a server refuses a connection may arrive before the first question.
                Ok(Message::Text(text)) => Some(Stop::Broken(match parsed(&text).map(|value| Answer::read(&value)) {
                    Ok(Ok(Answer::Refusal(refusal))) => refusal.text(address),
                    _ => format!("the server sends what nobody has asked for: `{}`", address.show(&text)),
                })),
                Err(Error::Io(error)) if error.kind() == ErrorKind::TimedOut => {
                    Some(Stop::Broken("the server does not stop sending".into()))
                }
                Ok(Message::Binary(_)) => Some(Stop::Broken("the server sends bytes that nobody has asked for".into())),
                Err(error) => Some(Stop::Ended(address.show(&address.reason(error)))),
            };
        }
    }

    fn read(&mut self, address: &Address) -> Result<Value, Stop> {
        loop {
            return match self.socket.read() {
                Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_)) => continue,
                Ok(Message::Text(text)) => parsed(&text).map_err(|error| {
                    let (text, error) = (address.show(&text), address.show(&error.to_string()));
                    Stop::Broken(format!("expected JSON, got `{text}` ({error})"))
                }),
                Ok(Message::Binary(bytes)) => {
                    Err(Stop::Broken(format!("expected a message of text, got {} bytes", bytes.len())))
                }
                Ok(Message::Close(frame)) => Err(ended(frame, address)),
                Err(error @ (Error::ConnectionClosed | Error::AlreadyClosed)) => {
                    Err(Stop::Ended(address.reason(error)))
                }
                Err(Error::Io(error)) if error.kind() != ErrorKind::TimedOut => {
                    Err(Stop::Ended(address.show(&error.to_string())))
                }
                Err(error) => Err(Stop::Broken(address.show(&address.reason(error)))),
            };
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.limit.set(Until { deadline: Instant::now() + PENDING, waits: false });
        // The server ends the session with the connection, too.
        let _ = self.socket.send(Message::text(json!({"type": "close"}).to_string()));
    }
}

fn ended(frame: Option<CloseFrame>, address: &Address) -> Stop {
    let how = frame.map(|frame| format!(" with code {} `{}`", frame.code, address.show(&frame.reason)));
    Stop::Ended(format!("the server has closed the connection{}", how.unwrap_or_default()))
}

/// The bytes below a WebSocket.
trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// The end of an operation.
#[derive(Clone, Copy)]
struct Until {
    deadline: Instant,
    /// `false` if the operation ends when nothing has arrived.
    waits: bool,
}

/// The limit of the current operation, shared by a connection and its stream.
#[derive(Clone)]
struct Limit(Arc<Mutex<Until>>);

impl Limit {
    fn set(&self, until: Until) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    /// Returns the time that is left, and `true` if the stream waits for it.
    fn left(&self) -> io::Result<(Duration, bool)> {
        let Until { deadline, waits } = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok((left, waits)) }
    }
}

/// A socket with a limit.
struct Timed {
    socket: TcpStream,
    limit: Limit,
}

impl Timed {
    fn call<T>(&self, work: impl FnOnce(&TcpStream) -> io::Result<T>) -> io::Result<T> {
        let (left, waits) = self.limit.left()?;
        self.socket.set_nonblocking(!waits)?;
        if waits {
            self.socket.set_read_timeout(Some(left))?;
            self.socket.set_write_timeout(Some(left))?;
        }
        // The end of a timeout is `WouldBlock` on Unix.
        let timed_out = |error: io::Error| match error.kind() {
            ErrorKind::WouldBlock if waits => ErrorKind::TimedOut.into(),
            _ => error,
        };
        work(&self.socket).map_err(timed_out)
    }
}

impl Read for Timed {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.call(|mut socket| socket.read(bytes))
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.call(|mut socket| socket.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns an encrypted stream to `host`.
#[cfg(feature = "https")]
fn secure(host: &str, stream: Timed) -> io::Result<Box<dyn Stream>> {
    use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto::ring, pki_types::ServerName};
    let roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let client = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    Ok(Box::new(StreamOwned::new(client, stream)))
}

#[cfg(not(feature = "https"))]
fn secure(_: &str, _: Timed) -> io::Result<Box<dyn Stream>> {
    Err(ErrorKind::Unsupported.into())
}
