"""Writes value_loss.json: verl's `compute_value_loss` and its gradient by autograd on small inputs, in float64.

    pip install torch && pip install verl==0.9.1 (see README.md)
    python tests/golden/value_loss.py

verl's formula is a copy of TRL's PPOTrainer's; TRL 1.16 no longer has a PPOTrainer.
"""

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import torch

from generator import verl_system  # noqa: F401  (stands in for ray)
from verl.trainer.ppo import core_algos

OUT = Path(__file__).with_suffix(".json")
NO_CLIP = 1e30


def flat(tensor):
    return [float(f"{x:.10g}") for x in tensor.detach().flatten().tolist()]


def case(name, seed, cliprange, mode, spread=0.5, shape=(4, 5)):
    generator = np.random.default_rng(seed)

    def draw(scale):
        values = generator.normal(0.0, scale, shape).astype(np.float32)
        return torch.tensor(values.astype(np.float64))

    old = draw(1.0)
    # Values on both sides of the clip, returns on both sides of the values.
    values = (old + draw(spread)).float().double().requires_grad_()
    returns = old + draw(1.0)
    returns = returns.float().double()
    mask = torch.ones(shape, dtype=torch.float64)
    for row, length in enumerate(generator.integers(1, shape[1] + 1, shape[0])):
        mask[row, length:] = 0
    clip = NO_CLIP if cliprange is None else cliprange
    loss, clipped = core_algos.compute_value_loss(values, returns, old, mask, clip, loss_agg_mode=mode)
    loss.backward()
    active = mask.bool()
    errors, held = (returns - old)[active], returns[active]
    return {
        "name": name,
        "cliprange_value": cliprange,
        "loss_agg_mode": mode,
        "shape": list(shape),
        "mask": flat(mask),
        "values": flat(values),
        "old_values": flat(old),
        "returns": flat(returns),
        "loss": float(f"{loss.item():.10g}"),
        "clip_ratio": float(f"{clipped.item():.10g}"),
        "gradient": flat(values.grad),
        # verl/trainer/ppo/metric_utils.py::compute_data_metrics, critic/vf_explained_var.
        "explained_variance": float(f"{(1.0 - torch.var(errors) / (torch.var(held) + 1e-5)).item():.10g}"),
    }


def main():
    cases = []
    for seed, mode in enumerate(
        ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
    ):
        cases.append(case(f"{mode}, clipped at 0.2", seed, 0.2, mode))
    cases.append(case("clipped at 0.5", 11, 0.5, "token-mean"))
    cases.append(case("hardly clipped", 12, 0.2, "token-mean", spread=0.1))
    cases.append(case("no clip", 13, None, "token-mean"))
    made = {"verl": importlib.metadata.version("verl"), "torch": torch.__version__}
    rows = ",\n".join(json.dumps(row) for row in cases)
    OUT.write_text(f'{{"versions": {json.dumps(made)},\n"cases": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
