//! Downloads from a local server that responds like Hugging Face.

use crate::hub_server::{COMMIT, Home, Model, refuse};
use crate::support::{Folder, says};
use grpo_models::{Hub, HubAccess, ModelFolder};
use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

const EARLIER: &str = "89abcdef0123456789abcdef0123456789abcdef";
const SHARD: &str = "model-00002-of-00002.safetensors";

/// Returns a hub with the default time-outs.
fn hub(home: &Home, port: u16) -> Hub {
    let timeout = Duration::from_secs(10);
    Hub { etag_timeout: timeout, download_timeout: timeout, ..home.hub(port) }
}

/// Returns the names of the files of a folder.
fn names(folder: &Path) -> BTreeSet<String> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Returns the names and contents of the references of `org/name` in a cache.
fn references(home: &Home) -> BTreeMap<String, String> {
    let folder = home.cache().join("models--org--name/refs");
    let found = ["main", "v1.0", "v2", "refs/pr/1"]
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), std::fs::read_to_string(folder.join(name)).ok()?)));
    let found: BTreeMap<_, _> = found.collect();
    assert_eq!(std::fs::read_dir(folder).map_or(0, Iterator::count), found.len());
    found
}

#[test]
fn a_model_is_downloaded_completely_and_once() {
    let (home, folder) = (Home::new(), Folder::sharded());
    let others = ["pytorch_model.bin", "training_args.bin", "README.md"];
    for name in ["tokenizer.json", "generation_config.json"].iter().chain(&others) {
        std::fs::write(folder.file(name), "{}").unwrap();
    }
    let (model, breaks) = (Model::of(folder.path()), Mutex::new(2));
    // Two responses break off in the middle.
    let (port, log) = model.serve_logged(move |model, request, stream| {
        let mut breaks = breaks.lock().unwrap();
        let content = &model.files[SHARD];
        if request.file() != Some(SHARD) || request.is_metadata || *breaks == 0 {
            return None;
        }
        *breaks -= 1;
        Some(model.partial(stream, SHARD, request.begin, &content[request.begin..(request.begin + content.len()) / 2]))
    });
    let hub = hub(&home, port);
    let snapshot = hub.locate("org/name", None).unwrap();
    assert!(snapshot.ends_with(format!("models--org--name/snapshots/{COMMIT}")), "{}", snapshot.display());
    for (name, content) in &*model.files {
        let expected = (!others.contains(&name.as_str())).then_some(content);
        assert!(std::fs::read(snapshot.join(name)).ok().as_ref() == expected, "{name}");
    }
    // The following requests asked for the rest only.
    let asked = log.lock().unwrap().clone();
    let length = model.files[SHARD].len();
    let begins: Vec<_> = asked.iter().filter(|r| r.file() == Some(SHARD) && !r.is_metadata).map(|r| r.begin).collect();
    assert_eq!(begins, [0, length / 2, (length / 2 + length) / 2]);
    assert_eq!(references(&home), [("main".to_owned(), COMMIT.to_owned())].into());
    // From now on the hub is not contacted.
    assert_eq!(hub.locate("org/name", None).unwrap(), snapshot);
    assert_eq!(Hub { offline: true, ..hub }.locate("org/name", Some("main")).unwrap(), snapshot);
    assert_eq!(log.lock().unwrap().len(), asked.len());
}

#[test]
fn a_configuration_is_downloaded_without_weights() {
    for with_generation in [true, false] {
        let (home, folder) = (Home::new(), Folder::sharded());
        std::fs::write(folder.file("tokenizer.json"), "{}").unwrap();
        let mut expected = BTreeSet::from(["config.json".to_owned()]);
        if with_generation {
            std::fs::write(folder.file("generation_config.json"), "{\"temperature\": 0.5}").unwrap();
            expected.insert("generation_config.json".into());
        }
        let model = Model::of(folder.path());
        let (port, log) = model.serve_logged(|_, _, _| None);
        let hub = hub(&home, port);
        let snapshot = hub.locate_config("org/name", None).unwrap();
        let found = ModelFolder::open(&snapshot).unwrap();
        assert_eq!(found.config(), folder.open().unwrap().config());
        assert_eq!(found.generation().temperature, with_generation.then_some(0.5));
        assert_eq!(names(&snapshot), expected);
        let asked = log.lock().unwrap().clone();
        assert!(asked.iter().filter_map(|request| request.file()).all(|name| expected.contains(name)), "{asked:?}");
        assert_eq!(references(&home), [("main".to_owned(), COMMIT.to_owned())].into());
        // Without a network the partial snapshot is found, but not used as the model.
        let offline = Hub { offline: true, ..hub.clone() };
        assert_eq!(offline.locate_config("org/name", None).unwrap(), snapshot);
        says(&offline.locate("org/name", None).unwrap_err().to_string(), &["has only a part of it"]);
        if with_generation {
            assert_eq!(hub.locate_config("org/name", None).unwrap(), snapshot);
            assert_eq!(log.lock().unwrap().len(), asked.len(), "the hub is not asked again");
        }
        // A later run downloads the rest.
        let whole = home.accepts(&hub, &model);
        assert_eq!(offline.locate_config("org/name", None).unwrap(), whole);
    }
}

