"""An agent with OpenAI's SDK and a tool of its own, a calculator. The reward functions of the run score its last message.

    environments: { sums: { agent: [python3, examples/agents/calculator_agent.py], workers: 8 } }
"""

import json
import operator
import re
import sys

from openai import BadRequestError, OpenAI

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "Computes such as 12 * 34.", "parameters": PARAMETERS}


def calculate(arguments):
    found = re.fullmatch(r"(\d{1,9}) ?([-+*]) ?(\d{1,9})", str(json.loads(arguments).get("expression")))
    return str(SIGNS[found[2]](int(found[1]), int(found[3]))) if found else "error: expected two numbers and a sign"


def hold(client, model, messages):
    while True:
        tools = [{"type": "function", "function": CALCULATOR}]
        message = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)})


client = OpenAI()  # OPENAI_BASE_URL is the endpoint of the run
for line in sys.stdin:
    task = json.loads(line)
    try:
        hold(client.with_options(api_key=task["api_key"]), task["model"], task["row"]["prompt"])
    except BadRequestError:
        pass  # The conversation has reached a limit of the run.
    print(json.dumps({"reward": None}), flush=True)
