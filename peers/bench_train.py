"""Compares a GRPO run of `grpo train` with the same run of TRL: processor time per step, and memory.

    cargo build --release
    python3.11 -m venv ~/peers
    ~/peers/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0 safetensors numpy
    ~/peers/bin/python peers/bench_train.py target/release/grpo --sizes 64,256,512

Both train one decoder (Qwen2, the same initial weights, which TRL reads from a checkpoint of grpo), on two-digit addition,
with the same tokens per character, the same number of prompts and completions per step, the `grpo` loss without KL, AdamW and
f32, on the same threads. Each draws its own problems (two numbers up to 99, seed 0), of equal length. Runs
alternate. Processor time per step is the difference between a short and a long run, divided by the additional steps,
so that start, compilation and loading cancel. Memory is the peak of the resident set.
Prints a Markdown table and, with --output, the numbers of each round as JSON.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

SIZES = {
    64: dict(layers=2, heads=4, kv_heads=2, width=192, prompts=16, steps=(4, 24)),
    256: dict(layers=4, heads=8, kv_heads=4, width=768, prompts=8, steps=(3, 11)),
    512: dict(layers=8, heads=8, kv_heads=4, width=1536, prompts=8, steps=(2, 6)),
}
GENERATIONS = 8
LEARNING_RATE = 1e-4


def ours_yaml(size, options):
    c = SIZES[size]
    return f"""
run: {{ name: bench, save_steps: 0, log_completions_steps: 0 }}
model: {{ hidden_size: {size}, intermediate_size: {c['width']}, num_hidden_layers: {c['layers']},
         num_attention_heads: {c['heads']}, num_key_value_heads: {c['kv_heads']}, max_position_embeddings: 512 }}
data: {{ tasks: {{ addition: {{ weight: 1, max_number: 99, zero_pad: true }} }} }}
rewards: {{ correct: 1 }}
warmup: {{ steps: 0 }}
rollout: {{ temperature: 1.0, max_completion_length: {options.completion} }}
grpo: {{ max_steps: 1, prompts_per_step: {c['prompts']}, num_generations: {GENERATIONS}, num_iterations: 1,
        gradient_accumulation_steps: {options.micro_batches} }}
loss: {{ loss_type: grpo, beta: 0.0 }}
optimizer: {{ learning_rate: {LEARNING_RATE}, lr_scheduler_type: constant, warmup_ratio: 0.0 }}
eval: {{ num_problems: 1, num_generations: 1, eval_steps: 0 }}
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

    def __init__(self, binary, size, options, folder):
        self.binary, self.folder = binary, folder
        self.config = folder / "ours.yaml"
        self.config.write_text(ours_yaml(size, options))
        self.environment = os.environ | {"RAYON_NUM_THREADS": str(options.threads)}
        self.runs = 0

    def run(self, steps):
        self.runs += 1
        run = self.folder / f"run-{self.runs}"
        command = [self.binary, "train", self.config, "--run-dir", run, "--quiet", "--set", f"grpo.max_steps={steps}"]
        cpu, memory, _ = measured(command, self.environment)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lengths = [row["completions/mean_length"] for row in rows if "completions/mean_length" in row]
        return cpu, memory, statistics.mean(lengths)

    def checkpoint(self):
        """Returns a folder with the initial weights."""
        self.run(1)
        return sorted((self.folder / f"run-{self.runs}" / "checkpoints").iterdir())[0]


