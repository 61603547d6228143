//! The rollout engine whose completions are sampled by servers.

use crate::completion::ended;
use crate::config::{EngineKind, ServerConfig};
use crate::error::{Error, Result};
use crate::http::{self, Fault, Http};
use crate::protocol::{Job, Needs, Protocol, Random, check_facts};
use crate::server::{Known, Server, backoff, lock};
use crate::sglang::Sglang;
use crate::vllm::Vllm;
use crate::weights::{WeightFolders, Weights};
use grpo_files::KeyError;
use grpo_models::{Dtype, LoraConfig, ModelFolder};
use grpo_policy::{Completion, Pending, Policy, RolloutEngine, RolloutRequest, Sampling};
use rand::RngExt;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest sleep between two looks at whether completions are still wanted.
const LOOK: Duration = Duration::from_millis(100);

/// The facts about a run that the engine needs.
#[derive(Clone, Debug)]
pub struct Run {
    /// The folder of the model that is trained.
    pub model: ModelFolder,
    /// The adapters that are trained; `None` if the whole model is.
    pub lora: Option<LoraConfig>,
    /// The largest number of tokens of a prompt and its completion.
    pub max_tokens: usize,
    /// The largest number of GRPO steps between the weights of a completion and its training.
    pub max_staleness: u64,
    /// The number of sequences that are sampled at the same time.
    pub batch_size: usize,
    /// `true` if requests may ask for sampling masks ([`RolloutRequest::return_sampling_mask`]).
    pub sampling_masks: bool,
    /// The dtype in which the policy computes.
    pub dtype: Dtype,
}

impl Run {
    /// Returns a run that trains all weights of a model, with completions of the current weights, up to the model's context.
    pub fn new(model: ModelFolder) -> Self {
        let max_tokens = model.config().max_position_embeddings;
        let (batch_size, sampling_masks) = (256, false);
        Self { model, lora: None, max_tokens, max_staleness: 0, batch_size, sampling_masks, dtype: Dtype::F32 }
    }
}

/// A rollout engine on servers of vLLM or SGLang. It samples from the weights of the last [`RolloutEngine::update_weights`]; a server that loses
/// them, for example because it is restarted, gets them again before it samples.
pub struct ServerEngine {
    shared: Arc<Shared>,
    folders: WeightFolders,
    current: Option<Arc<Weights>>,
    batch_size: usize,
    /// `true` if servers may list the ids that tokens were sampled from.
    sampling_masks: bool,
}

/// The most ids that a list of top-p has: SGLang's default of `--sampling-mask-max-tokens`.
const LONGEST_LIST: usize = 4096;
/// The most ids per one of top-k: tokens of the same probability as the last one may be kept, too.
const TIES: usize = 16;

/// The part of the engine that threads share.
struct Shared {
    servers: Vec<Server>,
    /// The latest weights of whole models, with which all later requests sample.
    latest: Mutex<Option<Arc<Weights>>>,
    /// All weights, by name.
    known: Mutex<HashMap<String, Known>>,
    vocab_size: usize,
    retries: u32,
}

