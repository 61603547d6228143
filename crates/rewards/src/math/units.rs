//! Units at the end of an answer: `3.2 \mathrm{~J}`, `11 m/s`, `5 kilograms`, `36厘米`.
//!
//! A unit is a product of powers of symbols or names. It is reduced to powers of base units and a factor, so that `J/(mol K)` equals
//! `\mathrm{J~mol^{-1}~K^{-1}}`. Values are not converted: 5 kJ and 5000 J are different answers, as are 5 kJ and 5 J.

/// Exponents of base units: m, kg, s, A, K, mol, cd, rad, and halves of the day.
type Powers = [i32; 9];

const NONE: Powers = [0; 9];
const LENGTH: Powers = [1, 0, 0, 0, 0, 0, 0, 0, 0];
const MASS: Powers = [0, 1, 0, 0, 0, 0, 0, 0, 0];
const TIME: Powers = [0, 0, 1, 0, 0, 0, 0, 0, 0];
const VOLUME: Powers = [3, 0, 0, 0, 0, 0, 0, 0, 0];
const FORCE: Powers = [1, 1, -2, 0, 0, 0, 0, 0, 0];
const PRESSURE: Powers = [-1, 1, -2, 0, 0, 0, 0, 0, 0];
const ENERGY: Powers = [2, 1, -2, 0, 0, 0, 0, 0, 0];
const SPEED: Powers = [1, 0, -1, 0, 0, 0, 0, 0, 0];
const HALF_DAY: Powers = [0, 0, 0, 0, 0, 0, 0, 0, 1];

/// Symbols and names, separated by spaces, with the factor and base units. Names that begin with a capital letter here are symbols: their
/// case counts.
#[rustfmt::skip]
const UNITS: &[(&str, f64, Powers)] = &[
    ("m meter metre 米", 1.0, LENGTH),
    ("g gram gramme 克", 1e-3, MASS),
    ("s sec second 秒", 1.0, TIME),
    ("A ampere amp", 1.0, [0, 0, 0, 1, 0, 0, 0, 0, 0]),
    ("K kelvin", 1.0, [0, 0, 0, 0, 1, 0, 0, 0, 0]),
    ("mol mole", 1.0, [0, 0, 0, 0, 0, 1, 0, 0, 0]),
    ("rad radian", 1.0, [0, 0, 0, 0, 0, 0, 0, 1, 0]),
    ("Hz hertz", 1.0, [0, 0, -1, 0, 0, 0, 0, 0, 0]),
    ("N newton 牛", 1.0, FORCE),
    ("Pa pascal", 1.0, PRESSURE),
    ("J joule", 1.0, ENERGY),
    ("W watt", 1.0, [2, 1, -3, 0, 0, 0, 0, 0, 0]),
    ("C coulomb", 1.0, [0, 0, 1, 1, 0, 0, 0, 0, 0]),
    ("V volt", 1.0, [2, 1, -3, -1, 0, 0, 0, 0, 0]),
    ("F farad", 1.0, [-2, -1, 4, 2, 0, 0, 0, 0, 0]),
    ("Ω Ω ohm", 1.0, [2, 1, -3, -2, 0, 0, 0, 0, 0]),
    ("S siemens", 1.0, [-2, -1, 3, 2, 0, 0, 0, 0, 0]),
    ("Wb weber", 1.0, [2, 1, -2, -1, 0, 0, 0, 0, 0]),
    ("T tesla", 1.0, [0, 1, -2, -1, 0, 0, 0, 0, 0]),
    ("H henry", 1.0, [2, 1, -2, -2, 0, 0, 0, 0, 0]),
    ("L l liter litre 升", 1e-3, VOLUME),
    ("eV electronvolt", 1.602_176_634e-19, ENERGY),
    ("cal calorie", 4.184, ENERGY),
    ("erg", 1e-7, ENERGY),
    ("dyn dyne", 1e-5, FORCE),
    ("bar", 1e5, PRESSURE),
    ("pc parsec", 3.085_677_6e16, LENGTH),
    ("Bq becquerel", 1.0, [0, 0, -1, 0, 0, 0, 0, 0, 0]),
];

