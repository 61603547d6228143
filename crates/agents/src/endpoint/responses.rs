//! OpenAI's responses. The endpoint keeps none of them: a request has all items of its conversation.

use super::events::{Body, Events};
use super::fields::{Fields, expected};
use super::protocol::{Parsed, Render, check_last, now, pieces, text_of, tool_call};
use super::request::{ApiError, ChatReply, ChatRequest, MODEL};
use serde_json::{Value, json};

/// Fields that are read.
const HONOURED: [&str; 6] = ["input", "instructions", "tools", "tool_choice", "max_output_tokens", "text"];
/// The types of texts in a content.
const TEXTS: [&str; 3] = ["input_text", "output_text", "text"];

/// Reads a request.
pub(super) fn parse(fields: &Fields<'_>) -> Result<Parsed, ApiError> {
    fields.check(&HONOURED)?;
    let mut messages = Vec::new();
    if let Some(text) = fields.text("instructions")? {
        messages.push(json!({"role": "system", "content": text}));
    }
    match fields.get("input") {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        _ => {
            for (index, item) in fields.list("input")?.iter().enumerate() {
                add(&mut messages, index, item)?;
            }
        }
    }
    check_last(&messages, "input")?;
    let choice = match fields.get("tool_choice") {
        Some(Value::String(choice)) => Some(choice.as_str()),
        Some(Value::Object(_)) => Some("required"),
        None => None,
        other => return Err(expected("tool_choice", "\"auto\", \"none\", \"required\" or a tool", other)),
    };
    let [calls_tools, requires_call] = fields.tool_choice(choice)?;
    let format = fields.get("text").and_then(|text| text.get("format"));
    let request = ChatRequest {
        messages,
        tools: fields.tools(tool)?,
        calls_tools,
        requires_call,
        json: fields.json("text.format", format, format.map_or(&Value::Null, |format| &format["schema"]))?,
        max_tokens: fields.count("max_output_tokens")?,
        ..ChatRequest::default()
    };
    let echoed = json!({
        "instructions": fields.get("instructions"),
        "tools": fields.get("tools").cloned().unwrap_or_else(|| json!([])),
        "tool_choice": fields.get("tool_choice").cloned().unwrap_or_else(|| "auto".into()),
        "metadata": fields.get("metadata").cloned().unwrap_or_else(|| json!({})),
    });
    let streams = fields.flag("stream")?;
    let render: Render = Box::new(move |reply, number| match streams {
        false => Body::Json(body(reply, number, &echoed, "completed", output(reply, number))),
        true => stream(reply, number, &echoed),
    });
    Ok(Parsed { request, render })
}

fn tool(tool: &Value) -> Option<Value> {
    if tool["type"] != "function" {
        return None;
    }
    let mut function = json!({"name": tool["name"]});
    for field in ["description", "parameters"] {
        if !tool[field].is_null() {
            function[field] = tool[field].clone();
        }
    }
    Some(json!({"type": "function", "function": function}))
}

/// Adds an item. A text of the assistant and the calls behind it are one message.
fn add(messages: &mut Vec<Value>, index: usize, item: &Value) -> Result<(), ApiError> {
    let at = |field: &str| format!("input[{index}].{field}");
    match item["type"].as_str() {
        None | Some("message") => {
            let role = match item["role"].as_str() {
                Some("developer" | "system") => "system",
                Some(role @ ("user" | "assistant")) => role,
                _ => return Err(expected(at("role"), "system, developer, user or assistant", item.get("role"))),
            };
            let content = text_of(&item["content"], &TEXTS);
            let content =
                content.ok_or_else(|| expected(at("content"), "a text, or a list of texts", item.get("content")))?;
            messages.push(json!({"role": role, "content": content}));
        }
        Some("function_call") => {
            let call = tool_call(&format!("input[{index}]"), &item["call_id"], &item["name"], &item["arguments"])?;
            if messages.last().is_none_or(|last| last["role"] != "assistant") {
                messages.push(json!({"role": "assistant", "content": ""}));
            }
            if let Some(last) = messages.last_mut() {
                match last["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => last["tool_calls"] = json!([call]),
                }
            }
        }
        Some("function_call_output") => {
            let output = text_of(&item["output"], &TEXTS);
            let output =
                output.ok_or_else(|| expected(at("output"), "a text, or a list of texts", item.get("output")))?;
            messages.push(json!({"role": "tool", "content": output, "tool_call_id": item["call_id"]}));
        }
        // The chat template decides what of earlier thoughts is shown.
        Some("reasoning") => {}
        Some(_) => {
            let kinds = "message, function_call, function_call_output or reasoning";
            return Err(expected(at("type"), kinds, item.get("type")));
        }
    }
    Ok(())
}

