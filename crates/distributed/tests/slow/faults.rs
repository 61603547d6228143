//! Processes that end, hang, come late, or do something else.

use crate::support::{LONG, SHORT, frame, processes, run, run_open};
use grpo_distributed::{Error, Options, Store};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

/// Checks that an error names a process, and returns it as text.
fn names(error: &Error, process: usize) -> String {
    assert!(matches!(error, Error::Peer { process: named, .. } if *named == process), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with(&format!("process {process} (127.0.0.1:")), "{text}");
    text
}

#[test]
fn the_end_of_any_process_ends_every_wait_of_the_others() {
    for ending in 0..3 {
        let errors = run_open(3, move |store| {
            if store.process_id() == ending {
                return None;
            }
            let waits: Vec<Error> = thread::scope(|scope| {
                let get = scope.spawn(|| store.get("never", LONG).unwrap_err());
                let failure = scope.spawn(|| store.failure().unwrap());
                let barrier = store.barrier("never", &[], LONG).unwrap_err();
                vec![barrier, get.join().unwrap(), failure.join().unwrap()]
            });
            let later = [store.put("a", b"b").unwrap_err(), store.broadcast("c", Vec::new).unwrap_err()];
            Some([waits, later.to_vec()].concat())
        });
        for error in errors.iter().flatten().flatten() {
            assert!(names(error, ending).contains("has closed its connection"), "{error}");
        }
        assert_eq!(errors.iter().flatten().map(Vec::len).collect::<Vec<_>>(), [5, 5]);
    }
}

#[test]
fn a_reported_error_reaches_all_processes_with_its_text() {
    for failing in 0..3 {
        let errors = run_open(3, move |store| {
            if store.process_id() == failing {
                store.fail("the device is lost");
                return None;
            }
            store.failure()
        });
        for error in errors.iter().flatten() {
            assert!(names(error, failing).ends_with("has failed: the device is lost"), "{error}");
        }
        assert_eq!(errors.iter().flatten().count(), 2);
    }
}

#[test]
fn different_tokens_at_a_barrier_name_the_process() {
    let errors = run_open(3, |store| {
        let same: &[u8] = b"same";
        store.barrier("the weights of step 1", same, LONG).unwrap();
        let token = if store.process_id() == 2 { b"othr" } else { same };
        store.barrier("the weights of step 2", token, LONG).unwrap_err()
    });
    for error in errors {
        assert!(names(&error, 2).ends_with("differs from process 0 in the weights of step 2"), "{error}");
    }
}

#[test]
fn processes_at_different_collectives_fail() {
    let barriers = run_open(2, |store| {
        let name = if store.is_leader() { "one" } else { "two" };
        store.barrier(name, &[], LONG).unwrap_err()
    });
    for error in barriers {
        assert!(names(&error, 1).ends_with("is at two, and process 0 at one"), "{error}");
    }
    let broadcasts = run_open(2, |store| match store.is_leader() {
        true => store.broadcast("one", Vec::new).and_then(|_| store.barrier("next", &[], LONG)).unwrap_err(),
        false => store.broadcast("two", Vec::new).unwrap_err(),
    });
    assert!(names(&broadcasts[1], 0).ends_with("is at one, and process 1 at two"), "{broadcasts:?}");
    names(&broadcasts[0], 1);
}

#[test]
fn a_process_missing_at_a_barrier_is_named_after_the_limit() {
    let errors = run_open(2, |store| match store.is_leader() {
        true => store.barrier("alone", &[], SHORT).unwrap_err(),
        false => store.failure().unwrap(),
    });
    assert!(
        matches!(&errors[0], Error::TimedOut { what, .. } if what.starts_with("process 1 (127.0.0.1")),
        "{errors:?}"
    );
    assert!(names(&errors[1], 0).contains("process 1"), "{errors:?}");
    let errors = run_open(2, |store| match store.is_leader() {
        true => store.failure().unwrap(),
        false => store.barrier("alone", &[], SHORT).unwrap_err(),
    });
    assert!(matches!(&errors[1], Error::TimedOut { what, .. } if what == "process 0 at alone"), "{errors:?}");
    names(&errors[0], 1);
}

#[test]
fn a_missing_process_is_named_after_the_limit() {
    let mut options = processes(4);
    options.remove(2);
    options[0].initialization_timeout = Duration::from_secs(3);
    let errors = run(options, |_| vec![], Result::unwrap_err);
    assert!(matches!(&errors[0], Error::Missing { processes, .. } if *processes == [2]), "{:?}", errors[0]);
    for error in &errors[1..] {
        assert!(names(error, 0).contains("process 2 is not connected"), "{error}");
    }
}

