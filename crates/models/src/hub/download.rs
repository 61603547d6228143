//! Files of a model from the hub, into the cache.

use super::{CONFIG, Hub, Part};
use crate::folder::export::CARRIED;
use crate::weights::files::{INDEX, SINGLE, shard_number};
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use std::path::PathBuf;
use std::time::Duration;

/// How often a file is tried whose connection breaks, and the pause after the first time, which doubles.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);

/// Downloads what the cache does not have of a part of `model`, and gives the snapshot; otherwise says why not.
pub(super) fn download(hub: &Hub, model: &str, revision: &str, part: Part) -> Result<PathBuf, String> {
    let say = |error: ApiError| explain(hub, model, revision, &error);
    let root = std::path::absolute(&hub.cache).map_err(|error| error.to_string())?;
    let cache = Cache::new(root);
    let api: Api = ApiBuilder::from_cache(cache.clone())
        .with_endpoint(hub.endpoint.clone())
        .with_token(hub.token.clone())
        .with_progress(false)
        .with_user_agent("grpo", env!("CARGO_PKG_VERSION"))
        .build()
        .map_err(say)?;
    let repo = |revision: &str| Repo::with_revision(model.to_owned(), RepoType::Model, revision.to_owned());
    let info = retried(|| api.repo(repo(revision)).info()).map_err(say)?;
    let names: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    let files = wanted(&names, part).map_err(|reason| format!("{} on {}: {reason}", model, hub.endpoint))?;
    // By the commit, so that a push in between cannot mix two models.
    let pinned = api.repo(repo(&info.sha));
    for (number, name) in files.iter().enumerate() {
        tracing::info!(model, revision, file = name, "file {} of {}", number + 1, files.len());
        fetch(&pinned, name).map_err(|error| match status(&error) {
            Some(404) => {
                format!("{name}: {} lists this file of {model}, and answers 404 when it is asked for", hub.endpoint)
            }
            _ => format!("{name}: {}", say(error)),
        })?;
    }
    let cached = cache.repo(repo(revision));
    let snapshot = cached.pointer_path(&info.sha);
    // What hf-hub has noted for the commit, which other programs would take for a branch of that name.
    if let Some(folder) = snapshot.parent().and_then(|snapshots| snapshots.parent()) {
        let _ = std::fs::remove_file(folder.join("refs").join(&info.sha));
    }
    if revision != info.sha {
        cached.create_ref(&info.sha).map_err(|error| format!("the cache cannot be written: {error}"))?;
    }
    Ok(snapshot)
}

/// The files that are needed of a model, weights last: a snapshot with weights has everything.
fn wanted(names: &[&str], part: Part) -> Result<Vec<String>, String> {
    let others = match part {
        Part::Whole => CARRIED,
        Part::Config => &CONFIG[1..],
    };
    let mut files: Vec<&str> =
        ["config.json"].iter().chain(others).filter(|name| names.contains(name)).copied().collect();
    if !files.contains(&"config.json") {
        return Err("there is no config.json".into());
    }
    if part == Part::Config {
        return Ok(files.into_iter().map(str::to_owned).collect());
    }
    if names.contains(&SINGLE) {
        files.push(SINGLE);
    } else {
        files.extend(names.iter().filter(|name| **name == INDEX || shard_number(name).is_some()));
    }
    if files.last().is_none_or(|name| !name.ends_with(".safetensors") && *name != INDEX) {
        let others = ["bin", "gguf", "pt", "pth"];
        let found: Vec<&str> = names
            .iter()
            .filter(|name| name.rsplit('.').next().is_some_and(|end| others.contains(&end)))
            .copied()
            .collect();
        return Err(format!("there is no {SINGLE} and no {INDEX}; files of weights: {found:?}"));
    }
    Ok(files.into_iter().map(str::to_owned).collect())
}

/// A file from the cache or from the hub. A download goes on where it ended before.
fn fetch(repo: &ApiRepo, name: &str) -> Result<PathBuf, ApiError> {
    // hf-hub's own retries do not know how much of a file an earlier process has left.
    retried(|| repo.get(name))
}

fn retried<T>(attempt: impl Fn() -> Result<T, ApiError>) -> Result<T, ApiError> {
    let mut pause = PAUSE;
    for _ in 1..ATTEMPTS {
        match attempt() {
            Err(ApiError::RequestError(error)) if is_interruption(&error) => {}
            // The body of an answer that breaks off.
            Err(ApiError::IoError(error)) if error.kind() != std::io::ErrorKind::StorageFull => {}
            other => return other,
        }
        std::thread::sleep(pause);
        pause *= 2;
    }
    attempt()
}

/// Whether another attempt may succeed. Where there is no network or no such name, none will.
fn is_interruption(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::StatusCode(status) => *status == 429 || *status >= 500,
        ureq::Error::Timeout(_) => true,
        ureq::Error::Io(error) => {
            use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
            [BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof].contains(&error.kind())
        }
        _ => false,
    }
}

/// The status of an answer that is an error.
fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(status) => Some(status),
            _ => None,
        },
        _ => None,
    }
}

fn explain(hub: &Hub, model: &str, revision: &str, error: &ApiError) -> String {
    let Hub { endpoint, token, .. } = hub;
    if let ApiError::LockAcquisition(lock) = error {
        return format!(
            "another process is downloading it ({} is locked): begin again when that has ended",
            lock.display()
        );
    }
    match status(error) {
        Some(401 | 403) => {
            let told = if token.is_some() {
                "the token that was sent does not open it"
            } else {
                "no token was sent (HF_TOKEN)"
            };
            format!(
                "{endpoint} does not give out {model}: there is none, or it is private or behind a licence, and {told}"
            )
        }
        Some(404) => format!("{endpoint} has no {model} with a revision {revision}"),
        Some(status) => format!("{endpoint} answers with status {status}"),
        None => format!("downloading from {endpoint} failed: {error}"),
    }
}
