//! Python's string formatting: `format % arguments` and the filter `format`.

use super::limits::{MAX_OUTPUT, MAX_WIDTH, Text, invalid, steps, too_long};
use super::python;
use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind};
use minijinja::{Error, State};

/// Returns `left % right`: formats a string, or computes the remainder of numbers, which has the sign of the divisor.
pub(super) fn percent(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(format) = left.as_str() {
        return match right.downcast_object_ref::<Tuple>() {
            Some(_) => formatted(state, format, &python::items(right).collect::<Vec<_>>(), None),
            None if right.kind() == ValueKind::Map => {
                formatted(state, format, std::slice::from_ref(right), Some(right))
            }
            None => formatted(state, format, std::slice::from_ref(right), None),
        };
    }
    if left.kind() != ValueKind::Number && left.kind() != ValueKind::Bool {
        return Err(invalid(format!("% takes a text or a number to its left, got a value of type {}", left.kind())));
    }
    let by_zero = || invalid("a remainder of a division by zero");
    if let (Ok(a), Ok(b), true) =
        (i128::try_from(left.clone()), i128::try_from(right.clone()), is_whole(left) && is_whole(right))
    {
        let remainder = a.checked_rem(b).ok_or_else(by_zero)?;
        let has_other_sign = remainder != 0 && (remainder < 0) != (b < 0);
        return Ok(Value::from(if has_other_sign { remainder + b } else { remainder }));
    }
    let (a, b) = (f64::try_from(left.clone())?, f64::try_from(right.clone())?);
    if b == 0.0 {
        return Err(by_zero());
    }
    let remainder = a % b;
    let has_other_sign = remainder != 0.0 && (remainder < 0.0) != (b < 0.0);
    Ok(Value::from(if has_other_sign { remainder + b } else { remainder }))
}

fn is_whole(value: &Value) -> bool {
    value.is_integer() || value.kind() == ValueKind::Bool
}

/// Applies the filter `format(*args, **kwargs)`: `value % (kwargs or args)`.
pub(super) fn format(state: &State<'_, '_>, value: &Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let format = python::charged_text(state, value)?;
    let pairs = named.args().map(|name| Ok((name, named.get::<Value>(name)?)));
    let pairs = pairs.collect::<Result<Vec<_>, Error>>()?;
    if pairs.is_empty() {
        return formatted(state, &format, &args, None);
    }
    let map = Value::from_pairs(pairs);
    formatted(state, &format, std::slice::from_ref(&map), Some(&map))
}

/// A field of a format: `%(name)-08.3f`.
#[derive(Default)]
struct Field<'a> {
    /// The characters `-0+ #` of the field.
    flags: &'a str,
    /// `true` if the text is at the left end of the width.
    left: bool,
    width: usize,
    precision: Option<usize>,
}

fn formatted(state: &State<'_, '_>, format: &str, args: &[Value], map: Option<&Value>) -> Result<Value, Error> {
    let mut out = Text::default();
    let mut args = args.iter();
    let mut rest = format;
    let mut uses_names = false;
    while let Some((before, field)) = rest.split_once('%') {
        out.push(before)?;
        rest = field;
        let name = match rest.strip_prefix('(') {
            Some(inside) => {
                let (name, behind) =
                    inside.split_once(')').ok_or_else(|| invalid("format: a name without its closing bracket"))?;
                rest = behind;
                uses_names = true;
                Some(name)
            }
            None => None,
        };
        let mut next = || args.next().ok_or_else(|| invalid("format: not enough arguments for the format string"));
        let (flags, behind) = rest.split_at(rest.len() - rest.trim_start_matches(['-', '0', '+', ' ', '#']).len());
        rest = behind;
        let mut spec = Field { flags, left: flags.contains('-'), ..Field::default() };
        let mut number = |rest: &mut &str| -> Result<Option<i64>, Error> {
            if let Some(behind) = rest.strip_prefix('*') {
                *rest = behind;
                return Ok(Some(i64::try_from(next()?.clone())?));
            }
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let (digits, behind) = rest.split_at(digits);
            *rest = behind;
            Ok((!digits.is_empty()).then(|| digits.parse().unwrap_or(i64::MAX)))
        };
        let limited = |number: i64| match usize::try_from(number.unsigned_abs()) {
            Ok(number) if number <= MAX_WIDTH => Ok(number),
            _ => Err(invalid(format!("format: expected widths of at most {MAX_WIDTH}, got {number}"))),
        };
        if let Some(width) = number(&mut rest)? {
            spec.left |= width < 0;
            spec.width = limited(width)?;
        }
        if let Some(behind) = rest.strip_prefix('.') {
            rest = behind;
            spec.precision = Some(limited(number(&mut rest)?.unwrap_or(0).max(0))?);
        }
        rest = rest.trim_start_matches(['h', 'l', 'L']);
        let kind = rest.chars().next().ok_or_else(|| invalid("format: an incomplete format"))?;
        rest = &rest[kind.len_utf8()..];
        if kind == '%' {
            out.push("%")?;
            continue;
        }
        let value = match (name, map) {
            (Some(name), Some(map)) => {
                let value = map.get_item(&Value::from(name))?;
                if value.is_undefined() {
                    return Err(invalid(format!("format: there is no argument {name:?}")));
                }
                value
            }
            (Some(_), None) => return Err(invalid("format: a name in the format requires a mapping")),
            (None, _) => next()?.clone(),
        };
        let text = spec.apply(kind, &value)?;
        state.consume_fuel(steps(text.len()))?;
        if text.len() > MAX_OUTPUT {
            return Err(too_long());
        }
        out.push(&text)?;
    }
    out.push(rest)?;
    // A dictionary may have entries that the format does not use.
    if !uses_names && map.is_none() && args.next().is_some() {
        return Err(invalid("format: not all arguments converted during string formatting"));
    }
    Ok(Value::from(out.into_string()))
}

