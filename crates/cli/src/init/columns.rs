//! Chooses the columns of the prompt and the answer.

use anyhow::bail;
use grpo_data::{ANSWER_COLUMNS, ApplyChatTemplate, Column, Columns, DataConfig};
use grpo_files::counted;
use grpo_trainer::TrainConfig;

/// The columns that are read as prompts without a key, in search order.
const BY_DEFAULT: [&str; 3] = ["prompt", "messages", "question"];
/// Other common names of prompt columns, most common first.
const USUAL: [&str; 8] =
    ["problem", "query", "instruction", "input", "conversation", "conversations", "user_prompt", "text"];
/// The maximum number of columns that an error describes.
const MOST: usize = 12;

/// The columns of the prompt and the reference answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Roles {
    /// The column of the prompt, or several columns of which each row has one.
    pub(super) prompts: Vec<String>,
    /// The key of the section `data` that names the column; `None` if no key is needed.
    pub(super) prompt_key: Option<&'static str>,
    /// The source of reference answers.
    pub(super) answer: Answer,
}

/// The source of reference answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum Answer {
    /// The column `answer`, or a column named by the user.
    Known(String),
    /// Another column, which `data.answer_column` must name.
    Column(String),
    /// The last message of conversations.
    Conversation,
    /// No answers.
    #[default]
    None,
}

impl Roles {
    /// Chooses the columns of the prompt and the answer from `found`; keys in `given` take precedence.
    ///
    /// # Errors
    /// An error with all columns if none can be the prompt of every row.
    pub(super) fn of(found: &Columns, given: &DataConfig) -> anyhow::Result<Self> {
        let mut roles = Self::default();
        let set = given.prompt_column.as_ref().or(given.messages_column.as_ref());
        (roles.prompts, roles.prompt_key) = match set {
            Some(column) => (vec![column.clone()], None),
            None => prompt(found)?,
        };
        roles.answer = answer(found, given, &roles.prompts);
        Ok(roles)
    }

    /// Returns `true` if prompts are texts.
    pub(super) fn has_texts(&self, found: &Columns) -> bool {
        self.prompts.iter().filter_map(|name| found.get(name)).any(|column| column.texts > 0)
    }

    /// Describes the prompt's column and its rendering.
    pub(super) fn prompt_text(&self, config: &TrainConfig, found: &Columns, has_chat_template: bool) -> String {
        let columns: Vec<String> = self.prompts.iter().map(|name| format!("`{name}`")).collect();
        let columns = columns.join(" or ");
        let form = match (self.has_texts(found), config.data.apply_chat_template) {
            (false, _) => "messages that the chat template renders",
            (true, ApplyChatTemplate::Always) => {
                "a text that becomes a user's message, which the chat template renders"
            }
            (true, _) if has_chat_template => "a text that is sent as it is (data.apply_chat_template)",
            (true, _) => "a text that is sent as it is",
        };
        format!("column {columns}, {form}")
    }

    /// Describes the source of reference answers.
    pub(super) fn answer_text(&self) -> String {
        match &self.answer {
            Answer::Known(column) | Answer::Column(column) => format!("column `{column}`"),
            Answer::Conversation => "the last message of each conversation".into(),
            Answer::None => "none".into(),
        }
    }
}

/// Returns the columns of the prompt, and the key that is needed if the column is not read by default.
fn prompt(found: &Columns) -> anyhow::Result<(Vec<String>, Option<&'static str>)> {
    let rows = found.rows;
    let in_all = |name: &&str| found.get(name).is_some_and(|column| column.prompts() == rows);
    let has_prompts = |name: &&str| found.get(name).is_some_and(|column| column.prompts() > 0);
    let defaults: Vec<&str> = BY_DEFAULT.into_iter().filter(has_prompts).collect();
    // Rows are searched in this order, so an earlier default column with values in some rows makes a key necessary.
    if let Some(name) = defaults.iter().find(|name| in_all(name)) {
        let key = if defaults.first() == Some(name) { None } else { Some(key_of(found, name)) };
        return Ok((vec![(*name).to_owned()], key));
    }
    // Files of different kinds have one of these columns each.
    let together: usize = defaults.iter().filter_map(|name| found.get(name)).map(Column::prompts).sum();
    if defaults.len() > 1 && together == rows {
        return Ok((defaults.iter().map(|name| (*name).to_owned()).collect(), None));
    }
    let usual = USUAL.into_iter().find(in_all).map(str::to_owned);
    let is_other = |column: &&Column| {
        let name = column.name.as_str();
        !ANSWER_COLUMNS.contains(&name) && name != "answer" && !name.contains('.')
    };
    let sole = |count: fn(&Column) -> usize| {
        let mut all = found.columns.iter().filter(is_other).filter(|column| count(column) == rows);
        all.next().filter(|_| all.next().is_none()).map(|column| column.name.clone())
    };
    let chosen = usual.or_else(|| sole(|column| column.conversations)).or_else(|| sole(|column| column.texts));
    if let Some(name) = chosen {
        let key = key_of(found, &name);
        return Ok((vec![name], Some(key)));
    }
    let candidate = found.columns.iter().filter(is_other).max_by_key(|column| column.prompts());
    let candidate = candidate.filter(|column| column.prompts() > 0).map_or("COLUMN", |column| &column.name);
    bail!(
        "no column is the prompt of every row: expected a text or a list of messages (objects with `role` and `content`) in one of {}, \
         found {} with {}; name the column of the prompt, e.g. `--set data.prompt_column={candidate}`",
        BY_DEFAULT.into_iter().chain(USUAL).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "),
        counted(rows, "row"),
        described(found),
    )
}

