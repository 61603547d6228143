"""Makes a small chat model of random weights and the data that teach it to use a calculator.

    python3 examples/agents/make_model.py runs/calculator

The folder then has `model/` in Hugging Face's layout, and in `data/` three files: `warmup.jsonl` shows the format of tool calls and
answers, `train.jsonl` and `test.jsonl` have questions with their answers. Only Python's standard library is needed.

Most warm-up rows guess an answer without the calculator, so the model rarely calls it at first, and guesses are wrong. GRPO can only
raise the accuracy by making it call the calculator with the right expression, and copy the result. The same seed gives the same folder.
"""

import argparse
import array
import collections
import json
import pathlib
import random
import re
import struct

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
# Words with their leading space, single digits, punctuation, spaces: Qwen2's split, for ASCII.
SPLIT = r"[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>
{%- if message.role == 'tool' %}user
<tool_response>{{ message.content }}</tool_response>
{%- else %}{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def question(generator):
    """Returns an expression and its value."""
    sign = generator.choice("+-*")
    left, right = generator.randint(100, 999), generator.randint(100, 999)
    return f"{left} {sign} {right}", {"+": left + right, "-": left - right, "*": left * right}[sign]


def asked(expression):
    return {"role": "user", "content": f"What is {expression}?"}


def call_text(expression):
    arguments = json.dumps({"expression": expression})
    return f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'


def warmup_row(generator, careless):
    """Returns a guess, a tool call, or the answer to the result of a tool."""
    expression, value = question(generator)
    if generator.random() < 0.5:
        function = {"name": "calculator", "arguments": {"expression": expression}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        messages = [asked(expression), call, {"role": "tool", "content": str(value)}]
        return {"prompt": messages, "completion": f"#### {value}"}
    if generator.random() < careless:
        return {"prompt": [asked(expression)], "completion": f"#### {question(generator)[1]}"}
    return {"prompt": [asked(expression)], "completion": call_text(expression)}


def byte_alphabet():
    """Returns GPT-2's printable character for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merges_of(texts, count):
    """Trains byte-pair merges."""
    alphabet = byte_alphabet()
    words = collections.Counter(
        "".join(alphabet[byte] for byte in word.encode()) for text in texts for word in re.findall(SPLIT, text)
    )
    parts = {word: list(word) for word in words}
    merges = []
    for _ in range(count):
        pairs = collections.Counter()
        for word, pieces in parts.items():
            for pair in zip(pieces, pieces[1:]):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word, pieces in parts.items():
            i = 0
            while i + 1 < len(pieces):
                if (pieces[i], pieces[i + 1]) == best:
                    pieces[i : i + 2] = ["".join(best)]
                i += 1
    return merges


def tokenizer_files(texts, merges):
    merges = merges_of(texts, merges)
    tokens = list(byte_alphabet().values()) + ["".join(pair) for pair in merges]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": len(vocab) + i, "content": token, "special": token not in TAGS, **flags}
        for i, token in enumerate([END_OF_TEXT, START, END, *TAGS])
    ]
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    config = {"eos_token": END, "pad_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    return tokenizer, config, {token["content"]: token["id"] for token in added}


def model_config(options, ids, vocab_size):
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[END],
        "torch_dtype": "float32",
    }


def parameters(config):
    """Returns the name and the shape of every weight."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key_value = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", [config["vocab_size"], hidden]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, width in (("q", hidden), ("k", key_value), ("v", key_value)):
            yield f"{layer}.self_attn.{name}_proj.weight", [width, hidden]
            yield f"{layer}.self_attn.{name}_proj.bias", [width]
        yield f"{layer}.self_attn.o_proj.weight", [hidden, hidden]
        yield f"{layer}.mlp.gate_proj.weight", [inner, hidden]
        yield f"{layer}.mlp.up_proj.weight", [inner, hidden]
        yield f"{layer}.mlp.down_proj.weight", [hidden, inner]
        yield f"{layer}.input_layernorm.weight", [hidden]
        yield f"{layer}.post_attention_layernorm.weight", [hidden]
    yield "model.norm.weight", [hidden]


def write_weights(path, config, generator):
    """Writes random weights: matrices are normal, biases 0, norms 1."""
    header, tensors, end = {"__metadata__": {"format": "pt"}}, [], 0
    deviation = config["hidden_size"] ** -0.5 / 2
    for name, shape in parameters(config):
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        if len(shape) > 1:
            values = array.array("f", (generator.gauss(0.0, deviation) for _ in range(count)))
        else:
            values = array.array("f", [0.0 if name.endswith("bias") else 1.0]) * count
        tensors.append(values.tobytes())
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(tensors[-1])]}
        end += len(tensors[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="output folder of the model and its data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--merges", type=int, default=120)
    parser.add_argument("--warmup-rows", type=int, default=40000)
    parser.add_argument("--train-rows", type=int, default=8192)
    parser.add_argument("--test-rows", type=int, default=256)
    parser.add_argument("--careless", type=float, default=0.8, help="share of first answers that guess")
    options = parser.parse_args()

    generator = random.Random(options.seed)
    data, model = options.folder / "data", options.folder / "model"
    data.mkdir(parents=True, exist_ok=True)
    model.mkdir(parents=True, exist_ok=True)
    warmup = [warmup_row(generator, options.careless) for _ in range(options.warmup_rows)]
    expressions = {}
    while len(expressions) < options.train_rows + options.test_rows:
        expression, value = question(generator)
        expressions[expression] = value
    rows = [{"question": asked(expression)["content"], "answer": str(value)} for expression, value in expressions.items()]
    files = {"warmup": warmup, "test": rows[: options.test_rows], "train": rows[options.test_rows :]}
    for name, part in files.items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    texts = [text for row in warmup[:2000] for text in (row["prompt"][0]["content"], row["completion"])]
    texts += ["system\nTools: calculator", "user\n", "assistant\n"] * 500
    tokenizer, tokenizer_config, ids = tokenizer_files(texts, options.merges)
    config = model_config(options, ids, max(ids.values()) + 1)
    (model / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": [ids[END], ids[END_OF_TEXT]], "pad_token_id": ids[END_OF_TEXT]}
    (model / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (model / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n")
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_weights(model / "model.safetensors", config, generator)
    count = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for _, shape in parameters(config))
    print(f"wrote {model} with {count:,} weights and a vocabulary of {config['vocab_size']}, and {data}")


if __name__ == "__main__":
    main()
