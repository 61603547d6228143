//! A lint for Markdown: lines that continue a sentence, but look like the start of a list or a heading.

/// The start of a line of Markdown that is more than text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marker {
    Heading,
    Bullet,
    Number(u32),
}

impl Marker {
    /// Returns the marker at the start of a line without its indentation.
    fn of(line: &str) -> Option<Marker> {
        let (word, _) = line.split_once(' ')?;
        match word {
            "*" | "-" | "+" => Some(Marker::Bullet),
            _ if word.chars().all(|c| c == '#') => Some(Marker::Heading),
            _ => word.strip_suffix(['.', ')'])?.parse().ok().map(Marker::Number),
        }
    }
}

/// Returns the lines of a page that Markdown may render as a heading or a list although they continue a sentence.
pub(crate) fn accidental_markup(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_code = false;
    // The open items, by indentation, and the line before, empty between paragraphs.
    let mut open: Vec<(usize, Marker)> = Vec::new();
    let mut before = "";
    for line in page.lines() {
        let text = line.trim();
        let indent = line.len() - line.trim_start().len();
        if text.starts_with("```") {
            is_code = !is_code;
        }
        // A block that is indented by four spaces is code, unless an item of a list is open.
        if is_code || text.starts_with("```") || (indent >= 4 && open.is_empty()) {
            before = "";
            continue;
        }
        let marker = Marker::of(text);
        if let Some(marker) = marker {
            open.retain(|(of, _)| *of <= indent);
            let sibling = open.last().filter(|(of, _)| *of == indent).map(|(_, marker)| *marker);
            let continues = match (sibling, marker) {
                (Some(Marker::Bullet), Marker::Bullet) => true,
                (Some(Marker::Number(last)), Marker::Number(number)) => number == last + 1,
                _ => false,
            };
            let is_start = matches!(marker, Marker::Heading | Marker::Bullet | Marker::Number(1));
            let is_nested = open.iter().any(|(of, _)| *of < indent);
            let begins = is_start
                && (before.is_empty() || is_nested && before.ends_with([':', '.']) && marker != Marker::Heading);
            if !continues && !begins {
                found.push(line.to_owned());
            }
            if marker == Marker::Heading {
                open.clear();
            } else {
                open.retain(|(of, _)| *of < indent);
                open.push((indent, marker));
            }
        } else if text.chars().all(|c| c == '=' || c == '-') && !text.is_empty() && !before.is_empty() {
            found.push(line.to_owned());
        } else if before.is_empty() && !text.is_empty() {
            open.retain(|(of, _)| *of < indent);
        }
        before = text;
    }
    found
}

#[rstest::rstest]
#[case("The cap is above\n1. `1e12` turns it off.", &["1. `1e12` turns it off."])]
#[case("* The cap is above\n  1. `1e12` turns it off.", &["  1. `1e12` turns it off."])]
#[case("The step is\n12. Then", &["12. Then"])]
#[case("Both add\n- the KL", &["- the KL"])]
#[case("Both add\n+ the KL", &["+ the KL"])]
#[case("Both add\n# the KL", &["# the KL"])]
#[case("Both add\n---", &["---"])]
#[case("# Title\n\nText:\n\n1. one\n2. two:\n   * below:\n     1. third\n\n   text\n3. three\n\n    - code\n", &[])]
#[case("Text\n\n```text\na\n- b\n```\n\n* item\n  text\n* item\n", &[])]
fn accidental_markup_is_found(#[case] page: &str, #[case] lines: &[&str]) {
    assert_eq!(accidental_markup(page), lines);
}
