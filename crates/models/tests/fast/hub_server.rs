//! A local hub, and a cache that it may try to leave.
// Each test binary uses some of it.
#![allow(dead_code)]

use crate::support::{Folder, says};
use grpo_models::{Hub, ModelFolder};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(super) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub(super) const WEIGHTS: &str = "model.safetensors";

/// The requests that a server has received.
pub(super) type Log = Arc<Mutex<Vec<Request>>>;

/// A request as received by a server.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) path: String,
    pub(super) host: String,
    pub(super) authorization: Option<String>,
    /// The first requested byte, and `true` if it was the only one: a request for size and ETag.
    pub(super) begin: usize,
    pub(super) is_metadata: bool,
}

impl Request {
    pub(super) fn read(stream: &TcpStream) -> Option<Self> {
        let lines: Vec<String> =
            BufReader::new(stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
        let header = |name: &str| {
            let mut found = lines.iter().filter_map(|line| line.split_once(": "));
            found.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
        };
        let path = lines.first()?.split(' ').nth(1)?.to_owned();
        let range = header("range").unwrap_or_default();
        let begin = range.strip_prefix("bytes=").and_then(|range| range.split_once('-')?.0.parse().ok());
        Some(Self {
            path,
            host: header("host").unwrap_or_default(),
            authorization: header("authorization"),
            begin: begin.unwrap_or(0),
            is_metadata: range == "bytes=0-0",
        })
    }

    /// Returns the requested file; `None` for the listing. A data set's file may be in a folder.
    pub(super) fn file(&self) -> Option<&str> {
        if let Some((_, file)) = self.path.strip_prefix("/datasets/").and_then(|path| path.split_once("/resolve/")) {
            return file.split_once('/').map(|(_, name)| name);
        }
        (!self.path.starts_with("/api/")).then(|| self.path.rsplit('/').next()).flatten()
    }

    /// Returns `true` if the contents of the weights are requested.
    pub(super) fn is_content(&self) -> bool {
        self.file() == Some(WEIGHTS) && !self.is_metadata
    }
}

/// The responses of a well-behaved hub. A test replaces some of them.
#[derive(Clone)]
pub(super) struct Model {
    pub(super) files: Arc<BTreeMap<String, Vec<u8>>>,
    pub(super) sha: String,
    pub(super) commit: String,
    /// Returns the ETag of a file from its name and contents.
    pub(super) etag: fn(&str, &[u8]) -> String,
}

impl Model {
    pub(super) fn new() -> Self {
        let folder = Folder::whole();
        std::fs::write(folder.file("tokenizer_config.json"), "{\"model_max_length\": 64}").unwrap();
        Self::of(folder.path())
    }

    /// Returns the model with the files of a folder.
    pub(super) fn of(folder: &Path) -> Self {
        let files = std::fs::read_dir(folder).unwrap().map(|entry| {
            let path = entry.unwrap().path();
            (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(path).unwrap())
        });
        Self {
            files: Arc::new(files.collect()),
            sha: COMMIT.into(),
            commit: COMMIT.into(),
            etag: |name, _| format!("{name}-etag"),
        }
    }

    pub(super) fn weights(&self) -> &[u8] {
        &self.files[WEIGHTS]
    }

    /// Returns the headers that describe a file.
    pub(super) fn headers(&self, name: &str) -> String {
        let etag = (self.etag)(name, &self.files[name]);
        format!("ETag: \"{etag}\"\r\nx-repo-commit: {}\r\nConnection: close\r\n", self.commit)
    }

    /// Responds like a well-behaved hub.
    pub(super) fn answer(&self, request: &Request, stream: &mut TcpStream) -> std::io::Result<()> {
        let Some(name) = request.file() else {
            let siblings: Vec<_> = self.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
            let body = serde_json::json!({"sha": self.sha, "siblings": siblings}).to_string();
            return whole(stream, "Connection: close\r\n", body.as_bytes());
        };
        let Some(content) = self.files.get(name) else {
            return refuse(stream, "404 Not Found");
        };
        let end = if request.is_metadata { 1 } else { content.len() };
        self.partial(stream, name, request.begin, &content[request.begin..end])
    }

