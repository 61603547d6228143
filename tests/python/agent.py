"""An agent that checks the endpoint of a run with OpenAI's SDK; a wrong answer ends it with a traceback."""

import json
import sys

import openai


def refused(kind, status, words, call):
    try:
        call()
    except openai.APIStatusError as error:
        assert type(error) is kind and error.status_code == status, repr(error)
        assert words in str(error) and error.body["message"] in str(error), (str(error), error.body)
    else:
        raise AssertionError(f"no {kind.__name__} with {words}")


def check_errors(client, url, closed):
    say = [{"role": "user", "content": "Hi"}]

    def create(client=client, messages=say, **more):
        return client.chat.completions.create(model="policy", messages=messages, **more)

    for key in ("wrong", "grpo-"):
        stranger = openai.OpenAI(base_url=url, api_key=key)
        refused(openai.AuthenticationError, 401, "OPENAI_API_KEY", lambda: create(stranger))
        refused(openai.AuthenticationError, 401, "OPENAI_API_KEY", stranger.models.list)
    for more, words in (
        ({"n": 2}, "one completion"),
        ({"functions": []}, "`tools`"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "long " * 2000}]}, "too long"),
    ):
        refused(openai.BadRequestError, 400, words, lambda: create(**more))
    refused(openai.NotFoundError, 404, "/v1/chat/completions", lambda: client.embeddings.create(model="policy", input="x"))
    huge = [{"role": "user", "content": "x" * (9 << 20)}]
    refused(openai.APIStatusError, 413, "8388608 bytes", lambda: create(messages=huge))
    if closed:
        refused(openai.NotFoundError, 404, "the conversation of this key is over", lambda: create(closed))


def hold(client, row):
    assert [model.id for model in client.models.list()] == ["policy"]
    assert client.models.retrieve("policy").object == "model"
    messages, tools = row["prompt"], row["columns"]["schemas"]
    reward, log_probabilities = 0, []
    for _ in range(2):
        answer = client.chat.completions.create(
            model="any", messages=messages, tools=tools, tool_choice="auto", temperature=0.2, max_completion_tokens=60, logprobs=True
        )
        choice, usage = answer.choices[0], answer.usage
        message, content = choice.message, choice.logprobs.content
        assert len(answer.choices) == 1 and answer.object == "chat.completion" and message.role == "assistant"
        assert len(content) == usage.completion_tokens and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert all(entry.logprob <= 0 and entry.top_logprobs == [] for entry in content)
        log_probabilities += [entry.logprob for entry in content]
        messages.append(message)  # as OpenAI's documentation does
        if not message.tool_calls:
            assert choice.finish_reason in ("stop", "length"), choice.finish_reason
            break
        assert choice.finish_reason == "tool_calls" and message.content is None, choice
        for call in message.tool_calls:
            assert call.type == "function" and call.function.name == "calculator", call
            expression = json.loads(call.function.arguments)["expression"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(eval(expression))})
            reward = 1
    assert any(logp < 0 for logp in log_probabilities)
    return reward


closed = None
for line in sys.stdin:
    task = json.loads(line)
    client = openai.OpenAI(base_url=task["base_url"], api_key=task["api_key"])
    reward = hold(client, task["row"])
    check_errors(client, task["base_url"], closed)
    closed = client
    print(json.dumps({"reward": reward}), flush=True)
