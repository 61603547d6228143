"""Prints one table of a training step and a rollout, of grpo and of JAX, compiled by libtpu for an absent TPU.

    python peers/aot_table.py --grpo target/release/grpo --jax ~/peers-jax/bin/python [--only 0.5B,rollout] [--target h200]

Both sides have the same shapes and are compiled at level O0. The time of JAX's step is extrapolated from unrolled programs of two and three layers
(`aot_jax.py`), and grpo's time from its loops, whose bodies are counted by compiling them twice in a row; both are the compiler's optimal_seconds of one
program with the gradients of a micro-batch and a step of AdamW. `temp` is all memory except weights and moments, including gradients (for a
rollout, all memory except the bf16 weights). With 1.5B and 16 rows, grpo saves only the inputs of every fourth layer.

    python peers/aot_table.py --meshes --grpo target/release/grpo --jax ~/peers-jax/bin/python --target v6e:2x4
        [--only 'step 7B fsdp 8,decode 7B data 2 tensor 4']

With --meshes, the table has steps and decode loops on meshes of all chips of a slice, per chip, and for grpo the bytes that a chip receives in
collectives. A step has 64 rows of 1024 tokens, all in the loss. Decoding is for 64 sequences with all 1280 columns of the cache: grpo's loop, per
token, and one step of JAX, whose time is extrapolated, too.
"""

import argparse
import json
import subprocess
import tempfile

SHAPES = {
    "0.5B": ("configs/aot/qwen2.5-0.5b.yaml", 8),
    "1.5B": ("configs/aot/qwen2.5-1.5b.yaml", 8),
    "1.5B-16": ("configs/aot/qwen2.5-1.5b.yaml", 16),
}
# Steps and decode loops on meshes of eight chips.
MESHES = {
    "step 7B fsdp 8": ("configs/aot/qwen2.5-7b.yaml", {"fsdp": 8}),
    "step 7B fsdp 2 tensor 4": ("configs/aot/qwen2.5-7b.yaml", {"fsdp": 2, "tensor": 4}),
    "step 8B fsdp 8": ("configs/aot/qwen3-8b.yaml", {"fsdp": 8}),
    "step 1.5B fsdp 8": ("configs/aot/qwen2.5-1.5b.yaml", {"fsdp": 8}),
    "decode 7B data 2 tensor 4": ("configs/aot/qwen2.5-7b.yaml", {"data": 2, "tensor": 4}),
    "decode 8B tensor 8": ("configs/aot/qwen3-8b.yaml", {"tensor": 8}),
}
# What `aot_jax.py` reads of a model, apart from its type.
JAX_KEYS = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rope_theta", "rms_norm_eps", "attention_bias", "tie_word_embeddings", "qk_norm",
]
# For a step with this many rows.
SETTINGS = {16: {"policy.recompute_num_layers": 4}}


