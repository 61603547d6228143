//! What the formats share: JSON within text, blocks between tags, and the types of arguments that are written as texts.

use super::{Parsed, ToolCall, literal};
use grpo_files::{long_integer, mark_long_integers};
use serde::de::IgnoredAny;
use serde_json::{Deserializer, Map, Value};

/// The deepest nesting of schemas whose types are read.
const DEEPEST_SCHEMA: usize = 8;

/// The names of types that are not those of JSON schemas, as servers read them.
const TYPE_NAMES: [(&str, &[&str]); 6] = [
    ("string", &["str", "text", "varchar", "char", "enum"]),
    ("integer", &["int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"]),
    ("number", &["float", "float32", "float64", "double"]),
    ("boolean", &["bool"]),
    ("object", &["dict"]),
    ("array", &["arr", "list", "sequence"]),
];

/// Returns the JSON value at the start of `text`, and the text behind it; `None` for white space only. Integers keep all digits.
pub(super) fn json_at_start(text: &str) -> Option<Result<(Value, &str), serde_json::Error>> {
    let mut values = Deserializer::from_str(text).into_iter::<IgnoredAny>();
    Some(values.next()?.and_then(|_| {
        let (json, behind) = text.split_at(values.byte_offset());
        Ok((serde_json::from_str(&mark_long_integers(json))?, behind))
    }))
}

/// Returns the value of a text that is JSON.
pub(super) fn json(text: &str) -> Result<Value, String> {
    serde_json::from_str(&mark_long_integers(text)).map_err(|error| format!("the tool call is no JSON: {error}"))
}

/// Returns arguments that are written as JSON: an object, or nothing.
pub(super) fn arguments(name: &str, text: &str) -> Result<Map<String, Value>, String> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    match serde_json::from_str(&mark_long_integers(text)) {
        Ok(Value::Object(arguments)) => Ok(arguments),
        Ok(other) => Err(format!("the arguments of `{name}` are no JSON object, but `{}`", shown(&other.to_string()))),
        Err(error) => Err(format!("the arguments of `{name}` are no JSON object: {error}")),
    }
}

impl ToolCall {
    /// Reads an object with `name`, and `arguments` or `parameters`: an object, or JSON text of one.
    pub(super) fn from_json(value: &Value) -> Result<Self, String> {
        let id = value["id"].as_str().and_then(valid_id);
        let value = value.get("function").filter(|function| function.is_object()).unwrap_or(value);
        let expected = "an object with `name` and `arguments`, an object";
        let name = value["name"].as_str().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| format!("expected {expected}, got `{}`", shown(&value.to_string())))?;
        let found = ["arguments", "parameters"].iter().find_map(|key| value.get(*key));
        let arguments = match found {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(arguments)) => arguments.clone(),
            Some(Value::String(text)) => arguments(name, text)?,
            Some(other) => {
                return Err(format!("expected {expected}, got `{}`", shown(&other.to_string())));
            }
        };
        Ok(Self { id, name: name.to_owned(), arguments })
    }
}

/// Returns an id of a call if chat templates take it: Mistral's refuse others than nine letters and digits.
pub(super) fn valid_id(id: &str) -> Option<String> {
    let is_valid = id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric());
    is_valid.then(|| id.to_owned())
}

/// Returns a call with arguments that are written as JSON.
pub(super) fn call(name: &str, json: &str) -> Result<ToolCall, String> {
    let name = name.trim();
    if name.is_empty() {
        return Err(format!("expected the name of a function before the arguments `{}`", shown(json)));
    }
    Ok(ToolCall { id: None, name: name.to_owned(), arguments: arguments(name, json)? })
}

/// Splits a text at blocks between tags: the text outside, and the inside of each block. A last block may lack its end.
pub(super) fn blocks<'a>(text: &'a str, start: &str, end: &str) -> (String, Vec<&'a str>) {
    let (mut content, mut blocks, mut rest) = (String::new(), Vec::new(), text);
    while let Some((before, behind)) = rest.split_once(start) {
        content.push_str(before);
        let (inside, after) = behind.split_once(end).unwrap_or((behind, ""));
        blocks.push(inside.trim());
        rest = after;
    }
    content.push_str(rest);
    (content.trim().to_owned(), blocks)
}

/// Returns a text without calls as it is.
pub(super) fn no_calls(text: &str) -> Parsed {
    Parsed { content: text.trim().to_owned(), calls: Vec::new() }
}

/// Returns the schemas of the parameters of a tool.
pub(super) fn properties<'a>(tools: &'a Value, name: &str) -> Option<&'a Value> {
    let functions = tools.as_array()?.iter().map(|tool| tool.get("function").unwrap_or(tool));
    let function = functions.into_iter().find(|function| function["name"] == name)?;
    function.get("parameters")?.get("properties")
}

/// Returns the value of an argument that is written as text, converted to a type of its schema, as vLLM does: the first of null, integer,
/// number, boolean, object or list, and text that fits. Without a schema it is a text.
pub(super) fn typed(text: &str, schema: Option<&Value>) -> Value {
    let mut types = Vec::new();
    if let Some(schema) = schema {
        add_types(schema, &mut types, 0);
    }
    let has = |name: &str| types.contains(&name);
    if types.is_empty() {
        return Value::from(text);
    }
    let trimmed = text.trim();
    if has("null") && trimmed.eq_ignore_ascii_case("null") {
        return Value::Null;
    }
    if (has("integer") || has("number"))
        && let Some(integer) = long_integer(trimmed)
    {
        return integer;
    }
    if has("number")
        && let Some(number) = trimmed.parse::<f64>().ok().filter(|number| number.is_finite())
    {
        let is_whole = number.fract() == 0.0 && number.abs() < (1_u64 << 53) as f64;
        return if is_whole { Value::from(number as i64) } else { Value::from(number) };
    }
    if has("boolean") {
        match trimmed.to_ascii_lowercase().as_str() {
            "true" | "1" => return Value::Bool(true),
            "false" | "0" => return Value::Bool(false),
            _ => {}
        }
    }
    if has("object") || has("array") {
        // Some templates write lists and objects as Python does.
        let value = json(trimmed).ok().or_else(|| literal::literal(trimmed));
        if let Some(value @ (Value::Object(_) | Value::Array(_))) = value {
            return value;
        }
    }
    match has("string") {
        true => Value::from(text),
        false => json(trimmed).unwrap_or_else(|_| Value::from(text)),
    }
}

/// Adds the types of a schema by their JSON names.
fn add_types<'a>(schema: &'a Value, types: &mut Vec<&'a str>, depth: usize) {
    if depth > DEEPEST_SCHEMA {
        return;
    }
    let count = types.len();
    let named = match &schema["type"] {
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        other => other.as_str().into_iter().collect::<Vec<_>>(),
    };
    for name in named {
        let name = name.trim();
        let other = TYPE_NAMES.iter().find(|(_, others)| others.iter().any(|other| name.eq_ignore_ascii_case(other)));
        types.push(other.map_or(name, |(known, _)| known));
    }
    for value in schema["enum"].as_array().into_iter().flatten() {
        types.push(match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        });
    }
    for choices in ["anyOf", "oneOf", "allOf"] {
        schema[choices].as_array().into_iter().flatten().for_each(|choice| add_types(choice, types, depth + 1));
    }
    if types.len() == count {
        types.push("string");
    }
}

/// Returns the beginning of a text for an error.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}
