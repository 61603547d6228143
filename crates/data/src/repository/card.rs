//! The configurations in the YAML header of a data set's README.md.

use serde::Deserialize;

/// A configuration: a choice of files, with its splits.
pub(super) struct Configuration {
    pub(super) name: String,
    /// `true` if it is marked as the default.
    pub(super) is_default: bool,
    /// The folder that its patterns are relative to; empty for the root.
    pub(super) folder: String,
    /// The patterns of every split; `None` if they follow from the names of files.
    pub(super) splits: Option<Vec<(String, Vec<String>)>>,
}

#[derive(Deserialize)]
struct Card {
    configs: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    config_name: String,
    data_files: Option<DataFiles>,
    data_dir: Option<String>,
    #[serde(default)]
    default: bool,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected `data_files` to be a pattern, a list of patterns, or a list of `split` and `path`"
)]
enum DataFiles {
    One(String),
    Patterns(Vec<String>),
    Splits(Vec<Split>),
}

#[derive(Deserialize)]
struct Split {
    split: String,
    path: OneOrMore,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected `path` to be a pattern or a list of patterns")]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

/// Returns the key `configs` of the header, or no configurations without a header or without the key.
pub(super) fn configurations(readme: &str) -> Result<Vec<Configuration>, String> {
    let Some(header) = header(readme) else { return Ok(vec![]) };
    let card: Card = serde_saphyr::from_str(&header).map_err(|error| {
        // The YAML reader adds a drawing of the position below the first line.
        let text = error.to_string();
        let line = text.lines().next().unwrap_or_default();
        format!("the header of README.md: {}", line.strip_prefix("error: ").unwrap_or(line))
    })?;
    let configuration = |entry: Entry| {
        let train = |patterns| vec![("train".to_owned(), patterns)];
        let splits = entry.data_files.map(|files| match files {
            DataFiles::One(pattern) => train(vec![pattern]),
            DataFiles::Patterns(patterns) => train(patterns),
            DataFiles::Splits(splits) => splits.into_iter().map(|split| (split.split, split.path.into_vec())).collect(),
        });
        let folder = entry.data_dir.unwrap_or_default().trim_matches('/').trim_start_matches("./").to_owned();
        Configuration { name: entry.config_name, is_default: entry.default, folder, splits }
    };
    Ok(card.configs.unwrap_or_default().into_iter().map(configuration).collect())
}

impl OneOrMore {
    fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(pattern) => vec![pattern],
            Self::More(patterns) => patterns,
        }
    }
}

/// Returns the text between the first line `---` and the next one.
fn header(readme: &str) -> Option<String> {
    let mut lines = readme.strip_prefix('\u{feff}').unwrap_or(readme).lines();
    if lines.next()? != "---" {
        return None;
    }
    let mut header = String::new();
    for line in lines {
        if line == "---" {
            return Some(header);
        }
        header.push_str(line);
        header.push('\n');
    }
    None
}
