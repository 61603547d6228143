//! Environments that are servers of OpenEnv, here threads of the test that behave and misbehave.

use grpo_agents::{Environment, EnvironmentConfig, Environments, Episode, Failure, OpenEnv, Start};
use grpo_data::Item;
use rstest::rstest;
use serde_json::{Map, Value, json};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tungstenite::handshake::server::{Request, Response};
use tungstenite::{Message, WebSocket};

type Socket = WebSocket<TcpStream>;

/// A server. It ends with the test's process.
struct Server {
    url: String,
    /// The questions of all connections.
    questions: Receiver<Value>,
}

impl Server {
    /// Starts a server that calls `serve` for each connection, in a thread of its own, with the number of the connection.
    fn raw(serve: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let serve = Arc::new(serve);
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let serve = Arc::clone(&serve);
                let stream = stream.unwrap();
                stream.set_nodelay(true).unwrap();
                std::thread::spawn(move || serve(stream, number));
            }
        });
        url
    }

    /// Starts a server that answers questions of WebSockets with `answer`, by connection and number of the question. It refuses `list_tools`
    /// as OpenEnv's servers without tools do.
    fn new(answer: impl Fn(&mut Socket, usize, usize, &Value) + Send + Sync + 'static) -> Self {
        let (asked, questions) = channel();
        let asked = Mutex::new(asked);
        let url = Self::raw(move |stream, connection| {
            let Ok(mut socket) = tungstenite::accept(stream) else { return };
            let mut number = 0;
            while let Ok(message) = socket.read() {
                let Message::Text(text) = message else { continue };
                let question: Value = serde_json::from_str(&text).unwrap();
                asked.lock().unwrap().send(question.clone()).unwrap();
                if question["data"]["type"] == "list_tools" {
                    send(&mut socket, &refusal("VALIDATION_ERROR", "Invalid message", &[("missing", "message")]));
                    continue;
                }
                answer(&mut socket, connection, number, &question);
                number += 1;
            }
        });
        Self { url, questions }
    }

    fn config(&self) -> EnvironmentConfig {
        config(&self.url)
    }

    fn environment(&self) -> OpenEnv {
        OpenEnv::new("game", &self.config()).unwrap()
    }
}

fn config(url: &str) -> EnvironmentConfig {
    EnvironmentConfig { url: Some(url.to_owned()), timeout: 20.0, ..EnvironmentConfig::default() }
}

fn send(socket: &mut Socket, value: &Value) {
    let _ = socket.send(Message::text(value.to_string()));
}

