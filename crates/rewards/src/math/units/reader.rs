//! Reads products of units.

use super::Unit;
use super::table::{PREFIXES, named};
use regex::Regex;
use std::sync::LazyLock;

pub(super) const SPACES: &[&str] =
    &[" ", "\t", "\n", "\u{a0}", "\u{202f}", "~", "\\ ", "\\,", "\\;", "\\:", "\\!", "\\>", "\\quad", "\\qquad", "{}"];

pub(super) fn is_word(c: char) -> bool {
    c.is_alphabetic() || c == 'µ'
}

/// Returns `true` for the sign of a currency, such as `€`.
pub(super) fn is_currency(c: char) -> bool {
    "$¢€£¥₹₩₽₱₺₪฿₫₿₦₴৳".contains(c)
}

/// Forms of a unit that are not a product of symbols, and the symbol.
static SPELLED: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    const DEGREE: &str =
        r"(?:\s*\^\s*\{?\s*(?:\\circ|\\degree|o|\\text\s*\{o\})\s*\}?|°|º|˚|\\degree\b|\bdeg(?:rees?)?\b)";
    const SPACE: &str = r"(?:\s|~|\\ |\\,)*";
    let letter = |letter: &str| {
        format!(r"(?:\\(?:text|mathrm|rm|textrm)\s*\{{\s*~?{letter}\s*\}}|\{{\s*\\rm\s+{letter}\s*\}}|{letter})")
    };
    let scale = |symbol: &str, name: &str| {
        format!("{DEGREE}{SPACE}(?:{}|(?i:{name})|\\\\text\\s*\\{{\\s*(?i:{name})\\s*\\}})(?:\\b|$)", letter(symbol))
    };
    let star = |symbol: &str, sign: &str| format!(r"{}\s*_\s*(?:\{{\s*{sign}\s*\}}|{sign})", letter(symbol));
    let (sun, earth) = (r"(?:\\odot|☉|⊙|\\text\s*\{sun\}|sun)", r"(?:\\oplus|⊕|\\text\s*\{earth\})");
    let patterns = [
        (scale("C", "celsius"), "°C"),
        (scale("F", "fahrenheit"), "°F"),
        (DEGREE.to_owned(), "°"),
        (format!(r"(?:\\mathring|\\(?:stackrel|overset)\s*\{{\s*\\circ\s*\}})\s*\{{\s*{}\s*\}}", letter("A")), "Å"),
        (star("M", sun), "M☉"),
        (star("R", sun), "R☉"),
        (star("L", sun), "L☉"),
        (star("M", earth), "M⊕"),
        (star("R", earth), "R⊕"),
        (r"(?i:arc[- ]minutes?|minutes?(?:\s|~)+of(?:\s|~)+arc)\b".to_owned(), "arcmin"),
        (r"(?i:arc[- ]seconds?|seconds?(?:\s|~)+of(?:\s|~)+arc)\b".to_owned(), "arcsec"),
        (r"light[- ]?years?\b".to_owned(), "ly"),
        (r"\\(?:pounds|textsterling)\b".to_owned(), "£"),
        (r"\\(?:euro|texteuro)\b".to_owned(), "€"),
        (r"\\(?:yen|textyen)\b".to_owned(), "¥"),
        (r"\\(?:\$|textdollar\b)".to_owned(), "$"),
        (r"\\(?:cent|textcent)\b".to_owned(), "¢"),
        (r"\bRs\.".to_owned(), "Rs"),
    ];
    let compile = |(pattern, symbol): (String, _)| {
        (Regex::new(&format!("^(?:{pattern})")).expect("the pattern is a constant"), symbol)
    };
    patterns.map(compile).into()
});

pub(super) struct Reader<'a> {
    pub(super) text: &'a str,
    /// `true` inside of `\text{}` and `\mathrm{}`.
    pub(super) is_text: bool,
}

impl<'a> Reader<'a> {
    fn take(&mut self, part: &str) -> bool {
        let rest = self.text.strip_prefix(part);
        self.text = rest.unwrap_or(self.text);
        rest.is_some()
    }

