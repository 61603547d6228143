//! The endpoint, its keys, and agents that are programs or functions.

use grpo_agents::endpoint::{ApiError, Asked, ChatReply, Held, Job, Rules};
use grpo_agents::{Agent, AgentProgram, Connection, Endpoint, EnvironmentConfig, Error, Failure};
use grpo_data::Item;
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// An agent that is a function.
pub(crate) struct Function<F>(pub(crate) F);

impl<F: Fn(&Item, &Connection) -> Result<Option<f32>, Failure> + Send + Sync> Agent for Function<F> {
    fn workers(&self) -> usize {
        4
    }

    fn run(&self, row: &Item, connection: &Connection, _: usize) -> Result<Option<f32>, Failure> {
        (self.0)(row, connection)
    }
}

/// Replies to every request with its last message in upper case.
fn shout(asked: Vec<Asked>) -> Result<(), Error> {
    for asked in asked {
        let text = asked.request.messages.last().unwrap()["content"].as_str().unwrap().to_uppercase();
        let message = json!({"role": "assistant", "content": text});
        let tokens = vec![(text, -0.5)];
        asked.answer(Ok(ChatReply {
            message,
            finish_reason: "stop",
            prompt_tokens: 7,
            tokens,
            ..ChatReply::default()
        }));
    }
    Ok(())
}

fn rows(count: usize) -> Vec<Item> {
    (0..count).map(|i| Item::new(format!("row {i}")).with_answer(i.to_string())).collect()
}

fn hold(endpoint: &Endpoint, agent: impl Agent + 'static, rows: &[Item]) -> Held {
    let agent: Arc<dyn Agent> = Arc::new(agent);
    let jobs: Vec<Job<'_>> = rows.iter().map(|row| Job { agent: Arc::clone(&agent), row }).collect();
    endpoint.hold(&jobs, shout).unwrap()
}

/// Calls the endpoint, and returns the status and the body.
fn call(url: &str, key: &str, body: Option<&str>) -> (u16, Value) {
    let agent = ureq::Agent::config_builder().http_status_as_error(false).proxy(None).build().new_agent();
    let key = format!("Bearer {key}");
    let response = match body {
        Some(body) => agent.post(url).header("Authorization", key).content_type("application/json").send(body),
        None => agent.get(url).header("Authorization", key).call(),
    };
    let mut response = response.unwrap();
    let text = response.body_mut().read_to_string().unwrap();
    (response.status().as_u16(), serde_json::from_str(&text).unwrap())
}

fn ask(connection: &Connection, text: &str) -> (u16, Value) {
    let body = json!({"model": "gpt", "messages": [{"role": "user", "content": text}], "logprobs": true}).to_string();
    call(&format!("{}/chat/completions", connection.base_url()), connection.api_key(), Some(&body))
}

const CLOSE: &[u8] = b"Connection: close";

/// Sends bytes, and returns the response.
fn raw(endpoint: &Endpoint, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(endpoint.address()).unwrap();
    // The endpoint may refuse a request that was sent in part.
    let _ = stream.write_all(bytes);
    // A client that ends its side no longer waits for an answer.
    if !bytes.windows(CLOSE.len()).any(|bytes| bytes == CLOSE) {
        let _ = stream.shutdown(Shutdown::Write);
    }
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    text
}

#[test]
fn agents_are_answered_and_their_rewards_are_in_the_order_of_the_rows() {
    let endpoint = Endpoint::open(None, Rules::default()).unwrap();
    assert!(endpoint.address().ip().is_loopback());
    let agent = Function(|row: &Item, connection: &Connection| {
        for turn in 0..3 {
            let (status, body) = ask(connection, &format!("{} {turn}", row.prompt));
            assert_eq!((status, &body["object"]), (200, &json!("chat.completion")));
            let choice = &body["choices"][0];
            assert_eq!(choice["message"]["content"], format!("{} {turn}", row.prompt).to_uppercase());
            assert_eq!(choice["logprobs"]["content"][0]["logprob"], -0.5);
            assert_eq!(body["usage"]["total_tokens"], 8);
        }
        assert_eq!(connection.requests(), 3);
        Ok(row.answer.as_ref().map(|answer| answer.parse().unwrap()))
    });
    let held = hold(&endpoint, agent, &rows(9));
    let expected: Vec<_> = (0..9).map(|i| Ok(Some(i as f32))).collect();
    assert_eq!(held.outcomes, expected);
}

