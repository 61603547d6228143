//! The section `data` of a run's configuration: tasks or files, their weights, and the held-out split.

mod files;
mod paths;

use crate::error::{Result, check};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use smart_default::SmartDefault;
use std::path::PathBuf;

pub use files::{ApplyChatTemplate, DataFile, FewShot, FileFormat, History};
pub use paths::at_home;

/// The limit of letters or digits in a task's problem.
const MAX_LENGTH: usize = 1 << 10;

/// The valid values of `data.held_out_fraction`.
pub(crate) const HELD_OUT_FRACTION: &str = "at least 0 (nothing is held out) and below 1";

/// The problems of a run, from built-in tasks or files, and the share that is held out.
///
/// ```
/// let mut config = grpo_data::DataConfig::default();
/// config.tasks.addition.weight = 1.0;
/// config.tasks.sorting.weight = 1.0; // as often as additions
/// config.validate()?;
///
/// let config = grpo_data::DataConfig {
///     files: vec![grpo_data::DataFile::new("gsm8k.jsonl")],
///     system_prompt: Some("Put the final answer in \\boxed{}.".into()),
///     max_prompt_length: Some(512),
///     ..Default::default()
/// };
/// config.validate()?;
/// # Ok::<(), grpo_data::Error>(())
/// ```
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// The share of prompts, selected by a hash of their text, that is never trained on; in [0, 1). With 0 and without `eval_files`, the run has
    /// no evaluation.
    #[default(0.1)]
    pub held_out_fraction: f64,
    /// The built-in tasks, and how often each is drawn. Files take their place.
    pub tasks: TasksConfig,
    /// The training files, or data sets on the Hugging Face Hub (`openai/gsm8k`); a path may start with `~` or be a pattern such as
    /// `data/*.jsonl`. A row is an object with one of `prompt` (text, or
    /// a list of messages), `messages` (whose last one, if it is the assistant's, is the reference answer) and `question`; and `answer`
    /// (`#### ` separates a solution from the final answer, as in GSM8K), `completion` (a whole reference completion), and `tools` and
    /// `documents` for the chat template. Rewards receive every column except the prompt's.
    #[serde(deserialize_with = "files::one_or_more")]
    pub files: Vec<DataFile>,
    /// The files of the held-out split; of a data set, the split `test`. The default is `held_out_fraction` of `files`.
    #[serde(deserialize_with = "files::one_or_more")]
    pub eval_files: Vec<DataFile>,
    /// The column of the prompt, a text or a list of messages; the default is `prompt`, else `messages`, else `question`.
    pub prompt_column: Option<String>,
    /// The column of a conversation whose last message, if it is the assistant's, is the reference answer.
    pub messages_column: Option<String>,
    /// The column of the reference answer, or of a list of them; the default is `answer`, which rows may lack. A nested column is named by its
    /// path, as in `reward_model.ground_truth`.
    pub answer_column: Option<String>,
    /// The column with the source of a row in metrics; the default source is the file.
    pub source_column: Option<String>,
    /// The system message for rows without one; for a text prompt, text before it, separated by an empty line.
    pub system_prompt: Option<String>,
    /// The template of a text prompt, which replaces `{prompt}`: `"{prompt}\\nPut the final answer in \\boxed{}."`.
    pub prompt_template: Option<String>,
    /// Examples before every prompt: text before texts, or messages before the user message.
    pub few_shot: Option<FewShot>,
    /// A JSON file with the tools for templates, a list of functions as JSON schemas. The column `tools` of a row takes precedence.
    pub tools_file: Option<PathBuf>,
    /// The choice of texts that become messages for the model's chat template.
    pub apply_chat_template: ApplyChatTemplate,
    /// `true` if a chat template has already rendered the text prompts: special-token strings in them are parsed as special tokens, and a
    /// leading BOS is not repeated. `false` reads special-token strings as text. `None` is an error for texts with such strings.
    pub prompts_are_rendered: Option<bool>,
    /// A Jinja file that replaces the model's chat template.
    pub chat_template: Option<PathBuf>,
    /// A chat template for prompts and conversations of several turns in training: a Jinja file, or `chatml` or `qwen3`, which come with grpo and
    /// keep earlier turns as the model wrote them.
    pub training_chat_template: Option<PathBuf>,
    /// The treatment of chat templates that rewrite earlier turns, such as those without the reasoning of earlier turns: `keep` refuses them;
    /// `fork` renders a conversation anew after every turn, and goes on in another row if the tokens before have changed.
    pub history: History,
    /// Variables for the chat template, such as `enable_thinking: false`.
    #[serde(deserialize_with = "files::ordered_map")]
    pub chat_template_kwargs: Map<String, Value>,
    /// The date, or date and time, of `strftime_now` in chat templates, such as `2026-11-25`. The default is the local time of the run's start,
    /// which is recorded and kept on resume.
    pub template_date: Option<String>,
    /// The maximum number of tokens of a prompt; rows with longer ones are dropped and counted.
    pub max_prompt_length: Option<usize>,
    /// `true` if rows are shuffled in every epoch, depending on the seed; `false` for the files' order.
    #[default(true)]
    pub shuffle: bool,
}