    fn word(&mut self) -> &'a str {
        let end = self.text.find(|c| !is_word(c)).unwrap_or(self.text.len());
        let (word, rest) = self.text.split_at(end);
        self.text = rest;
        word
    }

    /// Skips spaces and signs of multiplication. Returns `true` if a sign of division is among them.
    pub(super) fn separators(&mut self) -> bool {
        const SIGNS: &[&str] = &["\\cdot", "\\times", "\\left", "\\right", "*", "·", "⋅", "-", "−"];
        let mut divides = false;
        loop {
            let slash = self.take("/") || self.take("每") || self.take("per ");
            divides |= slash;
            if !slash && !SPACES.iter().chain(SIGNS).any(|part| self.take(part)) {
                return divides;
            }
        }
    }

    /// Reads factors until something else. Returns the product, the last factor, and the number of factors.
    pub(super) fn product(&mut self) -> Option<(Unit, Unit, usize)> {
        let (mut product, mut last, mut factors, mut sign) = (Unit::ONE, Unit::ONE, 0, 1);
        loop {
            let before = self.text;
            // `J/mol K` is divided by both.
            if self.separators() {
                sign = -1;
            }
            let factor = match self.factor() {
                // The speed of light, `MeV/c^2`.
                None if sign == -1 && factors > 0 && self.take("c") => {
                    let light = Unit { factor: 299_792_458.0, ..named("m", true)?.times(named("s", true)?, -1) };
                    Some(Unit::ONE.times(light, self.exponent().unwrap_or(1)))
                }
                factor => factor,
            };
            let Some(factor) = factor else {
                let is_end = self.text.is_empty() && sign == 1;
                self.text = if is_end { self.text } else { before };
                return (factors > 0).then_some((product, last, factors));
            };
            last = Unit::ONE.times(factor, sign);
            product = product.times(last, 1);
            factors += 1;
        }
    }

    fn factor(&mut self) -> Option<Unit> {
        let start = self.text;
        let unit = self.base().and_then(|(unit, last)| {
            let power = self.exponent().unwrap_or(1);
            let before = self.text;
            self.separators();
            let word = if self.take("squared") {
                2
            } else if self.take("cubed") {
                3
            } else {
                self.text = before;
                1
            };
            // The exponent of `\text{m s}^{-1}` belongs to the seconds.
            Some(unit.times(last, power.checked_mul(word)?.checked_sub(1)?))
        });
        if unit.is_none() {
            self.text = start;
        }
        unit
    }

    /// Reads a unit without its exponent. Returns the unit, and the part of it to which an exponent belongs.
    fn base(&mut self) -> Option<(Unit, Unit)> {
        let whole = |unit: Unit| (unit, unit);
        if let Some((length, symbol)) =
            SPELLED.iter().find_map(|(form, symbol)| Some((form.find(self.text)?.end(), symbol)))
        {
            self.text = &self.text[length..];
            return named(symbol, true).map(whole);
        }
        if let Some(sign) = self.text.chars().next().filter(|c| is_currency(*c)) {
            self.text = &self.text[sign.len_utf8()..];
            return named(sign.encode_utf8(&mut [0; 4]), true).map(whole);
        }
        for (open, close) in [('{', '}'), ('(', ')'), ('[', ']')] {
            if self.text.starts_with(open) {
                let (unit, last) = self.group(open, close, self.is_text || open == '{')?;
                return Some((unit, if open == '{' { last } else { unit }));
            }
        }
        if self.take("\\") {
            let name = self.word();
            self.take("*");
            return match name {
                "text" | "mathrm" | "textrm" | "textnormal" | "operatorname" | "mathit" | "mathsf" | "mbox" | "rm"
                | "textup" | "mathbf" | "unit" => {
                    while self.take(" ") {}
                    let group = self.text;
                    self.group('{', '}', true).or_else(|| {
                        // `\mathrm{k}\Omega`
                        let (inside, rest) = group.strip_prefix('{')?.split_once('}')?;
                        let (_, factor) = PREFIXES.iter().find(|(prefix, _)| *prefix == inside.trim())?;
                        self.text = rest;
                        self.prefixed(*factor)
                    })
                }
                "frac" | "dfrac" | "tfrac" => {
                    let (above, _) = self.group('{', '}', self.is_text)?;
                    let (below, _) = self.group('{', '}', self.is_text)?;
                    Some(whole(above.times(below, -1)))
                }
                "mu" => self.prefixed(1e-6),
                "Omega" => named("ohm", true).map(whole),
                "AA" => named("Å", true).map(whole),
                _ => None,
            };
        }
        for (name, power) in [
            ("square ", 2),
            ("square-", 2),
            ("cubic ", 3),
            ("sq. ", 2),
            ("sq ", 2),
            ("cu. ", 3),
            ("cu ", 3),
            ("平方", 2),
            ("立方", 3),
        ] {
            if self.take(name) {
                return Some(whole(Unit::ONE.times(self.base()?.0, power)));
            }
        }
        for (name, unit) in
            [("a.m.", "am"), ("p.m.", "pm"), ("A.M.", "am"), ("P.M.", "pm"), ("a.m", "am"), ("p.m", "pm")]
        {
            if self.take(name) {
                return named(unit, true).map(whole);
            }
        }
        named(self.word(), self.is_text).map(whole)
    }

    /// Reads the unit behind a prefix.
    fn prefixed(&mut self, factor: f64) -> Option<(Unit, Unit)> {
        self.separators();
        let is_text = std::mem::replace(&mut self.is_text, true);
        let found = self.base();
        self.is_text = is_text;
        let (unit, _) = found?;
        let unit = Unit { factor: unit.factor * factor, is_certain: true, ..unit };
        Some((unit, unit))
    }

    /// Reads all of a group in brackets. Returns the product, and its last factor.
    fn group(&mut self, open: char, close: char, is_text: bool) -> Option<(Unit, Unit)> {
        let mut depth = 0usize;
        for (i, c) in self.text.char_indices() {
            if c == open {
                depth += 1;
            } else if c == close && depth <= 1 {
                let mut inside = Reader { text: self.text.get(open.len_utf8()..i)?, is_text };
                self.text = &self.text[i + close.len_utf8()..];
                let (unit, last, _) = inside.product()?;
                inside.separators();
                return inside.text.trim_matches('.').is_empty().then_some((unit, last));
            } else if c == close {
                depth -= 1;
            } else if depth == 0 {
                return None;
            }
        }
        None
    }

    /// Reads an exponent: `^2`, `^{-1}`, `²`, and `2` inside of `\text{}`.
    pub(super) fn exponent(&mut self) -> Option<i32> {
        const SUPERSCRIPTS: &str = "⁰¹²³⁴⁵⁶⁷⁸⁹";
        let start = self.text;
        let superscript = |c: char| SUPERSCRIPTS.chars().position(|other| other == c);
        let end = self.text.find(|c| superscript(c).is_none() && c != '⁻').unwrap_or(self.text.len());
        if end > 0 {
            let digits = |c: char| superscript(c).map_or("-".to_owned(), |digit| digit.to_string());
            let number: String = self.text[..end].chars().map(digits).collect();
            self.text = &self.text[end..];
            return number.parse().ok();
        }
        let inside = self.text.trim_start().strip_prefix('^').map(str::trim_start);
        let inside = inside.or(if self.is_text { Some(self.text) } else { None })?;
        let (digits, close) = match inside.strip_prefix('{') {
            Some(rest) => (rest.trim_start(), "}"),
            None => (inside, ""),
        };
        let end = digits.char_indices().find(|(i, c)| !(c.is_ascii_digit() || *i == 0 && "-−".contains(*c)));
        let end = end.map_or(digits.len(), |(i, _)| i);
        let power = digits[..end].replace('−', "-").parse().ok();
        let rest = digits[end..].trim_start_matches(|c: char| c == ' ' && !close.is_empty()).strip_prefix(close);
        self.text = match (power, rest) {
            (Some(_), Some(rest)) => rest,
            _ => start,
        };
        power.filter(|_| rest.is_some())
    }
}
