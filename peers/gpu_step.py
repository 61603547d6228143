"""Reports a whole GRPO step on a GPU: the numbers of a run of `grpo train`, and the same step of TRL and JAX if installed. scripts/gpu.sh calls it.

    python peers/gpu_step.py table RUN [--peak-tflops 989] [--peer NAME=REPORT.json]
    python peers/gpu_step.py trl MODEL_FOLDER PROMPTS.jsonl --prompts 8 --generations 8 --length 256 --micro-batches 1 --out REPORT.json
    JAX_PLATFORMS=cuda python peers/gpu_step.py jax MODEL_FOLDER PROMPTS.jsonl --prompts 8 --generations 8 --length 256 --micro-batches 1 --out REPORT.json

`table` reads the metrics and the configuration in a run's folder and needs only Python. `trl` needs torch, transformers and trl, uses the
GPU if torch finds one, and computes in bf16 there, like grpo with `policy.dtype: bfloat16` (f32 weights and moments, bf16 products). `jax` runs
the programs of aot_jax.py on random weights, in bf16 too, with all sequences in one micro-batch. The first two steps of each compile and fill
caches, and are not counted.
"""

import argparse
import json
import pathlib
import statistics
import time

SKIPPED = 2


def ours(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "timing_s/gen" in row][SKIPPED:]
    if not rows:
        raise SystemExit(f"error: {run} has no more than {SKIPPED} steps: run more (grpo.max_steps)")
    median = lambda key: statistics.median(row.get(key, 0.0) for row in rows)
    train = sum(median(f"timing_s/{phase}") for phase in ("old_log_prob", "ref", "values", "update_actor"))
    return dict(
        gen_s=median("timing_s/gen"),
        train_s=train,
        step_s=median("step_time"),
        step_s_all=[row["step_time"] for row in rows],
        tokens=median("tokens"),
        completion_tokens=median("completions/mean_length"),
    )


def table(options):
    reports = {"grpo": ours(options.run)}
    for peer in options.peer:
        name, separator, path = peer.partition("=")
        if not separator:
            raise SystemExit(f"error: --peer {peer}: expected NAME=REPORT.json")
        if (path := pathlib.Path(path)).exists():
            reports[name] = json.loads(path.read_text())
    print("| | s per step: median (range) | rollout s | training s | tokens of the batch | tokens/s, whole step | model-flops utilisation of the training |")
    print("|---|---|---|---|---|---|---|")
    for name, r in reports.items():
        used = "-"
        if options.peak_tflops and options.parameters and r.get("train_s"):
            # 6 flops per weight and token, without attention and without recomputation.
            used = f"{6 * options.parameters * r['tokens'] / r['train_s'] / options.peak_tflops / 1e12:.1%}"
        part = lambda key: f"{r[key]:.3g}" if r.get(key) else "-"
        times = f"{r['step_s']:.3g} ({min(r['step_s_all']):.3g} to {max(r['step_s_all']):.3g})"
        print(f"| {name} | {times} | {part('gen_s')} | {part('train_s')} | {r['tokens']:.0f} | {r['tokens'] / r['step_s']:.0f} | {used} |")


def trl(options):
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in options.prompts_file.read_text().splitlines()]
    gpu = torch.cuda.is_available()
    batch = options.prompts * options.generations
    times, tokens = [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.time()

        def on_step_end(self, *_, **__):
            if gpu:
                torch.cuda.synchronize()
            times.append(time.time() - self.began)

    def reward(completion_ids, prompts, **_):
        tokens.append(sum(map(len, completion_ids)) + sum(len(p.encode()) for p in prompts))
        return [float(len(ids) % 2) for ids in completion_ids]

    config = GRPOConfig(
        output_dir=str(options.out.parent / "trl"), max_steps=options.steps + SKIPPED, save_strategy="no", report_to=[], logging_steps=1,
        per_device_train_batch_size=batch // options.micro_batches, gradient_accumulation_steps=options.micro_batches,
        num_generations=options.generations, max_completion_length=options.length, temperature=1.0, top_k=0, top_p=1.0,
        beta=0.0, loss_type="grpo", learning_rate=1e-6, lr_scheduler_type="constant", bf16=gpu, use_cpu=not gpu,
        model_init_kwargs=dict(dtype="float32"), disable_tqdm=True,
    )
    # With a fingerprint, because dill cannot pickle the tables of pyarrow 26 to make one.
    dataset = Dataset(InMemoryTable.from_pylist(rows), fingerprint="prompts")
    trainer = GRPOTrainer(model=str(options.model), reward_funcs=reward, args=config, train_dataset=dataset, callbacks=[Clock()])
    trainer.train()
    times = times[SKIPPED:]
    per_step = sum(tokens[SKIPPED:]) / len(times)
    report = dict(step_s=statistics.median(times), step_s_all=times, tokens=per_step, device=torch.cuda.get_device_name() if gpu else "cpu")
    options.out.write_text(json.dumps(report, indent=1))


def jax(options):
    import bench_step
    import jax as of_jax

    devices = of_jax.devices()
    if options.micro_batches != 1:
        raise SystemExit(f"error: JAX's program takes a step as one micro-batch, not as {options.micro_batches}")
    longest = max(len(json.loads(line)["prompt"].encode()) for line in options.prompts_file.read_text().splitlines())
    arguments = dict(config=str(options.model / "config.json"), rows=options.prompts * options.generations, prompt=longest, length=options.length, dtype="bfloat16")
    length, times = bench_step.jax_steps(arguments, options.steps + SKIPPED)
    times = times[SKIPPED:]
    gen, train = (statistics.median(part) for part in zip(*times))
    whole = [sum(parts) for parts in times]
    tokens = arguments["rows"] * (longest + length)
    report = dict(gen_s=gen, train_s=train, step_s=statistics.median(whole), step_s_all=whole, tokens=tokens, device=devices[0].device_kind)
    options.out.write_text(json.dumps(report, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("table", help="a Markdown table of a run")
    one.add_argument("run", type=pathlib.Path)
    one.add_argument("--parameters", type=int, help="number of weights in products, for the utilisation")
    one.add_argument("--peak-tflops", type=float, help="the device's peak in bf16")
    one.add_argument("--peer", action="append", default=[], metavar="NAME=REPORT.json", help="the report of a peer, if it exists; repeatable")
    one.set_defaults(call=table)
    for name, system, call in [("trl", "TRL", trl), ("jax", "JAX", jax)]:
        peer = commands.add_parser(name, help=f"the step of {system}")
        peer.add_argument("model", type=pathlib.Path)
        peer.add_argument("prompts_file", type=pathlib.Path)
        for field, number in [("prompts", 8), ("generations", 8), ("length", 256), ("micro-batches", 1), ("steps", 4)]:
            peer.add_argument(f"--{field}", type=int, default=number)
        peer.add_argument("--out", type=pathlib.Path, required=True)
        peer.set_defaults(call=call)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
