//! Replaces names of data sets in a configuration by the paths of their files.

use super::layout::{README, data_files};
use super::{DatasetHub, HubError};
use crate::config::DataFile;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// The prefix of an explicit name on the hub.
const SCHEME: &str = "hf://datasets/";
/// The size limit of a README.md in bytes.
const MAX_README: u64 = 16 << 20;
/// The largest number of files in a folder that is a data set.
const MOST_FILES: usize = 1 << 17;

impl DataFile {
    /// Returns the files of a folder or of a data set on `hub`; `None` if the path is something else. `key` is `data.files` or
    /// `data.eval_files`, whose default splits are `train` and `test`.
    pub(crate) fn located(&self, key: &str, hub: &dyn DatasetHub) -> Result<Option<Vec<Self>>> {
        let fault = |reason: String| Error::File { path: self.path.clone(), reason: format!("`{key}`: {reason}") };
        let default = if key.ends_with("eval_files") { "test" } else { "train" };
        let split = self.split.as_deref().unwrap_or(default);
        let text = self.path.to_str().unwrap_or_default();
        let explicit = text.strip_prefix(SCHEME);
        if explicit.is_none() && self.path.is_file() {
            let given = [("config", &self.config), ("split", &self.split), ("revision", &self.revision)];
            return match given.into_iter().find(|(_, value)| value.is_some()) {
                None => Ok(None),
                Some((name, _)) => {
                    let hub_hint = hub_name(text)
                        .map(|_| format!(", or write {SCHEME}{text} for the data set on the Hugging Face Hub"));
                    let hub_hint = hub_hint.unwrap_or_default();
                    Err(fault(format!("it is a file here, which has no `{name}`: leave `{name}` out{hub_hint}")))
                }
            };
        }
        let (files, paths) = if explicit.is_none() && self.path.is_dir() {
            if let Some(revision) = &self.revision {
                return Err(fault(format!("it is a folder here, which has no `revision` {revision:?}: leave it out")));
            }
            let names = names_in(&self.path).map_err(|error| fault(error.to_string()))?;
            if let Some(reason) = saved_to_disk(&names, split) {
                return Err(fault(reason));
            }
            let readme = read_readme(&names, |name| Ok(self.path.join(name))).map_err(&fault)?;
            let files = data_files(&names, readme.as_deref(), self.config.as_deref(), split).map_err(|reason| {
                let hub_hint = hub_name(text).map_or_else(String::new, |name| {
                    format!("; the folder takes precedence over the data set {name} on the Hugging Face Hub, which is {SCHEME}{name}")
                });
                fault(format!("the folder here: {reason}{hub_hint}"))
            })?;
            let paths = files.iter().map(|name| self.path.join(name)).collect();
            (files, paths)
        } else {
            let name = match explicit {
                Some(name) => Some(name).filter(|name| is_hub_name(name)).ok_or_else(|| {
                    fault(format!("expected {SCHEME}OWNER/NAME; keys of the file name the rest: {{path: ..., config: ..., split: ..., revision: ...}}"))
                })?,
                None => match hub_name(text) {
                    Some(name) => name,
                    None => return Ok(None),
                },
            };
            if let (None, Some(owner)) = (explicit, self.path.parent().filter(|owner| owner.is_dir())) {
                return Err(fault(format!(
                    "there is no such file in the folder {} here, and it may be the name of a data set on the Hugging Face Hub: correct the path, \
                     or write {SCHEME}{name}",
                    owner.display()
                )));
            }
            let broken = |error: HubError| {
                let missing = if explicit.is_some() {
                    ""
                } else {
                    "there is no such file or folder here, and on the Hugging Face Hub: "
                };
                fault(format!("{missing}{error}"))
            };
            let revision = self.revision.as_deref();
            let names = hub.list(name, revision).map_err(broken)?;
            let fetch = |file: &str| {
                let paths = hub.fetch(name, revision, &[file.to_owned()]).map_err(|error| error.to_string())?;
                paths.into_iter().next().ok_or_else(|| format!("{file} was not downloaded"))
            };
            let readme = read_readme(&names, fetch).map_err(&fault)?;
            let files = data_files(&names, readme.as_deref(), self.config.as_deref(), split)
                .map_err(|reason| fault(format!("data set {name} on the Hugging Face Hub: {reason}")))?;
            let paths = hub.fetch(name, revision, &files).map_err(broken)?;
            (files, paths)
        };
        let source = self.name.clone().or_else(|| Some(self.path.file_name()?.to_string_lossy().into_owned()));
        // The files of a split share its weight.
        let weight = self.weight.map(|weight| weight / files.len() as f64);
        let file = |path: PathBuf| Self { weight, format: self.format, name: source.clone(), ..Self::new(path) };
        Ok(Some(paths.into_iter().map(file).collect()))
    }
}