impl ServerEngine {
    /// Connects to the servers and checks them: health, version, model, context, adapters.
    ///
    /// # Errors
    /// [`Error::Config`] for invalid settings; [`Error::Unavailable`]; [`Error::Settings`] with the flag to set; [`Error::Reply`];
    /// [`Error::Folder`].
    pub fn open(kind: EngineKind, config: &ServerConfig, run: Run) -> Result<Self> {
        config.validate()?;
        let protocol: &'static dyn Protocol = match kind {
            EngineKind::Vllm => &Vllm,
            EngineKind::Sglang => &Sglang,
            EngineKind::Policy => {
                let (key, expected) = ("rollout.engine".into(), "vllm or sglang, with rollout.server".into());
                return Err(KeyError { key, expected, found: kind.name().into() }.into());
            }
        };
        let Run { model, lora, max_tokens, max_staleness, batch_size, sampling_masks, dtype } = run;
        let vocab_size = model.config().vocab_size;
        let dtype_name = match dtype {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
            Dtype::F16 => "float16",
        };
        let adapters = usize::try_from(max_staleness).unwrap_or(usize::MAX).saturating_add(1);
        let lora_needs = lora.as_ref().map(|lora| (lora.r, adapters));
        let is_tied = model.config().tie_word_embeddings;
        let needs = Needs { max_tokens, lora: lora_needs, is_tied, masks: sampling_masks, dtype: dtype_name };
        let mut servers = Vec::new();
        for url in &config.base_urls {
            let http = Http::new(url, config)?;
            let program = protocol.command(&shell_word(&model.path().display().to_string()), &port(url), &needs);
            let command = format!("start a server with `{program}`");
            let facts =
                attempts(&http.shown, config.retries, &command, || protocol.facts(&http, config.model.as_deref()))?;
            check_facts(&http.shown, protocol, &facts, &needs)?;
            let (program, version, model) = (protocol.program(), &facts.version, &facts.model);
            tracing::info!("{}: {program} {version} samples with {model}", http.shown);
            servers.push(Server::new(http, protocol, facts, lora.is_some()));
        }
        // A server of bf16 would round f32 weights itself; half as many bytes are written.
        let is_bf16 = servers.iter().all(|server| server.facts.dtype.as_deref() == Some("bfloat16"));
        let in_files = if is_bf16 { Dtype::Bf16 } else { Dtype::F32 };
        let folders = WeightFolders::create(config.weights_dir.as_deref(), model, lora, in_files)?;
        let shared =
            Shared { servers, latest: Mutex::default(), known: Mutex::default(), vocab_size, retries: config.retries };
        Ok(Self { shared: Arc::new(shared), folders, current: None, batch_size, sampling_masks })
    }

    /// Returns the jobs of a request: one per prompt.
    ///
    /// # Errors
    /// [`grpo_policy::Error::Argument`] if the completions of a prompt have several limits, or streams that do not follow one another: a server
    /// gets one limit and one seed per prompt; or for sampling masks of greedy completions.
    fn jobs(&self, request: &RolloutRequest<'_>) -> grpo_policy::Result<Vec<Job>> {
        let RolloutRequest { prompts, num_generations, stop_ids, stop, sampling, return_sampling_mask, .. } = *request;
        let most = |k: usize| if k == 0 { LONGEST_LIST } else { k.saturating_mul(TIES) }.min(self.shared.vocab_size);
        if return_sampling_mask && sampling == Sampling::Greedy {
            let expected = "random completions, if their sampling masks are returned";
            return Err(grpo_policy::Error::argument("generate", expected, "greedy ones"));
        }
        let job = |(index, prompt): (usize, &Vec<u32>)| {
            let first_index = index * num_generations;
            let (limit, begin) = (request.limit(first_index), request.stream(first_index));
            let follows = |i: usize| {
                request.limit(first_index + i) == limit && request.stream(first_index + i) == begin + i as u64
            };
            if !(0..num_generations).all(follows) {
                let expected = "one limit and consecutive random streams for the completions of a prompt";
                return Err(grpo_policy::Error::argument("generate", expected, "others"));
            }
            let random = match sampling {
                Sampling::Greedy => None,
                Sampling::Random { temperature, processors, seed, purpose, step, first } => {
                    let stream = first + begin;
                    // 62 bits: the seeds of two prompts do not overlap, and the seed of the last completion is a legal one.
                    let seed = grpo_rng::stream(seed, purpose, step, stream).random::<u64>() >> 2;
                    Some(Random { temperature, processors, seed })
                }
            };
            Ok(Job {
                prompt: prompt.clone(),
                // All greedy completions of a prompt are equal.
                count: if random.is_some() { num_generations } else { 1 },
                random,
                max_tokens: limit,
                stop_ids: stop_ids.to_vec(),
                stop_texts: stop.map(|stop| stop.texts().to_vec()).unwrap_or_default(),
                masks: return_sampling_mask,
                // Greedy completions are requested as top-k 1.
                listed: if self.sampling_masks {
                    most(random.map_or(1, |random| random.processors.top_k.unwrap_or(0)))
                } else {
                    0
                },
            })
        };
        prompts.iter().enumerate().map(job).collect()
    }
}

impl RolloutEngine for ServerEngine {
    fn generate(
        &mut self,
        policy: &mut dyn Policy,
        request: &RolloutRequest<'_>,
    ) -> grpo_policy::Result<Vec<Completion>> {
        if self.current.is_none() {
            self.update_weights(policy, 0)?;
        }
        self.start(request)?.wait(request)
    }

    fn context_length(&self) -> Option<usize> {
        self.shared.servers.iter().filter_map(|server| server.facts.context).min()
    }

    fn update_weights(&mut self, policy: &dyn Policy, version: u64) -> grpo_policy::Result<()> {
        // After an error, requests must not use the old weights.
        self.current = None;
        let weights = Arc::new(self.folders.write(policy, version)?);
        lock(&self.shared.known).insert(weights.name.clone(), Known { number: weights.number, version });
        *lock(&self.shared.latest) = Some(Arc::clone(&weights));
        self.shared.send(&weights)?;
        self.current = Some(weights);
        Ok(())
    }

