//! Assertions about numbers of a report: `fused.temp_bytes <= 630e6`, `fused.step_ms.p50 <= reference.step_ms.p50 * 0.9`.

use crate::error::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::fmt;

/// An assertion of the form `VARIANT.FIELD RELATION (NUMBER | VARIANT.FIELD) [* NUMBER]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Assertion {
    text: String,
    left: Field,
    relation: &'static str,
    right: Term,
    factor: f64,
}

#[derive(Clone, Debug, PartialEq)]
struct Field {
    variant: String,
    /// Dotted path of the field within the variant.
    path: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Term {
    Number(f64),
    Field(Field),
}

/// The result of an assertion.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Checked {
    /// The text of the assertion.
    pub text: String,
    /// The left side; `None` if the report lacks the number.
    pub left: Option<f64>,
    /// The right side, with its factor.
    pub right: Option<f64>,
    /// `true` if the assertion holds; `false` if a side is unknown.
    pub holds: bool,
}

impl Checked {
    /// Returns `holds` or `DOES NOT HOLD`.
    pub fn verdict(&self) -> &'static str {
        if self.holds { "holds" } else { "DOES NOT HOLD" }
    }
}

impl fmt::Display for Checked {
    /// The assertion and its two sides.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [left, right] =
            [self.left, self.right].map(|side| side.map_or("unknown".into(), |side| format!("{side:.6}")));
        write!(f, "{} ({left} and {right})", self.text)
    }
}

/// Signs of the relations, longer ones first.
const RELATIONS: [&str; 5] = ["<=", ">=", "==", "<", ">"];

impl Assertion {
    /// Parses an assertion.
    ///
    /// # Errors
    /// [`Error::Argument`] with the grammar.
    pub fn parse(text: &str) -> Result<Self> {
        let failed = || {
            let grammar = "VARIANT.FIELD (<=|<|>=|>|==) NUMBER or VARIANT.FIELD, optionally `* NUMBER`";
            Error::argument("assert", grammar, format!("`{text}`"))
        };
        let (at, relation) = RELATIONS
            .into_iter()
            .filter_map(|relation| Some((text.find(relation)?, relation)))
            .min_by_key(|(at, relation)| (*at, std::cmp::Reverse(relation.len())))
            .ok_or_else(failed)?;
        let (left, right) = (&text[..at], &text[at + relation.len()..]);
        let (right, factor) = match right.split_once('*') {
            Some((right, factor)) => (right, number(factor).ok_or_else(failed)?),
            None => (right, 1.0),
        };
        let right = match number(right) {
            Some(number) => Term::Number(number),
            None => Term::Field(field(right).ok_or_else(failed)?),
        };
        let left = field(left).ok_or_else(failed)?;
        Ok(Self { text: text.into(), left, relation, right, factor })
    }

    /// Iterates over the variants that the assertion names.
    pub fn variants(&self) -> impl Iterator<Item = &str> {
        let right = match &self.right {
            Term::Field(field) => Some(field.variant.as_str()),
            Term::Number(_) => None,
        };
        std::iter::once(self.left.variant.as_str()).chain(right)
    }

    /// Evaluates the assertion on `reports`, a map of variants to maps of fields.
    ///
    /// # Errors
    /// [`Error::Argument`] for a field that does not exist.
    pub fn check(&self, reports: &Value) -> Result<Checked> {
        let left = self.left.read(reports)?;
        let right = match &self.right {
            Term::Number(number) => Some(*number),
            Term::Field(field) => field.read(reports)?,
        }
        .map(|right| right * self.factor);
        let holds = left.zip(right).is_some_and(|(a, b)| match self.relation {
            "<=" => a <= b,
            ">=" => a >= b,
            "<" => a < b,
            ">" => a > b,
            _ => a == b,
        });
        Ok(Checked { text: self.text.clone(), left, right, holds })
    }
}

impl Field {
    /// Reads the number; `None` if the report lacks it.
    fn read(&self, reports: &Value) -> Result<Option<f64>> {
        let variant = &reports[&self.variant];
        if variant.get("error").is_some() {
            return Ok(None);
        }
        // The fields of a value that was not measured are unknown, too.
        let mut keys = self.path.split('.');
        let value = keys.try_fold(variant, |value, key| if value.is_null() { Some(value) } else { value.get(key) });
        match value.filter(|_| variant.is_object()) {
            Some(Value::Null) => Ok(None),
            Some(Value::Number(number)) => Ok(number.as_f64()),
            _ => {
                let numbers = variant.as_object().into_iter().flatten().filter(|(_, v)| v.is_number() || v.is_null());
                let numbers: Vec<&str> = numbers.map(|(key, _)| key.as_str()).collect();
                let expected = format!("a number of variant `{}` ({})", self.variant, numbers.join(", "));
                Err(Error::argument("assert", expected, format!("`{}`", self.path)))
            }
        }
    }
}

fn number(text: &str) -> Option<f64> {
    text.trim().parse().ok().filter(|number: &f64| number.is_finite())
}

fn field(text: &str) -> Option<Field> {
    let (variant, path) = text.trim().split_once('.')?;
    let legal = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let sound = !variant.is_empty() && !path.is_empty() && variant.chars().chain(path.chars()).all(legal);
    sound.then(|| Field { variant: variant.into(), path: path.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<Checked> {
        let reports = serde_json::json!({
            "fused": { "temp_bytes": 622, "estimate_seconds": null, "floor": { "seconds": 0.5 } },
            "materialised": { "temp_bytes": 7468, "step_ms": null },
            "case/fused": { "bench/step_s_p50": 0.25 },
            "broken": { "error": "no" },
        });
        Assertion::parse(text)?.check(&reports)
    }

    #[test]
    fn both_sides_of_an_assertion_may_be_fields() {
        for (text, holds) in [
            ("fused.temp_bytes <= 622", true),
            ("fused.temp_bytes<622", false),
            ("fused.temp_bytes >= 6.22e2", true),
            ("fused.temp_bytes > 622", false),
            ("fused.temp_bytes == 311 * 2", true),
            ("fused.temp_bytes <= materialised.temp_bytes * 0.1", true),
            ("fused.temp_bytes <= materialised.temp_bytes * 0.01", false),
            ("fused.floor.seconds < 1", true),
            ("case/fused.bench/step_s_p50 < fused.floor.seconds", true),
            // No relation holds for an unknown value.
            ("fused.estimate_seconds <= 1", false),
            ("fused.estimate_seconds >= 0", false),
            ("materialised.step_ms.p50 >= 0", false),
            ("broken.temp_bytes >= 0", false),
        ] {
            assert_eq!(check(text).unwrap_or_else(|e| panic!("{text}: {e}")).holds, holds, "{text}");
        }
    }

    #[test]
    fn malformed_assertions_are_refused() {
        for text in ["", "fused.temp_bytes", "temp_bytes <= 1", "fused.temp_bytes <= ", "fused. <= 1", "a.b = 1"] {
            assert!(Assertion::parse(text).is_err(), "{text}");
        }
        for text in ["a.b <= nan", "a.b <= 1 * c.d", "a.b <= 1 * ", "a.b <= inf", "1 <= a.b"] {
            assert!(Assertion::parse(text).is_err(), "{text}");
        }
        let text = check("fused.tmp_bytes <= 1").expect_err("no such field").to_string();
        assert!(text.contains("tmp_bytes") && text.contains("temp_bytes"), "{text}");
        assert!(check("fused.floor <= 1").is_err() && check("nobody.temp_bytes <= 1").is_err());
    }
}
