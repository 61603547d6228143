//! The page of a loss, which is the documentation of its module, and the index of these pages.

use super::folder;
use super::page::table;
use grpo_core::LossType;

/// Returns the module documentation of a loss as Markdown.
pub(crate) fn written(loss: LossType) -> String {
    let name = loss.name();
    let path = folder("crates/grpo-core/src/objective").join(format!("{name}.rs"));
    let source = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let lines = source.lines().take_while(|line| line.starts_with("//!"));
    let text: Vec<&str> = lines.map(|line| line.trim_start_matches("//!").strip_prefix(' ').unwrap_or("")).collect();
    let heading = format!("# {name}");
    assert_eq!(text.first(), Some(&heading.as_str()), "{}: the documentation begins with its heading", path.display());
    links(&text.join("\n"))
}

/// Converts links of rustdoc and file names to links between pages.
fn links(text: &str) -> String {
    let text = text.replace("](crate::LossConfig::prepare)", "](../../crates/grpo-core/src/prepare.rs)");
    let mut parts = text.split("](super::");
    let mut linked = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (target, rest) = part.split_once(')').expect("a link ends");
        linked += &format!("]({target}.md){rest}");
    }
    let code = linked.split('`').enumerate().map(|(i, piece)| {
        let is_code = i % 2 == 1;
        let file = piece.strip_prefix("configs/loss/").and_then(|file| file.strip_suffix(".yaml")).filter(|_| is_code);
        let page = piece.strip_prefix("docs/losses/").filter(|_| is_code);
        match (file, page) {
            (Some(preset), _) => (format!("[{preset}](../../{piece})"), false),
            (_, Some(page)) => (format!("[{}]({page})", page.split(".md").next().unwrap_or_default()), false),
            _ => (piece.to_owned(), is_code),
        }
    });
    code.map(|(text, is_code)| if is_code { format!("`{text}`") } else { text }).collect()
}

/// Returns the first paragraph of a loss's page.
fn summary(loss: LossType) -> String {
    let text = written(loss);
    text.split("\n\n").nth(1).expect("a first paragraph").replace('\n', " ")
}

/// Returns the list of losses.
pub(crate) fn index() -> String {
    let rows = LossType::ALL.iter().map(|loss| [format!("[{0}]({0}.md)", loss.name()), summary(*loss)]);
    table(&["page", "summary"], rows)
}

/// Returns the page of a loss.
pub(crate) fn page(loss: LossType) -> String {
    written(loss) + "\n"
}
