"""Measures how many answers of a model in Hugging Face's layout are right.

    python examples/word_problems/evaluate.py FOLDER ROWS.jsonl    # greedy, by transformers
"""

import json
import pathlib
import sys

import torch

from problems import is_correct


@torch.no_grad()
def greedy_answers(model, tokenizer, questions, batch_size=256, max_new_tokens=48):
    """Returns the greedy completions of `questions`, as text without special tokens."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    was_training = model.training
    model.eval()
    answers = []
    for i in range(0, len(prompts), batch_size):
        inputs = tokenizer(prompts[i : i + batch_size], padding=True, padding_side="left", return_tensors="pt")
        ids = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        answers += tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(was_training)
    return answers


def greedy_accuracy(model, tokenizer, rows, **options):
    """Returns the share of `rows` with a right answer."""
    answers = greedy_answers(model, tokenizer, [row["question"] for row in rows], **options)
    return sum(is_correct(answer, row["answer"]) for answer, row in zip(answers, rows)) / len(rows)


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, rows = sys.argv[1], [json.loads(line) for line in pathlib.Path(sys.argv[2]).read_text().splitlines()]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    print(f"{folder}: {greedy_accuracy(model, tokenizer, rows):.1%} of {len(rows)}")
