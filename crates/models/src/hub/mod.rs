//! Finds models and data sets by their name on Hugging Face, in the local cache or by download.

#[cfg(feature = "hub")]
mod access;
#[cfg(feature = "hub")]
mod cache;
mod dataset;
#[cfg(feature = "hub")]
mod download;
#[cfg(feature = "hub")]
mod http;
mod repository;

use crate::error::{Error, Result};
use crate::weights::files::WeightFiles;
use crate::weights::files::exists;
use repository::Repository;
use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The default revision.
const MAIN: &str = "main";
/// The time-outs of `huggingface_hub`.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The size limit of a reference and of a token file in bytes.
const MAX_LINE: u64 = 1 << 16;

/// Returns the folder of a model: `model` itself if it is a folder; otherwise its name on Hugging Face (`Qwen/Qwen2.5-0.5B-Instruct`) is
/// looked up in the local cache and, with the feature `hub`, downloaded. Calls [`Hub::from_env`] and [`Hub::locate`].
///
/// # Errors
/// The errors of [`Hub::locate`].
pub fn locate(model: &str, revision: Option<&str>) -> Result<PathBuf> {
    Hub::from_env().locate(model, revision)
}

/// Returns the folder of a model with its weights, at the commit of `described`, a folder that [`Hub::locate_tokenizer`] has returned.
///
/// # Errors
/// The errors of [`Hub::locate`].
pub fn locate_weights(model: &str, revision: Option<&str>, described: &Path) -> Result<PathBuf> {
    let is_snapshot = described.parent().is_some_and(|folder| folder.ends_with("snapshots"));
    let commit = described.file_name().and_then(|name| name.to_str()).filter(|_| is_snapshot);
    let named = !expand_home(model).is_dir();
    Hub::from_env().locate(model, commit.filter(|_| named).or(revision))
}

/// Hugging Face's hub and the local cache, which is shared with other programs (`huggingface_hub` in Python).
///
/// ```
/// use grpo_models::Hub;
///
/// let cache = tempfile::tempdir()?;
/// let hub = Hub { cache: cache.path().into(), offline: true, ..Hub::from_env() };
/// assert_eq!(hub.locate(cache.path().to_str().unwrap(), None)?, cache.path());
/// let error = hub.locate("Qwen/Qwen3-0.6B", None).unwrap_err().to_string();
/// assert!(error.contains("models--Qwen--Qwen3-0.6B"), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Hub {
    /// The folder with one folder per model or data set.
    pub cache: PathBuf,
    /// `true` if downloads are forbidden.
    pub offline: bool,
    /// The access token for private and gated models.
    pub token: Option<String>,
    /// The origin of the token; `None` without a token.
    pub token_source: Option<TokenSource>,
    /// The address of the hub. The token is sent to its scheme, host and port only.
    pub endpoint: String,
    /// The time-out of a connection, a response and each part of it, for metadata of files.
    pub etag_timeout: Duration,
    /// The same for file contents. The whole download is not limited, but a rate below 1 KiB per second over this time ends it.
    pub download_timeout: Duration,
}

/// The origin of the hub's token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The environment variable with this name.
    Variable(&'static str),
    /// A file that holds only the token.
    File(PathBuf),
}

/// The hub's response to [`Hub::check_access`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubAccess {
    /// The hub accepts the token.
    TokenAccepted,
    /// The hub refuses the token. All downloads fail, also of public models.
    TokenRefused,
    /// The hub responds, but no token was sent, or it does not check tokens.
    Reachable,
}

/// Omits the token, which is a secret.
impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { cache, offline, token, token_source, endpoint, etag_timeout, download_timeout } = self;
        let token = token.as_ref().map(|_| "...");
        f.debug_struct("Hub")
            .field("cache", cache)
            .field("offline", offline)
            .field("token", &token)
            .field("token_source", token_source)
            .field("endpoint", endpoint)
            .field("etag_timeout", etag_timeout)
            .field("download_timeout", download_timeout)
            .finish()
    }
}

