//! Process 0: it holds the values and serves each follower with one thread.

use crate::error::{Error, Result};
use crate::link::{Failure, Link, failure_of, parse_failure, reason};
use crate::message::{Message, Verb};
use crate::options::{END, MAX_STORED, MAX_VALUE, MAX_WAITING, Options};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The largest number of barriers that a follower reaches before the leader.
const MAX_ARRIVALS: usize = 1 << 10;
/// The time that followers have to read a failure.
const FAREWELL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Leader {
    options: Options,
    /// The followers, from process 1.
    peers: Vec<(Link, String)>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    values: BTreeMap<String, Arc<[u8]>>,
    /// The size of all keys and values.
    bytes: usize,
    /// Requests for values that do not exist yet: key, process and id.
    waiting: Vec<(String, usize, u64)>,
    /// The barriers that each follower has reached, with their tokens.
    arrivals: Vec<VecDeque<(String, Vec<u8>)>>,
    failure: Option<Error>,
    /// `true` at the end of the run, when connections may close.
    is_over: bool,
    /// The number of followers that are being served.
    served: usize,
}

impl Leader {
    /// Starts to serve followers, from process 1, with their addresses.
    pub(crate) fn start(options: Options, peers: Vec<(Link, String)>) -> Arc<Self> {
        let state = State { arrivals: vec![VecDeque::new(); peers.len()], served: peers.len(), ..State::default() };
        let leader = Arc::new(Self { options, peers, state: Mutex::new(state), changed: Condvar::new() });
        for process in 1..=leader.peers.len() {
            leader.send(process, Verb::Welcome, 0, "", &[]);
            let leader = Arc::clone(&leader);
            thread::spawn(move || leader.serve(process));
        }
        let heartbeat_sender = Arc::clone(&leader);
        thread::spawn(move || heartbeat_sender.send_heartbeats());
        leader
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the state as soon as `found` returns a value or the store has failed; `None` after the deadline.
    fn wait<T>(&self, deadline: Option<Instant>, mut found: impl FnMut(&mut State) -> Option<T>) -> Result<Option<T>> {
        let mut state = self.lock();
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if let Some(value) = found(&mut state) {
                return Ok(Some(value));
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

    /// Sends a message to a follower; a broken connection fails the store.
    fn send(&self, process: usize, verb: Verb, id: u64, key: &str, value: &[u8]) {
        if let Err(error) = self.peers[process - 1].0.send(verb, id, key, value) {
            self.fail_with(&self.peer(process, reason(&error, self.options.heartbeat_timeout)));
        }
    }

    fn peer(&self, process: usize, reason: String) -> Error {
        Failure { process, address: self.peers[process - 1].1.clone(), reason }.into()
    }

    /// Fails the store, and reports the first error to all followers.
    fn fail_with(&self, error: &Error) {
        {
            let mut state = self.lock();
            if state.failure.is_some() || state.is_over {
                return;
            }
            state.failure = Some(error.clone());
            self.changed.notify_all();
        }
        let failure = failure_of(error, 0, &self.options.coordinator_address);
        self.peers.iter().for_each(|(link, _)| link.send_failure(&failure));
    }

    pub(crate) fn fail(&self, message: &str) {
        let address = self.options.coordinator_address.clone();
        self.fail_with(&Failure { process: 0, address, reason: format!("has failed: {message}") }.into());
    }

    pub(crate) fn failure(&self) -> Option<Error> {
        self.wait(None, |state| state.is_over.then_some(())).err()
    }

    fn send_heartbeats(&self) {
        let interval = self.options.heartbeat_timeout / 5;
        // The store is over, or has failed, if this returns a value or an error.
        while let Ok(None) = self.wait(Some(Instant::now() + interval), |state| state.is_over.then_some(())) {
            for process in 1..=self.peers.len() {
                self.send(process, Verb::Heartbeat, 0, "", &[]);
            }
        }
    }

    /// Serves a follower until its connection ends.
    fn serve(&self, process: usize) {
        loop {
            let handled = match self.peers[process - 1].0.receive() {
                Ok(message) => self.handle(process, message),
                Err(error) => Err(self.peer(process, reason(&error, self.options.heartbeat_timeout))),
            };
            if let Err(error) = handled {
                self.fail_with(&error);
                break;
            }
        }
        self.lock().served -= 1;
        self.changed.notify_all();
    }

    fn handle(&self, process: usize, Message { verb, id, key, value }: Message) -> Result<()> {
        match verb {
            Verb::Heartbeat => {}
            Verb::Put => match self.insert(&key, value) {
                Ok(()) => self.send(process, Verb::Value, id, "", &[]),
                Err(Error::Exists { .. }) => self.send(process, Verb::Exists, id, "", &[]),
                Err(_) => self.send(process, Verb::Full, id, "", &[]),
            },
            Verb::Get | Verb::TryGet => {
                let mut state = self.lock();
                let (verb, value) = match state.values.get(&key) {
                    Some(value) => (Verb::Value, Some(Arc::clone(value))),
                    None if verb == Verb::TryGet => (Verb::Nothing, None),
                    None if state.waiting.len() >= MAX_WAITING => (Verb::Full, None),
                    None => {
                        state.waiting.push((key, process, id));
                        return Ok(());
                    }
                };
                drop(state);
                self.send(process, verb, id, "", value.as_deref().unwrap_or_default());
            }
            Verb::Arrive => {
                let mut state = self.lock();
                let arrivals = &mut state.arrivals[process - 1];
                if arrivals.len() >= MAX_ARRIVALS {
                    let reason = format!("breaks the protocol: it is {MAX_ARRIVALS} barriers ahead");
                    return Err(self.peer(process, reason));
                }
                arrivals.push_back((key, value));
                self.changed.notify_all();
            }
            Verb::Failure => {
                // A follower reports its own failures only.
                let reason = match parse_failure(&value) {
                    Ok(Error::Peer { reason, .. }) | Err(reason) => reason,
                    Ok(other) => other.to_string(),
                };
                return Err(self.peer(process, reason));
            }
            other => return Err(self.peer(process, format!("breaks the protocol: it sends {other:?}"))),
        }
        Ok(())
    }

    /// Sets a value and sends it to the followers that wait for it.
    fn insert(&self, key: &str, value: Vec<u8>) -> Result<()> {
        let value: Arc<[u8]> = value.into();
        let waiting: Vec<_> = {
            let mut state = self.lock();
            match state.values.get(key) {
                Some(known) if **known == *value => return Ok(()),
                Some(_) => return Err(Error::Exists { key: key.to_owned() }),
                None => {}
            }
            let found = state.bytes + key.len() + value.len();
            if found > MAX_STORED {
                return Err(Error::Full { key: key.to_owned() });
            }
            state.bytes = found;
            state.values.insert(key.to_owned(), Arc::clone(&value));
            self.changed.notify_all();
            state.waiting.extract_if(.., |(awaited, ..)| awaited == key).collect()
        };
        waiting.into_iter().for_each(|(_, process, id)| self.send(process, Verb::Value, id, "", &value));
        Ok(())
    }

    /// Returns the error of a failed store.
    fn check(&self) -> Result<()> {
        self.wait(None, |_| Some(())).map(drop)
    }

    pub(crate) fn put(&self, key: &str, value: Vec<u8>) -> Result<()> {
        self.check()?;
        self.insert(key, value)
    }

    pub(crate) fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let value = self.wait(Instant::now().checked_add(timeout), |state| state.values.get(key).cloned())?;
        let timed_out = || Error::TimedOut { what: format!("the key `{key}`"), seconds: timeout.as_secs() };
        value.map(|value| value.to_vec()).ok_or_else(timed_out)
    }

    pub(crate) fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.check()?;
        Ok(self.lock().values.get(key).map(|value| value.to_vec()))
    }

    pub(crate) fn barrier(&self, name: &str, token: &[u8], timeout: Duration) -> Result<()> {
        let deadline = Instant::now().checked_add(timeout);
        for process in 1..=self.peers.len() {
            let arrival = self.wait(deadline, |state| state.arrivals[process - 1].pop_front())?;
            let error = match arrival {
                Some((found, other_token)) if found == name && other_token == token => continue,
                Some((found, _)) if found == name => self.peer(process, format!("differs from process 0 in {name}")),
                Some((found, _)) => {
                    let found: String = found.chars().take(100).collect();
                    self.peer(process, format!("is at {found}, and process 0 at {name}"))
                }
                None => {
                    let (_, address) = &self.peers[process - 1];
                    let what = format!("process {process} ({address}) at {name}");
                    Error::TimedOut { what, seconds: timeout.as_secs() }
                }
            };
            self.fail_with(&error);
            return Err(error);
        }
        if name == END {
            self.lock().is_over = true;
            self.changed.notify_all();
        }
        for process in 1..=self.peers.len() {
            self.send(process, Verb::Release, 0, name, &[]);
        }
        Ok(())
    }

    pub(crate) fn broadcast(&self, name: &str, value: &[u8]) -> Result<()> {
        self.check()?;
        let (parts, last) = value.split_at(value.len() - value.len() % MAX_VALUE);
        for process in 1..=self.peers.len() {
            parts.chunks(MAX_VALUE).for_each(|part| self.send(process, Verb::Part, 0, name, part));
            self.send(process, Verb::Broadcast, 0, name, last);
        }
        self.check()
    }

    /// Closes all connections. After a failure, followers get a moment to read it.
    pub(crate) fn disconnect(&self) {
        let mut state = self.lock();
        let deadline = Instant::now() + FAREWELL;
        while state.failure.is_some() && state.served > 0 && Instant::now() < deadline {
            state = self.changed.wait_timeout(state, FAREWELL / 10).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_over = true;
        drop(state);
        self.changed.notify_all();
        self.peers.iter().for_each(|(link, _)| link.close());
    }
}
