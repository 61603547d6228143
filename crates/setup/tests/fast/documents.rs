//! Configuration keys that the documentation mentions exist.

use grpo_run_config::keys::keys;

const PAGES: [(&str, &str); 3] = [
    ("docs/from-trl.md", include_str!("../../../../docs/from-trl.md")),
    ("docs/runs.md", include_str!("../../../../docs/runs.md")),
    ("docs/train-your-own.md", include_str!("../../../../docs/train-your-own.md")),
];

/// Returns the words in backticks outside of code blocks.
fn quoted(page: &str) -> impl Iterator<Item = &str> {
    let prose = page.split("```").step_by(2);
    prose
        .flat_map(|text| text.lines().filter(|line| !line.starts_with("    ")))
        .flat_map(|line| line.split('`').skip(1).step_by(2))
}

#[test]
fn every_key_in_the_documentation_exists() {
    let known: Vec<&str> = keys().iter().map(|key| key.path).collect();
    for (page, text) in PAGES {
        let mut count = 0;
        for word in quoted(text) {
            // `rewards.correct: 1` and `loss.beta=0.1` name the key before the sign.
            let key = word.split([':', '=']).next().unwrap();
            let Some((section, _)) = key.split_once('.') else { continue };
            let is_key = key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "._".contains(c));
            if !is_key || !known.contains(&section) {
                continue;
            }
            assert!(known.contains(&key), "{page} names {key}, which is no key of a run's configuration");
            count += 1;
        }
        assert!(count > 10, "{page} names {count} keys");
    }
}
