//! HTTP rewards against a local server with programmed replies.

use crate::support::{failure, outcomes, refused, rewards};
use grpo_rewards::Rewards;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

enum Reply {
    /// A status, additional headers, and a body.
    Say(u16, String, Vec<u8>),
    Hang,
    /// A beginning, and a text that is repeated, with a pause after each, until the client closes the connection.
    Endless(String, String, Duration),
}

fn say(status: u16, text: impl Into<Vec<u8>>) -> Reply {
    Reply::Say(status, String::new(), text.into())
}

/// Replies with these entries as rewards.
fn entries(rewards: Value) -> Reply {
    say(200, json!({ "rewards": rewards }).to_string())
}

/// A request: its head, and its body as JSON.
type Request = (String, Value);

/// A server whose replies are a function of the request's number. It records requests.
struct Server {
    url: String,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    fn start(reply: impl Fn(usize, &Value) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/score", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (requests, reply) = (Arc::clone(&seen), Arc::new(reply));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (requests, reply) = (Arc::clone(&requests), Arc::clone(&reply));
                std::thread::spawn(move || answer(stream.unwrap(), &requests, &*reply));
            }
        });
        Self { url, seen }
    }

    fn requests(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }

    /// Returns a reward that posts to this server.
    fn judge(&self, mut settings: Value) -> Rewards {
        settings["url"] = self.url.as_str().into();
        rewards(json!({"http": {"judge": settings}}))
    }
}

fn answer(mut stream: TcpStream, requests: &Mutex<Vec<Request>>, reply: &(dyn Fn(usize, &Value) -> Reply + Sync)) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap();
        }
        head.push_str(&line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    // A GET has no body.
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let number = {
        let mut requests = requests.lock().unwrap();
        requests.push((head, body.clone()));
        requests.len() - 1
    };
    match reply(number, &body) {
        Reply::Say(status, headers, body) => {
            let length = body.len();
            let head = format!(
                "HTTP/1.1 {status} Said\r\n{headers}Content-Length: {length}\r\nConnection: close\r\nRetry-After: 0\r\n\r\n"
            );
            let _ = stream.write_all(&[head.as_bytes(), &body].concat());
        }
        Reply::Hang => std::thread::sleep(Duration::from_secs(20)),
        Reply::Endless(head, text, pause) => {
            let mut written = stream.write_all(head.as_bytes());
            while written.is_ok() {
                std::thread::sleep(pause);
                written = stream.write_all(text.as_bytes());
            }
        }
    }
}

/// Replies with the lengths of the completions as rewards.
fn lengths(body: &Value) -> Reply {
    let length = |input: &Value| input["completion"].as_str().unwrap().len();
    entries(body["inputs"].as_array().unwrap().iter().map(length).collect())
}

#[test]
fn batches_are_posted_and_answered_in_order_with_headers() {
    let server = Server::start(|_, body| lengths(body));
    let path = std::env::var("PATH").unwrap();
    let headers = json!({"Authorization": "Bearer ${PATH}!"});
    let rewards = server.judge(json!({"batch_size": 2, "weight": 0.5, "headers": headers}));
    let found = outcomes(&rewards, &["a", "bb", "ccc", "dddd", "eeeee"]);
    assert_eq!(found, [0.5, 1.0, 1.5, 2.0, 2.5].map(|reward| Ok(Some(reward))));
    let requests = server.requests();
    assert_eq!(requests.len(), 3);
    for (head, body) in &requests {
        assert!(head.starts_with("POST /score HTTP/1.1"), "{head}");
        assert!(head.contains(&format!("Bearer {path}!")) && head.contains("application/json"), "{head}");
        let first = &body["inputs"][0];
        assert_eq!((&first["answer"], &first["prompt"], &first["id"]), (&json!("42"), &json!("6 x 7?"), &json!(0)));
    }
}

#[test]
fn an_endpoint_may_return_null_or_an_error_for_one_completion() {
    let server = Server::start(|_, _| entries(json!([null, {"reward": 1}, {"error": "no"}])));
    let found = outcomes(&server.judge(json!({})), &["a", "b", "c"]);
    assert_eq!(found, [Ok(None), Ok(Some(1.0)), Err("it says: no".to_owned())]);
}

