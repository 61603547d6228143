#!/usr/bin/env python3
"""Changes single lines of the sources, and reports which tier of tests notices each change.

    scripts/mutate.py --count 12 --seed 1       # in a clean checkout; hours on two cores

Each mutation is in another crate: an operator, a constant or a condition. `cargo fast` runs first, then `cargo test --workspace`, then
`GRPO_TESTS=all cargo test --workspace`; the first one that fails is the result. The crate's own tests of `cargo fast` run before those of other
crates, while cargo still builds: their failure is a failure of `cargo fast`. A tier that exceeds its limit of time counts as failed. Mutations
that do not compile are replaced. The table is printed as Markdown, one row as soon as it is known.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tomllib

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
# Names, arguments of cargo, environments, and limits of time in seconds, which include building.
TIERS = [
    ("fast", ["fast"], {}, 1800),
    ("default", ["test", "--workspace"], {}, 3600),
    ("all", ["test", "--workspace"], {"GRPO_TESTS": "all"}, 3 * 3600),
]


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


def succeeds(command, environment, limit, folder=ROOT):
    """Returns whether a command ends with status 0 within `limit` seconds. A command that does not end is killed with its children."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def test_environment():
    """Returns the environment that cargo gives to tests: the section `env` of .cargo/config.toml."""
    section = tomllib.loads((ROOT / ".cargo/config.toml").read_text())["env"]
    return {**section, **os.environ}


def own_tests_pass(crate):
    """Builds the tests of `cargo fast`, and runs those of one crate as soon as they are built: `cargo test -p` would build other features.

    Returns None if the build fails. A failing test ends the build.
    """
    environment = test_environment() | {"CARGO_MANIFEST_DIR": str(crate)}
    alias = tomllib.loads((ROOT / ".cargo/config.toml").read_text())["alias"]["fast"].split()
    arguments, of_tests = alias[: alias.index("--")], alias[alias.index("--") + 1 :]
    command = ["cargo", *arguments, "--no-run", "--offline", "--message-format=json"]
    build = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    for line in build.stdout:
        artifact = json.loads(line)
        is_own = artifact.get("manifest_path") == str(crate / "Cargo.toml")
        if is_own and artifact.get("executable") and artifact["profile"]["test"]:
            if not succeeds([artifact["executable"], *of_tests], environment, TIERS[0][3], crate):
                os.killpg(build.pid, signal.SIGKILL)
                build.wait()
                return False
    return True if build.wait() == 0 else None


def caught_by(crate):
    """Returns the first tier that fails, "none", or None if the mutation does not compile."""
    passed = own_tests_pass(crate)
    if not passed:
        return None if passed is None else TIERS[0][0]
    for name, arguments, more, limit in TIERS:
        if not succeeds(["cargo", "--offline", *arguments], os.environ | more, limit):
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
                result = caught_by(path.parents[len(path.relative_to(ROOT / "crates").parts) - 2])
            finally:
                path.write_text(original)
            if result is None:
                continue
            cells = [str(path.relative_to(ROOT)), str(number + 1), f"`{line.strip()}`", f"`{changed.strip()}`", result]
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |", flush=True)
            done += 1
            break
        if done == options.count:
            return


if __name__ == "__main__":
    main()
