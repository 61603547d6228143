//! Preprocesses a template before it is compiled: counts the tokens of its tags, and rewrites syntax that minijinja rejects and constants
//! that it would evaluate. `bounds::instructions` changes operators in the compiled template.
//!
//! * `\r\n` and `\r` become `\n`, as in Jinja, also within tags.
//! * `{% generation %}` and `{% endgeneration %}`, which mark an assistant's text for `transformers`, become blocks without effect.
//! * `{% for x in 1, 2 %}` becomes `{% for x in (1, 2) %}`.
//! * `{% raw %}` becomes `{% raw +%}`: Jinja keeps a newline behind it, and trims the one behind `{% endraw %}` only.
//! * `a * b` becomes `a *one* b`, so that no product is a constant: minijinja evaluates constants during compilation, without steps and
//!   limits.

use super::limits::{MAX_LENGTH, MAX_TAG_TOKENS, MAX_TOKENS, WAY_OUT};
use std::ops::Range;

/// The name of the number 1, which no template uses by chance.
pub(super) const ONE: &str = "__grpo_one";
const PRODUCT: &str = "*__grpo_one*";

/// Returns the template for minijinja, with unchanged line numbers; the error names the exceeded limit.
///
/// An invalid template is not changed, so that the parser reports the error.
pub(super) fn prepared(source: &str) -> Result<String, String> {
    if source.len() > MAX_LENGTH {
        return Err(format!("the template has {} bytes, and the limit is {MAX_LENGTH} bytes; {WAY_OUT}", source.len()));
    }
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut count) = (&source[..], 0);
    while let Some((start, kind)) = next_tag(rest) {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let end = match kind {
            b'#' => rest.find("#}").map(|end| end + 2),
            b'%' if let Some(length) = raw_tag(&rest[2..], "raw", true) => {
                let opening = rest[..2 + length].trim_end_matches("%}");
                let keeps_newline = !opening.ends_with(['-', '+']);
                out.push_str(opening);
                if keeps_newline {
                    out.push('+');
                }
                rest = &rest[opening.len()..];
                end_of_raw(rest)
            }
            _ => {
                let close = if kind == b'%' { "%}" } else { "}}" };
                let tag = Tag::read(rest, close);
                let tokens = tag.tokens.len() + 2 * tag.products().len();
                if tokens > MAX_TAG_TOKENS {
                    return Err(format!(
                        "a tag of the template has more than {MAX_TAG_TOKENS} tokens, which is the limit; {WAY_OUT}"
                    ));
                }
                count += tokens;
                if count > MAX_TOKENS {
                    return Err(format!(
                        "the tags of the template have more than {MAX_TOKENS} tokens, which is the limit; {WAY_OUT}"
                    ));
                }
                let mut text = rest[..tag.end].to_owned();
                let mut edits = if kind == b'%' { tag.edits() } else { vec![] };
                edits.extend(tag.products().into_iter().map(|at| (at..at + 1, PRODUCT)));
                edits.sort_by_key(|(range, _)| range.start);
                edits.into_iter().rev().for_each(|(range, new)| text.replace_range(range, new));
                out.push_str(&text);
                rest = &rest[tag.end..];
                continue;
            }
        };
        let end = end.unwrap_or(rest.len());
        out.push_str(&rest[..end]);
        rest = &rest[end..];
    }
    out.push_str(rest);
    Ok(out)
}

/// Returns the position of the next tag, and its second character.
fn next_tag(text: &str) -> Option<(usize, u8)> {
    let pairs = text.as_bytes().windows(2).enumerate();
    let mut tags = pairs.filter(|(_, pair)| pair[0] == b'{' && b"{%#".contains(&pair[1]));
    tags.next().map(|(start, pair)| (start, pair[1]))
}

