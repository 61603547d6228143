//! Downloads the files of models and data sets from the hub into the cache.
//!
//! Data from a server becomes a path only if it is 40 hexadecimal digits (a commit) or a plain name (an ETag); file names of models are
//! chosen from the known files of a model folder, and those of data sets consist of plain names. A file is complete if it has the announced size and, if its ETag is a checksum, the announced
//! contents; otherwise it is deleted.
//!
//! This module replaces the crate `hf-hub`, which builds paths from unchecked `sha`, `ETag` and `x-repo-commit` values, sends the token
//! to any host that a metadata request is redirected to, follows relative redirects without limit, has no time-out, appends responses
//! that ignore the range to the partial file, and compares neither sizes nor checksums. Its interface has no hook for these checks.

use super::cache::{RepositoryCache, check_digest, is_blob_name, is_checksum, is_commit};
use super::dataset::{MAX_LISTING, listing_path};
use super::http::{Answer, Client, Failure};
use super::repository::Repository;
use super::{CONFIG, Hub, Part};
use crate::error::shortened;
use crate::folder::export::CARRIED;
use crate::weights::files::{INDEX, SINGLE, shard_number};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The number of attempts at a request whose connection breaks off, and the pause after the first one, which doubles each time.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);
/// The number of attempts at a request that stalls; each attempt can take as long as the time-out.
const STALLED_ATTEMPTS: u32 = 2;
/// The number of new bytes after which attempts are counted from 0 again.
const PROGRESS: u64 = 1 << 20;

/// The longest text of a server in a message, in characters.
const LONGEST: usize = 60;

/// Downloads the files of a part of `model` that are not cached, and returns the snapshot; the error says why that failed.
pub(super) fn download(hub: &Hub, model: &str, revision: &str, part: Part) -> Result<PathBuf, String> {
    let client = Client::new(hub).map_err(|failure| explain(hub, &hub.endpoint, model, revision, failure))?;
    let endpoint = client.shown();
    let say = |failure: Failure| explain(hub, &endpoint, model, revision, failure);
    let root = std::path::absolute(&hub.cache).map_err(|error| error.to_string())?;
    let repository = Repository::model(model);
    let cache = RepositoryCache::new(&root, repository);
    let listing = retried(|| Listing::request(&client, repository, revision)).map_err(say)?;
    let names: Vec<&str> = listing.names.iter().map(String::as_str).collect();
    let files = wanted(&names, part).map_err(|reason| format!("{model} on {endpoint}: {reason}"))?;
    let commit = &listing.commit;
    let mut source = Source { client: &client, cache: &cache, repository, commit, etags: BTreeMap::new() };
    source.fetch_all(hub, revision, &files)?;
    if revision != commit {
        cache
            .note(revision, commit)
            .map_err(|error| format!("the cache cannot be written: {}", with_causes(&error)))?;
    }
    Ok(cache.snapshot(commit))
}

/// Requests the listing of a data set, saves it in the cache, and returns its names; the error says why that failed.
pub(super) fn listing(hub: &Hub, repository: Repository<'_>, revision: &str) -> Result<Vec<String>, String> {
    let name = repository.name;
    let client = Client::new(hub).map_err(|failure| explain(hub, &hub.endpoint, name, revision, failure))?;
    let listing = retried(|| Listing::request(&client, repository, revision))
        .map_err(|failure| explain(hub, &client.shown(), name, revision, failure))?;
    let cache = RepositoryCache::new(&hub.cache, repository);
    let path = listing_path(cache.folder(), &listing.commit);
    let save = || {
        if let Some(folder) = path.parent() {
            grpo_files::make_folder(folder)?;
        }
        grpo_files::write_atomically(&path, serde_json::json!(listing.names).to_string().as_bytes())?;
        if revision == listing.commit { Ok(()) } else { cache.note(revision, &listing.commit) }
    };
    save().map_err(|error| format!("the cache cannot be written: {}", with_causes(&error)))?;
    Ok(listing.names)
}

/// Downloads files of a commit that are not cached; the error says why that failed.
pub(super) fn download_files(
    hub: &Hub,
    repository: Repository<'_>,
    revision: &str,
    commit: &str,
    files: &[String],
) -> Result<(), String> {
    let name = repository.name;
    let client = Client::new(hub).map_err(|failure| explain(hub, &hub.endpoint, name, revision, failure))?;
    let root = std::path::absolute(&hub.cache).map_err(|error| error.to_string())?;
    let cache = RepositoryCache::new(&root, repository);
    let mut source = Source { client: &client, cache: &cache, repository, commit, etags: BTreeMap::new() };
    source.fetch_all(hub, revision, files)
}

