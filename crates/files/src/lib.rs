#![doc = include_str!("../README.md")]
//! [`write_atomically`] writes a file completely or not at all, [`NewFolder`] does the same for a folder, [`read_regular`] reads regular files up
//! to a size limit, [`JsonLines`] appends rows to a log and truncates it to a checkpoint, and [`Layers`] merges a configuration from defaults,
//! files, the environment and assignments.
//!
//! ```
//! use grpo_files::{Layers, read_regular, write_atomically};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("loss.yaml");
//! write_atomically(&path, b"beta: 0.02\n")?;
//! assert_eq!(read_regular(&path, 1 << 20)?, b"beta: 0.02\n");
//!
//! let loss: grpo_core::LossConfig = Layers::new().file(&path)?.set(&["epsilon_high=0.28".into()])?.resolve()?;
//! assert_eq!((loss.beta, loss.epsilon_high), (0.02, Some(0.28)));
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod counts;
mod disk;
mod error;
mod json_lines;
mod layers;
mod long_integers;
mod new_folder;
mod printable;
mod secrets;
mod unique;
mod whole;

pub use counts::{counted, grouped, noun};
pub use disk::{FolderSize, folder_size, free_space};
pub use error::{Error, KeyError, Result, check_key};
pub use json_lines::{JsonLines, each_row, read_rows};
pub use layers::{Configuration, ENV_PREFIX, Layers, to_yaml, to_yaml_with_secrets};
pub use long_integers::{
    LONG_INTEGER_MARK, long_digits, long_integer, long_integers_as_digits, long_integers_as_text, mark_long_integers,
};
pub use new_folder::NewFolder;
pub use printable::{is_printable, printable, printable_line};
pub use secrets::{ExpandError, HIDDEN, Secrets, redact, redact_at, redact_url, redacted};
pub use unique::UniqueKeys;
pub use whole::{
    FileId, check_folder, check_output, expect_regular, make_folder, open_regular, read_regular, read_safetensors,
    remove_temporary, sync_folder, without_links, write_atomically, write_output, write_private,
};
