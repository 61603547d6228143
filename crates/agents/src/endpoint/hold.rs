//! The conversations of agents over the endpoint of a run.

use super::fields::Named;
use super::http::{Handler, Server};
use super::request::{ApiError, Asked, Held, Job, KEY, Rules, socket_address};
use crate::agent::{Agent, Clock, Connection};
use crate::environment::{Failure, check_reward};
use crate::error::{Error, Result};
use grpo_rewards::programs::lock;
use rand::TryRng;
use rand::rngs::SysRng;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The address without the key: a free port of this machine.
const ADDRESS: &str = "127.0.0.1:0";
/// The number of random bytes of a key.
const KEY_BYTES: usize = 24;
/// The number of revoked keys that are remembered, so that their late requests get a clear error.
const REMEMBERED: usize = 1 << 14;
/// The maximum number of requests of a conversation at the same time.
pub(super) const MOST_PARALLEL: usize = 32;
/// The maximum time that a request waits for requests of other agents, so that one call samples for all of them.
const GATHER: Duration = Duration::from_millis(20);

/// An OpenAI-compatible endpoint that only takes the keys of running conversations. It is closed when it is dropped.
pub struct Endpoint {
    server: Server,
    shared: Arc<Shared>,
}

pub(super) enum Event {
    Asked(Asked),
    Over(usize, std::result::Result<Option<f32>, Failure>),
}

#[derive(Default)]
pub(super) struct Shared {
    pub(super) rules: Rules,
    pub(super) named: Named,
    keys: Mutex<Keys>,
    /// The number of responses.
    pub(super) responses: AtomicU64,
    /// The number of requests without a valid key.
    strangers: AtomicU64,
}

#[derive(Default)]
struct Keys {
    open: HashMap<String, Open>,
    revoked: VecDeque<String>,
}

/// A running conversation.
#[derive(Clone)]
pub(super) struct Open {
    pub(super) job: usize,
    pub(super) clock: Arc<Clock>,
    pub(super) events: Sender<Event>,
}

