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
import sysconfig
import traceback
from pathlib import Path

# The files of Python and of its packages. Errors name the line of other files.
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
HERE = str(Path(__file__).resolve().parent) + os.sep


def serve(score) -> None:
    """Answers every line with the result of `score`: a number, or None for no reward."""
    questions, answers = protocol()
    for line in questions:
        row = json.loads(line)
        try:
            reward = score(row)
            answer = {"id": row["id"], "reward": None if reward is None else float(reward)}
        except Exception as error:  # An error in one completion does not end the program.
            answer = {"id": row["id"], "error": described(error)}
        print(json.dumps(answer), file=answers, flush=True)


def described(error: Exception) -> str:
    """Returns an exception with the files, lines and functions that lead to it, the innermost first and without those of libraries. The first
    exception of each line is also printed with its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    while len(frames) > 1 and str(Path(frames[0].filename).resolve()).startswith(HERE):
        frames.pop(0)
    places = [frame for frame in reversed(frames) if not frame.filename.startswith(LIBRARIES)] or frames[-1:]
    place = places[0]
    if (type(error), place.filename, place.lineno) not in PRINTED:
        PRINTED.add((type(error), place.filename, place.lineno))
        lines = ["Traceback (most recent call last):\n", *frames.format(), *traceback.format_exception_only(error)]
        print("".join(lines), end="", file=sys.stderr, flush=True)
    lead = "; called at ".join(f"{frame.filename}, line {frame.lineno}, in {frame.name}" for frame in places[:4])
    return f"{type(error).__name__}: {error} ({lead})"


# The exceptions that were printed.
PRINTED = set()


def protocol():
    """Returns the lines that `grpo` writes, and the file that it reads. From then on both are reserved for the protocol: output of
    libraries goes to standard error, and standard input is empty."""
    questions = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return questions, answers