/// Returns the length of a tag that contains only `word`, after its `{%`.
fn raw_tag(text: &str, word: &str, has_control: bool) -> Option<usize> {
    let inner = if has_control { text.strip_prefix(['-', '+']).unwrap_or(text) } else { text };
    let space = |text: &'_ str| text.len() - text.trim_ascii_start().len();
    let inner = inner[space(inner)..].strip_prefix(word)?;
    let inner = &inner[space(inner)..];
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).strip_prefix("%}")?;
    Some(text.len() - inner.len())
}

/// Returns the end of the raw block whose opening tag ends at the start of `text`.
fn end_of_raw(text: &str) -> Option<usize> {
    let mut at = 0;
    while let Some(found) = text[at..].find("{%") {
        at += found + 2;
        if let Some(length) = raw_tag(&text[at..], "endraw", true) {
            return Some(at + length);
        }
    }
    None
}

/// A token within a tag.
#[derive(Debug, PartialEq)]
enum Token<'a> {
    Word(&'a str),
    Text,
    Symbol(u8),
}

/// A tag at the start of a text.
struct Tag<'a> {
    /// The tokens between the delimiters with their positions.
    tokens: Vec<(usize, Token<'a>)>,
    /// The position of the closing delimiter with its `-` or `+`.
    close: usize,
    /// The end of the tag.
    end: usize,
}

impl<'a> Tag<'a> {
    /// Reads a tag like minijinja's lexer: strings may contain delimiters, and brackets must be closed before the tag.
    fn read(text: &'a str, close: &str) -> Self {
        let bytes = text.as_bytes();
        let mut at = 2 + usize::from(bytes.get(2).is_some_and(|byte| b"-+".contains(byte)));
        let (mut tokens, mut open) = (vec![], 0i64);
        while at < bytes.len() {
            let byte = bytes[at];
            let rest = &text[at..];
            if open == 0 {
                let control = usize::from(b"-+".contains(&byte));
                if rest[control..].starts_with(close) {
                    return Self { tokens, close: at, end: at + control + close.len() };
                }
            }
            let length = match byte {
                _ if byte.is_ascii_whitespace() => {
                    at += 1;
                    continue;
                }
                b'"' | b'\'' => length_of_text(rest.as_bytes(), byte),
                _ if byte.is_ascii_alphanumeric() || byte == b'_' => {
                    rest.bytes().take_while(|byte| byte.is_ascii_alphanumeric() || *byte == b'_').count()
                }
                _ => rest.chars().next().map_or(1, char::len_utf8),
            };
            let token = match byte {
                b'"' | b'\'' => Token::Text,
                _ if byte.is_ascii_alphanumeric() || byte == b'_' => Token::Word(&rest[..length]),
                _ => Token::Symbol(byte),
            };
            open += i64::from(b"([{".contains(&byte)) - i64::from(b")]}".contains(&byte));
            tokens.push((at, token));
            at += length;
        }
        Self { tokens, close: text.len(), end: text.len() }
    }

    /// Returns the ranges of a statement that minijinja does not accept, with their replacements.
    fn edits(&self) -> Vec<(Range<usize>, &'static str)> {
        let Some((first, Token::Word(word))) = self.tokens.first() else { return vec![] };
        let whole = *first..first + word.len();
        match (*word, self.tokens.len()) {
            ("generation", 1) => vec![(whole, "with")],
            ("endgeneration", 1) => vec![(whole, "endwith")],
            ("for", _) => self.bare_tuple().map_or(vec![], |(begin, end)| vec![(begin..begin, " ("), (end..end, ") ")]),
            _ => vec![],
        }
    }

    /// Returns the begin and the end of the items of a loop if they are a tuple without brackets.
    fn bare_tuple(&self) -> Option<(usize, usize)> {
        let mut depth = 0i64;
        let mut outer = self.tokens.iter().filter(|(_, token)| {
            if let Token::Symbol(byte) = token {
                depth += i64::from(b"([{".contains(byte)) - i64::from(b")]}".contains(byte));
            }
            depth == 0
        });
        let (at, _) = outer.find(|(_, token)| *token == Token::Word("in"))?;
        let mut has_comma = false;
        let end = outer.find(|(_, token)| {
            has_comma |= *token == Token::Symbol(b',');
            matches!(token, Token::Word("if" | "recursive"))
        });
        has_comma.then(|| (at + "in".len(), end.map_or(self.close, |(at, _)| *at)))
    }

