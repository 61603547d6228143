//! Tools and the tokens between turns, per list of tools; and the checks of environments before a run.

use crate::lockstep::{Sampled, leads, share};
use crate::{Error, Result, encode_prompt};
use grpo_agents::{Environments, Failure, Parsed, ReasoningParser, Start, ToolCall, ToolParser};
use grpo_data::{History, Item, Prompt};
use grpo_distributed::Store;
use grpo_models::{Tokenizer, TurnTokens};
use grpo_run_config::MultiTurnConfig;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

/// The key of the parser of tool calls.
const PARSER: &str = "rollout.multi_turn.tool_parser";

/// The name of the result of [`check_environments`].
const CHECKED: &str = "the check of the environments";

/// The tokens between turns by tools and role, and the formats of tool calls. They are found once.
pub(crate) struct Tools<'a> {
    tokenizer: &'a dyn Tokenizer,
    history: History,
    /// The parsers of the configuration.
    parser: Option<ToolParser>,
    reasoning: Option<ReasoningParser>,
    turns: HashMap<(String, String), Arc<TurnTokens>>,
    formats: HashMap<String, Format>,
}

/// The format of the messages of the assistant.
#[derive(Clone, Copy)]
struct Format {
    parser: ToolParser,
    /// `true` if the prompt ends with the start of thoughts.
    is_open: bool,
}

impl<'a> Tools<'a> {
    pub(crate) fn new(tokenizer: &'a dyn Tokenizer, config: &MultiTurnConfig, history: History) -> Self {
        let (parser, reasoning) = (config.tool_parser, config.reasoning_parser);
        Self { tokenizer, history, parser, reasoning, turns: HashMap::new(), formats: HashMap::new() }
    }

    /// Returns `true` if conversations whose template rewrites earlier turns go on in other rows.
    pub(crate) fn forks(&self) -> bool {
        self.history == History::Fork
    }

    /// Returns the tokens of turns that begin with a message of `role`.
    pub(crate) fn turns(&mut self, tools: Option<&Value>, role: &str) -> Result<Arc<TurnTokens>> {
        let key = (tools.map(Value::to_string).unwrap_or_default(), role.to_owned());
        if let Some(turns) = self.turns.get(&key) {
            return Ok(Arc::clone(turns));
        }
        let find = match self.history {
            History::Keep => TurnTokens::new,
            History::Fork => TurnTokens::forking,
        };
        let turns = Arc::new(find(self.tokenizer, tools, role)?);
        self.turns.insert(key, Arc::clone(&turns));
        Ok(turns)
    }

    /// Returns the format of messages: the configured parser of tool calls, or else the one that reads the calls which the chat template
    /// writes.
    ///
    /// # Errors
    /// [`grpo_run_config::Error::Key`] if no parser does; the errors of the tokenizer.
    fn format(&mut self, tools: &Value) -> Result<Format> {
        let key = tools.to_string();
        if let Some(format) = self.formats.get(&key) {
            return Ok(*format);
        }
        let parser = self.parser.map_or_else(|| self.parser_of_template(tools), Ok)?;
        let prompt = self.prompt(tools)?;
        let format = Format { parser, is_open: grpo_agents::opens_thoughts(&prompt, self.reasoning) };
        self.formats.insert(key, format);
        Ok(format)
    }

    /// Renders a prompt with tools.
    fn prompt(&self, tools: &Value) -> Result<String> {
        let question = json!({"role": "user", "content": "question7"});
        Ok(self.tokenizer.render_messages(&[question], Some(tools))?)
    }

    fn parser_of_template(&mut self, tools: &Value) -> Result<ToolParser> {
        let turns = self.turns(Some(tools), "tool")?;
        let arguments = Map::from_iter([("x".to_owned(), json!(1))]);
        let call = ToolCall { id: None, name: TurnTokens::EXAMPLE_TOOL.into(), arguments };
        // Formats with arguments as texts take their types from the tools.
        let properties = json!({"properties": {"x": {"type": "integer"}}});
        let example = json!([{"function": {"name": call.name, "parameters": properties}}]);
        let found = match turns.example_call().contains(TurnTokens::EXAMPLE_TOOL) {
            true => ToolParser::of_rendered(turns.example_call(), &call, &example),
            // A template that writes no calls takes them as the text that the model has written. The prompt may describe them.
            false => ToolParser::of_prompt(&self.prompt(tools)?),
        };
        found.ok_or_else(|| {
            let expected = "a name of docs/agents.md, as no parser reads the calls that the chat template writes";
            let found = format!("null, and the template writes {:?}", turns.example_call());
            grpo_run_config::Error::key(PARSER, expected, found).into()
        })
    }

    /// Checks that there is a parser of tool calls.
    ///
    /// # Errors
    /// [`grpo_run_config::Error::Key`] if none reads the calls which the chat template writes.
    pub(crate) fn check(&mut self, tools: &Value) -> Result<()> {
        self.format(tools).map(drop)
    }