#[test]
fn status_500_and_429_are_retried() {
    let server = Server::start(|number, body| match number {
        0 => say(500, "busy"),
        1 => say(429, "slowly"),
        _ => lengths(body),
    });
    assert_eq!(outcomes(&server.judge(json!({})), &["abc"]), [Ok(Some(3.0))]);
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn repeated_status_500_fails_only_the_completions_of_the_request() {
    let server = Server::start(|_, body| match body["inputs"][0]["completion"].as_str() {
        Some("bad") => say(500, "out of memory"),
        _ => lengths(body),
    });
    let found = outcomes(&server.judge(json!({"retries": 2, "batch_size": 1})), &["a", "bad", "ccc"]);
    assert_eq!((&found[0], &found[2]), (&Ok(Some(1.0)), &Ok(Some(3.0))));
    let error = found[1].as_ref().unwrap_err();
    assert!(error.contains("500") && error.contains("out of memory") && error.contains("after 3 attempts"), "{error}");
}

#[test]
fn other_statuses_are_not_retried() {
    let server = Server::start(|_, _| say(404, "no such page"));
    let error = failure(&server.judge(json!({})));
    assert!(error.contains("404") && error.contains("no such page"), "{error}");
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn timeouts_and_unreachable_endpoints_are_failures() {
    let mut server = Server::start(|_, _| Reply::Hang);
    let error = failure(&server.judge(json!({"timeout": 0.2, "retries": 1})));
    assert!(error.contains("timeout") && error.contains("after 2 attempts"), "{error}");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    server.url = format!("http://{}/", listener.local_addr().unwrap());
    drop(listener);
    let error = failure(&server.judge(json!({"retries": 0})));
    assert!(error.contains(&server.url) && error.to_lowercase().contains("refused"), "{error}");
}

#[test]
fn invalid_responses_are_failures() {
    for (text, said) in [
        ("ok", "got `ok`"),
        ("{\"rewards\": [1]}", "with 2 entries, got 1"),
        ("{\"scores\": [1, 2]}", "expected {\"rewards\""),
        ("{\"rewards\": [\"a\", \"b\"]}", "expected a number"),
        ("{\"rewards\": [0, 0], \"rewards\": [1, 1]}", "the key \"rewards\" is there twice"),
        ("{\"rewards\": [{\"reward\": 0, \"reward\": 1}, 1]}", "the key \"reward\" is there twice"),
    ] {
        let server = Server::start(move |_, _| say(200, text));
        for failed in outcomes(&server.judge(json!({})), &["a", "b"]) {
            let error = failed.unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}

#[test]
fn a_missing_environment_variable_is_an_error_before_any_request() {
    let headers = json!({"Authorization": "Bearer ${GRPO_NO_SUCH_VARIABLE}"});
    let error = refused(json!({"http": {"judge": {"url": "http://localhost", "headers": headers}}}));
    assert!(error.contains("headers.Authorization") && error.contains("GRPO_NO_SUCH_VARIABLE"), "{error}");
}

#[test]
fn redirects_are_errors_with_the_location_and_are_not_followed() {
    let to = |status, location: &str| {
        let header = format!("Location: {location}\r\n");
        Server::start(move |_, _| Reply::Say(status, header.clone(), vec![]))
    };
    for status in [301, 302, 303, 307, 308] {
        let other = Server::start(|_, _| entries(json!([1])));
        let server = to(status, &format!("{}?key=S3CR3T-new", other.url));
        let error = failure(&server.judge(json!({"headers": {"X-Api-Key": "S3CR3T-key"}, "retries": 3})));
        assert!(error.contains(&format!("status {status}")) && error.contains(&other.url), "{error}");
        assert!(error.contains("rewards.http.judge.url") && !error.contains("S3CR3T"), "{error}");
        assert_eq!((server.requests().len(), other.requests().len()), (1, 0), "{status}");
    }
    // Redirects to another scheme or to nowhere are also errors.
    for location in ["file:///etc/passwd", "//elsewhere/x", ""] {
        let error = failure(&to(302, location).judge(json!({})));
        assert!(error.contains("status 302") && error.contains(location), "{error}");
    }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn endless_responses_end_at_the_time_or_size_limit() {
    let chunk = |text: &str| format!("10000\r\n{}\r\n", text.repeat(0x10000));
    for (said, head, text, pause) in [
        ("at most", "200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(" "), 0),
        ("status 500", "500 No\r\nTransfer-Encoding: chunked\r\n\r\n", chunk("e"), 0),
        ("", "200 OK\r\n", "X-A: bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\r\n".into(), 0),
        ("", "200 OK\r\nX-A: ", "a".repeat(4096), 0),
        ("", "100 Continue\r\n\r\n", "HTTP/1.1 100 Continue\r\n\r\n".into(), 0),
        ("timeout", "200 OK\r\nContent-Length: 100000\r\n\r\n", " ".into(), 50),
        ("timeout", "200 OK\r\n", "X-A: b\r\n".into(), 50),
    ] {
        let (begin, pause) = (format!("HTTP/1.1 {head}"), Duration::from_millis(pause));
        let server = Server::start(move |_, _| Reply::Endless(begin.clone(), text.clone(), pause));
        let began = Instant::now();
        let error = outcomes(&server.judge(json!({"timeout": 2, "retries": 0})), &["a", "b"])[1].clone().unwrap_err();
        assert!(error.contains(said) && error.len() < 1000, "{head}: {error:.1000}");
        assert!(began.elapsed() < Duration::from_secs(20), "{head}: {:?}", began.elapsed());
    }
}

/// A gigabyte of spaces takes a megabyte in gzip.
#[test]
fn compressed_responses_are_refused_and_not_decompressed() {
    for encoding in ["gzip", "br", "zstd", "deflate"] {
        let server = Server::start(|_, _| entries(json!([1])));
        assert_eq!(outcomes(&server.judge(json!({})), &["a"]), [Ok(Some(1.0))]);
        let (head, _) = server.requests().remove(0);
        assert!(!head.to_lowercase().contains("gzip"), "{head}");
        let header = format!("Content-Encoding: {encoding}\r\n");
        let server = Server::start(move |_, _| Reply::Say(200, header.clone(), vec![0x1f, 0x8b, 8, 0, 0, 0]));
        let error = failure(&server.judge(json!({"retries": 3})));
        assert!(error.contains(&format!("not compressed, got `Content-Encoding: {encoding}`")), "{error}");
        assert_eq!(server.requests().len(), 1, "it would be the same again");
    }
}

#[test]
fn secrets_in_responses_are_hidden() {
    let server = Server::start(|_, _| say(200, ""));
    let seen = Arc::clone(&server.seen);
    let echo = Server::start(move |number, _| {
        let head = seen.lock().unwrap().get(number).map(|(head, _)| head.clone()).unwrap_or_default();
        match number % 3 {
            0 => say(400, head),
            1 => entries(json!([{ "error": head }])),
            _ => say(200, head),
        }
    });
    let judge = |server: &Server| {
        let address = server.url.strip_prefix("http://").unwrap();
        rewards(
            json!({"http": {"judge": {"url": format!("http://me:S3CR3T-pass@{address}?key=S3CR3T-query"), "retries": 0,
            "headers": {"X-Auth": "Bearer S3CR3T-auth", "Cookie": "id=S3CR3T-cookie; a=b", "X-Path": "${PATH}"}}}}),
        )
    };
    // The first server reports the request that it received; the second one echoes the headers.
    let (first, echoing) = (judge(&server), judge(&echo));
    for number in 0..3 {
        outcomes(&first, &["a"]);
        let (head, _) = server.requests()[number].clone();
        assert!(head.contains("S3CR3T-auth") && head.contains("Basic bWU6UzNDUjNULXBhc3M="), "{head}");
        let error = failure(&echoing);
        let path = std::env::var("PATH").unwrap();
        for secret in ["S3CR3T", "bWU6UzNDUjNULXBhc3M", &path] {
            assert!(!error.contains(secret), "{secret} in {error}");
        }
        assert!(error.contains("(hidden)"), "{error}");
    }
}

#[test]
fn errors_of_invalid_addresses_hide_secrets() {
    for url in ["ftp://me:S3CR3T@h/?S3CR3T", "me:S3CR3T@h/ok", "http://me:S3C/R3T@h/", "http://"] {
        let error = refused(json!({"http": {"judge": {"url": url}}}));
        assert!(error.contains("rewards.http.judge.url") && !error.contains("S3C"), "{error}");
    }
}

#[cfg(not(feature = "https"))]
#[test]
fn https_needs_its_feature() {
    let error = refused(json!({"http": {"judge": {"url": "https://localhost"}}}));
    assert!(error.contains("feature `https`"), "{error}");
}