def output_of(command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def model_of(grpo, config):
    """Returns the section `model` of a configuration, as config.json."""
    lines = output_of([grpo, "aot", config, "--print-config"]).splitlines()
    section = lines[lines.index("model:") + 1 :]
    end = next((i for i, line in enumerate(section) if not line.startswith(" ")), len(section))
    section = [line.strip() for line in section[:end] if not line.strip().startswith("#")]
    values = dict(line.split(": ", 1) for line in section)
    values = {key: json.loads(value) for key, value in values.items() if key in JAX_KEYS}
    return {"model_type": "qwen3" if values.get("qk_norm") else "qwen2", **values}


def ours(grpo, config, target, programs, more):
    command = [grpo, "aot", config, "--target", target, "--json", "--variants", ",".join(programs)]
    for key, value in more.items():
        command += ["--set", f"{key}={value}"]
    return json.loads(output_of(command))


def step(grpo, config, rows, target):
    # All tokens of a row of 1024 are in the loss, as in JAX's step, and there is one micro-batch.
    more = {"data.max_prompt_length": 1, "rollout.max_completion_length": 1024, "grpo.gradient_accumulation_steps": 1}
    more |= {"grpo.prompts_per_step": 1, "grpo.num_generations": rows, **SETTINGS.get(rows, {})}
    document = ours(grpo, config, target, ["step"], more)
    report, state = document["programs"]["step"], 12 * document["sizes"]["parameters"]
    keys = ["estimate_seconds", "compile_processor_seconds", "program_bytes"]
    return dict(
        temp_bytes=report["total_bytes"] - state, argument_bytes=state, **{key: report[key] for key in keys}
    )


def on_mesh(grpo, python, name, target):
    config, axes = MESHES[name]
    of_step, mesh = name.startswith("step"), json.dumps(axes)
    more = {"rollout.max_completion_length": 1024, "policy.mesh": "{fsdp: 8}", "grpo.gradient_accumulation_steps": 1}
    more |= {"data.max_prompt_length": 1, "policy.mesh": mesh} if of_step else {"rollout.mesh": mesh}
    document = ours(grpo, config, target, ["step" if of_step else "decode_1280"], more)
    (report,) = document["programs"].values()
    per = 1 if of_step else document["sizes"]["tokens_per_call"]
    gigabytes = [report[key] / 1e9 for key in ("argument_bytes", "temp_bytes", "total_bytes")]
    received = ", ".join(f"{kind} {size / per / 1e9:.2f}" for kind, size in report["traffic"].items() if size > 0)
    seconds = report["estimate_seconds"]
    time = "-" if seconds is None else f"{1e3 * seconds / per:.2f}"
    floor = f"{1e3 * report['floor']['seconds'] / per:.2f}"
    cells = [f"{size:.2f}" for size in gigabytes]
    print(f"| {name}: ours | {' | '.join(cells)} | {time} | {floor} | {received} |", flush=True)
    if python:
        arguments = ["--mesh", ",".join(f"{axis}={size}" for axis, size in axes.items()), "--batch", "64"]
        arguments += ["--length", "1024", "--chunk", "16384"] if of_step else ["--length", "1280", "--decode"]
        report = jax(python, grpo, config, target, arguments)
        parts = [report[key] / 1e9 for key in ("argument_bytes", "temp_bytes")]
        cells = [f"{size:.2f}" for size in (*parts, sum(parts))]
        print(f"| the same: JAX | {' | '.join(cells)} | {1e3 * report['estimate_seconds']:.2f} | | |", flush=True)


def rollout(grpo, target):
    config = SHAPES["0.5B"][0]
    names = [f"decode_{columns}" for columns in (256, 512, 768, 1024, 1280)]
    document = ours(grpo, config, target, names, {"rollout.max_completion_length": 1024})
    reports = list(document["programs"].values())
    weights = 2 * document["sizes"]["parameters"]
    turns = document["sizes"]["tokens_per_call"]
    # Each program serves calls that begin with at most its number of columns: of 1024 iterations, from column 256 on.
    spans = [turns, 256, 256, 256, 256 - turns]
    seconds = [document["programs"][name]["estimate_seconds"] / turns for name in names]
    return dict(
        temp_bytes=max(report["total_bytes"] for report in reports) - weights,
        argument_bytes=weights,
        estimate_seconds=sum(span * s for span, s in zip(spans, seconds)) / sum(spans),
        compile_processor_seconds=sum(report["compile_processor_seconds"] for report in reports),
        program_bytes=sum(report["program_bytes"] for report in reports),
    )


def jax(python, grpo, config, target, arguments):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(model_of(grpo, config), file)
        file.flush()
        target = target if ":" in target else f"{target}:1x1"
        return json.loads(output_of([python, "peers/aot_jax.py", file.name, "--target", target, *arguments]))


def row(name, report):
    gigabytes = lambda key: f"{report[key] / 1e9:.2f}"
    total = (report["temp_bytes"] + report["argument_bytes"]) / 1e9
    seconds = report.get("estimate_seconds")
    time = "-" if seconds is None else f"{1e3 * seconds:.2f}"
    processor = f"{report['compile_processor_seconds']:.0f}"
    text = f"{report['program_bytes'] / 1e3:.0f}"
    print(f"| {name} | {gigabytes('temp_bytes')} | {gigabytes('argument_bytes')} | {total:.2f} | {time} | {processor} | {text} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grpo", default="grpo")
    parser.add_argument("--jax", help="a python with jax, jaxlib and libtpu; without it, only rows of grpo")
    parser.add_argument("--only", help="names of rows [default: all]")
    parser.add_argument("--meshes", action="store_true", help="steps and decode loops on meshes of eight chips")
    parser.add_argument("--target", default="v6e")
    a = parser.parse_args()
    if a.jax and not a.target.startswith("v"):
        parser.error("--jax: peers/aot_jax.py compiles for TPUs alone; expected a --target such as v6e with it, or no --jax")
    if a.meshes:
        print("| program | arguments GB | temp GB | total GB | time ms | floor ms | received GB |\n|---|--:|--:|--:|--:|--:|---|")
        for name in a.only.split(",") if a.only else MESHES:
            on_mesh(a.grpo, a.jax, name, a.target)
        return
    print("| program | temp GB | arguments GB | total GB | time ms | compiler s | text kB |\n|---|--:|--:|--:|--:|--:|--:|")
    for name in (a.only or "0.5B,1.5B,1.5B-16,rollout").split(","):
        if name == "rollout":
            row("rollout 0.5B, 64 x (256 + 1024), per token: ours", rollout(a.grpo, a.target))
            if a.jax:
                arguments = ["--rollout", "--batch", "64", "--prompt", "256", "--length", "1024"]
                row("the same: JAX (a loop's body once)", jax(a.jax, a.grpo, SHAPES["0.5B"][0], a.target, arguments))
            continue
        config, rows = SHAPES[name]
        title = f"{name.split('-')[0]}, {rows} x 1024"
        row(f"{title}: ours", step(a.grpo, config, rows, a.target))
        if a.jax:
            more = ["--no-estimate"] if rows == 16 else []
            row(f"{title}: JAX", jax(a.jax, a.grpo, config, a.target, ["--batch", str(rows), "--length", "1024", *more]))


if __name__ == "__main__":
    main()