    /// Finds the tool calls of a turn, given as its tokens and as their text without special tokens. Some formats have special tokens as tags,
    /// and are then read with all special tokens.
    ///
    /// # Errors
    /// The errors of [`Tools::check`] and of the tokenizer.
    pub(crate) fn parse(&mut self, ids: &[u32], text: &str, tools: &Value) -> Result<Parsed> {
        let Format { parser, is_open } = self.format(tools)?;
        let ends = ids.last().is_some_and(|last| self.tokenizer.stop_ids().contains(last));
        let with_special = self.tokenizer.decode_with_special(&ids[..ids.len() - usize::from(ends)])?;
        let tags = parser.tags().iter().copied().chain(grpo_agents::reasoning_tags(self.reasoning));
        let text = match tags.into_iter().any(|tag| with_special.contains(tag) && !text.contains(tag)) {
            true => &with_special,
            false => text,
        };
        Ok(parser.parse_reasoned(text, tools, self.reasoning, is_open))
    }
}

/// Returns the first messages of a conversation, and its tools: the row's, or else the environment's.
pub(super) fn beginning(row: &Item, environment_tools: Option<&Value>, first: &[Value]) -> Result<Prompt, Failure> {
    let Prompt::Messages { messages, tools, documents } = &row.prompt else {
        let expected = "a row with messages (`prompt` or `messages` as a list, or `question` with a chat template)";
        return Err(Failure::new(format!("expected {expected}, got a text")));
    };
    let mut messages = messages.clone();
    let mut first = first.iter().cloned().peekable();
    let is_user = |message: &Value| message["role"] == "user";
    if let (Some(last), Some(next)) = (messages.last_mut().filter(|last| is_user(last)), first.peek())
        && is_user(next)
        && let (Some(before), Some(behind)) = (last["content"].as_str(), next["content"].as_str())
    {
        // Some templates refuse two messages of the user in a row.
        last["content"] = format!("{before}\n\n{behind}").into();
        first.next();
    }
    messages.extend(first);
    let tools = tools.clone().or_else(|| environment_tools.cloned());
    Ok(Prompt::Messages { messages, tools, documents: documents.clone() })
}

/// Returns the prompt of a row with the tools of its environment, as a conversation begins without a message of the environment. A row that has
/// no conversation keeps its prompt.
pub fn with_tools<'a>(environments: &Environments, row: &'a Item) -> Cow<'a, Prompt> {
    let tools = environments.of_row(row).ok().and_then(|index| environments.tools(index));
    match tools.map(|tools| beginning(row, Some(tools), &[])) {
        Some(Ok(prompt)) => Cow::Owned(prompt),
        _ => Cow::Borrowed(&row.prompt),
    }
}

/// The result of [`check_environments`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckedEnvironments {
    /// The number of tokens that environments add to prompts.
    pub added_tokens: usize,
    /// `true` if the chat template rewrites earlier turns: conversations are rendered anew, and have several rows.
    pub rewrites_history: bool,
}

/// Checks before a run that the environments of some rows start, and that the chat template can be used for their conversations. Agents are
/// not started.
///
/// With a `store`, all processes of the run call this function. Process 0 checks, and the others get its result and the tools.
///
/// # Errors
/// [`Error::Environments`] for an environment that cannot start a conversation; [`Error::Model`] for the template;
/// [`grpo_run_config::Error::Key`] for the parser of tool calls; [`Error::Processes`].
pub fn check_environments<'a>(
    environments: &mut Environments,
    tokenizer: &dyn Tokenizer,
    config: &MultiTurnConfig,
    history: History,
    rows: impl IntoIterator<Item = &'a Item>,
    store: Option<&Store>,
) -> Result<CheckedEnvironments> {
    let checked = match leads(store) {
        true => check_starts(environments, tokenizer, Tools::new(tokenizer, config, history), rows)?,
        false => CheckedEnvironments::default(),
    };
    if store.is_none() {
        return Ok(checked);
    }
    let (checked, tools) = share(store, CHECKED, &Sampled::default(), || (checked, environments.all_tools()))?;
    environments.set_tools(tools);
    Ok(checked)
}

fn check_starts<'a>(
    environments: &Environments,
    tokenizer: &dyn Tokenizer,
    mut tools: Tools<'_>,
    rows: impl IntoIterator<Item = &'a Item>,
) -> Result<CheckedEnvironments> {
    let (mut checked, mut found) = (Vec::new(), CheckedEnvironments::default());
    for row in rows {
        let failed = |failure| Error::from(grpo_agents::Error::Failed { name: row.source.to_string(), failure });
        let index = environments.of_row(row).map_err(failed)?;
        if checked.contains(&index) {
            continue;
        }
        checked.push(index);
        let Some((name, environment)) = environments.get(index) else {
            // An agent brings its own messages and tools; without tools, its turns begin with a message of the user.
            found.rewrites_history |= tools.turns(None, "user")?.rewrites();
            continue;
        };
        let failed = |failure| Error::from(grpo_agents::Error::Failed { name: name.to_owned(), failure });
        let Start { messages, episode } = environment.reset(row, 0).map_err(failed)?;
        drop(episode);
        grpo_agents::check_messages(&messages).map_err(failed)?;
        let prompt = beginning(row, environments.tools(index), &messages).map_err(failed)?;
        let Prompt::Messages { tools: row_tools, .. } = &prompt else { continue };
        let turns = tools.turns(row_tools.as_ref(), if row_tools.is_some() { "tool" } else { "user" })?;
        found.rewrites_history |= turns.rewrites();
        if let Some(row_tools) = row_tools {
            tools.check(row_tools)?;
        }
        let lengths = [encode_prompt(tokenizer, &prompt)?, encode_prompt(tokenizer, &row.prompt)?].map(|ids| ids.len());
        found.added_tokens = found.added_tokens.max(lengths[0].saturating_sub(lengths[1]));
    }
    Ok(found)
}