#[test]
fn missing_and_private_models_are_explained() {
    let (home, folder) = (Home::new(), Folder::whole());
    let port = Model::of(folder.path()).serve(|_, request, stream| match request.authorization.as_deref() {
        Some("Bearer hf_secret") if request.path.contains("/org/name/") => None,
        Some("Bearer hf_secret") => Some(refuse(stream, "404 Not Found")),
        _ => Some(refuse(stream, "401 Unauthorized")),
    });
    let private = hub(&home, port);
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
    home.accepts(&right, &Model::of(folder.path()));

    std::fs::rename(folder.file("model.safetensors"), folder.file("pytorch_model.bin")).unwrap();
    let (home, port) = (Home::new(), Model::of(folder.path()).serve(|_, _, _| None));
    says(&text(&hub(&home, port), "org/name"), &["there is no model.safetensors", "[\"pytorch_model.bin\"]"]);

    // No server listens at this address.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    says(&text(&hub(&home, closed), "org/name"), &["was not found", "downloading from http://127.0.0.1", "refused"]);
}

#[test]
fn a_revision_is_a_branch_a_tag_or_a_commit() {
    let now = Model::new();
    let before = Model { sha: EARLIER.into(), commit: EARLIER.into(), ..Model::of(Folder::sharded().path()) };
    let earlier = before.clone();
    let (port, log) = now.serve_logged(move |_, request, stream| {
        let asks_for = |names: &[&str]| names.iter().any(|name| request.path.contains(name));
        match () {
            () if asks_for(&["v1.0", "refs%2Fpr%2F1", EARLIER]) => Some(earlier.answer(request, stream)),
            () if asks_for(&["revision/main", COMMIT]) => None,
            () => Some(refuse(stream, "404 Not Found")),
        }
    });
    for (revision, model, reference) in [
        ("main", &now, Some("main")),
        ("v1.0", &before, Some("v1.0")),
        ("refs/pr/1", &before, Some("refs/pr/1")),
        (EARLIER, &before, None),
    ] {
        let home = Home::new();
        let hub = hub(&home, port);
        let snapshot = hub.locate("org/name", Some(revision)).unwrap();
        assert!(snapshot.ends_with(Path::new("snapshots").join(&model.sha)), "{revision}: {}", snapshot.display());
        for (name, content) in &*model.files {
            assert!(std::fs::read(snapshot.join(name)).unwrap() == *content, "{revision}: {name}");
        }
        let noted = reference.map(|name| (name.to_owned(), model.sha.clone()));
        assert_eq!(references(&home), noted.into_iter().collect(), "{revision}");
        // By the same name and by the commit, without a network.
        let asked = log.lock().unwrap().len();
        let offline = Hub { offline: true, ..hub.clone() };
        assert_eq!(offline.locate("org/name", Some(revision)).unwrap(), snapshot);
        assert_eq!(offline.locate("org/name", Some(&model.sha)).unwrap(), snapshot);
        assert_eq!(log.lock().unwrap().len(), asked);
        // The error about a missing revision names it.
        let text = hub.locate("org/name", Some("v2")).unwrap_err().to_string();
        says(&text, &["has no revision v2", "has no org/name with a revision v2"]);
    }
}

/// A file that the hub lists but does not serve: the error names it, and the partial download is not used as the model until the hub serves
/// the file again.
#[test]
fn a_listed_file_that_is_missing_on_the_hub_is_named() {
    let (home, model) = (Home::new(), Model::of(Folder::sharded().path()));
    let port =
        model.serve(|_, request, stream| (request.file() == Some(SHARD)).then(|| refuse(stream, "404 Not Found")));
    let text = hub(&home, port).locate("org/name", None).unwrap_err().to_string();
    says(&text, &["\"org/name\" was not found", SHARD, "lists this file", "404"]);
    assert!(!text.contains("with a revision"), "{text}");
    let mended = hub(&home, model.serve(|_, _, _| None));
    let text = Hub { offline: true, ..mended.clone() }.locate("org/name", Some(COMMIT)).unwrap_err().to_string();
    says(&text, &["has only a part of it", SHARD]);
    home.accepts(&mended, &model);
}

#[test]
fn one_request_shows_whether_a_hub_responds_and_accepts_the_token() {
    let home = Home::new();
    let (port, log) = Model::new().serve_logged(|_, request, stream| match request.authorization.as_deref() {
        Some("Bearer hf_good") => None,
        Some("Bearer hf_busy") => Some(refuse(stream, "503 Service Unavailable")),
        _ => Some(refuse(stream, "401 Unauthorized")),
    });
    let limit = Duration::from_secs(10);
    let access = |token: Option<&str>| Hub { token: token.map(str::to_owned), ..hub(&home, port) }.check_access(limit);
    assert_eq!(access(None).unwrap(), HubAccess::Reachable);
    assert_eq!(access(Some("hf_good")).unwrap(), HubAccess::TokenAccepted);
    assert_eq!(access(Some("hf_bad")).unwrap(), HubAccess::TokenRefused);
    let text = access(Some("hf_busy")).unwrap_err().to_string();
    assert!(text.contains("status 503") && !text.contains("hf_busy"), "{text}");
    let paths: Vec<String> = log.lock().unwrap().iter().map(|request| request.path.clone()).collect();
    assert_eq!(paths, ["/api/whoami-v2"; 4]);
    let text = Hub { offline: true, ..hub(&home, port) }.check_access(limit).unwrap_err().to_string();
    assert!(text.contains("HF_HUB_OFFLINE") && log.lock().unwrap().len() == 4, "{text}");
}
