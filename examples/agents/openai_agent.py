"""An agent with OpenAI's SDK: it asks a row's question, then for the number only, and rewards the share of digits in both answers.

    environments: { numbers: { agent: [python3, examples/agents/openai_agent.py], workers: 8 } }
    rewards: { environment: 1 }

One process holds many conversations, one after the other. Each line of its input has the row and the key of a conversation.
"""

import json
import sys

from openai import OpenAI


def hold(client, model, messages):
    text = ""
    for question in (None, "Write the number only."):
        if question:
            messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=16).choices[0].message
        messages.append({"role": "assistant", "content": answer.content})
        text += answer.content
    return sum(character.isdigit() for character in text) / max(len(text), 1)


client = OpenAI()  # OPENAI_BASE_URL is the endpoint of the run
for line in sys.stdin:
    task = json.loads(line)
    of_conversation = client.with_options(api_key=task["api_key"])
    print(json.dumps({"reward": hold(of_conversation, task["model"], task["row"]["prompt"])}), flush=True)
