//! Expands file paths: `~` for the home folder, patterns, folders and names of data sets for several files.

use super::{DataConfig, DataFile};
use crate::error::{Error, Result};
use crate::repository::DatasetHub;
use std::fs::File;
use std::path::{Path, PathBuf};

impl DataConfig {
    /// Replaces `~` by the home folder in every path, and each pattern (`*`, `?`, `[...]`, `**`) in `data.files` and `data.eval_files` by the
    /// matching files, sorted by name. A file whose name equals the pattern takes precedence. A folder, or a name that is not a path
    /// here, is a data set: the files of its split take its place, from `hub` if it is a name.
    ///
    /// # Errors
    /// [`Error::File`] for a pattern without a match, or an invalid one; for a data set without the configuration or split, for one that `hub`
    /// does not return, and for a name that may also be a path.
    pub fn expand_paths(&mut self, hub: &dyn DatasetHub) -> Result<()> {
        for (key, files) in [("data.files", &mut self.files), ("data.eval_files", &mut self.eval_files)] {
            let mut expanded = Vec::with_capacity(files.len());
            for file in files.iter() {
                let file = DataFile { path: at_home(&file.path), ..file.clone() };
                match file.located(key, hub)? {
                    Some(files) => expanded.extend(files),
                    None => {
                        let paths = matches(key, &file.path)?;
                        expanded.extend(paths.into_iter().map(|path| DataFile { path, ..file.clone() }));
                    }
                }
            }
            *files = expanded;
        }
        for path in
            [&mut self.tools_file, &mut self.chat_template, &mut self.training_chat_template].into_iter().flatten()
        {
            *path = at_home(path);
        }
        Ok(())
    }
}

/// Returns the path with a leading `~` replaced by the home folder.
pub fn at_home(path: &Path) -> PathBuf {
    match (path.strip_prefix("~"), std::env::home_dir()) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path.to_owned(),
    }
}

/// Returns the files of a path: the path itself if the file exists or it is not a pattern, else the matches.
fn matches(key: &str, path: &Path) -> Result<Vec<PathBuf>> {
    let pattern = path.to_str().filter(|text| text.contains(['*', '?', '[']) && !path.exists());
    let Some(pattern) = pattern else { return Ok(vec![path.to_owned()]) };
    let fault = |reason: String| Error::File { path: path.to_owned(), reason: format!("`{key}`: {reason}") };
    let found = glob::glob(pattern).map_err(|e| fault(format!("expected a path or a pattern: {e}")))?;
    let mut files = vec![];
    for entry in found {
        let entry = entry.map_err(|e| fault(e.to_string()))?;
        if entry.is_file() {
            files.push(entry);
        }
    }
    if files.is_empty() {
        return Err(fault("expected a pattern that at least one file matches, and none does".into()));
    }
    Ok(files)
}

/// Returns the expected value of a key that names a file, with an example.
fn expected_file(key: &str) -> String {
    let name = key.rsplit('.').next().unwrap_or_default();
    let example = match name {
        "chat_template" => "chatml.jinja",
        "tools_file" => "tools.json",
        "eval_files" => "test.jsonl",
        _ => "train.jsonl",
    };
    format!("expected the path of a file, e.g. `data: {{ {name}: {example} }}` or `--set {key}={example}`")
}

/// Checks that the file in the key `key` exists and is a regular file.
pub(super) fn check_file(key: &str, path: &Path) -> Result<()> {
    let file = |reason: String| Error::File { path: path.to_owned(), reason };
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => {
            File::open(path).map(drop).map_err(|e| file(format!("`{key}`: {e}: {}", expected_file(key))))
        }
        Ok(found) => {
            let kind = if found.is_dir() { "a folder" } else { "a device or a pipe" };
            Err(file(format!("`{key}`: {}, got {kind}", expected_file(key))))
        }
        Err(error) => Err(file(format!("`{key}`: {error}: {}", expected_file(key)))),
    }
}
