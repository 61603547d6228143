//! Chat templates: Jinja that renders messages to the text of a prompt, with the results of `transformers`.

mod bounds;
mod date;
mod filters;
mod json;
mod limits;
mod printf;
mod python;
mod source;
mod strings;
mod threads;
mod values;

pub use threads::map_on_template_threads;

use crate::error::{Error, Result};
use grpo_files::{LONG_INTEGER_MARK, long_integers_as_digits};
use limits::{Fault, WAY_OUT, fuel};
use minijinja::machinery::{self, Instructions};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value as Jinja};
use minijinja::{AutoEscape, Environment, ErrorKind, State};
use python::formatter;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use threads::on_own_stack;

/// A chat template, compiled with the settings and functions of `transformers`.
///
/// minijinja provides Jinja and most of Python's methods of strings, lists and dictionaries. This module adds Python's other methods, `%`
/// for strings, the filters `tojson`, `indent`, `int`, `float` and `format`, `raise_exception`, `strftime_now`, the tests `iterable` and
/// `sequence`, and Python's formatting of values (`True`, `None`, `1e+16`). Line ends of a template become `\n`, as in Jinja.
/// `{% generation %}` has no effect; its contents are rendered.
///
/// Templates come with models and are untrusted: length, steps, depth of values and output size are limited, and a template that exceeds
/// a limit is an error.
///
/// ```
/// use grpo_models::ChatTemplate;
/// use serde_json::json;
///
/// let template = ChatTemplate::new("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "example");
/// let variables = json!({"messages": [{"role": "user", "content": "Hi"}]});
/// assert_eq!(template.render(&variables)?, "<user>Hi");
/// # Ok::<(), grpo_models::Error>(())
/// ```
pub struct ChatTemplate {
    origin: String,
    /// A syntax error is reported on first use, because it does not matter to runs whose prompts are texts.
    compiled: std::result::Result<Compiled, Fault>,
    /// `true` if the template writes the date.
    is_dated: bool,
}

self_cell::self_cell!(
    /// An environment with a template, and the template's instructions with bounds. Every rendering uses them.
    struct Compiled {
        owner: Environment<'static>,
        #[covariant]
        dependent: Instructions,
    }
);

impl Compiled {
    fn of(environment: Environment<'static>) -> std::result::Result<Self, Fault> {
        Self::try_new(environment, |environment| {
            let template = environment.get_template(NAME).map_err(|error| Fault::from(&error))?;
            Ok(bounds::instructions(&machinery::get_compiled_template(&template).instructions))
        })
    }
}

/// The name of the template in its environment.
const NAME: &str = "chat_template";
/// The function by which a template writes the date.
const STRFTIME_NOW: &str = "strftime_now";

impl ChatTemplate {
    /// Compiles the template `source`; `origin` names it in errors, such as its file.
    pub fn new(source: &str, origin: impl Into<String>) -> Self {
        let is_dated = source.contains(STRFTIME_NOW);
        let compiled = source::prepared(source).map_err(|message| Fault { line: None, message }).and_then(|source| {
            on_own_stack(|| {
                let mut environment = environment();
                environment.add_template_owned(NAME, source).map_err(|error| Fault::from(&error))?;
                Compiled::of(environment)
            })
        });
        Self { origin: origin.into(), compiled, is_dated }
    }

    /// Sets the date of `strftime_now`, such as `2026-11-25` or `2026-11-25T09:30:00`. The default is the local time at which the template was
    /// opened.
    ///
    /// # Errors
    /// [`Error::Date`] for an invalid date.
    pub fn with_date(mut self, text: &str) -> Result<Self> {
        let date = date::parse(text).map_err(|e| Error::Date { text: text.to_owned(), reason: e.to_string() })?;
        self.compiled = self.compiled.and_then(|compiled| {
            let mut environment = compiled.into_owner();
            add_date(&mut environment, date);
            Compiled::of(environment)
        });
        Ok(self)
    }

    /// Returns `true` if the template writes the date.
    pub fn is_dated(&self) -> bool {
        self.is_dated
    }

    /// Returns the local date and time, as [`ChatTemplate::with_date`] takes them.
    pub fn now() -> String {
        date::now().strftime("%Y-%m-%dT%H:%M:%S").to_string()
    }

