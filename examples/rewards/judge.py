"""The protocol of reward programs: JSON lines in, JSON lines out.

    from judge import serve
    serve(lambda row: 1.0 if row["answer"] in row["completion"] else 0.0)

`grpo` writes one object per completion to standard input: `id`, `prompt` (text, or a list of messages), `completion`, `answer` (text or null),
`columns` (the other columns of the row), `source`, `truncated` and `completion_tokens`. It reads one line per object, in the same order:
`{"reward": number or null}`, or `{"error": "why"}` for a completion that cannot be judged.
"""

import json
import os
import sys


def serve(score) -> None:
    """Answers every line with what `score` says of it: a number, or None for nothing to say."""
    # Standard output belongs to the protocol: what libraries print goes to the log, with standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        row = json.loads(line)
        try:
            reward = score(row)
            answer = {"id": row["id"], "reward": None if reward is None else float(reward)}
        except Exception as error:  # One completion that cannot be judged is no reason to stop.
            answer = {"id": row["id"], "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
