//! The protocols of the endpoint, as plain HTTP. tests/python has the SDKs.

use crate::endpoint::Function;
use grpo_agents::endpoint::{Asked, ChatReply, ChatRequest, Job, Rules};
use grpo_agents::{Agent, Connection, Endpoint, Error};
use grpo_data::Item;
use grpo_files::{long_integer, long_integers_as_digits};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

/// A request of a client: the path behind `/v1`, and the body.
type Call = (&'static str, Value);

/// Returns the status and the body of each request, and the requests that the policy has got. Every reply is `reply`.
fn calls(rules: Rules, reply: ChatReply, calls: Vec<Call>) -> (Vec<(u16, String)>, Vec<ChatRequest>) {
    let endpoint = Endpoint::open(None, rules).unwrap();
    let answers = Arc::new(Mutex::new(Vec::new()));
    let of_agent = Arc::clone(&answers);
    let agent: Arc<dyn Agent> = Arc::new(Function(move |_: &Item, connection: &Connection| {
        for (path, body) in &calls {
            let agent = ureq::Agent::config_builder().http_status_as_error(false).proxy(None).build().new_agent();
            let request = agent.post(format!("{}{path}", connection.base_url())).content_type("application/json");
            // As Anthropic's SDK sends it.
            let mut response = request
                .header("X-Api-Key", connection.api_key())
                .send(long_integers_as_digits(body.to_string()))
                .unwrap();
            let text = response.body_mut().read_to_string().unwrap();
            of_agent.lock().unwrap().push((response.status().as_u16(), text));
        }
        Ok(None)
    }));
    let row = Item::new("x");
    let mut requests = Vec::new();
    let answer = |asked: Vec<Asked>| {
        for asked in asked {
            requests.push(asked.request.clone());
            asked.answer(Ok(reply.clone()));
        }
        Ok::<_, Error>(())
    };
    endpoint.hold(&[Job { agent, row: &row }], answer).unwrap();
    let answers = answers.lock().unwrap().clone();
    (answers, requests)
}

fn strict() -> Rules {
    Rules { is_strict: true, temperature: 0.5, ..Rules::default() }
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
}

/// Returns a reply with a text and a call.
fn calling() -> ChatReply {
    let arguments = json!({"a": 0.1, "b": [1]});
    let call = json!({"type": "function", "function": {"name": "add", "arguments": arguments}, "id": "call00001"});
    let message = json!({"role": "assistant", "content": "I add.", "tool_calls": [call]});
    let tokens = vec![("I add.".into(), -0.5), ("\u{fffd}".into(), -1.0)];
    ChatReply { message, finish_reason: "tool_calls", prompt_tokens: 3, tokens, ..ChatReply::default() }
}

fn chat(change: Value) -> Call {
    let mut body = json!({"model": "policy", "messages": [{"role": "user", "content": "Hi"}]});
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    ("/chat/completions", body)
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}"))
}

/// Returns the data of server-sent events.
fn events(text: &str) -> Vec<Value> {
    let data = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.map(parsed).collect()
}

#[test]
fn a_strict_endpoint_refuses_by_name_what_it_would_replace() {
    let cases = [
        (json!({"n": 2}), "n", "one completion"),
        (json!({"seed": 1}), "seed", "the run's `seed`"),
        (json!({"temperature": 1.0}), "temperature", "rollout.temperature: 0.5"),
        (json!({"stop": "x"}), "stop", "rollout.stop"),
        (json!({"top_logprobs": 3}), "top_logprobs", "only sampled tokens"),
        (json!({"frequency_penalty": 0.5}), "frequency_penalty", "not supported"),
        (json!({"logit_bias": {"7": 1}}), "logit_bias", "not supported"),
        (json!({"response_format": {"type": "json_object"}}), "response_format", "send {\"type\":\"text\"}"),
        (json!({"parallel_tool_calls": false}), "parallel_tool_calls", "send true"),
        (json!({"functions": []}), "functions", "`tools`"),
        (json!({"strange": 2}), "strange", "leave it out"),
        (json!({"tool_choice": "required"}), "tool_choice", "\"auto\" or \"none\""),
    ];
    let (answers, requests) =
        calls(strict(), calling(), cases.iter().map(|(change, ..)| chat(change.clone())).collect());
    for ((change, param, words), (status, text)) in cases.iter().zip(&answers) {
        let error = &parsed(text)["error"];
        assert_eq!((*status, &error["param"], &error["type"]), (400, &json!(param), &json!("invalid_request_error")));
        assert!(error["message"].as_str().unwrap().contains(words), "{change}: {text}");
    }
    assert!(requests.is_empty());
}

