//! Downloads from a local server that responds like Hugging Face.

use crate::support::{Folder, says};
use models::{Hub, ModelFolder};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const EARLIER: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// The server of the model `org/name`.
#[derive(Default)]
struct Server {
    /// The files of `COMMIT`.
    files: BTreeMap<String, Vec<u8>>,
    /// The files of `EARLIER`.
    earlier: BTreeMap<String, Vec<u8>>,
    /// A file that is listed but not served.
    lost: Option<String>,
    /// The token that is required for any response.
    token: Option<String>,
    /// A file name and the number of its responses that break off in the middle.
    breaks: Mutex<(String, usize)>,
    /// All requested paths with their ranges.
    log: Mutex<Vec<String>>,
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(path).unwrap())
    });
    files.collect()
}

impl Server {
    fn of(folder: &Path) -> Self {
        Self { files: files(folder), ..Self::default() }
    }

    /// Returns the files of a commit.
    fn tree(&self, commit: &str) -> Option<&BTreeMap<String, Vec<u8>>> {
        match commit {
            COMMIT => Some(&self.files),
            EARLIER if !self.earlier.is_empty() => Some(&self.earlier),
            _ => None,
        }
    }

    /// Serves until the tests end. Returns the address.
    fn start(self) -> (String, Arc<Self>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = Arc::new(self);
        let shared = Arc::clone(&server);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // A client may close the connection early.
                let _ = shared.answer(stream.unwrap());
            }
        });
        (address, server)
    }

    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let lines: Vec<String> = BufReader::new(&stream)
            .lines()
            .map(|line| line.unwrap_or_default())
            .take_while(|line| !line.is_empty())
            .collect();
        let path = lines[0].split(' ').nth(1).unwrap_or_default().to_owned();
        let header = |name: &str| {
            let mut found = lines.iter().filter_map(|line| line.split_once(": "));
            found.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
        };
        let range = header("range");
        self.log.lock().unwrap().push(format!("{path} {}", range.as_deref().unwrap_or("whole")));
        let mut refuse =
            |status: &str| write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        if self.token.is_some() && header("authorization") != self.token.as_ref().map(|token| format!("Bearer {token}"))
        {
            return refuse("401 Unauthorized");
        }
        if let Some(revision) = path.strip_prefix("/api/models/org/name/revision/") {
            let commit = match revision {
                "main" => COMMIT,
                "v1.0" | "refs%2Fpr%2F1" => EARLIER,
                commit => commit,
            };
            let Some(tree) = self.tree(commit) else { return refuse("404 Not Found") };
            let siblings: Vec<_> = tree.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
            let body = serde_json::json!({"sha": commit, "siblings": siblings}).to_string();
            let length = body.len();
            return write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
        }
        let (commit, name) =
            path.strip_prefix("/org/name/resolve/").and_then(|rest| rest.split_once('/')).unwrap_or_default();
        let content = self.tree(commit).and_then(|tree| tree.get(name));
        let Some(content) = content.filter(|_| self.lost.as_deref() != Some(name)) else {
            return refuse("404 Not Found");
        };
        let (begin, end) = range.as_deref().and_then(|range| range.strip_prefix("bytes=")?.split_once('-')).unwrap();
        let begin: usize = begin.parse().unwrap();
        let end = end.parse().map_or(content.len(), |last: usize| (last + 1).min(content.len()));
        write!(
            stream,
            "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {begin}-{}/{}\r\nETag: \"{name}-of-{commit}\"\r\n\
             x-repo-commit: {commit}\r\nConnection: close\r\n\r\n",
            end - begin,
            end - 1,
            content.len()
        )?;
        let mut breaks = self.breaks.lock().unwrap();
        let is_whole = end == content.len() && end - begin > 1;
        if breaks.0 == name && breaks.1 > 0 && is_whole {
            breaks.1 -= 1;
            return stream.write_all(&content[begin..begin + (end - begin) / 2]);
        }
        stream.write_all(&content[begin..end])
    }
}

fn hub(cache: &Path, endpoint: String) -> Hub {
    let timeout = Duration::from_secs(10);
    let (etag_timeout, download_timeout) = (timeout, timeout);
    Hub { cache: cache.into(), offline: false, token: None, endpoint, etag_timeout, download_timeout }
}

