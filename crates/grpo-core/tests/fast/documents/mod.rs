//! Checks that the pages in docs/losses and the presets in configs/loss agree with the code.
//!
//! The page of a loss is the documentation of its module. Other pages have a part between marks, generated from the code.
//! `UPDATE_DOCS=1 cargo test -p grpo-core --test fast documents` writes both; without the variable a page that differs fails the test.

mod defaults;
mod examples;
mod loss_pages;
mod numbers;
mod page;
mod presets;
mod terms;

use grpo_core::format::BatchLoss;
use grpo_core::{LossConfig, LossType};
use std::collections::BTreeSet;
use std::path::PathBuf;

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// Returns names and texts of the pages.
fn pages() -> Vec<(String, String)> {
    let entries = std::fs::read_dir(folder("docs/losses")).unwrap();
    let mut pages: Vec<(String, String)> = entries
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read_to_string(&path).unwrap()))
        .collect();
    pages.sort();
    pages
}

fn parse(yaml: &str) -> LossConfig {
    let read: BatchLoss = serde_saphyr::from_str(yaml).unwrap_or_else(|e| panic!("{e}\n{yaml}"));
    read.loss.validate().unwrap_or_else(|e| panic!("{e}\n{yaml}"));
    read.loss
}

#[test]
fn generated_parts_match_the_code() {
    for loss in LossType::ALL.iter().copied() {
        page::check_whole(loss.name(), &loss_pages::page(loss));
    }
    page::check("README", &loss_pages::index());
    page::check("aggregation", &terms::aggregation());
    page::check("sampler", &terms::sampler());
    page::check("entropy", &terms::entropy());
    page::check("semantics", &defaults::by_system(LossType::ALL));
    page::check("presets", &presets::generated());
    page::check("numbers", &numbers::generated());
}

#[test]
fn examples_in_yaml_are_legal() {
    let mut examples = 0;
    for (name, text) in pages() {
        for block in text.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap()) {
            if block.contains("loss_type") {
                parse(block);
                examples += 1;
            }
        }
        if LossType::ALL.iter().any(|loss| name == format!("{}.md", loss.name())) {
            assert!(text.contains("```yaml\n"), "{name} has no example");
        }
    }
    assert!(examples >= LossType::ALL.len());
}

#[test]
fn every_page_is_in_the_index_and_every_link_has_a_target() {
    let pages = pages();
    let (_, index) = pages.iter().find(|(name, _)| name == "README.md").unwrap();
    for (name, text) in &pages {
        assert!(name == "README.md" || index.contains(&format!("]({name})")), "README.md does not list {name}");
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.starts_with("http")) {
            let file = target.split('#').next().unwrap();
            assert!(folder("docs/losses").join(file).exists(), "{name} links to {target}, which is not there");
        }
    }
}

#[test]
fn every_key_is_explained_on_a_page() {
    let first_word =
        |code: &str| code.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).next().unwrap().to_owned();
    let explaining = pages().into_iter().filter(|(name, _)| name != "presets.md");
    let named: BTreeSet<String> = explaining
        .flat_map(|(_, text)| {
            page::without_generated(&text).split('`').skip(1).step_by(2).map(first_word).collect::<Vec<_>>()
        })
        .collect();
    let defaults = serde_json::to_value(BatchLoss::default()).unwrap();
    let missing: Vec<&String> = defaults.as_object().unwrap().keys().filter(|key| !named.contains(*key)).collect();
    assert!(missing.is_empty(), "no page explains these keys: {missing:?}");
}
