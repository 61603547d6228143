"""Makes a small chat model from scratch: problems, a BPE tokenizer, a Qwen2 decoder, and a short supervised training.

    python examples/word_problems/pretrain.py runs/word-problems

The result has Hugging Face's layout (config.json, generation_config.json, model.safetensors, tokenizer.json,
tokenizer_config.json, chat_template.jinja) and, in `data/`, train.jsonl and test.jsonl with GSM8K's two fields.

Its training answers are as incomplete as text from the web: for a problem with two steps, most stop after the first. So the
model seldom does the second step, which GRPO can make frequent from rewards alone. The same seed and number of threads
give the same folder.
"""

import argparse
import json
import pathlib
import random
import time

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

from evaluate import greedy_accuracy
from problems import distinct, problems

# Qwen2's split of text before byte-pair merges: words with their leading space, single digits, punctuation, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_tokenizer(rows, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in (END_OF_TEXT, START, END)],
        show_progress=False,
    )
    roles = ["system\nuser\nassistant\n"] * len(rows)
    tokenizer.train_from_iterator([*roles, *(f"{row['question']}\n{row['answer']}" for row in rows)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START, END],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer, options):
    ids = dict(zip((END_OF_TEXT, START, END), tokenizer.convert_tokens_to_ids([END_OF_TEXT, START, END])))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=options.hidden**-0.5 / 2,
        bos_token_id=ids[END_OF_TEXT],
        eos_token_id=ids[END],
        pad_token_id=ids[END_OF_TEXT],
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=ids[END_OF_TEXT],
        eos_token_id=[ids[END], ids[END_OF_TEXT]],
        pad_token_id=ids[END_OF_TEXT],
        max_new_tokens=48,
    )
    return model


def encode(tokenizer, row):
    """Returns (ids of the prompt, ids of the answer with its end token)."""
    chat = [{"role": "user", "content": row["question"]}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(prompt)["input_ids"], tokenizer(row["answer"] + END)["input_ids"]


def batch_of(tokenizer, rows):
    pairs = [encode(tokenizer, row) for row in rows]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), -100)
    for i, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def train(model, tokenizer, options):
    stream = problems(options.seed + 1, careless=options.careless)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.time()
    for step in range(1, options.steps + 1):
        # Rises for 50 steps, then decays linearly to a tenth.
        rate = options.learning_rate * min(step / 50, 1 - 0.9 * step / options.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = batch_of(tokenizer, [next(stream) for _ in range(options.batch)])
        # Rows are padded on the right and attention is causal, so padding does not change earlier positions.
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step} of {options.steps}: loss {loss.item():.3f}, {time.time() - start:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="output folder of the model and its data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--train-rows", type=int, default=8192)
    parser.add_argument("--test-rows", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--careless", type=float, default=0.7, help="share of two-step answers that stop after one step")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    set_seed(options.seed)
    data = options.folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    rows = distinct(problems(options.seed), options.train_rows)
    held_out = distinct(problems(options.seed, is_held_out=True), options.test_rows)
    for name, part in (("train", rows), ("test", held_out)):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    tokenizer = make_tokenizer(rows, options.vocab)
    # Saved now: padding a batch later would change tokenizer.json.
    tokenizer.save_pretrained(options.folder / "model")
    model = make_model(tokenizer, options)
    lengths = [tuple(map(len, encode(tokenizer, row))) for row in random.Random(0).sample(rows, 512)]
    prompts, answers = zip(*lengths)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, vocabulary of {len(tokenizer)}")
    print(f"tokens: prompts {min(prompts)} to {max(prompts)}, answers {min(answers)} to {max(answers)}")
    train(model, tokenizer, options)
    model.save_pretrained(options.folder / "model")
    print(f"held-out accuracy: {greedy_accuracy(model, tokenizer, held_out):.1%} of {len(held_out)} problems, greedy")
    print(f"wrote {options.folder / 'model'} and {data}")


if __name__ == "__main__":
    main()
