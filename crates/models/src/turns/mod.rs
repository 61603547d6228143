//! The tokens that a chat template puts between the turns of a conversation.
//!
//! A conversation is tokenised once: what the policy has sampled stays as it is, and every later turn only adds the tokens of new messages.
//! They are found with an example conversation, whose rendering is cut at the token that ends its assistant's message:
//!
//! ```text
//! before = tokens of [user, assistant] up to the end of the assistant's turn
//! next turn = tokens of [user, assistant, new messages] without `before`
//! ```
//!
//! An agent's template must show the tools, render a call of the assistant and its result, and keep earlier turns. Templates differ in the
//! form of calls and results (`form.rs`). A conversation whose template rewrites earlier turns can be rendered anew after every turn.

mod form;

pub use form::with_names;

use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use form::Form;
use serde_json::{Value, json};

/// The chat templates for training that come with this crate, by name: they keep earlier turns as the model wrote them. `chatml` has Qwen2.5's
/// format without its system prompt, `qwen3` Qwen3's with its reasoning. Tool calls have Hermes' format.
pub const TRAINING_TEMPLATES: [(&str, &str); 2] =
    [("chatml", include_str!("chatml.jinja")), ("qwen3", include_str!("qwen3.jinja"))];

/// The contents of the example conversation.
const QUESTION: &str = "question7";
const ANSWER: &str = "answer7";
const REASON: &str = "reason7";
const REPLY: &str = "reply7";

/// The tokens that a chat template puts between a message of the assistant and its next one, if the messages between them begin with one of
/// `role`.
///
/// ```no_run
/// use grpo_models::{HfTokenizer, Tokenizer, TurnTokens};
/// use serde_json::json;
///
/// # fn main() -> grpo_models::Result<()> {
/// let tokenizer = HfTokenizer::open("Qwen2.5-0.5B-Instruct".as_ref(), &[151645, 151643], 151936)?;
/// let turns = TurnTokens::new(&tokenizer, None, "user")?;
/// // <|im_end|> was sampled; `\n<|im_start|>user\nAnd 7 x 7?<|im_end|>\n<|im_start|>assistant\n` follows.
/// let next = turns.following(&tokenizer, 151645, &[], &[json!({"role": "user", "content": "And 7 x 7?"})])?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TurnTokens {
    tools: Option<Value>,
    role: String,
    form: Form,
    /// The end of the assistant's turn in the example conversation; `None` if the template rewrites earlier turns.
    end: Option<End>,
    /// `true` if the tokens of a result depend on the id or the name of its call.
    reads_calls: bool,
    example_call: String,
}

/// The end of the assistant's turn in the example conversation.
#[derive(Clone, Debug)]
struct End {
    /// The tokens up to the end of the turn.
    before: Vec<u32>,
    /// The token that ends a turn.
    id: u32,
}

impl TurnTokens {
    /// Finds the tokens with an example conversation, and checks that the template keeps earlier turns.
    ///
    /// # Errors
    /// [`Error::Turns`] if the template does not show the tools or rewrites earlier turns, or none of the tokenizer's stop tokens ends a message
    /// of the assistant; the errors of [`Tokenizer::encode_messages`].
    pub fn new(tokenizer: &dyn Tokenizer, tools: Option<&Value>, role: &str) -> Result<Self> {
        Self::find(tokenizer, tools, role, false)
    }

    /// As [`TurnTokens::new`], but takes a template that rewrites earlier turns, too: [`TurnTokens::rewrites`] is `true` then.
    ///
    /// # Errors
    /// The errors of [`TurnTokens::new`], except [`Error::Turns`] about earlier turns.
    pub fn forking(tokenizer: &dyn Tokenizer, tools: Option<&Value>, role: &str) -> Result<Self> {
        Self::find(tokenizer, tools, role, true)
    }

