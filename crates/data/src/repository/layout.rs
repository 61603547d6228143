//! Finds the files of a split as the Python library `datasets` does.
//!
//! ```text
//! if README.md has `configs`: the patterns of the configuration and its split
//! else the first rule with a match:
//!     data/SPLIT-00000-of-00001.parquet          any name of a split
//!     a folder with a keyword of a split         train/, my-test/, validation_2/
//!     a file with a keyword of a split           train.jsonl, NAME/train-0.parquet, my_dev.json
//!     every file                                 split train
//! then: only files in the most frequent format
//! ```

use super::card::{Configuration, configurations};
use glob::{MatchOptions, Pattern};
use std::collections::BTreeSet;

/// The file with the configurations.
pub(super) const README: &str = "README.md";
/// The longest pattern in bytes.
const LONGEST_PATTERN: usize = 256;
/// The largest number of names in an error.
const MOST_NAMES: usize = 20;
/// Files that are never data.
const IGNORED: [&str; 6] =
    [README, "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json"];
/// The splits with keywords in names of files and folders.
const KEYWORDS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];
/// The characters that may be next to a keyword.
const SEPARATORS: &str = "[-._ 0-9]";
/// The formats by file extension, in order of preference among equally frequent ones.
const FORMATS: [(&str, Format); 14] = [
    ("parquet", Format::Parquet),
    ("jsonl", Format::Json),
    ("json", Format::Json),
    ("ndjson", Format::Json),
    ("csv", Format::Other),
    ("tsv", Format::Other),
    ("arrow", Format::Other),
    ("txt", Format::Other),
    ("xml", Format::Other),
    ("tar", Format::Other),
    ("zip", Format::Other),
    ("jpg", Format::Other),
    ("png", Format::Other),
    ("wav", Format::Other),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Parquet,
    Json,
    Other,
}

/// Returns the files of a split, given the names of all files of a data set and the text of its README.md. Names are relative to the root of
/// the data set and separated by `/`.
///
/// ```
/// let names = ["README.md", "main/train-0.parquet", "main/test-0.parquet", "socratic/train-0.parquet"];
/// let readme = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n";
/// let files = grpo_data::data_files(&names, Some(readme), None, "train")?;
/// assert_eq!(files, ["main/train-0.parquet"]);
/// # Ok::<(), String>(())
/// ```
///
/// # Errors
/// The reason, with the configurations and splits that exist.
pub fn data_files(
    names: &[impl AsRef<str>],
    readme: Option<&str>,
    config: Option<&str>,
    split: &str,
) -> Result<Vec<String>, String> {
    let mut names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    names.sort_unstable();
    let configurations = readme.map_or(Ok(vec![]), configurations)?;
    let chosen = choose(&configurations, config)?;
    // Without `configs`, a configuration is a folder.
    let folder = chosen.map_or(config, |chosen| Some(chosen.folder.as_str())).unwrap_or_default();
    let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    let inside: Vec<&str> = names.iter().filter_map(|name| name.strip_prefix(prefix.as_str())).collect();
    if inside.is_empty() {
        return Err(match config {
            Some(config) if chosen.is_none() => {
                format!(
                    "there is no configuration {config:?}: README.md has no `configs`, and there is no folder {config}"
                )
            }
            _ => format!("there is no file in the folder {folder:?}"),
        });
    }
    let splits = match chosen.and_then(|chosen| chosen.splits.as_ref()) {
        Some(splits) => splits.clone(),
        None => splits_by_name(&inside)?,
    };
    let chosen_split = splits.iter().find(|(name, _)| name == split);
    let (_, patterns) = chosen_split.ok_or_else(|| {
        let found: Vec<&str> = splits.iter().map(|(name, _)| name.as_str()).collect();
        match found.as_slice() {
            [] => "there are no data files".to_owned(),
            found => format!("there is no split {split:?}; the splits are {}: name one with `split`", listed(found)),
        }
    })?;
    let files = matching(&inside, patterns)?;
    if files.is_empty() {
        return Err(format!("no file matches {} of the split {split:?}", listed(patterns)));
    }
    let files = in_one_format(files)?;
    Ok(files.into_iter().map(|name| format!("{prefix}{name}")).collect())
}

/// Returns the configuration with a name, or the default one; `None` if there are none.
fn choose<'a>(all: &'a [Configuration], name: Option<&str>) -> Result<Option<&'a Configuration>, String> {
    let names = || listed(&all.iter().map(|one| one.name.as_str()).collect::<Vec<_>>());
    match (all, name) {
        ([], _) => Ok(None),
        (_, Some(name)) => match all.iter().find(|one| one.name == name) {
            Some(one) => Ok(Some(one)),
            None => Err(format!("there is no configuration {name:?}; the configurations are {}", names())),
        },
        ([one], None) => Ok(Some(one)),
        (_, None) => {
            let defaults: Vec<_> = all.iter().filter(|one| one.is_default || one.name == "default").collect();
            match defaults[..] {
                [one] => Ok(Some(one)),
                [] => Err(format!("it has several configurations: name one of {} with `config`", names())),
                _ => Err(format!(
                    "README.md marks several configurations as the default: name one of {} with `config`",
                    names()
                )),
            }
        }
    }
}

