"""Small models of all families with heads that vLLM's attention supports on a CPU, and vLLM's logits of saved models.

python vllm_families.py make OUT NAME...    writes models of transformers with random weights to OUT/NAME
python vllm_families.py logits JOBS         JOBS is JSON: [{"model": FOLDER, "out": FILE, "options": arguments of vllm.LLM}, ...]. Writes
                                            files for `grpo parity --model`, and prints a line of JSON per job: its seconds, and the error
                                            of vLLM if there is one

vllm_families.rs runs it.
"""

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

VOCAB = 512
# The tiny checkpoints have heads of 8 or 12 columns. On a CPU, vLLM needs at least 32 columns, and 128 in Gated DeltaNets.
SIZES = {"head_dim": 32, "global_head_dim": 64, "moe_intermediate_size": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
         # vLLM has the limit of the published models as a constant.
         "swiglu_limit": 7.0,
         # vLLM's Qwen2-MoE has these biases whatever the field says, and does not initialise those that a file lacks.
         "qkv_bias": True}
# Ids of images and sounds that no sequence contains.
IDS = {"image_token_id": 508, "image_token_index": 508, "video_token_id": 509, "boi_token_index": 509, "vision_start_token_id": 510,
       "boi_token_id": 510, "eoi_token_index": 510, "vision_end_token_id": 511, "eoi_token_id": 511}


def widened(config):
    """Returns the configuration of a tiny checkpoint with wider heads and a larger vocabulary."""
    config = {"num_attention_heads": 4, "num_key_value_heads": 2} | config
    config |= {"hidden_size": 128, "intermediate_size": 96, "vocab_size": VOCAB}
    config |= {key: size for key, size in SIZES.items() if key in config}
    if "rope_parameters" in config:
        rope = dict(config["rope_parameters"])
        for key in {"short_factor", "long_factor"} & set(rope):
            rope[key] = [factor for factor in rope[key] for _ in range(4)]
        if "mrope_section" in rope:
            rope["mrope_section"] = [4 * pairs for pairs in rope["mrope_section"]]
        config["rope_parameters"] = rope
    return config


def make(out, names):
    sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoints"))
    import generate
    import torch

    torch.set_num_threads(1)
    for seed, name in enumerate(names):
        folder = out / name
        folder.mkdir(parents=True)
        if name in generate.CHECKPOINTS:
            family, config, _, layout, _, _ = generate.CHECKPOINTS[name]
            model = generate.random_model(family, widened(config), seed)
        else:
            family, text, config, layout, names_layout, lengths = generate.WRAPPERS[name]
            config = config | {key: token for key, token in IDS.items() if key in config}
            tower = config["vision_config"]
            if "out_hidden_size" in tower:
                config["vision_config"] = tower | {"out_hidden_size": 128}
            generate.WRAPPERS[name] = (family, widened(text), config, layout, names_layout, lengths)
            model = generate.random_wrapper(name, seed)
        with torch.no_grad():
            for parameter in model.parameters():
                # Wider layers sum more terms: without this factor, logits would be larger than those of the tiny checkpoints.
                if parameter.ndim > 1:
                    parameter *= 0.25 if name.startswith("qwen3_5") else 0.5
        if name in generate.CHECKPOINTS:
            generate.save_model(model, folder, "float32", layout, None)
        else:
            model.save_pretrained(folder)
            path = folder / "config.json"
            path.write_text(json.dumps(generate.wrapper_json(json.loads(path.read_text()), layout)))


def start(cache):
    """Imports vLLM with settings for many small engines in one process; returns the module, and a list of errors of model classes."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0)))}
    # The user's cache may have entries from an interpreter with other packages, with which other errors occur.
    os.environ["VLLM_CACHE_ROOT"] = cache
    import vllm
    from vllm.model_executor.models import registry

    causes = []

    def inspect(run):
        try:
            return run()
        except Exception as error:
            causes.append(error)
            raise

    # vLLM imports the class of a model in a process of its own, which takes six seconds, and logs the error instead of raising it.
    registry._run_in_subprocess = inspect
    # Each engine collects garbage several times, for two seconds each.
    gc.collect = lambda *_: 0
    return vllm, causes


def scores(vllm, job, ids):
    """Returns vLLM's logits [B, T, V] of the ids [B, T]."""
    engine = vllm.LLM(model=job["model"], enforce_eager=True, max_num_seqs=len(ids), max_model_len=64, seed=0,
                      enable_prefix_caching=False, kv_cache_memory_bytes=1 << 24, logprobs_mode="raw_logits", max_logprobs=-1,
                      **{"dtype": "float32", **job["options"]})
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=-1, prompt_logprobs=-1)
    rows = []
    for output in engine.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False):
        # vLLM returns no logits for the first token. The logits after the last token come with the sampled token.
        positions = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        rows.append([[position[token].logprob for token in range(VOCAB)] for position in positions])
    return rows


def logits(jobs, cache):
    vllm, causes = start(cache)
    import torch
    from safetensors.torch import save_file
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    torch.set_num_threads(1)
    # Longer than the windows, and than the original contexts of scaled rotary frequencies.
    ids = torch.stack([3 + torch.arange(40) * step % 500 for step in (7, 31)])
    for job in jobs:
        began, reply = time.perf_counter(), {}
        causes.clear()
        # Two wrappers share a class, whose error is cached.
        registry._try_inspect_model_cls.cache_clear()
        try:
            found = torch.tensor(scores(vllm, job, ids.tolist()))
            loss = torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            save_file({"ids": ids, "expected.logits": found, "expected.loss": loss.reshape(())}, job["out"], {"format": "grpo-model/1"})
        except Exception as error:
            reply["error"] = "; ".join(f"{type(of).__name__}: {of}" for of in [*causes, error])
        cleanup_dist_env_and_memory()
        print(json.dumps(reply | {"seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), sys.argv[3:])
    else:
        with tempfile.TemporaryDirectory() as cache:
            logits(json.loads(sys.argv[2]), cache)
