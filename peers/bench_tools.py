"""Compares learning to call a tool: `grpo train` with its calculator, and TRL's GRPOTrainer with the same one as `environment_factory`.

    cargo build --release
    python3.11 -m venv ~/peers
    ~/peers/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0
    ~/peers/bin/python peers/bench_tools.py target/release/grpo runs/tools --seeds 0,1,2

The model of examples/agents/make_model.py learns four questions by heart: three times out of four it guesses a wrong answer, otherwise it
calls the calculator and reads the result. From the folder that this warm-up exports, both trainers learn by GRPO to call it, with the same
questions, template, limits, batches, loss, AdamW and f32. They draw their own samples. Runs alternate. Numbers are those of
whole processes: wall time, processor time (user and system), and the peak of the resident set; TRL's processor time without imports
and loading is given, too. Prints Markdown tables; FOLDER/results.json has every number.
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

QUESTIONS = {"12 + 34": 46, "81 - 27": 54, "7 * 13": 91, "60 + 25": 85}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "Computes.", "parameters": PARAMETERS}}]
STEPS, PROMPTS, GENERATIONS, MICRO_BATCHES = 16, 4, 8, 2
LEARNING_RATE, COMPLETION, CALLS = 5e-4, 96, 2


def write_data(folder):
    warmup, questions = [], []
    for expression, value in QUESTIONS.items():
        asked = {"role": "user", "content": f"What is {expression}?"}
        function = {"name": "calculator", "arguments": {"expression": expression}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        text = f"<tool_call>\n{json.dumps(function)}\n</tool_call>"
        guesses = [f"#### {value + guess}" for guess in (1, 2, 3)]
        warmup += [{"prompt": [asked], "completion": text, "tools": TOOLS} for text in [text, *guesses]]
        result = {"prompt": [asked, call, {"role": "tool", "content": str(value)}], "completion": f"#### {value}", "tools": TOOLS}
        warmup += [result] * 4
        questions.append({"question": asked["content"], "answer": str(value)})
    for name, rows in (("warmup", warmup), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(binary, folder):
    """Returns the folder of the model after its warm-up."""
    folder.mkdir(parents=True, exist_ok=True)
    make = pathlib.Path(__file__).parents[1] / "examples/agents/make_model.py"
    subprocess.run([sys.executable, make, folder / "calculator", "--warmup-rows", "500", "--train-rows", "8", "--test-rows", "8"], check=True)
    write_data(folder)
    (folder / "warmup.yaml").write_text(f"""
model: {folder}/calculator/model
data: {{ files: {folder}/warmup.jsonl, held_out_fraction: 0 }}
rewards: {{ terminated: 1 }}
warmup: {{ steps: 120, batch_size: 32, optimizer: {{ learning_rate: 0.003, lr_scheduler_type: cosine, adam_beta2: 0.98 }} }}
rollout: {{ max_completion_length: 64 }}
grpo: {{ max_steps: 0 }}
""")
    if not (folder / "warm/model").exists():
        subprocess.run([binary, "train", folder / "warmup.yaml", "--run-dir", folder / "warm", "--quiet"], check=True)
    return folder / "warm/model"


def measured(command, environment):
    """Returns wall seconds, processor seconds and peak MiB of a process, and its output."""
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"error: {' '.join(map(str, command))} failed:\n{output}")
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output


def ours(binary, folder, model, seed, threads):
    config = folder / "ours.yaml"
    config.write_text(f"""
