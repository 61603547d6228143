//! A server of HTTP/1.1 for agents: one thread per connection, which waits while the policy samples. The number of connections, the size of heads
//! and bodies, and the time of a transfer are limited, and dropping the server closes the port and all connections.
//!
//! ```text
//! accept, unless MAX_CONNECTIONS are open
//! until the connection is closed, or silent for IDLE:
//!     read a head of at most MAX_HEAD bytes
//!     admit it: a request without a valid key is refused before its body is read
//!     read a body of at most MAX_BODY bytes, with a length or in chunks
//!     answer, unless the client has closed the connection
//! ```

use super::openai::ApiError;
use serde_json::Value;
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The maximum number of open connections. Further ones wait until another is closed.
const MAX_CONNECTIONS: usize = 512;
/// The maximum size of a head in bytes.
const MAX_HEAD: usize = 1 << 14;
/// The maximum number of headers.
const MAX_HEADERS: usize = 64;
/// The maximum size of a body in bytes.
pub(super) const MAX_BODY: usize = 8 << 20;
/// The maximum number of bytes that are read after a refusal. A client that still sends its body would not read the refusal otherwise.
const MAX_DRAINED: usize = 64 << 20;
/// The time limit for receiving a request, and for sending a response.
const TRANSFER: Duration = Duration::from_secs(30);
/// The time limit for the next request of a connection.
const IDLE: Duration = Duration::from_secs(600);
/// The pause after a failed `accept`, such as without a free file descriptor.
const PAUSE: Duration = Duration::from_millis(10);

/// The first line and the headers of a request, as far as they matter.
pub(super) struct Head {
    pub(super) method: String,
    /// The path without its query.
    pub(super) path: String,
    /// The key of `Authorization: Bearer KEY`.
    pub(super) key: Option<String>,
    length: Length,
    keeps_alive: bool,
    expects_continue: bool,
}

/// The length of a body.
#[derive(Clone, Copy)]
enum Length {
    Known(usize),
    Chunked,
}

/// The functions of a server.
pub(super) trait Handler: Send + Sync {
    /// Admits a request, before its body is read.
    fn admit(&self, head: &Head) -> Result<(), ApiError>;

    /// Answers a request that was admitted.
    fn answer(&self, head: &Head, body: &[u8]) -> Result<Answer, ApiError>;
}

/// The answer to a request.
pub(super) struct Answer {
    pub(super) body: Value,
    /// Receives `true` when the whole response was written to a client that waits for it. Without that, it is disconnected.
    pub(super) receipt: Option<Sender<bool>>,
}

impl From<Value> for Answer {
    fn from(body: Value) -> Self {
        Self { body, receipt: None }
    }
}

/// A server, which ends when it is dropped.
pub(super) struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    handler: Arc<dyn Handler>,
    connections: Mutex<Connections>,
    closed: Condvar,
}

#[derive(Default)]
struct Connections {
    has_ended: bool,
    next: u64,
    open: HashMap<u64, TcpStream>,
}

impl Server {
    /// Starts a server.
    pub(super) fn start(listener: TcpListener, handler: Arc<dyn Handler>) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared { handler, connections: Mutex::default(), closed: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        let acceptor =
            std::thread::Builder::new().name("endpoint".into()).spawn(move || accept(&listener, &of_thread))?;
        Ok(Self { address, shared, acceptor: Some(acceptor) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut connections = self.shared.lock();
        connections.has_ended = true;
        for stream in connections.open.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(connections);
        self.shared.closed.notify_all();
        // `accept` returns with this connection.
        let host = if self.address.ip().is_unspecified() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { self.address.ip() };
        let woken = TcpStream::connect_timeout(&SocketAddr::new(host, self.address.port()), Duration::from_secs(1));
        if let (Ok(_), Some(acceptor)) = (woken, self.acceptor.take()) {
            let _ = acceptor.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        let mut connections = shared.lock();
        while connections.open.len() >= MAX_CONNECTIONS && !connections.has_ended {
            connections = shared.closed.wait(connections).unwrap_or_else(PoisonError::into_inner);
        }
        drop(connections);
        let accepted = listener.accept();
        let mut connections = shared.lock();
        if connections.has_ended {
            return;
        }
        let Ok((stream, kept)) = accepted.and_then(|(stream, _)| Ok((stream.try_clone()?, stream))) else {
            drop(connections);
            std::thread::sleep(PAUSE);
            continue;
        };
        let number = connections.next;
        connections.next += 1;
        connections.open.insert(number, kept);
        drop(connections);
        let of_thread = Arc::clone(shared);
        let serve = move || {
            // A connection that fails is closed; its client sees that.
            let _ = Connection { stream, received: Vec::new() }.serve(&*of_thread.handler);
            of_thread.lock().open.remove(&number);
            of_thread.closed.notify_all();
        };
        if std::thread::Builder::new().name("endpoint".into()).spawn(serve).is_err() {
            shared.lock().open.remove(&number);
        }
    }
}

struct Connection {
    stream: TcpStream,
    /// Bytes that were received and not used yet.
    received: Vec<u8>,
}

/// The reason why a request cannot be read.
enum Fault {
    /// The client is answered, and the connection is closed.
    Refused(ApiError),
    /// The connection is closed.
    Closed,
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                let message = format!("the request did not arrive within {} seconds", TRANSFER.as_secs());
                Self::Refused(ApiError::new(408, message))
            }
            _ => Self::Closed,
        }
    }
}

