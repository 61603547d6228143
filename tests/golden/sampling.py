"""Writes sampling.json: distributions computed by transformers' own logits processors from fixed logits.

    pip install torch transformers==5.23.0
    python tests/golden/sampling.py

The processors are applied in the order of `GenerationMixin._get_logits_processor`: repetition penalty,
temperature, top_k, top_p, min_p.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

OUT = Path(__file__).with_suffix(".json")


def processors(case):
    """Returns the processors that `_get_logits_processor` creates for the same options."""
    chosen = LogitsProcessorList()
    if case["repetition_penalty"] not in (None, 1.0):
        chosen.append(RepetitionPenaltyLogitsProcessor(penalty=case["repetition_penalty"]))
    if case["temperature"] != 1.0:
        chosen.append(TemperatureLogitsWarper(case["temperature"]))
    if case["top_k"] not in (None, 0):
        chosen.append(TopKLogitsWarper(top_k=case["top_k"]))
    if case["top_p"] is not None and case["top_p"] < 1.0:
        chosen.append(TopPLogitsWarper(top_p=case["top_p"]))
    if case["min_p"] is not None:
        chosen.append(MinPLogitsWarper(min_p=case["min_p"]))
    return chosen


def case(name, logits, seen=(), **options):
    options = {"repetition_penalty": None, "top_k": None, "top_p": None, "min_p": None, "temperature": 1.0} | options
    made = {"name": name, "logits": [float(x) for x in np.float32(logits)], "seen": sorted(set(seen)), **options}
    scores = torch.tensor([made["logits"]], dtype=torch.float32)
    # Without a prompt `ids` is empty, and no token counts as repeated.
    ids = torch.tensor([list(seen)], dtype=torch.long).reshape(1, len(seen))
    left = processors(made)(ids, scores)
    made["probabilities"] = [float(f"{p:.9g}") for p in torch.softmax(left.double(), -1)[0].tolist()]
    return made


def cases():
    generator = np.random.default_rng(7)
    ten = generator.normal(0.0, 2.0, 10)
    wide = generator.normal(0.0, 3.0, 40)
    yield case("nothing", ten)
    yield case("temperature", ten, temperature=0.6)
    for k in (0, 1, 3, 9, 10, 100):
        yield case(f"top_k {k}", ten, top_k=k)
    for p in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
        yield case(f"top_p {p}", wide, top_p=p)
    for p in (0.0, 0.05, 0.3, 1.0):
        yield case(f"min_p {p}", wide, min_p=p)
    for penalty in (0.7, 1.0, 1.1, 2.0):
        yield case(f"repetition_penalty {penalty}", ten, seen=[1, 4, 4, 7, 9], repetition_penalty=penalty)
    # Equal logits at every threshold.
    equal = [1.0, 2.0, 2.0, 0.0, 2.0, -1.0, 2.0, 1.0]
    yield case("equal, top_k in the middle of them", equal, top_k=2)
    yield case("equal, top_k at their end", equal, top_k=4)
    yield case("equal, top_p in the middle of them", [0.0, 0.0, 0.0, 0.0], top_p=0.5)
    yield case("equal, top_p in the middle of many", [2.0] * 8, top_p=0.3)
    yield case("equal, min_p", equal, min_p=1.0)
    yield case("all", wide, seen=[0, 3, 5, 8, 13], repetition_penalty=1.3, temperature=0.7, top_k=20, top_p=0.8, min_p=0.1)
    yield case("all but top_k", wide, seen=[2, 30], repetition_penalty=1.05, temperature=1.4, top_p=0.95, min_p=0.02)
    yield case("Qwen2.5-Instruct", wide, seen=range(10), repetition_penalty=1.1, temperature=0.7, top_k=20, top_p=0.8)
    # top_p applies to the tokens that top_k keeps, min_p to the tokens that both keep.
    yield case("top_k before top_p", [3.0, 2.9, 2.8, 2.7, 2.6, 2.5], top_k=3, top_p=0.6)
    yield case("a token of no probability", [1.0, float("-inf"), 0.5, 0.0], top_p=0.9, min_p=0.01)


def main():
    rows = [row for row in cases()]
    for row in rows:
        row["logits"] = [x if np.isfinite(x) else -3.0e38 for x in row["logits"]]
    OUT.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
