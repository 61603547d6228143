"""The protocol of reward programs: JSON lines in, JSON lines out.

    from judge import serve
    serve(lambda row: 1.0 if row["answer"] in row["completion"] else 0.0)

`grpo` writes one object per completion to standard input: `id`, `prompt` (text, or a list of messages), `completion`, `answer` (text or null),
`columns` (the other columns of the row), `source`, `truncated`, `completion_ids`, `completion_tokens`, and `remaining`, the number of
completions of the same batch that follow. It reads one line per object, in the same order: `{"reward": number, true, false or null}`, or
`{"error": "why"}` for a completion that cannot be judged.
"""

import json
import os
import sys


def serve(score) -> None:
    """Answers every line with what `score` says of it: a number, or None for nothing to say."""
    questions, answers = protocol()
    for line in questions:
        row = json.loads(line)
        try:
            reward = score(row)
            answer = {"id": row["id"], "reward": None if reward is None else float(reward)}
        except Exception as error:  # One completion that cannot be judged is no reason to stop.
            answer = {"id": row["id"], "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def protocol():
    """The lines that `grpo` writes, and the file that it reads. Both belong to the protocol from now on: what libraries print goes
    to the log, with standard error, and whoever reads standard input finds it empty."""
    questions = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return questions, answers
