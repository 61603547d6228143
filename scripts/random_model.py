#!/usr/bin/env python3
"""Writes a folder of normally distributed bf16 weights in the shape of Qwen2.5-0.5B, to measure memory and time without a download.

    scripts/random_model.py FOLDER      # about 1 GB

`--set hidden_size=256 --set vocab_size=4096` changes the shape (fields of config.json). The folder also has a tokenizer of single bytes and prompts, so that `grpo train`
runs on it (without learning anything useful). The run prints its memory estimate before the weights are loaded, and its peak memory at the end;
`--set lora.target_modules=all-linear` trains LoRA:

    GRPO_LOG=info grpo train scripts/random_model.yaml --set model=FOLDER --set data.files=FOLDER/prompts.jsonl
"""

import argparse
import json
import math
import pathlib
import random
import statistics
import struct

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": 256,
}


# Number of values that are copied from the pool at a time.
PART = 1 << 16


def shapes():
    """Returns the names and shapes of the tensors of transformers."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    keys = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    yield "model.embed_tokens.weight", [CONFIG["vocab_size"], hidden]
    for layer in range(CONFIG["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        yield of + "input_layernorm.weight", [hidden]
        for name, rows in [("q", hidden), ("k", keys), ("v", keys)]:
            yield of + f"self_attn.{name}_proj.weight", [rows, hidden]
            yield of + f"self_attn.{name}_proj.bias", [rows]
        yield of + "self_attn.o_proj.weight", [hidden, hidden]
        yield of + "post_attention_layernorm.weight", [hidden]
        yield of + "mlp.gate_proj.weight", [inner, hidden]
        yield of + "mlp.up_proj.weight", [inner, hidden]
        yield of + "mlp.down_proj.weight", [hidden, inner]
    yield "model.norm.weight", [hidden]


def normal(generator):
    """Returns about four million normal bf16 values of standard deviation 0.02, little-endian."""
    quantile = statistics.NormalDist(0, 0.02).inv_cdf
    words = (struct.unpack("<I", struct.pack("<f", quantile((i + 0.5) / 65536)))[0] for i in range(65536))
    table = [word + 0x8000 >> 16 for word in words]
    drawn = memoryview(generator.randbytes(1 << 23)).cast("H")
    return struct.pack(f"<{len(drawn)}H", *map(table.__getitem__, drawn))


def values(generator, pool, name, shape):
    """Returns bf16 values, little-endian: ones for norms, zeros for biases, else parts of `pool` from random places."""
    count = math.prod(shape)
    if name.endswith("norm.weight"):
        return b"\x80\x3f" * count
    if name.endswith("bias"):
        return bytes(2 * count)
    parts = bytearray()
    while len(parts) < 2 * count:
        begin = 2 * generator.randrange(len(pool) // 2 - PART)
        parts += pool[begin : begin + 2 * PART]
    return parts[: 2 * count]


def tokenizer():
    """Returns tokenizer.json with one token per byte, and an end token."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    end = {"id": 256, "content": "<|endoftext|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {symbols[byte]: byte for byte in range(256)}, "merges": []},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=NUMBER", help="a number in config.json; repeatable")
    args = parser.parse_args()
    for field, number in (setting.split("=", 1) for setting in args.set):
        if not isinstance(CONFIG.get(field), (int, float)) or isinstance(CONFIG[field], bool):
            parser.error(f"config.json has no number {field}")
        CONFIG[field] = type(CONFIG[field])(number)
    args.folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(args.seed)
    pool = normal(generator)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(args.folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes():
            file.write(values(generator, pool, name, shape))
    for name, content in [
        ("config.json", CONFIG),
        ("generation_config.json", {"eos_token_id": 256}),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}),
    ]:
        (args.folder / name).write_text(json.dumps(content, indent=1))
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(2, 30) for b in range(2, 30)]
    (args.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{end // 2:,} weights in {args.folder}")


if __name__ == "__main__":
    main()