#[test]
fn wrong_values_are_refused_by_name() {
    let cases = [
        (json!({"n": 2}), "n", "one completion"),
        (json!({"functions": []}), "functions", "`tools`"),
        (json!({"modalities": ["audio"]}), "modalities", "writes text"),
        (json!({"tool_choice": "maybe"}), "tool_choice", "\"required\""),
        (json!({"tools": [{"name": "f"}]}), "tools", "a list of functions"),
        (json!({"max_tokens": 0}), "max_tokens", "at least 1"),
        (json!({"temperature": "hot"}), "temperature", "a number"),
        (json!({"stop": 3}), "stop", "a text or a list of texts"),
        (json!({"logprobs": 1}), "logprobs", "true or false"),
        (json!({"stream": 1}), "stream", "true or false"),
        (json!({"response_format": {"type": "grammar"}}), "response_format", "json_schema"),
        (json!({"model": null}), "model", "the name of a model"),
        (json!({"messages": []}), "messages", "a list of 1 to 4096"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role", "developer"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content", "got nothing"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages[0].content", "texts"),
        (json!({"messages": [{"role": "assistant", "content": "x"}]}), "messages[0].role", "the last message"),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
            "messages[0].tool_calls[0].function.arguments",
            "a JSON object",
        ),
    ];
    let (answers, _) =
        calls(Rules::default(), calling(), cases.iter().map(|(change, ..)| chat(change.clone())).collect());
    for ((change, param, words), (status, text)) in cases.iter().zip(&answers) {
        let error = &parsed(text)["error"];
        assert_eq!((*status, &error["param"]), (400, &json!(param)), "{change}: {text}");
        assert!(error["message"].as_str().unwrap().contains(words), "{change}: {text}");
    }
}

#[test]
fn fields_of_agents_that_cannot_be_edited_are_accepted() {
    let change = json!({
        "model": "gpt-4o-mini", "temperature": 0, "top_p": 0.1, "seed": 7, "frequency_penalty": 1, "presence_penalty": 0.5, "n": 1,
        "logit_bias": {"7": 1}, "top_logprobs": 3, "logprobs": true, "parallel_tool_calls": false, "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"required": ["x"]}}},
        "tool_choice": "required", "tools": tools(), "stop": ["Observation:"], "max_tokens": 9, "max_completion_tokens": 7,
    });
    let (answers, requests) = calls(Rules::default(), calling(), vec![chat(change), chat(json!({}))]);
    assert_eq!((answers[0].0, answers[1].0), (200, 200), "{answers:?}");
    let expected = ChatRequest {
        messages: vec![json!({"role": "user", "content": "Hi"})],
        tools: Some(tools()),
        calls_tools: true,
        requires_call: true,
        json: Some(vec!["x".into()]),
        stop: vec!["Observation:".into()],
        max_tokens: Some(7),
        ..ChatRequest::default()
    };
    assert_eq!(requests[0], expected);
    let body = parsed(&answers[0].1);
    assert_eq!(body["choices"][0]["logprobs"]["content"][1]["bytes"], Value::Null);
    assert_eq!(
        (&body["usage"]["total_tokens"], &body["choices"][0]["finish_reason"]),
        (&json!(5), &json!("tool_calls"))
    );
}

