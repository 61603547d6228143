//! Rust sources as tokens. A package that parses them is also a dependency of procedural macros: cargo would build all of these again for tests.

use std::iter::Peekable;
use std::str::Chars;

/// A token of a source. Comments, literals and lifetimes are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    /// An identifier or a keyword.
    Word(String),
    Mark(char),
    /// The opening bracket, and the tokens between the brackets.
    Group(char, Vec<Token>),
}

impl Token {
    /// Returns `true` for the words of an attribute `#[cfg(test)]`.
    pub(crate) fn is_cfg_test(attribute: &[Token]) -> bool {
        let [Token::Word(cfg), Token::Group('(', words)] = attribute else { return false };
        cfg == "cfg" && matches!(&words[..], [Token::Word(test)] if test == "test")
    }
}

/// Returns the tokens of a source.
pub(crate) fn tokens(source: &str) -> Vec<Token> {
    group(&mut source.chars().peekable())
}

/// Returns the tokens up to a closing bracket or the end.
fn group(rest: &mut Peekable<Chars<'_>>) -> Vec<Token> {
    let mut tokens = Vec::new();
    while let Some(c) = rest.next() {
        match c {
            '/' if rest.peek() == Some(&'/') => {
                let _end = rest.find(|c| *c == '\n');
            }
            '/' if rest.peek() == Some(&'*') => skip_comment(rest),
            '"' => skip_string(rest),
            '\'' => skip_quote(rest),
            '(' | '[' | '{' => tokens.push(Token::Group(c, group(rest))),
            ')' | ']' | '}' => return tokens,
            _ if c.is_whitespace() => {}
            _ if c.is_ascii_digit() => while rest.next_if(|c| c.is_alphanumeric() || *c == '_').is_some() {},
            _ if c.is_alphabetic() || c == '_' => {
                let mut word = String::from(c);
                while let Some(c) = rest.next_if(|c| c.is_alphanumeric() || *c == '_') {
                    word.push(c);
                }
                match rest.peek() {
                    Some('"') if ["b", "c"].contains(&&*word) => {}
                    Some('\'') if word == "b" => {}
                    Some('"' | '#') if ["r", "br", "cr"].contains(&&*word) => skip_raw_string(rest),
                    _ => tokens.push(Token::Word(word)),
                }
            }
            _ => tokens.push(Token::Mark(c)),
        }
    }
    tokens
}

/// Skips the rest of a comment, which may contain others.
fn skip_comment(rest: &mut Peekable<Chars<'_>>) {
    let mut depth = 1;
    rest.next();
    while depth > 0 {
        match (rest.next(), rest.peek()) {
            (Some('*'), Some('/')) => depth -= 1,
            (Some('/'), Some('*')) => depth += 1,
            (Some(_), _) => continue,
            (None, _) => return,
        }
        rest.next();
    }
}

fn skip_string(rest: &mut Peekable<Chars<'_>>) {
    while let Some(c) = rest.next().filter(|c| *c != '"') {
        if c == '\\' {
            rest.next();
        }
    }
}

/// Skips a string like `#"text"#`. A raw identifier like `#type` loses its mark only.
fn skip_raw_string(rest: &mut Peekable<Chars<'_>>) {
    let mut marks = 0;
    while rest.next_if_eq(&'#').is_some() {
        marks += 1;
    }
    if rest.next_if_eq(&'"').is_none() {
        return;
    }
    while rest.any(|c| c == '"') && !(0..marks).all(|_| rest.next_if_eq(&'#').is_some()) {}
}

/// Skips the rest of a character or of a lifetime.
fn skip_quote(rest: &mut Peekable<Chars<'_>>) {
    let first = rest.next();
    if first == Some('\\') {
        rest.next();
        let _closing = rest.find(|c| *c == '\'');
    } else if rest.next_if_eq(&'\'').is_none() {
        // A lifetime.
        while rest.next_if(|c| c.is_alphanumeric() || *c == '_').is_some() {}
    }
}

#[test]
fn comments_literals_and_lifetimes_are_no_tokens() {
    let words = |source| {
        let words = tokens(source).into_iter().filter_map(|token| match token {
            Token::Word(word) => Some(word),
            _ => None,
        });
        words.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(words("a // b\nc /* d /* e */ f */ g"), "a c g");
    assert_eq!(words(r##"a "b \" c" d r#"e " f"# g b"h" i r"\" j"##), "a d g i j");
    assert_eq!(words(r"a 'b' c '\'' d '\u{41}' e &'f g 'static h 1e5 2u8 b'i' j r#type"), "a c d e g h j type");
    assert_eq!(
        tokens("a::b[c;{d}]")[3..],
        [
            Token::Word("b".into()),
            Token::Group(
                '[',
                vec![Token::Word("c".into()), Token::Mark(';'), Token::Group('{', vec![Token::Word("d".into())])]
            )
        ]
    );
}