class Trl:
    name = "TRL"

    def __init__(self, size, options, folder, checkpoint):
        arguments = dict(
            size=size, completion=options.completion, threads=options.threads, checkpoint=str(checkpoint),
            folder=str(folder), micro_batches=options.micro_batches,
        )
        self.command = [sys.executable, __file__, "--worker", json.dumps(arguments)]
        # Spinning threads would count as processor time.
        self.environment = os.environ | {
            "OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def run(self, steps):
        cpu, memory, output = measured([*self.command, "--steps", str(steps)], self.environment)
        lengths = [float(line.split()[1]) for line in output.splitlines() if line.startswith("mean_length ")]
        return cpu, memory, statistics.mean(lengths)


def worker(arguments, steps):
    import torch
    from datasets import Dataset
    from safetensors.torch import load_file
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(arguments["threads"])
    size, c = arguments["size"], SIZES[arguments["size"]]
    weights = load_file(pathlib.Path(arguments["checkpoint"]) / "model.safetensors")
    vocab = weights["embed_tokens"].shape[0]
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=size, intermediate_size=c["width"], num_hidden_layers=c["layers"],
        num_attention_heads=c["heads"], num_key_value_heads=c["kv_heads"], max_position_embeddings=512,
        tie_word_embeddings="lm_head" not in weights, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    d = size // c["heads"]
    state = {"model.embed_tokens.weight": weights["embed_tokens"], "model.norm.weight": weights["norm.weight"]}
    state["lm_head.weight"] = weights.get("lm_head", weights["embed_tokens"])
    for i in range(c["layers"]):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        cuts = [c["heads"] * d, c["kv_heads"] * d, c["kv_heads"] * d]
        qkv = weights[ours + "attn.qkv_proj.weight"].T.split(cuts)
        bias = weights[ours + "attn.qkv_proj.bias"].split(cuts)
        for name, weight, b in zip("qkv", qkv, bias):
            state[f"{theirs}self_attn.{name}_proj.weight"] = weight
            state[f"{theirs}self_attn.{name}_proj.bias"] = b
        state[theirs + "self_attn.o_proj.weight"] = weights[ours + "attn.o_proj.weight"].T
        gate, up = weights[ours + "mlp.gate_up_proj.weight"].T.split([c["width"]] * 2)
        state[theirs + "mlp.gate_proj.weight"], state[theirs + "mlp.up_proj.weight"] = gate, up
        state[theirs + "mlp.down_proj.weight"] = weights[ours + "mlp.down_proj.weight"].T
        state[theirs + "input_layernorm.weight"] = weights[ours + "input_norm.weight"]
        state[theirs + "post_attention_layernorm.weight"] = weights[ours + "post_norm.weight"]
    model.load_state_dict({name: tensor.contiguous() for name, tensor in state.items()})

    characters = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=()<>,:?."
    tokens = ["<pad>", "<bos>", "<eos>", *characters]
    assert len(tokens) == vocab, (len(tokens), vocab)
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<bos>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )

    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(100, (steps * c["prompts"] + 64, 2), generator=generator).tolist()
    rows = [{"prompt": f"<bos>{a:02}+{b:02}=", "answer": f"{a + b:03}"} for a, b in pairs]
    lengths = []

    def correct(completions, completion_ids, answer, **_):
        lengths.extend(len(ids) for ids in completion_ids)
        return [float(text == right) for text, right in zip(completions, answer)]

    sequences = c["prompts"] * GENERATIONS
    options = GRPOConfig(
        output_dir=arguments["folder"] + "/trl", per_device_train_batch_size=sequences // arguments["micro_batches"],
        gradient_accumulation_steps=arguments["micro_batches"], num_generations=GENERATIONS,
        max_completion_length=arguments["completion"], temperature=1.0, top_k=0, top_p=1.0, beta=0.0, loss_type="grpo",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_steps=steps, use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True,
        num_iterations=1, seed=0, remove_unused_columns=False,
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=correct, args=options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    print(f"mean_length {sum(lengths) / len(lengths)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", nargs="?", type=pathlib.Path)
    parser.add_argument("--sizes", default="64,256,512")
    parser.add_argument("--completion", type=int, default=8, help="maximum tokens of a completion")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(json.loads(options.worker), options.steps)
    if options.binary is None:
        parser.error("the path of `grpo` is missing")

    results = []
    print("| hidden | | s of processor per step: median (min to max) | tokens per completion | MiB | TRL / ours: time | memory |")
    print("|---|---|---|---|---|---|---|")
    for size in map(int, options.sizes.split(",")):
        few, more = SIZES[size]["steps"]
        with tempfile.TemporaryDirectory() as folder:
            ours = Ours(options.binary, size, options, pathlib.Path(folder))
            peers = [ours, Trl(size, options, pathlib.Path(folder), ours.checkpoint())]
            found = {peer.name: [] for peer in peers}
            for _ in range(options.rounds):
                for peer in peers:
                    (short, _, _), (long, memory, length) = peer.run(few), peer.run(more)
                    found[peer.name].append(((long - short) / (more - few), memory, length))
        results.append(dict(size=size, rounds=found))
        median = {name: [statistics.median(column) for column in zip(*rounds)] for name, rounds in found.items()}
        for name, rounds in found.items():
            times = [time for time, _, _ in rounds]
            time, memory, length = median[name]
            ratios = ""
            if name == "grpo":
                trl = median["TRL"]
                ratios = f"{trl[0] / time:.2f} x | {trl[1] / memory:.1f} x"
            else:
                ratios = " | "
            print(f"| {size} | {name} | {time:.4g} ({min(times):.4g} to {max(times):.4g}) | {length:.1f} | {memory:.0f} | {ratios} |", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
