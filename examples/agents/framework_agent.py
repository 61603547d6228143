"""An agent of OpenAI's Agents SDK (pip install openai-agents) with a tool, a calculator. The framework asks the endpoint over /v1/responses.

    environments: { sums: { agent: [python3, examples/agents/framework_agent.py], workers: 8 } }
"""

import asyncio
import json
import operator
import re
import sys

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from agents.exceptions import AgentsException
from openai import BadRequestError

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@function_tool
def calculator(expression: str) -> str:
    """Computes such as 12 * 34."""
    found = re.fullmatch(r"(\d{1,9}) ?([-+*]) ?(\d{1,9})", expression)
    return str(SIGNS[found[2]](int(found[1]), int(found[3]))) if found else "error: expected two numbers and a sign"


async def hold(task):
    # Every conversation has a key of its own.
    provider = OpenAIProvider(base_url=task["base_url"], api_key=task["api_key"])
    config = RunConfig(model=task["model"], model_provider=provider, tracing_disabled=True)
    agent = Agent(name="calculator", tools=[calculator])
    try:
        await Runner.run(agent, task["row"]["prompt"], run_config=config, max_turns=3)
    except (AgentsException, BadRequestError):
        pass  # The conversation has reached a limit, or the model has called a tool that does not exist.


async def main():
    # One loop for all conversations: the framework keeps its connections.
    for line in sys.stdin:
        await hold(json.loads(line))
        print(json.dumps({"reward": None}), flush=True)


asyncio.run(main())