    fn start(&mut self, request: &RolloutRequest<'_>) -> grpo_policy::Result<Pending> {
        let Some(weights) = &self.current else {
            let (expected, found) = ("weights of `update_weights`".into(), "none".into());
            return Err(Error::Argument { operation: "start", expected, found }.into());
        };
        let (shared, weights, jobs) = (Arc::clone(&self.shared), Arc::clone(weights), self.jobs(request)?);
        let threads = (self.batch_size / request.num_generations.max(1)).clamp(1, jobs.len().max(1));
        let guard = Wanted(Arc::new(AtomicBool::new(true)));
        let is_wanted = Arc::clone(&guard.0);
        let (sender, results) = mpsc::channel();
        let running: JoinHandle<Result<()>> = std::thread::Builder::new()
            .name("rollout".into())
            .spawn(move || shared.sample_all(&jobs, &weights, threads, &is_wanted, &sender))
            .map_err(grpo_policy::Error::other)?;
        Ok(Pending::new(move |request| {
            let mut completions = vec![Completion::default(); request.prompts.len() * request.num_generations];
            // Ends when all threads have ended.
            for (prompt, prompt_completions) in results {
                let copies = request.num_generations / prompt_completions.len().max(1);
                let all = prompt_completions.into_iter().flat_map(|completion| std::iter::repeat_n(completion, copies));
                for (index, completion) in (prompt * request.num_generations..).zip(all) {
                    let completion = ended(completion, request)?.map_err(grpo_policy::Error::other)?;
                    request.report(index, &completion);
                    completions[index] = completion;
                }
            }
            let done =
                running.join().map_err(|_| grpo_policy::Error::other("the thread of the rollout has ended early"))?;
            drop(guard);
            done?;
            Ok(completions)
        }))
    }
}

/// Ends the threads of completions that nobody waits for any more.
struct Wanted(Arc<AtomicBool>);

impl Drop for Wanted {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Shared {
    /// Sends weights to all servers at the same time, until at least one has them. The others get them before their next request.
    fn send(&self, weights: &Arc<Weights>) -> Result<()> {
        for attempt in 0_u32.. {
            let began = Instant::now();
            let results: Vec<Result<u64, Fault>> = std::thread::scope(|scope| {
                let threads: Vec<_> =
                    self.servers.iter().map(|server| scope.spawn(|| server.ensure(weights))).collect();
                let failed = |_| Err(Fault::temporary("the thread of the update has ended early"));
                threads.into_iter().map(|thread| thread.join().unwrap_or_else(failed)).collect()
            });
            let (mut last, mut has_arrived) = (None, false);
            for (server, result) in self.servers.iter().zip(results) {
                match result {
                    Ok(_) => {
                        has_arrived = true;
                        server.succeeded();
                    }
                    Err(fault) => {
                        tracing::warn!(
                            "{}: the weights of version {} have not arrived: {}",
                            server.http.shown,
                            weights.version,
                            fault.message()
                        );
                        let after = if let Fault::Temporary { after, .. } = &fault { *after } else { None };
                        server.failed(began, after);
                        if matches!(fault, Fault::Permanent(_)) || attempt == self.retries {
                            last = Some((server, fault));
                        }
                    }
                }
            }
            if has_arrived {
                return Ok(());
            }
            if let Some((server, fault)) = last {
                return Err(given_up(server, fault, attempt + 1));
            }
            let now = Instant::now();
            sleep_until(self.servers.iter().filter_map(|server| server.rests_until(now)).min(), || true);
        }
        Ok(())
    }

