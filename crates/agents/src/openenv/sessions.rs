//! The connections of an environment: one for each conversation, reused by later ones.

use super::connection::{Address, Connection};
use super::message::{Answer, Observation, list_tools};
use crate::environment::Failure;
use grpo_rewards::programs::{Stop, back_off, lock};
use serde_json::Value;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, TryLockError, Weak};
use std::time::{Duration, Instant};

/// The time between two looks at connections that wait for the model. A server closes a connection on which its pings stay unanswered, as a rule
/// for 20 seconds, and the model may write for longer.
const LOOK: Duration = Duration::from_secs(1);

/// A connection, which is a session of the server.
pub(super) type Session = Arc<Mutex<Connection>>;

pub(super) struct Sessions {
    pub(super) address: Address,
    /// The sessions without a conversation.
    idle: Mutex<Vec<Session>>,
    /// All sessions.
    open: Mutex<Vec<Weak<Mutex<Connection>>>>,
    /// The tools, if they are known.
    tools: OnceLock<Option<Value>>,
    /// The number of connections in a row that could not be opened.
    failures_in_a_row: AtomicU32,
    keeper: Once,
}

impl Sessions {
    /// Returns the sessions of a server; `tools` are its tools, if the configuration has them.
    pub(super) fn new(address: Address, tools: Option<Value>) -> Arc<Self> {
        let tools = tools.map_or_else(OnceLock::new, |tools| OnceLock::from(Some(tools)));
        let (idle, open, failures_in_a_row, keeper) =
            (Mutex::default(), Mutex::default(), AtomicU32::new(0), Once::new());
        Arc::new(Self { address, idle, open, tools, failures_in_a_row, keeper })
    }

    /// Returns the tools of the server; `None` if there are none.
    pub(super) fn tools(self: &Arc<Self>) -> Option<&Value> {
        if self.tools.get().is_none() {
            match self.connect() {
                Ok(session) => self.give_back(session),
                Err(failure) => tracing::warn!("the tools of an environment are unknown: {failure}"),
            }
        }
        self.tools.get()?.as_ref()
    }

    /// Starts an episode, in an idle session or a new one.
    ///
    /// # Errors
    /// A failure that names the address.
    pub(super) fn reset(self: &Arc<Self>, question: &Value) -> Result<(Session, Observation), Failure> {
        loop {
            let idle = lock(&self.idle).pop();
            let is_new = idle.is_none();
            let session = idle.map_or_else(|| self.connect(), Ok)?;
            return match self.try_ask(&session, question) {
                Ok(Answer::Observation(observation)) => Ok((session, observation)),
                Ok(Answer::Refusal(refusal)) => Err(self.failure(refusal.text(&self.address))),
                // A server may have closed idle connections, and no conversation depends on them.
                Err(Stop::Ended(_)) if !is_new => continue,
                Err(stop) => Err(self.stopped(stop)),
            };
        }
    }

    /// Asks a question.
    ///
    /// # Errors
    /// A failure that names the address; the session is unusable then.
    pub(super) fn ask(&self, session: &Session, question: &Value) -> Result<Answer, Failure> {
        self.try_ask(session, question).map_err(|stop| self.stopped(stop))
    }

    fn try_ask(&self, session: &Session, question: &Value) -> Result<Answer, Stop> {
        let deadline = Instant::now() + self.address.timeout;
        let answer = lock(session).ask(&self.address, question, deadline)?;
        Answer::read(&answer).map_err(|garbage| Stop::Broken(self.address.show(&garbage)))
    }

    /// Keeps a session for a later conversation.
    pub(super) fn give_back(&self, session: Session) {
        lock(&self.idle).push(session);
    }

    /// Returns a failure that names the address.
    pub(super) fn failure(&self, reason: impl std::fmt::Display) -> Failure {
        Failure::new(format!("{}: {reason}", self.address.shown))
    }

    fn stopped(&self, stop: Stop) -> Failure {
        let reason = stop.into_message();
        self.failure(reason)
    }

    /// Opens a session, and asks for the tools of the server if they are unknown. Waits if there was no server.
    fn connect(self: &Arc<Self>) -> Result<Session, Failure> {
        back_off(self.failures_in_a_row.load(Ordering::Relaxed));
        let connection = match self.address.connect(Instant::now() + self.address.timeout) {
            Ok(connection) => connection,
            Err(stop) => {
                self.failures_in_a_row.fetch_add(1, Ordering::Relaxed);
                return Err(self.stopped(stop));
            }
        };
        self.failures_in_a_row.store(0, Ordering::Relaxed);
        let session = Arc::new(Mutex::new(connection));
        lock(&self.open).push(Arc::downgrade(&session));
        let sessions = Arc::downgrade(self);
        self.keeper.call_once(|| drop(std::thread::spawn(move || keep_alive(&sessions))));
        if self.tools.get().is_none() {
            let tools = match self.ask(&session, &list_tools())? {
                Answer::Observation(observation) => {
                    observation.tools().map_err(|garbage| self.failure(self.address.show(&garbage)))?
                }
                Answer::Refusal(refusal) if refusal.is_invalid() => None,
                Answer::Refusal(refusal) => return Err(self.failure(refusal.text(&self.address))),
            };
            // Another thread may have been faster, with the same answer.
            let _ = self.tools.set(tools);
        }
        Ok(session)
    }
}

/// Looks after connections until the environment is dropped.
fn keep_alive(sessions: &Weak<Sessions>) {
    loop {
        std::thread::sleep(LOOK);
        let Some(sessions) = sessions.upgrade() else { return };
        let mut open = lock(&sessions.open);
        open.retain(|session| session.strong_count() > 0);
        let all: Vec<Session> = open.iter().filter_map(Weak::upgrade).collect();
        drop(open);
        for session in all {
            match session.try_lock() {
                Ok(mut connection) => connection.keep_alive(&sessions.address),
                Err(TryLockError::Poisoned(error)) => error.into_inner().keep_alive(&sessions.address),
                // A question is being answered.
                Err(TryLockError::WouldBlock) => {}
            }
        }
    }
}
