//! The store between threads, each with its own connection, and against hostile peers.

mod hostile;
#[path = "../support/mod.rs"]
mod support;

use grpo_distributed::{Error, MAX_KEY, MAX_VALUE, Options, Store};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;
use support::{LONG, SHORT, processes, run_open};

#[test]
fn values_of_every_process_reach_every_process() {
    let found = run_open(3, |store| {
        let me = store.process_id();
        assert_eq!((store.num_processes(), store.is_leader()), (3, me == 0));
        assert_eq!(store.try_get(&format!("absent {me}")).unwrap(), None);
        // Requests of several threads wait for values that others set later.
        let others: Vec<_> = thread::scope(|scope| {
            let get = |process: usize| store.get(&format!("from {process}"), LONG).unwrap();
            let waiting: Vec<_> = (0..3).rev().map(|process| scope.spawn(move || get(process))).collect();
            thread::sleep(SHORT);
            store.put(&format!("from {me}"), &vec![me as u8; 100_000 * me]).unwrap();
            waiting.into_iter().map(|thread| thread.join().unwrap().len()).collect()
        });
        store.barrier("read", &[], LONG).unwrap();
        assert_eq!(store.try_get("from 1").unwrap().unwrap(), vec![1; 100_000]);
        store.close().unwrap();
        others
    });
    assert_eq!(found, vec![vec![200_000, 100_000, 0]; 3]);
}

#[test]
fn broadcasts_reach_all_processes_in_order_and_in_any_size() {
    let found = run_open(3, |store| {
        let sizes = [0, 1, MAX_VALUE, MAX_VALUE + 1, 2 * MAX_VALUE - 1, 7];
        for size in sizes {
            // Parts in another order would differ.
            let made = || (0..251).cycle().take(size).collect::<Vec<u8>>();
            let value = store.broadcast(&format!("size {size}"), || {
                assert!(store.is_leader());
                made()
            });
            assert!(value.unwrap() == made(), "{size}");
        }
        store.close().unwrap();
    });
    assert_eq!(found.len(), 3);
}

#[test]
fn a_missing_value_times_out_and_the_store_stays_usable() {
    run_open(2, |store| {
        let error = store.get("absent", SHORT).unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }) && error.to_string().contains("`absent`"), "{error}");
        store.barrier("later", &[], LONG).unwrap();
        store.put("absent", b"late").unwrap();
        assert_eq!(store.get("absent", LONG).unwrap(), b"late");
        store.close().unwrap();
    });
}

#[test]
fn a_key_keeps_its_first_value_and_sizes_have_limits() {
    run_open(2, |store| {
        store.put("key", b"value").unwrap();
        store.put("key", b"value").unwrap();
        assert_eq!(store.put("key", b"other"), Err(Error::Exists { key: "key".into() }));
        let long = "k".repeat(MAX_KEY + 1);
        for error in [store.put(&long, &[]), store.try_get(&long).map(drop), store.put("key", &vec![0; MAX_VALUE + 1])]
        {
            assert!(matches!(error, Err(Error::Size { .. })), "{error:?}");
        }
        store.close().unwrap();
    });
}

#[test]
fn one_process_needs_no_others() {
    let store = Store::open(&processes(1)[0], &[]).unwrap();
    store.put("a", b"b").unwrap();
    store.barrier("alone", &[], SHORT).unwrap();
    assert_eq!(store.broadcast("x", || vec![1]).unwrap(), [1]);
    store.close().unwrap();
    assert_eq!(store.failure(), None);
}

#[test]
fn invalid_options_are_errors_before_anything_is_opened() {
    let valid = Options::new("127.0.0.1:1", 2, 1);
    for (options, words) in [
        (Options { num_processes: 0, ..valid.clone() }, "`num_processes`: expected 1 or more, got 0"),
        (Options { process_id: 2, ..valid.clone() }, "`process_id`: expected a number below num_processes, 2, got 2"),
        (Options { coordinator_address: String::new(), ..valid.clone() }, "`coordinator_address`: expected HOST:PORT"),
        (Options { heartbeat_timeout: Duration::ZERO, ..valid.clone() }, "`heartbeat_timeout`"),
    ] {
        let error = Store::open(&options, &[]).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = Store::open(&Options::new(&address, 2, 0), &[]).unwrap_err();
    assert!(matches!(error, Error::Listen { .. }) && error.to_string().contains(&address), "{error}");
}
