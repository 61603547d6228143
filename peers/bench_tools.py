"""Compares learning to use a calculator: `grpo train` with configs/train/calculator.yaml, and TRL's GRPOTrainer with the same calculator as
`environment_factory`.

    cargo build --release
    python3.11 -m venv ~/peers
    ~/peers/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0
    ~/peers/bin/python peers/bench_tools.py target/release/grpo runs/calculator --seeds 0,1,2

The folder has the model and the data of examples/agents/make_model.py, and the warmed-up model; the program makes missing ones
(docs/agents.md; the warm-up takes five minutes). Both trainers continue from the warmed-up model in f32, with the same questions, template, limits,
batches, loss and AdamW. They draw their own samples. Runs alternate. Numbers are of whole processes without evaluations: wall time, processor
time (user and system), and the peak of the resident set; TRL's processor time is also given without imports and loading. `grpo train` with no
step measures held-out pass@1 of both exported models. Prints Markdown tables; FOLDER/trl/results.json has every number.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

import yaml

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
CONFIG = REPOSITORY / "configs/train/calculator.yaml"
SETTINGS = yaml.safe_load(CONFIG.read_text())


def measured(command, environment):
    """Returns wall seconds, processor seconds and peak MiB of a process, and its output."""
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"error: {' '.join(map(str, command))} failed:\n{output}")
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output


def train(binary, config, run, threads, *settings):
    """Runs `grpo train` in the folder `run`, and returns what it takes."""
    shutil.rmtree(run, ignore_errors=True)  # of an earlier comparison
    command = [binary, "train", config, "--run-dir", run, "--quiet"]
    for setting in settings:
        command += ["--set", setting]
    return measured(command, os.environ | {"RAYON_NUM_THREADS": str(threads)})


def prepare(binary, folder, threads):
    """Makes the model, its data and the warmed-up model, unless they are there."""
    if not (folder / "data/train.jsonl").exists():
        subprocess.run([sys.executable, REPOSITORY / "examples/agents/make_model.py", folder], check=True)
    if not (folder / "warmup/model").exists():
        files = [f"model={folder}/model", f"data.files={folder}/data/warmup.jsonl"]
        train(binary, REPOSITORY / "configs/train/calculator-warmup.yaml", folder / "warmup", threads, *files)


def data_settings(folder, model):
    return [f"model={model}", f"data.files={folder}/data/train.jsonl", f"data.eval_files={folder}/data/test.jsonl"]


def pass_at_1(binary, folder, model, threads):
    """Returns the share of held-out questions that the greedy conversations of a model answer."""
    run = folder / "trl/evaluation"
    train(binary, CONFIG, run, threads, *data_settings(folder, model), "grpo.max_steps=0", "run.save_steps=0")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["eval/pass@1"] for row in rows if "eval/pass@1" in row][-1]


def ours(binary, folder, seed, steps, threads):
    run = folder / f"trl/ours-{seed}"
    settings = [*data_settings(folder, folder / "warmup/model"), f"seed={seed}", f"grpo.max_steps={steps}", "eval.num_problems=0"]
    wall, cpu, memory, _ = train(binary, CONFIG, run, threads, *settings, "run.save_steps=0", "run.log_completions_steps=0")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_steps = [row for row in rows if row["phase"] == "grpo"]
    curve = [row["rewards/correct/mean"] for row in of_steps]
    calls = [row["tools/call_frequency"] for row in of_steps]
    after = pass_at_1(binary, folder, run / "model", threads)
    return dict(system="grpo", seed=seed, wall=wall, cpu=cpu, training_cpu=None, memory=memory, curve=curve, calls=calls, after=after)


def trl(binary, folder, seed, steps, threads):
    arguments = json.dumps(dict(folder=str(folder), seed=seed, steps=steps, threads=threads))
    # Spinning threads would count as processor time.
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    wall, cpu, memory, output = measured([sys.executable, __file__, "--worker", arguments], environment)
    found = json.loads(output.rsplit("RESULT ", 1)[1])
    after = pass_at_1(binary, folder, folder / f"trl/trl-{seed}/model", threads)
    return dict(system="TRL", seed=seed, wall=wall, cpu=cpu, memory=memory, after=after, **found)


def worker(folder, seed, steps, threads):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    torch.set_num_threads(threads)
    grpo, rollout, optimizer = SETTINGS["grpo"], SETTINGS["rollout"], SETTINGS["optimizer"]
    micro_batches = grpo["gradient_accumulation_steps"]
    folder = pathlib.Path(folder)
    model, out = folder / "warmup/model", folder / f"trl/trl-{seed}"

    class Calculator:
        def reset(self, **_):
            return None

        def calculator(self, expression: str) -> str:
            """Computes.

            Args:
                expression: The expression.
            """
            left, sign, right = re.fullmatch(r"(\d{1,9}) ?([-+*]) ?(\d{1,9})", expression).groups()
            return str({"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(left), int(right)))

    def correct(completions, answer, **_):
        texts = [messages[-1]["content"] if messages[-1]["role"] == "assistant" else "" for messages in completions]
        found = [re.findall(r"#### ?(-?\d+)", text or "") for text in texts]
        return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer)]

    class Curve(TrainerCallback):
        rows = []

        def on_log(self, args, state, control, logs=None, **_):
            if "rewards/correct/mean" in (logs or {}):
                self.rows.append(logs)

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.response_template = qwen3_template  # the format of calls is Qwen's
    rows = [json.loads(line) for line in (folder / "data/train.jsonl").read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    options = GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=grpo["prompts_per_step"] * grpo["num_generations"] // micro_batches,
        gradient_accumulation_steps=micro_batches, num_generations=grpo["num_generations"], num_iterations=1, max_steps=steps, seed=seed,
        max_completion_length=rollout["max_completion_length"], temperature=rollout["temperature"], top_k=0, top_p=1.0,
        max_tool_calling_iterations=rollout["multi_turn"]["max_tool_calling_iterations"], beta=0.0, loss_type=SETTINGS["loss"]["loss_type"],
        learning_rate=optimizer["learning_rate"], adam_beta2=optimizer["adam_beta2"], weight_decay=optimizer["weight_decay"],
        lr_scheduler_type=optimizer["lr_scheduler_type"], use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
        report_to="none", logging_steps=1, disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), reward_funcs=correct, args=options,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, environment_factory=Calculator, callbacks=[Curve()],
    )
    before = time.process_time()
    trainer.train()
    spent = time.process_time() - before
    trainer.save_model(str(out / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(model / name, out / "model" / name)  # as they were
    curve, calls = ([row[name] for row in Curve.rows] for name in ("rewards/correct/mean", "tools/call_frequency"))
    print("RESULT " + json.dumps(dict(training_cpu=spent, curve=curve, calls=calls)))


def spread(values, digits=1):
    if None in values:
        return ""
    of = [f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return of[0] if len(values) == 1 else f"{of[0]} ({of[1]} to {of[2]})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", nargs="?", type=pathlib.Path)
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=SETTINGS["grpo"]["max_steps"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(**json.loads(options.worker))
    if options.folder is None:
        parser.error("expected the path of `grpo` and a folder")
    binary, folder, threads = options.binary.resolve(), options.folder.resolve(), options.threads
    prepare(binary, folder, threads)
    (folder / "trl").mkdir(exist_ok=True)
    before, results = pass_at_1(binary, folder, folder / "warmup/model", threads), []
    for seed in map(int, options.seeds.split(",")):
        results.append(ours(binary, folder, seed, options.steps, threads))
        results.append(trl(binary, folder, seed, options.steps, threads))
        (folder / "trl/results.json").write_text(json.dumps(dict(before=before, runs=results), indent=1))
    print(f"Held-out pass@1 before: {100 * before:.1f} %\n")
    print("| | pass@1 after | wall time, s | processor time, s | without imports and loading | peak, MiB |\n|---|--:|--:|--:|--:|--:|")
    for system in ("grpo", "TRL"):
        runs = [run for run in results if run["system"] == system]
        cells = [spread([100 * run["after"] for run in runs]) + " %"]
        cells += [spread([run[name] for run in runs]) for name in ("wall", "cpu", "training_cpu", "memory")]
        print(f"| {system} | {' | '.join(cells)} |")
    parts = [range(first, min(first + 5, options.steps)) for first in range(0, options.steps, 5)]
    columns = " | ".join(f"{part[0] + 1} to {part[-1] + 1}" for part in parts)
    print(f"\n| right answers in steps | {columns} |\n|---{'|--:' * len(parts)}|")
    for run in results:
        shares = [100 * statistics.mean(run["curve"][step] for step in part) for part in parts]
        print(f"| {run['system']}, seed {run['seed']} | " + " | ".join(f"{share:.0f} %" for share in shares) + " |")


if __name__ == "__main__":
    main()
