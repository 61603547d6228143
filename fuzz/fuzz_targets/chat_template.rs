//! Renders the input as a chat template. Text behind a zero byte is JSON that replaces the variables.
#![no_main]

use grpo_models::{ChatTemplate, map_on_template_threads};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{LazyLock, Mutex};

/// A thread that renders, with the stack of templates: another thread per input would take most of the time.
struct Renderer {
    inputs: SyncSender<Vec<u8>>,
    ended: Receiver<()>,
}

static RENDERER: LazyLock<Mutex<Renderer>> = LazyLock::new(|| {
    let (inputs, received) = sync_channel::<Vec<u8>>(0);
    let (end, ended) = sync_channel(0);
    let (received, end) = (Mutex::new(received), Mutex::new(end));
    std::thread::spawn(move || {
        map_on_template_threads(&[()], 1, |()| {
            let (received, end) = (received.lock().expect("one thread"), end.lock().expect("one thread"));
            for input in received.iter() {
                render(&input);
                end.send(()).expect("the fuzzer waits");
            }
        });
    });
    Mutex::new(Renderer { inputs, ended })
});

static CONVERSATION: LazyLock<Value> = LazyLock::new(|| {
    let call =
        json!({"id": "1", "type": "function", "function": {"name": "sum", "arguments": {"a": 1, "b": [2.5, null]}}});
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    json!({
        "messages": [
            {"role": "system", "content": "Be short.\n"},
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "<think>3</think>", "reasoning_content": "3", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "1", "name": "sum"},
        ],
        "tools": [{"type": "function", "function": {"name": "sum", "description": "é", "parameters": parameters}}],
        "add_generation_prompt": true,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "number": -7,
        "large": 9007199254740993_u64,
    })
});

fn render(input: &[u8]) {
    let (template, variables) = match input.iter().position(|byte| *byte == 0) {
        Some(at) => (&input[..at], &input[at + 1..]),
        None => (input, &b""[..]),
    };
    let variables: Value = serde_json::from_slice(variables).unwrap_or_else(|_| CONVERSATION.clone());
    let Ok(template) = ChatTemplate::new(&String::from_utf8_lossy(template), "fuzz").with_date("2026-11-25") else {
        return;
    };
    if let (Ok(first), Ok(second)) = (template.render(&variables), template.render(&variables)) {
        assert_eq!(first, second);
    }
}

fuzz_target!(|input: &[u8]| {
    let renderer = RENDERER.lock().expect("one fuzzer");
    renderer.inputs.send(input.to_vec()).expect("the renderer runs");
    renderer.ended.recv().expect("the renderer runs");
});
