"""A case: its name, the loss configuration, the generator of its batch, and the function that computes the expected values."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version

import numpy as np
import torch

from . import batch as batches
from .kinks import Rejected

ATTEMPTS = 2000


def made_with(package, function):
    """Returns the `source` of a file: package, installed version, function."""
    return f"{package} {version(package)} {function}"


@dataclass
class Case:
    """`draw(rng)` returns a batch, `bounds(batch, logp, entropy)` the kinks of its loss, and `loss(batch, logp, entropy)`
    is the system's own function on torch tensors with a graph."""

    name: str
    config: dict
    source: str
    draw: Callable
    bounds: Callable
    loss: Callable
    zero_gradient: bool = False  # the gradient must be exactly zero


@dataclass
class Golden:
    """A case with its values."""

    case: Case
    batch: batches.Batch
    expected: dict = field(default_factory=dict)


def evaluate(case):
    """Draws inputs until they are away from the kinks, then computes loss and gradients in float64."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    for _ in range(ATTEMPTS):
        try:
            batch = case.draw(rng)
            logp, entropy = batches.policy_values(batch, case.config)
            for bound in case.bounds(batch, logp, entropy):
                bound.check()
            break
        except Rejected as reason:
            last = reason
    else:
        raise RuntimeError(f"{case.name}: no inputs away from the kinks in {ATTEMPTS} attempts; the last: {last}")

    hidden = torch.tensor(batch.hidden, requires_grad=True)
    lm_head = torch.tensor(batch.lm_head, requires_grad=True)
    logp, entropy = batches.policy(batch, case.config, hidden, lm_head)
    loss = case.loss(batch, logp, entropy)
    loss.backward()
    expected = {
        "loss": loss,
        "logp": logp,
        "entropy": entropy,
        "grad_hidden": hidden.grad,
        "grad_lm_head": lm_head.grad,
    }
    expected = {name: value.detach().numpy() for name, value in expected.items()}
    for name, value in expected.items():
        assert value.dtype == np.float64, f"{case.name}: {name} is {value.dtype}"
        assert np.isfinite(value).all(), f"{case.name}: {name} is not finite"
    largest = [np.abs(expected[name]).max() for name in ("grad_hidden", "grad_lm_head")]
    assert max(largest) == 0 if case.zero_gradient else min(largest) > 1e-3, f"{case.name}: gradients {largest}"
    return Golden(case, batch, expected)
