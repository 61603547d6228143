"""Writes mismatch.json: metrics of verl's own code for samplers that differ from the policy, in float64.

    pip install torch verl==0.9.1
    python tests/golden/mismatch.py
"""

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import torch
from generator.verl_system import compute_rollout_correction_and_rejection_mask

OUT = Path(__file__).with_suffix(".json")

SETTINGS = [
    {"rollout_is": "token", "rollout_is_threshold": 2.0},
    {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
    {"rollout_is": "sequence", "rollout_is_threshold": 3.0},
    {"rollout_is": "sequence", "rollout_is_threshold": "0.25_4.0"},
    {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"},
    {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.08"},
]


def case(seed, setting):
    random = np.random.default_rng(seed)
    rows, width = 5, 6
    single = lambda values: np.asarray(values, dtype=np.float32).astype(np.float64)
    old = single(random.uniform(-4, -0.05, (rows, width)))
    sampler = single(old + random.normal(0, 0.5, (rows, width)))
    mask = np.zeros((rows, width))
    for row, length in enumerate(random.integers(1, width + 1, rows)):
        mask[row, :length] = 1
    old, sampler, mask = (torch.tensor(values) for values in (old, sampler, mask))
    _, _, metrics = compute_rollout_correction_and_rejection_mask(old, sampler, mask, **setting)
    return {
        "config": setting,
        "shape": [rows, width],
        "old_logp": old.flatten().tolist(),
        "sampler_logp": sampler.flatten().tolist(),
        "mask": mask.flatten().tolist(),
        "expected": {name: float(f"{value:.12g}") for name, value in sorted(metrics.items())},
    }


def main():
    versions = {name: importlib.metadata.version(name) for name in ("torch", "verl")}
    cases = [case(seed, setting) for seed, setting in enumerate(SETTINGS)]
    OUT.write_text(json.dumps({"versions": versions, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
