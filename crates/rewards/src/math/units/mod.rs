//! Units at the end of an answer: `3.2 \mathrm{~J}`, `11 m/s`, `5 kilograms`, `36厘米`.
//!
//! A unit is a product of powers of symbols or names. It is reduced to powers of base units and a factor, so that `J/(mol K)` equals
//! `\mathrm{J~mol^{-1}~K^{-1}}`. Values are not converted: 5 kJ and 5000 J are different answers, as are 5 kJ and 5 J.

mod reader;
mod table;

use crate::patterns::regex;
use reader::{Reader, SPACES, is_currency, is_word};
use table::{AMBIGUOUS, NONE, Powers, named};

/// The maximum length in bytes of a unit.
const MAX_LENGTH: usize = 160;

/// A unit of measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    factor: f64,
    powers: Powers,
    /// `false` for one letter outside of `\text{}`, which may be a variable.
    pub(super) is_certain: bool,
}

impl Unit {
    const ONE: Self = Self { factor: 1.0, powers: NONE, is_certain: false };

    pub(super) fn is_same(&self, other: &Self) -> bool {
        let means = |unit: &Self, name: &str| named(name, true).is_some_and(|named| unit.equals(&named));
        self.equals(other)
            || AMBIGUOUS.iter().any(|(a, b)| means(self, a) && means(other, b) || means(self, b) && means(other, a))
    }

    fn equals(&self, other: &Self) -> bool {
        self.powers == other.powers && (self.factor / other.factor - 1.0).abs() < 1e-6
    }

    /// Returns `true` for an amount of a currency.
    fn is_currency(&self) -> bool {
        named("$", true).is_some_and(|dollar| self.powers == dollar.powers)
    }

    fn times(self, other: Self, power: i32) -> Self {
        Self {
            factor: self.factor * other.factor.powi(power),
            powers: std::array::from_fn(|i| self.powers[i].saturating_add(other.powers[i].saturating_mul(power))),
            is_certain: self.is_certain || other.is_certain,
        }
    }
}

/// Splits an answer into its value and its unit: a unit at its end, a currency before it, or both. The sign of a currency before it
/// remains in the value. `None` if it has no unit, or the letters may be variables: `2m`, `x + 3 m`.
pub(super) fn split(text: &str) -> Option<(&str, Unit)> {
    let text = text.trim();
    if let Some(arc) = arc(text) {
        return Some(arc);
    }
    match (split_end(text), currency_before(text)) {
        (Some((value, unit)), Some(currency)) => Some((value, currency.times(unit, 1))),
        (None, Some(currency)) => Some((text, currency)),
        (end, None) => end,
    }
}

/// Splits minutes or seconds of arc, which may also be feet and inches: `30'`, `x = 30^{\prime\prime}`. In `5^\circ 30'` the stroke is part of
/// the value.
fn arc(text: &str) -> Option<(&str, Unit)> {
    regex!(
        ARC,
        r#"^((?:[A-Za-z]\s*=)?\s*[-−]?\d+(?:\.\d+)?)\s*(?:(''|"|″|”|\^\s*\{\s*\\prime\s*\\prime\s*\})|(?:'|’|′|\^\s*(?:\\prime|\{\s*\\prime\s*\})))$"#
    );
    let found = ARC.captures(text)?;
    let symbol = if found.get(2).is_some() { "arcsec" } else { "arcmin" };
    Some((found.get(1)?.as_str(), named(symbol, true)?))
}

/// Returns the currency before a number: `$5`, `x = -€5`, `US$ 5`, `EUR 5`, `Rs. 5`.
fn currency_before(text: &str) -> Option<Unit> {
    regex!(
        BEFORE,
        r"^(?:[^=]*=)?\s*[-−+]?\s*(?:\\text\s*\{\s*)?(US|R|HK|NT|AU?|CA?|S)?(\p{Sc}|\\(?:\$|[[:alpha:]]+)|[A-Z]{3}\b|Rs\b\.?)(?:\s|~|\\ |\\,|\})*[-−]?\s*\.?\d"
    );
    let found = BEFORE.captures(text)?;
    let (country, sign) = (found.get(1), found.get(2)?);
    if let Some(country) = country.filter(|_| ["$", "\\$"].contains(&sign.as_str())) {
        return named(&format!("{}$", country.as_str()), true);
    }
    let mut reader = Reader { text: sign.as_str(), is_text: true };
    let (unit, _, factors) = reader.product()?;
    (factors == 1 && reader.text.is_empty() && unit.is_currency()).then_some(unit)
}