impl Endpoint {
    /// Opens an endpoint at `address`, such as `127.0.0.1:8000`; `None` is a free port of the loopback address. The `rules` are those of the run.
    ///
    /// # Errors
    /// [`Error::Config`] for an illegal address; [`Error::Endpoint`] for one that cannot be used, such as a port in use.
    pub fn open(address: Option<&str>, rules: Rules) -> Result<Self> {
        let address = socket_address(address.unwrap_or(ADDRESS))?;
        let failed = |source| Error::Endpoint { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let shared = Arc::new(Shared { rules, ..Shared::default() });
        let server = Server::start(listener, Arc::clone(&shared) as Arc<dyn Handler>).map_err(failed)?;
        if !address.ip().is_loopback() {
            tracing::warn!(
                "{KEY}, {address}, can be reached from other machines: keys and texts are sent without encryption"
            );
        }
        Ok(Self { server, shared })
    }

    /// Returns the address, with the port that was chosen.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Returns the base URL for agents on this machine.
    pub fn base_url(&self) -> String {
        let mut address = self.address();
        if address.ip().is_unspecified() {
            address.set_ip(if address.is_ipv4() { [127, 0, 0, 1].into() } else { [0, 0, 0, 0, 0, 0, 0, 1].into() });
        }
        format!("http://{address}/v1")
    }

    /// Lets agents hold conversations, and calls `answer` with their requests, which it answers; those that it drops get an error. The
    /// requests of one call come from agents that wait at the same time.
    ///
    /// # Errors
    /// The first error of `answer`, which ends all conversations; [`Error::Random`] without random numbers for keys.
    pub fn hold<E: From<Error>>(
        &self,
        jobs: &[Job<'_>],
        mut answer: impl FnMut(Vec<Asked>) -> std::result::Result<(), E>,
    ) -> std::result::Result<Held, E> {
        /// An agent, with its jobs and their keys.
        type Queue<'a> = (&'a Arc<dyn Agent>, VecDeque<(usize, String)>);
        let mut queues: BTreeMap<*const (), Queue<'_>> = BTreeMap::new();
        for (index, job) in jobs.iter().enumerate() {
            let queue = queues.entry(Arc::as_ptr(&job.agent).cast()).or_insert_with(|| (&job.agent, VecDeque::new()));
            queue.1.push_back((index, new_key()?));
        }
        let (events, inbox) = channel();
        let (running, has_ended) = (&AtomicUsize::new(0), &Arc::new(AtomicBool::new(false)));
        std::thread::scope(|scope| {
            for (agent, queue) in queues.into_values() {
                let (workers, queue) = (agent.workers().clamp(1, queue.len()), Arc::new(Mutex::new(queue)));
                for worker in 0..workers {
                    let (events, queue) = (events.clone(), Arc::clone(&queue));
                    running.fetch_add(1, Ordering::Relaxed);
                    scope.spawn(move || {
                        let _running = AtEnd(|| {
                            running.fetch_sub(1, Ordering::Relaxed);
                        });
                        while !has_ended.load(Ordering::Relaxed) {
                            let Some((index, key)) = lock(&queue).pop_front() else { break };
                            let connection = self.admit(key, index, &events, has_ended);
                            let outcome = {
                                let _key = AtEnd(|| self.shared.revoke(connection.api_key()));
                                agent.run(jobs[index].row, &connection, worker)
                            };
                            let outcome = outcome.and_then(|reward| check_reward(reward).map(|()| reward));
                            let _ = events.send(Event::Over(index, outcome));
                        }
                    });
                }
            }
            drop(events);
            let held = collect(jobs.len(), inbox, running, &mut answer);
            if held.is_err() {
                has_ended.store(true, Ordering::Relaxed);
                self.shared.revoke_all();
            }
            held
        })
    }

    /// Admits the requests of a conversation.
    fn admit(&self, key: String, job: usize, events: &Sender<Event>, has_ended: &Arc<AtomicBool>) -> Connection {
        let clock = Arc::new(Clock::default());
        let open = Open { job, clock: Arc::clone(&clock), events: events.clone() };
        lock(&self.shared.keys).open.insert(key.clone(), open);
        Connection::new(self.base_url(), key, clock, Arc::clone(has_ended))
    }
}

/// Calls a function at the end of a scope, also if an agent panics: the requests of its key and its thread would be waited for.
struct AtEnd<F: FnMut()>(F);

impl<F: FnMut()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Passes requests to `answer` until all of the `running` threads have ended.
fn collect<E>(
    count: usize,
    inbox: Receiver<Event>,
    running: &AtomicUsize,
    answer: &mut impl FnMut(Vec<Asked>) -> std::result::Result<(), E>,
) -> std::result::Result<Held, E> {
    let unfinished = || Err(Failure::new("its agent has not ended"));
    let mut held = Held { outcomes: (0..count).map(|_| unfinished()).collect(), waited: Duration::ZERO };
    loop {
        let (began, mut requests, mut until) = (Instant::now(), Vec::new(), None);
        loop {
            let jobs: BTreeSet<usize> = requests.iter().map(|request: &Asked| request.job).collect();
            let event = match until {
                None => inbox.recv().ok(),
                Some(_) if jobs.len() >= running.load(Ordering::Relaxed) => None,
                Some(until) => inbox.recv_timeout(Instant::saturating_duration_since(&until, Instant::now())).ok(),
            };
            match event {
                Some(Event::Asked(request)) => {
                    until.get_or_insert_with(|| Instant::now() + GATHER);
                    requests.push(request);
                }
                Some(Event::Over(job, outcome)) => {
                    // Nobody reads the answers to requests that an agent has left behind.
                    requests.retain(|request| request.job != job);
                    held.outcomes[job] = outcome;
                    if requests.is_empty() {
                        until = None;
                    }
                }
                None => break,
            }
        }
        held.waited += began.elapsed();
        if requests.is_empty() {
            return Ok(held);
        }
        answer(requests)?;
    }
}

impl Shared {
    fn revoke(&self, key: &str) {
        let mut keys = lock(&self.keys);
        if keys.open.remove(key).is_some() {
            keys.remember(key.to_owned());
        }
    }

    fn revoke_all(&self) {
        let mut keys = lock(&self.keys);
        let open = std::mem::take(&mut keys.open);
        open.into_keys().for_each(|key| keys.remember(key));
    }

    /// Returns the conversation of a key.
    pub(super) fn conversation(&self, key: Option<&str>) -> std::result::Result<Open, ApiError> {
        let keys = lock(&self.keys);
        if let Some(open) = key.and_then(|key| keys.open.get(key)) {
            return Ok(open.clone());
        }
        if key.is_some_and(|key| keys.revoked.iter().any(|revoked| revoked == key)) {
            let message =
                "the conversation of this key is over: a program that goes on takes the `api_key` of its next line";
            return Err(ApiError::new(404, message).with_code("conversation_closed"));
        }
        drop(keys);
        let count = self.strangers.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            tracing::warn!("{KEY} has refused requests without the key of a conversation ({count} so far)");
        }
        let found = if key.is_some() { "another key" } else { "no key" };
        let message = format!(
            "the key of a running conversation was expected as `Authorization: Bearer KEY` or `X-Api-Key: KEY`, got {found}: agents find it in \
             OPENAI_API_KEY and ANTHROPIC_API_KEY"
        );
        Err(ApiError::new(401, message).with_code("invalid_api_key"))
    }
}

impl Keys {
    fn remember(&mut self, key: String) {
        if self.revoked.len() == REMEMBERED {
            self.revoked.pop_front();
        }
        self.revoked.push_back(key);
    }
}

/// Returns a new key, from the random numbers of the operating system.
fn new_key() -> Result<String> {
    let mut bytes = [0_u8; KEY_BYTES];
    SysRng.try_fill_bytes(&mut bytes).map_err(|error| Error::Random { reason: error.to_string() })?;
    Ok(bytes.iter().fold("grpo-".to_owned(), |key, byte| format!("{key}{byte:02x}")))
}
