"""Asks a model in Hugging Face's layout.

    python examples/word_problems/answer.py FOLDER "Ana has 12 pens and loses 5. How many are left?"
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluate import greedy_answers

if len(sys.argv) < 3:
    sys.exit(__doc__)
folder, *questions = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
for question, answer in zip(questions, greedy_answers(model, tokenizer, questions)):
    print(f"> {question}\n{answer}\n")