    /// Samples all jobs on this many threads, and sends the completions of each job with its index.
    fn sample_all(
        &self,
        jobs: &[Job],
        weights: &Arc<Weights>,
        threads: usize,
        is_wanted: &AtomicBool,
        results: &mpsc::Sender<(usize, Vec<Completion>)>,
    ) -> Result<()> {
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let failed = Mutex::new(None);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while lock(&failed).is_none() && is_wanted.load(Ordering::Relaxed) {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some(job) = jobs.get(index) else { break };
                        match self.sample(job, weights, is_wanted) {
                            // Nobody receives completions that are not wanted any more.
                            Ok(completions) => {
                                done.fetch_add(1, Ordering::Relaxed);
                                drop(results.send((index, completions)));
                            }
                            Err(error) => {
                                lock(&failed).get_or_insert(error);
                            }
                        }
                    }
                });
            }
        });
        if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        if done.into_inner() < jobs.len() {
            let (expected, found) = ("completions that are still wanted".into(), "dropped ones".into());
            return Err(Error::Argument { operation: "rollout", expected, found });
        }
        Ok(())
    }

    /// Samples a job on the server that has least to do, and after a failure on the next one.
    fn sample(&self, job: &Job, weights: &Arc<Weights>, is_wanted: &AtomicBool) -> Result<Vec<Completion>> {
        let mut attempt = 0;
        loop {
            let server = self.free_server(is_wanted);
            let latest = match server.adapters {
                true => Arc::clone(weights),
                false => lock(&self.latest).clone().unwrap_or_else(|| Arc::clone(weights)),
            };
            let began = Instant::now();
            let fault = match server.sample(job, &latest, self.vocab_size, &self.known) {
                Ok(completions) => {
                    server.succeeded();
                    return Ok(completions);
                }
                Err(fault) => fault,
            };
            attempt += 1;
            let useless = matches!(fault, Fault::Permanent(_));
            if useless || attempt > self.retries || !is_wanted.load(Ordering::Relaxed) {
                return Err(given_up(server, fault, attempt));
            }
            tracing::info!("{}: {}; once more", server.http.shown, fault.message());
            match fault {
                Fault::Temporary { after, .. } => server.failed(began, after),
                // The weights are sent again, and the request with them.
                Fault::Forgotten(_) | Fault::Permanent(_) => {}
            }
        }
    }

    /// Waits for a server that does not rest after a failure, and returns the one with the fewest requests.
    fn free_server(&self, is_wanted: &AtomicBool) -> &Server {
        loop {
            let now = Instant::now();
            let free = self.servers.iter().filter(|server| server.rests_until(now).is_none());
            if let Some(server) = free.min_by_key(|server| server.busy()) {
                return server;
            }
            let until = self.servers.iter().filter_map(|server| server.rests_until(now)).min();
            if !sleep_until(until, || is_wanted.load(Ordering::Relaxed)) {
                return &self.servers[0];
            }
        }
    }
}

/// Returns the error for a request that was given up after `attempts` attempts.
fn given_up(server: &Server, fault: Fault, attempts: u32) -> Error {
    match server.is_broken() {
        true => Error::Weights { server: server.http.shown.clone(), message: fault.message().to_owned() },
        false => http::ended(&server.http.shown, fault, attempts),
    }
}

/// Sleeps until a time, and returns `true`; returns `false` as soon as the sleep is not wanted any more.
fn sleep_until(until: Option<Instant>, is_wanted: impl Fn() -> bool) -> bool {
    while let Some(left) = until.and_then(|until| until.checked_duration_since(Instant::now())) {
        if !is_wanted() {
            return false;
        }
        if left.is_zero() {
            break;
        }
        std::thread::sleep(left.min(LOOK));
    }
    is_wanted()
}

/// Returns the port of an address, with its flag; empty for an address without a port.
fn port(url: &str) -> String {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest).split('/').next().unwrap_or_default();
    let port = authority.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    port.map(|port| format!(" --port {port}")).unwrap_or_default()
}

/// Returns a text as one word of a shell.
fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    match text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

/// Calls a function until it succeeds, a retry is useless, or the retries are exhausted. The first failure is reported with `advice`.
fn attempts<T>(server: &str, retries: u32, advice: &str, call: impl Fn() -> Result<T, Fault>) -> Result<T> {
    for attempt in 1_u32.. {
        match call() {
            Ok(value) => return Ok(value),
            Err(Fault::Temporary { message, after }) if attempt <= retries => {
                let (pause, all) = (backoff(attempt, after), u64::from(retries) + 1);
                let advice = if attempt == 1 { format!("; {advice}") } else { String::new() };
                let next = pause.as_secs_f64();
                tracing::warn!("{server}: {message} (attempt {attempt} of {all}, the next one in {next} s){advice}");
                std::thread::sleep(pause);
            }
            Err(fault) => return Err(http::ended(server, fault, attempt)),
        }
    }
    Err(http::ended(server, Fault::temporary("no attempt"), 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("http://127.0.0.1:8000", " --port 8000")]
    #[case("http://user:secret@host:81/prefix", " --port 81")]
    #[case("http://[::1]:9000", " --port 9000")]
    #[case("https://host", "")]
    fn the_port_of_a_server_is_part_of_its_command(#[case] url: &str, #[case] flag: &str) {
        assert_eq!(port(url), flag);
    }

    #[test]
    fn paths_with_spaces_are_one_word_of_a_shell() {
        assert_eq!(shell_word("/models/Qwen3-0.6B"), "/models/Qwen3-0.6B");
        assert_eq!(shell_word("/my models/it's"), "'/my models/it'\\''s'");
    }
}