#[test]
fn a_streamed_chat_completion_has_the_parts_of_the_whole_one() {
    let stream = json!({"stream": true, "stream_options": {"include_usage": true}, "tools": tools()});
    let (answers, _) = calls(Rules::default(), calling(), vec![chat(stream), chat(json!({"stream": true}))]);
    assert!(answers[0].1.ends_with("data: [DONE]\n\n"), "{}", answers[0].1);
    let chunks = events(&answers[0].1);
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    let content: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    let calls = || deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten();
    let arguments: String = calls().filter_map(|call| call["function"]["arguments"].as_str()).collect();
    let begin = calls().next().unwrap();
    assert_eq!((content.as_str(), parsed(&arguments)), ("I add.", json!({"a": 0.1, "b": [1]})));
    assert_eq!(
        (&begin["id"], &begin["function"]["name"], &begin["index"]),
        (&json!("call00001"), &json!("add"), &json!(0))
    );
    let [.., end, used] = &chunks[..] else { panic!("{chunks:?}") };
    assert_eq!((&end["choices"][0]["finish_reason"], &used["choices"]), (&json!("tool_calls"), &json!([])));
    assert_eq!((&used["usage"]["total_tokens"], &end["usage"]), (&json!(5), &Value::Null));
    assert!(events(&answers[1].1).iter().all(|chunk| chunk.get("usage").is_none()));
}

#[test]
fn a_message_that_a_client_sends_back_is_the_message_of_the_reply_in_every_protocol() {
    let reply = calling();
    let user = json!({"role": "user", "content": "Hi"});
    let anthropic = |messages: Value| json!({"model": "claude", "max_tokens": 9, "messages": messages});
    let first = vec![
        chat(json!({"tools": tools()})),
        ("/messages", anthropic(json!([user]))),
        ("/responses", json!({"model": "m", "input": [user]})),
    ];
    let (answers, _) = calls(Rules::default(), reply.clone(), first);
    let bodies: Vec<Value> = answers.iter().map(|(_, text)| parsed(text)).collect();
    let result = json!({"role": "tool", "tool_call_id": "call00001", "content": "2"});
    let blocks =
        json!([{"type": "tool_result", "tool_use_id": "call00001", "content": [{"type": "text", "text": "2"}]}]);
    let mut items = vec![user.clone()];
    items.extend(bodies[2]["output"].as_array().unwrap().clone());
    items.push(json!({"type": "function_call_output", "call_id": "call00001", "output": "2"}));
    let second = vec![
        chat(json!({"messages": [user, bodies[0]["choices"][0]["message"], result]})),
        (
            "/messages",
            anthropic(
                json!([user, {"role": "assistant", "content": bodies[1]["content"]}, {"role": "user", "content": blocks}]),
            ),
        ),
        ("/responses", json!({"model": "m", "input": items})),
    ];
    let (_, requests) = calls(Rules::default(), reply.clone(), second);
    assert_eq!(requests.len(), 3);
    for request in requests {
        assert_eq!(request.messages, [user.clone(), reply.message.clone(), result.clone()]);
    }
}

#[test]
fn anthropics_calls_keep_integers_of_any_length() {
    let digits = "98765432109876543210987";
    let mut reply = calling();
    reply.message["tool_calls"][0]["function"]["arguments"] = json!({"id": long_integer(digits)});
    let user = json!({"role": "user", "content": "Hi"});
    let messages = |messages: Value| json!({"model": "claude", "max_tokens": 9, "messages": messages});
    let mut streamed = messages(json!([user]));
    streamed["stream"] = true.into();
    // The history of a client has the digits as a number.
    let call = json!({"type": "tool_use", "id": "call00001", "name": "add", "input": {"id": long_integer(digits)}});
    let content = json!([{"type": "text", "text": "I add."}, call]);
    let result = json!({"type": "tool_result", "tool_use_id": "call00001", "content": "2"});
    let history = json!([user, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]);
    let list = vec![("/messages", messages(json!([user]))), ("/messages", streamed), ("/messages", messages(history))];
    let (answers, requests) = calls(Rules::default(), reply.clone(), list);
    let input = format!("{{\"id\":{digits}}}");
    assert!(answers[0].1.contains(&format!("\"input\":{input}")), "{}", answers[0].1);
    let json: String =
        events(&answers[1].1).iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(json, input);
    assert_eq!(requests[2].messages[1], reply.message);
}

