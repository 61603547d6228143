//! Generated run folders, and parsed pages.

use grpo_report::Report;
use serde_json::Value;
use std::path::{Path, PathBuf};

pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Creates a run with these files.
    pub(crate) fn run<T: AsRef<[u8]>>(&self, name: &str, files: &[(&str, T)]) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(&path).unwrap();
        for (file, text) in files {
            std::fs::write(path.join(file), text).unwrap();
        }
        path
    }
}

/// Returns rows of `phase` with `metric`, from step 1 on.
pub(crate) fn rows(phase: &str, metric: &str, values: impl IntoIterator<Item = f64>) -> String {
    let row = |(value, step): (f64, u64)| format!("{{\"phase\":\"{phase}\",\"step\":{step},\"{metric}\":{value}}}\n");
    values.into_iter().zip(1..).map(row).collect()
}

pub(crate) fn read(runs: &[&Path]) -> Report {
    Report::read(&runs.iter().map(|run| run.to_path_buf()).collect::<Vec<_>>()).unwrap()
}

pub(crate) struct Page {
    pub html: String,
    /// The page without its style and script, as well-formed XML.
    pub markup: String,
    /// The data for the script.
    pub data: Value,
}

impl Page {
    pub(crate) fn of(report: &Report) -> Self {
        let html = report.html();
        let (start, rest) = html.split_once("<style>").unwrap();
        let (_, rest) = rest.split_once("</style>").unwrap();
        let (body, rest) = rest.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
        let (data, rest) = rest.split_once("</script>").unwrap();
        let (_, rest) = rest.split_once("<script>").unwrap();
        let (_, end) = rest.split_once("</script>").unwrap();
        let markup = format!("{start}{body}{end}");
        let data = serde_json::from_str(data).unwrap();
        Self { markup: markup.trim_start_matches("<!DOCTYPE html>").to_owned(), data, html }
    }

    /// Returns the texts of all `tag` elements.
    pub(crate) fn texts(&self, tag: &str) -> Vec<String> {
        let document = roxmltree::Document::parse(&self.markup).unwrap_or_else(|e| panic!("{e}\n{}", self.markup));
        let found = document.descendants().filter(|node| node.has_tag_name(tag));
        let text = |node: roxmltree::Node<'_, '_>| -> String {
            node.descendants().filter_map(|n| n.text().filter(|_| n.is_text())).collect()
        };
        found.map(text).collect()
    }
}
