"""Steps of optimizers in f64, by torch: `pip install torch==2.13.0; python optimizers.py` writes optimizers.json.

Vectors have no weight decay, as norms and biases here.
"""

import json
import math
import pathlib

import torch

# `torch.optim.Muon` orthogonalises in bf16. Here its own code runs in f64, too.
torch.Tensor.bfloat16 = torch.Tensor.clone

STEPS, LR = 4, 0.02
SHAPES = {"vector": [12], "wide": [6, 10], "tall": [10, 6]}
CASES = [
    ({"name": "adamw", "weight_decay": 0.1, "adam_beta2": 0.96875}, lambda p, decay: torch.optim.AdamW([p], lr=LR, betas=(0.9, 0.96875), eps=1e-8, weight_decay=decay)),
    ({"name": "sgd", "weight_decay": 0.1}, lambda p, decay: torch.optim.SGD([p], lr=LR, momentum=0.9, weight_decay=decay)),
    ({"name": "muon", "weight_decay": 0.1}, lambda p, decay: torch.optim.Muon([p], lr=LR, weight_decay=decay, adjust_lr_fn="match_rms_adamw")),
    ({"name": "muon", "weight_decay": 0.0, "momentum": 0.8, "adjust_lr_fn": "original"}, lambda p, decay: torch.optim.Muon([p], lr=LR, weight_decay=decay, momentum=0.8)),
    ({"name": "sgd", "weight_decay": 0.0, "momentum": 0.5}, lambda p, decay: torch.optim.SGD([p], lr=LR, momentum=0.5, weight_decay=decay)),
]


def numbers(shape, step):
    i = torch.arange(math.prod(shape), dtype=torch.int64)
    return (((i * 40503 + step * 30011) % 4096 - 2048).double() / 2048).reshape(shape)


cases = []
for settings, create in CASES:
    for shape in SHAPES.values():
        is_muon = settings["name"] == "muon"
        if is_muon and len(shape) == 1:
            continue
        parameter = torch.nn.Parameter(numbers(shape, 99))
        optimizer = create(parameter, settings["weight_decay"] if len(shape) > 1 else 0.0)
        gradients, weights = [], []
        for step in range(1, STEPS + 1):
            parameter.grad = numbers(shape, step)
            optimizer.step()
            gradients.append(parameter.grad.flatten().tolist())
            weights.append(parameter.detach().flatten().tolist())
        state = {name: value.flatten().tolist() for name, value in optimizer.state[parameter].items() if name != "step"}
        case = {"settings": settings | {"max_grad_norm": 0.0}, "learning_rate": LR, "shape": shape}
        if is_muon:
            # The iteration multiplies rounding errors along small singular values by up to 3.4445^5.
            case["bound"] = 2e-5
        cases.append(case | {"weight": numbers(shape, 99).flatten().tolist(), "gradients": gradients, "weights": weights, "state": state})
text = ",\n".join(json.dumps(case) for case in cases)
pathlib.Path(__file__).with_suffix(".json").write_text(f"[\n{text}\n]\n")
