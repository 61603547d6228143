//! Misbehaving hubs: no file is written outside the cache, no wait is endless, and no damaged download is used as a model.

use crate::hub_server::{COMMIT, Home, Model, Request, WEIGHTS, redirect, whole};
use crate::support::{Folder, says};
use grpo_models::Hub;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

#[test]
fn etags_that_are_paths_are_refused() {
    let kinds: [fn(&str, &[u8]) -> String; 8] = [
        |name, _| format!("../../../pwned-{name}"),
        |name, _| format!("../../../../.bashrc{}", &name[..0]),
        |name, _| format!("/tmp/grpo-test-pwned-{name}"),
        |name, _| format!("a/b/{name}"),
        |_, _| "..".into(),
        |_, _| ".".into(),
        |_, _| String::new(),
        |_, _| "a".repeat(300),
    ];
    for etag in kinds {
        let port = Model { etag, ..Model::new() }.serve(|_, _, _| None);
        Home::new().refuses(port, &["config.json", "sends the ETag", "expected letters, digits"]);
    }
    // The same for the ETag of a redirect to the storage host.
    let port = Model::new().serve(|model, request, stream| {
        let name = request.file().filter(|_| request.path.starts_with("/org/"))?;
        let headers = format!("x-linked-etag: \"../../../../.bashrc\"\r\n{}", model.headers(name));
        Some(redirect(stream, &format!("/store/{name}"), &headers))
    });
    Home::new().refuses(port, &["sends the ETag \"../../../../.bashrc\""]);
}

#[test]
fn commits_that_are_paths_are_refused() {
    let paths = ["../../../../victim", "/tmp/grpo-test-victim", "..", "", "main", "0123"];
    for found in paths {
        let port = Model { sha: found.into(), ..Model::new() }.serve(|_, _, _| None);
        Home::new().refuses(port, &["names the commit", "expected 40 hexadecimal digits"]);
    }
    for (found, expected) in [
        ("../../../../victim", "expected 40 hexadecimal digits"),
        ("/tmp/grpo-test-victim", "expected 40 hexadecimal digits"),
        ("ffffffffffffffffffffffffffffffffffffffff", "sends a file of the commit ffff"),
    ] {
        let port = Model { commit: found.into(), ..Model::new() }.serve(|_, _, _| None);
        Home::new().refuses(port, &["config.json", expected]);
    }
}

#[test]
fn file_names_cannot_leave_the_model_folder() {
    let home = Home::new();
    let listed = [
        "config.json",
        WEIGHTS,
        "../../../../.bashrc",
        "/tmp/grpo-test-evil",
        "model-00001-of-00002/../../x.safetensors",
    ];
    let port = Model::new().serve(move |_, request, stream| {
        request.file().is_none().then(|| {
            let siblings: Vec<_> = listed.iter().map(|name| serde_json::json!({"rfilename": name})).collect();
            let body = serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string();
            whole(stream, "Connection: close\r\n", body.as_bytes())
        })
    });
    let snapshot = home.hub(port).locate("org/name", None).unwrap();
    let names: BTreeSet<_> = std::fs::read_dir(snapshot).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["config.json".into(), WEIGHTS.into()].into());
    home.is_untouched();
    // File names in the index of shards.
    for file in ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""] {
        let folder = Folder::sharded();
        let index = serde_json::json!({"weight_map": {"lm_head.weight": file}});
        std::fs::write(folder.file("model.safetensors.index.json"), index.to_string()).unwrap();
        says(&folder.refused(), &["the index gives `lm_head.weight` the file", "expected a file name"]);
    }
}

