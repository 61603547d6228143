//! Converts the columns of a row to a prompt with its answer.

use crate::config::{ApplyChatTemplate, DataConfig, FewShot};
use crate::dataset::Item;
use crate::error::{Error, Result, check};
use crate::files::lines::shown;
use crate::files::report::{likely_answer_column, quoted};
use crate::prompt::{self, Prompt, is_message, list_in_text, parsed_entries, prompt_hash};
use grpo_files::{long_digits, long_integers_as_text, read_regular};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The maximum number of columns that a report or an error lists.
pub(super) const MOST_COLUMNS: usize = 32;

/// The largest file of tools, in bytes.
const MAX_TOOLS: u64 = 64 << 20;

#[derive(Clone, Debug)]
pub(super) struct RowReader {
    config: DataConfig,
    has_chat_template: bool,
    tools: Option<Value>,
}

/// The contents of a column of tools.
const EXPECTED_TOOLS: &str = "a list of functions with names, e.g. `[{\"type\": \"function\", \"function\": {\"name\": \"add\", \
                              \"parameters\": {\"type\": \"object\"}}}]`";

/// The result of reading a row; the caller adds the line number to the error.
pub(super) type RowResult<T> = std::result::Result<T, String>;

impl RowReader {
    /// Reads the file of tools, and checks that there is a chat template if one is required.
    pub(super) fn new(config: &DataConfig, has_chat_template: bool) -> Result<Self> {
        let can_apply = has_chat_template || config.apply_chat_template != ApplyChatTemplate::Always;
        let expected = "a model with a chat template, or one in data.chat_template";
        check(can_apply, "data.apply_chat_template", expected, "a model without")?;
        let tools = config.tools_file.as_ref().map(|path| {
            let bytes = read_regular(path, MAX_TOOLS).map_err(|e| grpo_files::Error::io("read", path, e))?;
            let expected = format!("`data.tools_file`: expected {EXPECTED_TOOLS}");
            let file = |reason: String| Error::File { path: path.clone(), reason };
            match serde_json::from_slice(&bytes) {
                Ok(Value::Array(tools)) if tools.iter().all(is_tool) => Ok(tools.into()),
                Ok(other) => Err(file(format!("{expected}, got {}", shown(&other)))),
                Err(e) => Err(file(format!("{expected}: {e}"))),
            }
        });
        Ok(Self { config: config.clone(), has_chat_template, tools: tools.transpose()? })
    }