/// The built-in tasks, with one section each; the default weight of 0 disables a task.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TasksConfig {
    /// Addition, `37+48=` -> `085`, or `85` without `zero_pad`.
    pub addition: AdditionConfig,
    /// Comparison, `37?48=` -> `<`.
    pub comparison: ComparisonConfig,
    /// Sorting of digits, `sort:3142=` -> `1234`.
    pub sorting: SortingConfig,
    /// Reversal of a word, `rev:abc=` -> `cba`.
    pub reverse: ReverseConfig,
    /// Countdown, `2,3,4:14=` -> `2*(3+4)`, or any other expression with the target value.
    pub countdown: CountdownConfig,
}

impl TasksConfig {
    /// Returns the key and the weight of each task.
    pub fn weights(&self) -> [(&'static str, f64); 5] {
        [
            ("data.tasks.addition.weight", self.addition.weight),
            ("data.tasks.comparison.weight", self.comparison.weight),
            ("data.tasks.sorting.weight", self.sorting.weight),
            ("data.tasks.reverse.weight", self.reverse.weight),
            ("data.tasks.countdown.weight", self.countdown.weight),
        ]
    }
}

/// The task of adding two non-negative integers.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdditionConfig {
    /// The relative frequency, at least 0; 0 disables the task.
    pub weight: f64,
    /// The largest summand.
    #[default(99)]
    pub max_number: u32,
    /// `true` if numbers are zero-padded to a fixed width, `37+08=` -> `045`, which is much easier to learn.
    #[default(true)]
    pub zero_pad: bool,
}

/// The task of comparing two integers.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ComparisonConfig {
    /// The relative frequency, at least 0; 0 disables the task.
    pub weight: f64,
    /// The largest number.
    #[default(99)]
    pub max_number: u32,
}

/// The task of sorting decimal digits.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SortingConfig {
    /// The relative frequency, at least 0; 0 disables the task.
    pub weight: f64,
    /// The smallest number of digits.
    #[default(3)]
    pub min_length: usize,
    /// The largest number of digits.
    #[default(4)]
    pub max_length: usize,
}

/// The task of reversing a word of random lowercase letters.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReverseConfig {
    /// The relative frequency, at least 0; 0 disables the task.
    pub weight: f64,
    /// The smallest number of letters.
    #[default(3)]
    pub min_length: usize,
    /// The largest number of letters.
    #[default(4)]
    pub max_length: usize,
}

/// The task of reaching a target with given numbers, each used once.
#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CountdownConfig {
    /// The relative frequency, at least 0; 0 disables the task.
    pub weight: f64,
    /// The number of given numbers, 2 to 4.
    #[default(3)]
    pub count: usize,
    /// The largest of the given numbers.
    #[default(9)]
    pub max_number: u32,
}

impl DataConfig {
    /// Returns `true` if some rows are held out for evaluations.
    pub fn holds_out(&self) -> bool {
        self.held_out_fraction > 0.0 || !self.eval_files.is_empty()
    }

    /// Checks that every file exists and can be opened. Reads no rows.
    ///
    /// # Errors
    /// [`crate::Error::File`] with the key and the file.
    pub fn check_files(&self) -> Result<()> {
        let rows = [("data.files", &self.files), ("data.eval_files", &self.eval_files)];
        let rows = rows.into_iter().flat_map(|(key, files)| files.iter().map(move |file| (key, &file.path)));
        let others = [("data.tools_file", &self.tools_file), ("data.chat_template", &self.chat_template)];
        let others = others.into_iter().filter_map(|(key, file)| Some((key, file.as_ref()?)));
        rows.chain(others).try_for_each(|(key, path)| paths::check_file(key, path))
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`crate::Error::Config`] with the key, the valid values and the value found.
    pub fn validate(&self) -> Result<()> {
        let f = self.held_out_fraction;
        check((0.0..1.0).contains(&f), "data.held_out_fraction", HELD_OUT_FRACTION, f)?;
        if self.files.is_empty() {
            self.validate_without_files()?
        } else {
            self.validate_files()?
        }
        let t = &self.tasks;
        for (key, weight) in t.weights() {
            check(weight.is_finite() && weight >= 0.0, key, "a finite number >= 0", weight)?;
        }
        for (key, min, max) in [
            ("data.tasks.sorting", t.sorting.min_length, t.sorting.max_length),
            ("data.tasks.reverse", t.reverse.min_length, t.reverse.max_length),
        ] {
            let expected = format!("1 <= min_length <= max_length <= {MAX_LENGTH}");
            check(1 <= min && min <= max && max <= MAX_LENGTH, key, &expected, format!("{min} and {max}"))?;
        }
        for (key, n) in [
            ("data.tasks.addition.max_number", t.addition.max_number),
            ("data.tasks.comparison.max_number", t.comparison.max_number),
            ("data.tasks.countdown.max_number", t.countdown.max_number),
        ] {
            check((1..=999_999).contains(&n), key, "between 1 and 999999", n)?;
        }
        let count = t.countdown.count;
        Ok(check((2..=4).contains(&count), "data.tasks.countdown.count", "between 2 and 4", count)?)
    }