/// The token is only sent to the endpoint, whichever request is redirected and wherever to: another port, another name of this machine.
#[test]
fn a_token_is_sent_to_the_endpoint_alone() {
    for (listing, same_port) in [(false, false), (false, true), (true, false), (true, true)] {
        let (home, model) = (Home::new(), Model::new());
        let (store, store_log) = model.serve_logged(|_, _, _| None);
        let (port, log) = model.serve_logged(move |model, request, stream| {
            let port = if same_port { request.host.rsplit(':').next().unwrap().to_owned() } else { store.to_string() };
            let elsewhere = format!("http://localhost:{port}{}", request.path);
            match request.file() {
                _ if request.host.starts_with("localhost") => None,
                None if listing => Some(redirect(stream, &elsewhere, "")),
                Some(name) if !listing => {
                    let size = model.files[name].len();
                    let linked = format!("x-linked-etag: \"{name}-linked\"\r\nx-linked-size: {size}\r\n");
                    Some(redirect(stream, &elsewhere, &(linked + &model.headers(name))))
                }
                _ => None,
            }
        });
        let hub = Hub { token: Some("hf_secret".into()), ..home.hub(port) };
        home.accepts(&hub, &model);
        let all = [log, store_log].map(|log| log.lock().unwrap().clone()).concat();
        let (own, others): (Vec<_>, Vec<_>) = all.iter().partition(|r| r.host == format!("127.0.0.1:{port}"));
        assert!(!own.is_empty() && !others.is_empty());
        assert!(own.iter().all(|r| r.authorization.as_deref() == Some("Bearer hf_secret")), "{own:?}");
        assert!(others.iter().all(|r| r.authorization.is_none()), "{others:?}");
    }
}

#[test]
fn endless_redirects_are_stopped() {
    for (listing, absolute) in [(true, true), (true, false), (false, true), (false, false)] {
        let port = Model::new().serve(move |_, request, stream| {
            let host = if absolute { format!("http://{}", request.host) } else { String::new() };
            (request.file().is_none() == listing).then(|| redirect(stream, &(host + &request.path), ""))
        });
        Home::new().refuses(port, &["redirects more than 10 times"]);
    }
    for location in ["file:///etc/passwd", "*", "?"] {
        let port =
            Model::new().serve(move |_, request, stream| request.is_content().then(|| redirect(stream, location, "")));
        Home::new().refuses(port, &[WEIGHTS, "redirects to something other than an address of HTTP"]);
    }
}

type Stalls = fn(&Request) -> bool;

#[test]
fn a_stalling_hub_times_out() {
    let stalls: [(Stalls, &str); 3] = [
        (|request| request.file().is_none(), "HF_HUB_ETAG_TIMEOUT"),
        (|request| request.is_metadata && request.file() == Some(WEIGHTS), "HF_HUB_ETAG_TIMEOUT"),
        (Request::is_content, "HF_HUB_DOWNLOAD_TIMEOUT"),
    ];
    // Each case waits for its time limit.
    std::thread::scope(|scope| {
        for (stalls, variable) in stalls {
            for manner in 0..4 {
                // Only the first byte of a response for size and ETag is read.
                if manner < 2 || variable != "HF_HUB_ETAG_TIMEOUT" || stalls(&listing_request()) {
                    scope.spawn(move || assert_times_out(stalls, manner, variable));
                }
            }
        }
    });
    let home = Home::new();
    let hub = Hub { etag_timeout: Duration::ZERO, ..home.hub(1) };
    let error = hub.locate("org/name", None).unwrap_err().to_string();
    says(&error, &["HF_HUB_ETAG_TIMEOUT: expected a number of seconds above 0"]);
}

/// Stalls before the response, within its head, within its body, or with a byte from time to time.
fn assert_times_out(stalls: Stalls, manner: usize, variable: &str) {
    let stall = move |model: &Model, request: &Request, stream: &mut TcpStream| {
        let head = "HTTP/1.1 206 Partial Content\r\nContent-";
        let total = model.weights().len();
        let rest = format!(
            "Length: {}\r\nContent-Range: bytes {}-{}/{total}\r\n{}\r\n",
            total - request.begin,
            request.begin,
            total - 1,
            model.headers(WEIGHTS)
        );
        if manner > 0 {
            stream.write_all(head.as_bytes())?;
        }
        if manner > 1 {
            stream.write_all(rest.as_bytes())?;
            stream.write_all(&model.weights()[request.begin..request.begin + 10])?;
        }
        for byte in &model.weights()[request.begin + 10..] {
            std::thread::sleep(Duration::from_millis(if manner == 3 { 20 } else { 60_000 }));
            stream.write_all(&[*byte])?;
        }
        Ok(())
    };
    let port = Model::new().serve(move |model, request, stream| stalls(request).then(|| stall(model, request, stream)));
    Home::new().refuses(port, &["sent less than 1024 bytes per second for 1 s", variable]);
}

