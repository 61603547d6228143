//! A connection of the server of the endpoint. The size of heads and bodies, and the time of a transfer, are limited.
//!
//! ```text
//! until the connection is closed, or silent for FIRST before an admitted request and for IDLE behind one:
//!     read a head of at most MAX_HEAD bytes
//!     admit it: a request without a valid key is refused before its body is read
//!     read a body of at most MAX_BODY bytes, with a length or in chunks
//!     answer, unless the client has closed the connection
//! ```

use super::events::Body;
use super::http::{Answer, Handler, Phase};
use super::request::ApiError;
use grpo_files::long_integers_as_digits;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

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
/// The time limit for the head of the first request of a connection.
const FIRST: Duration = Duration::from_secs(10);
/// The time limit for the next request of a connection that has sent an admitted one.
const IDLE: Duration = Duration::from_secs(600);

/// The first line and the headers of a request, as far as they matter.
pub(super) struct Head {
    pub(super) method: String,
    /// The path without its query.
    pub(super) path: String,
    /// The key of `Authorization: Bearer KEY`, or of `X-Api-Key`.
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

/// Answers the requests of a connection until it is closed. `set_phase` is called when it begins to wait for something else.
pub(super) fn serve(stream: TcpStream, handler: &dyn Handler, set_phase: &dyn Fn(Phase)) -> io::Result<()> {
    Connection { stream, received: Vec::new(), set_phase, is_admitted: false }.serve(handler)
}

struct Connection<'a> {
    stream: TcpStream,
    /// Bytes that were received and not used yet.
    received: Vec<u8>,
    set_phase: &'a dyn Fn(Phase),
    /// `true` if one of its requests was admitted.
    is_admitted: bool,
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
                let limits = [FIRST, TRANSFER].map(|limit| limit.as_secs());
                let message = format!(
                    "the request did not arrive within {} seconds, its head within {} seconds on a new connection",
                    limits[1], limits[0]
                );
                Self::Refused(ApiError::new(408, message))
            }
            _ => Self::Closed,
        }
    }
}

impl Connection<'_> {
    fn serve(mut self, handler: &dyn Handler) -> io::Result<()> {
        self.stream.set_nodelay(true)?;
        self.stream.set_write_timeout(Some(TRANSFER))?;
        let first = Instant::now() + FIRST;
        loop {
            let limit = if self.is_admitted { Instant::now() + IDLE } else { first };
            if self.received.is_empty() && !self.fill(limit)? {
                return Ok(());
            }
            let deadline = Instant::now() + TRANSFER;
            let mut head = None;
            let answer = match self.request(handler, deadline, first, &mut head) {
                Ok(body) => {
                    let Some(head) = &head else { return Ok(()) };
                    let answer = handler.answer(head, &body);
                    if self.is_closed()? {
                        return Ok(());
                    }
                    // The conversation may have ended in the meantime.
                    answer.and_then(|answer| handler.admit(head).map(|()| answer))
                }
                Err(Fault::Refused(error)) => {
                    let body = handler.error(head.as_ref(), &error);
                    self.respond(error.status, &Body::Json(body), false)?;
                    return self.drain(Instant::now() + TRANSFER);
                }
                Err(Fault::Closed) => return Ok(()),
            };
            let keeps_alive = head.as_ref().is_some_and(|head| head.keeps_alive);
            let (status, body, receipt) = match answer {
                Ok(Answer { body, receipt }) => (200, body, receipt),
                Err(error) => (error.status, Body::Json(handler.error(head.as_ref(), &error)), None),
            };
            self.respond(status, &body, keeps_alive)?;
            if let Some(receipt) = receipt {
                let _ = receipt.send(true);
            }
            if !keeps_alive {
                return self.drain(Instant::now() + TRANSFER);
            }
            (self.set_phase)(Phase::Idle);
        }
    }

    /// Reads the head of a request, and the body if the handler admits it. `first` is the deadline of the head of the first one.
    fn request(
        &mut self,
        handler: &dyn Handler,
        deadline: Instant,
        first: Instant,
        head: &mut Option<Head>,
    ) -> Result<Vec<u8>, Fault> {
        let found = self.head(if self.is_admitted { deadline } else { first })?;
        let head = &*head.insert(found);
        handler.admit(head).map_err(Fault::Refused)?;
        self.is_admitted = true;
        (self.set_phase)(Phase::Busy);
        if let Length::Known(length) = head.length
            && length > MAX_BODY
        {
            return Err(too_large(length));
        }
        if head.expects_continue {
            self.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        match head.length {
            Length::Known(length) => self.take(length, deadline),
            Length::Chunked => self.chunks(deadline),
        }
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

    fn respond(&mut self, status: u16, body: &Body, keeps_alive: bool) -> io::Result<()> {
        let (kind, body) = match body {
            Body::Json(body) => ("application/json", &long_integers_as_digits(body.to_string())),
            Body::Events(events) => ("text/event-stream", events),
        };
        let (reason, length) = (if status == 200 { "OK" } else { "Refused" }, body.len());
        let connection = if keeps_alive { "keep-alive" } else { "close" };
        let response = format!(
            "HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nCache-Control: no-store\r\nContent-Length: {length}\r\nConnection: \
             {connection}\r\n\r\n{body}"
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
        let key = match key {
            // As Anthropic's SDK sends it.
            None => header("X-Api-Key")?,
            key => key,
        };
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
