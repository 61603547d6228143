"""An agent that holds a conversation over each protocol of the endpoint, with the official SDKs; a wrong answer ends it with a traceback."""

import json
import sys

import anthropic
import openai
from openai.types.chat import ChatCompletionMessage

ASKED = "What is 2+3?"
# What an agent that nobody may edit sends.
USUAL = {"temperature": 0.7, "top_p": 0.95}


def result(name, arguments):
    assert name == "calculator", name
    return str(eval(arguments["expression"]))


def whole(chunks):
    """Returns the message of a stream, as frameworks put it together."""
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    calls = []
    for part in (part for delta in deltas for part in delta.tool_calls or []):
        if part.index == len(calls):
            calls.append({"id": part.id, "type": "function", "function": {"name": part.function.name, "arguments": ""}})
        calls[part.index]["function"]["arguments"] += part.function.arguments
    text = "".join(delta.content or "" for delta in deltas)
    message = {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}
    return ChatCompletionMessage.model_validate(message)


def chat(client, tools, streams):
    messages, calls = [{"role": "user", "content": ASKED}], 0
    for _ in range(2):
        options = dict(model="gpt-4o-mini", messages=messages, tools=tools, max_tokens=60, seed=3, **USUAL)
        if not streams:
            message = client.chat.completions.create(**options, tool_choice="required").choices[0].message
        else:
            chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
            message, usage = whole(chunks), chunks[-1].usage
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and not chunks[-1].choices
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            text = result(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            calls += 1
    return calls


def responses(client, tools, streams):
    items, calls = [{"role": "user", "content": ASKED}], 0
    functions = [{"type": "function", **tool["function"]} for tool in tools]
    for _ in range(2):
        options = dict(model="gpt-4o-mini", input=items, tools=functions, max_output_tokens=60, **USUAL)
        if not streams:
            response = client.responses.create(**options)
        else:
            response, deltas = None, ""
            for event in client.responses.create(**options, stream=True):
                if event.type == "response.output_text.delta":
                    deltas += event.delta
                if event.type in ("response.completed", "response.incomplete"):
                    response = event.response
            assert response.output_text == deltas, (response.output_text, deltas)
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
        assert response.status in ("completed", "incomplete"), response.status
        items += response.output
        called = [item for item in response.output if item.type == "function_call"]
        for call in called:
            output = result(call.name, json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
        calls += len(called)
        if not called:
            break
    return calls


def messages(client, tools, streams):
    history, calls = [{"role": "user", "content": ASKED}], 0
    functions = [tool["function"] for tool in tools]
    schemas = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]
    for _ in range(2):
        options = dict(model="claude-sonnet-4-5", messages=history, tools=schemas)
        count = client.messages.count_tokens(**options).input_tokens
        options.update(max_tokens=60)
        if not streams:
            message = client.messages.create(**options)
        else:
            with client.messages.stream(**options) as stream:
                text = "".join(stream.text_stream)
                message = stream.get_final_message()
            assert text == "".join(block.text for block in message.content if block.type == "text"), (text, message)
        assert calls or message.usage.input_tokens == count, (count, message.usage)
        history.append({"role": "assistant", "content": message.content})
        called = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": result(c.name, c.input)} for c in called]
        calls += len(called)
        if not called:
            assert message.stop_reason in ("end_turn", "max_tokens"), message.stop_reason
            break
        assert message.stop_reason == "tool_use"
        history.append({"role": "user", "content": results})
    return calls


def completions(client):
    answer = client.completions.create(model="davinci", prompt="2+3 =", max_tokens=8)
    chunks = list(client.completions.create(model="davinci", prompt="2+3 =", max_tokens=8, stream=True))
    assert answer.usage.completion_tokens <= 8 and answer.choices[0].text is not None
    assert chunks[-1].choices[0].finish_reason in ("stop", "length"), chunks[-1]


def check_errors(client, claude, url):
    for wrong in (openai.OpenAI(base_url=url, api_key="wrong", max_retries=0), anthropic.Anthropic(base_url=url[:-3], api_key="wrong", max_retries=0)):
        try:
            wrong.models.list()
        except (openai.AuthenticationError, anthropic.AuthenticationError) as error:
            assert "ANTHROPIC_API_KEY" in str(error), error
        else:
            raise AssertionError("a wrong key is taken")
    try:
        claude.messages.create(model="m", max_tokens=4, messages=[{"role": "user", "content": "long " * 40_000}])
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error" and "at least" in str(error), error
    else:
        raise AssertionError("a text beyond the context is taken")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "required": ["x"]}}}
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "JSON"}], response_format=form, max_tokens=4)


for line in sys.stdin:
    task = json.loads(line)
    tools = task["row"]["columns"]["schemas"]
    client = openai.OpenAI(base_url=task["base_url"], api_key=task["api_key"])
    claude = anthropic.Anthropic(base_url=task["base_url"].removesuffix("/v1"), api_key=task["api_key"])
    assert [model.id for model in claude.models.list()] == ["policy"]
    calls = sum(hold(client, tools, streams) for hold in (chat, responses) for streams in (False, True))
    calls += sum(messages(claude, tools, streams) for streams in (False, True))
    completions(client)
    check_errors(client, claude, task["base_url"])
    print(json.dumps({"reward": calls / 6}), flush=True)
