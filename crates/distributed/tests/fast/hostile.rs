//! Peers that do not speak the protocol, or break it.

use crate::support::{LONG, frame, processes};
use grpo_distributed::{Error, Options, Store};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

fn connect(options: &Options) -> TcpStream {
    loop {
        match TcpStream::connect(&options.coordinator_address) {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Returns the first bytes of a process with this first message.
fn hello(json: &str) -> Vec<u8> {
    [b"GRPOSTOR", &frame(1, "", json.as_bytes())[..]].concat()
}

#[test]
fn strangers_are_turned_away_and_the_run_starts() {
    let options = processes(2);
    let (leader, follower) = (options[0].clone(), options[1].clone());
    let leader = thread::spawn(move || Store::open(&leader, &[]).and_then(|store| store.close()));
    let too_long = [&b"GRPOSTOR"[..], &u32::MAX.to_le_bytes(), &[1; 100]].concat();
    let strangers = [
        b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n".to_vec(),
        Vec::new(),
        too_long,
        [&b"GRPOSTOR"[..], &frame(4, "", b"")].concat(),
        [&b"GRPOSTOR"[..], &frame(99, "", b"")].concat(),
        hello("{}"),
        hello("not json"),
        hello(r#"{"protocol": 1, "num_processes": -1, "process_id": 1}"#),
    ];
    for bytes in strangers {
        let mut stream = connect(&options[0]);
        stream.write_all(&bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // The leader closes the connection, with or without a reset, and answers nothing.
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{answer:?}");
    }
    // A connection that sends nothing delays nobody.
    let silent = connect(&options[0]);
    Store::open(&follower, &[]).unwrap().close().unwrap();
    leader.join().unwrap().unwrap();
    drop(silent);
}

#[test]
fn another_version_of_the_protocol_is_named() {
    let options = processes(2).remove(0);
    let leader = thread::spawn({
        let options = options.clone();
        move || Store::open(&options, &[]).unwrap_err()
    });
    let mut stream = connect(&options);
    stream.write_all(&hello(r#"{"protocol": 9, "process_id": 1, "field of the future": true}"#)).unwrap();
    let error = leader.join().unwrap();
    let text = error.to_string();
    assert!(matches!(error, Error::Peer { process: 1, .. }) && text.contains("version 9 of the protocol"), "{text}");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(String::from_utf8_lossy(&answer).contains("version 9"), "{answer:?}");
}

#[test]
fn a_peer_that_breaks_the_protocol_is_named() {
    let failure_that_names_another = br#"{"process": 0, "address": "x", "reason": "has failed: really"}"#;
    for (bytes, words) in [
        (vec![0xff; 64], "sends a message of 4294967295 bytes"),
        (frame(77, "", b""), "unknown kind 77"),
        (frame(2, "", b""), "it sends Welcome"),
        (frame(15, "rewards", b"forged"), "it sends Broadcast"),
        (frame(12, "x", b"").repeat(2000), "1024 barriers ahead"),
        (frame(3, "", failure_that_names_another), "process 1 (127.0.0.1:"),
        (frame(5, "key", b"value")[..20].to_vec(), "has closed its connection"),
    ] {
        let options = processes(2).remove(0);
        let leader = thread::spawn({
            let options = options.clone();
            move || Store::open(&options, &[]).unwrap().get("never", LONG).unwrap_err()
        });
        let mut stream = connect(&options);
        stream.write_all(&hello(r#"{"protocol": 1, "num_processes": 2, "process_id": 1}"#)).unwrap();
        // The leader may close the connection before it has read everything.
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let error = leader.join().unwrap();
        let text = error.to_string();
        assert!(matches!(error, Error::Peer { process: 1, .. }) && text.contains(words), "{words}: {text}");
    }
}
