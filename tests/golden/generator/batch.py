"""One small batch: hidden states, head, targets, mask, advantages, recorded log-probabilities; and the policy's scores."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Batch:
    """Legend: B sequences, T tokens, H hidden size, V vocabulary. All arrays are float64; values that the file stores as F32 are
    already rounded to f32, and `hidden` and `lm_head` are exact in bf16."""

    hidden: np.ndarray  # [B, T, H]
    lm_head: np.ndarray  # [V, H]
    targets: np.ndarray  # [B, T], int64; -100 is allowed where the mask is 0
    mask: np.ndarray  # [B, T], 0 or 1
    advantages: np.ndarray  # [B] or [B, T]
    old_logp: np.ndarray | None = None  # [B, T]
    ref_logp: np.ndarray | None = None  # [B, T]
    sampler_logp: np.ndarray | None = None  # [B, T], NaN if unknown
    temperatures: np.ndarray | None = None  # [B] or [B, T]
    sampling_mask: np.ndarray | None = None  # [B, T, V], True at kept ids

    def advantages_bt(self):
        """Returns the advantages as [B, T]."""
        a = self.advantages
        return np.broadcast_to(a[:, None] if a.ndim == 1 else a, self.mask.shape)


def f32(x):
    """Rounds to f32 and returns float64."""
    return np.asarray(x, np.float32).astype(np.float64)


def recorded(logp):
    """Returns a log-probability as a file records it: in f32, and below 0 for any requested log-ratio."""
    return f32(np.minimum(logp, -0.01))


def bf16(x):
    """Rounds to bf16 and returns float64."""
    return torch.tensor(x).to(torch.bfloat16).double().numpy()


def random_mask(rng, b, t, masked_row):
    """Returns a mask of ragged rows with holes, as tool outputs cause them; the first row is full, `masked_row` is empty."""
    mask = np.zeros((b, t))
    for row in range(b):
        length = t if row == 0 else int(rng.integers((t + 1) // 2 + 1, t + 1))
        mask[row, :length] = 1
        if row % 2 == 1:
            mask[row, int(rng.integers(1, length - 1))] = 0
    if masked_row is not None:
        mask[masked_row] = 0
    return mask


def random_batch(rng, b, t, h, v, *, masked_row=None, advantages="row", logit_std=1.6):
    """Returns a batch without recorded log-probabilities. Half of the targets are the policy's most likely token, so that some
    probabilities are large. `advantages`: one per row ("row"), or per token ("token")."""
    hidden = bf16(rng.standard_normal((b, t, h)))
    lm_head = bf16(rng.standard_normal((v, h)) * logit_std / np.sqrt(h))
    logits = hidden @ lm_head.T
    targets = np.where(rng.random((b, t)) < 0.5, logits.argmax(-1), rng.integers(0, v, (b, t)))
    mask = random_mask(rng, b, t, masked_row)
    if advantages == "row":
        signs = np.where(np.arange(b) % 2 == 0, 1.0, -1.0)
        a = f32(signs * rng.uniform(0.4, 1.6, b))
    else:
        a = f32(np.where(rng.random((b, t)) < 0.5, 1.0, -1.0) * rng.uniform(0.4, 1.6, (b, t)))
    return Batch(hidden, lm_head, targets.astype(np.int64), mask, a)


def policy(batch, config, hidden, lm_head):
    """Returns logp and entropy [B, T] of torch tensors `hidden` and `lm_head`: logits, logit scale, softcap, temperature."""
    logits = hidden @ lm_head.T * config.get("logit_scale", 1.0)
    cap = config.get("final_logit_softcapping")
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    temperature = torch.tensor(config.get("temperature", 1.0), dtype=torch.float64)
    if batch.temperatures is not None:
        temperature = torch.tensor(batch.temperatures)
        temperature = temperature[:, None] if temperature.ndim == 1 else temperature
    scale_logprobs = config.get("temperature_mode", "scale_logits") == "scale_logprobs"
    logits = logits if scale_logprobs else logits / temperature[..., None]
    if batch.sampling_mask is not None:
        logits = logits.masked_fill(~torch.tensor(batch.sampling_mask), -torch.inf)
    logprobs = torch.log_softmax(logits, -1)
    # Of a masked entry, the product would be 0 x inf.
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
    chosen = torch.tensor(np.maximum(batch.targets, 0))[..., None]
    logp = logprobs.gather(-1, chosen)[..., 0]
    return logp / temperature if scale_logprobs else logp, entropy


def policy_values(batch, config):
    """Returns logp and entropy as arrays."""
    with torch.no_grad():
        logp, entropy = policy(batch, config, torch.tensor(batch.hidden), torch.tensor(batch.lm_head))
    return logp.numpy(), entropy.numpy()
