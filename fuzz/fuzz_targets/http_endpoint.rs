//! Sends the input to an endpoint. The first byte selects a path, whose body is the rest; from `PATHS.len()` on, the rest is all that is
//! sent, in which `KEY` stands for a valid key.
#![no_main]

use grpo_agents::endpoint::{Asked, ChatReply, Job, Rules};
use grpo_agents::{Agent, Connection, Endpoint, Error, Failure};
use grpo_data::Item;
use libfuzzer_sys::fuzz_target;
use serde_json::json;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, LazyLock};

const PATHS: [&str; 5] = ["chat/completions", "completions", "responses", "messages", "messages/count_tokens"];

/// An endpoint that ignores unknown fields, and one that refuses them.
static ENDPOINTS: LazyLock<[Endpoint; 2]> = LazyLock::new(|| {
    [false, true].map(|is_strict| Endpoint::open(None, Rules { is_strict, ..Rules::default() }).expect("a free port"))
});

/// Sends the input, and reads the response.
struct Client(Vec<u8>);

impl Agent for Client {
    fn run(&self, _: &Item, connection: &Connection, _: usize) -> Result<Option<f32>, Failure> {
        let (select, body) =
            self.0.split_first().map_or((0, &[][..]), |(select, body)| (usize::from(*select) / 2, body));
        let address = connection.base_url().trim_start_matches("http://").trim_end_matches("/v1");
        let mut stream = TcpStream::connect(address).expect("the endpoint is open");
        let key = connection.api_key();
        // The endpoint may refuse a request that was sent in part.
        match PATHS.get(select) {
            Some(path) => {
                let head = format!(
                    "POST /v1/{path} HTTP/1.1\r\nX-Api-Key: {key}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                );
                let _ = stream.write_all(&[head.as_bytes(), body].concat());
            }
            None => {
                let parts: Vec<&[u8]> = split(body, b"KEY");
                let _ = stream.write_all(&parts.join(key.as_bytes()));
                let _ = stream.shutdown(Shutdown::Write);
            }
        }
        let mut response = Vec::new();
        let _ = stream.read_to_end(&mut response);
        assert!(response.is_empty() || response.starts_with(b"HTTP/1.1 "));
        Ok(None)
    }
}

fn split<'a>(mut text: &'a [u8], mark: &[u8]) -> Vec<&'a [u8]> {
    let mut parts = Vec::new();
    while let Some(at) = text.windows(mark.len()).position(|window| window == mark) {
        parts.push(&text[..at]);
        text = &text[at + mark.len()..];
    }
    parts.push(text);
    parts
}

/// Answers with a text, or with a call of the first tool.
fn answer(asked: Vec<Asked>) -> Result<(), Error> {
    for asked in asked {
        let request = &asked.request;
        let name =
            request.tools.as_ref().filter(|_| request.calls_tools).map(|tools| tools[0]["function"]["name"].clone());
        let mut message = json!({"role": "assistant", "content": "an answer"});
        if let Some(name) = &name {
            let call = json!({"id": "call_1", "type": "function", "function": {"name": name, "arguments": {"a": 1}}});
            message["tool_calls"] = json!([call]);
        }
        let stop = request.stop.first().cloned();
        asked.answer(Ok(ChatReply {
            message,
            finish_reason: if name.is_some() { "tool_calls" } else { "stop" },
            stop,
            prompt_tokens: 3,
            tokens: vec![("an ".into(), -0.5), ("answer".into(), -1.5)],
        }));
    }
    Ok(())
}

fuzz_target!(|input: &[u8]| {
    let is_strict = input.first().is_some_and(|select| select % 2 == 1);
    let (row, agent) = (Item::new("a prompt"), Arc::new(Client(input.to_vec())));
    let held = ENDPOINTS[usize::from(is_strict)].hold(&[Job { agent, row: &row }], answer).expect("conversations");
    assert_eq!(held.outcomes, [Ok(None)]);
});