/// Returns the required files of a model, weights last, so that a snapshot with weights is complete.
fn wanted(names: &[&str], part: Part) -> Result<Vec<String>, String> {
    let others = match part {
        Part::Whole | Part::Tokenizer => CARRIED,
        Part::Config => &CONFIG[1..],
    };
    let mut files: Vec<&str> =
        ["config.json"].iter().chain(others).filter(|name| names.contains(name)).copied().collect();
    if !files.contains(&"config.json") {
        return Err("there is no config.json".into());
    }
    if part != Part::Whole {
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

/// The hub's description of a revision.
struct Listing {
    commit: String,
    names: Vec<String>,
}

impl Listing {
    fn request(client: &Client, repository: Repository<'_>, revision: &str) -> Result<Self, Failure> {
        #[derive(serde::Deserialize)]
        struct Info {
            sha: String,
            siblings: Vec<Sibling>,
        }
        #[derive(serde::Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let answer = client.get(&repository.listing_path(revision), None, client.metadata)?;
        let (host, announced) = (answer.host().to_owned(), answer.length());
        let mut body = Vec::new();
        let read = answer.read(MAX_LISTING, |bytes| {
            body.extend_from_slice(bytes);
            Ok(())
        })?;
        if read > MAX_LISTING {
            return Err(Failure::Final(format!(
                "{host} lists the files of {} in more than {MAX_LISTING} bytes",
                repository.name
            )));
        }
        if announced.is_some_and(|length| read < length) {
            return Err(Failure::Broken(format!("the connection to {host} broke off after {read} bytes")));
        }
        let info: Info = serde_json::from_slice(&body).map_err(|error| {
            let begin = shortened(&String::from_utf8_lossy(&body), LONGEST);
            Failure::Final(format!(
                "{host} answers with something other than a listing of the files in JSON ({error}): {begin:?}"
            ))
        })?;
        let commit = commit(&info.sha, &host)?;
        if is_commit(revision) && !revision.eq_ignore_ascii_case(&commit) {
            return Err(Failure::Final(format!("{host} answers with the commit {commit} for the commit {revision}")));
        }
        Ok(Self { commit, names: info.siblings.into_iter().map(|file| file.rfilename).collect() })
    }
}

/// Checks the commit hash in a response.
fn commit(found: &str, host: &str) -> Result<String, Failure> {
    if is_commit(found) {
        return Ok(found.to_owned());
    }
    let found = shortened(found, LONGEST);
    Err(Failure::Final(format!("{host} names the commit {found:?}: expected 40 hexadecimal digits")))
}

/// The hub's metadata of a file.
#[derive(Debug, PartialEq, Eq)]
struct Announced {
    etag: String,
    size: u64,
}

/// The files of a commit, on the hub and in the cache.
struct Source<'a> {
    client: &'a Client,
    cache: &'a RepositoryCache,
    repository: Repository<'a>,
    commit: &'a str,
    /// The file and size of every ETag so far.
    etags: BTreeMap<String, (String, u64)>,
}

impl Source<'_> {
    /// Brings files into the snapshot; the error says why that failed.
    fn fetch_all(&mut self, hub: &Hub, revision: &str, files: &[String]) -> Result<(), String> {
        let (endpoint, repository) = (self.client.shown(), self.repository.name);
        for (number, name) in files.iter().enumerate() {
            tracing::info!(repository, revision, file = name, "file {} of {}", number + 1, files.len());
            self.fetch(name).map_err(|failure| match failure {
                Failure::Status(404) => {
                    format!("{name}: {endpoint} lists this file of {repository}, and answers 404 when it is asked for")
                }
                failure => format!("{name}: {}", explain(hub, &endpoint, repository, revision, failure)),
            })?;
        }
        Ok(())
    }

    /// Brings a file into the snapshot, from the cache or from the hub. A partial download is continued.
    fn fetch(&mut self, name: &str) -> Result<(), Failure> {
        let present = self.cache.snapshot(self.commit).join(name);
        if let Ok(metadata) = std::fs::metadata(&present)
            && metadata.is_file()
        {
            let blob = std::fs::read_link(&present).ok();
            if let Some(etag) = blob.as_deref().and_then(Path::file_name).and_then(|etag| etag.to_str()) {
                self.etags.insert(etag.to_owned(), (name.to_owned(), metadata.len()));
            }
            return Ok(());
        }
        let announced = retried(|| self.announced(name))?;
        self.expect_own_etag(name, &announced)?;
        let blob = self.cache.blob(&announced.etag);
        std::fs::create_dir_all(blob.parent().unwrap_or(self.cache.folder())).map_err(disk)?;
        let _lock = self.cache.lock(&announced.etag).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => Failure::Final(error.to_string()),
            _ => disk(error),
        })?;
        let is_complete = |blob: &Path| {
            std::fs::metadata(blob).is_ok_and(|metadata| metadata.is_file() && metadata.len() == announced.size)
        };
        if !is_complete(&blob) {
            self.download(name, &announced)?;
            std::fs::rename(self.cache.incomplete(&announced.etag), &blob).map_err(disk)?;
        }
        self.cache.link(self.commit, name, &announced.etag).map_err(disk)
    }

    /// Requests the ETag and the size of a file. They are in the response for its first byte, or in the hub's redirect to the file's storage
    /// host.
    fn announced(&self, name: &str) -> Result<Announced, Failure> {
        let answer = self.client.get(&self.path(name), Some("bytes=0-0"), self.client.metadata)?;
        let host = answer.host();
        self.expect_commit(&answer)?;
        let etag = answer.first("x-linked-etag").or(answer.etag()).unwrap_or_default();
        let etag = etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"');
        if !is_blob_name(etag) {
            let found = shortened(etag, LONGEST);
            return Err(Failure::Final(format!(
                "{host} sends the ETag {found:?}, which becomes the name of a file: expected letters, digits, `.`, `_` and `-`"
            )));
        }
        let linked = answer.first("x-linked-size").map(str::to_owned);
        let range = answer.content_range();
        let size = match (&linked, answer.status) {
            (Some(size), _) => size.parse().ok(),
            (None, 200) => answer.length(),
            (None, _) => range.and_then(|range| range.total),
        };
        let size = size.ok_or_else(|| Failure::Final(format!("{host} does not say how many bytes the file has")))?;
        if answer.status == 416 && size > 0 {
            return Err(Failure::Status(416));
        }
        Ok(Announced { etag: etag.to_owned(), size })
    }

    /// Checks that the response is for the requested commit, if it names one.
    fn expect_commit(&self, answer: &Answer) -> Result<(), Failure> {
        let Some(found) = answer.first("x-repo-commit") else { return Ok(()) };
        let found = commit(found, answer.host())?;
        if found.eq_ignore_ascii_case(self.commit) {
            return Ok(());
        }
        let (host, expected) = (answer.host(), self.commit);
        Err(Failure::Final(format!("{host} sends a file of the commit {found} for the commit {expected}")))
    }

    /// Checks that no two different files have the same ETag, because one would overwrite the other.
    fn expect_own_etag(&mut self, name: &str, announced: &Announced) -> Result<(), Failure> {
        let Announced { etag, size } = announced;
        match self.etags.insert(etag.clone(), (name.to_owned(), *size)) {
            Some((other, other_size)) if !is_checksum(etag) || other_size != *size => {
                Err(Failure::Final(format!("the hub sends the same ETag {etag:?} for {other} and {name}")))
            }
            _ => Ok(()),
        }
    }

    /// Downloads and verifies a file in the folder of its blob.
    fn download(&self, name: &str, announced: &Announced) -> Result<(), Failure> {
        let Announced { etag, size } = announced;
        let path = self.cache.incomplete(etag);
        let write =
            |error: io::Error| Failure::Final(format!("the cache cannot be written: {}: {error}", path.display()));
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        if let Ok(metadata) = std::fs::symlink_metadata(&path) {
            // Anything but a regular file, such as a link or a pipe, is not written to.
            if !metadata.is_file() {
                std::fs::remove_file(&path).map_err(write)?;
            }
        }
        let mut file = grpo_files::without_links(&mut options).open(&path).map_err(write)?;
        let mut present = file.metadata().map_err(write)?.len();
        if present > *size {
            file.set_len(0).map_err(write)?;
            present = 0;
        }
        if let Some(free) = grpo_files::free_space(self.cache.folder()).filter(|free| *free < size - present) {
            let missing = size - present;
            return Err(Failure::Final(format!(
                "the file needs {missing} more bytes, and the file system of {} has {free} left",
                self.cache.folder().display()
            )));
        }
        let mut is_resumed = present > 0;
        loop {
            self.complete(name, announced, &mut file)?;
            file.sync_all().map_err(write)?;
            let Err(found) = check_digest(&path, etag).map_err(write)? else { return Ok(()) };
            if !is_resumed {
                std::fs::remove_file(&path).map_err(write)?;
                return Err(Failure::Final(format!(
                    "the content that was downloaded has the {found}, and the hub announced {etag}: it was deleted"
                )));
            }
            // The partial file of an earlier download may be damaged.
            file.set_len(0).map_err(write)?;
            is_resumed = false;
        }
    }

    /// Downloads `file` up to the announced size, with further attempts as long as they make progress.
    fn complete(&self, name: &str, announced: &Announced, file: &mut File) -> Result<(), Failure> {
        let mut longest = 0;
        let mut attempts = Attempts::default();
        loop {
            let length = |file: &File| {
                file.metadata().map(|metadata| metadata.len()).map_err(|error| Failure::Final(error.to_string()))
            };
            let begin = length(file)?;
            if begin == announced.size {
                return Ok(());
            }
            let result = self.append(name, announced, file, begin);
            let end = length(file)?;
            // Compared with the largest size so far, because a server without ranges restarts each time.
            if end >= longest + PROGRESS {
                attempts = Attempts::default();
            }
            longest = longest.max(end);
            if let Err(failure) = result {
                attempts.wait_after(failure)?;
            }
        }
    }

    /// Requests a file from byte `begin` on and appends the response.
    fn append(&self, name: &str, announced: &Announced, file: &mut File, begin: u64) -> Result<(), Failure> {
        let size = announced.size;
        let answer = self.client.get(&self.path(name), Some(&format!("bytes={begin}-")), self.client.content)?;
        self.expect_commit(&answer)?;
        let host = answer.host().to_owned();
        let begin = match (answer.status, answer.content_range()) {
            // The server ignored the range and sends the whole file.
            (200, _) => 0,
            (206, Some(range)) if range.start == Some(begin) && range.total.is_none_or(|total| total == size) => begin,
            (206, range) => {
                return Err(Failure::Final(format!(
                    "{host} was asked for the bytes from {begin} on of {size}, and sends others: {}",
                    range.map_or_else(|| "no range".to_owned(), |range| format!("{range:?}"))
                )));
            }
            (status, _) => return Err(Failure::Status(status)),
        };
        let expected = size - begin;
        if let Some(length) = answer.length().filter(|length| *length != expected) {
            return Err(Failure::Final(format!("{host} sends {length} bytes where it announced {expected}")));
        }
        file.set_len(begin).map_err(disk)?;
        file.seek(io::SeekFrom::Start(begin)).map_err(disk)?;
        let mut left = expected;
        let read = answer.read(expected, |bytes| {
            let fits = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            left -= fits as u64;
            file.write_all(&bytes[..fits]).map_err(disk)
        })?;
        if read > expected {
            file.set_len(0).map_err(disk)?;
            return Err(Failure::Final(format!("{host} sends more than the {size} bytes that it announced")));
        }
        if read < expected {
            let end = begin + read;
            return Err(Failure::Broken(format!("the connection to {host} ended after {end} of {size} bytes")));
        }
        Ok(())
    }

    /// Returns the path of a file on the hub.
    fn path(&self, name: &str) -> String {
        self.repository.file_path(self.commit, name)
    }
}

