//! Data sets from local hubs, of which some misbehave.

use crate::hub_server::{COMMIT, Home, Model, refuse, whole};
use crate::support::says;
use grpo_models::Hub;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const TRAIN: &str = "main/train-00000-of-00001.jsonl";

/// Returns a data set with a README.md and two files in folders.
fn dataset() -> Model {
    let files = [
        ("README.md", "# rows"),
        (TRAIN, "{\"question\": \"1 + 1\"}\n"),
        ("main/deep/test.jsonl", "{\"question\": \"?\"}\n"),
    ];
    let files: BTreeMap<String, Vec<u8>> = files.into_iter().map(|(name, text)| (name.into(), text.into())).collect();
    Model {
        files: Arc::new(files),
        sha: COMMIT.into(),
        commit: COMMIT.into(),
        etag: |_, content| Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

fn hub(home: &Home, port: u16) -> Hub {
    let timeout = Duration::from_secs(10);
    Hub { etag_timeout: timeout, download_timeout: timeout, ..home.hub(port) }
}

fn folder(home: &Home) -> PathBuf {
    home.cache().join("datasets--org--name")
}

fn one(name: &str) -> Vec<String> {
    vec![name.to_owned()]
}

#[test]
fn files_of_a_data_set_are_downloaded_once() {
    let (home, dataset) = (Home::new(), dataset());
    let (port, log) = dataset.serve_logged(|_, _, _| None);
    let hub = hub(&home, port);
    let names = hub.list_dataset("org/name", None).unwrap();
    assert_eq!(names, ["README.md", "main/deep/test.jsonl", TRAIN]);
    let wanted = [TRAIN, "main/deep/test.jsonl"].map(str::to_owned);
    let paths = hub.fetch_dataset("org/name", None, &wanted).unwrap();
    for (path, name) in paths.iter().zip(&wanted) {
        assert_eq!(*path, folder(&home).join("snapshots").join(COMMIT).join(name));
        assert!(std::fs::read(path).unwrap() == dataset.files[name], "{name}");
        // The link is relative, as in the cache of huggingface_hub.
        let link = std::fs::read_link(path).unwrap();
        let up = "../".repeat(2 + name.matches('/').count());
        assert_eq!(link, Path::new(&format!("{up}blobs/{}", (dataset.etag)(name, &dataset.files[name]))));
    }
    assert!(!folder(&home).join("snapshots").join(COMMIT).join("README.md").exists(), "only the named files");
    let asked: Vec<String> = log.lock().unwrap().iter().map(|request| request.path.clone()).collect();
    assert_eq!(asked[0], "/api/datasets/org/name/revision/main");
    assert!(asked[1..].iter().all(|path| path.starts_with(&format!("/datasets/org/name/resolve/{COMMIT}/main/"))));
    // From now on the hub is not contacted, by the branch or by the commit.
    let offline = Hub { offline: true, ..hub.clone() };
    for revision in [None, Some("main"), Some(COMMIT)] {
        for hub in [&hub, &offline] {
            assert_eq!(hub.list_dataset("org/name", revision).unwrap(), names);
            assert_eq!(hub.fetch_dataset("org/name", revision, &wanted).unwrap(), paths);
        }
    }
    assert_eq!(log.lock().unwrap().len(), asked.len());
    // A file that is listed and not in the cache is named.
    let text = offline.fetch_dataset("org/name", None, &one("README.md")).unwrap_err().to_string();
    says(&text, &["data set \"org/name\" was not found", "has no README.md", "HF_HUB_OFFLINE"]);
    hub.fetch_dataset("org/name", None, &one("README.md")).unwrap();
    home.is_untouched();
}

#[test]
fn missing_data_sets_are_explained() {
    let home = Home::new();
    let port =
        dataset().serve(|_, request, stream| request.path.contains("v9").then(|| refuse(stream, "404 Not Found")));
    let hub = hub(&home, port);
    let refused = |hub: &Hub, name: &str, revision, parts: &[&str]| {
        says(&hub.list_dataset(name, revision).unwrap_err().to_string(), parts);
    };
    refused(&hub, "org/name", Some("v9"), &["has no org/name with a revision v9"]);
    refused(&hub, "org/name", Some("../../x"), &["is not a branch"]);
    for name in ["name", "../name", "org/../name", "a/b/c", ""] {
        refused(&hub, name, None, &["is not a name on Hugging Face (OWNER/NAME)"]);
    }
    let offline = Hub { offline: true, ..hub.clone() };
    refused(&offline, "org/name", None, &["the cache has no listing", "datasets--org--name", "HF_HUB_OFFLINE"]);
    let port = dataset().serve(|_, _, stream| Some(refuse(stream, "401 Unauthorized")));
    refused(&Hub { endpoint: format!("http://127.0.0.1:{port}"), ..hub }, "org/name", None, &["private", "HF_TOKEN"]);
}

/// `hf download` and `datasets` save no listing.
#[test]
fn a_cache_that_another_program_has_filled_is_used_offline() {
    let home = Home::new();
    let snapshot = folder(&home).join("snapshots").join(COMMIT);
    std::fs::create_dir_all(snapshot.join("data")).unwrap();
    std::fs::create_dir_all(folder(&home).join("refs")).unwrap();
    std::fs::write(folder(&home).join("refs/main"), COMMIT).unwrap();
    let shards = [0, 1].map(|index| format!("data/train-0000{index}-of-00002.jsonl"));
    std::fs::write(snapshot.join(&shards[0]), "{}").unwrap();
    let offline = Hub { offline: true, ..hub(&home, 1) };
    assert_eq!(offline.list_dataset("org/name", None).unwrap(), shards[..1]);
    let text = offline.fetch_dataset("org/name", None, &shards[..1]).unwrap_err().to_string();
    says(&text, &["has only a part of it", &shards[1]]);
    std::fs::write(snapshot.join(&shards[1]), "{}").unwrap();
    let names = offline.list_dataset("org/name", None).unwrap();
    assert_eq!(names, shards);
    let paths = offline.fetch_dataset("org/name", Some("main"), &names).unwrap();
    assert_eq!(paths, shards.map(|name| snapshot.join(name)));
    // With a network, the hub's listing replaces the names in the cache.
    let port = dataset().serve(|_, _, _| None);
    assert!(hub(&home, port).list_dataset("org/name", None).unwrap().contains(&TRAIN.to_owned()));
}

#[test]
fn listed_names_cannot_leave_the_data_set() {
    let home = Home::new();
    let listed =
        ["../../../../.bashrc", "/tmp/grpo-test-evil", "a/../../../../../.bashrc", "a//b", "a\\b", "a\nb", "."];
    let port = dataset().serve(move |_, request, stream| {
        request.file().is_none().then(|| {
            let siblings: Vec<_> = listed.iter().map(|name| serde_json::json!({"rfilename": name})).collect();
            let body = serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string();
            whole(stream, "Connection: close\r\n", body.as_bytes())
        })
    });
    let hub = hub(&home, port);
    let names = hub.list_dataset("org/name", None).unwrap();
    assert_eq!(names, listed);
    for name in names {
        let text = hub.fetch_dataset("org/name", None, &[name]).unwrap_err().to_string();
        says(&text, &["it lists the file", "expected a relative path of plain names"]);
    }
    home.is_untouched();
}

/// A hub that misbehaves in one file.
#[track_caller]
fn refuses_file(
    special: impl Fn(&Model, &crate::hub_server::Request, &mut std::net::TcpStream) -> Option<std::io::Result<()>>
    + Send
    + Sync
    + 'static,
    parts: &[&str],
) {
    let home = Home::new();
    let hub = home.hub(dataset().serve(special));
    hub.list_dataset("org/name", None).unwrap();
    says(&hub.fetch_dataset("org/name", None, &one(TRAIN)).unwrap_err().to_string(), parts);
    let offline = Hub { offline: true, ..hub };
    offline.fetch_dataset("org/name", None, &one(TRAIN)).expect_err("nothing damaged is used");
    home.is_untouched();
}

#[test]
fn damaged_files_of_data_sets_are_refused() {
    let is_train = |request: &crate::hub_server::Request| request.file() == Some(TRAIN);
    refuses_file(
        move |_, request, stream| is_train(request).then(|| refuse(stream, "404 Not Found")),
        &[TRAIN, "lists this file", "404"],
    );
    // More bytes than any disk has.
    refuses_file(
        move |model, request, stream| {
            let range = "Content-Length: 1\r\nContent-Range: bytes 0-0/1000000000000000";
            let head = format!("HTTP/1.1 206 Partial Content\r\n{range}\r\n{}\r\nx", model.headers(TRAIN));
            is_train(request).then(|| stream.write_all(head.as_bytes()))
        },
        &[TRAIN, "needs", "more bytes"],
    );
    // Another size than announced, and other contents.
    refuses_file(
        move |model, request, stream| {
            (is_train(request) && !request.is_metadata).then(|| whole(stream, &model.headers(TRAIN), b"{}"))
        },
        &[TRAIN, "sends 2 bytes where it announced"],
    );
    refuses_file(
        move |model, request, stream| {
            let other = vec![b'x'; model.files[TRAIN].len()];
            (is_train(request) && !request.is_metadata).then(|| whole(stream, &model.headers(TRAIN), &other))
        },
        &[TRAIN, "has the SHA-256", "it was deleted"],
    );
    refuses_file(
        move |model, request, stream| {
            let etag = "ETag: \"../../../../.bashrc\"\r\nConnection: close\r\n";
            is_train(request).then(|| whole(stream, etag, &model.files[TRAIN]))
        },
        &["sends the ETag", "expected letters, digits"],
    );
}

#[test]
fn a_file_and_a_folder_of_one_name_are_refused() {
    let home = Home::new();
    let mut files = (*dataset().files).clone();
    files.extend([("main".to_owned(), b"a file".to_vec()), ("main/a".to_owned(), b"in a folder".to_vec())]);
    let hub = hub(&home, Model { files: Arc::new(files), ..dataset() }.serve(|_, _, _| None));
    hub.list_dataset("org/name", None).unwrap();
    hub.fetch_dataset("org/name", None, &one("main")).unwrap();
    let text = hub.fetch_dataset("org/name", None, &one("main/a")).unwrap_err().to_string();
    says(&text, &["main/a", "the cache cannot be written"]);
    home.is_untouched();
}
