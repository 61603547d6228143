"""Held-out accuracy over the steps of runs, one line per run: python scripts/learning_curves.py OUT.svg NAME=RUN ...

Runs of one NAME have one colour. Reads metrics.jsonl of run folders and needs matplotlib.
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("agg")
matplotlib.rcParams["svg.hashsalt"] = "grpo"
import matplotlib.pyplot as plt  # noqa: E402


def curve(run: str) -> tuple[list[int], list[float]]:
    rows = [json.loads(line) for line in (pathlib.Path(run) / "metrics.jsonl").read_text().splitlines()]
    points = [(row["step"], row["eval/pass@1"]) for row in rows if "eval/pass@1" in row]
    return [step for step, _ in points], [100 * value for _, value in points]


def main() -> None:
    out, *runs = sys.argv[1:]
    names: list[str] = []
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for argument in runs:
        name, run = argument.split("=", 1)
        label = None if name in names else name
        if label:
            names.append(name)
        axes.plot(*curve(run), color=f"C{names.index(name)}", label=label, linewidth=1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out pass@1 (%)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