    /// Rejects keys that only concern files if there are none, because they would have no effect. Conversations about a program's own rows may
    /// fork.
    fn validate_without_files(&self) -> Result<()> {
        let (tasks, history) = (self.tasks.clone(), self.history);
        let default = Self { held_out_fraction: self.held_out_fraction, tasks, history, ..Self::default() };
        let values = |config: &Self| serde_json::to_value(config).unwrap_or_default();
        let (Value::Object(given), Value::Object(default)) = (values(self), values(&default)) else { return Ok(()) };
        match given.iter().find(|(key, value)| default.get(*key) != Some(value)) {
            Some((key, value)) => {
                let expected = "left out without data.files: the built-in tasks do not use it";
                Ok(check(false, &format!("data.{key}"), expected, value)?)
            }
            None => Ok(()),
        }
    }

    fn validate_files(&self) -> Result<()> {
        let mut tasks = self.tasks.clone();
        // This weight was the default of older runs and is in their config.yaml.
        if tasks.addition.weight == 1.0 {
            tasks.addition.weight = 0.0;
        }
        let is_default = tasks == TasksConfig::default();
        check(is_default, "data.tasks", "left out where data.files is given: a run has tasks or files", "both")?;
        for (key, files) in [("data.files", &self.files), ("data.eval_files", &self.eval_files)] {
            let weighted = files.iter().filter(|file| file.weight.is_some()).count();
            let expected = "a weight for every file, or for none";
            check(weighted == 0 || weighted == files.len(), key, expected, format!("{weighted} of {}", files.len()))?;
            for weight in files.iter().filter_map(|file| file.weight) {
                check(weight.is_finite() && weight > 0.0, key, "weights that are finite and above 0", weight)?;
            }
        }
        let weighted = self.eval_files.iter().any(|file| file.weight.is_some());
        check(!weighted, "data.eval_files", "no weights: every held-out row is evaluated once", "weights")?;
        if let (Some(prompt), Some(messages)) = (&self.prompt_column, &self.messages_column) {
            let found = format!("{prompt:?} and {messages:?}");
            check(false, "data.prompt_column", "one of data.prompt_column and data.messages_column", found)?;
        }
        if let Some(template) = &self.prompt_template {
            check(template.contains("{prompt}"), "data.prompt_template", "a text with {prompt} in it", template)?;
        }
        if let Some(length) = self.max_prompt_length {
            check(length > 0, "data.max_prompt_length", "at least 1", length)?;
        }
        if let (Some(FewShot::Messages(_)), ApplyChatTemplate::Never) = (&self.few_shot, self.apply_chat_template) {
            check(false, "data.few_shot", "a text with data.apply_chat_template=false", "messages")?;
        }
        if let (Some(_), Some(training)) = (&self.chat_template, &self.training_chat_template) {
            let expected = "left out with data.chat_template: both replace the model's chat template";
            check(false, "data.training_chat_template", expected, training.display())?;
        }
        if self.prompts_are_rendered == Some(true) {
            let key = "data.prompts_are_rendered";
            let is_wrapped = self.apply_chat_template == ApplyChatTemplate::Always;
            check(!is_wrapped, key, "left out with data.apply_chat_template=true, which renders texts", "true")?;
            let is_set = [
                ("data.system_prompt", self.system_prompt.is_some()),
                ("data.prompt_template", self.prompt_template.is_some()),
                ("data.few_shot", self.few_shot.is_some()),
            ];
            if let Some((other, _)) = is_set.into_iter().find(|(_, is_set)| *is_set) {
                check(false, key, &format!("left out with {other}, which puts text around a prompt"), "true")?;
            }
        }
        for key in ["messages", "tools", "add_generation_prompt"] {
            let expected = "variables of the template's own";
            check(!self.chat_template_kwargs.contains_key(key), "data.chat_template_kwargs", expected, key)?;
        }
        Ok(())
    }
}
