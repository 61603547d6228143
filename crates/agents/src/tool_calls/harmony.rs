//! Messages in channels, of gpt-oss: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.
//!
//! A message has a header, `<|message|>`, and a body up to `<|end|>`, `<|call|>` or `<|return|>`. Messages with a recipient are calls, those
//! of the channel `analysis` are thoughts, and the others are the content. The prompt has begun the first header.

use super::Parsed;
use super::scan::{call, no_calls};

pub(super) const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
/// The largest number of messages that are read.
const MOST_MESSAGES: usize = 256;
const ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|return|>", START];

pub(super) fn parse(text: &str) -> Parsed {
    if !text.contains(MESSAGE) {
        return no_calls(text);
    }
    let (mut contents, mut calls, mut rest) = (Vec::new(), Vec::new(), text);
    for _ in 0..MOST_MESSAGES {
        let Some((header, behind)) = rest.split_once(MESSAGE) else { break };
        let end = ENDS.iter().filter_map(|end| Some((behind.find(end)?, end.len()))).min();
        let (at, length) = end.unwrap_or((behind.len(), 0));
        let body = &behind[..at];
        // The last header counts, if an earlier message lacks its body.
        let header = header.rsplit(START).next().unwrap_or(header);
        match recipient(header) {
            Some(name) => calls.push(call(name, body)),
            None if channel(header) != Some("analysis") => contents.push(body.trim()),
            None => {}
        }
        rest = &behind[at + length..];
    }
    contents.retain(|content| !content.is_empty());
    Parsed { content: contents.join("\n"), calls }
}

/// Returns the tool to which a message is addressed.
fn recipient(header: &str) -> Option<&str> {
    let (_, recipient) = header.split_once("to=")?;
    let end = recipient.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(recipient.len());
    let name = &recipient[..end];
    // Messages to the user or the assistant, which have other names in some versions, are no calls.
    let is_message = ["assistant", "user", "final", "all"].contains(&name);
    (!is_message).then(|| name.strip_prefix("functions.").unwrap_or(name))
}

fn channel(header: &str) -> Option<&str> {
    let (_, channel) = header.split_once(CHANNEL)?;
    let end = channel.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(channel.len());
    Some(&channel[..end])
}
