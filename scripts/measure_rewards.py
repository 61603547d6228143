#!/usr/bin/env python3
"""Measures the rewards `math` and `choice` on rows of others, for the table in BENCHMARKS.md.

    python3 -m venv ~/rewards && ~/rewards/bin/pip install math-verify==0.9.0
    ~/rewards/bin/pip download --no-deps --no-binary :all: math-verify==0.9.0 -d rows && tar -xzf rows/math_verify-0.9.0.tar.gz -C rows
    git clone --depth 1 https://github.com/openai/grade-school-math rows/gsm8k
    git clone --depth 1 https://github.com/google-deepmind/AQuA rows/aqua
    git clone --depth 1 https://github.com/QwenLM/Qwen2.5-Math rows/qwen
    git clone --depth 1 https://github.com/mandyyyyii/scibench rows/scibench
    ~/rewards/bin/python scripts/measure_rewards.py rows

The argument is the folder with these five. A set that is not there is left out, and the table says so. `--show` prints the rows that count
against each figure. The rows are judged by `cargo run --release -p grpo-rewards --example judge`, or by the program in `--judge`.
"""

import argparse
import importlib
import json
import pathlib
import random
import re
import subprocess
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent


def judge(command, section, rows):
    """The rewards of rows with `answer` and `completion`."""
    lines = "".join(json.dumps({"answer": r["answer"], "completion": r["completion"]}) + "\n" for r in rows)
    done = subprocess.run([*command, json.dumps(section)], input=lines, text=True, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return [json.loads(line) for line in done.stdout.splitlines()]


def jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def pairs_of_math_verify(folder):
    """The pairs (gold, pred) of math_verify's own tests, with the verdict of its `verify`."""
    pairs = []

    class Mark:
        """`pytest.mark`, which keeps the parameters of each test."""

        def parametrize(self, names, values, **_):
            names = [name.strip() for name in names.split(",")]
            if {"gold", "pred"} <= set(names):
                pairs.extend(dict(zip(names, value)) for value in values)
            return lambda test: test

    pytest = types.ModuleType("pytest")
    pytest.mark = Mark()
    sys.modules["pytest"] = pytest
    sys.path.insert(0, str(folder))
    for test in sorted((folder / "tests").glob("test_*.py")):
        importlib.import_module(f"tests.{test.stem}")
    return [{"answer": p["gold"], "completion": p["pred"], "theirs": verdict(p["gold"], p["pred"])} for p in pairs]


def verdict(gold, pred):
    """What math_verify says of a reference and a completion."""
    from math_verify import parse, verify

    gold, pred = (parse(text, parsing_timeout=None) for text in (gold, pred))
    return int(verify(gold, pred, timeout_seconds=None))


def references(folder):
    """Reference answers of GSM8K, MATH, AQuA and the sets beside them in Qwen's repository, each once."""
    found = set()
    gsm8k = folder / "gsm8k/grade_school_math/data/test.jsonl"
    if gsm8k.exists():
        found.update(row["answer"].split("####")[1].strip() for row in jsonl(gsm8k))
    for path in sorted((folder / "qwen/evaluation/data").glob("*/test.jsonl")) + [folder / MATH]:
        if path.exists():
            for row in jsonl(path):
                answer = row.get("answer") or row.get("final_answer")
                answer = answer[0] if isinstance(answer, list) and answer else answer
                if isinstance(answer, (str, int, float)) and len(str(answer)) <= 200:
                    found.add(str(answer).split("####")[-1].strip())
    return sorted(answer for answer in found if answer)


MATH = "qwen/evaluation/data/eval_rm_maj_example/math_cot_100.jsonl"
QWEN = "qwen/evaluation/data/{}/test.jsonl"
SCIBENCH = "scibench/dataset/original"


def without_box(solution):
    """A solution without its last box, and the content of the box; None if there is no box."""
    start = solution.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + 6, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        if depth == 0:
            inside = solution[start + 7 : end]
            return {"answer": inside, "completion": solution[:start] + inside + solution[end + 1 :]}
    return None


def minerva(folder):
    rows = (without_box(row["solution"]) for row in jsonl(folder / QWEN.format("minerva_math")))
    return [row for row in rows if row]


def carp(folder):
    rows = jsonl(folder / QWEN.format("carp_en"))[:300]
    return [{"answer": row["answer"], "completion": row["steps"]} for row in rows]


def scibench(folder):
    """The worked examples of SciBench."""
    for path in sorted((folder / SCIBENCH).glob("*_sol.json")):
        yield from json.loads(path.read_text())


def scibench_units(folder):
    """The number of each example in a box, with the unit."""
    for row in scibench(folder):
        unit = row["unit"].replace("$", "").strip()
        if unit:
            yield {"answer": row["answer_number"].strip(), "completion": f"\\boxed{{{row['answer_number'].strip()} {unit}}}"}


def scibench_solutions(folder):
    """The solutions, with a power of ten in the column of the unit as a part of the reference."""
    for row in scibench(folder):
        power = re.match(r"[\s$]*10\s*\^\s*(\{[^}]*\}|\d+)", row["unit"])
        answer = row["answer_number"].strip() + (f" \\times 10^{power.group(1)}" if power else "")
        if row["solution"].strip():
            yield {"answer": answer, "completion": row["solution"]}


def gaokao_cloze(folder):
    """The answers of GAOKAO's cloze test in Chinese sentences."""
    sentences = ["因此，答案是 {}。", "所以答案为 {}。", "综上，答案：{}"]
    for i, row in enumerate(jsonl(folder / QWEN.format("gaokao_math_cloze"))):
        yield {"answer": row["answer"], "completion": sentences[i % 3].format(row["answer"])}


def cmath(folder):
    """The answers of CMATH's first 160 questions in Chinese sentences, with the unit of the question."""
    sentences = ["答：还剩{}。", "先算一算。所以一共是{}。", "先求出每一部分，再把它们加起来，检查一遍没有错。\n答：一共有{}。", "\\boxed{{{}}}"]
    for i, row in enumerate(jsonl(folder / QWEN.format("cmath"))[:160]):
        unit = re.search("(?:多少|几)([\u4e00-\u9fff]{1,2}?)(?:[\u4e00-\u9fff没]*)?？", row["question"])
        unit = unit.group(1) if unit else "个"
        yield {"answer": row["answer"], "completion": sentences[i % 4].format(row["answer"] + unit)}


def chinese_choices(folder):
    sentences = ["逐项分析。\n故选：{}", "因此，正确答案是 {}。", "逐项分析。\n答案：{}", "所以选 {}。", "故选{}．", "所以本题选择{}。", "正确选项为{}。"]
    for i, row in enumerate(jsonl(folder / QWEN.format("cn_middle_school"))):
        if row.get("choice_answer"):
            yield {"answer": row["choice_answer"], "completion": sentences[i % 7].format(row["choice_answer"])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=pathlib.Path, help="the folder with the rows")
    parser.add_argument("--judge", help="a built example `judge`, in place of cargo")
    parser.add_argument("--show", action="store_true", help="print the rows that count against each figure")
    options = parser.parse_args()
    command = ["cargo", "run", "--quiet", "--release", "-p", "grpo-rewards", "--example", "judge", "--"]
    command = [options.judge] if options.judge else command
    slowest = 0.0

    def measure(name, path, section, rows, against):
        """Prints how many rows are judged as expected; `against` says which rows are not."""
        nonlocal slowest
        if not path.exists():
            print(f"| {name} | not measured: {path} is missing |")
            return
        rows = rows()
        judged = judge(command, section, rows)
        slowest = max([slowest, *(row["seconds"] for row in judged)])
        key = next(iter(section))
        bad = [(row, reward[key]) for row, reward in zip(rows, judged) if against(row, reward[key])]
        print(f"| {name} | {len(rows) - len(bad)} of {len(rows)} |")
        for row, reward in bad if options.show else []:
            print(f"    {reward}: {row['answer'][-150:]!r} and {row['completion'][-250:]!r}")

    folder = options.rows
    sdist = folder / "math_verify-0.9.0"
    pairs = pairs_of_math_verify(sdist) if sdist.exists() else []
    verify = lambda: pairs
    measure("math_verify's own pairs: agreement", sdist, {"math": 1}, verify, lambda row, reward: reward != row["theirs"])
    ones = lambda: [pair for pair in pairs if pair["theirs"] == 1]
    measure("of these, right by math_verify: right by `math`", sdist, {"math": 1}, ones, lambda row, reward: reward == 0)

    def gsm8k():
        for row in jsonl(folder / "gsm8k/grade_school_math/data/test.jsonl"):
            solution, answer = row["answer"].rsplit("####", 1)
            yield {"answer": answer.strip(), "completion": solution.strip()}

    path = folder / "gsm8k/grade_school_math/data/test.jsonl"
    measure("GSM8K's solutions without `####`", path, {"math": 1}, lambda: list(gsm8k()), lambda _, reward: reward != 1)
    bare = lambda: [{**row, "completion": re.sub(r"<<[^>]*>>", "", row["completion"])} for row in gsm8k()]
    measure("the same without `<<...>>`", path, {"math": 1}, bare, lambda _, reward: reward != 1)

    def aqua():
        for row in jsonl(folder / "aqua/test.json"):
            # A rationale that names no letter has no answer to find.
            named = r"(?i)\b(?:answer|ans|option|choice)\b[^A-Za-z]{0,6}(?:is|will be)?\W*[A-E]\b|\b[A-E]\W+is the (?:correct )?(?:answer|choice)"
            if re.search(named, row["rationale"]):
                yield {"answer": row["correct"], "completion": row["rationale"]}

    for name in ("choice", "math"):
        path = folder / "aqua/test.json"
        measure(f"AQuA's rationales that name a letter, `{name}`", path, {name: 1}, lambda: list(aqua()), lambda _, reward: reward != 1)

    def math():
        for row in jsonl(folder / MATH):
            for completion in row["code"]:
                yield {"answer": row["answer"], "completion": completion, "right": verdict(f"${row['answer']}$", completion)}

    measure("boxed completions on MATH", folder / MATH, {"math": 1}, lambda: list(math()), lambda row, reward: reward != row["right"])

    def wrong(_, reward):
        return reward != 1

    for name, source, rows in (
        ("minerva_math's solutions without their box", QWEN.format("minerva_math"), minerva),
        ("carp_en's steps, the first 300", QWEN.format("carp_en"), carp),
        ("SciBench's numbers with their unit, boxed", SCIBENCH, scibench_units),
        ("SciBench's solutions", SCIBENCH, scibench_solutions),
        ("GAOKAO's cloze answers in Chinese sentences", QWEN.format("gaokao_math_cloze"), gaokao_cloze),
        ("CMATH's answers in Chinese sentences with units, the first 160", QWEN.format("cmath"), cmath),
        ("cn_middle_school's choices in Chinese sentences", QWEN.format("cn_middle_school"), chinese_choices),
    ):
        measure(name, folder / source, {"math": 1}, lambda: list(rows(folder)), wrong)

    def random_pairs():
        answers, pick = references(folder), random.Random(0)
        for _ in range(7700):
            a, b = pick.sample(answers, 2)
            yield {"answer": a, "completion": f"\\boxed{{{b}}}"}

    def random_pairs_with_units():
        rows, pick = [row for row in scibench_units(folder)], random.Random(0)
        for _ in range(300):
            a, b = pick.sample(rows, 2)
            if a["completion"] != b["completion"]:
                yield {"answer": a["completion"], "completion": b["completion"]}

    # Pairs that are judged equal are printed: whether they are, a person decides.
    show, options.show = options.show, True
    measure("random pairs of references that differ", folder / MATH, {"math": 1}, lambda: list(random_pairs()), lambda _, reward: reward != 0)
    pairs_name = "random pairs of SciBench's numbers with units that differ"
    measure(pairs_name, folder / SCIBENCH, {"math": 1}, lambda: list(random_pairs_with_units()), lambda _, reward: reward != 0)
    options.show = show
    print(f"| the slowest completion | {slowest:.3f} s |")


if __name__ == "__main__":
    main()