    /// Returns the column of the prompt, its value, and `true` if it is a conversation that includes the answer.
    fn prompt_column<'a>(&'a self, fields: &'a Map<String, Value>) -> RowResult<(&'a str, &'a Value, bool)> {
        let set = self.config.prompt_column.as_deref().map(|column| (column, false));
        let set = set.or(self.config.messages_column.as_deref().map(|column| (column, true)));
        let columns = match set {
            Some(column) => vec![column],
            None => vec![("prompt", false), ("messages", true), ("question", false)],
        };
        let found = columns.iter().find_map(|(column, whole)| {
            at_path(fields, column).filter(|value| !value.is_null()).map(|value| (*column, value, *whole))
        });
        found.ok_or_else(|| {
            let expected = quoted(columns.iter().map(|(column, _)| *column), " or ");
            let present = quoted(fields.keys(), ", ");
            let example = fields.iter().find(|(_, value)| value.is_string()).map_or("problem", |(key, _)| key.as_str());
            format!(
                "expected a prompt in column {expected}, got the columns {present}: name the one of the prompt, as in \
                 `data: {{ prompt_column: {example} }}`"
            )
        })
    }

    /// Returns the row for training, and the hash of its prompt without additions, which selects the split.
    pub(super) fn item(&self, mut fields: Map<String, Value>, source: &Arc<str>) -> RowResult<(u64, Item)> {
        let (column, value, is_conversation) = self.prompt_column(&fields)?;
        refuse_media_columns(&fields)?;
        let messages = match (value, prompt::messages(value)) {
            (_, Some(messages)) => Some(messages),
            (Value::Array(messages), None) => Some(parsed_entries(messages.clone())),
            (Value::String(text), None) if is_python(text) => {
                let fix = "`json.dumps(messages)` writes it as JSON, which is read";
                return Err(format!(
                    "column `{column}`: expected a text or messages, got the messages as Python prints them: {fix}"
                ));
            }
            (Value::String(text), None) if is_conversation && text.trim_start().starts_with('[') => list_in_text(text),
            _ => None,
        };
        let (prompt, reference) = match (value, messages) {
            (_, Some(messages)) => {
                let (messages, reference) = conversation(column, &messages, is_conversation)?;
                (Prompt::Messages { messages, tools: None, documents: None }, reference)
            }
            (Value::String(text), None) if !is_conversation => {
                (Prompt::Text(long_digits(text).unwrap_or(text).to_owned()), None)
            }
            (other, None) => {
                let text = if is_conversation { "" } else { "a text or " };
                return Err(format!("column `{column}`: expected {text}a list of messages, got {}", shown(other)));
            }
        };
        let (column, hash) = (column.to_owned(), prompt_hash(&prompt.to_string()));
        let prompt = self.framed(prompt, &column, &fields)?;
        // Chat templates write integers beyond 64 bits as numbers; for rewards they are texts.
        fields.values_mut().for_each(long_integers_as_text);
        let mut answers = self.answers(&fields)?;
        let mut completion = match fields.get("completion") {
            Some(Value::String(text)) => Some(text.clone()),
            // TRL's conversational format: the assistant's message.
            Some(Value::Array(messages)) => messages.first().and_then(content).map(str::to_owned),
            _ => None,
        };
        if let Some(reference) = reference {
            completion = completion.or(Some(reference.clone()));
            if answers.is_empty() {
                answers.push(reference);
            }
        }
        // GSM8K: the steps of the solution, then the answer.
        for answer in &mut answers {
            if let Some((_, short)) = answer.rsplit_once("####") {
                let short = short.trim().to_owned();
                let solution = std::mem::replace(answer, short);
                completion = completion.or(Some(solution));
            }
        }
        let mut answers = answers.into_iter();
        let (answer, other_answers) = (answers.next(), answers.collect());
        let source = match self.config.source_column.as_deref().and_then(|column| at_path(&fields, column)) {
            Some(Value::String(name)) => name.as_str().into(),
            Some(Value::Null) | None => Arc::clone(source),
            Some(other) => other.to_string().into(),
        };
        let mut columns = fields;
        columns.shift_remove(&column);
        let columns = Arc::new(columns);
        Ok((hash, Item { prompt, answer, other_answers, completion, columns, source, task: None }))
    }

    /// Adds the configured system prompt, examples and template to the prompt, and to messages the row's tools and documents.
    fn framed(&self, prompt: Prompt, column: &str, fields: &Map<String, Value>) -> RowResult<Prompt> {
        let DataConfig { system_prompt, few_shot, prompt_template, apply_chat_template, prompts_are_rendered, .. } =
            &self.config;
        let messages = match prompt {
            Prompt::Messages { messages, .. } => {
                if matches!(few_shot, Some(FewShot::Text(_))) {
                    return Err("data.few_shot is a text, and the row has messages: give messages".into());
                }
                messages
            }
            Prompt::Rendered(text) => return Ok(Prompt::Rendered(text)),
            Prompt::Text(text) => {
                let mut text = match prompt_template {
                    Some(template) => template.replacen("{prompt}", &text, 1),
                    None => text,
                };
                if let Some(FewShot::Text(examples)) = few_shot {
                    text.insert_str(0, examples);
                }
                let is_wrapped = match apply_chat_template {
                    ApplyChatTemplate::Auto => {
                        self.has_chat_template && column == "question" && *prompts_are_rendered != Some(true)
                    }
                    ApplyChatTemplate::Always => true,
                    ApplyChatTemplate::Never => false,
                };
                if !is_wrapped {
                    if matches!(few_shot, Some(FewShot::Messages(_))) {
                        let hint = "give a text, or data.apply_chat_template=true";
                        return Err(format!(
                            "data.few_shot is a list of messages, and the prompt stays a text: {hint}"
                        ));
                    }
                    if let Some(system) = system_prompt {
                        text = format!("{system}\n\n{text}");
                    }
                    return Ok(match prompts_are_rendered {
                        Some(true) => Prompt::Rendered(text),
                        _ => Prompt::Text(text),
                    });
                }
                vec![json!({"role": "user", "content": text})]
            }
        };
        let has_system = messages.first().and_then(role) == Some("system");
        let mut framed = vec![];
        let mut rest = messages.into_iter().peekable();
        match system_prompt {
            Some(system) if !has_system => framed.push(json!({"role": "system", "content": system})),
            _ if has_system => framed.extend(rest.next()),
            _ => {}
        }
        if let Some(FewShot::Messages(examples)) = few_shot {
            framed.extend(examples.iter().cloned());
        }
        framed.extend(rest);
        let tools = list(fields, "tools", EXPECTED_TOOLS, is_tool)?.or_else(|| self.tools.clone());
        let expected = "a list of objects for the chat template, e.g. `[{\"title\": \"A\", \"text\": \"b\"}]`; rename the column \
                        if it has other contents";
        let documents = list(fields, "documents", expected, Value::is_object)?;
        Ok(Prompt::Messages { messages: framed, tools, documents })
    }

    /// Returns the reference answers of a row; the first one is `answer`.
    fn answers(&self, fields: &Map<String, Value>) -> RowResult<Vec<String>> {
        let text = |value: &Value| match value {
            Value::String(text) => Some(text.clone()),
            Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
            _ => None,
        };
        let column = self.config.answer_column.as_deref();
        let found = at_path(fields, column.unwrap_or("answer")).filter(|value| !value.is_null());
        let answers = match found {
            Some(Value::Array(list)) => list.iter().map(text).collect::<Option<Vec<_>>>(),
            Some(value) => text(value).map(|text| vec![text]),
            None => None,
        };
        let is_blank = answers.iter().flatten().any(|answer| answer.trim().is_empty());
        match (answers, column, found) {
            (Some(_), Some(column), Some(found)) if is_blank => Err(format!(
                "column `{column}`: expected an answer, a text or a number, got the empty answer {}",
                shown(found)
            )),
            // Rewards that need an answer refuse a row without one.
            (Some(_), None, _) if is_blank => Ok(vec![]),
            (Some(answers), _, _) => Ok(answers),
            // An unconfigured column of this name with other contents is only passed to rewards.
            (None, None, _) => Ok(vec![]),
            (None, Some(column), Some(other)) => Err(format!(
                "column `{column}`: expected an answer (a text or a number) or a list of right answers, got {}",
                shown(other)
            )),
            (None, Some(column), None) => match at_path(fields, column) {
                Some(_) => Err(format!("column `{column}`: expected an answer, a text or a number, got null")),
                None => {
                    let names: Vec<String> = column_names(fields).collect();
                    let likely = likely_answer_column(names.iter().map(String::as_str));
                    let remedy = likely.map_or(String::new(), |likely| {
                        format!("; `{likely}` looks like one of answers: `--set data.answer_column={likely}`")
                    });
                    let present = quoted(names.iter(), ", ");
                    Err(format!(
                        "expected an answer in column `{column}`, and there is no such column; the columns are {present}{remedy}"
                    ))
                }
            },
        }
    }
}

