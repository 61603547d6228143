//! Bounded versions of filters and methods whose results grow with their arguments.

use super::bounds::{joined, walk_all};
use super::limits::{MAX_DEPTH, MAX_OUTPUT, MAX_WIDTH, invalid, steps, steps_of_characters, too_deep, too_long};
use super::{python, strings};
use grpo_files::long_digits;
use minijinja::value::{Serde, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, State};

/// Returns variables with integers beyond 64 bits as numbers. One beyond 128 bits stays a marked text, whose mark the rendering replaces.
pub(super) fn with_long_integers(value: &serde_json::Value) -> Value {
    match value {
        serde_json::Value::String(text) => match long_digits(text).and_then(|digits| digits.parse::<i128>().ok()) {
            Some(integer) => Value::from(integer),
            None => Value::from(text.as_str()),
        },
        serde_json::Value::Array(items) => items.iter().map(with_long_integers).collect(),
        serde_json::Value::Object(fields) => {
            let pairs = fields.iter().map(|(key, value)| (Value::from(key.as_str()), with_long_integers(value)));
            Value::from_pairs(pairs.collect::<Vec<_>>())
        }
        other => Value::from(Serde(other)),
    }
}

/// Returns `value` for a namespace, without iterators, which could refer to the namespace, and without namespaces. Iterators become lists
/// or dictionaries.
pub(super) fn settled(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    Ok(other(state, &value, 0)?.unwrap_or(value))
}

/// Returns the replacement of `value`, if it needs one.
fn other(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<Option<Value>, Error> {
    let Some(object) = value.as_object() else { return Ok(None) };
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(None);
    }
    if depth == MAX_DEPTH {
        return Err(too_deep());
    }
    let name = object.type_name();
    if name.ends_with("::Namespace") {
        return Err(invalid("a namespace cannot be a value of a namespace: give its attributes one by one"));
    }
    if value.kind() == ValueKind::Map {
        let mut stays = name.contains("IndexMap<");
        let mut pairs = vec![];
        for (key, item) in python::pairs(value) {
            state.consume_fuel(1)?;
            let new = other(state, &item, depth + 1)?;
            stays &= new.is_none();
            pairs.push((key, new.unwrap_or(item)));
        }
        return Ok((!stays).then(|| Value::from_pairs(pairs)));
    }
    let is_tuple = object.downcast_ref::<Tuple>().is_some();
    let mut stays = is_tuple || object.downcast_ref::<Vec<Value>>().is_some();
    let mut items = vec![];
    for item in value.try_iter()? {
        state.consume_fuel(1)?;
        let new = other(state, &item, depth + 1)?;
        stays &= new.is_none();
        items.push(new.unwrap_or(item));
    }
    Ok((!stays).then(|| if is_tuple { Value::from(Tuple::from(items)) } else { Value::from(items) }))
}

/// Returns `value[start:stop:step]` as in Python, and charges for all of `value`, because characters and items are counted from its start.
pub(super) fn slice(
    state: &State<'_, '_>,
    value: &Value,
    start: &Value,
    stop: &Value,
    step: &Value,
) -> Result<Value, Error> {
    let bound = |bound: &Value| if bound.is_none() { Ok(None) } else { i64::try_from(bound.clone()).map(Some) };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(invalid("cannot slice by step size of 0"));
    }
    if let Some(text) = value.as_str() {
        state.consume_fuel(steps_of_characters(text.len()))?;
        let characters: Vec<char> = text.chars().collect();
        let chosen = indices(characters.len(), start, stop, step);
        return Ok(Value::from(chosen.filter_map(|index| characters.get(index)).collect::<String>()));
    }
    let items: Vec<Value> = match value.kind() {
        ValueKind::Undefined | ValueKind::None => vec![],
        ValueKind::Seq | ValueKind::Iterable => {
            let charged = python::items(value).map(|item| state.consume_fuel(1).map(|()| item));
            charged.collect::<Result<_, Error>>()?
        }
        kind => return Err(invalid(format!("value of type {kind} cannot be sliced"))),
    };
    let chosen = indices(items.len(), start, stop, step).filter_map(|index| items.get(index).cloned());
    let chosen: Vec<Value> = chosen.collect();
    let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
    Ok(if is_tuple { Value::from(Tuple::from(chosen)) } else { Value::from(chosen) })
}

