"""Measures a whole GRPO step, rollout and training, as XLA programs on this CPU: `grpo train` with `policy.device: pjrt:cpu` against JAX.

    cargo build --release
    python3.11 -m venv ~/peers-jax && ~/peers-jax/bin/pip install jax==0.10.2 jaxlib==0.10.2 numpy
    ~/peers-jax/bin/python peers/bench_step.py target/release/grpo --sizes 64,256

Both run one decoder (Qwen2's shape, random weights, f32): sample `--rows` completions of `--length` tokens, and train on them, all in one
micro-batch, with the plain clipped loss and AdamW. JAX's is the program of aot_jax.py in f32. It runs twice: through grpo's plugin,
so that one compiler compiles both programs, and through JAX's own XLA. Runs alternate. Time is processor
time per step, the difference between a short and a long run, so that loading cancels. Compile time is the difference between the first run and
the same run later, which finds its programs in the cache of grpo, or of JAX.
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
    64: dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, vocab_size=512),
    256: dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, vocab_size=4096),
    512: dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, vocab_size=32768),
}
STEPS = {64: (3, 23), 256: (2, 8), 512: (2, 4)}
GENERATIONS = 8
PROMPT = 16


def measured(command, environment):
    """Returns (processor seconds, output) of a process."""
    process = subprocess.Popen([str(part) for part in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"error: {' '.join(map(str, command))} failed:\n{output}")
    return usage.ru_utime + usage.ru_stime, output


class Ours:
    name = "grpo"

    def __init__(self, options, size, folder):
        self.binary, self.folder, self.runs = options.grpo, folder, 0
        rows = [json.dumps(dict(prompt=f"{i:0{PROMPT}d}", answer="1")) for i in range(64)]
        (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        self.config = folder / "train.yaml"
        self.config.write_text(f"""