fn split_end(text: &str) -> Option<(&str, Unit)> {
    let mut from = text.len().saturating_sub(MAX_LENGTH);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    let mut previous = text[..from].chars().next_back();
    for (at, c) in text[from..].char_indices().map(|(i, c)| (from + i, c)) {
        let is_inside =
            previous.is_some_and(|p| p == '\\' || is_word(p) && is_word(c) || p.is_ascii_digit() && c.is_ascii_digit());
        let is_sign = ["\\cdot", "\\times"].iter().any(|sign| text[at..].starts_with(sign));
        let begins = (is_word(c) || is_currency(c) || "\\{([1/^°º˚".contains(c)) && !is_sign;
        previous = Some(c);
        if is_inside || !begins {
            continue;
        }
        let value = without_separators(&text[..at]);
        let is_apart = value.len() < at;
        let (power, start) = power_of_ten(&text[at..], is_apart && value.ends_with(|c: char| c.is_ascii_digit()));
        let mut reader = Reader { text: &text[at + start..], is_text: false };
        let Some((unit, _, factors)) = reader.product() else { continue };
        let is_fraction = c == '/' && !unit.is_certain;
        if is_fraction || !reader.text.is_empty() || !is_value(value, &unit, factors, is_apart) {
            continue;
        }
        return Some((value, Unit { factor: unit.factor * power, ..unit }));
    }
    None
}

/// Returns the length of the unit at the beginning of a text after a number, with the spaces before it; 0 if there is none.
pub(crate) fn length(text: &str) -> usize {
    let mut window = text.len().min(MAX_LENGTH);
    while !text.is_char_boundary(window) {
        window -= 1;
    }
    let mut reader = Reader { text: &text[..window], is_text: false };
    reader.separators();
    let is_apart = reader.text.len() < window;
    match reader.product() {
        Some((unit, _, factors)) if unit.is_certain || !text.starts_with('/') && (factors > 1 || is_apart) => {
            window - reader.text.len()
        }
        _ => 0,
    }
}

/// Reads `10^{-19}` before a unit without a sign of multiplication, as in tables. Returns the power and its length.
fn power_of_ten(text: &str, is_apart: bool) -> (f64, usize) {
    let mut reader = Reader { text, is_text: false };
    let power = is_apart.then(|| {
        reader.text = reader.text.strip_prefix("10")?;
        reader.exponent()
    });
    match power.flatten() {
        Some(power) => {
            reader.separators();
            (10f64.powi(power.clamp(-300, 300)), text.len() - reader.text.len())
        }
        None => (1.0, 0),
    }
}

/// Returns `true` if the text before a unit can be its value.
fn is_value(value: &str, unit: &Unit, factors: usize, is_apart: bool) -> bool {
    if value.is_empty()
        || value.ends_with(['+', '-', '*', '/', '^', '_', '=', '<', '>', '\\', ',', ';', ':', '(', '{', '[', '−'])
    {
        return false;
    }
    if unit.is_certain && factors > 0 && !value.ends_with(|c: char| c.is_ascii_digit()) {
        return value.contains(|c: char| c.is_ascii_digit());
    }
    // Letters outside of `\text{}` are a unit only after a number, and a single letter only after a space.
    let last = value.rsplit(['=', '≈']).next().unwrap_or(value);
    crate::patterns::regex!(OTHER, r"\\[[:alpha:]]+|[\d.][eExX]\s*[-+]?\d");
    let has_letters = OTHER.replace_all(last, " ").contains(|c: char| c.is_alphabetic());
    let is_number = last.contains(|c: char| c.is_ascii_digit()) && !has_letters;
    if unit.is_certain { is_number || is_apart } else { is_number && (factors > 1 || is_apart) }
}

fn without_separators(mut text: &str) -> &str {
    while let Some(rest) = SPACES.iter().rev().find_map(|space| text.strip_suffix(space)) {
        // `trim` shortens `\ ` to a backslash.
        text = rest;
    }
    text
}