    /// Returns the name of the template in errors.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Checks that the template parses.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] with the line.
    pub fn check(&self) -> Result<()> {
        self.compiled.as_ref().map(drop).map_err(|fault| self.error(fault.clone()))
    }

    fn error(&self, fault: Fault) -> Error {
        Error::ChatTemplate { origin: self.origin.clone(), line: fault.line, message: fault.message }
    }

    /// Renders the template with `variables`, a JSON object. `transformers` passes `messages`, `tools`, `documents`,
    /// `add_generation_prompt`, the special tokens by name, and the user's variables.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] with the line, for a template that does not parse, raises an error, or cannot be rendered.
    pub fn render(&self, variables: &Value) -> Result<String> {
        let compiled = self.compiled.as_ref().map_err(|fault| self.error(fault.clone()))?;
        let json = variables.to_string();
        let (steps, has_long) = (fuel(json.len()), json.contains(LONG_INTEGER_MARK));
        let rendered = on_own_stack(|| {
            let mut environment = compiled.borrow_owner().clone();
            environment.set_fuel(Some(steps));
            environment.set_formatter(formatter());
            let instructions = compiled.borrow_dependent();
            let (blocks, mut text) = (BTreeMap::new(), String::new());
            let mut out = machinery::make_string_output(&mut text);
            let root = if has_long { values::with_long_integers(variables) } else { Jinja::from(Serde(variables)) };
            let rendered = machinery::eval(&environment, instructions, root, &blocks, &mut out, AutoEscape::None);
            match rendered.map(drop) {
                Ok(()) if has_long => Ok(long_integers_as_digits(text)),
                Ok(()) => Ok(text),
                Err(e) if e.kind() == ErrorKind::OutOfFuel => Err(Fault {
                    message: format!(
                        "it takes more than {steps} steps (an instruction, 64 bytes of data or 8 bytes of characters are one): it does not end, \
                         or what it makes grows without bound; {WAY_OUT}"
                    ),
                    ..Fault::from(&e)
                }),
                Err(e) => Err(Fault::from(&e)),
            }
        });
        rendered.map_err(|fault| self.error(fault))
    }
}

impl From<&minijinja::Error> for Fault {
    fn from(error: &minijinja::Error) -> Self {
        let message = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
        let source = std::error::Error::source(error).map_or_else(String::new, |source| format!(": {source}"));
        Self { line: error.line(), message: format!("{message}{source}") }
    }
}

/// Returns an environment with the functions of `transformers` (`_compile_jinja_template` in its `chat_template_utils.py`).
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    // Only invalid delimiters can fail, and these are Jinja's.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax);
    }
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(values::method);
    bounds::add_to(&mut environment);
    environment.add_global(source::ONE, 1);
    environment.add_filter("format", printf::format);
    environment.add_filter("indent", filters::indent);
    environment.add_filter("string", python::charged_text);
    environment.add_filter("tojson", json::tojson);
    environment.add_test("iterable", python::is_iterable);
    environment.add_test("sequence", python::is_sequence);
    environment.add_function("raise_exception", |message: &Jinja, _: Kwargs| -> Result<Jinja, minijinja::Error> {
        Err(limits::invalid(python::text(message)?))
    });
    add_date(&mut environment, date::now());
    environment
}

/// Sets the date of `strftime_now`.
fn add_date(environment: &mut Environment<'static>, date: jiff::civil::DateTime) {
    environment.add_function(STRFTIME_NOW, move |state: &State<'_, '_>, format: &str| {
        // A field of two characters is a calculation.
        state.consume_fuel(format.len() as u64)?;
        date::strftime(date, format)
    });
}