run: {{ name: bench, save_steps: 0, log_completions_steps: 0 }}
model: {folder / 'model'}
policy: {{ device: pjrt:cpu, dtype: float32, can_roll_back: false, compile_cache: {folder / 'programs'} }}
data: {{ files: {folder / 'prompts.jsonl'}, held_out_fraction: 0.1 }}
rewards: {{ partial: 1 }}
rollout: {{ temperature: 1.0, top_k: 0, top_p: 1.0, max_completion_length: {options.length}, batch_size: {options.rows} }}
grpo: {{ max_steps: 1, prompts_per_step: {options.rows // GENERATIONS}, num_generations: {GENERATIONS}, num_iterations: 1,
  gradient_accumulation_steps: 1 }}
loss: {{ loss_type: grpo, beta: 0.0 }}
optimizer: {{ learning_rate: 1.0e-6, lr_scheduler_type: constant, warmup_ratio: 0.0 }}
eval: {{ num_problems: 1, num_generations: 0, eval_steps: 0 }}
""")

    def run(self, steps):
        self.runs += 1
        run = self.folder / f"run-{self.runs}"
        seconds, _ = measured([self.binary, "train", self.config, "--run-dir", run, "--quiet", "--set", f"grpo.max_steps={steps}"], os.environ)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if "completions/mean_length" in row]
        phases = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[-1] if key.startswith("timing_s/")}
        return seconds, statistics.mean(row["completions/mean_length"] for row in rows), phases


class Jax:
    name = "JAX, its own XLA"
    platform = {"JAX_PLATFORMS": "cpu"}

    def __init__(self, options, size, folder):
        arguments = dict(config=str(folder / "model" / "config.json"), rows=options.rows, prompt=PROMPT, length=options.length, dtype="float32")
        self.command = [sys.executable, __file__, "--worker", json.dumps(arguments)]
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / self.name), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self.environment = os.environ | self.platform | cache

    def run(self, steps):
        seconds, output = measured([*self.command, "--steps", steps], self.environment)
        # Plugins print warnings before and after it.
        report = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        return seconds, report["mean_length"], report["phases"]


class JaxOnOurPlugin(Jax):
    name = "JAX, the plugin of ours"

    def __init__(self, options, size, folder):
        plugins = json.loads(subprocess.run([options.grpo, "plugin", "list", "--json"], check=True, capture_output=True).stdout)
        path = next(plugin["path"] for plugin in plugins if plugin["kind"] == "cpu")
        self.platform = {"JAX_PLATFORMS": "xla_cpu", "PJRT_NAMES_AND_LIBRARY_PATHS": f"xla_cpu:{path}"}
        super().__init__(options, size, folder)


def jax_steps(arguments, steps):
    """Runs steps of JAX's program on JAX's default device; returns the mean length of completions and the seconds of both phases of each step."""
    import time

    import aot_jax
    import jax
    import jax.numpy as jnp
    import numpy as np

    aot_jax.bf16 = jnp.dtype(arguments["dtype"])
    c = aot_jax.Config(arguments["config"])
    rows, prompt, length = arguments["rows"], arguments["prompt"], arguments["length"]
    random = np.random.default_rng(0)
    fill = lambda shape: jnp.asarray(random.standard_normal(shape, np.float32) * 0.02)
    params = jax.tree.map(fill, c.parameters(), is_leaf=lambda x: isinstance(x, tuple))
    state = dict(m=jax.tree.map(jnp.zeros_like, params), v=jax.tree.map(jnp.zeros_like, params), step=jnp.int32(0))
    sample = jax.jit(lambda params, prompts, lengths, key: aot_jax.rollout(c, length, 256, params, prompts, lengths, key))
    total = prompt + length
    chunk = max(n for n in range(1, 2049) if rows * total % n == 0)
    train = jax.jit(lambda p, s, b: aot_jax.train_step(c, chunk, False, p, s, b), donate_argnums=(0, 1))
    prompts, lengths = jnp.full((rows, prompt), 120, jnp.int32), jnp.full((rows,), prompt, jnp.int32)
    key, times, mean = jax.random.key(0), [], []
    for _ in range(steps):
        began = time.time()
        key, now = jax.random.split(key)
        tokens, logps, _ = jax.block_until_ready(sample(params, prompts, lengths, now))
        sampled = time.time()
        ids = jnp.concatenate([prompts, tokens], 1)
        there = np.asarray(jnp.cumsum(tokens == 256, 1) - (tokens == 256) == 0, np.float32)
        mean.append(there.sum(1).mean())
        advantage = np.repeat(random.standard_normal((rows, 1), np.float32), total, 1)
        before = jnp.zeros((rows, prompt - 1), jnp.float32), jnp.zeros((rows, 1), jnp.float32)
        weights = jnp.concatenate([before[0], there / there.sum(), before[1]], 1)
        old = jnp.concatenate([before[0], logps, before[1]], 1)
        batch = dict(ids=ids, targets=jnp.roll(ids, -1, 1), segments=jnp.ones_like(ids), old=old, advantages=jnp.asarray(advantage), weights=weights)
        params, state, stats = train(params, state, batch)
        jax.block_until_ready((params, stats))
        times.append((sampled - began, time.time() - sampled))
    return float(np.mean(mean)), times


def worker(arguments, steps):
    length, times = jax_steps(arguments, steps)
    phases = {name: statistics.median(t[i] for t in times[1:]) for i, name in enumerate(("gen", "update_actor"))}
    print(json.dumps(dict(mean_length=length, phases={f"timing_s/{k}": v for k, v in phases.items()})))


def spread(values):
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grpo", nargs="?", type=pathlib.Path, help="the binary")
    parser.add_argument("--sizes", default="64,256,512")
    parser.add_argument("--rows", type=int, default=16, help="completions per step")
    parser.add_argument("--length", type=int, default=112, help="maximum tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(json.loads(options.worker), options.steps)
    if options.grpo is None or not options.grpo.exists():
        parser.error(f"there is no binary {options.grpo}")
    if options.rows % GENERATIONS:
        parser.error(f"--rows is a multiple of {GENERATIONS}")
    print("| hidden, layers, vocabulary | | processor s per step | tokens per processor s | wall s: rollout, training | compiling, processor s | over ours |")
    print("|---|---|---|---|---|---|---|")
    script = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "random_model.py"
    for size in map(int, options.sizes.split(",")):
        shape, (few, many) = SIZES[size] | dict(num_key_value_heads=SIZES[size]["num_attention_heads"] // 2), STEPS[size]
        with tempfile.TemporaryDirectory() as place:
            folder = pathlib.Path(place)
            measured([sys.executable, script, folder / "model", *(f"--set={k}={v}" for k, v in shape.items())], os.environ)
            sides = [side(options, size, folder) for side in (Ours, JaxOnOurPlugin, Jax)]
            first = {side.name: side.run(few)[0] for side in sides}
            found = {side.name: dict(step=[], tokens=[], short=[], phases=[]) for side in sides}
            for turn in range(options.rounds):
                for side in sides if turn % 2 == 0 else sides[::-1]:
                    (short, _, _), (long, mean, phases) = side.run(few), side.run(many)
                    step = (long - short) / (many - few)
                    rows = found[side.name]
                    rows["step"].append(step)
                    rows["tokens"].append(options.rows * (PROMPT + mean) / step)
                    rows["short"].append(short)
                    rows["phases"].append(phases)
            own = statistics.median(found["grpo"]["step"])
            for side in sides:
                rows = found[side.name]
                wall = ["%.3g" % statistics.median(p[f"timing_s/{name}"] for p in rows["phases"]) for name in ("gen", "update_actor")]
                compiling = "%.3g" % (first[side.name] - statistics.median(rows["short"]))
                label = f"{size}, {shape['num_hidden_layers']}, {shape['vocab_size']}" if side.name == "grpo" else ""
                ratio = "" if side.name == "grpo" else f"{statistics.median(rows['step']) / own:.2f} x"
                print(f"| {label} | {side.name} | {spread(rows['step'])} | {statistics.median(rows['tokens']):.3g} | {', '.join(wall)} | {compiling} | {ratio} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
