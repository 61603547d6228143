//! The other processes: one connection to the leader, whose messages one thread reads.

use crate::error::{Error, Result};
use crate::link::{Failure, Link, parse_failure, reason};
use crate::message::{Message, Verb};
use crate::options::{END, Options};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(crate) struct Follower {
    options: Options,
    link: Link,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    last_id: u64,
    /// The requests that are waited for, with their replies.
    replies: HashMap<u64, Option<Message>>,
    /// Broadcasts and releases of barriers, in the leader's order.
    collectives: VecDeque<Message>,
    failure: Option<Error>,
    /// `true` at the end of the run, when the connection may close.
    is_over: bool,
}

impl Follower {
    /// Starts to read the messages of the leader.
    pub(crate) fn start(options: Options, link: Link) -> Arc<Self> {
        let state = Mutex::default();
        let follower = Arc::new(Self { options, link, state, changed: Condvar::new() });
        let (reader, heartbeat_sender) = (Arc::clone(&follower), Arc::clone(&follower));
        thread::spawn(move || reader.read());
        thread::spawn(move || heartbeat_sender.send_heartbeats());
        follower
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what `found` returns as soon as it is there; `None` after the deadline. What arrived before a failure is still found.
    fn wait<T>(&self, deadline: Option<Instant>, mut found: impl FnMut(&mut State) -> Option<T>) -> Result<Option<T>> {
        let mut state = self.lock();
        loop {
            if let Some(value) = found(&mut state) {
                return Ok(Some(value));
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if state.is_over {
                return Err(Error::Closed);
            }
            state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return Ok(None),
                Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn leader(&self, reason: String) -> Error {
        Failure { process: 0, address: self.options.coordinator_address.clone(), reason }.into()
    }

    /// Fails the store, and returns its first failure.
    fn fail_with(&self, error: Error) -> Error {
        let mut state = self.lock();
        self.changed.notify_all();
        if state.is_over {
            return error;
        }
        state.failure.get_or_insert(error).clone()
    }

    /// Sends a message; a broken connection fails the store.
    fn send(&self, verb: Verb, id: u64, key: &str, value: &[u8]) -> Result<()> {
        if let Some(failure) = &self.lock().failure {
            return Err(failure.clone());
        }
        // If the leader has reported a failure in the meantime, the connection is closed, and that failure is the cause.
        self.link
            .send(verb, id, key, value)
            .map_err(|error| self.fail_with(self.leader(reason(&error, self.options.heartbeat_timeout))))
    }

    pub(crate) fn fail(&self, message: &str) {
        let Options { process_id, .. } = self.options;
        // The leader knows the address of this process.
        let failure = Failure { process: process_id, address: String::new(), reason: format!("has failed: {message}") };
        self.link.send_failure(&failure);
    }

    pub(crate) fn failure(&self) -> Option<Error> {
        self.wait(None, |state| state.is_over.then_some(())).err()
    }

    fn send_heartbeats(&self) {
        let interval = self.options.heartbeat_timeout / 5;
        while let Ok(None) = self.wait(Some(Instant::now() + interval), |state| state.is_over.then_some(())) {
            if self.send(Verb::Heartbeat, 0, "", &[]).is_err() {
                return;
            }
        }
    }

    /// Reads the messages of the leader until the connection ends.
    fn read(&self) {
        let mut parts = Vec::new();
        loop {
            let handled = match self.link.receive() {
                Ok(message) => self.handle(message, &mut parts),
                Err(error) => Err(self.leader(reason(&error, self.options.heartbeat_timeout))),
            };
            if let Err(error) = handled {
                self.fail_with(error);
                return self.link.close();
            }
        }
    }

    /// Handles a message; `parts` is the begin of the current broadcast.
    fn handle(&self, mut message: Message, parts: &mut Vec<u8>) -> Result<()> {
        match message.verb {
            Verb::Heartbeat => return Ok(()),
            Verb::Failure => return Err(parse_failure(&message.value).unwrap_or_else(|reason| self.leader(reason))),
            Verb::Part => {
                parts.append(&mut message.value);
                return Ok(());
            }
            Verb::Value | Verb::Nothing | Verb::Exists | Verb::Full => {
                // A reply after its timeout is dropped.
                let mut state = self.lock();
                if let Some(reply) = state.replies.get_mut(&message.id) {
                    *reply = Some(message);
                }
            }
            Verb::Broadcast | Verb::Release => {
                if message.verb == Verb::Broadcast && !parts.is_empty() {
                    parts.append(&mut message.value);
                    message.value = std::mem::take(parts);
                }
                let mut state = self.lock();
                state.is_over |= message.verb == Verb::Release && message.key == END;
                state.collectives.push_back(message);
            }
            other => return Err(self.leader(format!("breaks the protocol: it sends {other:?}"))),
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Sends a request and returns its reply; `None` after the deadline.
    fn request(&self, verb: Verb, key: &str, value: &[u8], deadline: Option<Instant>) -> Result<Option<Message>> {
        let id = {
            let mut state = self.lock();
            state.last_id += 1;
            let id = state.last_id;
            state.replies.insert(id, None);
            id
        };
        let reply = self
            .send(verb, id, key, value)
            .and_then(|()| self.wait(deadline, |state| state.replies.get_mut(&id).and_then(Option::take)));
        self.lock().replies.remove(&id);
        reply
    }

    pub(crate) fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        match self.request(Verb::Put, key, value, None)?.map(|reply| reply.verb) {
            Some(Verb::Value) => Ok(()),
            Some(Verb::Exists) => Err(Error::Exists { key: key.to_owned() }),
            _ => Err(Error::Full { key: key.to_owned() }),
        }
    }

    pub(crate) fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        match self.request(Verb::Get, key, &[], Instant::now().checked_add(timeout))? {
            Some(Message { verb: Verb::Value, value, .. }) => Ok(value),
            Some(_) => Err(Error::Full { key: key.to_owned() }),
            None => Err(Error::TimedOut { what: format!("the key `{key}`"), seconds: timeout.as_secs() }),
        }
    }

    pub(crate) fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let reply = self.request(Verb::TryGet, key, &[], None)?;
        Ok(reply.filter(|reply| reply.verb == Verb::Value).map(|reply| reply.value))
    }

    /// Waits for the leader's next collective.
    fn next(&self, verb: Verb, name: &str, deadline: Option<Instant>) -> Result<Option<Message>> {
        let message = self.wait(deadline, |state| state.collectives.pop_front())?;
        match message {
            Some(message) if message.verb != verb || message.key != name => {
                let found: String = message.key.chars().take(100).collect();
                let error = self.leader(format!("is at {found}, and process {} at {name}", self.options.process_id));
                self.fail(&error.to_string());
                self.fail_with(error.clone());
                Err(error)
            }
            message => Ok(message),
        }
    }

    pub(crate) fn barrier(&self, name: &str, token: &[u8], timeout: Duration) -> Result<()> {
        self.send(Verb::Arrive, 0, name, token)?;
        if self.next(Verb::Release, name, Instant::now().checked_add(timeout))?.is_some() {
            return Ok(());
        }
        let error = Error::TimedOut { what: format!("process 0 at {name}"), seconds: timeout.as_secs() };
        self.fail(&error.to_string());
        self.fail_with(error.clone());
        Err(error)
    }

    pub(crate) fn receive(&self, name: &str) -> Result<Vec<u8>> {
        Ok(self.next(Verb::Broadcast, name, None)?.map(|message| message.value).unwrap_or_default())
    }

    pub(crate) fn disconnect(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
        self.link.close();
    }
}
