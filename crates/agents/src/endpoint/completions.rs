//! OpenAI's completions of texts, without a chat template.

use super::chat::usage;
use super::events::{Body, Events};
use super::fields::{Fields, expected};
use super::protocol::{Parsed, Render, now, pieces};
use super::request::{ApiError, ChatReply, ChatRequest, MODEL};
use serde_json::{Value, json};

/// Fields that are read.
const HONOURED: [&str; 4] = ["prompt", "stop", "max_tokens", "logprobs"];

/// Reads a request.
pub(super) fn parse(fields: &Fields<'_>) -> Result<Parsed, ApiError> {
    fields.check(&HONOURED)?;
    let prompt = match fields.get("prompt") {
        Some(Value::Array(list)) if list.len() == 1 => &list[0],
        prompt => prompt.unwrap_or(&Value::Null),
    };
    let Value::String(text) = prompt else { return Err(expected("prompt", "a text", Some(prompt))) };
    if fields.get("logprobs").is_some_and(|count| *count != json!(0)) {
        fields.replace("logprobs", "only chat completions have log-probabilities")?;
    }
    let request = ChatRequest {
        messages: vec![json!({"role": "user", "content": text})],
        stop: fields.stop("stop")?,
        max_tokens: fields.count("max_tokens")?,
        is_text: true,
        ..ChatRequest::default()
    };
    let streams = fields.flag("stream")?;
    let has_usage = fields.get("stream_options").is_some_and(|options| options["include_usage"] == true);
    let render: Render = Box::new(move |reply, number| match streams {
        false => {
            let mut body = chunk(number, reply.text(), reply.finish_reason.into());
            body["usage"] = usage(reply);
            Body::Json(body)
        }
        true => stream(reply, number, has_usage),
    });
    Ok(Parsed { request, render })
}

fn chunk(number: u64, text: &str, reason: Value) -> Value {
    json!({
        "id": format!("cmpl-{number}"),
        "object": "text_completion",
        "created": now(),
        "model": MODEL,
        "choices": [{"index": 0, "text": text, "logprobs": null, "finish_reason": reason}],
    })
}

fn stream(reply: &ChatReply, number: u64, has_usage: bool) -> Body {
    let mut events = Events::default();
    for piece in pieces(reply.text()) {
        events.data(&chunk(number, &piece, Value::Null));
    }
    events.data(&chunk(number, "", reply.finish_reason.into()));
    if has_usage {
        let mut last = chunk(number, "", Value::Null);
        (last["choices"], last["usage"]) = (json!([]), usage(reply));
        events.data(&last);
    }
    events.done()
}
