//! Writes the configuration of a run as YAML with a comment for each key.

use grpo_run_config::keys::keys;

/// The width of a comment in columns, its indentation included.
const WIDTH: usize = 110;

/// Returns `yaml`, a run's configuration, with the meaning of each key in comment lines above it.
pub(crate) fn commented(yaml: &str) -> String {
    let mut text = String::new();
    // The keys of the sections around the current line, with their indentation.
    let mut above: Vec<(usize, &str)> = Vec::new();
    for line in yaml.lines() {
        if let Some((indent, key)) = key_of(line) {
            above.retain(|(column, _)| *column < indent);
            above.push((indent, key));
            let path: Vec<&str> = above.iter().map(|(_, key)| *key).collect();
            if let Some(meaning) = meaning(&path) {
                comment(&mut text, indent, meaning);
            }
        }
        text.push_str(line);
        text.push('\n');
    }
    text
}

/// Parses indentation and key of a line `key: value` or `key:`.
fn key_of(line: &str) -> Option<(usize, &str)> {
    let (key, value) = line.trim_start().split_once(':')?;
    let is_key = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    let indent = line.len() - line.trim_start().len();
    (is_key && (value.is_empty() || value.starts_with(' '))).then_some((indent, key))
}

/// Returns the meaning of the key at `path`; `None` for names that the user chose and for text that only looks like a key.
fn meaning(path: &[&str]) -> Option<&'static str> {
    let found = keys().iter().find(|key| {
        let parts = key.path.split('.');
        parts.clone().count() == path.len() && parts.zip(path).all(|(known, given)| known == "*" || known == *given)
    });
    found.map(|key| key.meaning)
}

/// Adds `words` as lines of a comment.
pub(crate) fn comment(text: &mut String, indent: usize, words: &str) {
    let margin = format!("{}#", " ".repeat(indent));
    let mut line = margin.clone();
    for word in words.split_whitespace() {
        if line.len() > margin.len() && line.chars().count() + 1 + word.chars().count() > WIDTH {
            text.push_str(&format!("{line}\n"));
            line.clone_from(&margin);
        }
        line.push(' ');
        line.push_str(word);
    }
    text.push_str(&format!("{line}\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_gets_a_comment_but_text_that_looks_like_a_key_does_not() {
        let yaml = "seed: 0\ndata:\n  system_prompt: |-\n    seed: 1\n    b\nrewards:\n  programs:\n    judge:\n      timeout: 5.0\n";
        let text = commented(yaml);
        let uncommented: String =
            text.lines().filter(|l| !l.trim_start().starts_with('#')).map(|l| format!("{l}\n")).collect();
        assert_eq!(uncommented, yaml);
        assert!(
            text.starts_with("# The seed of everything random\nseed: 0\n") || text.starts_with("# The seed"),
            "{text}"
        );
        assert!(text.contains("|-\n    seed: 1\n    b\n"), "{text}");
        assert!(text.contains("    judge:\n      # The time in seconds"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
    }
}