impl Hub {
    /// Reads the environment like `huggingface_hub`: the cache is `HF_HUB_CACHE`, or `hub` in `HF_HOME`, or `~/.cache/huggingface/hub`; the
    /// token is `HF_TOKEN`, or the file `HF_TOKEN_PATH` or `token` in `HF_HOME`, where `hf auth login` stores it; `HF_HUB_OFFLINE` forbids
    /// downloads; `HF_ENDPOINT` selects another hub. `HF_HUB_ETAG_TIMEOUT` and `HF_HUB_DOWNLOAD_TIMEOUT` are time-outs in seconds, 10 by
    /// default; a value that is not a number above 0 becomes 0, which downloads refuse.
    pub fn from_env() -> Self {
        Self::from_variables(|name| env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let given = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let path = |name: &str| given(name).map(|value| expand_home(&value));
        let home = path("HF_HOME")
            .unwrap_or_else(|| path("XDG_CACHE_HOME").unwrap_or_else(|| expand_home("~/.cache")).join("huggingface"));
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).unwrap_or_else(|| home.join("hub"));
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let of_variable = |name| Some((given(name)?, TokenSource::Variable(name)));
        let of_file = || Some((read_line(&token_file)?, TokenSource::File(token_file.clone())));
        let token = of_variable("HF_TOKEN").or_else(|| of_variable("HUGGING_FACE_HUB_TOKEN")).or_else(of_file);
        let token = token.map(|(token, source)| (token.trim().to_owned(), source));
        let (token, token_source) = token.filter(|(token, _)| !token.is_empty()).unzip();
        let seconds = |name: &str| {
            let Some(text) = given(name) else { return TIMEOUT };
            let seconds = text.trim().parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            // Longer time-outs are cut to a year.
            seconds.unwrap_or(Duration::ZERO).min(Duration::from_secs(365 * 24 * 3600))
        };
        let is_on = |name: &str| {
            given(name).is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str()))
        };
        Self {
            cache,
            offline: is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE"),
            token,
            token_source,
            endpoint: given("HF_ENDPOINT")
                .map_or_else(|| "https://huggingface.co".into(), |address| address.trim_end_matches('/').to_owned()),
            etag_timeout: seconds("HF_HUB_ETAG_TIMEOUT"),
            download_timeout: seconds("HF_HUB_DOWNLOAD_TIMEOUT"),
        }
    }

    /// Returns the folder of `model`, a folder or a name, at `revision` (a branch, a tag or a commit; `main` by default).
    ///
    /// A complete model in the cache is used without asking the hub for a newer version. An interrupted download is continued.
    ///
    /// # Errors
    /// [`Error::NotFound`] with all attempts: no such folder, nothing (or only a part) in the cache, no network, no such model or
    /// revision, a missing token.
    pub fn locate(&self, model: &str, revision: Option<&str>) -> Result<PathBuf> {
        self.find(model, revision, Part::Whole)
    }

    /// Returns the folder of a model's configuration, without looking for or downloading weights. If the hub cannot be reached, a
    /// `config.json` in the cache is enough.
    ///
    /// # Errors
    /// The errors of [`Hub::locate`].
    pub fn locate_config(&self, model: &str, revision: Option<&str>) -> Result<PathBuf> {
        self.find(model, revision, Part::Config)
    }

    /// Returns the folder of a model without looking for its weights. If the hub cannot be reached, a `config.json` and a `tokenizer.json` in
    /// the cache are enough.
    ///
    /// # Errors
    /// The errors of [`Hub::locate`].
    pub fn locate_tokenizer(&self, model: &str, revision: Option<&str>) -> Result<PathBuf> {
        self.find(model, revision, Part::Tokenizer)
    }

    fn find(&self, model: &str, revision: Option<&str>, part: Part) -> Result<PathBuf> {
        let folder = expand_home(model);
        if folder.is_dir() {
            return match revision {
                None => Ok(folder),
                Some(revision) => Err(not_found(
                    model,
                    vec![format!("it is a folder here, which has no revision {revision:?}; leave the revision out")],
                )),
            };
        }
        if folder.is_file() {
            return Err(not_found(model, vec!["it is a file, and a model is a folder with config.json".into()]));
        }
        let mut tried = vec![format!("there is no folder {}", folder.display())];
        if !is_name(model) {
            tried.push("it is not a name on Hugging Face either (ORGANISATION/MODEL)".into());
            return Err(not_found(model, tried));
        }
        let revision = revision.unwrap_or(MAIN);
        if !is_revision(revision) {
            tried.push(format!("{revision:?} is not a branch, a tag or a commit"));
            return Err(not_found(model, tried));
        }
        let cached = self.cached(Repository::model(model), revision)?;
        tried.push(match &cached {
            Err(reason) => reason.clone(),
            Ok(snapshot) => match part.expect_in(snapshot) {
                Ok(()) => return Ok(snapshot.clone()),
                Err(reason) => format!("the cache has only a part of it: {reason}"),
            },
        });
        tried.push(match self.download(model, revision, part) {
            Ok(snapshot) => return Ok(snapshot),
            Err(reason) => reason,
        });
        match cached {
            Ok(snapshot) if part.expect_least_in(&snapshot).is_ok() => Ok(snapshot),
            _ => Err(not_found(model, tried)),
        }
    }

    /// Returns the snapshot in the cache, which may be incomplete, or why there is none.
    fn cached(&self, repository: Repository<'_>, revision: &str) -> Result<std::result::Result<PathBuf, String>> {
        let name = repository.cache_folder();
        let folder = self.cache.join(&name);
        if !exists(&folder)? {
            return Ok(Err(format!("the cache {} has no {name}", self.cache.display())));
        }
        let commit = match commit_in(&folder, revision) {
            Ok(commit) => commit,
            Err(reason) => return Ok(Err(reason)),
        };
        let snapshot = folder.join("snapshots").join(commit);
        if !snapshot.is_dir() {
            return Ok(Err(format!("the cache {} has no revision {revision} of it", folder.display())));
        }
        Ok(Ok(snapshot))
    }

    /// Asks the hub for the owner of the token, in one request with `limit` as the time-out of its connection and of its response. The
    /// request shows whether the hub can be reached, also without a token.
    ///
    /// # Errors
    /// [`Error::HubAccess`] if `offline` is set, if the program was built without the feature `hub`, or with the reason why there is no
    /// response. The message contains neither the token nor a password of the endpoint.
    pub fn check_access(&self, limit: Duration) -> Result<HubAccess> {
        let reason = |reason: String| Error::HubAccess { reason };
        if self.offline {
            return Err(reason("no request is made, because HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set".into()));
        }
        #[cfg(feature = "hub")]
        return access::check(self, limit).map_err(reason);
        #[cfg(not(feature = "hub"))]
        {
            let _ = limit;
            Err(reason("this program was built without downloads (feature `hub`)".into()))
        }
    }

    #[cfg(not(feature = "hub"))]
    fn download(&self, model: &str, revision: &str, part: Part) -> std::result::Result<PathBuf, String> {
        let _ = (self.offline, &self.token, &self.endpoint, self.etag_timeout, self.download_timeout);
        let files = match part {
            Part::Whole => "",
            Part::Tokenizer => " --exclude '*.safetensors'",
            Part::Config => " config.json generation_config.json",
        };
        Err(format!(
            "this program was built without downloads (feature `hub`); `hf download {model}{files} --revision {revision}` fills the cache"
        ))
    }

    #[cfg(feature = "hub")]
    fn expect_online(&self) -> std::result::Result<(), String> {
        match self.offline {
            true => Err("nothing is downloaded, because HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set".into()),
            false => Ok(()),
        }
    }

    #[cfg(feature = "hub")]
    fn download(&self, model: &str, revision: &str, part: Part) -> std::result::Result<PathBuf, String> {
        self.expect_online()?;
        let snapshot = download::download(self, model, revision, part)?;
        part.expect_least_in(&snapshot).map(|()| snapshot)
    }
}