/// Returns the error text for a folder that `save_to_disk` of `datasets` has written, by the names of its files.
fn saved_to_disk(names: &[String], split: &str) -> Option<String> {
    let has = |name: &str| names.iter().any(|known| known == name);
    let split_index = match (has("dataset_dict.json"), has("state.json")) {
        (true, _) => format!("[{split:?}]"),
        (false, true) if names.iter().any(|name| name.ends_with(".arrow")) => String::new(),
        (false, _) => return None,
    };
    Some(format!(
        "expected files of JSON lines or Parquet, got a folder of `save_to_disk`, in Arrow: \
         `datasets.load_from_disk(FOLDER){split_index}.to_json(\"rows.jsonl\")` writes rows"
    ))
}

/// Returns the path if it may be the name of a data set: `OWNER/NAME` without the extension of a data file.
fn hub_name(path: &str) -> Option<&str> {
    const EXTENSIONS: [&str; 9] = ["json", "jsonl", "ndjson", "parquet", "csv", "tsv", "txt", "gz", "zst"];
    let extension = path.rsplit_once('.').map_or("", |(_, extension)| extension);
    (is_hub_name(path) && !EXTENSIONS.contains(&extension)).then_some(path)
}

/// Returns `true` for `OWNER/NAME` in the characters that the hub allows.
fn is_hub_name(text: &str) -> bool {
    let legal = |part: &str| {
        let characters = part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        characters && !part.is_empty() && !part.starts_with(['.', '-']) && !part.contains("--") && !part.contains("..")
    };
    text.split_once('/').is_some_and(|(owner, name)| legal(owner) && legal(name))
}

/// Returns the text of README.md, if the data set has one; `path` returns its path on this machine.
fn read_readme(names: &[String], path: impl Fn(&str) -> Result<PathBuf, String>) -> Result<Option<String>, String> {
    if !names.iter().any(|name| name == README) {
        return Ok(None);
    }
    let bytes = grpo_files::read_regular(&path(README)?, MAX_README).map_err(|error| error.to_string())?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Returns the names of all files below a folder, separated by `/`. Links to folders are not followed.
fn names_in(root: &Path) -> std::io::Result<Vec<String>> {
    let (mut names, mut folders) = (vec![], vec![(root.to_owned(), String::new())]);
    while let Some((folder, prefix)) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().into_string().map_err(|name| {
                std::io::Error::other(format!("the name of the file {} is not UTF-8", Path::new(&name).display()))
            })?;
            if entry.file_type()?.is_dir() {
                if !name.starts_with('.') {
                    folders.push((entry.path(), format!("{prefix}{name}/")));
                }
            } else if names.len() == MOST_FILES {
                let message = format!("the folder has more than {MOST_FILES} files: name files or a smaller folder");
                return Err(std::io::Error::other(message));
            } else if entry.path().is_file() {
                names.push(format!("{prefix}{name}"));
            }
        }
    }
    Ok(names)
}
