"""reasoning-gym's score of an answer, in [0, 1]; also writes rows of its tasks as a data file.

    pip install reasoning-gym
    python examples/rewards/reasoning_gym_reward.py chain_sum 1000 > chain_sum.jsonl
    grpo train ... --set 'rewards.programs.gym={command: [python3, examples/rewards/reasoning_gym_reward.py]}'

A row has the columns `dataset`, the name of the task, and `entry`, reasoning-gym's `question`, `answer` and `metadata`.
"""

import json
import re
import sys

import reasoning_gym
from judge import serve

# Judges by the name of their task, created once.
JUDGES = {}


def score(row: dict) -> float:
    name = row["columns"]["dataset"]
    if name not in JUDGES:
        JUDGES[name] = reasoning_gym.get_score_answer_fn(name)
    tags = re.findall(r"<answer>(.*?)</answer>", row["completion"], flags=re.DOTALL)
    answer = tags[-1] if tags else row["completion"]
    return JUDGES[name](answer.strip(), row["columns"]["entry"])


def rows(name: str, count: int) -> None:
    """Writes `count` problems of a task to standard output, the same problems every time."""
    for entry in reasoning_gym.create_dataset(name, size=count, seed=0):
        row = {"prompt": entry["question"], "answer": entry["answer"], "dataset": name, "entry": entry}
        print(json.dumps(row))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        rows(sys.argv[1], int(sys.argv[2]))
    else:
        serve(score)
