"""Losses that no installable system offers as a function, written in torch from the papers that define them.

A loss is a function of (log-ratio, logp, old logp, advantage, configuration) that returns the term of each token, with the kinks
of that term. Old log-probabilities lie on both sides of them, for both signs of advantage.
"""

import numpy as np
import torch

from .batch import policy_values, random_batch, recorded
from .case import Case
from .kinks import Bound, spread, token_groups


def prime_rl(d, l, o, a, c):
    """prime-rl: -keep adv_tau A r + kl_tau d^2, within a trust region of probabilities on the side of the advantage."""
    change = (l.exp() - o.exp()).detach()
    outside = torch.where(a > 0, change > c["epsilon_high"], change < -c["epsilon_low"])
    return -c["adv_tau"] * a * d.exp() * ~outside + c["kl_tau"] * d**2


def ipo(d, l, o, a, c):
    """prime-rl's ipo: the same with a trust region for both signs of the advantage."""
    change = (l.exp() - o.exp()).detach()
    outside = (change > c["epsilon_high"]) | (change < -c["epsilon_low"])
    return -c["adv_tau"] * a * d.exp() * ~outside + c["kl_tau"] * d**2


def cfpo(d, l, o, a, c):
    """CFPO, arXiv 2601.22801: a quadratic penalty on the ratio instead of a clip."""
    r = d.exp()
    return -(r * a - a.abs() / (2 * c["epsilon_low"]) * (r - 1) ** 2)


def bernoulli_kl(s, l):
    """Returns the KL divergence of "this token or another" between log-probabilities `s` and `l`, as torch tensors."""
    p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (s, l))
    return p * (p.log() - q.log()) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))


def sequence_kl(batch, logp):
    """Returns the mean divergence over the active tokens of each sequence [B]; the old log-probability replaces a missing one of the sampler."""
    s, l, mask = (torch.tensor(x.copy()) for x in (behaviour(batch), logp, batch.mask))
    divergence = torch.where(mask > 0, bernoulli_kl(s, l), 0.0)
    return (divergence.sum(1) / mask.sum(1).clamp(min=1)).clamp(min=0)


def behaviour(batch):
    s = batch.old_logp if batch.sampler_logp is None else batch.sampler_logp
    return np.where(np.isnan(s), batch.old_logp, s)


def flash_reinforce(name, with_sampler):
    """FlashREINFORCE (2026): -w A logp per token, w the detached ratio to the sampler, 0 for a sequence that has moved too far;
    mean over the tokens of a sequence, then over all sequences, including rejected and empty ones."""
    threshold = 0.012
    config = {"loss_type": "flash_reinforce", "semantics": "trl", "beta": 0.0, "sequence_kl_threshold": threshold}

    def draw(rng):
        batch = random_batch(rng, 7, 8, int(rng.integers(8, 11)), int(rng.integers(17, 24)), masked_row=4)
        logp, _ = policy_values(batch, config)
        # Pairs of rows alternate between close to the policy and far from it, with both signs of the advantage.
        size = np.where(np.arange(7) // 2 % 2 == 0, 0.1, 0.9)[:, None]
        batch.old_logp = recorded(logp - size * rng.uniform(0.5, 1, logp.shape) * rng.choice([-1, 1], logp.shape))
        if with_sampler:
            near = recorded(batch.old_logp - 0.1 * rng.uniform(-1, 1, logp.shape))
            batch.sampler_logp = np.where(rng.random(logp.shape) < 0.2, np.nan, near)
        return batch

    def kinks(batch, logp, _entropy):
        kl, a = sequence_kl(batch, logp).numpy(), batch.advantages
        yield Bound("sequence_kl", kl, threshold, batch.mask.sum(1) > 0, {"A>0": a > 0, "A<0": a < 0}, margin=1e-3)

    def of_batch(batch, logp, _entropy):
        s, a, mask = (torch.tensor(x.copy()) for x in (behaviour(batch), batch.advantages_bt(), batch.mask))
        admitted = sequence_kl(batch, logp.detach().numpy()) <= threshold
        weight = torch.where((mask > 0) & admitted[:, None], (logp.detach() - s).exp(), 0.0)
        return mean(-weight * a * logp, mask, "sequences")

    source = "FlashREINFORCE (2026) and TRL's experimental.flash_reinforce: formula, written in torch"
    return Case(f"paper_{name}", config, source, draw, kinks, of_batch)


def moved(batch, c, logp):
    """Returns the kinks of a trust region of probabilities."""
    change, a = np.exp(logp) - np.exp(batch.old_logp), batch.advantages_bt()
    active = batch.mask > 0
    yield Bound("probability, up", change, c["epsilon_high"], active, {"A>0": a > 0})
    yield Bound("probability, down", change, -c["epsilon_low"], active, {"A<0": a < 0})


def smooth(batch, c, logp):
    """Returns no kinks."""
    return ()


def mean(per_token, mask, how):
    """Averages over the tokens of the step, or over the tokens of a sequence and then over sequences."""
    if how == "tokens":
        return (per_token * mask).sum() / mask.sum()
    return ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def paper(name, loss, kinks, average, source, **config):
    """Returns one case."""
    config = {"loss_type": loss.__name__, "semantics": "trl", "epsilon_low": 0.2, "beta": 0.0, **config}

    def draw(rng):
        batch = random_batch(rng, 4, 8, int(rng.integers(8, 11)), int(rng.integers(17, 24)), masked_row=2)
        logp, _ = policy_values(batch, config)
        batch.old_logp = recorded(logp - spread(rng, token_groups(batch, batch.mask), [-0.2, 0.2]))
        return batch

    def of_batch(batch, logp, _entropy):
        o, a, mask = (torch.tensor(x.copy()) for x in (batch.old_logp, batch.advantages_bt(), batch.mask))
        return mean(loss(logp - o, logp, o, a, config), mask, average)

    return Case(f"paper_{name}", config, source, draw, lambda batch, logp, _: kinks(batch, config, logp), of_batch)


def cases():
    """Returns all cases."""
    taus = {"adv_tau": 0.8, "kl_tau": 0.05, "epsilon_low": 0.05, "epsilon_high": 0.04}
    yield paper("prime_rl", prime_rl, moved, "tokens", "prime-rl: formula, written in torch", **taus)
    yield paper("cfpo", cfpo, smooth, "sequences", "arXiv 2601.22801: formula, written in torch")
    yield flash_reinforce("flash_reinforce", False)
    yield flash_reinforce("flash_reinforce_sampler", True)
    yield paper("ipo", ipo, moved, "tokens", "prime-rl: formula, written in torch", **taus)
