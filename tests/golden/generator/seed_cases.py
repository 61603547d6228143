"""MLLM-JAX, the predecessor of this project: its kernels as hand-derived closed forms in torch.

logp = log_softmax(logits)[y] / temperature, entropy of softmax(logits)
L_t  = -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A),  r = exp(logp - old); on-policy old = sg(logp)
loss = sum(mask (L + beta k3)) / sum(mask)
"""

import math

import torch

from . import trl_system
from .batch import policy_values, random_batch, recorded
from .case import Case
from .kinks import spread, token_groups

SOURCE = "MLLM-JAX feat-kernel grpo_loss_pallas: hand-derived closed form"


def loss(batch, config, logp, _entropy):
    """Computes the closed form above."""
    mask, a = torch.tensor(batch.mask), torch.tensor(batch.advantages_bt().copy())
    old = logp.detach() if batch.old_logp is None else torch.tensor(batch.old_logp)
    ratio = torch.exp(logp - old)
    clipped = ratio.clamp(1 - config["epsilon_low"], 1 + config["epsilon_high"])
    per_token = -torch.minimum(ratio * a, clipped * a)
    if config["beta"] != 0.0:
        d = torch.tensor(batch.ref_logp) - logp
        per_token = per_token + config["beta"] * (d.exp() - d - 1)
    return (per_token * mask).sum() / mask.sum()


def draw(rng, config, on_policy):
    """Returns a batch with a masked row."""
    batch = random_batch(rng, 4, 8, int(rng.integers(8, 11)), int(rng.integers(17, 24)), masked_row=2)
    logp, _ = policy_values(batch, config)
    if not on_policy:
        edges = [math.log(1 - config["epsilon_low"]), math.log(1 + config["epsilon_high"])]
        batch.old_logp = recorded(logp - spread(rng, token_groups(batch, batch.mask), edges))
    if config["beta"] != 0.0:
        batch.ref_logp = recorded(logp + rng.normal(0, 0.5, logp.shape))
    return batch


def seed(name, on_policy=False, **config):
    """Returns one case."""
    config = {
        "semantics": "mllm_jax",
        "loss_type": "bnpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.3,
        "beta": 0.0,
        "temperature": 0.7,
        "temperature_mode": "scale_logprobs",
        **config,
    }
    one_sided = ("low", "high") if on_policy else ()
    return Case(
        f"seed_{name}",
        config,
        SOURCE,
        draw=lambda rng: draw(rng, config, on_policy),
        bounds=lambda batch, logp, entropy: trl_system.bounds(batch, config, logp, entropy, one_sided=one_sided),
        loss=lambda batch, logp, entropy: loss(batch, config, logp, entropy),
    )


def cases():
    """Returns all cases."""
    yield seed("asymmetric")
    yield seed("on_policy_t13", on_policy=True, temperature=1.3)
    yield seed("kl", beta=0.04, kl_estimator="k3", use_bias_correction_kl=False)
