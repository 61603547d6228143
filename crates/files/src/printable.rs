//! Escapes untrusted text for terminals: completions, prompts, rows, file names, responses of servers.

use std::borrow::Cow;

/// Returns `text` with every character escaped that a terminal interprets (`\u{1b}`): control characters, marks that change the
/// direction of writing, and line separators. Line breaks and tabs are kept.
///
/// ```
/// assert_eq!(grpo_files::printable("a\u{1b}[2J\n\u{202e}b"), "a\\u{1b}[2J\n\\u{202e}b");
/// ```
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |c| matches!(c, '\n' | '\t') || is_printable(c))
}

/// Like [`printable`], but also escapes line breaks and tabs.
///
/// ```
/// assert_eq!(grpo_files::printable_line("two\nlines"), "two\\nlines");
/// ```
pub fn printable_line(text: &str) -> Cow<'_, str> {
    escaped(text, is_printable)
}

/// Returns `true` if a character is displayed in place and has no other effect on a terminal or a page.
pub fn is_printable(c: char) -> bool {
    let is_mark = matches!(c,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
        | '\u{e0001}' | '\u{e0020}'..='\u{e007f}');
    !(c.is_control() || is_mark)
}

fn escaped(text: &str, stays: impl Fn(char) -> bool) -> Cow<'_, str> {
    if text.chars().all(&stays) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if stays(c) => out.push(c),
            '\n' | '\r' | '\t' => out.extend(c.escape_default()),
            c => out.extend(c.escape_unicode()),
        }
    }
    Cow::Owned(out)
}