#[test]
fn anthropics_messages_are_read_and_streamed() {
    let tool = json!({"name": "add", "input_schema": {"type": "object"}});
    let body = |more: Value| {
        let mut body = json!({
            "model": "claude", "max_tokens": 9, "system": [{"type": "text", "text": "Be brief."}], "tools": [tool],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "stop_sequences": ["END"],
        });
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    let list = vec![
        ("/messages", body(json!({"tool_choice": {"type": "any"}, "thinking": {"type": "enabled"}, "top_k": 5}))),
        ("/messages", body(json!({"stream": true}))),
        ("/messages/count_tokens", json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]})),
        ("/messages", json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]})),
    ];
    let (answers, requests) = calls(Rules::default(), calling(), list);
    let messages = vec![json!({"role": "system", "content": "Be brief."}), json!({"role": "user", "content": "Hi"})];
    let expected = ChatRequest {
        messages,
        tools: Some(tools()),
        calls_tools: true,
        requires_call: true,
        stop: vec!["END".into()],
        max_tokens: Some(9),
        ..ChatRequest::default()
    };
    assert_eq!(requests[0], expected);
    assert!(requests[2].counts_only && requests.len() == 3);
    let whole = parsed(&answers[0].1);
    assert_eq!((&whole["stop_reason"], &whole["content"][1]["input"]["a"]), (&json!("tool_use"), &json!(0.1)));
    assert_eq!(whole["usage"], json!({"input_tokens": 3, "output_tokens": 2}));
    let events = events(&answers[1].1);
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!((kinds[0], kinds[1], kinds[kinds.len() - 2]), ("message_start", "content_block_start", "message_delta"));
    let json: String = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(parsed(&json), json!({"a": 0.1, "b": [1]}));
    assert_eq!(answers[2].1, "{\"input_tokens\":3}");
    let error = parsed(&answers[3].1);
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("invalid_request_error")));
}

#[test]
fn responses_and_completions_are_read_and_streamed() {
    let text = ChatReply {
        message: json!({"role": "assistant", "content": "A long answer of more than thirty-two characters."}),
        finish_reason: "length",
        ..calling()
    };
    let response = |more: Value| {
        let mut body = json!({"model": "m", "instructions": "Be brief.", "input": "Hi", "max_output_tokens": 4});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        ("/responses", body)
    };
    let completion =
        |stream: bool| ("/completions", json!({"model": "m", "prompt": ["Once"], "stream": stream, "max_tokens": 5}));
    let list = vec![
        response(json!({"text": {"format": {"type": "json_object"}}})),
        response(json!({"stream": true})),
        completion(false),
        completion(true),
        response(json!({"previous_response_id": "resp_1"})),
    ];
    let (answers, requests) = calls(Rules::default(), text.clone(), list);
    assert_eq!(
        requests[0].messages,
        [json!({"role": "system", "content": "Be brief."}), json!({"role": "user", "content": "Hi"})]
    );
    assert_eq!((&requests[0].json, requests[0].max_tokens), (&Some(Vec::new()), Some(4)));
    assert!(requests[2].is_text && requests[2].messages == [json!({"role": "user", "content": "Once"})]);
    let whole = parsed(&answers[0].1);
    assert_eq!(
        (&whole["status"], &whole["output"][0]["content"][0]["text"]),
        (&json!("incomplete"), &text.message["content"])
    );
    let deltas = |events: &[Value], of: fn(&Value) -> &Value| -> String {
        events.iter().filter_map(|event| of(event).as_str()).collect()
    };
    let of_response = events(&answers[1].1);
    assert_eq!(deltas(&of_response, |event| &event["delta"]), text.message["content"]);
    let numbers: Vec<u64> = of_response.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert!(numbers.iter().copied().eq(0..numbers.len() as u64), "{numbers:?}");
    assert_eq!(parsed(&answers[2].1)["choices"][0]["text"], text.message["content"]);
    assert_eq!(deltas(&events(&answers[3].1), |event| &event["choices"][0]["text"]), text.message["content"]);
    assert!(answers[4].0 == 400 && answers[4].1.contains("send all items in `input`"), "{}", answers[4].1);
}
