//! Data sets that are repositories: folders on this machine, and names on the Hugging Face Hub.

mod card;
mod layout;
mod locate;

use std::path::PathBuf;

pub use layout::data_files;

/// An error of a [`DatasetHub`].
pub type HubError = Box<dyn std::error::Error + Send + Sync>;

/// A hub of data sets by name. `list` and `fetch` must refer to the same commit.
pub trait DatasetHub {
    /// Returns the paths of all files of the data set `name` (`OWNER/NAME`), relative to its root, separated by `/`. `revision` is a branch, a
    /// tag or a commit; without it, the main branch.
    ///
    /// # Errors
    /// The reason why there is no listing, such as an unknown name or a missing network.
    fn list(&self, name: &str, revision: Option<&str>) -> Result<Vec<String>, HubError>;

    /// Downloads files of the data set and returns their paths on this machine, in the order of `files`.
    ///
    /// # Errors
    /// The reason why a file is missing.
    fn fetch(&self, name: &str, revision: Option<&str>, files: &[String]) -> Result<Vec<PathBuf>, HubError>;
}
