//! How the processes of a run find each other.

use crate::error::{Error, Result};
use crate::follower::Follower;
use crate::leader::Leader;
use crate::link::{Failure, Link, failure_of, parse_failure, reason};
use crate::message::{self, PREAMBLE, Verb};
use crate::options::{DEFAULT_PORT, Options};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// The version of the protocol.
const PROTOCOL: u32 = 1;
/// The largest first message of a follower, in bytes.
const MAX_HELLO: usize = 1 << 20;
/// The time that a new connection has for its first message.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// The largest number of connections whose first message has not arrived.
const MAX_PENDING: usize = 256;
/// The interval at which the leader looks for new connections.
const POLL: Duration = Duration::from_millis(10);
/// The interval between two attempts of a follower.
const RETRY: Duration = Duration::from_millis(200);
/// The interval at which a waiting process says for which processes it waits.
const REPORT: Duration = Duration::from_secs(5);
/// The limit of one attempt of a follower.
const ATTEMPT: Duration = Duration::from_secs(5);
/// The number of facts, and the number of characters of a value, that an error shows.
const SHOWN: usize = 5;
const SHOWN_CHARS: usize = 100;

/// The first message of a follower.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    protocol: u32,
    #[serde(default)]
    num_processes: usize,
    process_id: usize,
    #[serde(default)]
    facts: BTreeMap<String, String>,
}

pub(crate) fn check(options: &Options) -> Result<()> {
    let refused =
        |option, expected: &str, found: String| Err(Error::Options { option, expected: expected.to_owned(), found });
    let Options { coordinator_address: address, num_processes, process_id, .. } = options;
    if *num_processes == 0 {
        return refused("num_processes", "1 or more", num_processes.to_string());
    }
    if process_id >= num_processes {
        let expected = format!("a number below num_processes, {num_processes}");
        return refused("process_id", &expected, process_id.to_string());
    }
    if address.is_empty() {
        return refused("coordinator_address", "HOST:PORT", "an empty text".to_owned());
    }
    for (option, limit) in
        [("initialization_timeout", options.initialization_timeout), ("heartbeat_timeout", options.heartbeat_timeout)]
    {
        if limit.is_zero() {
            return refused(option, "more than 0 seconds", "0".to_owned());
        }
    }
    Ok(())
}

/// Returns the addresses of `HOST:PORT`, or of `HOST` with the default port.
fn resolve(address: &str) -> io::Result<Vec<SocketAddr>> {
    let has_port = address
        .rsplit_once(':')
        .is_some_and(|(host, port)| port.parse::<u16>().is_ok() && (!host.contains(':') || host.ends_with(']')));
    let host = address.trim_start_matches('[').trim_end_matches(']');
    let found: Vec<SocketAddr> = match has_port {
        true => address.to_socket_addrs()?.collect(),
        false => (host, DEFAULT_PORT).to_socket_addrs()?.collect(),
    };
    match found.is_empty() {
        true => Err(io::Error::new(ErrorKind::NotFound, "the name has no address")),
        false => Ok(found),
    }
}

/// Returns the first difference of a follower from the leader, as the end of a sentence about the follower.
fn difference(hello: &Hello, options: &Options, facts: &BTreeMap<String, String>) -> Option<String> {
    let Hello { protocol, num_processes, process_id, facts: theirs } = hello;
    if *protocol != PROTOCOL {
        return Some(format!(
            "speaks version {protocol} of the protocol, and process 0 version {PROTOCOL}: start the same binary everywhere"
        ));
    }
    if *num_processes != options.num_processes {
        return Some(format!(
            "was started with num_processes {num_processes}, and process 0 with {}",
            options.num_processes
        ));
    }
    if !(1..options.num_processes).contains(process_id) {
        return Some(format!(
            "has an invalid process_id: expected 1 to {}, and 0 for the process that listens",
            options.num_processes - 1
        ));
    }
    let shown = |value: Option<&String>| match value {
        Some(value) => value.chars().take(SHOWN_CHARS).collect(),
        None => "nothing".to_owned(),
    };
    let names = facts.keys().chain(theirs.keys().filter(|name| !facts.contains_key(*name)));
    let different: Vec<&String> = names.filter(|name| facts.get(*name) != theirs.get(*name)).collect();
    if different.is_empty() {
        return None;
    }
    let list = different.iter().take(SHOWN).map(|name| {
        let name_shown: String = name.chars().take(SHOWN_CHARS).collect();
        format!("{name_shown} ({}, and {} at process 0)", shown(theirs.get(*name)), shown(facts.get(*name)))
    });
    let more = match different.len().checked_sub(SHOWN) {
        Some(more @ 1..) => format!(" and {more} more"),
        _ => String::new(),
    };
    Some(format!("was started differently: {}{more}", list.collect::<Vec<_>>().join(", ")))
}