impl Connection {
    /// Answers requests until the connection is closed.
    fn serve(mut self, handler: &dyn Handler) -> io::Result<()> {
        self.stream.set_nodelay(true)?;
        self.stream.set_write_timeout(Some(TRANSFER))?;
        loop {
            if self.received.is_empty() && !self.fill(Instant::now() + IDLE)? {
                return Ok(());
            }
            let deadline = Instant::now() + TRANSFER;
            let (answer, keeps_alive) = match self.request(handler, deadline) {
                Ok((head, body)) => {
                    let answer = handler.answer(&head, &body);
                    if self.is_closed()? {
                        return Ok(());
                    }
                    // The conversation may have ended in the meantime.
                    (answer.and_then(|answer| handler.admit(&head).map(|()| answer)), head.keeps_alive)
                }
                Err(Fault::Refused(error)) => (Err(error), false),
                Err(Fault::Closed) => return Ok(()),
            };
            let (body, receipt) = match answer {
                Ok(Answer { body, receipt }) => (Ok(body), receipt),
                Err(error) => (Err(error), None),
            };
            self.respond(body, keeps_alive)?;
            if let Some(receipt) = receipt {
                let _ = receipt.send(true);
            }
            if !keeps_alive {
                return self.drain(Instant::now() + TRANSFER);
            }
        }
    }

