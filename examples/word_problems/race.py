"""Makes the same GRPO run with `grpo train` and with TRL, alternating by seed, and a figure of both.

    cargo build --release
    python examples/word_problems/pretrain.py runs/word-problems
    python examples/word_problems/race.py runs/word-problems --binary target/release/grpo --plot docs/word-problems.svg

Both start from the same folder, train on the same rows with the settings of configs/train/word-problems.yaml, on the same number
of threads, and answer the same held-out problems greedily. Writes a file of rows per run into FOLDER/race, prints a Markdown
table, and draws held-out accuracy over seconds of training (loading and evaluations are not counted). A run with an existing file
is not repeated.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from figure import draw

HERE = pathlib.Path(__file__).parent
NAMES = {"grpo": "grpo", "trl": "TRL 1.16"}


def measured(command, environment, log):
    """Runs a process and returns its times and peak memory, the last row of a file of rows."""
    begin = time.time()
    with log.open("w") as output:
        process = subprocess.Popen(list(map(str, command)), env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"error: {' '.join(map(str, command))} failed, see {log}:\n{log.read_text()[-2000:]}")
    return dict(
        wall_s=time.time() - begin, cpu_s=usage.ru_utime + usage.ru_stime, peak_rss_mib=usage.ru_maxrss / 1024
    )


def assignments(overrides):
    return [part for assignment in overrides for part in ("--set", assignment)]


def run_grpo(options, seed, output):
    """Runs `grpo train` and writes its metrics as rows in the format of trl_grpo.py."""
    folder = output.with_suffix("")
    command = [options.binary, "train", options.config, "--run-dir", folder, "--quiet"]
    paths = [
        f"model={options.folder / 'model'}",
        f"data.files={options.folder / 'data' / 'train.jsonl'}",
        f"data.eval_files={options.folder / 'data' / 'test.jsonl'}",
    ]
    command += assignments([*paths, f"seed={seed}", *options.set])
    environment = os.environ | {"RAYON_NUM_THREADS": str(options.threads)}
    last = measured(command, environment, output.with_suffix(".log"))
    rows, seconds = {}, 0.0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        step = metrics["step"]
        if metrics["phase"] == "grpo":
            seconds += metrics["step_time"]
            rows[step] = dict(step=step, seconds=seconds, reward=metrics["reward"])
        elif metrics["phase"] == "eval":
            rows.setdefault(step, dict(step=step, seconds=seconds))["accuracy"] = metrics["eval/pass@1"]
    output.write_text("".join(json.dumps(row) + "\n" for row in [*rows.values(), last]))


def run_trl(options, seed, output):
    command = [sys.executable, HERE / "trl_grpo.py", options.folder, "--config", options.config, "--seed", seed]
    command += ["--threads", options.threads, "--output", output.with_suffix(".part"), *assignments(options.set)]
    last = measured(command, os.environ.copy(), output.with_suffix(".log"))
    *rows, _ = output.with_suffix(".part").read_text().splitlines()
    output.write_text("".join(row + "\n" for row in [*rows, json.dumps(last)]))
    output.with_suffix(".part").unlink()


def read(path):
    *rows, last = map(json.loads, path.read_text().splitlines())
    curve = [(row["seconds"], row["accuracy"]) for row in rows if "accuracy" in row]
    return dict(curve=curve, seconds=rows[-1]["seconds"], **last)


def number(x):
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def report(races):
    """Returns a Markdown table of every run, with medians below."""
    print("| seed | | held-out accuracy: before | after | rise (points) | s of training | s, all in | processor s | MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    columns = {who: [] for who in NAMES}
    for seed, race in races.items():
        for who, run in race.items():
            before, after = run["curve"][0][1], run["curve"][-1][1]
            row = [100 * (after - before), run["seconds"], run["wall_s"], run["cpu_s"], run["peak_rss_mib"]]
            columns[who].append(row)
            print(f"| {seed} | {NAMES[who]} | {before:.1%} | {after:.1%} | " + " | ".join(map(number, row)) + " |")
    medians = {who: [statistics.median(column) for column in zip(*rows)] for who, rows in columns.items() if rows}
    for who, row in medians.items():
        print(f"| median | {NAMES[who]} | | | " + " | ".join(map(number, row)) + " |")
    if len(medians) == 2:
        training, everything, cpu, memory = (trl / own for trl, own in zip(medians["trl"][1:], medians["grpo"][1:]))
        print(f"\nTRL over ours: {training:.2f} x the training time, {everything:.2f} x the time all in, "
              f"{cpu:.2f} x the processor time, {memory:.1f} x the memory")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="output folder of pretrain.py")
    parser.add_argument("--binary", type=pathlib.Path, default="target/release/grpo")
    parser.add_argument("--config", type=pathlib.Path, default="configs/train/word-problems.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for both, e.g. grpo.max_steps=10")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--who", default="grpo,trl", help="trainers to run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=pathlib.Path, help="output file of the figure (SVG)")
    options = parser.parse_args()

    (options.folder / "race").mkdir(exist_ok=True)
    races = {}
    for seed in map(int, options.seeds.split(",")):
        races[seed] = {}
        for who in options.who.split(","):
            output = options.folder / "race" / f"{who}-{seed}.jsonl"
            if not output.exists():
                {"grpo": run_grpo, "trl": run_trl}[who](options, seed, output)
            races[seed][who] = read(output)
    report(races)
    if options.plot:
        series = {NAMES[who]: [race[who] for race in races.values()] for who in options.who.split(",")}
        options.plot.write_text(draw(series))


if __name__ == "__main__":
    main()
