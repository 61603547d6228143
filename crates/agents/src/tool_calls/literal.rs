//! Python literals.

use super::DEEPEST;
use grpo_files::long_integer;
use serde_json::{Map, Number, Value};

/// Returns the value of a text that is a Python literal.
pub(super) fn literal(text: &str) -> Option<Value> {
    let mut reader = Reader { text, at: 0 };
    let value = reader.value(0).ok()?;
    reader.skip_space();
    reader.rest().is_empty().then_some(value)
}

/// Reads literals and the marks between them.
pub(super) struct Reader<'a> {
    pub(super) text: &'a str,
    /// The number of bytes that were read.
    pub(super) at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    pub(super) fn skip_space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    /// Takes `next` behind white space, if it is there.
    pub(super) fn take(&mut self, next: char) -> bool {
        self.skip_space();
        let is_next = self.rest().starts_with(next);
        self.at += if is_next { next.len_utf8() } else { 0 };
        is_next
    }

    pub(super) fn expect(&mut self, next: char) -> Result<(), String> {
        if self.take(next) { Ok(()) } else { Err(self.unexpected(&format!("`{next}`"))) }
    }

    pub(super) fn unexpected(&self, expected: &str) -> String {
        let found: String = self.rest().chars().take(20).collect();
        format!("expected {expected} in the tool call, got `{found}`")
    }

    pub(super) fn name(&mut self) -> Option<&'a str> {
        self.skip_space();
        let rest = self.rest();
        let legal = |c: char| c.is_ascii_alphanumeric() || "_.".contains(c);
        let length = rest.find(|c| !legal(c)).unwrap_or(rest.len());
        let name = &rest[..length];
        let begins = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        self.at += if begins { length } else { 0 };
        begins.then_some(name)
    }

    pub(super) fn value(&mut self, depth: usize) -> Result<Value, String> {
        if depth > DEEPEST {
            return Err(format!("expected at most {DEEPEST} nested values in the tool call"));
        }
        self.skip_space();
        match self.rest().chars().next() {
            Some(quote @ ('"' | '\'')) => self.text_in(quote).map(Value::from),
            Some('[') => {
                self.at += 1;
                let mut list = Vec::new();
                while !self.take(']') {
                    list.push(self.value(depth + 1)?);
                    if !self.take(',') {
                        self.expect(']')?;
                        break;
                    }
                }
                Ok(list.into())
            }
            Some('{') => {
                self.at += 1;
                let mut fields = Map::new();
                while !self.take('}') {
                    let Value::String(key) = self.value(depth + 1)? else {
                        return Err(self.unexpected("keys that are texts"));
                    };
                    self.expect(':')?;
                    let value = self.value(depth + 1)?;
                    fields.insert(key, value);
                    if !self.take(',') {
                        self.expect('}')?;
                        break;
                    }
                }
                Ok(fields.into())
            }
            Some(first) if first.is_ascii_digit() || "+-.".contains(first) => self.number(),
            _ => match self.name() {
                Some("True" | "true") => Ok(true.into()),
                Some("False" | "false") => Ok(false.into()),
                Some("None" | "null") => Ok(Value::Null),
                _ => Err(self.unexpected("a literal")),
            },
        }
    }

    fn number(&mut self) -> Result<Value, String> {
        let rest = self.rest();
        let length = rest.find(|c: char| !(c.is_ascii_digit() || "+-.eE_".contains(c))).unwrap_or(rest.len());
        let digits = rest[..length].replace('_', "");
        let digits = digits.strip_prefix('+').unwrap_or(&digits);
        let float = || digits.parse().ok().and_then(Number::from_f64).map(Value::from);
        let number = long_integer(digits).or_else(float);
        let number = number.ok_or_else(|| self.unexpected("a number"))?;
        self.at += length;
        Ok(number)
    }

    /// Returns `true` if what follows `length` bytes can follow a text.
    fn closes(&self, length: usize) -> bool {
        let next = self.rest()[length..].trim_start().chars().next();
        next.is_none_or(|next| ",)]}:".contains(next))
    }

    fn text_in(&mut self, quote: char) -> Result<String, String> {
        let (mut text, mut chars) = (String::new(), self.rest().char_indices().skip(1));
        while let Some((at, c)) = chars.next() {
            match c {
                // LFM2's template writes quotes within texts without a backslash.
                _ if c == quote && self.closes(at + c.len_utf8()) => {
                    self.at += at + c.len_utf8();
                    return Ok(text);
                }
                '\\' => match chars.next() {
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, 't')) => text.push('\t'),
                    Some((_, 'r')) => text.push('\r'),
                    Some((_, '\n')) => {}
                    Some((_, kind @ ('x' | 'u' | 'U'))) => {
                        let count = match kind {
                            'x' => 2,
                            'u' => 4,
                            _ => 8,
                        };
                        let digits: String = chars.by_ref().take(count).map(|(_, c)| c).collect();
                        let code = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == count);
                        let Some(c) = code.and_then(char::from_u32) else {
                            return Err(
                                self.unexpected(&format!("{count} hexadecimal digits of a character behind \\{kind}"))
                            );
                        };
                        text.push(c);
                    }
                    Some((_, c @ ('\\' | '\'' | '"'))) => text.push(c),
                    Some((_, c)) => text.extend(['\\', c]),
                    None => break,
                },
                c => text.push(c),
            }
        }
        Err(self.unexpected(&format!("a text that ends with {quote}")))
    }
}