/// The failed attempts at a request.
#[derive(Default)]
struct Attempts {
    broken: u32,
    stalled: u32,
}

impl Attempts {
    /// Waits before the next attempt; returns the failure if no attempt is left.
    fn wait_after(&mut self, failure: Failure) -> Result<(), Failure> {
        match failure {
            Failure::Broken(_) => self.broken += 1,
            Failure::Stalled(_) => self.stalled += 1,
            Failure::Status(_) | Failure::Final(_) => return Err(failure),
        }
        if self.broken >= ATTEMPTS || self.stalled >= STALLED_ATTEMPTS {
            return Err(failure);
        }
        std::thread::sleep(PAUSE * (1 << self.broken.saturating_sub(1)));
        Ok(())
    }
}

fn retried<T>(request: impl Fn() -> Result<T, Failure>) -> Result<T, Failure> {
    let mut attempts = Attempts::default();
    loop {
        match request() {
            Ok(value) => return Ok(value),
            Err(failure) => attempts.wait_after(failure)?,
        }
    }
}

fn disk(error: io::Error) -> Failure {
    Failure::Final(format!("the cache cannot be written: {error}"))
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn explain(hub: &Hub, endpoint: &str, model: &str, revision: &str, failure: Failure) -> String {
    match failure {
        Failure::Status(401 | 403) => {
            let told = if hub.token.is_some() {
                "the token that was sent does not open it"
            } else {
                "no token was sent (HF_TOKEN)"
            };
            format!(
                "{endpoint} does not give out {model}: there is none, or it is private or behind a licence, and {told}"
            )
        }
        Failure::Status(404) => format!("{endpoint} has no {model} with a revision {revision}"),
        Failure::Status(status) => format!("{endpoint} answers with status {status}"),
        Failure::Broken(reason) | Failure::Stalled(reason) | Failure::Final(reason) => {
            format!("downloading from {endpoint} failed: {reason}")
        }
    }
}
