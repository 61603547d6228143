//! Pages with a generated part, and the format of their numbers and tables.

use super::folder;
use std::collections::BTreeMap;

const BEGIN: &str = "<!-- generated: begin -->\n";
const END: &str = "<!-- generated: end -->";

/// Compares the generated part of docs/losses/`name`.md, or writes it with `UPDATE_DOCS=1`.
pub(crate) fn check(name: &str, generated: &str) {
    let path = folder("docs/losses").join(format!("{name}.md"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (before, _, after) = split(&text).unwrap_or_else(|| panic!("{name}.md lacks the marks {BEGIN}{END}"));
    check_whole(name, &format!("{before}{}{after}", marked(generated)));
}

/// Compares all of docs/losses/`name`.md, or writes it with `UPDATE_DOCS=1`.
pub(crate) fn check_whole(name: &str, new: &str) {
    let path = folder("docs/losses").join(format!("{name}.md"));
    if std::env::var("UPDATE_DOCS").as_deref() == Ok("1") {
        std::fs::write(&path, new).unwrap();
        return;
    }
    let old = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = old.lines().zip(new.lines()).find(|(old, new)| old != new);
    assert!(
        old == new,
        "docs/losses/{name}.md differs from the code: {differs:?}; if the code is right, regenerate the page with\n  \
         UPDATE_DOCS=1 cargo test -p grpo-core --test fast documents"
    );
}

/// Returns a generated part between its marks.
pub(crate) fn marked(generated: &str) -> String {
    format!("{BEGIN}\n{}\n\n{END}", generated.trim())
}

fn split(text: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (generated, after) = rest.split_once(END)?;
    Some((before, generated, after))
}

/// Returns the text without its generated part.
pub(crate) fn without_generated(text: &str) -> String {
    split(text).map_or(text.to_owned(), |(before, _, after)| format!("{before}{after}"))
}

/// Returns a Markdown table.
pub(crate) fn table<R: AsRef<[String]>>(head: &[impl AsRef<str>], rows: impl IntoIterator<Item = R>) -> String {
    let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
    let mut text = line(head.iter().map(AsRef::as_ref).collect()) + &format!("|{}\n", "---|".repeat(head.len()));
    for row in rows {
        text += &line(row.as_ref().iter().map(String::as_str).collect());
    }
    text
}

/// Formats a number with four digits.
pub(crate) fn number(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let size = value.abs().log10().floor();
    if !(-4.0..5.0).contains(&size) {
        return format!("{value:.3e}");
    }
    let text = format!("{value:.*}", (3.0 - size).max(0.0) as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Formats `value` as 1/n if it is such a fraction.
pub(crate) fn fraction(value: f64) -> String {
    let n = (1.0 / value).round();
    match value > 0.0 && value < 1.0 && (value * n - 1.0).abs() < 1e-12 {
        true => format!("1/{n}"),
        false => number(value),
    }
}

/// Formats JSON as `loss_type: grpo, delta: 1.5`.
pub(crate) fn spoken(json: &str) -> String {
    // `semantics` and `loss_type` first, then the other keys in order: a feature of serde_json decides the order of maps in this build.
    let by_key: BTreeMap<String, serde_json::Value> = serde_json::from_str(json).expect("JSON");
    let mut sorted: Vec<_> = by_key.iter().collect();
    sorted.sort_by_key(|(key, _)| ["semantics", "loss_type"].iter().position(|first| first == key).unwrap_or(2));
    let pairs = sorted.into_iter().map(|(key, value)| format!("{key}: {}", value.to_string().replace('"', "")));
    pairs.collect::<Vec<_>>().join(", ")
}
