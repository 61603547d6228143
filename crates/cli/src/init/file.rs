//! Formats the configuration file.

use super::Seen;
use crate::commented::{comment, commented};
use serde_json::Value;

/// Returns the next commands with their purpose.
pub(super) fn next(config: &str, run: &str) -> Vec<String> {
    let quoted = if config.contains(|c: char| c.is_whitespace() || "'\"$`\\".contains(c)) {
        format!("'{}'", config.replace('\'', "'\\''"))
    } else {
        config.to_owned()
    };
    let commands = [
        (format!("grpo data --config {quoted}"), "prompts as tokens, lengths, rewards of the right answers"),
        (format!("grpo train {quoted}"), "trains; the model is in the run's folder"),
        (format!("grpo report runs/{run}-001"), "one HTML page of the run"),
    ];
    let width = commands.iter().map(|(command, _)| command.chars().count()).max().unwrap_or(0);
    commands.iter().map(|(command, does)| format!("{command:width$}  # {does}")).collect()
}

/// Returns the settings as commented YAML, below the findings that led to them.
///
/// # Errors
/// An error if a value cannot be represented in YAML.
pub(super) fn text(settings: &Value, seen: &Seen, next: &[String]) -> anyhow::Result<String> {
    let mut text = String::new();
    let version = env!("CARGO_PKG_VERSION");
    comment(
        &mut text,
        0,
        &format!(
            "A GRPO run, written by `grpo init` {version}. Keys that are not here have their defaults: `grpo train --print-config` shows every key."
        ),
    );
    text.push_str("#\n");
    for (subject, line) in seen {
        comment(&mut text, 0, &format!("{subject}: {line}"));
    }
    text.push_str("#\n# next:\n");
    for line in next {
        text.push_str(&format!("#   {line}\n"));
    }
    text.push('\n');
    text.push_str(&commented(&grpo_files::to_yaml_with_secrets(settings)?));
    Ok(text)
}