fn listing_request() -> Request {
    Request { path: "/api/models/".into(), host: String::new(), authorization: None, begin: 0, is_metadata: false }
}

#[test]
fn an_endless_body_is_read_only_to_the_announced_size() {
    for listing in [false, true] {
        let home = Home::new();
        let endless = |model: &Model, stream: &mut TcpStream| {
            write!(stream, "HTTP/1.1 200 OK\r\n{}\r\n", model.headers(WEIGHTS))?;
            loop {
                stream.write_all(&[b'a'; 1 << 16])?;
            }
        };
        let port = Model::new().serve(move |model, request, stream| {
            let is_endless = if listing { request.file().is_none() } else { request.is_content() };
            is_endless.then(|| endless(model, stream))
        });
        home.refuses(port, &[if listing { "in more than 33554432 bytes" } else { "more than the" }]);
        assert!(home.incomplete().iter().all(|path| path.metadata().unwrap().len() == 0), "it is deleted");
    }
}

#[test]
fn downloads_resume_with_ranges_and_restart_without() {
    let (home, model) = (Home::new(), Model::new());
    let requests = Mutex::new(0);
    let port = model.serve(move |model, request, stream| {
        let mut count = requests.lock().unwrap();
        *count += u32::from(request.is_content());
        let content = model.weights();
        request.is_content().then(|| match *count {
            // Half of the file, then all of it.
            1 => model.partial(stream, WEIGHTS, request.begin, &content[..content.len() / 2]),
            _ => whole(stream, &model.headers(WEIGHTS), content),
        })
    });
    home.accepts(&home.hub(port), &model);
    // A wrong range, and a wrong total size.
    for (begin, total) in [(1, 0), (0, 1)] {
        let port = Model::new().serve(move |model, request, stream| {
            let (content, headers) = (model.weights(), model.headers(WEIGHTS));
            let (length, last, total) = (content.len(), content.len() - 1, content.len() + total);
            let head =
                format!("Content-Length: {length}\r\nContent-Range: bytes {begin}-{last}/{total}\r\n{headers}\r\n");
            let body = [b"HTTP/1.1 206 Partial Content\r\n", head.as_bytes(), content].concat();
            request.is_content().then(|| stream.write_all(&body))
        });
        Home::new().refuses(port, &[WEIGHTS, "was asked for the bytes from 0 on", "and sends others"]);
    }
}

/// One test for all, because each case is retried with pauses.
#[test]
fn a_truncated_response_is_refused() {
    let file = |name: &'static str, half: bool| {
        let port = Model::new().serve(move |model, request, stream| {
            let content = &model.files[name];
            let body = if half { &content[..content.len() / 2] } else { b"{}" };
            let response = [format!("HTTP/1.1 200 OK\r\n{}\r\n", model.headers(name)).as_bytes(), body].concat();
            (request.file() == Some(name) && !request.is_metadata).then(|| stream.write_all(&response))
        });
        Home::new().refuses(port, &[name, "ended after", "bytes"]);
    };
    let listing = || {
        let begin = format!("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{{\"sha\": \"{COMMIT}\", \"sib");
        let port = Model::new()
            .serve(move |_, request, stream| request.file().is_none().then(|| stream.write_all(begin.as_bytes())));
        Home::new().refuses(port, &["broke off"]);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| file(WEIGHTS, true));
        scope.spawn(|| file("tokenizer_config.json", false));
        scope.spawn(listing);
    });
}

