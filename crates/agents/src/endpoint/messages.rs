//! Anthropic's messages.

use super::events::{Body, Events};
use super::fields::{Fields, expected};
use super::protocol::{Parsed, Render, check_last, pieces, text_of, tool_call};
use super::request::{ApiError, ChatReply, ChatRequest, MODEL};
use grpo_files::{long_integers_as_digits, mark_long_integers};
use serde_json::{Value, json};

/// Fields that are read.
const HONOURED: [&str; 6] = ["messages", "system", "tools", "tool_choice", "stop_sequences", "max_tokens"];

/// Reads a request. If it only `counts` tokens, it needs no `max_tokens`.
pub(super) fn parse(fields: &Fields<'_>, counts: bool) -> Result<Parsed, ApiError> {
    fields.check(&HONOURED)?;
    let mut messages = Vec::new();
    if let Some(system) = fields.get("system") {
        let text = text_of(system, &["text"]);
        let text = text.ok_or_else(|| expected("system", "a text, or a list of texts", Some(system)))?;
        messages.push(json!({"role": "system", "content": text}));
    }
    for (index, value) in fields.list("messages")?.iter().enumerate() {
        add(&mut messages, index, value)?;
    }
    check_last(&messages, "messages")?;
    let choice = fields.get("tool_choice");
    let choice = match choice.map(|choice| choice["type"].as_str()) {
        None => None,
        Some(Some("any" | "tool")) => Some("required"),
        Some(Some(choice @ ("auto" | "none"))) => Some(choice),
        Some(_) => return Err(expected("tool_choice.type", "auto, any, tool or none", choice)),
    };
    let [calls_tools, requires_call] = fields.tool_choice(choice)?;
    let max_tokens = fields.count("max_tokens")?;
    if max_tokens.is_none() && !counts {
        return Err(expected("max_tokens", "a whole number of at least 1", None));
    }
    let request = ChatRequest {
        messages,
        tools: fields.tools(tool)?,
        calls_tools,
        requires_call,
        stop: fields.stop("stop_sequences")?,
        max_tokens,
        counts_only: counts,
        ..ChatRequest::default()
    };
    let streams = fields.flag("stream")?;
    let render: Render = Box::new(move |reply, number| match (counts, streams) {
        (true, _) => Body::Json(json!({"input_tokens": reply.prompt_tokens})),
        (false, false) => Body::Json(body(reply, number, blocks(reply), stop_reason(reply), reply.tokens.len())),
        (false, true) => stream(reply, number),
    });
    Ok(Parsed { request, render })
}

/// Returns an error in Anthropic's form.
pub(super) fn error(error: &ApiError) -> Value {
    let kind = match error.status {
        401 => "authentication_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message}, "request_id": null})
}

fn tool(tool: &Value) -> Option<Value> {
    let schema = tool.get("input_schema")?;
    let mut function = json!({"name": tool["name"]});
    if tool["description"].is_string() {
        function["description"] = tool["description"].clone();
    }
    function["parameters"] = schema.clone();
    Some(json!({"type": "function", "function": function}))
}

/// Adds a message. Results of tools in it are messages of their own.
fn add(messages: &mut Vec<Value>, index: usize, value: &Value) -> Result<(), ApiError> {
    let at = format!("messages[{index}]");
    let role = match value["role"].as_str() {
        Some(role @ ("user" | "assistant" | "system")) => role,
        _ => return Err(expected(format!("{at}.role"), "user or assistant", value.get("role"))),
    };
    let content = format!("{at}.content");
    let blocks = match &value["content"] {
        Value::String(text) => {
            messages.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        other => return Err(expected(content, "a text, or a list of blocks", Some(other))),
    };
    let (mut text, mut calls, mut has_text) = (String::new(), Vec::new(), blocks.is_empty());
    for (i, block) in blocks.iter().enumerate() {
        let at = format!("{content}[{i}]");
        match (block["type"].as_str().unwrap_or_default(), role) {
            ("text", _) => {
                text += block["text"].as_str().ok_or_else(|| expected(&at, "a text", Some(block)))?;
                has_text = true;
            }
            ("tool_use", "assistant") => calls.push(tool_call(&at, &block["id"], &block["name"], &block["input"])?),
            ("tool_result", "user") => {
                let result = block.get("content").filter(|content| !content.is_null());
                let result = result.map_or(Some(String::new()), |content| text_of(content, &["text"]));
                let result = result.ok_or_else(|| expected(&at, "a result of texts", Some(block)))?;
                messages.push(json!({"role": "tool", "content": result, "tool_call_id": block["tool_use_id"]}));
            }
            // The chat template decides what of earlier thoughts is shown.
            ("thinking" | "redacted_thinking", "assistant") => {}
            _ => return Err(expected(at, "a block of text, tool_use or tool_result", Some(block))),
        }
    }
    if role == "assistant" || has_text {
        let mut message = json!({"role": role, "content": text});
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        messages.push(message);
    }
    Ok(())
}

fn blocks(reply: &ChatReply) -> Vec<Value> {
    let calls = reply.calls();
    let mut blocks = Vec::new();
    if !reply.text().is_empty() || calls.is_empty() {
        blocks.push(json!({"type": "text", "text": reply.text(), "citations": null}));
    }
    blocks.extend(calls.into_iter().map(|(id, name, arguments)| {
        let input: Value = serde_json::from_str(&mark_long_integers(&arguments)).unwrap_or_default();
        json!({"type": "tool_use", "id": id, "name": name, "input": input})
    }));
    blocks
}

fn stop_reason(reply: &ChatReply) -> Value {
    match (reply.finish_reason, &reply.stop) {
        ("length", _) => "max_tokens",
        ("tool_calls", _) => "tool_use",
        (_, Some(_)) => "stop_sequence",
        _ => "end_turn",
    }
    .into()
}

fn body(reply: &ChatReply, number: u64, content: Vec<Value>, reason: Value, output_tokens: usize) -> Value {
    let usage = json!({"input_tokens": reply.prompt_tokens, "output_tokens": output_tokens});
    let sequence = if reason.is_null() { Value::Null } else { reply.stop.clone().into() };
    json!({
        "id": format!("msg_{number}"),
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage,
    })
}

fn stream(reply: &ChatReply, number: u64) -> Body {
    let mut events = Events::default();
    events.named(json!({"message": body(reply, number, Vec::new(), Value::Null, 0)}), "message_start");
    for (index, mut block) in blocks(reply).into_iter().enumerate() {
        let (deltas, kind, field) = match block["type"] == "text" {
            true => (pieces(reply.text()), "text_delta", "text"),
            false => (pieces(&long_integers_as_digits(block["input"].to_string())), "input_json_delta", "partial_json"),
        };
        match field {
            "text" => block["text"] = "".into(),
            _ => block["input"] = json!({}),
        }
        events.named(json!({"index": index, "content_block": block}), "content_block_start");
        for delta in deltas {
            events.named(json!({"index": index, "delta": {"type": kind, field: delta}}), "content_block_delta");
        }
        events.named(json!({"index": index}), "content_block_stop");
    }
    let delta = json!({"stop_reason": stop_reason(reply), "stop_sequence": reply.stop});
    let usage = json!({"output_tokens": reply.tokens.len()});
    events.named(json!({"delta": delta, "usage": usage}), "message_delta");
    events.named(json!({}), "message_stop");
    events.body()
}
