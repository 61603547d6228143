"""Loads models and adapters with transformers and peft and writes their results for `grpo parity --model`. libraries.rs runs it.

python load.py '[{"model": FOLDER, "adapter": FOLDER or absent, "out": FILE}, ...]'
"""

import json
import sys
import warnings

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def load(job):
    model, report = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    if "adapter" in job:
        model = PeftModel.from_pretrained(model, job["adapter"])
    return model.eval()


def main():
    torch.set_num_threads(1)
    # peft reports an adapter that does not fit with a warning.
    warnings.simplefilter("error", UserWarning)
    # An adapter of a tied head fits; peft warns that merging it would also change the embedding.
    warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True` and a tied layer", UserWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for job in json.loads(sys.argv[1]):
        model = load(job)
        tokenizer = AutoTokenizer.from_pretrained(job.get("adapter", job["model"]))
        chat = [{"role": "user", "content": "What is 3 + 4?"}]
        words = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        ids = torch.arange(words.shape[1]) * 5 % model.config.vocab_size
        ids = torch.stack([words[0], ids])
        with torch.no_grad():
            logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        tensors = {"ids": ids, "expected.logits": logits, "expected.loss": loss.reshape(())}
        save_file(tensors, job["out"], {"format": "grpo-model/1"})
        print(f"{job['out']}: loss {loss:.4f} of {ids.shape[1]} tokens")


if __name__ == "__main__":
    main()
