"""Losses of completions that were sampled from a part of the vocabulary, in a few lines of torch: all log-probabilities and entropies are
over the ids that top-k, top-p or min-p kept (`rollout.replay_sampling_mask`)."""

import math

import numpy as np
import torch

from .batch import policy_values, random_batch, recorded
from .case import Case
from .kinks import Bound, row_groups, row_mean, signs, spread, token_groups, with_row_means

LOW, HIGH = 0.2, 0.28
EDGES = [math.log(1 - LOW), math.log(1 + HIGH)]


def kept_ids(rng, batch):
    """Returns the mask [B, T, V] of kept ids: of some tokens all, of some the target alone, of most the target and a few others."""
    b, t, v = *batch.targets.shape, batch.lm_head.shape[0]
    share = np.where(rng.random((b, t, 1)) < 0.2, 1.0, np.where(rng.random((b, t, 1)) < 0.15, 0.0, 0.3))
    kept = rng.random((b, t, v)) < share
    np.put_along_axis(kept, batch.targets[..., None], True, -1)
    return kept


def replay(name, **options):
    """Returns a case of grpo with these options."""
    config = {
        "loss_type": "grpo",
        "semantics": "trl",
        "importance_sampling_level": "token",
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "beta": 0.0,
        "temperature": 0.8,
        **options,
    }
    by_row = config["importance_sampling_level"] == "sequence"

    def draw(rng):
        batch = random_batch(rng, 7, 8, int(rng.integers(8, 11)), int(rng.integers(17, 24)), masked_row=4)
        batch.sampling_mask = kept_ids(rng, batch)
        logp, _ = policy_values(batch, config)
        if by_row:
            ratios = with_row_means(rng, batch.mask, spread(rng, row_groups(batch, batch.mask), EDGES), noise=0.05)
        else:
            ratios = spread(rng, token_groups(batch, batch.mask), EDGES)
        batch.old_logp = recorded(logp - ratios)
        batch.ref_logp = recorded(logp + 0.3 * rng.standard_normal(logp.shape))
        return batch

    def kinks(batch, logp, _entropy):
        d, active = logp - batch.old_logp, batch.mask > 0
        d = row_mean(d, batch.mask) + 0 * d if by_row else d
        yield Bound("ratio, low", d, EDGES[0], active, {"A<0": signs(batch)["A<0"]})
        yield Bound("ratio, high", d, EDGES[1], active, {"A>0": signs(batch)["A>0"]})

    def of_batch(batch, logp, entropy):
        o, q, a, m = (torch.tensor(x.copy()) for x in (batch.old_logp, batch.ref_logp, batch.advantages_bt(), batch.mask))
        n = m.sum(1, keepdim=True).clamp(min=1)
        d = ((logp - o) * m).sum(1, keepdim=True) / n + 0 * logp if by_row else logp - o
        r = d.exp()
        loss = -torch.min(r * a, r.clamp(1 - LOW, 1 + HIGH) * a)
        loss = loss + config["beta"] * ((q - logp).exp() - (q - logp) - 1)
        loss = ((loss * m).sum(1) / n[:, 0]).mean()
        return loss - config.get("entropy_coef", 0.0) * (entropy * m).sum() / m.sum()

    return Case(f"replay_{name}", config, "grpo over kept ids, written in torch", draw, kinks, of_batch)


def cases():
    """Returns all cases."""
    kl = {"beta": 0.1, "kl_estimator": "k3", "use_bias_correction_kl": False}
    yield replay("grpo")
    yield replay("grpo_kl_entropy", **kl, entropy_coef=0.05)
    yield replay("grpo_sequence_kl", importance_sampling_level="sequence", **kl)
    yield replay("grpo_softcap_entropy", logit_scale=1.5, final_logit_softcapping=4.0, entropy_coef=0.05)
    yield replay("grpo_scale_logprobs", temperature_mode="scale_logprobs", entropy_coef=0.05)
