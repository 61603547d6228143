//! Stores of several processes, each in a thread.
// Each test binary uses some of it.
#![allow(dead_code)]

use grpo_distributed::{Options, Result, Store};
use std::net::TcpListener;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

pub(crate) const LONG: Duration = Duration::from_secs(60);
pub(crate) const SHORT: Duration = Duration::from_millis(50);

/// Returns the options of each process at a free port of this machine.
pub(crate) fn processes(num_processes: usize) -> Vec<Options> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    (0..num_processes).map(|process| Options::new(&address, num_processes, process)).collect()
}

/// Runs `work` in a thread per process and returns the results.
pub(crate) fn run<T: Send + 'static>(
    options: Vec<Options>,
    facts: impl Fn(usize) -> Vec<(&'static str, &'static str)>,
    work: impl Fn(Result<Store>) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let work = Arc::new(work);
    let threads: Vec<_> = options
        .into_iter()
        .map(|options| {
            let (work, facts) = (Arc::clone(&work), facts(options.process_id));
            thread::spawn(move || work(Store::open(&options, &facts)))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Like [`run`], with equal facts and an open store. Work begins when all processes have opened theirs: otherwise a failure of one may be the
/// error of another one's [`Store::open`].
pub(crate) fn run_open<T: Send + 'static>(num: usize, work: impl Fn(Store) -> T + Send + Sync + 'static) -> Vec<T> {
    let all_open = Barrier::new(num);
    let when_open = move |store: Result<Store>| {
        let store = store.unwrap();
        all_open.wait();
        work(store)
    };
    run(processes(num), |_| vec![("version", "1")], when_open)
}

/// Returns a message as bytes.
pub(crate) fn frame(verb: u8, key: &str, value: &[u8]) -> Vec<u8> {
    let mut bytes = ((11 + key.len() + value.len()) as u32).to_le_bytes().to_vec();
    bytes.push(verb);
    bytes.extend_from_slice(&0_u64.to_le_bytes());
    bytes.extend_from_slice(&(key.len() as u16).to_le_bytes());
    bytes.extend_from_slice(key.as_bytes());
    bytes.extend_from_slice(value);
    bytes
}
