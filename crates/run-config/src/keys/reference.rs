//! Generates docs/reference.md: every key with its valid values, default and meaning.
//!
//! Valid values are taken from the errors about wrong ones, so they use the words that users see.

use super::tests::{assert_generated, documented, everything};
use super::*;
use crate::Error;
use grpo_files::Layers;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::LazyLock;

static EVERYTHING: LazyLock<Value> = LazyLock::new(everything);

/// Returns a value at a dotted path, with `any` for `*`.
fn nested(path: &str, value: Value) -> Value {
    let keys: Vec<String> = path.replace('*', "any").split('.').map(str::to_owned).collect();
    keys.into_iter().rev().fold(value, |value, key| json!({ key: value }))
}

/// Replaces values of `base` by the values of `top`, key by key.
fn merge(base: &mut Value, top: Value) {
    match (base, top) {
        (Value::Object(base), Value::Object(top)) => {
            top.into_iter().for_each(|(key, value)| merge(base.entry(key).or_insert(Value::Null), value));
        }
        (base, top) => *base = top,
    }
}

/// Returns a configuration with a value in every section, and `value` at `path`.
fn with(path: &str, value: Value) -> Value {
    let mut config = EVERYTHING.clone();
    merge(&mut config, nested(path, value));
    config
}

/// Returns the error that users see about a value.
fn refusal(path: &str, value: Value) -> Option<String> {
    let layers = Layers::new().value("reference", with(path, value)).ok()?;
    layers.resolve::<TrainConfig>().err().map(|error| whole(&error))
}

/// Returns the part of an error between "expected" and the value found.
fn expectation(text: &str) -> Option<String> {
    let (_, expected) = text.split_once("expected ")?;
    let expected = expected.split(", got ").next()?.split(" at line ").next()?;
    Some(expected.split(", as in ").next()?.split(", e.g. ").next()?.trim().to_owned())
}

/// Returns the whole text of an error with its causes.
fn whole(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Returns the valid values of a key: a number's range from the errors of `validate`, or the type from errors of deserialising.
fn legal_values(path: &str) -> String {
    let mut ranges = BTreeSet::new();
    for value in [json!(-1), json!(0), json!(2), json!(1e30), json!(u64::MAX)] {
        let Ok(config) = serde_json::from_value::<TrainConfig>(with(path, value)) else { continue };
        if let Err(Error::Key { key, expected, .. }) = config.validate()
            && key == path
        {
            ranges.insert(expectation(&format!("expected {expected}")).unwrap());
        }
    }
    if let Some(range) = ranges.into_iter().next() {
        return range;
    }
    // A string is not a valid choice, and a list is not a valid string or number.
    let choice = refusal(path, json!("?"));
    let text = choice.as_ref().filter(|text| text.contains("unknown variant")).cloned();
    let text = text.or_else(|| refusal(path, json!([[]]))).or(choice);
    text.as_deref().and_then(expectation).unwrap_or_else(|| "any".into())
}

/// Returns the default of a key in YAML's flow style. The defaults of sections that are off apply when the section is given. A key that
/// [`everything`] sets there has none.
fn default_of(path: &str) -> String {
    static DEFAULT: LazyLock<Value> = LazyLock::new(|| serde_json::to_value(TrainConfig::default()).unwrap());
    static WITH_SECTIONS: LazyLock<Value> = LazyLock::new(|| {
        serde_json::to_value(serde_json::from_value::<TrainConfig>(EVERYTHING.clone()).unwrap()).unwrap()
    });
    let pointer = format!("/{}", path.replace('*', "any").replace('.', "/"));
    if let Some(value) = DEFAULT.pointer(&pointer) {
        return value.to_string();
    }
    if EVERYTHING.pointer(&pointer).is_some() {
        return String::new();
    }
    WITH_SECTIONS.pointer(&pointer).map(Value::to_string).unwrap_or_default()
}

fn page() -> String {
    let mut text = String::from(
        "# Every key of a run's configuration\n\n\
         Generated from the code: `UPDATE_DOCS=1 cargo test -p grpo-run-config --lib keys`. `*` stands for a name of your choice. A value that is \
         not legal is an error that names the key. Without a model and data, \
         [configs/train/arithmetic.yaml](../configs/train/arithmetic.yaml) replaces some defaults. [Runs](runs.md) describes the layers of a \
         configuration, [Losses](losses/README.md) the keys of the section `loss`. `warmup.optimizer` has all keys of \
         `optimizer`; the table lists only keys with a different default.\n",
    );
    let cell = |text: &str| text.replace('|', "\\|");
    let mut section = None;
    // Not `keys()`: keys.txt may be older than this page while both are written.
    let lines = documented();
    let keys: Vec<(&str, &str)> = lines.iter().filter_map(|line| line.split_once('\t')).collect();
    // Returns `true` if other keys lie below a key.
    let is_section =
        |path: &str| keys.iter().any(|(key, _)| key.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')));
    // Returns `true` if a section such as `warmup.optimizer` repeats a key of a section such as `optimizer`, with the same default.
    let is_repeated = |path: &str, meaning: &str| {
        let Some((_, rest)) = path.split_once('.').filter(|(_, rest)| rest.contains('.')) else { return false };
        keys.contains(&(rest, meaning)) && default_of(path) == default_of(rest)
    };
    for (path, meaning) in &keys {
        let top = path.split('.').next().unwrap();
        if is_repeated(path, meaning) {
            continue;
        }
        let is_new = section != Some(top);
        if is_new && is_section(path) {
            let _ = write!(
                text,
                "\n## `{path}`\n\n{meaning}.\n\n| key | legal values | default | meaning |\n|---|---|---|---|\n"
            );
            section = Some(top);
            continue;
        }
        if is_new {
            let _ = write!(
                text,
                "\n## `{path}`\n\n{meaning}. Legal: {}. Default: `{}`.\n",
                legal_values(path),
                default_of(path)
            );
            continue;
        }
        let (legal, default) = match is_section(path) {
            true => ("a section".to_owned(), String::new()),
            false => (legal_values(path), default_of(path)),
        };
        let default = if default.is_empty() { String::new() } else { format!("`{default}`") };
        let _ = writeln!(text, "| `{path}` | {} | {} | {} |", cell(&legal), cell(&default), cell(meaning));
    }
    text
}

#[test]
fn reference_md_lists_the_keys_with_valid_values_and_default() {
    assert_generated("../docs/reference.md", &page());
}
