"""Kinks of a loss, and placement of inputs on all sides of them at a distance.

An implementation in f32 may take the other side of a kink within its rounding error, so every kink must be
at least `MARGIN` away from the inputs; and a side without tokens would be an untested branch.
"""

from dataclasses import dataclass

import numpy as np

MARGIN = 5e-3


class Rejected(Exception):
    """The drawn inputs are too close to a kink or leave a side empty, so they must be drawn again."""


@dataclass
class Bound:
    """`values` are compared with `at`. Each mask in `groups` (such as one per sign of the advantage) must have entries
    on both sides; without groups only the distance is checked."""

    name: str
    values: np.ndarray
    at: float
    where: np.ndarray  # compared entries
    groups: dict
    margin: float = MARGIN

    def check(self):
        found = self.values[self.where]
        if found.size and not np.abs(found - self.at).min() >= self.margin:
            raise Rejected(f"{self.name}: {np.abs(found - self.at).min():.1e} from {self.at}")
        for label, group in self.groups.items():
            side = self.values[self.where & group]
            if not ((side < self.at).any() and (side > self.at).any()):
                raise Rejected(f"{self.name}: one side of {self.at} is empty for {label}")


def signs(batch):
    """Returns the two signs of the advantage as groups [B, T]."""
    a = batch.advantages_bt()
    return {"A>0": a > 0, "A<0": a < 0}


def spread(rng, group, edges, reach=0.45, margin=0.03):
    """Returns one value per entry of the integer array `group`. The entries of each group cycle through the segments
    between the sorted `edges`, at a distance of `margin` from the edges; entries of group -1 get small values."""
    edges = sorted(edges)
    points = [edges[0] - reach, *edges, edges[-1] + reach] if edges else [-reach, reach]
    segments = list(zip(points[:-1], points[1:], strict=True))
    out = rng.uniform(-0.1, 0.1, group.shape)
    for g in sorted(set(group.ravel().tolist()) - {-1}):
        entries = rng.permutation(np.flatnonzero(group.ravel() == g))
        for turn, entry in enumerate(entries):
            low, high = segments[turn % len(segments)]
            room = min(margin, (high - low) / 4)
            out.flat[entry] = rng.uniform(low + room, high - room)
    return out


def token_groups(batch, mask):
    """Returns 0 for A < 0, 1 for A >= 0, -1 where the mask is 0: [B, T]."""
    return np.where(mask > 0, (batch.advantages_bt() >= 0).astype(int), -1)


def row_groups(batch, mask):
    """Returns the same per row [B], by the sign of the row's mean advantage."""
    return np.where(mask.sum(1) > 0, (batch.advantages_bt().mean(1) >= 0).astype(int), -1)


def with_row_means(rng, mask, means, noise=0.2):
    """Returns values [B, T] whose masked mean per row is `means`."""
    values = rng.normal(0, noise, mask.shape)
    n = np.maximum(mask.sum(1, keepdims=True), 1)
    return values - (values * mask).sum(1, keepdims=True) / n + means[:, None]


def row_mean(values, mask):
    """Returns the masked mean of each row, [B, 1]; 0 for an empty row."""
    return (np.where(mask > 0, values, 0)).sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1)