    /// Starts a server that answers with `special` the requests for which it returns a result, and the others like a well-behaved hub, each
    /// on its own thread. Returns its port.
    pub(super) fn serve(
        &self,
        special: impl Fn(&Self, &Request, &mut TcpStream) -> Option<std::io::Result<()>> + Send + Sync + 'static,
    ) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new((self.clone(), special));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, shared) = (stream.unwrap(), Arc::clone(&shared));
                std::thread::spawn(move || {
                    let (model, special) = &*shared;
                    // A client may close the connection early.
                    if let Some(request) = Request::read(&stream) {
                        let _ = special(model, &request, &mut stream)
                            .unwrap_or_else(|| model.answer(&request, &mut stream));
                    }
                });
            }
        });
        port
    }

    /// Like [`Model::serve`]. Also returns the requests.
    pub(super) fn serve_logged(
        &self,
        special: impl Fn(&Self, &Request, &mut TcpStream) -> Option<std::io::Result<()>> + Send + Sync + 'static,
    ) -> (u16, Log) {
        let log = Log::default();
        let shared = Arc::clone(&log);
        let port = self.serve(move |model, request, stream| {
            shared.lock().unwrap().push(request.clone());
            special(model, request, stream)
        });
        (port, log)
    }

    /// Writes the head of a response with the bytes from `begin` on, and `body`, which may be shorter than announced.
    pub(super) fn partial(&self, stream: &mut TcpStream, name: &str, begin: usize, body: &[u8]) -> std::io::Result<()> {
        let total = self.files[name].len();
        let end = if body.len() == 1 { begin + 1 } else { total };
        write!(
            stream,
            "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {begin}-{}/{total}\r\n{}\r\n",
            end - begin,
            end - 1,
            self.headers(name)
        )?;
        stream.write_all(body)
    }
}

/// Writes a response with status 200.
pub(super) fn whole(stream: &mut TcpStream, headers: &str, body: &[u8]) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n{headers}\r\n", body.len())?;
    stream.write_all(body)
}

/// Writes a response without content.
pub(super) fn refuse(stream: &mut TcpStream, status: &str) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
}

pub(super) fn redirect(stream: &mut TcpStream, location: &str, headers: &str) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n{headers}\r\n")
}

/// A folder that contains a cache and files outside it.
pub(super) struct Home(pub(super) tempfile::TempDir);

impl Home {
    pub(super) fn new() -> Self {
        let home = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir(home.0.path().join("cache")).unwrap();
        std::fs::write(home.0.path().join(".bashrc"), "mine").unwrap();
        home
    }

    pub(super) fn cache(&self) -> PathBuf {
        self.0.path().join("cache")
    }

    pub(super) fn hub(&self, port: u16) -> Hub {
        Hub {
            cache: self.cache(),
            offline: false,
            token: None,
            token_source: None,
            endpoint: format!("http://127.0.0.1:{port}"),
            etag_timeout: Duration::from_secs(1),
            download_timeout: Duration::from_secs(1),
        }
    }

    /// Checks that a download fails in bounded time with an error that contains all of `parts`, that the cache is not used as the model, and
    /// that no file outside the cache has changed.
    #[track_caller]
    pub(super) fn refuses(&self, port: u16, parts: &[&str]) {
        let begin = Instant::now();
        let hub = self.hub(port);
        let error = hub.locate("org/name", None).expect_err("the hub misbehaves").to_string();
        assert!(begin.elapsed() < Duration::from_secs(20), "it took {:?}: {error}", begin.elapsed());
        says(&error, parts);
        let offline = Hub { offline: true, ..hub };
        offline.locate("org/name", None).expect_err("nothing damaged passes for the model");
        self.is_untouched();
    }

    #[track_caller]
    pub(super) fn is_untouched(&self) {
        let names: BTreeSet<_> =
            std::fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [".bashrc".into(), "cache".into()].into());
        assert_eq!(std::fs::read(self.0.path().join(".bashrc")).unwrap(), b"mine");
    }

    /// Checks that the correct model is downloaded.
    #[track_caller]
    pub(super) fn accepts(&self, hub: &Hub, model: &Model) -> PathBuf {
        let snapshot = hub.locate("org/name", None).unwrap();
        let folder = ModelFolder::open(&snapshot).unwrap();
        folder.weights().unwrap().check(folder.config()).unwrap();
        for (name, content) in model.files.iter() {
            assert!(std::fs::read(snapshot.join(name)).unwrap() == *content, "{name}");
        }
        self.is_untouched();
        snapshot
    }

    pub(super) fn incomplete(&self) -> Vec<PathBuf> {
        let blobs = std::fs::read_dir(self.cache().join("models--org--name/blobs")).into_iter().flatten();
        let paths = blobs.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|end| end == "incomplete")).collect()
    }
}
