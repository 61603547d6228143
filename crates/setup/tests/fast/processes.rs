//! Environments and agents in runs of two processes, which are threads with a store each: process 0 alone asks them, and both take the same steps.

use crate::agents::{Client, user};
use crate::conversations::{Questions, config, tokenizer};
use crate::scored;
use data::Item;
use grpo_distributed::{Options, Store};
use grpo_trainer::agents::{Agent, Connection, Environment, Environments, Episode, Failure, Reply, Start};
use grpo_trainer::{Error, Result, TrainConfig, Trainer, agents, data, policy};
use policy::{PolicyEngine, StateGroup, export_all};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Answer<T> = std::result::Result<T, Failure>;

/// Returns a number that differs between processes and between runs.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}

fn stores() -> [Arc<Store>; 2] {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    std::thread::scope(|scope| {
        let open = |process| Arc::new(Store::open(&Options::new(&address, 2, process), &[]).unwrap());
        [0, 1].map(|process| scope.spawn(move || open(process))).map(|thread| thread.join().unwrap())
    })
}

fn trainer(config: &TrainConfig, store: &Arc<Store>, environments: Environments) -> Result<Trainer> {
    let parts = grpo_setup::parts_with_tokenizer(config, Box::new(tokenizer())).unwrap();
    let rewards = scored("environment", |input| input.conversation?.reward);
    let mut parts = parts.with_environments(environments).with_engine(PolicyEngine).with_store(Arc::clone(store));
    (parts.dataset, parts.rewards) = (Box::new(Questions(0)), rewards);
    Trainer::with_parts(config.clone(), parts)
}

/// What a process has sampled and learned.
#[derive(Debug, PartialEq)]
struct Trained {
    completions: Vec<String>,
    metrics: Vec<BTreeMap<String, f64>>,
    weights: Vec<(String, Vec<u32>)>,
}

/// Trains in a process until its third step, or its first error.
fn train(config: &TrainConfig, store: &Arc<Store>, environments: Environments) -> Result<Trained> {
    let mut run = trainer(config, store, environments)?;
    let (mut completions, mut metrics) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let report = run.grpo_step()?;
        completions.extend(report.samples.iter().map(|sample| sample.completion.clone()));
        metrics.push(report.metrics.values().map(|(name, value)| (name.to_owned(), value)).collect());
    }
    let weights = export_all(run.policy(), StateGroup::Weights(policy::Weights::Policy))?;
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
    let weights = weights.iter().map(|tensor| (tensor.name.clone(), bits(&tensor.data))).collect();
    store.close()?;
    Ok(Trained { completions, metrics, weights })
}

fn both(config: &TrainConfig, environments: [Environments; 2]) -> [Result<Trained>; 2] {
    let stores = stores();
    std::thread::scope(|scope| {
        let mut pairs = stores.iter().zip(environments);
        let threads = [pairs.next().unwrap(), pairs.next().unwrap()]
            .map(|(store, environments)| scope.spawn(move || train(config, store, environments)));
        threads.map(|thread| thread.join().unwrap())
    })
}

fn settings() -> TrainConfig {
    let mut config = config(json!({"max_assistant_turns": 3}));
    (config.grpo.num_generations, config.rollout.max_completion_length) = (8, Some(100));
    config.optimizer.learning_rate = 0.02;
    // Random tokens seldom end a turn.
    config.rollout.stop_token_ids = (0..60).collect();
    config
}

/// An environment whose messages, rewards, delays and failures are random. It counts its conversations.
#[derive(Clone)]
struct Dice(Arc<AtomicUsize>);

impl Dice {
    fn roll() -> Answer<Reply> {
        let random = random();
        std::thread::sleep(Duration::from_millis(random % 8));
        if random.is_multiple_of(16) {
            return Err(Failure::new("it has lost its dice"));
        }
        let messages = vec![json!({"role": "user", "content": random.to_string()})];
        Ok(Reply { messages, reward: Some((random >> 8 & 1023) as f32 * 0.1), done: (random >> 4).is_multiple_of(4) })
    }
}

impl Environment for Dice {
    fn workers(&self) -> usize {
        4
    }

    fn reset(&self, _: &Item, _: usize) -> Answer<Start> {
        // The first conversation is the check before the run, which must not fail.
        let messages = match self.0.fetch_add(1, Ordering::Relaxed) {
            0 => vec![],
            _ => Self::roll()?.messages,
        };
        Ok(Start { messages, episode: Box::new(self.clone()) })
    }
}

impl Episode for Dice {
    fn step(&mut self, _: &Value) -> Answer<Reply> {
        Self::roll()
    }
}

fn one(environment: impl Environment + 'static) -> Environments {
    Environments::from_list(vec![("test".into(), Arc::new(environment))])
}

#[test]
fn processes_follow_an_environment_that_answers_at_random() {
    let counts = [0; 2].map(|_| Arc::new(AtomicUsize::new(0)));
    let [leader, follower] = both(&settings(), counts.each_ref().map(|count| one(Dice(Arc::clone(count)))));
    let (leader, follower) = (leader.unwrap(), follower.unwrap());
    assert_eq!(leader, follower);
    assert!(leader.metrics.iter().any(|metrics| metrics["num_turns/max"] > 1.0), "{:?}", leader.metrics);
    let [of_leader, of_follower] = counts.map(|count| count.load(Ordering::Relaxed));
    assert_eq!((of_leader, of_follower), (1 + 3 * 8, 0));
}

/// An environment whose tools are known in one process only, as those of a server.
struct Tools(Option<Value>);

impl Environment for Tools {
    fn tools(&self) -> Option<&Value> {
        self.0.as_ref()
    }