/// The required part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Configuration, weights and tokenizer.
    Whole,
    /// Everything but the weights.
    Tokenizer,
    /// config.json, and generation_config.json if it exists.
    Config,
}

impl Part {
    /// Checks that a snapshot has all possible files of the part; the error says which are missing.
    fn expect_in(self, snapshot: &Path) -> std::result::Result<(), String> {
        match self {
            // A snapshot with weights has all tokenizer files, because weights come last.
            Self::Whole | Self::Tokenizer => whole(snapshot),
            // A snapshot with weights is complete: the model has no generation_config.json.
            Self::Config if whole(snapshot).is_ok() => Ok(()),
            Self::Config => CONFIG.iter().try_for_each(|name| has(snapshot, name)),
        }
    }

    /// Checks that a snapshot has the required files of the part.
    fn expect_least_in(self, snapshot: &Path) -> std::result::Result<(), String> {
        match self {
            Self::Whole => whole(snapshot),
            Self::Tokenizer => has(snapshot, "config.json").and_then(|()| has(snapshot, "tokenizer.json")),
            Self::Config => has(snapshot, "config.json"),
        }
    }
}

/// The configuration files of a model. generation_config.json is optional.
const CONFIG: [&str; 2] = ["config.json", "generation_config.json"];

/// Checks that a snapshot has a configuration and all of its weights; the error says which are missing. Links to removed files count as
/// missing.
fn whole(snapshot: &Path) -> std::result::Result<(), String> {
    has(snapshot, "config.json")?;
    let files = WeightFiles::find(snapshot).map_err(|error| error.to_string())?;
    files.names.iter().try_for_each(|name| has(snapshot, name))
}