fn observed(fields: Value, reward: Value, done: bool) -> Value {
    json!({"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}})
}

fn refusal(code: &str, message: &str, errors: &[(&str, &str)]) -> Value {
    let error = |(kind, field): &(&str, &str)| json!({"type": kind, "loc": [field], "msg": format!("{kind} {field}")});
    let errors: Vec<Value> = errors.iter().map(error).collect();
    json!({"type": "error", "data": {"message": message, "code": code, "errors": errors}})
}

fn row() -> Item {
    let columns = Map::from_iter([("seed".to_owned(), json!(7))]);
    Item { columns: Arc::new(columns), ..Item::new("Begin.").with_answer("7") }
}

fn said(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

fn called(name: &str, arguments: Value) -> Value {
    let call = json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    json!({"role": "assistant", "content": "", "tool_calls": [call, call]})
}

fn start(environment: &OpenEnv) -> Box<dyn Episode> {
    environment.reset(&row(), 0).unwrap().episode
}

fn refused(environment: &OpenEnv) -> Failure {
    environment.reset(&row(), 0).err().expect("the environment must not start")
}

#[test]
fn an_empty_observation_is_a_message() {
    let server = Server::new(|socket, _, _, _| send(socket, &observed(json!({"text": ""}), json!(null), false)));
    let settings = EnvironmentConfig { observation: Some("text".into()), ..server.config() };
    let environment = OpenEnv::new("game", &settings).unwrap();
    let reply = start(&environment).step(&said("9")).unwrap();
    assert_eq!(reply.messages, [json!({"role": "user", "content": ""})]);
}

#[test]
fn a_text_is_an_action_and_its_observation_the_answer() {
    let server = Server::new(|socket, _, number, _| {
        let answers = [
            observed(json!({"text": "Guess.", "metadata": {}}), json!(null), false),
            observed(json!({"text": "Lower.", "left": 2}), json!(0.25), false),
            observed(json!({"text": ""}), json!(true), true),
        ];
        send(socket, &answers[number % 3]);
    });
    let settings = EnvironmentConfig {
        action: Some("guess".into()),
        observation: Some("text".into()),
        headers: [("Authorization".into(), "Bearer abc".into())].into(),
        ..server.config()
    };
    let environment = OpenEnv::new("game", &settings).unwrap();
    let Start { messages, mut episode } = environment.reset(&row(), 0).unwrap();
    assert_eq!(messages, [json!({"role": "user", "content": "Guess."})]);
    assert_eq!(environment.tools(), None);
    let reply = episode.step(&said("9")).unwrap();
    let lower = json!({"role": "user", "content": "Lower."});
    assert_eq!((reply.messages, reply.reward, reply.done), (vec![lower], Some(0.25), false));
    let reply = episode.step(&said("7")).unwrap();
    assert_eq!((reply.messages.len(), reply.reward, reply.done), (0, Some(1.0), true));
    drop(episode);
    // The next conversation resets the session.
    start(&environment);
    drop(environment);
    let questions: Vec<Value> = server.questions.iter().take(6).collect();
    let reset = json!({"type": "reset", "data": {"seed": 7, "prompt": "Begin."}});
    let step = |text: &str| json!({"type": "step", "data": {"guess": text}});
    let close = json!({"type": "close"});
    let tools = json!({"type": "step", "data": {"type": "list_tools"}});
    assert_eq!(questions, [tools, reset.clone(), step("9"), step("7"), reset, close]);
}

#[test]
fn without_keys_the_field_is_message_and_the_observation_is_json() {
    let server = Server::new(|socket, _, _, question| {
        let fields = match question["data"].get("message") {
            Some(text) => json!({"echoed": text, "length": 2, "metadata": {"step": 1}}),
            None => json!({"metadata": {"status": "ready"}}),
        };
        send(socket, &observed(fields, json!(null), false));
    });
    let Start { messages, mut episode } = server.environment().reset(&row(), 0).unwrap();
    assert!(messages.is_empty(), "{messages:?}");
    let reply = episode.step(&said("hi")).unwrap();
    assert_eq!((reply.messages[0]["content"].as_str(), reply.reward), (Some(r#"{"echoed":"hi","length":2}"#), None));
}

#[test]
fn tools_of_a_server_are_listed_and_called() {
    let url = Server::raw(|stream, _| {
        let mut socket = tungstenite::accept(stream).unwrap();
        while let Ok(message) = socket.read() {
            let Ok(question) = serde_json::from_str::<Value>(message.to_text().unwrap()) else { continue };
            let action = &question["data"];
            let tools =
                json!([{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}]);
            let result = |result: Value, error: Value| json!({"tool_name": "add", "result": result, "error": error});
            let content = |text: &str| json!({"content": [{"type": "text", "text": text}, {"type": "image", "data": ""}], "is_error": text == "no"});
            send(
                &mut socket,
                &match (action["type"].as_str(), &action["arguments"]["a"]) {
                    (Some("list_tools"), _) => observed(json!({"tools": tools, "metadata": {}}), json!(null), false),
                    (Some("call_tool"), Value::String(text)) => {
                        observed(result(content(text), json!(null)), json!(0.5), false)
                    }
                    (Some("call_tool"), Value::Bool(_)) => {
                        observed(result(json!(null), json!({"message": "no such tool"})), json!(null), false)
                    }
                    (Some("call_tool"), _) => observed(result(json!("last"), json!(null)), json!(null), true),
                    _ => observed(json!({"metadata": {}}), json!(0.0), false),
                },
            );
        }
    });
    let environment = OpenEnv::new("sums", &config(&url)).unwrap();
    let function = json!({"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}});
    assert_eq!(environment.tools(), Some(&json!([{"type": "function", "function": function}])));
    let mut episode = start(&environment);
    // Both calls of the message.
    let reply = episode.step(&called("add", json!({"a": "3"}))).unwrap();
    let result = json!({"role": "tool", "content": "3\n(image)"});
    assert_eq!((reply.messages, reply.reward), (vec![result.clone(), result], Some(1.0)));
    let reply = episode.step(&called("add", json!({"a": "no"}))).unwrap();
    assert_eq!(reply.messages[0]["is_error"], true);
    let reply = episode.step(&called("sub", json!({"a": true}))).unwrap();
    assert_eq!(reply.messages[1], json!({"role": "tool", "content": "error: no such tool", "is_error": true}));
    // The first call ends the conversation.
    let reply = episode.step(&called("add", json!({}))).unwrap();
    assert_eq!((reply.messages.len(), reply.done), (1, true));
    // Without a key, a message without a call ends the conversation.
    let reply = start(&environment).step(&said("5")).unwrap();
    assert_eq!((reply.messages.len(), reply.reward, reply.done), (0, None, true));
}

#[test]
fn integers_of_any_length_reach_a_server_as_digits() {
    let (sent, texts) = channel();
    let sent = Mutex::new(sent);
    let url = Server::raw(move |stream, _| {
        let mut socket = tungstenite::accept(stream).unwrap();
        while let Ok(message) = socket.read() {
            let Ok(text) = message.to_text() else { continue };
            let tools = json!([{"name": "add", "input_schema": {"type": "object", "properties": {}}}]);
            let fields = if text.contains("list_tools") { json!({"tools": tools}) } else { json!({}) };
            sent.lock().unwrap().send(text.to_owned()).unwrap();
            send(&mut socket, &observed(fields, json!(null), false));
        }
    });
    let environment = OpenEnv::new("sums", &config(&url)).unwrap();
    let digits = "98765432109876543210987";
    let _ = start(&environment).step(&called("add", json!({"id": grpo_files::long_integer(digits)})));
    let call = texts.try_iter().find(|text| text.contains("call_tool")).unwrap();
    assert!(call.contains(&format!("{{\"id\":{digits}}}")), "{call}");
}

#[rstest]
#[case::garbage("nonsense", "expected JSON, got `nonsense`")]
#[case::nan(r#"{"type": "observation", "data": {"observation": {}, "reward": NaN}}"#, "expected JSON")]
#[case::huge_reward(r#"{"type": "observation", "data": {"observation": {}, "reward": 1e300}}"#, "a finite `reward`")]
#[case::text_reward(r#"{"type": "observation", "data": {"observation": {}, "reward": "much"}}"#, "a finite `reward`")]
#[case::done(r#"{"type": "observation", "data": {"observation": {}, "done": 1}}"#, "`done` true or false")]
#[case::list("[1]", "an object with `type`")]
#[case::other_type(r#"{"type": "state", "data": {}}"#, "an object with `type`")]
#[case::no_observation(r#"{"type": "observation", "data": {}}"#, "an `observation`, an object")]
#[case::text_observation(r#"{"type": "observation", "data": {"observation": "x"}}"#, "an `observation`, an object")]
#[case::twice(r#"{"type": "observation", "type": "error", "data": {}}"#, "expected JSON")]
#[case::error(
    r#"{"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}"#,
    "it says: EXECUTION_ERROR boom"
)]
#[case::empty_error(r#"{"type": "error", "data": {}}"#, "it says:")]
fn a_wrong_answer_is_a_failure_with_the_address_and_the_reason(#[case] answer: &'static str, #[case] words: &str) {
    let server = Server::new(move |socket, _, number, _| match number {
        0 => send(socket, &observed(json!({}), json!(null), false)),
        _ => socket.send(Message::text(answer)).unwrap(),
    });
    let environment = server.environment();
    let mut episode = start(&environment);
    let text = episode.step(&said("x")).unwrap_err().to_string();
    assert!(text.contains(words) && text.starts_with(&server.url), "{text}");
    // The conversation is over, and the next one has another session.
    let text = episode.step(&said("x")).unwrap_err().to_string();
    assert!(text.contains("its session has ended"), "{text}");
    drop(episode);
    start(&environment);
}

/// Breaks a connection in the middle of a conversation.
#[rstest]
#[case::huge(|socket: &mut Socket| drop(socket.send(Message::text("x".repeat(5 << 20)))), "at most 4194304 bytes")]
#[case::bytes(|socket: &mut Socket| drop(socket.send(Message::binary(vec![0; 3]))), "expected a message of text, got 3 bytes")]
#[case::closed(|socket: &mut Socket| drop(socket.close(None)), "the server has closed the connection")]
#[case::cut(|socket: &mut Socket| drop(socket.get_ref().shutdown(std::net::Shutdown::Both)), "onnection")]
#[case::not_utf8(|socket: &mut Socket| drop(socket.get_mut().write_all(&[0x81, 2, 0xc3, 0x28])), "UTF-8")]
#[case::no_frames(|socket: &mut Socket| drop(socket.get_mut().write_all(&[0xff; 64])), "rotocol")]
#[case::endless_frame(|socket: &mut Socket| drop(socket.get_mut().write_all(&[0x81, 127, 0, 0, 1, 0, 0, 0, 0, 0])), "at most 4194304 bytes")]
fn a_broken_connection_is_a_failure_and_the_next_conversation_connects_again(
    #[case] break_it: fn(&mut Socket),
    #[case] words: &str,
) {
    let server = Server::new(move |socket, _, number, _| match number {
        0 => send(socket, &observed(json!({}), json!(null), false)),
        _ => break_it(socket),
    });
    let environment = server.environment();
    let text = start(&environment).step(&said("x")).unwrap_err().to_string();
    assert!(text.contains(words) && text.starts_with(&server.url), "{text}");
    start(&environment);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_server_that_never_answers_is_left_at_the_time_limit() {
    let dripping = Server::new(|socket, _, number, _| match number {
        0 => send(socket, &observed(json!({}), json!(null), false)),
        // A part of a frame now and then is no answer, and neither are pings.
        _ => {
            for _ in 0..1000 {
                let _ = socket.send(Message::Ping(Default::default()));
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    });
    let deaf = Server::raw(|stream, _| {
        std::thread::sleep(Duration::from_secs(1000));
        drop(stream);
    });
    let slow = Server::raw(|mut stream, _| {
        for byte in b"HTTP/1.1 101 Switching Protocols\r\n".iter().cycle() {
            let _ = stream.write_all(&[*byte]);
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    let environment = |url: &str| OpenEnv::new("game", &EnvironmentConfig { timeout: 2.0, ..config(url) }).unwrap();
    let text = start(&environment(&dripping.url)).step(&said("x")).unwrap_err().to_string();
    assert!(text.contains("2 seconds, its timeout"), "{text}");
    for url in [deaf, slow] {
        let text = refused(&environment(&url)).to_string();
        assert!(text.contains("cannot connect") && text.contains("2 seconds") && text.starts_with(&url), "{text}");
    }
}

#[test]
fn a_server_that_is_none_is_a_failure_with_the_reason() {
    let closed = format!("http://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    let http = |response: &'static str| {
        Server::raw(move |mut stream, _| {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(response.as_bytes());
        })
    };
    for (url, words) in [
        (closed, "cannot connect"),
        (http("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), "status 404"),
        (
            http("HTTP/1.1 302 Found\r\nLocation: http://elsewhere\r\nContent-Length: 0\r\n\r\n"),
            "redirects are not followed",
        ),
        (http("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), "is it the address of an OpenEnv server"),
        (http("SSH-2.0-OpenSSH\r\n"), "cannot connect"),
        (http(""), "cannot connect"),
    ] {
        let text = refused(&OpenEnv::new("game", &config(&url)).unwrap()).to_string();
        assert!(text.contains(words) && text.starts_with(&url), "{url}: {text}");
    }
}

#[test]
fn a_conversation_that_ends_at_once_fails() {
    let server = Server::new(|socket, _, _, _| send(socket, &observed(json!({}), json!(1.0), true)));
    let text = refused(&server.environment()).to_string();
    assert!(text.contains("before the first message of the assistant"), "{text}");
}

#[test]
fn a_full_server_says_what_to_change() {
    let full = refusal("CAPACITY_REACHED", "Server at capacity: 1/1 sessions active", &[]);
    let url = Server::raw(move |stream, number| {
        let mut socket = tungstenite::accept(stream).unwrap();
        if number > 0 {
            // As OpenEnv does, before any question.
            send(&mut socket, &full);
            let _ = socket.close(None);
        }
        while let Ok(message) = socket.read() {
            if message.is_text() {
                send(&mut socket, &observed(json!({"tools": []}), json!(null), false));
            }
        }
    });
    let environment = OpenEnv::new("game", &config(&url)).unwrap();
    let first = start(&environment);
    let text = refused(&environment).to_string();
    assert!(text.contains("1/1 sessions") && text.contains("max_concurrent_envs"), "{text}");
    drop(first);
    // The session of the first conversation is free again.
    start(&environment);
}

#[test]
fn a_text_that_is_no_value_is_answered_and_a_wrong_key_is_a_failure() {
    let server =
        Server::new(|socket, _, _, question| match (question["type"].as_str(), question["data"]["move"].as_str()) {
            (Some("step"), Some("e9")) => {
                send(socket, &refusal("VALIDATION_ERROR", "Invalid message", &[("string_pattern", "move")]))
            }
            (Some("step"), None) => send(
                socket,
                &refusal("VALIDATION_ERROR", "Invalid message", &[("missing", "move"), ("extra_forbidden", "message")]),
            ),
            _ => send(socket, &observed(json!({"board": "x"}), json!(null), false)),
        });
    let environment =
        OpenEnv::new("chess", &EnvironmentConfig { action: Some("move".into()), ..server.config() }).unwrap();
    let mut episode = start(&environment);
    let reply = episode.step(&said("e9")).unwrap();
    assert_eq!(reply.messages, [json!({"role": "user", "content": "error: string_pattern move"})]);
    assert_eq!(episode.step(&said("e4")).unwrap().messages[0]["content"], r#"{"board":"x"}"#);
    let text = start(&server.environment()).step(&said("e4")).unwrap_err().to_string();
    assert!(text.contains("`move`: missing move") && text.contains("the key `action`"), "{text}");
    let settings = EnvironmentConfig { observation: Some("text".into()), ..server.config() };
    let environment = OpenEnv::new("chess", &EnvironmentConfig { action: Some("move".into()), ..settings }).unwrap();
    let text = start(&environment).step(&said("e4")).unwrap_err().to_string();
    assert!(text.contains("the field `text` in the observation, got the fields board"), "{text}");
}

#[test]
fn idle_connections_that_the_server_has_closed_are_replaced() {
    let server = Server::new(|socket, _, number, question| {
        send(socket, &observed(json!({}), json!(null), false));
        if number == 1 && question["type"] == "step" {
            let _ = socket.close(None);
        }
    });
    let environment = server.environment();
    let mut episodes = [start(&environment), start(&environment)];
    for episode in &mut episodes {
        episode.step(&said("x")).unwrap();
    }
    drop(episodes);
    for _ in 0..3 {
        start(&environment).step(&said("x")).unwrap();
    }
}

#[test]
fn a_message_that_nobody_has_asked_for_is_a_failure() {
    let (sent, both_sent) = channel();
    let sent = Mutex::new(sent);
    let server = Server::new(move |socket, _, _, _| {
        send(socket, &observed(json!({"n": 1}), json!(null), false));
        send(socket, &observed(json!({"n": 2}), json!(null), false));
        let _ = sent.lock().unwrap().send(());
    });
    let environment = server.environment();
    let mut episode = start(&environment);
    both_sent.recv().unwrap();
    let text = episode.step(&said("x")).unwrap_err().to_string();
    assert!(text.contains("nobody has asked for"), "{text}");
}

#[test]
fn pings_are_answered_while_the_model_writes() {
    let (pong, pongs) = channel();
    let pong = Mutex::new(pong);
    let url = Server::raw(move |stream, _| {
        let mut socket = tungstenite::accept(stream).unwrap();
        while let Ok(message) = socket.read() {
            match message {
                Message::Pong(bytes) => pong.lock().unwrap().send(bytes).unwrap(),
                Message::Text(_) => {
                    send(&mut socket, &observed(json!({"tools": []}), json!(null), false));
                    let _ = socket.send(Message::Ping(vec![1, 2].into()));
                }
                _ => {}
            }
        }
    });
    let environment = OpenEnv::new("game", &config(&url)).unwrap();
    let episode = start(&environment);
    // The ping behind the last answer, while the conversation asks nothing.
    for _ in 0..2 {
        assert_eq!(pongs.recv_timeout(Duration::from_secs(60)).unwrap()[..], [1, 2]);
    }
    drop(episode);
}

#[test]
fn headers_and_secrets_reach_the_server_and_no_message() {
    let (seen, headers) = channel();
    let seen = Mutex::new(seen);
    let url = Server::raw(move |stream, _| {
        #[allow(clippy::result_large_err)] // the callback's type is tungstenite's
        let callback = |request: &Request, response: Response| {
            let token = request.headers()["authorization"].to_str().unwrap().to_owned();
            seen.lock().unwrap().send((request.uri().path().to_owned(), token)).unwrap();
            Ok(response)
        };
        let mut socket = tungstenite::accept_hdr(stream, callback).unwrap();
        let _ = socket.read();
        send(&mut socket, &refusal("SESSION_ERROR", "no user has the token abc-123-def", &[]));
    });
    let headers_of = [("Authorization".to_owned(), "Bearer abc-123-def".to_owned())].into();
    let settings = EnvironmentConfig { headers: headers_of, ..config(&format!("{url}/games/")) };
    let text = refused(&OpenEnv::new("game", &settings).unwrap()).to_string();
    assert!(text.contains("the token (hidden)"), "{text}");
    assert_eq!(headers.recv().unwrap(), ("/games/ws".to_owned(), "Bearer abc-123-def".to_owned()));
}

#[test]
fn invalid_settings_are_named() {
    let of = |text: &str| Environments::new(&serde_json::from_str(text).unwrap()).unwrap_err().to_string();
    for (text, words) in [
        (r#"{"a": {"url": "http://localhost", "command": ["sh"]}}"#, "got 2 of them"),
        (r#"{"a": {"url": "ftp://localhost"}}"#, "environments.a.url"),
        (r#"{"a": {"url": "localhost:8000"}}"#, "environments.a.url"),
        (r#"{"a": {"url": "http://"}}"#, "environments.a.url"),
        (r#"{"a": {"url": "http://me:secret@localhost"}}"#, "without user"),
        (r#"{"a": {"url": "http://localhost:99999"}}"#, "environments.a.url"),
        (r#"{"a": {"url": "http://localhost/ws?key=abc"}}"#, "query"),
        (r#"{"a": {"url": "http://${NO_SUCH_HOST}"}}"#, "NO_SUCH_HOST"),
        (r#"{"a": {"url": "http://localhost", "headers": {"a b": "c"}}}"#, "environments.a.headers"),
        (r#"{"a": {"url": "http://localhost", "timeout": 0}}"#, "environments.a.timeout"),
        (r#"{"a": {"url": "http://localhost", "workers": 0}}"#, "environments.a.workers"),
        (r#"{"a": {"url": "http://localhost", "action": ""}}"#, "environments.a.action"),
        (r#"{"a": {"url": "http://localhost", "env": {"A": "b"}}}"#, "environments.a.env"),
        (r#"{"a": {"command": ["sh"], "observation": "text"}}"#, "environments.a.observation"),
        (r#"{"a": {"built_in": "calculator", "url": "http://localhost"}}"#, "got 2 of them"),
    ] {
        let error = of(text);
        assert!(error.contains(words) && !error.contains(":secret"), "{text}: {error}");
    }
    let secure = serde_json::from_str(r#"{"a": {"url": "https://localhost"}}"#).unwrap();
    let result = Environments::new(&secure);
    assert_eq!(result.is_ok(), cfg!(feature = "https"), "{result:?}");
}

#[cfg(feature = "https")]
#[test]
fn an_encrypted_connection_to_a_plain_server_fails() {
    let url = Server::raw(|mut stream, _| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    });
    let url = url.replace("http://", "https://");
    let text = refused(&OpenEnv::new("game", &config(&url)).unwrap()).to_string();
    assert!(text.contains("cannot connect") && text.contains("corrupt"), "{text}");
}