/// Returns messages as `transformers` passes them to a template: without null keys, and with an assistant's reasoning under the names that
/// templates read.
pub(crate) fn normalized(messages: &[Value]) -> Result<Vec<Value>> {
    if messages.is_empty() {
        return Err(Error::Messages("expected at least one message, got none".into()));
    }
    let normalized = messages.iter().enumerate().map(|(index, message)| {
        let Value::Object(fields) = message else {
            let expected = "an object with `role` and `content`";
            return Err(Error::Messages(format!("message {}: expected {expected}, got {message}", index + 1)));
        };
        let mut fields: Map<String, Value> =
            fields.iter().filter(|(_, value)| !value.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect();
        let reasoning =
            ["reasoning_content", "thinking", "reasoning"].iter().find_map(|name| fields.get(*name)).cloned();
        if let Some(reasoning) = reasoning {
            // `{"thinking": reasoning, **message, "reasoning_content": reasoning}`
            let thinking = fields.shift_remove("thinking").unwrap_or_else(|| reasoning.clone());
            fields.shift_insert(0, "thinking".into(), thinking);
            fields.insert("reasoning_content".into(), reasoning);
        }
        Ok(Value::Object(fields))
    });
    normalized.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn template_errors_have_line_and_message() {
        let parse =
            ChatTemplate::new("a\n{% if x %}\n{{ y }", "broken.jinja").render(&json!({})).unwrap_err().to_string();
        assert!(parse.contains("broken.jinja") && parse.contains("line 3"), "{parse}");
        let raise = ChatTemplate::new("a\n\n{{ raise_exception('Roles must alternate') }}", "t").render(&json!({}));
        assert_eq!(raise.unwrap_err().to_string(), "chat template (t), line 3: Roles must alternate");
        let filter = ChatTemplate::new("{{ x | nope }}", "t").render(&json!({})).unwrap_err().to_string();
        assert!(filter.contains("line 1") && filter.contains("nope"), "{filter}");
        let undefined = ChatTemplate::new("{{ x.y.z }}", "t").render(&json!({})).unwrap_err().to_string();
        assert!(undefined.contains("undefined"), "{undefined}");
    }

    #[test]
    fn integers_of_any_length_are_digits() {
        let source = "{{ x | tojson }} {{ x }} {{ [x] }} {{ {'k': x} | tojson(ensure_ascii=true, indent=1) }}";
        for digits in ["98765432109876543210987", "-98765432109876543210987", &"9".repeat(60)] {
            let json = format!(r#"{{"x": {digits}}}"#);
            let variables: Value = serde_json::from_str(&grpo_files::mark_long_integers(&json)).unwrap();
            let text = ChatTemplate::new(source, "t").render(&variables).unwrap();
            assert_eq!(text, format!("{digits} {digits} [{digits}] {{\n \"k\": {digits}\n}}"));
        }
        let variables = json!({"x": grpo_files::long_integer("98765432109876543210987")});
        let kinds = "{{ x is string }} {{ x is number }} {{ x is integer }} {{ x + 1 }}";
        let text = ChatTemplate::new(kinds, "t").render(&variables).unwrap();
        assert_eq!(text, "False True True 98765432109876543210988");
    }

    #[test]
    fn a_newline_behind_a_raw_tag_stays() {
        let source = "{% for m in messages %}<turn>{{ m }}{% raw %}\n{{ x }}{% endraw %}\n<end>{%- raw -%}\n{% endraw %}{% endfor %}";
        let text = ChatTemplate::new(source, "t").render(&json!({"messages": ["a", "b"]})).unwrap();
        assert_eq!(text, "<turn>a\n{{ x }}<end><turn>b\n{{ x }}<end>");
    }

    #[test]
    fn strings_in_lists_have_the_escapes_of_python() {
        let variables = json!({"x": ["\u{a0}é你\u{200b}🙂\u{e0001}\u{7f} ~\u{2028}"]});
        let text = ChatTemplate::new("{{ x }}", "t").render(&variables).unwrap();
        assert_eq!(text, r"['\xa0é你\u200b🙂\U000e0001\x7f ~\u2028']");
    }

    #[test]
    fn strftime_now_uses_the_opening_time_or_the_set_date() {
        let template = || ChatTemplate::new("{{ strftime_now('%d %b %Y') }}", "t");
        let text = template().render(&json!({})).unwrap();
        assert_eq!(text, jiff::Zoned::now().strftime("%d %b %Y").to_string());
        let set = template().with_date("2024-07-26T10:00:00").unwrap();
        assert!(set.is_dated());
        assert_eq!(set.render(&json!({})).unwrap(), "26 Jul 2024");
        assert_eq!(template().with_date(&ChatTemplate::now()).unwrap().render(&json!({})).unwrap(), text);
        let error = template().with_date("26 July").err().unwrap().to_string();
        assert!(error.contains("26 July") && error.contains("2026-11-25"), "{error}");
        let error = ChatTemplate::new("{{ strftime_now('%') }}", "t").render(&json!({})).unwrap_err();
        assert!(matches!(error, Error::ChatTemplate { line: Some(1), .. }), "{error}");
    }
}
