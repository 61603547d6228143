"""Losses that no system here offers as a function to call: written in torch from the papers that define them.

A loss is a function of (log-ratio, logp, old logp, advantage, configuration) that gives the term of each token, and the kinks
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
    """The same within a region that does not ask for the sign of the advantage."""
    change = (l.exp() - o.exp()).detach()
    outside = (change > c["epsilon_high"]) | (change < -c["epsilon_low"])
    return -c["adv_tau"] * a * d.exp() * ~outside + c["kl_tau"] * d**2


def cfpo(d, l, o, a, c):
    """CFPO, arXiv 2601.22801: a quadratic penalty on the ratio instead of a clip."""
    r = d.exp()
    return -(r * a - a.abs() / (2 * c["epsilon_low"]) * (r - 1) ** 2)


def moved(batch, c, logp):
    """The kinks of a trust region of probabilities."""
    change, a = np.exp(logp) - np.exp(batch.old_logp), batch.advantages_bt()
    active = batch.mask > 0
    yield Bound("probability, up", change, c["epsilon_high"], active, {"A>0": a > 0})
    yield Bound("probability, down", change, -c["epsilon_low"], active, {"A<0": a < 0})


def smooth(batch, c, logp):
    """No kinks."""
    return ()


def mean(per_token, mask, how):
    """Over the tokens of the step, or over those of a sequence and then over sequences."""
    if how == "tokens":
        return (per_token * mask).sum() / mask.sum()
    return ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def paper(name, loss, kinks, average, source, **config):
    """One case."""
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
    """All of them."""
    taus = {"adv_tau": 0.8, "kl_tau": 0.05, "epsilon_low": 0.05, "epsilon_high": 0.04}
    yield paper("prime_rl", prime_rl, moved, "tokens", "prime-rl: formula, written in torch", **taus)
    yield paper("cfpo", cfpo, smooth, "sequences", "arXiv 2601.22801: formula, written in torch")
    yield paper("ipo", ipo, moved, "tokens", "prime-rl: formula, written in torch", **taus)
