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
    """Answers every line with the result of `score`: a number, or None for no reward."""
    questions, answers = protocol()
    for line in questions:
        row = json.loads(line)
        try:
            reward = score(row)
            answer = {"id": row["id"], "reward": None if reward is None else float(reward)}
        except Exception as error:  # An error in one completion does not end the program.
            answer = {"id": row["id"], "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def protocol():
    """Returns the lines that `grpo` writes, and the file that it reads. From then on both are reserved for the protocol: output of
    libraries goes to standard error, and standard input is empty."""
    questions = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return questions, answers
