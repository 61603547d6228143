"""Peers of a model's benchmark, as workers of `grpo bench`: python model_worker.py transformers|vllm

transformers  sampling with `generate`; an optimizer step with torch's fused AdamW. In bf16, sampling has bf16 weights, and a step has f32
              weights under bf16 autocast, as TRL's `bf16: true`. Logits of the completions only, log-probabilities in f32, no
              recomputation of activations, gradients clipped to a norm of 1
vllm          sampling with the engine in this process, so that its processor time counts; one engine for all jobs of a dtype
"""

import os
import sys
import time

import protocol

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def threads(job):
    return job["threads"] or len(os.sched_getaffinity(0))


def clock():
    """Returns wall time and processor time."""
    return time.perf_counter(), time.process_time()


def between(began, ended):
    return {"seconds": ended[0] - began[0], "processor": ended[1] - began[1]}


def timed(run):
    began = clock()
    result = run()
    return between(began, clock()), result


def generated(run, tokens):
    """Returns the times of `run(tokens)`, which continues all prompts by that many tokens. It returns the clock when every sequence had its
    first token, the clock when the first sequence was complete, and the number of tokens between them."""
    run(2)
    began = clock()
    first, complete, decoded = run(tokens)
    if complete <= first:
        raise RuntimeError(f"a sequence was complete before another had its first token: set generation.tokens above {tokens}")
    times = {"first_token": between(began, first), "whole": between(began, clock())}
    return {**times, "decode": between(first, complete), "decoded": decoded}


def transformers(job):
    import torch
    import transformers

    torch.set_num_threads(threads(job))
    updates = "update" in job["task"]
    dtype = torch.float32 if updates else getattr(torch, DTYPES[job["dtype"]])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    version = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if updates:
        return version, lambda: update(model.train(), job["task"]["update"], job["dtype"] == "bf16")

    task = job["task"]["generate"]
    ids = torch.tensor(task["prompts"])
    model.eval()

    def run(tokens):
        clocks = []

        def after_token(ids, scores, **_):
            clocks.append(clock())
            return torch.zeros(len(ids), dtype=torch.bool)

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
                stopping_criteria=[after_token],
            )
        assert out.shape == (len(ids), ids.shape[1] + tokens) and len(clocks) == tokens, out.shape
        return clocks[0], clocks[-1], len(ids) * (tokens - 1)

    return version, lambda: generated(run, task["tokens"])


def update(model, task, is_bf16):
    import torch

    ids = torch.tensor([prompt + completion for prompt, completion in zip(task["prompts"], task["completions"])])
    advantages, completion = torch.tensor(task["advantages"]), len(task["completions"][0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=task["learning_rate"], weight_decay=0.0, fused=True)

    def step():
        for rows in torch.arange(len(ids)).tensor_split(task["micro_batches"]):
            part = ids[rows]
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                out = model(part, attention_mask=torch.ones_like(part), logits_to_keep=completion + 1, use_cache=False)
            logits = out.logits[:, :-1].float()
            logp = logits.gather(-1, part[:, -completion:, None])[..., 0] - logits.logsumexp(-1)
            ratio, weight = torch.exp(logp - logp.detach()), advantages[rows, None]
            surrogate = torch.min(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
            (-surrogate.sum() / (len(ids) * completion)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)

    norm = step()
    step()
    whole, _ = timed(step)
    return {"whole": whole, "grad_norm": norm}


engine = None


def vllm(job):
    global engine
    if "generate" not in job["task"]:
        raise protocol.NotOffered("vLLM does not train")
    task = job["task"]["generate"]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads(job) - 1}")
    import vllm
    from vllm.sampling_params import RequestOutputKind

    if engine is None:
        rows, length = job["most_rows"], job["longest"] + 16
        engine = vllm.LLM(
            model=job["model"],
            dtype=DTYPES[job["dtype"]],
            skip_tokenizer_init=True,
            max_num_seqs=rows,
            max_model_len=length,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=cache_bytes(job, rows, length),
        )
    inputs = [{"prompt_token_ids": ids} for ids in task["prompts"]]

    def run(tokens):
        sampling = vllm.SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            min_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )
        for i, prompt in enumerate(inputs):
            engine.llm_engine.add_request(str(i), prompt, sampling)
        counts, first, complete = [0] * len(inputs), None, None
        # vLLM prefills chunks of prompts in the same steps as it decodes other sequences, so sequences start and finish in different steps.
        while engine.llm_engine.has_unfinished_requests():
            for output in engine.llm_engine.step():
                counts[int(output.request_id)] += len(output.outputs[0].token_ids)
            if first is None and min(counts) > 0:
                first, done = clock(), sum(counts)
            if complete is None and max(counts) == tokens:
                complete, decoded = clock(), sum(counts)
        assert counts == [tokens] * len(inputs), counts
        return first, complete, decoded - done

    return f"vllm {vllm.__version__}", lambda: generated(run, task["tokens"])


def cache_bytes(job, rows, length):
    """Returns the bytes of keys and values of all sequences, each in whole blocks of 128 tokens and one more."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(job["model"]).get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * width * (4 if job["dtype"] == "f32" else 2)
    return rows * (-(-length // 128) + 1) * 128 * of_token


def reply(request):
    job = request["model"]
    try:
        version, run = {"transformers": transformers, "vllm": vllm}[sys.argv[1]](job)
    except ModuleNotFoundError as error:
        raise protocol.NotOffered(f"not installed: {error}") from error
    can_reset = protocol.reset_high_water()
    times = run()
    return {"model": {**times, "version": version, "peak_bytes": protocol.status("VmHWM") if can_reset else None}}


if __name__ == "__main__":
    protocol.answer(reply)
