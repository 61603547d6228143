//! The columns of files and the types of their values.

use super::lines::Lines;
use crate::config::DataFile;
use crate::error::Result;
use crate::prompt;
use rayon::prelude::*;
use serde_json::Value;

/// The columns of the rows of files; fields of objects have a path (`reward_model.ground_truth`).
///
/// ```no_run
/// let columns = grpo_data::Columns::read(&[grpo_data::DataFile::new("train.jsonl")])?;
/// for column in &columns.columns {
///     println!("{}: {} texts in {} rows", column.name, column.texts, columns.rows);
/// }
/// # Ok::<(), grpo_data::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Columns {
    /// The number of rows.
    pub rows: usize,
    /// The columns, in the order of their first occurrence.
    pub columns: Vec<Column>,
}

/// A column, with counts of its values by type. Null and empty texts do not count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Column {
    /// The name.
    pub name: String,
    /// The number of texts.
    pub texts: usize,
    /// The number of numbers and booleans.
    pub scalars: usize,
    /// The number of conversations: lists of messages with `role` and `content`, also as JSON texts.
    pub conversations: usize,
    /// The number of conversations that end with a message of the assistant.
    pub answered: usize,
    /// The number of lists of texts, numbers and booleans.
    pub lists: usize,
    /// The number of other lists and of objects.
    pub others: usize,
}

const MOST_COLUMNS: usize = 256;

impl Columns {
    /// Reads all rows of `files`.
    ///
    /// # Errors
    /// [`crate::Error::Io`] and [`crate::Error::File`] for a file; [`crate::Error::Row`] for a row that is not a JSON object in UTF-8.
    pub fn read(files: &[DataFile]) -> Result<Self> {
        let mut found = Self::default();
        for file in files {
            let lines = Lines::open(file)?;
            lines.for_each(|rows| {
                let parsed: Vec<_> = rows.par_iter().map(|(place, text)| lines.parse(text, place.line())).collect();
                for fields in parsed {
                    found.rows += 1;
                    for (name, value) in &fields? {
                        found.count(name, value);
                    }
                }
                Ok(())
            })?;
        }
        Ok(found)
    }

    /// Returns the column called `name`.
    pub fn get(&self, name: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.name == name)
    }

    fn count(&mut self, name: &str, value: &Value) {
        let index = match self.columns.iter().position(|column| column.name == name) {
            Some(index) => index,
            None if self.columns.len() < MOST_COLUMNS => {
                self.columns.push(Column { name: name.to_owned(), ..Column::default() });
                self.columns.len() - 1
            }
            None => return,
        };
        let column = &mut self.columns[index];
        if let Some(messages) = prompt::messages(value) {
            column.conversations += 1;
            let last = messages.last().and_then(|message| message.get("role")).and_then(Value::as_str);
            column.answered += usize::from(last == Some("assistant"));
            return;
        }
        match value {
            Value::Null => {}
            Value::String(text) => column.texts += usize::from(!text.trim().is_empty()),
            Value::Number(_) | Value::Bool(_) => column.scalars += 1,
            Value::Array(values) if !values.is_empty() && values.iter().all(is_plain) => column.lists += 1,
            Value::Array(_) => column.others += 1,
            Value::Object(fields) => {
                column.others += 1;
                // Named as in `data.answer_column`: `reward_model.ground_truth`.
                if !name.contains('.') {
                    fields.iter().for_each(|(field, value)| self.count(&format!("{name}.{field}"), value));
                }
            }
        }
    }
}

fn is_plain(value: &Value) -> bool {
    matches!(value, Value::String(_) | Value::Number(_) | Value::Bool(_))
}

impl Column {
    /// Returns the number of values that can be a prompt: texts and conversations.
    pub fn prompts(&self) -> usize {
        self.texts + self.conversations
    }

    /// Returns the number of values that can be an answer: texts, numbers, booleans and lists of them.
    pub fn answers(&self) -> usize {
        self.texts + self.scalars + self.lists
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_values_are_counted_by_type() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        let rows = [
            r#"{"q": "a", "n": 1, "m": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}"#,
            r#"{"q": " ", "n": null, "m": "[{\"role\": \"user\", \"content\": \"x\"}]", "o": {"a": 1}, "l": [1]}"#,
        ];
        std::fs::write(&path, rows.join("\n")).unwrap();
        let found = Columns::read(&[DataFile::new(&path), DataFile::new(&path)]).unwrap();
        assert_eq!(found.rows, 4);
        let names: Vec<&str> = found.columns.iter().map(|column| column.name.as_str()).collect();
        assert_eq!(names, ["q", "n", "m", "o", "o.a", "l"]);
        let counts = |name: &str| {
            let Column { texts, scalars, conversations, answered, lists, others, .. } = found.get(name).unwrap();
            [*texts, *scalars, *conversations, *answered, *lists, *others]
        };
        assert_eq!(counts("q"), [2, 0, 0, 0, 0, 0]);
        assert_eq!(counts("n"), [0, 2, 0, 0, 0, 0]);
        assert_eq!(counts("m"), [0, 0, 4, 2, 0, 0]);
        assert_eq!(
            [counts("o"), counts("o.a"), counts("l")],
            [[0, 0, 0, 0, 0, 2], [0, 2, 0, 0, 0, 0], [0, 0, 0, 0, 2, 0]]
        );
    }
}