#[test]
fn only_keys_of_running_conversations_are_taken() {
    let endpoint = Endpoint::open(None, Rules::default()).unwrap();
    let keys = Arc::new(Mutex::new(Vec::<String>::new()));
    let seen = Arc::clone(&keys);
    let agent = Function(move |_: &Item, connection: &Connection| {
        let url = format!("{}/models", connection.base_url());
        let (status, body) = call(&url, connection.api_key(), None);
        assert_eq!((status, &body["data"][0]["id"]), (200, &json!("policy")));
        assert_eq!(call(&format!("{url}/policy"), connection.api_key(), None).1["object"], "model");
        for wrong in ["", "grpo-00", &connection.api_key()[1..]] {
            let (status, body) = call(&url, wrong, None);
            assert_eq!((status, &body["error"]["code"]), (401, &json!("invalid_api_key")), "{body}");
            assert_eq!(body["error"]["type"], "authentication_error");
        }
        // Keys of conversations that are over.
        for old in seen.lock().unwrap().iter() {
            let (status, body) = call(&url, old, None);
            assert_eq!((status, &body["error"]["code"]), (404, &json!("conversation_closed")));
            assert!(body["error"]["message"].as_str().unwrap().contains("over"), "{body}");
        }
        seen.lock().unwrap().push(connection.api_key().to_owned());
        Ok(None)
    });
    let agent: Arc<dyn Agent> = Arc::new(agent);
    let rows = rows(2);
    for row in &rows {
        let held = endpoint.hold(&[Job { agent: Arc::clone(&agent), row }], shout).unwrap();
        assert_eq!(held.outcomes, [Ok(None)]);
    }
    let keys = keys.lock().unwrap();
    assert!(keys.len() == 2 && keys[0] != keys[1] && keys.iter().all(|key| key.len() > 40), "{keys:?}");
    // Without a conversation there is no valid key.
    let url = format!("{}/models", endpoint.base_url());
    assert_eq!(call(&url, &keys[1], None).0, 404);
}

#[test]
fn bad_requests_are_refused_and_the_conversation_goes_on() {
    let endpoint = Arc::new(Endpoint::open(None, Rules::default()).unwrap());
    let of_agent = Arc::clone(&endpoint);
    let agent = Function(move |_: &Item, connection: &Connection| {
        let chat = format!("{}/chat/completions", connection.base_url());
        let key = connection.api_key();
        let huge = "x".repeat(9 << 20);
        for (url, body, status, words) in [
            (&chat, Some("{"), 400, "no JSON"),
            (&chat, Some("[]"), 400, "a JSON object"),
            (&chat, Some(&*huge), 413, "at most 8388608 bytes"),
            (&chat, None, 405, "expects POST"),
            (&format!("{}/embeddings", connection.base_url()), Some("{}"), 404, "/v1/chat/completions"),
        ] {
            let (found, answer) = call(url, key, body);
            let message = answer["error"]["message"].as_str().unwrap();
            assert!(found == status && message.contains(words), "{found} {message}");
        }
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n");
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).to_string();
        let (first, second) = body.split_at(10);
        let chunks =
            format!("{:x};note\r\n{first}\r\n{:X}\r\n{second}\r\n0\r\nTrailer: x\r\n\r\n", first.len(), second.len());
        for (request, words) in [
            (format!("{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n{chunks}"), "\"content\":\"HI\""),
            (
                format!(
                    "{head}Content-Length: {}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n{body}",
                    body.len()
                ),
                "HTTP/1.1 100 Continue",
            ),
            (format!("{head}Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc"), "Content-Length twice"),
            (format!("{head}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc"), "Transfer-Encoding"),
            (format!("{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n"), "the size of a chunk"),
            (format!("{head}Transfer-Encoding: chunked\r\n\r\nfffffff\r\n"), "413"),
            (format!("{head}X: {}\r\n\r\n", "y".repeat(20_000)), "431"),
            ("hello\r\n\r\n".to_owned(), "400"),
            // Half a request.
            (format!("{head}Content-Length: 100\r\n\r\nabc"), ""),
        ] {
            let response = raw(&of_agent, request.as_bytes());
            assert!(response.contains(words), "{request:.100}: {response}");
        }
        let (status, answer) = ask(connection, "still here");
        assert_eq!((status, &answer["choices"][0]["message"]["content"]), (200, &json!("STILL HERE")));
        Ok(Some(1.0))
    });
    assert_eq!(hold(&endpoint, agent, &rows(1)).outcomes, [Ok(Some(1.0))]);
}