    /// Returns the positions of multiplication signs.
    fn products(&self) -> Vec<usize> {
        let star = Token::Symbol(b'*');
        let is_sign = |(index, (at, token)): &(usize, &(usize, Token<'_>))| {
            let before = index.checked_sub(1).and_then(|before| self.tokens.get(before));
            let behind = self.tokens.get(index + 1);
            // `**` is a power, and `f(*x)` unpacks.
            *token == star
                && before.is_some_and(|(place, token)| {
                    !(matches!(token, Token::Symbol(b'(' | b',')) || *token == star && place + 1 == *at)
                })
                && behind.is_some_and(|(place, token)| !(*token == star && at + 1 == *place))
        };
        self.tokens.iter().enumerate().filter(is_sign).map(|(_, (at, _))| *at).collect()
    }
}

/// Returns the length of the quoted string at the start of `bytes`.
fn length_of_text(bytes: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'\\' => at += 2,
            _ if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_ends_products_loops_and_generation_blocks_are_rewritten() {
        for (source, expected) in [
            ("a\r\nb\rc{{ 'x\r\ny' }}\r\n", "a\nb\nc{{ 'x\ny' }}\n"),
            ("{%- generation -%}x{% endgeneration %}", "{%- with -%}x{% endwith %}"),
            ("{% raw %}\n{{ a * b }}{% endraw %}", "{% raw +%}\n{{ a * b }}{% endraw %}"),
            ("{%- raw %}{{ a * b }}{%- endraw +%}", "{%- raw +%}{{ a * b }}{%- endraw +%}"),
            (
                "{% raw %}{% generation %}{{ a * b }}{{ {% endraw %}",
                "{% raw +%}{% generation %}{{ a * b }}{{ {% endraw %}",
            ),
            ("{% raw %}", "{% raw +%}"),
            ("{% for a, b in 1, [2, 3] -%}", "{% for a, b in ( 1, [2, 3] ) -%}"),
            ("{% for a in x['in'], 3 if a, b recursive %}", "{% for a in ( x['in'], 3 ) if a, b recursive %}"),
            ("{{ a * 2 ** b * '*' }}{{ f(*a, *b) }}", "{{ a *1* 2 ** b *1* '*' }}{{ f(*a, *b) }}"),
        ] {
            assert_eq!(prepared(source).unwrap().replace(ONE, "1"), expected);
        }
        for other in [
            "{{ set }} {{ {'a': {'b': 1}} }} {{ '}}' * }}",
            "{# {% generation %} a * b #}",
            "{%raw-%}{% generation %}{%- endraw +%}",
            "{% generation x %}",
            "{% for a, (b, c) in d['in'].items(1, 2) if (a, b) in e, f recursive %}",
            "{% for %}",
            "{{ 'é' }}é{",
            "{% set ns.a = 'x",
            "{{ (",
            "{# x",
        ] {
            assert_eq!(prepared(other).unwrap(), other);
        }
    }

    #[test]
    fn tokens_are_counted_over_all_tags() {
        let tokens = |count: usize| prepared(&"{{ a.b }}".repeat(count / 3));
        tokens(MAX_TOKENS - 3).unwrap();
        assert!(tokens(MAX_TOKENS + 3).unwrap_err().contains("32768 tokens"));
        let chain = |links: usize| prepared(&format!("{{{{ x{} }}}}", " + 1".repeat(links)));
        chain(MAX_TAG_TOKENS / 2 - 1).unwrap();
        assert!(chain(MAX_TAG_TOKENS / 2).unwrap_err().contains("a tag of the template has more than 4096 tokens"));
        prepared(&"x + 1 ".repeat(MAX_TOKENS)).unwrap();
        assert!(prepared(&"x".repeat(MAX_LENGTH + 1)).unwrap_err().contains("the limit is 1048576 bytes"));
    }
}