/// Reads the first message of a new connection.
fn read_hello(mut stream: &TcpStream) -> io::Result<Hello> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HELLO_LIMIT))?;
    let mut preamble = [0; PREAMBLE.len()];
    stream.read_exact(&mut preamble)?;
    let invalid = |reason: String| io::Error::new(ErrorKind::InvalidData, reason);
    if preamble != PREAMBLE {
        return Err(invalid("its first bytes are not those of a process of a run".to_owned()));
    }
    let message = message::read(&mut stream, MAX_HELLO)?;
    if message.verb != Verb::Hello {
        return Err(invalid(format!("its first message is {:?}, expected Hello", message.verb)));
    }
    serde_json::from_slice(&message.value).map_err(|error| invalid(format!("its first message: {error}")))
}

/// Waits until all followers are connected.
pub(crate) fn listen(options: &Options, facts: &BTreeMap<String, String>) -> Result<Arc<Leader>> {
    let Options { coordinator_address, num_processes, initialization_timeout, heartbeat_timeout, .. } = options;
    let failed = |error: io::Error| Error::Listen { address: coordinator_address.clone(), reason: error.to_string() };
    let addresses = resolve(coordinator_address).map_err(failed)?;
    let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    tracing::info!("process 0 waits at {address} for {} others", num_processes - 1);
    if address.ip().is_loopback()
        && !addresses.iter().any(|address| coordinator_address.starts_with(&address.to_string()))
    {
        tracing::warn!("{coordinator_address} is {address} on this machine, which other machines cannot reach");
    }
    let deadline = Instant::now() + *initialization_timeout;
    let mut waiting = Waiting::new(*initialization_timeout);
    let mut joined: BTreeMap<usize, (Link, String)> = BTreeMap::new();
    let (sender, receiver) = mpsc::channel();
    let pending = Arc::new(AtomicUsize::new(0));
    let result = loop {
        if joined.len() + 1 == *num_processes {
            break Ok(());
        }
        let missing =
            || -> Vec<usize> { (1..*num_processes).filter(|process| !joined.contains_key(process)).collect() };
        waiting.report(|| format!("process 0 waits at {address} for {}", listed(&missing())));
        if Instant::now() >= deadline {
            break Err(Error::Missing {
                processes: missing(),
                num_processes: *num_processes,
                address: coordinator_address.clone(),
                seconds: initialization_timeout.as_secs(),
            });
        }
        match listener.accept() {
            Ok((stream, from)) if pending.fetch_add(1, Ordering::Relaxed) < MAX_PENDING => {
                let (sender, pending) = (sender.clone(), Arc::clone(&pending));
                thread::spawn(move || {
                    let hello = read_hello(&stream);
                    pending.fetch_sub(1, Ordering::Relaxed);
                    // The receiver is gone once all processes are connected.
                    let _ = sender.send((stream, from, hello));
                });
            }
            Ok((_, from)) => {
                pending.fetch_sub(1, Ordering::Relaxed);
                tracing::warn!("a connection from {from} is closed: {MAX_PENDING} others have not sent a message yet");
            }
            Err(_) => thread::sleep(POLL),
        }
        let Ok((stream, from, hello)) = receiver.try_recv() else { continue };
        let hello = match hello {
            Ok(hello) => hello,
            Err(error) => {
                tracing::warn!("a connection from {from} is closed: {error}");
                continue;
            }
        };
        let link = match Link::new(stream, *heartbeat_timeout) {
            Ok(link) => link,
            Err(error) => {
                tracing::warn!("a connection from {from} is closed: {error}");
                continue;
            }
        };
        let twice = joined
            .get(&hello.process_id)
            .map(|(_, other)| format!("has the process_id of the process at {other}: each process needs its own"));
        if let Some(reason) = difference(&hello, options, facts).or(twice) {
            let failure = Failure { process: hello.process_id, address: from.to_string(), reason };
            link.send_failure(&failure);
            break Err(failure.into());
        }
        joined.insert(hello.process_id, (link, from.to_string()));
    };
    match result {
        Ok(()) => Ok(Leader::start(options.clone(), joined.into_values().collect())),
        Err(error) => {
            let failure = failure_of(&error, 0, coordinator_address);
            joined.values().for_each(|(link, _)| link.send_failure(&failure));
            // Gives the messages time to arrive: closing a connection discards them if it has unread bytes.
            joined.values().for_each(|(link, _)| drop(link.receive()));
            Err(error)
        }
    }
}