    fn find(tokenizer: &dyn Tokenizer, tools: Option<&Value>, role: &str, forks: bool) -> Result<Self> {
        let forms = if role == "tool" { &Form::ALL[..] } else { &Form::ALL[..1] };
        let mut refused = None;
        for form in forms {
            let template = Template { tokenizer, tools, role, form: *form };
            match template.turns(forks) {
                // Another form of calls or results may be accepted, or shown. What a template lacks says more than its own message.
                Err(error @ Error::ChatTemplate { .. }) => drop(refused.get_or_insert(error)),
                Err(error @ Error::Turns { can_fork: false, .. }) => refused = Some(error),
                turns => return turns,
            }
        }
        Err(refused.unwrap_or(Error::NoChatTemplate))
    }

    /// Returns the tokens that follow a turn of the assistant whose last token is `last`: the end of the turn, if that is another token,
    /// `messages`, and the start of the next turn. `calls` are the tool calls of the turn; their ids and names go to the template.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode_messages`]; [`Error::Turns`] if the template rewrites earlier turns, or the messages change how earlier
    /// ones are rendered.
    pub fn following(
        &self,
        tokenizer: &dyn Tokenizer,
        last: u32,
        calls: &[Value],
        messages: &[Value],
    ) -> Result<Vec<u32>> {
        let template = Template { tokenizer, tools: self.tools.as_ref(), role: &self.role, form: self.form };
        let rewritten = || template.rewrites("later messages change how it renders earlier ones".into());
        let end = match (&self.end, calls) {
            (None, _) => return Err(rewritten()),
            (Some(end), []) => end.clone(),
            // The example's call stands for it.
            (Some(end), [_]) if !self.reads_calls => end.clone(),
            (Some(_), calls) => template.end(calls)?,
        };
        let End { before, id } = end;
        let calls = if self.reads_calls || calls.len() > 1 { calls } else { &[] };
        let all = [&template.example(calls)[..], messages].concat();
        let ids = template.encode(&all)?;
        let new = ids.strip_prefix(&before[..]).ok_or_else(rewritten)?;
        let end = (last != id).then_some(id);
        Ok(end.into_iter().chain(new.iter().copied()).collect())
    }

    /// Returns `true` if the template rewrites earlier turns: [`TurnTokens::whole`] has the tokens of the next prompt.
    pub fn rewrites(&self) -> bool {
        self.end.is_none()
    }

    /// Returns the tokens of a whole conversation, and of the start of the next turn. `documents` are the texts that it refers to.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode_messages`].
    pub fn whole(&self, tokenizer: &dyn Tokenizer, messages: &[Value], documents: Option<&Value>) -> Result<Vec<u32>> {
        tokenizer.encode_messages(&self.form.applied(messages), self.tools.as_ref(), documents)
    }

    /// Returns the message in which the example's assistant calls the tool [`TurnTokens::EXAMPLE_TOOL`] with the argument `x`, 1, as the
    /// template renders it.
    pub fn example_call(&self) -> &str {
        &self.example_call
    }

    /// The tool that the example's assistant calls.
    pub const EXAMPLE_TOOL: &'static str = "example";
}

fn user() -> Value {
    json!({"role": "user", "content": QUESTION})
}

/// Returns a call of the example's tool.
fn example_call() -> Value {
    let function = json!({"name": TurnTokens::EXAMPLE_TOOL, "arguments": {"x": 1}});
    json!({"type": "function", "id": "a1b2c3d4e", "function": function})
}

/// A chat template with the tools, the role of what follows the assistant, and the form of calls and results.
struct Template<'a> {
    tokenizer: &'a dyn Tokenizer,
    tools: Option<&'a Value>,
    role: &'a str,
    form: Form,
}