/// Returns the names of columns, each followed by the paths of its fields if it is an object; at most [`MOST_COLUMNS`].
pub(super) fn column_names<'a>(
    columns: impl IntoIterator<Item = (&'a String, &'a Value)>,
) -> impl Iterator<Item = String> {
    let names = columns.into_iter().flat_map(|(column, value)| {
        let fields = value.as_object().into_iter().flat_map(Map::keys).map(move |field| format!("{column}.{field}"));
        std::iter::once(column.clone()).chain(fields)
    });
    names.take(MOST_COLUMNS)
}

/// Returns the value of the column `name`. If there is none and the name has dots, as in `reward_model.ground_truth`, it is the path
/// of a value in nested objects and lists (`choices.0`).
fn at_path<'a>(fields: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    if let Some(value) = fields.get(path) {
        return Some(value);
    }
    // Names in a path may contain dots, so every split is tried.
    path.match_indices('.').find_map(|(dot, _)| match fields.get(&path[..dot])? {
        Value::Object(inner) => at_path(inner, &path[dot + 1..]),
        Value::Array(list) => in_list(list, &path[dot + 1..]),
        _ => None,
    })
}

/// Returns the value at a path that starts with an index into the list.
fn in_list<'a>(list: &'a [Value], path: &str) -> Option<&'a Value> {
    let (index, rest) = path.split_once('.').map_or((path, None), |(index, rest)| (index, Some(rest)));
    match (list.get(index.parse::<usize>().ok()?)?, rest) {
        (value, None) => Some(value),
        (Value::Object(inner), Some(rest)) => at_path(inner, rest),
        (Value::Array(inner), Some(rest)) => in_list(inner, rest),
        _ => None,
    }
}

