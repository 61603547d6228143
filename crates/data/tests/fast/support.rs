//! Files that these tests write.

use data::{DataConfig, DataFile, DataReport, FileDataset, Item, Prompt, PromptEncoder, Result};
use serde_json::{Value, json};
use std::path::PathBuf;
use tempfile::TempDir;

/// A file of `lines` in a folder that lives as long as the first result.
pub(crate) fn file(name: &str, lines: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, lines).unwrap();
    (folder, path)
}

/// JSON objects as lines.
pub(crate) fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

/// `count` rows with a prompt and an answer.
pub(crate) fn numbers(count: usize) -> String {
    lines(&(0..count).map(|i| json!({"prompt": format!("number {i}"), "answer": i})).collect::<Vec<_>>())
}

pub(crate) fn config(path: impl Into<PathBuf>) -> DataConfig {
    DataConfig { files: vec![DataFile::new(path)], ..DataConfig::default() }
}

/// A model of which a word is a token, with or without a chat template, with a context of any length.
pub(crate) fn words(has_chat_template: bool) -> PromptEncoder<'static> {
    let count = &|prompts: &[&Prompt], _| {
        prompts.iter().map(|prompt| Ok(prompt.to_string().split_whitespace().count())).collect()
    };
    PromptEncoder { has_chat_template, max_tokens: None, count, is_exact: true }
}

pub(crate) fn open(config: &DataConfig) -> Result<(FileDataset, DataReport)> {
    FileDataset::open(config, 7, &words(false))
}

/// What is wrong with a file of these bytes.
pub(crate) fn refusal(bytes: impl AsRef<[u8]>) -> String {
    let (_folder, path) = file("rows.jsonl", bytes);
    match open(&config(path)) {
        Ok((_, report)) => panic!("taken: {report}"),
        Err(error) => error.to_string(),
    }
}

pub(crate) fn prompts(items: &[Item]) -> Vec<String> {
    items.iter().map(|item| item.prompt.to_string()).collect()
}