#[test]
fn a_model_is_downloaded_completely_and_once() {
    let folder = Folder::sharded();
    for name in ["tokenizer.json", "generation_config.json", "pytorch_model.bin", "training_args.bin", "README.md"] {
        std::fs::write(folder.file(name), "{}").unwrap();
    }
    let shard = "model-00002-of-00002.safetensors";
    let server = Server { breaks: Mutex::new((shard.into(), 2)), ..Server::of(folder.path()) };
    let (address, server) = server.start();
    let cache = tempfile::tempdir().unwrap();
    let hub = hub(cache.path(), address);
    let snapshot = hub.locate("org/name", None).unwrap();
    assert!(snapshot.ends_with(format!("models--org--name/snapshots/{COMMIT}")), "{}", snapshot.display());
    let found = ModelFolder::open(&snapshot).unwrap();
    let weights = found.weights().unwrap();
    weights.check(found.config()).unwrap();
    let original = folder.open().unwrap().weights().unwrap();
    for name in original.names() {
        assert_eq!(weights.tensor(name).unwrap().bytes(), original.tensor(name).unwrap().bytes(), "{name}");
    }
    assert!(snapshot.join("tokenizer.json").exists() && snapshot.join("generation_config.json").exists());
    for other in ["pytorch_model.bin", "training_args.bin", "README.md"] {
        assert!(!snapshot.join(other).exists(), "{other} is not needed");
    }
    // Two responses broke off; the following requests asked for the rest only.
    let log = server.log.lock().unwrap().clone();
    let length = server.files[shard].len();
    for begin in [0, length / 2, length / 2 + (length - length / 2) / 2] {
        let request = format!("/org/name/resolve/{COMMIT}/{shard} bytes={begin}-");
        assert!(log.contains(&request), "{request} is not in {log:#?}");
    }
    let references = cache.path().join("models--org--name/refs");
    assert_eq!(std::fs::read_to_string(references.join("main")).unwrap(), COMMIT);
    assert_eq!(std::fs::read_dir(references).unwrap().count(), 1);
    // From now on the hub is not contacted.
    assert_eq!(hub.locate("org/name", None).unwrap(), snapshot);
    assert_eq!(Hub { offline: true, ..hub }.locate("org/name", Some("main")).unwrap(), snapshot);
    assert_eq!(server.log.lock().unwrap().len(), log.len());
}

#[test]
fn a_configuration_is_downloaded_without_weights() {
    for with_generation in [true, false] {
        let folder = Folder::sharded();
        std::fs::write(folder.file("tokenizer.json"), "{}").unwrap();
        if with_generation {
            std::fs::write(folder.file("generation_config.json"), "{\"temperature\": 0.5}").unwrap();
        }
        let (address, server) = Server::of(folder.path()).start();
        let cache = tempfile::tempdir().unwrap();
        let hub = hub(cache.path(), address);
        let snapshot = hub.locate_config("org/name", None).unwrap();
        let found = ModelFolder::open(&snapshot).unwrap();
        assert_eq!(found.config(), folder.open().unwrap().config());
        assert_eq!(found.generation().temperature, with_generation.then_some(0.5));
        let log = server.log.lock().unwrap().clone();
        assert!(
            !log.iter().any(|request| request.contains(".safetensors") || request.contains("tokenizer")),
            "{log:#?}"
        );
        let mut names: Vec<_> = std::fs::read_dir(&snapshot)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            if with_generation { vec!["config.json", "generation_config.json"] } else { vec!["config.json"] }
        );
        assert_eq!(references(cache.path()), [("main".to_owned(), COMMIT.to_owned())].into());
        // Without a network the partial snapshot is found, but not used as the model.
        let offline = Hub { offline: true, ..hub.clone() };
        assert_eq!(offline.locate_config("org/name", None).unwrap(), snapshot);
        says(&offline.locate("org/name", None).unwrap_err().to_string(), &["has only a part of it"]);
        if with_generation {
            assert_eq!(hub.locate_config("org/name", None).unwrap(), snapshot);
            assert_eq!(server.log.lock().unwrap().len(), log.len(), "the hub is not asked again");
        }
        // A later run downloads the rest.
        let whole = ModelFolder::open(&hub.locate("org/name", None).unwrap()).unwrap();
        whole.weights().unwrap().check(whole.config()).unwrap();
        assert!(whole.path().join("tokenizer.json").exists());
        assert_eq!(offline.locate_config("org/name", None).unwrap(), whole.path());
    }
}