impl Template<'_> {
    /// Returns the error of a template that lacks something.
    fn lacks(&self, reason: String) -> Error {
        Error::Turns { template: self.tokenizer.chat_template_name(self.tools.is_some()), reason, can_fork: false }
    }

    /// Returns the error of a template whose conversations have to be rendered anew.
    fn rewrites(&self, reason: String) -> Error {
        Error::Turns { template: self.tokenizer.chat_template_name(self.tools.is_some()), reason, can_fork: true }
    }

    fn is_tool(&self) -> bool {
        self.role == "tool"
    }

    /// Returns a message of the assistant. If a tool answers it, it has the calls `calls`, with the arguments of the example's call.
    fn assistant(&self, content: &str, calls: &[Value]) -> Value {
        let mut message = json!({"role": "assistant", "content": content});
        if self.is_tool() {
            let example = example_call();
            let with_arguments = |call: &Value| {
                let mut call = call.clone();
                call["function"]["arguments"] = example["function"]["arguments"].clone();
                call
            };
            let calls: Vec<Value> = calls.iter().map(with_arguments).collect();
            message["tool_calls"] = if calls.is_empty() { json!([example]) } else { calls.into() };
        }
        message
    }

    fn reply(&self, content: &str) -> Value {
        self.reply_to(content, &[])
    }

    /// Returns a message to the assistant; of a tool, the result of the first of `calls`, or of the example's call.
    fn reply_to(&self, content: &str, calls: &[Value]) -> Value {
        let mut reply = json!({"role": self.role, "content": content});
        if self.is_tool() {
            let call = calls.first().cloned().unwrap_or_else(example_call);
            (reply["tool_call_id"], reply["name"]) = (call["id"].clone(), call["function"]["name"].clone());
        }
        reply
    }

    /// Returns the beginning of the example conversation.
    fn example(&self, calls: &[Value]) -> Vec<Value> {
        vec![user(), self.assistant(ANSWER, calls)]
    }

    fn render(&self, messages: &[Value]) -> Result<String> {
        self.tokenizer.render_messages(&self.form.applied(messages), self.tools)
    }

    fn encode(&self, messages: &[Value]) -> Result<Vec<u32>> {
        self.tokenizer.encode_messages(&self.form.applied(messages), self.tools, None)
    }

    fn turns(&self, forks: bool) -> Result<TurnTokens> {
        self.check_tools()?;
        let kept = self.end(&[]).and_then(|end| self.check_history().map(|()| end));
        let end = match kept {
            Err(Error::Turns { can_fork: true, .. }) if forks => None,
            kept => Some(kept?),
        };
        let example_call = self.example_call(end.as_ref())?;
        let reads_calls = self.is_tool() && self.reads_calls();
        let (tools, role) = (self.tools.cloned(), self.role.to_owned());
        Ok(TurnTokens { tools, role, form: self.form, end, reads_calls, example_call })
    }

    /// Returns `true` unless the results of two different calls have the same tokens.
    fn reads_calls(&self) -> bool {
        let mut other = example_call();
        (other["id"], other["function"]["name"]) = ("z9y8x7w6v".into(), "other7".into());
        let tail = |call: Value| {
            let calls = [call];
            let before = self.end(&calls)?.before;
            let ids = self.encode(&[&self.example(&calls)[..], &[self.reply_to(REPLY, &calls)]].concat())?;
            Ok::<_, Error>(ids.strip_prefix(&before[..]).map(<[u32]>::to_vec))
        };
        match (tail(example_call()), tail(other)) {
            (Ok(Some(one)), Ok(Some(other))) => one != other,
            _ => true,
        }
    }

    /// Checks that the template shows the tools and their results, and what another role says.
    fn check_tools(&self) -> Result<()> {
        let assistant = self.assistant(ANSWER, &[]);
        let rendered = self.render(&[user(), assistant, self.reply(REPLY)])?;
        if !rendered.contains(REPLY) {
            return Err(self.lacks(format!("it does not show the messages of the role `{}` to the model", self.role)));
        }
        let without = || self.tokenizer.render_messages(&[user()], None);
        if self.is_tool() && self.tools.is_some() && self.render(&[user()])? == without()? {
            return Err(self.lacks("it does not show the tools to the model".into()));
        }
        Ok(())
    }

    /// Finds the end of the assistant's turn in the example conversation: the last stop token before the reply.
    fn end(&self, calls: &[Value]) -> Result<End> {
        let messages = self.example(calls);
        let with = |content: &str| self.encode(&[&messages[..], &[self.reply_to(content, calls)]].concat());
        let (first, second) = (with("a")?, with("b")?);
        let common = first.iter().zip(&second).take_while(|(a, b)| a == b).count();
        let stop_ids = self.tokenizer.stop_ids();
        let at = first[..common].iter().rposition(|id| stop_ids.contains(id));
        let lacks_end = || self.rewrites("no stop token of the tokenizer ends its messages of the assistant".into());
        at.map(|at| End { before: first[..=at].to_vec(), id: first[at] }).ok_or_else(lacks_end)
    }

    /// Checks that the text of a conversation begins with the text that the policy has seen and written in its earlier turns.
    fn check_history(&self) -> Result<()> {
        let prompt = self.render(&[user()])?;
        let opens_think = prompt.trim_end().ends_with("<think>");
        // What the policy writes behind the prompt, and the message that this is.
        let plain = (ANSWER.to_owned(), ANSWER.to_owned());
        let thought = format!("{REASON}\n</think>\n\n{ANSWER}");
        let message = format!("<think>\n{thought}");
        let reasoned = (if opens_think { thought } else { message.clone() }, message);
        // A prompt that ends the reasoning asks for none.
        let closes_think = prompt.trim_end().ends_with("</think>");
        let cases = match (opens_think, closes_think) {
            (true, _) => vec![reasoned],
            (false, true) => vec![plain],
            (false, false) => vec![plain, reasoned],
        };
        for (written, content) in cases {
            let written = if self.is_tool() { String::new() } else { written };
            let (assistant, reply) = (self.assistant(&content, &[]), self.reply(QUESTION));
            let one = self.render(&[user(), assistant.clone(), reply.clone()])?;
            let two = self.render(&[user(), assistant.clone(), reply.clone(), assistant, reply])?;
            let drops_reasons = self.is_tool()
                && content.contains(REASON)
                && one.contains(ANSWER)
                && (!one.contains(REASON) || two.matches(REASON).count() != 2);
            if drops_reasons || !one.starts_with(&format!("{prompt}{written}")) || !two.starts_with(&one) {
                let what = if content.contains(REASON) { "the reasoning of earlier turns" } else { "earlier turns" };
                return Err(self.rewrites(format!(
                    "it rewrites {what} when a message of the role `{}` follows, and the policy would be trained on other tokens than it has \
                     sampled from",
                    self.role
                )));
            }
        }
        Ok(())
    }

    /// Returns the assistant's message with a tool call, without the end of its turn; empty for other roles.
    fn example_call(&self, end: Option<&End>) -> Result<String> {
        if !self.is_tool() {
            return Ok(String::new());
        }
        let prompt = self.render(&[user()])?;
        let whole = self.render(&[user(), self.assistant("", &[]), self.reply(REPLY)])?;
        // The prompt may end with the start of thoughts, which the turn lacks. A tag that has the same first letters belongs to the turn.
        let common: usize =
            prompt.chars().zip(whole.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        let before = &whole[..common];
        let start = before.rfind('<').filter(|start| before.rfind('>').is_none_or(|end| end < *start));
        let message = whole[start.unwrap_or(common)..].split(REPLY).next().unwrap_or_default();
        let ids = end.map_or_else(|| self.tokenizer.stop_ids().to_vec(), |end| vec![end.id]);
        let ends = ids.iter().map(|id| self.tokenizer.decode_with_special(&[*id])).collect::<Result<Vec<_>>>()?;
        let at = ends.iter().filter_map(|end| message.find(end.as_str())).min();
        Ok(message[..at.unwrap_or(message.len())].to_owned())
    }
}
