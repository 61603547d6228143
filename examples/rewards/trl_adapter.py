"""Runs an unchanged TRL reward function as a reward program.

    grpo train ... --set 'rewards.programs.mine={command: [python3, examples/rewards/trl_adapter.py, my_rewards.py:reward_func]}'

The argument is FILE:FUNCTION or MODULE:FUNCTION (`trl.rewards:accuracy_reward`). A function that returns a reward function gets its
arguments as JSON: `trl.rewards:get_soft_overlong_punishment '{"max_completion_len": 256, "soft_punish_cache": 64}'`.

The function is called as `GRPOTrainer` calls it, with keywords and a batch at a time: `prompts`, `completions` (text, or if the
prompt is a conversation `[{"role": "assistant", "content": ...}]`), `completion_ids`, `trainer_state`, `log_extra`, `log_metric`, and a list
for each column of the rows. It returns a number or None for each completion, and may be `async`. A batch has at most `batch_size`
completions of the program's settings (64): a function that compares completions needs a whole step in one batch, and `workers: 1`.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
from pathlib import Path

from judge import described, protocol

# TRL does not pass these as columns.
NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class TrainerState:
    """TRL's state of the trainer, which `grpo` does not pass to reward programs: reading it is an error."""

    def __getattr__(self, name):
        raise AttributeError(f"trainer_state.{name} is not known to reward programs of grpo")


def log_extra(column, values):
    """Ignores the columns, which TRL shows next to its completions."""


def log_metric(name, value):
    """Prints the number to the log; TRL logs it with its metrics."""
    print(f"{name}: {value}", file=sys.stderr)


def load(target: str, arguments: str | None):
    """Returns the function that `target`, FILE:FUNCTION or MODULE:FUNCTION, names."""
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        sys.exit(f"expected FILE:FUNCTION or MODULE:FUNCTION, got {target!r}")
    sys.path.insert(0, os.getcwd())
    if place.endswith(".py") or os.sep in place:
        path = Path(place).resolve()
        # The file can import modules from its folder, like a script.
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or not path.is_file():
            sys.exit(f"expected a file of Python, got {place!r}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = module
    for part in name.split("."):
        if not hasattr(function, part):
            sys.exit(f"{place} has no {name!r}")
        function = getattr(function, part)
    if arguments is not None:
        function = function(**json.loads(arguments))
    if not callable(function):
        sys.exit(f"expected a function, {target} is {type(function).__name__}")
    return function


def conversation(row: dict) -> tuple:
    """Returns prompt and completion in TRL's form: texts, or lists of messages."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return prompt, completion
    # The completion continues a last message of the assistant, which is then not part of the prompt.
    if prompt and prompt[-1]["role"] == "assistant" and isinstance(prompt[-1].get("content"), str):
        prompt, completion = prompt[:-1], prompt[-1]["content"] + completion
    return prompt, [{"role": "assistant", "content": completion}]


def arguments_of(rows: list[dict], names: dict) -> dict:
    """Returns the arguments that `GRPOTrainer` passes to a reward function, with a list for each of the columns `names`, to which the
    columns of `rows` are added: a batch of rows without a column has None for it, as in a data set of TRL."""
    pairs = [conversation(row) for row in rows]
    names.update({name: None for row in rows for name in row["columns"] if name not in NOT_COLUMNS})
    columns = {name: [row["columns"].get(name) for row in rows] for name in names}
    # Without a column of this name, the reference answer of another column.
    if "answer" not in columns and any(row["answer"] is not None for row in rows):
        columns["answer"] = [row["answer"] for row in rows]
    return {
        **columns,
        "prompts": [prompt for prompt, _ in pairs],
        "completions": [completion for _, completion in pairs],
        "completion_ids": [row["completion_ids"] for row in rows],
        "trainer_state": TrainerState(),
        "log_extra": log_extra,
        "log_metric": log_metric,
    }


def answer(row: dict, reward) -> dict:
    """Returns the line for one completion. In TRL, NaN means no reward."""
    number = math.nan if reward is None else float(reward)
    if math.isinf(number):
        return {"id": row["id"], "error": f"expected a finite reward or None, got {number}"}
    return {"id": row["id"], "reward": None if math.isnan(number) else number}


class Function:
    """A reward function of TRL, with the columns that its rows have had."""

    def __init__(self, function, target: str):
        self.function, self.target, self.columns = function, target, {}
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)

    def judge(self, rows: list[dict]) -> list[dict]:
        """Returns the lines for a batch. An exception fails the whole batch, because TRL's functions judge completions together."""
        arguments = arguments_of(rows, self.columns)
        try:
            message = self.mismatch(arguments)
            if message is None:
                rewards = self.function(**arguments)
                if inspect.isawaitable(rewards):
                    rewards = self.loop.run_until_complete(rewards)
                rewards = list(rewards)
                if len(rewards) == len(rows):
                    return [answer(row, reward) for row, reward in zip(rows, rewards)]
                message = f"{self.target}: expected {len(rows)} rewards, one for each completion, got {len(rewards)}"
        except Exception as error:
            message = described(error)
            # A function that reads a column from its `**kwargs`.
            if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
                message += f"; {self.known()}"
        return [{"id": row["id"], "error": message} for row in rows]

    def mismatch(self, arguments: dict) -> str | None:
        """Returns the reason why the function cannot be called with `arguments`, or None."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # Some functions of C have none.
            return None
        try:
            signature.bind(**arguments)
        except TypeError as error:
            parameters = signature.parameters.values()
            has_kwargs = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
            advice = "" if has_kwargs else "; it needs `**kwargs`, because TRL passes every column"
            return f"TypeError: {self.target}: {error}; {self.known()}{advice}"
        return None

    def known(self) -> str:
        """Returns the columns of the rows, for an error."""
        return f"the columns of the rows are {', '.join(sorted(self.columns)) or 'none but the prompt'}"


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("expected FILE:FUNCTION or MODULE:FUNCTION, and perhaps the arguments of a function that makes the reward, as JSON")
    # Before the user's code runs, which may print.
    questions, answers = protocol()
    function = Function(load(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else None), sys.argv[1])
    rows = []
    for line in questions:
        rows.append(json.loads(line))
        if rows[-1].get("remaining", 0) == 0:
            lines = [json.dumps(line) for line in function.judge(rows)]
            print("\n".join(lines), file=answers, flush=True)
            rows = []


if __name__ == "__main__":
    main()
