//! OpenAI's chat completions.

use super::events::{Body, Events};
use super::fields::{Fields, expected};
use super::protocol::{Parsed, Render, check_last, now, pieces, text_of, tool_call};
use super::request::{ApiError, ChatReply, ChatRequest, MODEL};
use serde_json::{Value, json};

/// Fields that are read.
const HONOURED: [&str; 8] =
    ["messages", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens", "logprobs", "response_format"];

/// Reads a request.
pub(super) fn parse(fields: &Fields<'_>) -> Result<Parsed, ApiError> {
    fields.check(&HONOURED)?;
    let messages = fields.list("messages")?.iter().enumerate().map(|(index, value)| message(index, value));
    let messages: Vec<Value> = messages.collect::<Result<_, _>>()?;
    check_last(&messages, "messages")?;
    let choice = match fields.get("tool_choice") {
        Some(Value::Object(choice)) => choice.get("type").and_then(Value::as_str),
        Some(Value::String(choice)) if ["auto", "none", "required"].contains(&choice.as_str()) => Some(choice.as_str()),
        None => None,
        other => return Err(expected("tool_choice", "\"auto\", \"none\", \"required\" or a tool", other)),
    };
    let [calls_tools, requires_call] = fields.tool_choice(choice)?;
    let format = fields.get("response_format");
    let schema = format.map_or(&Value::Null, |format| &format["json_schema"]["schema"]);
    let limits = [fields.count("max_tokens")?, fields.count("max_completion_tokens")?];
    let request = ChatRequest {
        messages,
        tools: fields.tools(|tool| (tool["type"] == "function").then(|| tool.clone()))?,
        calls_tools,
        requires_call,
        json: fields.json("response_format", format, schema)?,
        stop: fields.stop("stop")?,
        max_tokens: limits.into_iter().flatten().min(),
        ..ChatRequest::default()
    };
    let (logprobs, streams) = (fields.flag("logprobs")?, fields.flag("stream")?);
    let usage = fields.get("stream_options").is_some_and(|options| options["include_usage"] == true);
    let render: Render = Box::new(move |reply, number| match streams {
        false => Body::Json(body(reply, number, logprobs)),
        true => stream(reply, number, logprobs, usage),
    });
    Ok(Parsed { request, render })
}

/// Returns a message with the fields that a chat template may read.
fn message(index: usize, value: &Value) -> Result<Value, ApiError> {
    let at = |field: &str| format!("messages[{index}].{field}");
    let role = match value["role"].as_str() {
        Some("developer") => "system",
        Some(role) if ["system", "user", "assistant", "tool"].contains(&role) => role,
        _ => return Err(expected(at("role"), "system, developer, user, assistant or tool", value.get("role"))),
    };
    let calls = match value.get("tool_calls").filter(|calls| !calls.is_null()) {
        Some(Value::Array(list)) if role == "assistant" => {
            let call = |(i, call): (usize, &Value)| {
                let function = &call["function"];
                tool_call(
                    &at(&format!("tool_calls[{i}].function")),
                    &call["id"],
                    &function["name"],
                    &function["arguments"],
                )
            };
            list.iter().enumerate().map(call).collect::<Result<Vec<_>, _>>()?
        }
        None => Vec::new(),
        other => return Err(expected(at("tool_calls"), "a list of calls, of the assistant", other)),
    };
    let content = match value.get("content") {
        None | Some(Value::Null) if role == "assistant" => String::new(),
        Some(content) => text_of(content, &["text"])
            .ok_or_else(|| expected(at("content"), "a text, or a list of texts", Some(content)))?,
        None => return Err(expected(at("content"), "a text", None)),
    };
    let mut message = json!({"role": role, "content": content});
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    for name in ["tool_call_id", "name"] {
        match value.get(name) {
            None | Some(Value::Null) => {}
            Some(text @ Value::String(_)) => message[name] = text.clone(),
            other => return Err(expected(at(name), "a text", other)),
        }
    }
    Ok(message)
}

/// Returns the usage of a reply.
pub(super) fn usage(reply: &ChatReply) -> Value {
    let (prompt, completion) = (reply.prompt_tokens, reply.tokens.len());
    json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
}

fn calls(reply: &ChatReply) -> Vec<Value> {
    let call = |(id, name, arguments): (&str, &str, String)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    reply.calls().into_iter().map(call).collect()
}

fn logprobs(reply: &ChatReply) -> Value {
    let entry = |(token, logp): &(String, f32)| {
        // A token that is a part of a character has no text of its own.
        let bytes = if token.contains(char::REPLACEMENT_CHARACTER) { Value::Null } else { json!(token.as_bytes()) };
        json!({"token": token, "logprob": logp, "bytes": bytes, "top_logprobs": []})
    };
    json!({"content": reply.tokens.iter().map(entry).collect::<Vec<_>>(), "refusal": null})
}

/// Returns the body of the response number `number`.
fn body(reply: &ChatReply, number: u64, has_logprobs: bool) -> Value {
    let mut message = json!({"role": "assistant", "content": reply.text(), "refusal": null});
    let calls = calls(reply);
    if !calls.is_empty() {
        if reply.text().is_empty() {
            message["content"] = Value::Null;
        }
        message["tool_calls"] = calls.into();
    }
    let logprobs = if has_logprobs { logprobs(reply) } else { Value::Null };
    json!({
        "id": format!("chatcmpl-{number}"),
        "object": "chat.completion",
        "created": now(),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reply.finish_reason}],
        "usage": usage(reply),
    })
}

fn stream(reply: &ChatReply, number: u64, has_logprobs: bool, has_usage: bool) -> Body {
    let (mut events, created) = (Events::default(), now());
    let mut chunk = |choices: Value, used: Value| {
        let id = format!("chatcmpl-{number}");
        let mut data = json!({"id": id, "object": "chat.completion.chunk", "created": created, "model": MODEL, "choices": choices});
        if has_usage {
            data["usage"] = used;
        }
        events.data(&data);
    };
    let choice = |delta: Value, logprobs: Value, reason: Value| json!([{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]);
    let token_logprobs = if has_logprobs { logprobs(reply) } else { Value::Null };
    chunk(
        choice(json!({"role": "assistant", "content": "", "refusal": null}), token_logprobs, Value::Null),
        Value::Null,
    );
    for piece in pieces(reply.text()) {
        chunk(choice(json!({"content": piece}), Value::Null, Value::Null), Value::Null);
    }
    for (index, (id, name, arguments)) in reply.calls().into_iter().enumerate() {
        let begin = json!({"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}});
        chunk(choice(json!({"tool_calls": [begin]}), Value::Null, Value::Null), Value::Null);
        for piece in pieces(&arguments) {
            let delta = json!({"tool_calls": [{"index": index, "function": {"arguments": piece}}]});
            chunk(choice(delta, Value::Null, Value::Null), Value::Null);
        }
    }
    chunk(choice(json!({}), Value::Null, reply.finish_reason.into()), Value::Null);
    if has_usage {
        chunk(json!([]), usage(reply));
    }
    events.done()
}