    fn reset(&self, _: &Item, _: usize) -> Answer<Start> {
        Ok(Start { messages: vec![], episode: Box::new(Dice(Arc::default())) })
    }
}

#[test]
fn processes_show_the_tools_of_the_leader() {
    let tools = json!([{"type": "function", "function": {"name": "roll", "parameters": {"type": "object"}}}]);
    let [leader, follower] = both(&settings(), [one(Tools(Some(tools))), one(Tools(None))]);
    assert_eq!(leader.unwrap(), follower.unwrap());
}

#[test]
fn too_many_failures_of_an_environment_are_the_error_of_both_processes() {
    /// An environment that begins conversations, and no more.
    struct Mute;
    impl Environment for Mute {
        fn reset(&self, _: &Item, _: usize) -> Answer<Start> {
            Ok(Start { messages: vec![], episode: Box::new(Self) })
        }
    }
    impl Episode for Mute {
        fn step(&mut self, _: &Value) -> Answer<Reply> {
            Err(Failure::new(format!("out of words {}", random())))
        }
    }
    let mut config = settings();
    config.rollout.multi_turn.max_consecutive_failures = 2;
    let [leader, follower] = both(&config, [one(Mute), one(Mute)]).map(|result| result.unwrap_err());
    for error in [&leader, &follower] {
        assert!(matches!(error, Error::Environments(agents::Error::TooManyFailures { failures: 2, .. })), "{error}");
    }
    // Also its last words, which are random.
    assert_eq!(leader.to_string(), follower.to_string());
}

#[test]
fn an_environment_that_cannot_start_ends_the_leader_and_the_follower_names_it() {
    struct Absent;
    impl Environment for Absent {
        fn reset(&self, _: &Item, _: usize) -> Answer<Start> {
            Err(Failure::new("nobody is there"))
        }
    }
    let [of_leader, of_follower] = stores();
    std::thread::scope(|scope| {
        let follower = scope.spawn(|| trainer(&settings(), &of_follower, one(Absent)).err().unwrap());
        let error = trainer(&settings(), &of_leader, one(Absent)).err().unwrap();
        assert!(error.to_string().contains("nobody is there"), "{error}");
        drop(of_leader);
        let error = follower.join().unwrap();
        assert!(matches!(&error, Error::Processes(grpo_distributed::Error::Peer { process: 0, .. })), "{error}");
    });
}

/// An environment that says when it is asked, and waits until it may answer.
#[derive(Clone)]
struct Slow(SyncSender<()>, Arc<Mutex<Receiver<()>>>);

impl Environment for Slow {
    fn reset(&self, _: &Item, _: usize) -> Answer<Start> {
        Ok(Start { messages: vec![], episode: Box::new(self.clone()) })
    }
}

impl Episode for Slow {
    fn step(&mut self, _: &Value) -> Answer<Reply> {
        self.0.send(()).unwrap();
        // The sender is dropped by the test.
        let _ = self.1.lock().unwrap().recv();
        Ok(Reply { done: true, ..Reply::default() })
    }
}

#[test]
fn a_process_that_fails_while_an_environment_answers_is_named_by_the_other() {
    for failed in 0..2 {
        let stores = stores();
        let (asked, is_asked) = sync_channel(100);
        let (go, may_go) = sync_channel::<()>(0);
        let environment = Slow(asked, Arc::new(Mutex::new(may_go)));
        std::thread::scope(|scope| {
            let threads = stores.each_ref().map(|store| {
                let environments = one(environment.clone());
                scope.spawn(move || train(&settings(), store, environments))
            });
            is_asked.recv().unwrap();
            stores[failed].fail("it was ended");
            // The follower knows now, and the leader at its next message.
            stores[1 - failed].failure();
            drop(go);
            let [leader, follower] = threads.map(|thread| thread.join().unwrap().unwrap_err());
            for error in [leader, follower] {
                let Error::Processes(grpo_distributed::Error::Peer { process, reason, .. }) = &error else {
                    panic!("{error}");
                };
                assert!(*process == failed && reason.contains("it was ended"), "{error}");
            }
        });
    }
}

/// An agent of random delays and rewards, which holds conversations of two requests, and sometimes fails.
struct Player;

impl Agent for Player {
    fn workers(&self) -> usize {
        4
    }

    fn run(&self, _: &Item, connection: &Connection, _: usize) -> Answer<Option<f32>> {
        let mut messages = vec![user(&format!("Guess {}.", random()))];
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(random() % 30));
            let (message, _) = Client(connection).ask(&messages, json!({"max_tokens": 12}));
            messages.extend([message, user(&format!("Not {}.", random()))]);
        }
        // Refused requests are not sampled.
        let (status, _) = Client(connection).send(&messages, json!({"n": 2}));
        assert_eq!(status, 400);
        match random() {
            random if random.is_multiple_of(8) => Err(Failure::new(format!("lost {random}"))),
            random => Ok(Some((random >> 8 & 1023) as f32)),
        }
    }
}

/// An agent of a process that runs none.
struct Idle;

impl Agent for Idle {
    fn run(&self, _: &Item, _: &Connection, _: usize) -> Answer<Option<f32>> {
        panic!("process 1 runs an agent");
    }
}

#[test]
fn processes_answer_the_agents_of_the_leader() {
    let of = |agent: Arc<dyn Agent>| Environments::from_agents(vec![("test".into(), agent)]);
    let mut config = settings();
    config.rollout.max_completion_length = Some(300);
    let [leader, follower] = both(&config, [of(Arc::new(Player)), of(Arc::new(Idle))]);
    let (leader, follower) = (leader.unwrap(), follower.unwrap());
    assert_eq!(leader, follower);
    assert!(leader.metrics.iter().all(|metrics| metrics["num_turns/mean"] == 2.0), "{:?}", leader.metrics);
}
