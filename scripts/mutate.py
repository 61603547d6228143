#!/usr/bin/env python3
"""Changes single lines of the sources, and reports which tier of tests notices each change.

    scripts/mutate.py --count 12 --seed 1       # in a clean checkout; hours on two cores

Each mutation is in another crate: an operator, a constant or a condition. `cargo fast` runs first, then `cargo test --workspace`, then
`GRPO_TESTS=all cargo test --workspace`; the first one that fails is the result. Mutations that do not compile are replaced. The table is
printed as Markdown, one row as soon as it is known.
"""

import argparse
import os
import pathlib
import random
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Pattern and replacement: operators of comparison, arithmetic and logic, constants, conditions.
CHANGES = [
    (r" < ", " <= "),
    (r" <= ", " < "),
    (r" > ", " >= "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r" \* ", " / "),
    (r" / ", " * "),
    (r"\b0\.0\b", "1.0"),
    (r"\b1\.0\b", "2.0"),
    (r"\b1\b", "2"),
    (r"\bif (?!let)", "if !"),
    (r"\.min\(", ".max("),
    (r"\.max\(", ".min("),
]
TIERS = [("fast", {}, "fast"), ("default", {}, "test"), ("all", {"GRPO_TESTS": "all"}, "test")]


def lines_of(path):
    """Yields the numbers of the lines that can change: code outside comments, attributes and tests."""
    for number, line in enumerate(path.read_text().splitlines()):
        text = line.strip()
        if text.startswith("#[cfg(test)]"):
            return
        if text and not text.startswith(("//", "#", "use ", "mod ", "const ", "println", "write", "debug", "assert")) and '"' not in text:
            yield number, line


def mutations(generator):
    """Yields (path, line number, old line, new line), in another crate each time."""
    crates = sorted(path.parent for path in ROOT.glob("crates/*/src"))
    generator.shuffle(crates)
    for crate in crates:
        if crate.name in ("testkit", "bench", "plot"):
            continue
        files = [path for path in sorted(crate.glob("src/**/*.rs")) if not re.search(r"tests?(/|\.rs$)", str(path.relative_to(crate)))]
        found = []
        for path in files:
            for number, line in lines_of(path):
                found += [(path, number, line, pattern, new) for pattern, new in CHANGES if re.search(pattern, line)]
        generator.shuffle(found)
        yield found


def cargo(arguments, more=None):
    environment = {**os.environ, **(more or {})}
    command = ["cargo", *arguments, "--offline"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).returncode == 0


def caught_by():
    for name, environment, command in TIERS:
        arguments = ["fast"] if command == "fast" else ["test", "--workspace"]
        if not cargo(arguments, environment):
            return name
    return "none"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if subprocess.run(["git", "status", "--porcelain", "crates"], cwd=ROOT, capture_output=True, text=True).stdout:
        sys.exit("crates/ has uncommitted changes: commit them first")
    generator = random.Random(options.seed)
    print("| file | line | before | after | caught by |\n|---|--:|---|---|---|", flush=True)
    done = 0
    for candidates in mutations(generator):
        for path, number, line, pattern, new in candidates[:10]:
            original = path.read_text()
            lines = original.splitlines(keepends=True)
            changed = re.sub(pattern, new, line, count=1)
            lines[number] = changed + "\n"
            path.write_text("".join(lines))
            try:
                if not cargo(["test", "--workspace", "--no-run"]):
                    continue
                result = caught_by()
            finally:
                path.write_text(original)
            cells = [str(path.relative_to(ROOT)), str(number + 1), f"`{line.strip()}`", f"`{changed.strip()}`", result]
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |", flush=True)
            done += 1
            break
        if done == options.count:
            return


if __name__ == "__main__":
    main()