#[test]
fn an_answer_that_comes_after_the_end_of_a_conversation_is_not_delivered() {
    let endpoint = Arc::new(Endpoint::open(None, Rules::default()).unwrap());
    let (asked, is_asked) = channel();
    let is_asked = Mutex::new(is_asked);
    let (key, keys) = channel();
    let late = Arc::new(Mutex::new(Vec::new()));
    let mut deliveries = Vec::new();
    let clients = Arc::clone(&late);
    let agent = Function(move |_: &Item, connection: &Connection| {
        let (url, own) = (connection.base_url().to_owned(), connection.api_key().to_owned());
        key.send((url.clone(), own.clone())).unwrap();
        let body = json!({"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}).to_string();
        let client = std::thread::spawn(move || call(&format!("{url}/chat/completions"), &own, Some(&body)));
        clients.lock().unwrap().push(client);
        // It leaves when its request is being sampled, and the connection stays open.
        is_asked.lock().unwrap().recv().unwrap();
        Ok(Some(1.0))
    });
    let agent: Arc<dyn Agent> = Arc::new(agent);
    let rows = rows(1);
    let held = endpoint.hold(&[Job { agent, row: &rows[0] }], |requests| {
        asked.send(()).unwrap();
        let (url, key) = keys.recv().unwrap();
        while call(&format!("{url}/models"), &key, None).0 == 200 {
            std::thread::yield_now();
        }
        for request in requests {
            let message = json!({"role": "assistant", "content": "HI"});
            let reply = ChatReply { message, finish_reason: "stop", prompt_tokens: 1, ..ChatReply::default() };
            deliveries.push(request.answer(Ok(reply)).is_complete());
        }
        Ok::<_, Error>(())
    });
    assert_eq!(held.unwrap().outcomes, [Ok(Some(1.0))]);
    assert_eq!(deliveries, [false]);
    for client in late.lock().unwrap().drain(..) {
        let (status, body) = client.join().unwrap();
        assert_eq!((status, &body["error"]["code"]), (404, &json!("conversation_closed")));
    }
}

#[test]
fn a_port_in_use_is_refused_until_its_run_has_ended() {
    let first = Endpoint::open(None, Rules::default()).unwrap();
    let address = first.address().to_string();
    let error = Endpoint::open(Some(&address), Rules::default()).err().unwrap().to_string();
    assert!(
        error.contains("`rollout.endpoint`") && error.contains(&address) && error.contains("another run"),
        "{error}"
    );
    drop(first);
    // A program that another test starts has the socket until its `exec`.
    let limit = Instant::now() + Duration::from_secs(60);
    let again = loop {
        match Endpoint::open(Some(&address), Rules::default()) {
            Err(error) if Instant::now() > limit => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
            Ok(endpoint) => break endpoint,
        }
    };
    assert_eq!(again.address().to_string(), address);
    for wrong in ["localhost", "127.0.0.1", ":80", "127.0.0.1:99999"] {
        let error = Endpoint::open(Some(wrong), Rules::default()).err().unwrap().to_string();
        assert!(error.contains("such as 127.0.0.1:8000") && error.contains(wrong), "{error}");
    }
}

#[test]
fn an_error_of_the_sampler_ends_all_conversations() {
    let endpoint = Endpoint::open(None, Rules::default()).unwrap();
    let statuses = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&statuses);
    let agent: Arc<dyn Agent> = Arc::new(Function(move |_: &Item, connection: &Connection| {
        let status = ask(connection, "x").0;
        seen.lock().unwrap().push(status);
        Ok(None)
    }));
    let rows = rows(3);
    let jobs: Vec<Job<'_>> = rows.iter().map(|row| Job { agent: Arc::clone(&agent), row }).collect();
    let broken = |_: Vec<Asked>| Err(Error::Random { reason: "the device is lost".into() });
    let error = endpoint.hold(&jobs, broken).unwrap_err().to_string();
    assert!(error.contains("the device is lost"), "{error}");
    assert!(!statuses.lock().unwrap().is_empty() && statuses.lock().unwrap().iter().all(|status| *status == 404));
    // The endpoint can be used again.
    let refuse = |asked: Vec<Asked>| {
        asked.into_iter().for_each(|asked| drop(asked.answer(Err(ApiError::param("messages", "too long")))));
        Ok::<_, Error>(())
    };
    let held = endpoint.hold(&jobs, refuse).unwrap();
    assert_eq!(held.outcomes, [Ok(None), Ok(None), Ok(None)]);
    assert!(statuses.lock().unwrap().contains(&400));
}

#[test]
#[should_panic(expected = "a scoped thread panicked")]
fn an_agent_that_panics_does_not_leave_the_run_waiting() {
    let endpoint = Endpoint::open(None, Rules::default()).unwrap();
    let agent: Arc<dyn Agent> =
        Arc::new(Function(|_: &Item, _: &Connection| -> Result<Option<f32>, Failure> { panic!("a bug of the agent") }));
    let rows = rows(2);
    let jobs: Vec<Job<'_>> = rows.iter().map(|row| Job { agent: Arc::clone(&agent), row }).collect();
    let _ = endpoint.hold(&jobs, |_| Ok::<_, Error>(()));
}

#[test]
fn integers_of_any_length_reach_an_agent_as_digits() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let script = format!("read -r l; echo \"$l\" > '{}'; exit 3", log.display());
    let agent = vec!["/bin/sh".into(), "-c".into(), script];
    let config = EnvironmentConfig { agent, ..EnvironmentConfig::default() };
    let digits = "98765432109876543210987";
    let function = json!({"name": "f", "arguments": {"id": grpo_files::long_integer(digits)}});
    let call = json!({"role": "assistant", "content": "", "tool_calls": [{"function": function}]});
    let messages = vec![json!({"role": "user", "content": "x"}), call];
    let row = Item::new(grpo_data::Prompt::Messages { messages, tools: None, documents: None });
    let endpoint = Endpoint::open(None, Rules::default()).unwrap();
    hold(&endpoint, AgentProgram::new("game", &config).unwrap(), &[row]);
    let line = std::fs::read_to_string(log).unwrap();
    assert!(line.contains(&format!("{{\"id\":{digits}}}")), "{line}");
}

