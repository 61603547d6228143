"""Compares a GRPO run of `grpo train` with the same run of TRL: time per step, and memory.

    cargo build --release
    python3.11 -m venv ~/peers
    ~/peers/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0
    ~/peers/bin/python peers/bench_train.py target/release/grpo --kinds dense,sliding,moe,deltanet

transformers makes a decoder of random weights for each kind of layers, and a tokenizer of words with three letters. Both trainers read this
folder, and train in f32 on the same prompts, which have equal lengths, with groups of 8, a reward for completions that begin with certain letters, the `grpo`
loss without KL, no loss of routers, AdamW, and the same threads. The end token is so improbable that almost all completions have the full length. Each
draws its own samples. Runs alternate. Processor time per step is the difference between a short and a long run, divided by the additional
steps, so that start and loading cancel. Wall times are medians of the long run's steps after the first: the whole step, and its sampling.
Memory is the peak of the resident set.
The program fails if the tokens or the entropy of the first step differ between the trainers: then they do not train the same model.
Prints a Markdown table and, with --output, the numbers of each round as JSON.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

QWEN2 = dict(model_type="qwen2", vocab_size=512, max_position_embeddings=512, tie_word_embeddings=False)
EIGHT_LAYERS = dict(
    vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False,
)
LONG = dict(prompts=2, prompt=64, completion=128, steps=(1, 3))
# Fields of config.json, and the sizes of a step: number of prompts, their tokens, tokens of a completion, and steps of the two runs.
KINDS = {
    "qwen2-64": (
        QWEN2 | dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
        dict(prompts=16, prompt=7, completion=8, steps=(4, 24)),
    ),
    "qwen2-256": (
        QWEN2 | dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4),
        dict(prompts=8, prompt=7, completion=8, steps=(3, 11)),
    ),
    "qwen2-512": (
        QWEN2 | dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4),
        dict(prompts=8, prompt=7, completion=8, steps=(2, 6)),
    ),
    "dense": (EIGHT_LAYERS | dict(model_type="qwen3"), LONG),
    # Seven layers of eight have a window, a third of a sequence.
    "sliding": (EIGHT_LAYERS | dict(model_type="gemma3_text", sliding_window=64, query_pre_attn_scalar=64), LONG),
    # The experts of a token are as wide as the MLP of the others.
    "moe": (
        EIGHT_LAYERS
        | dict(model_type="qwen3_moe", num_experts=16, num_experts_per_tok=4, moe_intermediate_size=384, norm_topk_prob=True),
        LONG,
    ),
    # Six layers of eight have a Gated DeltaNet.
    "deltanet": (
        EIGHT_LAYERS
        | dict(
            model_type="qwen3_5_text", linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
        ),
        LONG,
    ),
}
GENERATIONS = 8
LEARNING_RATE = 1e-6
PATTERN = "^[a-h]"
LETTERS = "abcdefghijklmnop"
END = "<end>"


def words(vocab_size):
    return [a + b + c for a in LETTERS for b in LETTERS for c in LETTERS][:: 16**3 // vocab_size][: vocab_size - 1]


def make(folder, kind):
    """Writes the model, its tokenizer and the prompts."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    fields, sizes = KINDS[kind]
    end = fields["vocab_size"] - 1
    torch.manual_seed(0)
    config = AutoConfig.for_model(**fields, bos_token_id=None, eos_token_id=end, pad_token_id=end)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # Logits have a standard deviation of about 2.5, and the end token's is 0.
        head = model.get_output_embeddings().weight
        head.normal_(std=2.5 / math.sqrt(fields["hidden_size"]))
        head[end] = 0
    model.save_pretrained(folder)

    ids = {word: id for id, word in enumerate([*words(fields["vocab_size"]), END])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("..."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, padding_side="left").save_pretrained(folder)
    draws = torch.randint(end, (64 * sizes["prompts"], sizes["prompt"])).tolist()
    texts = ["".join(words(fields["vocab_size"])[id] for id in row) for row in draws]
    (pathlib.Path(folder) / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def ours_yaml(kind, folder, options):
    fields, sizes = KINDS[kind]
    return f"""
run: {{ name: bench, save_steps: 0, log_completions_steps: 0 }}
model: {folder}
data: {{ files: {folder}/prompts.jsonl, held_out_fraction: 0, shuffle: false }}
rewards: {{ regex: {{ letters: {{ pattern: "{PATTERN}", weight: 1 }} }} }}
policy: {{ dtype: float32 }}
rollout: {{ temperature: 1.0, max_completion_length: {options.completion or sizes["completion"]} }}
grpo: {{ max_steps: 1, prompts_per_step: {sizes["prompts"]}, num_generations: {GENERATIONS}, num_iterations: 1,
        gradient_accumulation_steps: {options.micro_batches} }}
loss: {{ loss_type: grpo, beta: 0.0 }}
optimizer: {{ learning_rate: {LEARNING_RATE}, lr_scheduler_type: constant, warmup_ratio: 0.0 }}
eval: {{ num_problems: 0 }}
"""


def measured(command, environment):
    """Returns (processor seconds, peak memory in MiB, output) of a process."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"error: {' '.join(map(str, command))} failed:\n{output}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output


class Ours:
    name = "grpo"

    def __init__(self, binary, kind, options, folder):
        self.binary, self.folder, self.runs = binary, folder, 0
        self.config = folder / "ours.yaml"
        self.config.write_text(ours_yaml(kind, folder, options))
        self.environment = os.environ | {"RAYON_NUM_THREADS": str(options.threads)}

    def run(self, steps):
        """Returns processor seconds, MiB, and the metrics of each step."""
        self.runs += 1
        run = self.folder / f"run-{self.runs}"
        command = [self.binary, "train", self.config, "--run-dir", run, "--quiet", "--set", f"grpo.max_steps={steps}"]
        cpu, memory, _ = measured(command, self.environment)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if row["phase"] == "grpo"]
        return cpu, memory, [row | {"sampling": row["timing_s/gen"]} for row in rows]


class Trl:
    name = "TRL"

    def __init__(self, kind, options, folder):
        arguments = dict(
            kind=kind, completion=options.completion, threads=options.threads, folder=str(folder), micro_batches=options.micro_batches
        )
        self.command = [sys.executable, __file__, "--worker", json.dumps(arguments)]
        # Spinning threads would count as processor time.
        self.environment = os.environ | {
            "OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def run(self, steps):
        """Returns processor seconds, MiB, and the metrics of each step."""
        cpu, memory, output = measured([*self.command, "--steps", str(steps)], self.environment)
        return cpu, memory, json.loads(output.rsplit("METRICS ", 1)[1])


def worker(kind, completion, threads, folder, micro_batches, steps):
    import re
    import time

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    fields, sizes = KINDS[kind]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generate, sampling = model.generate, []

    def timed(*inputs, **settings):
        began = time.perf_counter()
        out = generate(*inputs, **settings)
        sampling.append(time.perf_counter() - began)
        return out

    model.generate = timed

    def letters(completions, **_):
        return [float(bool(re.search(PATTERN, text))) for text in completions]

    sequences = sizes["prompts"] * GENERATIONS
    options = GRPOConfig(
        output_dir=folder + "/trl", per_device_train_batch_size=sequences // micro_batches, gradient_accumulation_steps=micro_batches,
        num_generations=GENERATIONS, num_iterations=1, max_steps=steps, max_completion_length=completion or sizes["completion"],
        temperature=1.0, top_k=0, top_p=1.0, beta=0.0, loss_type="grpo", router_aux_loss_coef=0.0 if "num_experts" in fields else None,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", use_cpu=True, bf16=False, gradient_checkpointing=False,
        save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True, shuffle_dataset=False, seed=0,
    )
    rows = [json.loads(line) for line in (pathlib.Path(folder) / "prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=model, reward_funcs=letters, args=options, train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left"),
    )
    trainer.train()
    metrics = [row for row in trainer.state.log_history if "entropy" in row]
    print("METRICS " + json.dumps([row | {"sampling": seconds} for row, seconds in zip(metrics, sampling, strict=True)]))


def compare(kind, options):
    """Returns the rounds of each trainer: processor seconds per step, MiB, and metrics of the long run."""
    few, more = KINDS[kind][1]["steps"]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        subprocess.run([sys.executable, __file__, "--make", name, "--kinds", kind], check=True, capture_output=True)
        trainers = [Ours(options.binary, kind, options, folder), Trl(kind, options, folder)]
        rounds = {trainer.name: [] for trainer in trainers}
        for _ in range(options.rounds):
            for trainer in trainers:
                (short, _, _), (long, memory, metrics) = trainer.run(few), trainer.run(more)
                rounds[trainer.name].append(dict(cpu=(long - short) / (more - few), memory=memory, metrics=metrics))
    for metric, tolerance in (("num_tokens", 0.01), ("entropy", 0.05)):
        first = [[found["metrics"][0][metric] for found in rounds[trainer.name]] for trainer in trainers]
        if abs(statistics.mean(first[0]) / statistics.mean(first[1]) - 1) > tolerance:
            sys.exit(f"error: {kind}: {metric} of the first step is {first[0]} in grpo and {first[1]} in TRL")
    return rounds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", nargs="?", type=pathlib.Path)
    parser.add_argument("--kinds", default="dense,sliding,moe,deltanet", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--completion", type=int, help="tokens of a completion, instead of the kind's")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # In processes of their own: the peak memory of a child is at least this process's.
    if options.make:
        return make(options.make, options.kinds)
    if options.worker:
        return worker(**json.loads(options.worker), steps=options.steps)
    if options.binary is None:
        parser.error("the path of `grpo` is missing")

    results = {}
    print("| kind | | processor s per step: median (min to max) | wall s | of these sampling | entropy, nats | MiB | TRL / ours: time | memory |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for kind in options.kinds.split(","):
        results[kind] = rounds = compare(kind, options)
        median = {name: {key: statistics.median(found[key] for found in of) for key in ("cpu", "memory")} for name, of in rounds.items()}
        for name, of in rounds.items():
            times = [found["cpu"] for found in of]
            steps = [step for found in of for step in found["metrics"][1:]]
            wall, sampling = (statistics.median(step[key] for step in steps) for key in ("step_time", "sampling"))
            entropy = statistics.mean(found["metrics"][0]["entropy"] for found in of)
            ratio = {key: median["TRL"][key] / median["grpo"][key] for key in ("cpu", "memory")}
            ratios = f"{ratio['cpu']:.2f} x | {ratio['memory']:.1f} x" if name == "grpo" else " | "
            print(
                f"| {kind} | {name} | {median[name]['cpu']:.3g} ({min(times):.3g} to {max(times):.3g}) | {wall:.3g} | {sampling:.3g} "
                f"| {entropy:.2f} | {median[name]['memory']:.0f} | {ratios} |",
                flush=True,
            )
        if options.output:
            options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