/// Returns the items of a reply.
fn output(reply: &ChatReply, number: u64) -> Vec<Value> {
    let (calls, mut items) = (reply.calls(), Vec::new());
    let status = if reply.finish_reason == "length" { "incomplete" } else { "completed" };
    if !reply.text().is_empty() || calls.is_empty() {
        let id = format!("msg_{number}");
        let content = json!([{"type": "output_text", "text": reply.text(), "annotations": [], "logprobs": []}]);
        items.push(json!({"type": "message", "id": id, "role": "assistant", "status": status, "content": content}));
    }
    items.extend(calls.into_iter().enumerate().map(|(index, (call_id, name, arguments))| {
        json!({
            "type": "function_call", "id": format!("fc_{number}_{index}"), "call_id": call_id, "name": name, "arguments": arguments,
            "status": status,
        })
    }));
    items
}

fn body(reply: &ChatReply, number: u64, echoed: &Value, status: &str, output: Vec<Value>) -> Value {
    let (input_tokens, output_tokens) = (reply.prompt_tokens, reply.tokens.len());
    let is_cut = reply.finish_reason == "length" && status == "completed";
    let mut body = json!({
        "id": format!("resp_{number}"),
        "object": "response",
        "created_at": now(),
        "model": MODEL,
        "status": if is_cut { "incomplete" } else { status },
        "error": null,
        "incomplete_details": if is_cut { json!({"reason": "max_output_tokens"}) } else { Value::Null },
        "output": output,
        "parallel_tool_calls": true,
        "previous_response_id": null,
        "usage": null,
    });
    if status == "completed" {
        body["usage"] = json!({
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input_tokens + output_tokens,
        });
    }
    for (name, value) in echoed.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    body
}

fn stream(reply: &ChatReply, number: u64, echoed: &Value) -> Body {
    let (mut events, mut sequence) = (Events::default(), 0);
    let mut send = |mut data: Value, name: &str| {
        data["sequence_number"] = sequence.into();
        sequence += 1;
        events.named(data, name);
    };
    let begun = body(reply, number, echoed, "in_progress", Vec::new());
    send(json!({"response": begun}), "response.created");
    send(json!({"response": begun}), "response.in_progress");
    let items = output(reply, number);
    for (index, item) in items.iter().enumerate() {
        let place = json!({"item_id": item["id"], "output_index": index});
        let at = |more: Value| {
            let mut data = place.clone();
            for (name, value) in more.as_object().into_iter().flatten() {
                data[name] = value.clone();
            }
            data
        };
        let mut added = item.clone();
        added["status"] = "in_progress".into();
        if item["type"] == "message" {
            let part = &item["content"][0];
            let mut empty = part.clone();
            empty["text"] = "".into();
            added["content"] = json!([]);
            send(json!({"output_index": index, "item": added}), "response.output_item.added");
            send(at(json!({"content_index": 0, "part": empty})), "response.content_part.added");
            for piece in pieces(reply.text()) {
                send(at(json!({"content_index": 0, "delta": piece, "logprobs": []})), "response.output_text.delta");
            }
            let text = json!({"content_index": 0, "text": reply.text(), "logprobs": []});
            send(at(text), "response.output_text.done");
            send(at(json!({"content_index": 0, "part": part})), "response.content_part.done");
        } else {
            added["arguments"] = "".into();
            send(json!({"output_index": index, "item": added}), "response.output_item.added");
            for piece in pieces(item["arguments"].as_str().unwrap_or_default()) {
                send(at(json!({"delta": piece})), "response.function_call_arguments.delta");
            }
            let done = at(json!({"name": item["name"], "arguments": item["arguments"]}));
            send(done, "response.function_call_arguments.done");
        }
        send(json!({"output_index": index, "item": item}), "response.output_item.done");
    }
    let done = body(reply, number, echoed, "completed", items);
    let name = if reply.finish_reason == "length" { "response.incomplete" } else { "response.completed" };
    send(json!({"response": done}), name);
    events.body()
}
