"""1 if math_verify finds the completion's answer equal to the reference answer, else 0.

    pip install math-verify==0.9.0
    grpo train ... --set 'rewards.programs.math_verify={command: [python3, examples/rewards/math_verify_reward.py], workers: 2}'
"""

from judge import serve
from math_verify import parse, verify


def score(row: dict) -> float | None:
    if row["answer"] is None:
        return None
    # Time limits of math_verify need signals; `grpo` has its own limit, `timeout`.
    gold = parse(f"${row['answer']}$", parsing_timeout=None)
    found = parse(row["completion"], parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))


if __name__ == "__main__":
    serve(score)
