//! One server: the weights that it has, and when to ask it again after a failure.

use crate::completion::{Finish, Limits, NamedSpan, checked};
use crate::http::{Fault, Http};
use crate::protocol::{Facts, Job, Protocol};
use crate::weights::Weights;
use grpo_policy::{Completion, WeightVersion};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

pub(crate) struct Server {
    pub(crate) http: Http,
    pub(crate) protocol: &'static dyn Protocol,
    pub(crate) facts: Facts,
    /// `true` if weights are adapters, which requests name; `false` if they replace the model's.
    pub(crate) adapters: bool,
    state: Mutex<State>,
    rest: Mutex<Rest>,
    /// The number of requests that are running.
    busy: AtomicUsize,
}

/// The weights of a server, as far as this process knows.
#[derive(Default)]
struct State {
    /// The names of loaded weights. Of whole models, there is at most one.
    loaded: Vec<(String, Weak<Weights>)>,
    /// The number of the latest weights.
    number: u64,
    /// Counts the times that the server has lost its weights.
    losses: u64,
    /// `true` if an update failed half-way.
    is_broken: bool,
}

/// Weights that the run has sent.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    pub(crate) number: u64,
    pub(crate) version: u64,
}

/// The pause of a server after failures.
#[derive(Default)]
struct Rest {
    failures: u32,
    until: Option<Instant>,
}

/// Locks a mutex. A thread that panicked while it held the lock left no invalid state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the delay before the next attempt after `failures` failures: half a second after the first one, doubled by every further one, or the
/// delay `after` that the server asks for; at most a minute.
pub(crate) fn backoff(failures: u32, after: Option<Duration>) -> Duration {
    let doubled = || Duration::from_millis(500).saturating_mul(1 << failures.saturating_sub(1).min(16));
    after.unwrap_or_else(doubled).min(Duration::from_secs(60))
}

impl Server {
    pub(crate) fn new(http: Http, protocol: &'static dyn Protocol, facts: Facts, adapters: bool) -> Self {
        let (state, rest, busy) = Default::default();
        Self { http, protocol, facts, adapters, state: Mutex::new(state), rest: Mutex::new(rest), busy }
    }

    /// Makes sure that the server has these weights, or later ones of a whole model. Returns the number of times that it has lost its weights.
    pub(crate) fn ensure(&self, weights: &Arc<Weights>) -> Result<u64, Fault> {
        let mut state = lock(&self.state);
        let has_weights = match self.adapters {
            true => state.loaded.iter().any(|(name, _)| *name == weights.name),
            false => !state.loaded.is_empty() && state.number >= weights.number,
        };
        if has_weights {
            return Ok(state.losses);
        }
        if self.adapters {
            self.protocol.load_adapter(&self.http, weights)?;
            // Otherwise old adapters fill the server's memory.
            state.loaded.retain(|(name, weights)| {
                let is_used = weights.strong_count() > 0;
                if !is_used && let Err(fault) = self.protocol.unload_adapter(&self.http, name) {
                    tracing::warn!("{}: the old adapter {name} stays loaded: {}", self.http.shown, fault.message());
                }
                is_used
            });
        } else {
            state.is_broken = true;
            self.protocol.replace_weights(&self.http, weights)?;
            let found = self.protocol.weights_name(&self.http)?;
            if found != weights.name {
                let found = self.http.show(&found);
                return Err(Fault::temporary(format!(
                    "expected the weights {} after the update, got {found}",
                    weights.name
                )));
            }
            state.is_broken = false;
            state.loaded.clear();
        }
        state.loaded.push((weights.name.clone(), Arc::downgrade(weights)));
        state.number = state.number.max(weights.number);
        Ok(state.losses)
    }

    /// Returns `true` if the last update of a whole model failed half-way.
    pub(crate) fn is_broken(&self) -> bool {
        lock(&self.state).is_broken
    }

    /// Forgets the server's weights, which are then sent again before the next request, unless another thread has done so since `losses`.
    fn forget(&self, losses: u64) {
        let mut state = lock(&self.state);
        if state.losses == losses {
            state.loaded.clear();
            state.losses += 1;
        }
    }

    /// Samples the completions of a job with these weights, or later ones of a whole model, and checks them. `known` has all
    /// weights of the run by name.
    pub(crate) fn sample(
        &self,
        job: &Job,
        weights: &Arc<Weights>,
        vocab_size: usize,
        known: &Mutex<HashMap<String, Known>>,
    ) -> Result<Vec<Completion>, Fault> {
        self.busy.fetch_add(1, Ordering::Relaxed);
        let sampled = self.ensure(weights).and_then(|losses| {
            let result = self.sample_now(job, weights, vocab_size, known, losses);
            if let Err(Fault::Forgotten(message)) = &result {
                tracing::warn!(
                    "{}: the server has lost the run's weights, and gets them again: {message}",
                    self.http.shown
                );
                self.forget(losses);
            }
            result
        });
        self.busy.fetch_sub(1, Ordering::Relaxed);
        sampled
    }

