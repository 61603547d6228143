//! A server of HTTP/1.1 for agents: one thread per connection, which waits while the policy samples. Dropping the server closes the port and all
//! connections.
//!
//! ```text
//! accept, unless MAX_CONNECTIONS are being answered
//! close another connection if this one is too many: of MAX_STRANGERS without an admitted request, the oldest one of the peer that has most of
//!     them; of MAX_CONNECTIONS, a stranger, or else the one that has waited longest for its next request
//! serve the connection (connection.rs)
//! ```

use super::connection::{self, Head};
use super::events::Body;
use super::request::ApiError;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The maximum number of open connections.
const MAX_CONNECTIONS: usize = 512;
/// The maximum number of connections that have not sent an admitted request.
const MAX_STRANGERS: usize = 128;
/// The pause after a failed `accept`, such as without a free file descriptor.
const PAUSE: Duration = Duration::from_millis(10);

/// The functions of a server.
pub(super) trait Handler: Send + Sync {
    /// Admits a request, before its body is read.
    fn admit(&self, head: &Head) -> Result<(), ApiError>;

    /// Answers a request that was admitted.
    fn answer(&self, head: &Head, body: &[u8]) -> Result<Answer, ApiError>;

    /// Returns the body of an error; `head` is that of its request, if it could be read.
    fn error(&self, head: Option<&Head>, error: &ApiError) -> Value;
}

/// The answer to a request.
pub(super) struct Answer {
    pub(super) body: Body,
    /// Receives `true` when the whole response was written to a client that waits for it. Without that, it is disconnected.
    pub(super) receipt: Option<Sender<bool>>,
}

impl From<Value> for Answer {
    fn from(body: Value) -> Self {
        Self { body: Body::Json(body), receipt: None }
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
    changed: Condvar,
}

#[derive(Default)]
struct Connections {
    has_ended: bool,
    next: u64,
    open: HashMap<u64, Open>,
    /// The number of connections that were closed before an admitted request.
    strangers: u64,
}

/// An open connection.
struct Open {
    stream: TcpStream,
    peer: IpAddr,
    phase: Phase,
    since: Instant,
}

/// What a connection waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its first request with a valid key.
    Stranger,
    /// The answer to a request.
    Busy,
    /// Its next request.
    Idle,
}

impl Connections {
    /// Returns the number of connections in a phase.
    fn count(&self, phase: Phase) -> usize {
        self.open.values().filter(|open| open.phase == phase).count()
    }

    /// Closes a connection if there are too many.
    fn make_room(&mut self) {
        let strangers = self.count(Phase::Stranger);
        let is_full = self.open.len() > MAX_CONNECTIONS;
        if strangers > MAX_STRANGERS || (is_full && strangers > 1) {
            let mut peers: BTreeMap<IpAddr, usize> = BTreeMap::new();
            for open in self.open.values().filter(|open| open.phase == Phase::Stranger) {
                *peers.entry(open.peer).or_default() += 1;
            }
            let most = peers.into_iter().max_by_key(|(_, count)| *count).map(|(peer, _)| peer);
            if let Some(peer) = most {
                self.close_oldest(|open| open.phase == Phase::Stranger && open.peer == peer);
                self.report(peer);
            }
        } else if is_full {
            self.close_oldest(|open| open.phase == Phase::Idle);
        }
    }

    fn close_oldest(&mut self, is_candidate: impl Fn(&Open) -> bool) {
        let candidates = self.open.iter().filter(|(_, open)| is_candidate(open));
        let oldest = candidates.min_by_key(|(number, open)| (open.since, **number)).map(|(number, _)| *number);
        if let Some(open) = oldest.and_then(|number| self.open.remove(&number)) {
            let _ = open.stream.shutdown(Shutdown::Both);
        }
    }

    /// Reports a connection that was closed before an admitted request.
    fn report(&mut self, peer: IpAddr) {
        self.strangers += 1;
        if self.strangers.is_power_of_two() {
            tracing::warn!(
                "rollout.endpoint has closed connections that sent no request with the key of a conversation ({} so far, the last one from \
                 {peer})",
                self.strangers
            );
        }
    }
}

impl Server {
    /// Starts a server.
    pub(super) fn start(listener: TcpListener, handler: Arc<dyn Handler>) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared { handler, connections: Mutex::default(), changed: Condvar::new() });
        let thread_shared = Arc::clone(&shared);
        let acceptor =
            std::thread::Builder::new().name("endpoint".into()).spawn(move || accept(&listener, &thread_shared))?;
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
        for open in connections.open.values() {
            let _ = open.stream.shutdown(Shutdown::Both);
        }
        drop(connections);
        self.shared.changed.notify_all();
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
        while connections.count(Phase::Busy) >= MAX_CONNECTIONS && !connections.has_ended {
            connections = shared.changed.wait(connections).unwrap_or_else(PoisonError::into_inner);
        }
        drop(connections);
        let accepted = listener.accept();
        let mut connections = shared.lock();
        if connections.has_ended {
            return;
        }
        let Ok((stream, kept, peer)) = accepted.and_then(|(stream, peer)| Ok((stream.try_clone()?, stream, peer.ip())))
        else {
            drop(connections);
            std::thread::sleep(PAUSE);
            continue;
        };
        let number = connections.next;
        connections.next += 1;
        connections.open.insert(number, Open { stream: kept, peer, phase: Phase::Stranger, since: Instant::now() });
        connections.make_room();
        drop(connections);
        let thread_shared = Arc::clone(shared);
        let serve = move || {
            let set_phase = |phase: Phase| {
                if let Some(open) = thread_shared.lock().open.get_mut(&number) {
                    (open.phase, open.since) = (phase, Instant::now());
                }
                thread_shared.changed.notify_all();
            };
            // A connection that fails is closed; its client sees that.
            let served = connection::serve(stream, &*thread_shared.handler, &set_phase);
            let is_late = served.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
            let mut connections = thread_shared.lock();
            let open = connections.open.remove(&number);
            if is_late && open.is_some_and(|open| open.phase == Phase::Stranger) {
                connections.report(peer);
            }
            drop(connections);
            thread_shared.changed.notify_all();
        };
        if std::thread::Builder::new().name("endpoint".into()).spawn(serve).is_err() {
            shared.lock().open.remove(&number);
        }
    }
}