/// Reports, every few seconds, for whom a process waits.
struct Waiting {
    began: Instant,
    limit: Duration,
    reports: u32,
}

impl Waiting {
    fn new(limit: Duration) -> Self {
        Self { began: Instant::now(), limit, reports: 0 }
    }

    fn report(&mut self, text: impl FnOnce() -> String) {
        let waited = self.began.elapsed();
        if waited >= REPORT * (self.reports + 1) {
            self.reports += 1;
            tracing::warn!("{} ({} of {} seconds)", text(), waited.as_secs(), self.limit.as_secs());
        }
    }
}

/// Returns the names of some processes; of many, only the first.
fn listed(processes: &[usize]) -> String {
    let numbers: Vec<String> = processes.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = processes.len().checked_sub(SHOWN).filter(|more| *more > 0);
    let more = more.map(|more| format!(" and {more} more")).unwrap_or_default();
    format!("{} {}{more}", if processes.len() == 1 { "process" } else { "processes" }, numbers.join(", "))
}

/// Connects to the leader.
pub(crate) fn connect(options: &Options, facts: &BTreeMap<String, String>) -> Result<Arc<Follower>> {
    let Options { coordinator_address: address, num_processes, process_id, initialization_timeout: limit, .. } =
        options;
    let deadline = Instant::now() + *limit;
    let mut waiting = Waiting::new(*limit);
    let stream = loop {
        let left = || deadline.saturating_duration_since(Instant::now());
        let attempt = || {
            let mut last = io::Error::from(ErrorKind::TimedOut);
            for address in resolve(address)? {
                match TcpStream::connect_timeout(&address, left().clamp(POLL, ATTEMPT)) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        match attempt() {
            Ok(stream) => break stream,
            Err(error) if left().is_zero() => {
                return Err(Error::Unreachable {
                    process: *process_id,
                    address: address.clone(),
                    seconds: limit.as_secs(),
                    reason: error.to_string(),
                });
            }
            Err(error) => {
                waiting.report(|| format!("process {process_id} waits for process 0 at {address}: {error}"));
                thread::sleep(RETRY.min(left()));
            }
        }
    };
    let hello =
        Hello { protocol: PROTOCOL, num_processes: *num_processes, process_id: *process_id, facts: facts.clone() };
    // The leader answers when all processes are connected, at the latest at the end of its own limit.
    let waiting = *limit + HELLO_LIMIT;
    let joined = || {
        let link = Link::new(stream, waiting)?;
        (&link.stream).write_all(&PREAMBLE)?;
        link.send(Verb::Hello, 0, "", &serde_json::to_vec(&hello)?)?;
        let reply = link.receive()?;
        link.stream.set_read_timeout(Some(options.heartbeat_timeout))?;
        link.stream.set_write_timeout(Some(options.heartbeat_timeout))?;
        Ok((link, reply))
    };
    let leader_error = |reason: String| Error::Peer { process: 0, address: address.clone(), reason };
    let (link, reply) = joined().map_err(|error: io::Error| leader_error(reason(&error, waiting)))?;
    match reply.verb {
        Verb::Welcome => Ok(Follower::start(options.clone(), link)),
        Verb::Failure => Err(parse_failure(&reply.value).unwrap_or_else(leader_error)),
        other => Err(leader_error(format!("breaks the protocol: its first message is {other:?}, expected Welcome"))),
    }
}