fn has(snapshot: &Path, name: &str) -> std::result::Result<(), String> {
    match snapshot.join(name).is_file() {
        true => Ok(()),
        false => Err(format!("{} has no {name}", snapshot.display())),
    }
}

/// Returns the commit of a revision according to the folder of a repository in the cache, or why there is none.
fn commit_in(folder: &Path, revision: &str) -> std::result::Result<String, String> {
    let reference = folder.join("refs").join(revision);
    // A commit has no reference of its own.
    let commit = read_line(&reference).unwrap_or_else(|| revision.to_owned());
    if !is_revision(&commit) || commit.contains('/') {
        return Err(format!("{} holds no commit: remove it", reference.display()));
    }
    Ok(commit)
}

/// Returns the trimmed text of a small file; `None` if it cannot be read or is not a regular file.
fn read_line(path: &Path) -> Option<String> {
    let bytes = grpo_files::read_regular(path, MAX_LINE).ok()?;
    Some(String::from_utf8(bytes).ok()?.trim().to_owned())
}

fn not_found(model: &str, tried: Vec<String>) -> Error {
    Error::NotFound { model: model.to_owned(), tried }
}

/// Returns `true` for `model` or `organisation/model` in the characters that the hub allows. A name that starts with a dot is a path.
fn is_name(model: &str) -> bool {
    let parts: Vec<&str> = model.split('/').collect();
    let legal = |part: &&str| {
        let characters = part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        characters && !part.is_empty() && !part.starts_with(['.', '-']) && !part.contains("--") && !part.contains("..")
    };
    parts.len() <= 2 && parts.iter().all(legal)
}

/// Returns `true` for a valid revision. A branch may contain slashes, but no part of it may lead out of the cache.
fn is_revision(revision: &str) -> bool {
    let legal = |part: &str| {
        let characters = part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.+".contains(&b));
        characters && !part.is_empty() && !part.starts_with('.') && !part.contains("..")
    };
    revision.split('/').all(legal)
}

/// Returns a path with `~` replaced by the user's folder.
fn expand_home(path: &str) -> PathBuf {
    match (path.strip_prefix('~'), env::home_dir()) {
        (Some(""), Some(home)) => home,
        (Some(rest), Some(home)) if rest.starts_with('/') => home.join(rest.trim_start_matches('/')),
        _ => PathBuf::from(path),
    }
}

#[cfg(test)]
mod tests;