#[test]
fn a_login_page_is_refused() {
    let page = b"<html>please log in</html>";
    for listing in [false, true] {
        let port = Model::new().serve(move |model, request, stream| match request.file() {
            None if listing => Some(whole(stream, "Content-Type: text/html\r\n", page)),
            _ => request.is_content().then(|| whole(stream, &model.headers(WEIGHTS), page)),
        });
        let parts: &[&str] = if listing {
            &["something other than a listing", "<html>please log in"]
        } else {
            &[WEIGHTS, "sends 26 bytes where it announced"]
        };
        Home::new().refuses(port, parts);
    }
}

#[test]
fn contents_with_a_wrong_checksum_are_deleted() {
    let sha256: fn(&str, &[u8]) -> String =
        |_, content| Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    let model = Model { etag: sha256, ..Model::new() };
    let home = Home::new();
    let port = model.serve(|model, request, stream| {
        let mut content = model.weights().to_vec();
        let last = content.len() - 5;
        content[last] ^= 1;
        request.is_content().then(|| model.partial(stream, WEIGHTS, request.begin, &content[request.begin..]))
    });
    home.refuses(port, &[WEIGHTS, "has the SHA-256", "it was deleted"]);
    assert!(home.incomplete().is_empty());
    // A partial file is checked, too: if its bytes are wrong, the whole file is downloaded again.
    let port = model.serve(|_, _, _| None);
    let blobs = home.cache().join("models--org--name/blobs");
    let etag = sha256("", model.weights());
    std::fs::write(blobs.join(format!("{etag}.incomplete")), [7; 100]).unwrap();
    let snapshot = home.accepts(&home.hub(port), &model);
    assert_eq!(std::fs::read_link(snapshot.join(WEIGHTS)).unwrap(), Path::new("../../blobs").join(etag));
    assert!(home.incomplete().is_empty());
}

#[test]
fn different_files_with_equal_etags_are_refused() {
    let home = Home::new();
    let port = Model { etag: |_, _| "same".into(), ..Model::new() }.serve(|_, _, _| None);
    // A later process, which finds the first file in the cache, refuses as well.
    for _ in 0..2 {
        home.refuses(port, &["the same ETag \"same\" for config.json and"]);
    }
}

/// Covers an announced size larger than the disk, a link where the partial file belongs, and a FIFO where the reference belongs.
#[test]
fn downloads_do_not_follow_links_or_exceed_the_disk() {
    let (home, model) = (Home::new(), Model::new());
    let port = model.serve(|model, request, stream| {
        let range = "Content-Length: 1\r\nContent-Range: bytes 0-0/1000000000000000";
        let headers = model.headers(WEIGHTS);
        let is_weights = request.file() == Some(WEIGHTS);
        is_weights.then(|| write!(stream, "HTTP/1.1 206 Partial Content\r\n{range}\r\n{headers}\r\nx"))
    });
    home.refuses(port, &[WEIGHTS, "needs 1000000000000000 more bytes"]);

    let home = Home::new();
    let port = model.serve(|_, _, _| None);
    let folder = home.cache().join("models--org--name");
    std::fs::create_dir_all(folder.join("blobs")).unwrap();
    std::fs::create_dir_all(folder.join("refs")).unwrap();
    let partial = folder.join("blobs").join(format!("{WEIGHTS}-etag.incomplete"));
    std::os::unix::fs::symlink(home.0.path().join(".bashrc"), partial).unwrap();
    let pipe = folder.join("refs/main");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    home.accepts(&home.hub(port), &model);
    assert_eq!(std::fs::read_to_string(pipe).unwrap(), COMMIT);
    // A reference that leads out of the cache.
    std::fs::write(folder.join("refs/main"), "../../../..").unwrap();
    let offline = Hub { offline: true, ..home.hub(port) };
    says(&offline.locate("org/name", None).unwrap_err().to_string(), &["refs/main holds no commit"]);
}