/// Returns the key for a prompt column: `messages_column` if conversations end with their answer, else `prompt_column`.
fn key_of(found: &Columns, name: &str) -> &'static str {
    match found.get(name).is_some_and(|column| column.answered > 0) {
        true => "messages_column",
        false => "prompt_column",
    }
}

fn answer(found: &Columns, given: &DataConfig, prompts: &[String]) -> Answer {
    if let Some(column) = &given.answer_column {
        return Answer::Known(column.clone());
    }
    let has = |name: &&str| !prompts.iter().any(|prompt| prompt == name) && found.get(name).is_some();
    let in_all = |name: &&str| has(name) && found.get(name).is_some_and(|column| column.answers() == found.rows);
    let all_answered =
        prompts.iter().filter_map(|name| found.get(name)).map(|column| column.answered).sum::<usize>() == found.rows;
    if in_all(&"answer") {
        return Answer::Known("answer".into());
    }
    match ANSWER_COLUMNS.into_iter().find(in_all) {
        Some(name) => Answer::Column(name.into()),
        None if all_answered && given.prompt_column.is_none() => Answer::Conversation,
        // Not in every row: an error names the rows without one.
        None if has(&"answer") && found.get("answer").is_some_and(|column| column.answers() > 0) => {
            Answer::Known("answer".into())
        }
        None => Answer::None,
    }
}

/// Describes the columns and their values for errors.
pub(super) fn described(found: &Columns) -> String {
    let one = |column: &Column| {
        let kinds = [
            (column.texts, "text"),
            (column.scalars, "number or boolean"),
            (column.conversations, "conversation"),
            (column.lists, "list"),
            (column.others, "other list or object"),
        ];
        let kinds = kinds.into_iter().filter(|(count, _)| *count > 0).map(|(count, kind)| match kind {
            "number or boolean" if count != 1 => format!("{count} numbers or booleans"),
            "other list or object" if count != 1 => format!("{count} other lists or objects"),
            kind => counted(count, kind),
        });
        let kinds: Vec<String> = kinds.collect();
        let kinds = if kinds.is_empty() { "no values".into() } else { kinds.join(", ") };
        format!("`{}` ({kinds})", column.name)
    };
    let more = if found.columns.len() > MOST { ", ..." } else { "" };
    let columns: Vec<String> = found.columns.iter().take(MOST).map(one).collect();
    if columns.is_empty() { "no columns".into() } else { format!("the columns {}{more}", columns.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(name: &str, count: usize) -> Column {
        Column { name: name.into(), texts: count, ..Column::default() }
    }

    fn found(columns: &[Column]) -> Columns {
        Columns { rows: 10, columns: columns.to_vec() }
    }

    fn roles(columns: &[Column]) -> (Vec<String>, Option<&'static str>, Answer) {
        let Roles { prompts, prompt_key, answer } = Roles::of(&found(columns), &DataConfig::default()).unwrap();
        (prompts, prompt_key, answer)
    }

    fn column(name: &str) -> Answer {
        Answer::Column(name.into())
    }

    #[test]
    fn common_column_names_are_recognised() {
        let known = || Answer::Known("answer".into());
        assert_eq!(roles(&[texts("question", 10), texts("answer", 10)]), (vec!["question".into()], None, known()));
        assert_eq!(
            roles(&[texts("problem", 10), texts("solution", 10)]),
            (vec!["problem".into()], Some("prompt_column"), column("solution"))
        );
        // An integer answer, and a prompt column that is missing in some rows.
        let label = Column { name: "ground_truth".into(), scalars: 10, ..Column::default() };
        assert_eq!(
            roles(&[texts("prompt", 3), texts("question", 10), label]),
            (vec!["question".into()], Some("prompt_column"), column("ground_truth"))
        );
        assert_eq!(roles(&[texts("prompt", 4), texts("question", 6)]).0, ["prompt", "question"]);
        assert_eq!(roles(&[texts("frage", 10), texts("target", 10)]).0, ["frage"], "the only text that is no answer");
    }

    #[test]
    fn conversations_contain_their_answers() {
        let messages =
            |name: &str, answered| Column { name: name.into(), conversations: 10, answered, ..Column::default() };
        assert_eq!(roles(&[messages("messages", 10)]), (vec!["messages".into()], None, Answer::Conversation));
        let named = roles(&[messages("chat", 10), texts("id", 10)]);
        assert_eq!(named, (vec!["chat".into()], Some("messages_column"), Answer::Conversation));
        assert_eq!(roles(&[messages("prompt", 0), texts("source", 10)]).2, Answer::None);
    }

    #[test]
    fn columns_named_by_the_user_are_used() {
        let given =
            DataConfig { prompt_column: Some("a".into()), answer_column: Some("b".into()), ..DataConfig::default() };
        let columns = found(&[texts("a", 10), texts("b", 10), texts("question", 10), texts("answer", 10)]);
        let roles = Roles::of(&columns, &given).unwrap();
        let expected = Roles { prompts: vec!["a".into()], prompt_key: None, answer: Answer::Known("b".into()) };
        assert_eq!(roles, expected);
    }
}
