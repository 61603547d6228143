//! A comparison of the presets.

use super::defaults::properties;
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
    let configs: Vec<(&String, LossConfig)> = presets.iter().map(|(name, text)| (name, parse(text))).collect();
    // Columns with the same value for all presets are omitted.
    let of: Vec<_> = configs.iter().map(|(_, config)| properties(config)).collect();
    let telling: Vec<usize> = (0..of[0].len()).filter(|i| of.iter().any(|list| list[*i].1 != of[0][*i].1)).collect();
    let head: Vec<&str> = ["preset"].into_iter().chain(telling.iter().map(|i| of[0][*i].0)).collect();
    let comes_to = configs.iter().zip(&of).map(|((name, _), list)| {
        [(*name).clone()].into_iter().chain(telling.iter().map(|i| list[*i].1.clone())).collect::<Vec<_>>()
    });
    format!(
        "## Origin\n\n{}\n## Resolved settings\n\n{}",
        table(&["preset", "reproduces"], what),
        table(&head, comes_to)
    )
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
