//! Preprocesses a template before it is compiled: counts the tokens of its tags, and rewrites three kinds of tags.
//!
//! `{% generation %}` and `{% endgeneration %}`, which mark an assistant's text for `transformers`, become blocks without effect.
//! `{% set ns.name = VALUE %}` becomes `{% set ns.name = (VALUE)|settled %}`: the filter prevents namespaces from containing themselves,
//! which would crash minijinja (`values::settled`). `a * b` becomes `a *one* b`, so that no product is a constant: minijinja evaluates
//! constants during compilation, without steps and limits.

use super::limits::{MAX_LENGTH, MAX_TOKENS, WAY_OUT};

/// The name of the filter for values of a namespace, which no template uses by chance.
pub(super) const SETTLED: &str = "__grpo_settled";
/// The name of the number 1.
pub(super) const ONE: &str = "__grpo_one";

/// Returns the template for minijinja, with unchanged line numbers; the error names the exceeded limit.
///
/// An invalid template is not changed, so that the parser reports the error.
pub(super) fn prepared(source: &str) -> Result<String, String> {
    if source.len() > MAX_LENGTH {
        return Err(format!("the template has {} bytes, and the limit is {MAX_LENGTH} bytes; {WAY_OUT}", source.len()));
    }
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut count) = (source, 0);
    while let Some((start, kind)) = next_tag(rest) {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let end = match kind {
            b'#' => rest.find("#}").map(|end| end + 2),
            b'%' if raw_tag(&rest[2..], "raw", false).is_some() => end_of_raw(rest),
            _ => {
                let tag = Tag::read(rest, if kind == b'%' { "%}" } else { "}}" });
                let products = tag.products();
                count += tag.tokens.len() + 2 * products.len();
                if count > MAX_TOKENS {
                    return Err(format!(
                        "the tags of the template have more than {MAX_TOKENS} tokens, which is the limit; {WAY_OUT}"
                    ));
                }
                let mut text = rest[..tag.end].to_owned();
                for at in products.into_iter().rev() {
                    text.replace_range(at..=at, &format!("*{ONE}*"));
                }
                if kind == b'%' {
                    text = Tag::read(&text, "%}").rewritten().unwrap_or(text);
                }
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

/// Returns the end of the raw block at the start of `text`.
fn end_of_raw(text: &str) -> Option<usize> {
    let mut at = 2;
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
    text: &'a str,
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
                    return Self { text, tokens, close: at, end: at + control + close.len() };
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
        Self { text, tokens, close: text.len(), end: text.len() }
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
                    !matches!(token, Token::Symbol(b'(' | b',')) && !(*token == star && place + 1 == *at)
                })
                && behind.is_some_and(|(place, token)| !(*token == star && at + 1 == *place))
        };
        self.tokens.iter().enumerate().filter(is_sign).map(|(_, (at, _))| *at).collect()
    }

    /// Returns the tag to compile, if it differs.
    fn rewritten(&self) -> Option<String> {
        let (first, Token::Word(word)) = self.tokens.first()? else { return None };
        let is_alone = self.tokens.len() == 1;
        let other = match *word {
            "generation" if is_alone => "with",
            "endgeneration" if is_alone => "endwith",
            "set" => return self.settled(),
            _ => return None,
        };
        Some(format!("{}{other}{}", &self.text[..*first], &self.text[first + word.len()..self.end]))
    }

    /// Returns the assignment with the filter around its value, if it assigns to an attribute.
    fn settled(&self) -> Option<String> {
        let ends_target = |(_, token): &&(usize, Token<'_>)| matches!(token, Token::Symbol(b'=' | b'|'));
        let target = self.tokens.iter().take_while(|token| !ends_target(token)).count();
        let has_attribute = self.tokens[..target].iter().any(|(_, token)| *token == Token::Symbol(b'.'));
        let (at, sign) = self.tokens.get(target).filter(|_| has_attribute)?;
        let (value, close) = (&self.text[at + 1..self.close], &self.text[self.close..self.end]);
        let head = &self.text[..=*at];
        Some(match sign {
            Token::Symbol(b'=') => format!("{head} ({value})|{SETTLED} {close}"),
            // A block whose text is filtered.
            _ => format!("{head}{value}|{SETTLED} {close}"),
        })
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
    fn assignments_to_attributes_and_generation_tags_are_rewritten() {
        let settled = |text: &str| prepared(text).unwrap().replace(SETTLED, "S");
        for (source, expected) in [
            ("{% set ns.a = b %}", "{% set ns.a = ( b )|S %}"),
            ("{%- set ns.a = 1, '%}' -%}x", "{%- set ns.a = ( 1, '%}' )|S -%}x"),
            ("{% set ns.a, b = (1, {'a': 2}) %}", "{% set ns.a, b = ( (1, {'a': 2}) )|S %}"),
            ("{% set ns.a|upper %}x{% endset %}", "{% set ns.a|upper |S %}x{% endset %}"),
            ("{%- generation -%}x{% endgeneration %}", "{%- with -%}x{% endwith %}"),
            ("{% set ns.a =\n b\n%}", "{% set ns.a = (\n b\n)|S %}"),
        ] {
            assert_eq!(settled(source), expected);
            assert_eq!(source.lines().count(), expected.lines().count());
        }
        for other in [
            "{% set a = b.c == d %}",
            "{% set ns.a %}x{% endset %}",
            "{% if a.b == c %}",
            "{{ set }} {{ {'a': {'b': 1}} }} {{ '}}' }}",
            "{# {% set ns.a = b %} #}",
            "{% raw %}{% set ns.a = b %}{{ {% endraw %}",
            "{%raw-%}{% generation %}{%- endraw +%}",
            "{% generation x %}",
            "{{ 'é' }}é{",
            "{% set ns.a = 'x",
            "{{ (",
            "{# x",
            "{% raw %}",
        ] {
            let found = settled(other);
            assert!(found == other || other.ends_with("'x"), "{other} became {found}");
        }
    }

    #[test]
    fn tokens_are_counted_over_all_tags() {
        let tokens = |count: usize| prepared(&"{{ a.b }}".repeat(count / 3));
        tokens(MAX_TOKENS - 3).unwrap();
        assert!(tokens(MAX_TOKENS + 3).unwrap_err().contains("32768 tokens"));
        prepared(&"x + 1 ".repeat(MAX_TOKENS)).unwrap();
        assert!(prepared(&"x".repeat(MAX_LENGTH + 1)).unwrap_err().contains("the limit is 1048576 bytes"));
    }
}