/// Returns the failure of a shell script as an agent.
fn failure(script: &str, timeout: f64) -> String {
    let agent = vec!["/bin/sh".into(), "-c".into(), script.into()];
    let config = EnvironmentConfig { agent, timeout, ..EnvironmentConfig::default() };
    let endpoint = Endpoint::open(None, Rules::default()).unwrap();
    let held = hold(&endpoint, AgentProgram::new("game", &config).unwrap(), &rows(1));
    held.outcomes[0].as_ref().unwrap_err().to_string()
}

#[test]
fn programs_that_fail_are_named_with_the_reason() {
    for (script, words) in [
        ("echo broken >&2; exit 3", "exit status: 3"),
        ("read -r l; echo '{\"reward\": 1}'; read -r l", "without a request"),
        ("read -r l", "without a request"),
        ("read -r l; echo '{\"error\": \"no tools\"}'; read -r l", "it says: no tools"),
        ("read -r l; echo '{\"reward\": \"high\"}'; read -r l", "expected a number"),
        ("read -r l; yes", "expected a line of JSON"),
        ("read -r l; head -c 3000000 /dev/zero | tr '\\0' 'x'; read -r l", "more than 1048576 bytes"),
        ("read -r l; kill -9 $$", "signal: 9"),
    ] {
        let text = failure(script, 20.0);
        assert!(text.contains(words), "{script}: {text}");
    }
    let text = failure("read -r l; sleep 60", 0.3);
    assert!(text.contains("neither sent a request nor ended in 0.3 seconds"), "{text}");
}

