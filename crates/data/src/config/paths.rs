//! Expands file paths: `~` for the home folder, and patterns for several files.

use super::{DataConfig, DataFile};
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

impl DataConfig {
    /// Replaces `~` by the home folder in every path, and each pattern (`*`, `?`, `[...]`, `**`) in `data.files` and `data.eval_files` by the
    /// matching files, sorted by name. A file whose name equals the pattern takes precedence.
    ///
    /// # Errors
    /// [`Error::File`] for a pattern without a match, or an invalid one.
    pub fn expand_paths(&mut self) -> Result<()> {
        for (key, files) in [("data.files", &mut self.files), ("data.eval_files", &mut self.eval_files)] {
            let mut expanded = Vec::with_capacity(files.len());
            for file in files.iter() {
                let paths = matches(key, &at_home(&file.path))?;
                expanded.extend(paths.into_iter().map(|path| DataFile { path, ..file.clone() }));
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
