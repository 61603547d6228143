//! Holds a conversation with a server of OpenEnv that sends the input. Bits of the first byte:
//!
//! * 0: the rest is bytes behind the handshake; otherwise each line is a message of text.
//! * 1: the tools are known, so that the server is not asked for them.
//! * 2: the keys `action` and `observation` are set.
#![no_main]

use grpo_agents::{Environment, EnvironmentConfig, OpenEnv};
use grpo_data::Item;
use libfuzzer_sys::fuzz_target;
use serde_json::json;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::sync::mpsc::{Sender, channel};
use std::sync::{LazyLock, Mutex};
use tungstenite::Message;

/// A server, and the sender of its inputs: one for each conversation.
struct Server {
    url: String,
    inputs: Sender<Vec<u8>>,
}

static SERVER: LazyLock<Mutex<Server>> = LazyLock::new(|| {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let (inputs, received) = channel::<Vec<u8>>();
    std::thread::spawn(move || {
        let mut input = Vec::new();
        for stream in listener.incoming() {
            // A conversation may connect again.
            input = received.try_recv().unwrap_or(input);
            let stream = stream.expect("a connection");
            stream.set_nodelay(true).expect("an option");
            let Ok(mut socket) = tungstenite::accept(stream) else { continue };
            let is_raw = input.first().is_some_and(|options| options & 1 == 1);
            let rest = input.get(1..).unwrap_or_default();
            // The client may have closed the connection.
            if is_raw {
                let _ = socket.get_mut().write_all(rest);
            } else {
                for line in rest.split(|byte| *byte == b'\n') {
                    let _ = socket.read();
                    let _ = socket.send(Message::text(String::from_utf8_lossy(line).into_owned()));
                }
            }
            let stream = socket.get_mut();
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    Mutex::new(Server { url, inputs })
});

fuzz_target!(|input: &[u8]| {
    let server = SERVER.lock().expect("one fuzzer");
    server.inputs.send(input.to_vec()).expect("the server runs");
    let is = |bit: u8| input.first().is_some_and(|options| options >> bit & 1 == 1);
    let tool = json!([{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]);
    let config = EnvironmentConfig {
        url: Some(server.url.clone()),
        tools: is(1).then_some(tool),
        action: is(2).then(|| "guess".into()),
        observation: is(2).then(|| "text".into()),
        timeout: 5.0,
        ..EnvironmentConfig::default()
    };
    let environment = OpenEnv::new("fuzz", &config).expect("a configuration");
    let Ok(start) = environment.reset(&Item::new("a prompt"), 0) else { return };
    let mut episode = start.episode;
    let call = json!({"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}});
    for message in [
        json!({"role": "assistant", "content": "5"}),
        json!({"role": "assistant", "content": "", "tool_calls": [call, call]}),
    ] {
        if let Ok(reply) = episode.step(&message) {
            grpo_agents::check_messages(&reply.messages).expect("messages with a role and a text");
        }
    }
});