#[test]
fn missing_and_private_models_are_explained() {
    let cache = tempfile::tempdir().unwrap();
    let folder = Folder::whole();
    let (address, _) = Server { token: Some("hf_secret".into()), ..Server::of(folder.path()) }.start();
    let private = hub(cache.path(), address);
    let text = |hub: &Hub, name: &str| hub.locate(name, None).unwrap_err().to_string();
    says(
        &text(&private, "org/name"),
        &["\"org/name\" was not found", "has no models--org--name", "no token was sent (HF_TOKEN)"],
    );
    let wrong = Hub { token: Some("hf_wrong".into()), ..private.clone() };
    let refused = text(&wrong, "org/name");
    says(&refused, &["the token that was sent does not open it"]);
    assert!(!refused.contains("hf_wrong"), "{refused}");
    let right = Hub { token: Some("hf_secret".into()), ..private };
    says(&text(&right, "org/other"), &["has no org/other with a revision main"]);
    ModelFolder::open(&right.locate("org/name", None).unwrap()).unwrap();

    std::fs::rename(folder.file("model.safetensors"), folder.file("pytorch_model.bin")).unwrap();
    let (address, _) = Server::of(folder.path()).start();
    let other = tempfile::tempdir().unwrap();
    says(&text(&hub(other.path(), address), "org/name"), &["there is no model.safetensors", "[\"pytorch_model.bin\"]"]);

    // No server listens at this address.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nobody = hub(other.path(), format!("http://{closed}"));
    says(&text(&nobody, "org/name"), &["was not found", "downloading from http://127.0.0.1", "refused"]);
}

/// Returns the names and contents of the references of `org/name` in a cache.
fn references(cache: &Path) -> BTreeMap<String, String> {
    fn walk(folder: &Path, prefix: &str, into: &mut BTreeMap<String, String>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().map(Result::unwrap) {
            let name = format!("{prefix}{}", entry.file_name().display());
            match entry.path() {
                folder if folder.is_dir() => walk(&folder, &format!("{name}/"), into),
                file => drop(into.insert(name, std::fs::read_to_string(file).unwrap())),
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(&cache.join("models--org--name/refs"), "", &mut found);
    found
}

#[test]
fn a_revision_is_a_branch_a_tag_or_a_commit() {
    let (now, before) = (Folder::whole(), Folder::sharded());
    let server = Server { earlier: files(before.path()), ..Server::of(now.path()) };
    let (address, server) = server.start();
    for (revision, commit, reference) in [
        ("main", COMMIT, Some("main")),
        ("v1.0", EARLIER, Some("v1.0")),
        ("refs/pr/1", EARLIER, Some("refs/pr/1")),
        (EARLIER, EARLIER, None),
    ] {
        let cache = tempfile::tempdir().unwrap();
        let hub = hub(cache.path(), address.clone());
        let snapshot = hub.locate("org/name", Some(revision)).unwrap();
        assert!(snapshot.ends_with(Path::new("snapshots").join(commit)), "{revision}: {}", snapshot.display());
        let original = if commit == COMMIT { &now } else { &before };
        let (found, wanted) = (ModelFolder::open(&snapshot).unwrap().weights().unwrap(), original.open().unwrap());
        let wanted = wanted.weights().unwrap();
        for name in wanted.names() {
            let (found, wanted) = (found.tensor(name).unwrap(), wanted.tensor(name).unwrap());
            assert_eq!((found.dtype(), found.bytes()), (wanted.dtype(), wanted.bytes()), "{revision}: {name}");
        }
        let noted = reference.map(|name| (name.to_owned(), commit.to_owned()));
        assert_eq!(references(cache.path()), noted.into_iter().collect(), "{revision}");
        // By the same name and by the commit, without a network.
        let asked = server.log.lock().unwrap().len();
        let offline = Hub { offline: true, ..hub.clone() };
        assert_eq!(offline.locate("org/name", Some(revision)).unwrap(), snapshot);
        assert_eq!(offline.locate("org/name", Some(commit)).unwrap(), snapshot);
        assert_eq!(server.log.lock().unwrap().len(), asked);
        // The error about a missing revision names it.
        let text = hub.locate("org/name", Some("v2")).unwrap_err().to_string();
        says(&text, &["has no revision v2", "has no org/name with a revision v2"]);
    }
}

/// A file that the hub lists but does not serve: the error names it, and the partial download is not used as the model until the hub serves
/// the file again.
#[test]
fn a_listed_file_that_is_missing_on_the_hub_is_named() {
    let folder = Folder::sharded();
    let shard = "model-00002-of-00002.safetensors";
    let (address, _) = Server { lost: Some(shard.into()), ..Server::of(folder.path()) }.start();
    let cache = tempfile::tempdir().unwrap();
    let text = hub(cache.path(), address).locate("org/name", None).unwrap_err().to_string();
    says(&text, &["\"org/name\" was not found", shard, "lists this file", "404"]);
    assert!(!text.contains("with a revision"), "{text}");
    let (address, _) = Server::of(folder.path()).start();
    let mended = hub(cache.path(), address);
    let text = Hub { offline: true, ..mended.clone() }.locate("org/name", Some(COMMIT)).unwrap_err().to_string();
    says(&text, &["has only a part of it", shard]);
    let found = ModelFolder::open(&mended.locate("org/name", None).unwrap()).unwrap();
    found.weights().unwrap().check(found.config()).unwrap();
}