    fn sample_now(
        &self,
        job: &Job,
        weights: &Arc<Weights>,
        vocab_size: usize,
        known: &Mutex<HashMap<String, Known>>,
        losses: u64,
    ) -> Result<Vec<Completion>, Fault> {
        let oldest = match self.adapters {
            true => weights.version,
            false => self.version(known)?,
        };
        let adapter = self.adapters.then_some(&*weights.name);
        let mut all = self.protocol.sample(&self.http, &self.facts, job, adapter)?;
        if let Some(Finish::Other(reason)) =
            all.iter().map(|sampled| &sampled.finish).find(|finish| matches!(finish, Finish::Other(_)))
        {
            return Err(Fault::temporary(format!("a completion ended early with `{}`", self.http.show(reason))));
        }
        if self.adapters {
            // The server reports names of the model below the adapters.
            let names: Vec<NamedSpan> = all.iter_mut().filter_map(|sampled| sampled.weights.take()).flatten().collect();
            let is_other = |span: &&NamedSpan| self.facts.weights.as_ref().is_some_and(|name| *name != span.version);
            if let Some(span) = names.iter().find(is_other) {
                let found = self.http.show(&span.version);
                let message = format!("another program has replaced the weights below the adapters by `{found}`");
                return Err(Fault::Permanent(message));
            }
        } else if all.iter().any(|sampled| sampled.weights.is_none()) {
            // A server that was restarted meanwhile has other weights now.
            let found = self.protocol.weights_name(&self.http)?;
            if !lock(known).contains_key(&found) {
                return Err(Fault::Forgotten(format!("it has the weights `{}`", self.http.show(&found))));
            }
        }
        let limits = Limits { vocab_size, max_tokens: job.max_tokens, masks: job.masks };
        let find = |name: &str| lock(known).get(name).copied();
        // Every token has these weights, or later ones.
        let is_old = |span: &&NamedSpan| find(&span.version).is_none_or(|known| known.number < weights.number);
        if let Some(span) = all.iter().flat_map(|sampled| sampled.weights.iter().flatten()).find(is_old) {
            return Err(Fault::Forgotten(format!("it sampled from the weights `{}`", self.http.show(&span.version))));
        }
        let check = |sampled| checked(sampled, limits, |name| Some(find(name)?.version)).map_err(Fault::Permanent);
        let mut completions = all.into_iter().map(check).collect::<Result<Vec<_>, _>>()?;
        for completion in completions.iter_mut().filter(|completion| completion.weight_versions.is_empty()) {
            // The server does not say which tokens have later weights: the oldest version is a lower bound.
            completion.weight_versions = vec![WeightVersion { version: oldest, start: 0, end: completion.ids.len() }];
        }
        // Another thread may have sent the weights again to a server that was restarted while it sampled.
        if lock(&self.state).losses != losses {
            return Err(Fault::Forgotten("it was restarted while it sampled".into()));
        }
        Ok(completions)
    }

    /// Returns the version of the latest weights.
    fn version(&self, known: &Mutex<HashMap<String, Known>>) -> Result<u64, Fault> {
        let state = lock(&self.state);
        let name = state.loaded.first().map(|(name, _)| name.as_str()).unwrap_or_default();
        let version = lock(known).get(name).map(|known| known.version);
        version.ok_or_else(|| Fault::Forgotten("its weights have changed meanwhile".into()))
    }

    /// Returns the number of running requests.
    pub(crate) fn busy(&self) -> usize {
        self.busy.load(Ordering::Relaxed)
    }

    /// Returns the time until which the server should be left alone; `None` if it may be asked now.
    pub(crate) fn rests_until(&self, now: Instant) -> Option<Instant> {
        lock(&self.rest).until.filter(|until| *until > now)
    }

    /// Records a failure. Failures of requests that ran at the same time count once.
    pub(crate) fn failed(&self, began: Instant, after: Option<Duration>) {
        let mut rest = lock(&self.rest);
        if rest.until.is_some_and(|until| until > began) {
            return;
        }
        rest.failures = rest.failures.saturating_add(1);
        rest.until = Some(Instant::now() + backoff(rest.failures, after));
    }

    /// Records a success.
    pub(crate) fn succeeded(&self) {
        *lock(&self.rest) = Rest::default();
    }
}