#[test]
fn programs_read_the_row_and_the_endpoint() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let script =
        format!("read -r l; echo \"$OPENAI_BASE_URL $OPENAI_API_KEY $OPENAI_MODEL $NO_PROXY $l\" >> {}", log.display());
    failure(&script, 20.0);
    let text = std::fs::read_to_string(log).unwrap();
    let (variables, line) = text.split_once(" {").unwrap();
    let [url, key, model, direct] = variables.split(' ').collect::<Vec<_>>()[..] else { panic!("{variables}") };
    let line: Value = serde_json::from_str(&format!("{{{line}")).unwrap();
    assert_eq!((line["base_url"].as_str(), line["api_key"].as_str()), (Some(url), Some(key)));
    assert_eq!((model, line["row"]["answer"].as_str()), ("policy", Some("0")));
    assert!(direct.split(',').any(|host| host == "127.0.0.1"), "{direct}");
}

#[test]
fn wrong_settings_of_agents_are_named() {
    let agent = vec!["/bin/sh".to_owned()];
    for (config, words) in [
        (EnvironmentConfig { workers: 0, ..EnvironmentConfig::default() }, "environments.game.workers"),
        (EnvironmentConfig { tools: Some(json!([])), ..EnvironmentConfig::default() }, "environments.game.tools"),
        (EnvironmentConfig { timeout: 0.0, ..EnvironmentConfig::default() }, "environments.game.timeout"),
    ] {
        let error =
            AgentProgram::new("game", &EnvironmentConfig { agent: agent.clone(), ..config }).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Tests that take seconds: `cargo fast` skips modules of this name.
mod slow {
    use super::*;

    #[test]
    fn silent_connections_do_not_keep_agents_out() {
        let endpoint = Arc::new(Endpoint::open(None, Rules::default()).unwrap());
        let of_agent = Arc::clone(&endpoint);
        let agent = Function(move |_: &Item, connection: &Connection| {
            let address = of_agent.address();
            // More than the endpoint holds; a third of them sends half a head.
            let strangers: Vec<TcpStream> = (0..300)
                .map(|i| {
                    let mut stream = TcpStream::connect(address).unwrap();
                    if i % 3 == 0 {
                        let _ = stream.write_all(b"GET / HTTP/1.1\r\n");
                    }
                    stream
                })
                .collect();
            for _ in 0..3 {
                assert_eq!(ask(connection, "x").0, 200);
            }
            // The oldest ones were closed.
            strangers[0].set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let end = (&strangers[0]).read(&mut [0]);
            assert!(matches!(end, Ok(0)) || end.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
            Ok(Some(1.0))
        });
        assert_eq!(hold(&endpoint, agent, &rows(1)).outcomes, [Ok(Some(1.0))]);
    }
}