impl Field<'_> {
    fn apply(&self, kind: char, value: &Value) -> Result<String, Error> {
        let cut = |text: String| match self.precision {
            Some(most) => text.chars().take(most).collect(),
            None => text,
        };
        let body = match kind {
            's' => return Ok(self.padded(cut(python::text(value)?))),
            'r' | 'a' => return Ok(self.padded(cut(python::repr_of(value)?))),
            'c' => {
                let text = match value.as_str() {
                    Some(text) if text.chars().count() == 1 => text.to_owned(),
                    Some(_) => return Err(invalid("format: %c requires a number or a single character")),
                    None => {
                        let code = u32::try_from(value.clone())?;
                        char::from_u32(code).ok_or_else(|| invalid("format: %c is out of range"))?.into()
                    }
                };
                return Ok(self.padded(text));
            }
            'd' | 'i' | 'u' | 'x' | 'X' | 'o' => self.whole(kind, value)?,
            'f' | 'F' | 'e' | 'E' | 'g' | 'G' => self.float(kind, value)?,
            other => return Err(invalid(format!("format: an unsupported format character {other:?}"))),
        };
        let (sign, digits) = match body.strip_prefix('-') {
            Some(digits) => ("-", digits),
            None if self.flags.contains('+') => ("+", body.as_str()),
            None if self.flags.contains(' ') => (" ", body.as_str()),
            None => ("", body.as_str()),
        };
        let length = sign.len() + digits.chars().count();
        if self.flags.contains('0') && !self.left && length < self.width {
            return Ok(format!("{sign}{}{digits}", "0".repeat(self.width - length)));
        }
        Ok(self.padded(format!("{sign}{digits}")))
    }

    fn whole(&self, kind: char, value: &Value) -> Result<String, Error> {
        let is_number = matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
        let is_decimal = matches!(kind, 'd' | 'i' | 'u');
        if !is_number || (!is_decimal && !is_whole(value)) {
            return Err(invalid(format!(
                "format: %{kind} requires a whole number, got a value of type {}",
                value.kind()
            )));
        }
        let number = match i128::try_from(value.clone()) {
            Ok(number) if is_whole(value) => number,
            _ => f64::try_from(value.clone())?.trunc() as i128,
        };
        let magnitude = number.unsigned_abs();
        let (prefix, digits) = match kind {
            'x' => ("0x", format!("{magnitude:x}")),
            'X' => ("0X", format!("{magnitude:X}")),
            'o' => ("0o", format!("{magnitude:o}")),
            _ => ("", magnitude.to_string()),
        };
        let zeros = self.precision.unwrap_or(0).saturating_sub(digits.len());
        let (sign, prefix) = (if number < 0 { "-" } else { "" }, if self.flags.contains('#') { prefix } else { "" });
        Ok(format!("{sign}{prefix}{}{digits}", "0".repeat(zeros)))
    }

    fn float(&self, kind: char, value: &Value) -> Result<String, Error> {
        if !matches!(value.kind(), ValueKind::Number | ValueKind::Bool) {
            return Err(invalid(format!("format: %{kind} requires a number, got a value of type {}", value.kind())));
        }
        let number = f64::try_from(value.clone())?;
        let precision = self.precision.unwrap_or(6);
        let text = if number.is_finite() {
            match kind {
                'f' | 'F' => format!("{number:.precision$}"),
                'e' | 'E' => exponent(number, precision),
                _ => general(number, precision.max(1), self.flags.contains('#')),
            }
        } else if number.is_nan() {
            "nan".into()
        } else {
            if number > 0.0 { "inf" } else { "-inf" }.into()
        };
        Ok(if kind.is_ascii_uppercase() { text.to_uppercase() } else { text })
    }

    fn padded(&self, text: String) -> String {
        let missing = self.width.saturating_sub(text.chars().count());
        if self.left { text + &" ".repeat(missing) } else { " ".repeat(missing) + &text }
    }
}

/// Formats `%.Ne`: the exponent has at least two digits.
fn exponent(number: f64, precision: usize) -> String {
    let text = format!("{number:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
    format!("{digits}e{sign}{exponent:0>2}")
}

/// Formats `%.Ng`: `precision` significant digits, without trailing zeros.
fn general(number: f64, precision: usize, keeps_zeros: bool) -> String {
    let scientific = exponent(number, precision - 1);
    let power: i64 = scientific.split_once('e').and_then(|(_, power)| power.parse().ok()).unwrap_or(0);
    let shorter = |text: &str| match text.contains('.') && !keeps_zeros {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if power < -4 || power >= precision as i64 {
        let (digits, power) = scientific.split_once('e').unwrap_or((&scientific, "+00"));
        return format!("{}e{power}", shorter(digits));
    }
    let decimals = usize::try_from(precision as i64 - 1 - power).unwrap_or(0);
    shorter(&format!("{number:.decimals$}"))
}