    /// Reads a request that the handler admits.
    fn request(&mut self, handler: &dyn Handler, deadline: Instant) -> Result<(Head, Vec<u8>), Fault> {
        let head = self.head(deadline)?;
        handler.admit(&head).map_err(Fault::Refused)?;
        if let Length::Known(length) = head.length
            && length > MAX_BODY
        {
            return Err(too_large(length));
        }
        if head.expects_continue {
            self.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        let body = match head.length {
            Length::Known(length) => self.take(length, deadline)?,
            Length::Chunked => self.chunks(deadline)?,
        };
        Ok((head, body))
    }

    fn head(&mut self, deadline: Instant) -> Result<Head, Fault> {
        let bad =
            |what: String| Fault::Refused(ApiError::new(400, format!("a request of HTTP/1.1 was expected: {what}")));
        loop {
            let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
            let mut request = httparse::Request::new(&mut headers);
            match request.parse(&self.received) {
                Ok(httparse::Status::Complete(length)) if length <= MAX_HEAD => {
                    let head = Head::new(&request).map_err(bad)?;
                    self.received.drain(..length);
                    return Ok(head);
                }
                Ok(httparse::Status::Partial) if self.received.len() < MAX_HEAD => {}
                Ok(_) => {
                    let message = format!("the head of a request has at most {MAX_HEAD} bytes");
                    return Err(Fault::Refused(ApiError::new(431, message)));
                }
                Err(error) => return Err(bad(error.to_string())),
            }
            self.more(deadline)?;
        }
    }

    /// Reads a body in chunks.
    fn chunks(&mut self, deadline: Instant) -> Result<Vec<u8>, Fault> {
        let mut body = Vec::new();
        loop {
            let (line, size) = loop {
                match httparse::parse_chunk_size(&self.received) {
                    Ok(httparse::Status::Complete((line, size))) => {
                        break (line, usize::try_from(size).unwrap_or(usize::MAX));
                    }
                    Ok(httparse::Status::Partial) if self.received.len() < MAX_HEAD => self.more(deadline)?,
                    _ => return Err(Fault::Refused(ApiError::new(400, "the size of a chunk was expected"))),
                }
            };
            self.received.drain(..line);
            if size.saturating_add(body.len()) > MAX_BODY {
                return Err(too_large(size.saturating_add(body.len())));
            }
            if size == 0 {
                break;
            }
            body.append(&mut self.take(size, deadline)?);
            self.take(2, deadline)?;
        }
        // Headers behind the body, which are not read, end with an empty line.
        loop {
            match self.received.windows(2).position(|pair| pair == b"\r\n") {
                Some(at) => {
                    self.received.drain(..at + 2);
                    if at == 0 {
                        return Ok(body);
                    }
                }
                None if self.received.len() < MAX_HEAD => self.more(deadline)?,
                None => return Err(Fault::Refused(ApiError::new(431, "the headers behind the body are too long"))),
            }
        }
    }

    /// Takes `length` bytes.
    fn take(&mut self, length: usize, deadline: Instant) -> Result<Vec<u8>, Fault> {
        while self.received.len() < length {
            self.more(deadline)?;
        }
        let rest = self.received.split_off(length);
        Ok(std::mem::replace(&mut self.received, rest))
    }

    fn more(&mut self, deadline: Instant) -> Result<(), Fault> {
        if self.fill(deadline)? { Ok(()) } else { Err(Fault::Closed) }
    }

    /// Receives some bytes. Returns `false` if the client has closed the connection.
    fn fill(&mut self, deadline: Instant) -> io::Result<bool> {
        let mut bytes = [0; 1 << 14];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut bytes) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => {
                    let read = read?;
                    self.received.extend_from_slice(&bytes[..read]);
                    return Ok(read > 0);
                }
            }
        }
    }

    /// Returns `true` if the client has closed the connection, and nothing that it has sent is left. A client that only ends its side of the
    /// connection counts as one that no longer waits, as in other servers.
    fn is_closed(&self) -> io::Result<bool> {
        if !self.received.is_empty() {
            return Ok(false);
        }
        self.stream.set_nonblocking(true)?;
        let peeked = self.stream.peek(&mut [0]);
        self.stream.set_nonblocking(false)?;
        match peeked {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            peeked => Ok(peeked? == 0),
        }
    }

    fn respond(&mut self, answer: Result<Value, ApiError>, keeps_alive: bool) -> io::Result<()> {
        let (status, body) = match answer {
            Ok(body) => (200, body.to_string()),
            Err(error) => (error.status, error.body().to_string()),
        };
        let (reason, length) = (if status == 200 { "OK" } else { "Refused" }, body.len());
        let connection = if keeps_alive { "keep-alive" } else { "close" };
        let response = format!(
            "HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: {connection}\r\n\r\n{body}"
        );
        self.stream.write_all(response.as_bytes())
    }

    /// Closes the connection, and drops what the client still sends.
    fn drain(mut self, deadline: Instant) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)?;
        let mut drained = 0;
        while drained < MAX_DRAINED {
            self.received.clear();
            if !self.fill(deadline)? {
                break;
            }
            drained += self.received.len();
        }
        Ok(())
    }
}

fn too_large(found: usize) -> Fault {
    Fault::Refused(ApiError::new(413, format!("a body of at most {MAX_BODY} bytes was expected, got {found}")))
}

impl Head {
    fn new(request: &httparse::Request<'_, '_>) -> Result<Self, String> {
        let header = |name: &str| {
            let mut values = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
            let value = values.next().map(|header| String::from_utf8_lossy(header.value).trim().to_owned());
            match values.next() {
                None => Ok(value),
                Some(_) => Err(format!("it has the header {name} twice")),
            }
        };
        let length = match (header("Transfer-Encoding")?, header("Content-Length")?) {
            (None, None) => Length::Known(0),
            (None, Some(length)) => {
                Length::Known(length.parse().map_err(|_| format!("its Content-Length is `{length}`"))?)
            }
            (Some(coding), None) if coding.eq_ignore_ascii_case("chunked") => Length::Chunked,
            (Some(coding), _) => return Err(format!("its Transfer-Encoding is `{coding}`, with or without a length")),
        };
        let bearer = header("Authorization")?;
        let key = bearer.and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim().to_owned())
        });
        let connection = header("Connection")?.unwrap_or_default();
        let path = request.path.unwrap_or_default();
        Ok(Self {
            method: request.method.unwrap_or_default().to_owned(),
            path: path.split(['?', '#']).next().unwrap_or_default().to_owned(),
            key,
            length,
            keeps_alive: request.version == Some(1) && !connection.eq_ignore_ascii_case("close"),
            expects_continue: header("Expect")?.is_some_and(|value| value.eq_ignore_ascii_case("100-continue")),
        })
    }
}