#[test]
fn a_follower_without_a_leader_ends_after_its_limit() {
    let limit = Duration::from_millis(300);
    let error = Store::open(&Options { initialization_timeout: limit, ..processes(2).remove(1) }, &[]).unwrap_err();
    assert!(matches!(error, Error::Unreachable { process: 1, .. }), "{error:?}");
}

#[test]
fn a_follower_may_start_before_the_leader() {
    let options = processes(2);
    let late = options[0].clone();
    let follower = thread::spawn(move || {
        let store = Store::open(&options[1], &[]).unwrap();
        let value = store.broadcast("x", Vec::new).unwrap();
        store.close().map(|()| value).unwrap()
    });
    thread::sleep(SHORT);
    let store = Store::open(&late, &[]).unwrap();
    store.broadcast("x", || vec![5]).unwrap();
    store.close().unwrap();
    assert_eq!(follower.join().unwrap(), [5]);
}

#[test]
fn a_process_that_comes_after_the_others_is_refused() {
    let options = processes(2);
    let limit = Duration::from_millis(300);
    let late = Options { initialization_timeout: limit, ..options[1].clone() };
    run(
        options,
        |_| vec![],
        move |store| {
            let store = store.unwrap();
            if !store.is_leader() {
                // The leader no longer listens, or closes a connection that it has not accepted.
                let error = Store::open(&late, &[]).unwrap_err();
                assert!(matches!(error, Error::Unreachable { .. } | Error::Peer { process: 0, .. }), "{error:?}");
            }
            store.close().unwrap();
        },
    );
}

#[test]
fn differences_end_all_processes_with_the_process_and_the_keys() {
    type Change = fn(&mut Options);
    let none: Change = |_| {};
    let cases: [(&'static str, Change, &[&str]); 4] = [
        ("other", none, &["was started differently: version (other, and 1 at process 0)"]),
        ("1", |options| options.num_processes = 7, &["num_processes 7, and process 0 with 3"]),
        ("1", |options| options.process_id = 1, &["has the process_id of the process at 127.0.0.1:"]),
        ("1", |options| (options.num_processes, options.process_id) = (4, 3), &["num_processes 4"]),
    ];
    for (version, change, words) in cases {
        let mut options = processes(3);
        // Otherwise a follower that the refused one overtakes would wait for a leader that has ended.
        options.iter_mut().for_each(|options| options.initialization_timeout = Duration::from_secs(2));
        change(&mut options[2]);
        let last = options[2].process_id;
        let is_changed = move |process: usize| if process == last { version } else { "1" };
        let errors =
            run(options, move |process| vec![("seed", "1"), ("version", is_changed(process))], Result::unwrap_err);
        let text = names(&errors[0], last);
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        // The refused process has the same error; the third one may have been told, or has found no leader.
        assert!(errors[1..].iter().any(|error| *error == errors[0]), "{errors:?}");
    }
}

#[test]
fn many_different_facts_are_counted() {
    let long: &'static str = Box::leak("x".repeat(10_000).into_boxed_str());
    let facts = move |process| {
        let value = if process == 0 { "a" } else { long };
        vec![("a", value), ("b", value), ("c", value), ("d", value), ("e", value), ("f", value), ("g", value)]
    };
    let errors = run(processes(2), facts, Result::unwrap_err);
    let text = names(&errors[0], 1);
    assert!(text.contains("and 2 more") && text.len() < 1000, "{text}");
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn a_machine_that_falls_silent_is_lost_after_the_heartbeat_limit() {
    // A leader that accepts the follower and then sends nothing.
    let options = Options { heartbeat_timeout: Duration::from_millis(200), ..processes(2).remove(1) };
    let listener = TcpListener::bind(&options.coordinator_address).unwrap();
    let silent = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut stream, &frame(2, "", b"")).unwrap();
        stream
    });
    let store = Store::open(&options, &[]).unwrap();
    let text = names(&store.failure().unwrap(), 0);
    assert!(text.contains("has sent nothing for 0.2 seconds"), "{text}");
    drop(silent.join().unwrap());
}

#[test]
fn heartbeats_keep_idle_processes_connected() {
    let mut options = processes(2);
    options.iter_mut().for_each(|options| options.heartbeat_timeout = Duration::from_secs(2));
    run(
        options,
        |_| vec![],
        |store| {
            let store = store.unwrap();
            thread::sleep(Duration::from_secs(4));
            store.close().unwrap();
        },
    );
}