/// Like [`UNITS`], without SI prefixes.
#[rustfmt::skip]
const BARE_UNITS: &[(&str, f64, Powers)] = &[
    ("Å Å angstrom ångström", 1e-10, LENGTH),
    ("atm atmosphere", 101_325.0, PRESSURE),
    ("torr Torr mmHg", 133.322_37, PRESSURE),
    ("psi", 6894.757, PRESSURE),
    ("u amu Da", 1.660_539e-27, MASS),
    ("t tonne 吨", 1e3, MASS),
    ("公斤", 1.0, MASS),
    ("斤", 0.5, MASS),
    ("lb pound", 0.453_592_37, MASS),
    ("oz ounce", 0.028_349_5, MASS),
    ("公里", 1e3, LENGTH),
    ("in inch inche", 0.0254, LENGTH),
    ("ft foot feet", 0.3048, LENGTH),
    ("yd yard", 0.9144, LENGTH),
    ("mi mile", 1609.344, LENGTH),
    ("ly", 9.4607e15, LENGTH),
    ("AU", 1.495_98e11, LENGTH),
    ("M molar", 1e3, [-3, 0, 0, 0, 0, 1, 0, 0, 0]),
    ("gal gallon", 3.785_41e-3, VOLUME),
    ("min minute 分钟", 60.0, TIME),
    ("h hr hour 小时", 3600.0, TIME),
    ("d day 天", 86_400.0, TIME),
    ("week 周", 604_800.0, TIME),
    ("month 个月", 2_629_800.0, TIME),
    ("yr year 年", 31_557_600.0, TIME),
    ("mph", 0.44704, SPEED),
    ("kmh kph", 0.277_777_8, SPEED),
    ("am AM", 1.0, HALF_DAY),
    ("pm PM", 2.0, HALF_DAY),
];

/// SI prefixes by symbol, by name, and in Chinese.
const PREFIXES: &[(&str, f64)] = &[
    ("f", 1e-15),
    ("femto", 1e-15),
    ("p", 1e-12),
    ("pico", 1e-12),
    ("n", 1e-9),
    ("nano", 1e-9),
    ("纳", 1e-9),
    ("µ", 1e-6),
    ("μ", 1e-6),
    ("micro", 1e-6),
    ("微", 1e-6),
    ("m", 1e-3),
    ("milli", 1e-3),
    ("毫", 1e-3),
    ("c", 1e-2),
    ("centi", 1e-2),
    ("厘", 1e-2),
    ("d", 1e-1),
    ("deci", 1e-1),
    ("分", 1e-1),
    ("h", 1e2),
    ("hecto", 1e2),
    ("k", 1e3),
    ("kilo", 1e3),
    ("千", 1e3),
    ("M", 1e6),
    ("mega", 1e6),
    ("兆", 1e6),
    ("G", 1e9),
    ("giga", 1e9),
    ("T", 1e12),
    ("tera", 1e12),
];

/// Letters that are units only inside of `\text{}` or `\mathrm{}`, and a word that is a preposition outside of it.
const ONLY_IN_TEXT: &[&str] = &["u", "t", "d", "M", "in", "l", "H", "S", "F", "A"];

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
        self.powers == other.powers && (self.factor / other.factor - 1.0).abs() < 1e-6
    }

    fn times(self, other: Self, power: i32) -> Self {
        Self {
            factor: self.factor * other.factor.powi(power),
            powers: std::array::from_fn(|i| self.powers[i].saturating_add(other.powers[i].saturating_mul(power))),
            is_certain: self.is_certain || other.is_certain,
        }
    }
}