model: {model}
data: {{ files: {folder}/questions.jsonl, held_out_fraction: 0 }}
environments: {{ calculator: {{ built_in: calculator }} }}
rewards: {{ correct: 1, answer_from: hashes }}
rollout: {{ temperature: 1.0, max_completion_length: {COMPLETION}, multi_turn: {{ max_tool_calling_iterations: {CALLS} }} }}
grpo: {{ max_steps: {STEPS}, prompts_per_step: {PROMPTS}, num_generations: {GENERATIONS}, gradient_accumulation_steps: {MICRO_BATCHES} }}
loss: {{ loss_type: grpo }}
optimizer: {{ learning_rate: {LEARNING_RATE}, lr_scheduler_type: constant }}
eval: {{ num_problems: 0 }}
run: {{ save_steps: 0, log_completions_steps: 0 }}
""")
    run = folder / f"ours-{seed}"
    shutil.rmtree(run, ignore_errors=True)  # of an earlier comparison
    command = [binary, "train", config, "--run-dir", run, "--quiet", "--set", f"seed={seed}"]
    wall, cpu, memory, _ = measured(command, os.environ | {"RAYON_NUM_THREADS": str(threads)})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["phase"] == "grpo"]
    curve = [row["rewards/correct/mean"] for row in steps]
    calls = [row["tools/call_frequency"] for row in steps]
    return dict(system="grpo", seed=seed, wall=wall, cpu=cpu, training_cpu=None, memory=memory, curve=curve, calls=calls)


def trl(folder, model, seed, threads):
    arguments = json.dumps(dict(folder=str(folder), model=str(model), seed=seed, threads=threads))
    # Spinning threads would count as processor time.
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    wall, cpu, memory, output = measured([sys.executable, __file__, "--worker", arguments], environment)
    found = json.loads(output.rsplit("RESULT ", 1)[1])
    return dict(system="TRL", seed=seed, wall=wall, cpu=cpu, memory=memory, **found)


def worker(folder, model, seed, threads):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    torch.set_num_threads(threads)

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
    rows = [json.loads(line) for line in (pathlib.Path(folder) / "questions.jsonl").read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    options = GRPOConfig(
        output_dir=f"{folder}/trl-{seed}", per_device_train_batch_size=PROMPTS * GENERATIONS // MICRO_BATCHES,
        gradient_accumulation_steps=MICRO_BATCHES, num_generations=GENERATIONS, max_completion_length=COMPLETION,
        max_tool_calling_iterations=CALLS, temperature=1.0, top_k=0, top_p=1.0, beta=0.0, loss_type="grpo",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_steps=STEPS, use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True,
        num_iterations=1, seed=seed,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), reward_funcs=correct, args=options,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, environment_factory=Calculator, callbacks=[Curve()],
    )
    before = time.process_time()
    trainer.train()
    spent = time.process_time() - before
    curve, calls = ([row[name] for row in Curve.rows] for name in ("rewards/correct/mean", "tools/call_frequency"))
    print("RESULT " + json.dumps(dict(training_cpu=spent, curve=curve, calls=calls)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", nargs="?", type=pathlib.Path)
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(**json.loads(options.worker))
    if options.folder is None:
        parser.error("expected the path of `grpo` and a folder")
    folder = options.folder.resolve()
    model = prepare(options.binary, folder)
    results = []
    for seed in map(int, options.seeds.split(",")):
        results.append(ours(options.binary, folder, model, seed, options.threads))
        results.append(trl(folder, model, seed, options.threads))
        (folder / "results.json").write_text(json.dumps(results, indent=1))
    print("| | wall time, s | processor time, s | without imports and loading | peak, MiB |\n|---|--:|--:|--:|--:|")
    for system in ("grpo", "TRL"):
        runs = [run for run in results if run["system"] == system]

        def cell(name):
            values = [run[name] for run in runs]
            if None in values:
                return ""
            return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

        print(f"| {system} | {' | '.join(map(cell, ('wall', 'cpu', 'training_cpu', 'memory')))} |")
    # Four steps have 128 conversations.
    print("\n| right answers in steps | " + " | ".join(f"{i + 1} to {i + 4}" for i in range(0, STEPS, 4)) + " |\n|---" + "|--:" * (STEPS // 4) + "|")
    for run in results:
        shares = [100 * statistics.mean(run["curve"][i : i + 4]) for i in range(0, STEPS, 4)]
        print(f"| {run['system']}, seed {run['seed']} | " + " | ".join(f"{share:.0f} %" for share in shares) + " |")


if __name__ == "__main__":
    main()
