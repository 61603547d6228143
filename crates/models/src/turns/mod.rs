//! The tokens that a chat template puts between the turns of a conversation.
//!
//! A conversation is tokenised once: what the policy has sampled stays as it is, and every later turn only adds the tokens of new messages.
//! They are found with an example conversation, whose rendering is cut at the token that ends its assistant's message:
//!
//! ```text
//! before = tokens of [user, assistant] up to the end of the assistant's turn
//! next turn = tokens of [user, assistant, new messages] without `before`
//! ```

use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use serde_json::{Value, json};

/// The chat templates for training that come with this crate, by name: they keep earlier turns as the model wrote them. `chatml` has Qwen2.5's
/// format without its system prompt, `qwen3` Qwen3's with its reasoning. Tool calls have Hermes' format.
pub const TRAINING_TEMPLATES: [(&str, &str); 2] =
    [("chatml", include_str!("chatml.jinja")), ("qwen3", include_str!("qwen3.jinja"))];

/// The contents of the example conversation.
const QUESTION: &str = "question7";
const ANSWER: &str = "answer7";
const REASON: &str = "reason7";

/// The tokens that a chat template puts between a message of the assistant and its next one, if the messages between them begin with one of
/// `role`.
///
/// ```no_run
/// use models::{HfTokenizer, Tokenizer, TurnTokens};
/// use serde_json::json;
///
/// # fn main() -> models::Result<()> {
/// let tokenizer = HfTokenizer::open("Qwen2.5-0.5B-Instruct".as_ref(), &[151645, 151643], 151936)?;
/// let turns = TurnTokens::new(&tokenizer, None, "user")?;
/// // <|im_end|> was sampled; `\n<|im_start|>user\nAnd 7 x 7?<|im_end|>\n<|im_start|>assistant\n` follows.
/// let next = turns.following(&tokenizer, 151645, &[json!({"role": "user", "content": "And 7 x 7?"})])?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TurnTokens {
    tools: Option<Value>,
    /// The example conversation.
    messages: Vec<Value>,
    /// Its tokens up to the end of the assistant's turn.
    before: Vec<u32>,
    /// The token that ends a turn.
    end: u32,
    example_call: String,
}

impl TurnTokens {
    /// Finds the tokens with an example conversation, and checks that the template keeps earlier turns.
    ///
    /// # Errors
    /// [`Error::Turns`] if the template rewrites earlier turns, or none of the tokenizer's stop tokens ends a message of the assistant; the
    /// errors of [`Tokenizer::encode_messages`].
    pub fn new(tokenizer: &dyn Tokenizer, tools: Option<&Value>, role: &str) -> Result<Self> {
        let template = Template { tokenizer, tools, role };
        let messages = vec![user(), template.assistant(ANSWER)];
        let with = |content: &str| {
            let reply = json!({"role": role, "content": content});
            tokenizer.encode_messages(&[&messages[..], &[reply]].concat(), tools, None)
        };
        let (first, second) = (with("a")?, with("b")?);
        let common = first.iter().zip(&second).take_while(|(a, b)| a == b).count();
        let stop_ids = tokenizer.stop_ids();
        let Some(at) = first[..common].iter().rposition(|id| stop_ids.contains(id)) else {
            return Err(template.error("no stop token of the tokenizer ends its messages of the assistant".into()));
        };
        let (before, end) = (first[..=at].to_vec(), first[at]);
        template.check()?;
        let example_call = template.example_call(&tokenizer.decode_with_special(&[end])?)?;
        Ok(Self { tools: tools.cloned(), messages, before, end, example_call })
    }

    /// Returns the tokens that follow a turn of the assistant whose last token is `last`: the end of the turn, if that is another token,
    /// `messages`, and the start of the next turn.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode_messages`]; [`Error::Turns`] if the messages change how earlier ones are rendered.
    pub fn following(&self, tokenizer: &dyn Tokenizer, last: u32, messages: &[Value]) -> Result<Vec<u32>> {
        let all = [&self.messages[..], messages].concat();
        let ids = tokenizer.encode_messages(&all, self.tools.as_ref(), None)?;
        let Some(new) = ids.strip_prefix(&self.before[..]) else {
            let template = Template { tokenizer, tools: self.tools.as_ref(), role: "" };
            return Err(template.error("later messages change how it renders earlier ones".into()));
        };
        let end = (last != self.end).then_some(self.end);
        Ok(end.into_iter().chain(new.iter().copied()).collect())
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

/// A chat template with the tools and the role of what follows the assistant.
struct Template<'a> {
    tokenizer: &'a dyn Tokenizer,
    tools: Option<&'a Value>,
    role: &'a str,
}

impl Template<'_> {
    fn error(&self, reason: String) -> Error {
        Error::Turns { template: self.tokenizer.chat_template_name(self.tools.is_some()), reason }
    }

    fn is_tool(&self) -> bool {
        self.role == "tool"
    }

    /// Returns a message of the assistant. Before a tool's message it calls a tool.
    fn assistant(&self, content: &str) -> Value {
        let mut message = json!({"role": "assistant", "content": content});
        if self.is_tool() {
            let function = json!({"name": TurnTokens::EXAMPLE_TOOL, "arguments": {"x": 1}});
            message["tool_calls"] = json!([{"type": "function", "id": "call00000", "function": function}]);
        }
        message
    }

    fn reply(&self) -> Value {
        json!({"role": self.role, "content": QUESTION})
    }

    fn render(&self, messages: &[Value]) -> Result<String> {
        self.tokenizer.render_messages(messages, self.tools)
    }

    /// Checks that the text of a conversation begins with the text that the policy has seen and written in its earlier turns.
    fn check(&self) -> Result<()> {
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
            let (assistant, reply) = (self.assistant(&content), self.reply());
            let one = self.render(&[user(), assistant.clone(), reply.clone()])?;
            let two = self.render(&[user(), assistant.clone(), reply.clone(), assistant, reply])?;
            let drops_reasons = self.is_tool()
                && content.contains(REASON)
                && one.contains(ANSWER)
                && (!one.contains(REASON) || two.matches(REASON).count() != 2);
            if drops_reasons || !one.starts_with(&format!("{prompt}{written}")) || !two.starts_with(&one) {
                let what = if content.contains(REASON) { "the reasoning of earlier turns" } else { "earlier turns" };
                return Err(self.error(format!(
                    "it rewrites {what} when a message of the role `{}` follows, and the policy would be trained on other tokens than it has \
                     sampled from",
                    self.role
                )));
            }
        }
        if self.is_tool() && self.tools.is_some() && prompt == self.tokenizer.render_messages(&[user()], None)? {
            return Err(self.error("it does not show the tools to the model".into()));
        }
        Ok(())
    }

    /// Returns the assistant's message with a tool call, without the end of its turn; empty for other roles.
    fn example_call(&self, end: &str) -> Result<String> {
        if !self.is_tool() {
            return Ok(String::new());
        }
        let prompt = self.render(&[user()])?;
        let whole = self.render(&[user(), self.assistant(""), self.reply()])?;
        let message = whole.strip_prefix(&prompt).unwrap_or_default();
        Ok(message.split(end).next().unwrap_or_default().to_owned())
    }
}