/// Returns the messages of a conversation without its answer, and with `is_whole` also the assistant's last message.
fn conversation(column: &str, messages: &[Value], is_whole: bool) -> RowResult<(Vec<Value>, Option<String>)> {
    for (index, message) in messages.iter().enumerate() {
        if !is_message(message) {
            let expected = "an object with `role` and `content`";
            return Err(format!(
                "column `{column}`, message {}: expected {expected}, got {}",
                index + 1,
                shown(message)
            ));
        }
        if let Some(kind) = media(message) {
            return Err(format!(
                "column `{column}`, message {}: expected text, got a part of type `{kind}`: {TEXT_ONLY}",
                index + 1
            ));
        }
    }
    let (messages, reference) = match messages.split_last() {
        Some((last, before)) if is_whole && role(last) == Some("assistant") => (before, content(last)),
        _ => (messages, None),
    };
    if messages.is_empty() {
        return Err(format!("column `{column}`: expected at least one message to answer"));
    }
    Ok((messages.to_vec(), reference.map(str::to_owned)))
}

const TEXT_ONLY: &str = "only text is supported, also for models of images and text";

/// Refuses columns with images, videos or sounds as data sets of the Hub have them: objects, or lists with an entry. Texts and numbers may
/// mean anything else.
fn refuse_media_columns(fields: &Map<String, Value>) -> RowResult<()> {
    let has_media = |value: &Value| value.is_object() || value.as_array().is_some_and(|list| !list.is_empty());
    let columns = ["image", "images", "video", "videos", "audio", "audios"];
    match columns.into_iter().find(|column| fields.get(*column).is_some_and(has_media)) {
        Some(column) => {
            Err(format!("column `{column}`: expected a row of text, got {}: {TEXT_ONLY}", shown(&fields[column])))
        }
        None => Ok(()),
    }
}

/// Returns the type of a message's first part that is not text.
fn media(message: &Value) -> Option<&str> {
    let parts = message.get("content")?.as_array()?;
    parts.iter().filter_map(|part| part.get("type")?.as_str()).find(|kind| *kind != "text")
}

/// Returns the list in a column, or in the JSON text of a column; `None` if the column is missing or null.
fn list(
    fields: &Map<String, Value>,
    column: &str,
    expected: &str,
    is_entry: impl Fn(&Value) -> bool,
) -> RowResult<Option<Value>> {
    let (value, entries) = match fields.get(column) {
        None | Some(Value::Null) => return Ok(None),
        Some(value @ Value::Array(entries)) => (value, Some(parsed_entries(entries.clone()))),
        // A column of texts has an empty one where others have a list.
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(value @ Value::String(text)) => (value, list_in_text(text)),
        Some(other) => (other, None),
    };
    match entries.filter(|entries| entries.iter().all(is_entry)) {
        Some(entries) => Ok(Some(entries.into())),
        None => Err(format!("column `{column}`: expected {expected}, got {}", shown(value))),
    }
}

/// Returns `true` for a list of messages as Python prints it, which is not JSON.
fn is_python(text: &str) -> bool {
    let mut rest = text.trim_start();
    ["[", "{", "'"].into_iter().all(|mark| match rest.strip_prefix(mark) {
        Some(behind) => {
            rest = behind.trim_start();
            true
        }
        None => false,
    }) && (rest.starts_with("role'") || rest.starts_with("content'"))
}

/// Returns `true` for a function with a name, whose parameters are a JSON schema if it has some.
fn is_tool(tool: &Value) -> bool {
    let function = tool.get("function").unwrap_or(tool);
    let has_name = function.get("name").and_then(Value::as_str).is_some_and(|name| !name.is_empty());
    let parameters = function.get("parameters").filter(|parameters| !parameters.is_null());
    has_name && parameters.is_none_or(Value::is_object)
}

fn role(message: &Value) -> Option<&str> {
    message.get("role")?.as_str()
}

fn content(message: &Value) -> Option<&str> {
    message.get("content")?.as_str()
}