/// Returns the indices of a slice of `length` items.
fn indices(length: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> impl Iterator<Item = usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    // A slice backwards ends before the first item, at -1.
    let (least, most) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let clamped =
        |bound: i64| if bound < 0 { bound.saturating_add(length) } else { bound }.clamp(least, most.max(least));
    let (first, end) = if step > 0 { (least, most) } else { (most, least) };
    let (start, stop) = (start.map_or(first, clamped), stop.map_or(end, clamped));
    let next = move |at: &i64| at.checked_add(step);
    let is_before = move |at: &i64| if step > 0 { *at < stop } else { *at > stop };
    std::iter::successors(Some(start), next).take_while(is_before).filter_map(|at| usize::try_from(at).ok())
}

/// Calls a Python method: minijinja's, with a limit on results and steps for the input.
pub(super) fn method(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let texts = std::iter::once(value).chain(args).filter_map(Value::as_str);
    let lengths: Vec<usize> = texts.map(str::len).collect();
    state.consume_fuel(steps_of_characters(lengths.iter().sum()))?;
    if let ("strip" | "lstrip" | "rstrip", [text, characters, ..]) = (method, &lengths[..]) {
        charge_strip(state, *text, *characters)?;
    }
    if let Some(text) = value.as_str() {
        if let Some(result) = strings::method(state, text, method, args)? {
            return Ok(result);
        }
        match method {
            "replace" => bound_replace(state, text, args)?,
            "format" => bound_format(state, text, args)?,
            "join" => {
                let (values,): (&Value,) = from_args(args)?;
                return joined(state, text, values).map(Value::from);
            }
            _ => {}
        }
    } else {
        // Keys are hashed, and items compared.
        walk_all(state, args)?;
        if method == "count" {
            walk_all(state, std::slice::from_ref(value))?;
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// Charges for searching each character of a text of some bytes among `characters` bytes.
pub(super) fn charge_strip(state: &State<'_, '_>, text: usize, characters: usize) -> Result<(), Error> {
    state.consume_fuel(steps_of_characters(text).saturating_mul(steps_of_characters(characters)))
}

/// Checks the length of `text.replace(old, new, count)`.
fn bound_replace(state: &State<'_, '_>, text: &str, args: &[Value]) -> Result<(), Error> {
    let [Some(old), Some(new)] = [0, 1].map(|index| args.get(index).and_then(Value::as_str)) else { return Ok(()) };
    let matches = text.matches(old).count();
    let limit = args.get(2).and_then(Value::as_i64).and_then(|count| usize::try_from(count).ok());
    let added = matches.min(limit.unwrap_or(usize::MAX)).saturating_mul(new.len());
    let length = text.len().saturating_add(added);
    if length > MAX_OUTPUT {
        return Err(too_long());
    }
    state.consume_fuel(steps(length))
}

/// Checks widths and the length of `text.format(*args)`: each field may be as long as the longest argument or width.
fn bound_format(state: &State<'_, '_>, text: &str, args: &[Value]) -> Result<(), Error> {
    let mut longest = 0;
    for argument in args {
        let length = match argument.as_str() {
            Some(text) => text.len(),
            None => python::charged_text(state, argument)?.len(),
        };
        longest = longest.max(length);
    }
    let mut fields = 0usize;
    for field in text.split('{').skip(1) {
        fields += 1;
        let field = field.split('}').next().unwrap_or_default();
        for digits in field.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
            let width = digits.parse().unwrap_or(usize::MAX);
            if width > MAX_WIDTH {
                return Err(invalid(format!("format: expected widths of at most {MAX_WIDTH}, got {digits:.20}")));
            }
            longest = longest.max(width);
        }
    }
    let length = text.len().saturating_add(fields.saturating_mul(longest));
    if length > MAX_OUTPUT {
        return Err(too_long());
    }
    // A field is parsed, and its value formatted.
    state.consume_fuel(steps_of_characters(length) + fields as u64)
}
