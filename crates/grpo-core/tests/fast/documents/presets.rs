//! The list of the presets.

use super::page::table;
use super::{folder, parse};
use grpo_core::{LossConfig, Semantics};

/// Returns names and texts of configs/loss.
fn presets() -> Vec<(String, String)> {
    let entries = std::fs::read_dir(folder("configs/loss")).unwrap();
    let mut presets: Vec<(String, String)> = entries
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_stem().unwrap().to_string_lossy().into_owned(), std::fs::read_to_string(path).unwrap()))
        .collect();
    presets.sort();
    presets
}

/// Returns the leading comment without its marks.
fn comment(text: &str) -> String {
    let lines = text.lines().map_while(|line| line.strip_prefix("# "));
    // Every file says which commands read it.
    let lines = lines.filter(|line| !line.starts_with("A file for `grpo parity --config`"));
    lines.collect::<Vec<_>>().join(" ")
}

pub(crate) fn generated() -> String {
    let presets: Vec<(String, String)> = presets();
    let link = |name: &str| format!("[{name}](../../configs/loss/{name}.yaml)");
    let what = presets.iter().map(|(name, text)| [link(name), comment(text)]);
    table(&["preset", "reproduces"], what)
}

#[test]
fn presets_name_their_system_and_use_its_semantics() {
    for (name, text) in presets() {
        let (config, comment) = (parse(&text), comment(&text));
        let system = match name.split('-').next().unwrap() {
            "trl" => Some(("TRL 1.16", Semantics::Trl)),
            "verl" => Some(("verl 0.9", Semantics::Verl)),
            "mllm" => Some(("MLLM-JAX", Semantics::MllmJax)),
            _ => None,
        };
        assert!(comment.len() > 20, "{name} does not say what it reproduces");
        if let Some((system, semantics)) = system {
            assert!(comment.starts_with(system), "{name} has to begin with `# {system}`: {comment}");
            assert_eq!(config.semantics, semantics, "{name}");
        }
    }
}

#[test]
fn no_two_presets_are_the_same_configuration() {
    let presets: Vec<(String, LossConfig)> = presets().into_iter().map(|(name, text)| (name, parse(&text))).collect();
    for (i, (name, config)) in presets.iter().enumerate() {
        for (other, of_other) in &presets[i + 1..] {
            assert_ne!(config, of_other, "{name} and {other} are the same");
        }
    }
}