/// Returns splits and their patterns by the first rule that matches a file.
fn splits_by_name(names: &[&str]) -> Result<Vec<(String, Vec<String>)>, String> {
    let sharded: BTreeSet<&str> = names.iter().filter_map(|name| split_of_shard(name)).collect();
    if !sharded.is_empty() {
        let digits = "[0-9]".repeat(5);
        let pattern = |split: &str| format!("data/{}-{digits}-of-{digits}*.*", Pattern::escape(split));
        return Ok(sharded.into_iter().map(|split| (split.to_owned(), vec![pattern(split)])).collect());
    }
    let folder_patterns = |word: &str| {
        let s = SEPARATORS;
        vec![
            format!("**/{word}/**"),
            format!("**/{word}{s}*/**"),
            format!("**/*{s}{word}/**"),
            format!("**/*{s}{word}{s}*/**"),
        ]
    };
    let file_patterns =
        |word: &str| vec![format!("**/{word}{SEPARATORS}*"), format!("**/*{SEPARATORS}{word}{SEPARATORS}*")];
    for patterns in [&folder_patterns as &dyn Fn(&str) -> Vec<String>, &file_patterns] {
        let mut splits = vec![];
        for (split, words) in KEYWORDS {
            let patterns: Vec<String> = words.iter().flat_map(|word| patterns(word)).collect();
            if !matching(names, &patterns)?.is_empty() {
                splits.push((split.to_owned(), patterns));
            }
        }
        if !splits.is_empty() {
            return Ok(splits);
        }
    }
    let all = vec!["**".to_owned()];
    Ok(if matching(names, &all)?.is_empty() { vec![] } else { vec![("train".into(), all)] })
}

/// Returns the split of `data/SPLIT-00000-of-00001.EXTENSION`.
fn split_of_shard(name: &str) -> Option<&str> {
    let file = name.strip_prefix("data/").filter(|file| !file.contains('/'))?;
    let is_shard = |rest: &str| {
        let bytes = rest.as_bytes();
        let digits = |range: std::ops::Range<usize>| bytes[range].iter().all(u8::is_ascii_digit);
        bytes.len() > 15 && bytes[0] == b'-' && digits(1..6) && &bytes[6..10] == b"-of-" && digits(10..15)
    };
    let at = file.match_indices('-').map(|(at, _)| at).rfind(|at| is_shard(&file[*at..]))?;
    let (split, rest) = file.split_at(at);
    (rest[15..].contains('.') && !split.is_empty()).then_some(split)
}

/// Returns the names that match a pattern, in the order of the patterns, each once.
fn matching<'a>(names: &[&'a str], patterns: &[String]) -> Result<Vec<&'a str>, String> {
    const OPTIONS: MatchOptions =
        MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };
    let mut found: Vec<&str> = vec![];
    let mut seen = BTreeSet::new();
    for text in patterns {
        let shown = || text.chars().take(60).collect::<String>();
        if text.len() > LONGEST_PATTERN {
            return Err(format!("expected a pattern of at most {LONGEST_PATTERN} bytes, got {:?}...", shown()));
        }
        let text = text.trim_start_matches("./");
        let pattern = Pattern::new(text).map_err(|error| format!("expected a pattern, got {:?}: {error}", shown()))?;
        for name in names {
            let file = name.rsplit('/').next().unwrap_or_default();
            // Folders such as `__pycache__` are hidden, too.
            let is_hidden = name.split('/').any(|part| part.starts_with("__")) && !text.contains("__");
            let is_ignored = IGNORED.contains(&file) && !text.ends_with(file);
            if !is_hidden && !is_ignored && pattern.matches_with(name, OPTIONS) && seen.insert(*name) {
                found.push(name);
            }
        }
    }
    Ok(found)
}

/// Returns the files in the most frequent format. A name may have several extensions, as in `train.jsonl.gz`.
fn in_one_format(files: Vec<&str>) -> Result<Vec<&str>, String> {
    let has = |name: &str, expected: &str| {
        let file = name.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
        file.split('.').skip(1).any(|extension| extension == expected)
    };
    let count = |extension: &str| files.iter().filter(|name| has(name, extension)).count();
    // `max_by_key` returns the last of equal ones.
    let best = FORMATS.iter().rev().map(|one| (count(one.0), one)).max_by_key(|(count, _)| *count);
    match best {
        Some((1.., (_, format))) if *format != Format::Other => {
            let extensions: Vec<&str> = FORMATS.iter().filter(|(_, one)| one == format).map(|one| one.0).collect();
            let is_one = |name: &&str| extensions.iter().any(|extension| has(name, extension));
            Ok(files.into_iter().filter(is_one).collect())
        }
        _ => Err(format!("expected Parquet, JSON lines or JSON, got {}", listed(&files))),
    }
}

fn listed(names: &[impl AsRef<str>]) -> String {
    let shown: Vec<&str> = names.iter().take(MOST_NAMES).map(AsRef::as_ref).collect();
    let more = if names.len() > MOST_NAMES { ", ..." } else { "" };
    format!("{}{more}", shown.join(", "))
}