/// Splits an answer into its value and the unit at its end. `None` if it has no unit, or the letters may be variables: `2m`, `x + 3 m`.
pub(super) fn split(text: &str) -> Option<(&str, Unit)> {
    let text = text.trim();
    let mut from = text.len().saturating_sub(MAX_LENGTH);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    let mut previous = text[..from].chars().next_back();
    for (at, c) in text[from..].char_indices().map(|(i, c)| (from + i, c)) {
        let is_inside =
            previous.is_some_and(|p| p == '\\' || is_word(p) && is_word(c) || p.is_ascii_digit() && c.is_ascii_digit());
        let is_sign = ["\\cdot", "\\times"].iter().any(|sign| text[at..].starts_with(sign));
        let begins = (is_word(c) || "\\{([1/".contains(c)) && !is_sign;
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

fn is_word(c: char) -> bool {
    c.is_alphabetic() || c == 'µ'
}

const SPACES: &[&str] =
    &[" ", "\t", "\n", "\u{a0}", "\u{202f}", "~", "\\ ", "\\,", "\\;", "\\:", "\\!", "\\>", "\\quad", "\\qquad", "{}"];

fn without_separators(mut text: &str) -> &str {
    while let Some(rest) = SPACES.iter().rev().find_map(|space| text.strip_suffix(space)) {
        // `trim` shortens `\ ` to a backslash.
        text = rest;
    }
    text
}

struct Reader<'a> {
    text: &'a str,
    /// `true` inside of `\text{}` and `\mathrm{}`.
    is_text: bool,
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
    fn separators(&mut self) -> bool {
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
    fn product(&mut self) -> Option<(Unit, Unit, usize)> {
        let (mut product, mut last, mut factors, mut sign) = (Unit::ONE, Unit::ONE, 0, 1);
        loop {
            let before = self.text;
            // `J/mol K` is divided by both.
            if self.separators() {
                sign = -1;
            }
            let Some(factor) = self.factor() else {
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
        for (name, power) in [("square ", 2), ("cubic ", 3), ("sq ", 2), ("平方", 2), ("立方", 3)] {
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
    fn exponent(&mut self) -> Option<i32> {
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

/// Returns the unit with a symbol or name, such as `kJ`, `kilojoules` or `厘米`; in `\text{}` also two symbols without a space, as `Jmol`.
fn named(word: &str, is_text: bool) -> Option<Unit> {
    if word.is_empty() || !is_text && ONLY_IN_TEXT.contains(&word) {
        return None;
    }
    let is_certain = is_text || word.chars().nth(1).is_some() || !word.is_ascii();
    let find = |word: &str| {
        let bare = || lookup(BARE_UNITS, word).or_else(|| lookup(UNITS, word));
        let prefixed = || {
            PREFIXES.iter().find_map(|(prefix, factor)| {
                let (scale, powers) = lookup(UNITS, word.strip_prefix(prefix)?)?;
                Some((scale * factor, powers))
            })
        };
        let (factor, powers) = bare().or_else(prefixed)?;
        Some(Unit { factor, powers, is_certain })
    };
    let joined = || {
        let ends = word.char_indices().map(|(i, _)| i).skip(1).filter(|_| is_text);
        ends.filter_map(|end| Some(find(&word[..end])?.times(find(&word[end..])?, 1))).next()
    };
    find(word).or_else(joined)
}

/// Returns the factor and the base units of a symbol, or of a name in lower case or with a capital, singular or plural.
fn lookup(units: &[(&str, f64, Powers)], word: &str) -> Option<(f64, Powers)> {
    let lower = word.to_lowercase();
    let name = lower.strip_suffix('s').filter(|name| name.len() > 1).unwrap_or(&lower);
    let is_name =
        |known: &&str| *known == word || known.len() > 2 && known.is_ascii() && (**known == *name || **known == *lower);
    units
        .iter()
        .find(|(names, ..)| names.split(' ').any(|known| is_name(&known)))
        .map(|(_, factor, powers)| (*factor, *powers))
}
