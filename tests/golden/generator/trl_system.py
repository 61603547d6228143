"""TRL's own loss functions, called on a minimal stub of the trainer, and their kinks."""

import math
from collections import defaultdict
from contextlib import contextmanager
from types import MethodType, SimpleNamespace

import numpy as np
import torch
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

from .case import made_with
from .kinks import Bound, row_mean, signs

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def source(config):
    """Returns the function that evaluates a configuration."""
    trainer = "experimental.gmpo.GMPOTrainer" if config["loss_type"] == "geo_mean" else "GRPOTrainer"
    return made_with("trl", f"{trainer}._compute_loss")


@contextmanager
def float64():
    """Python scalars in TRL's `torch.where(A > 0, 1.0, 1.05)` take the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def effective_mask(batch, config):
    """`_generate_and_score_completions` empties truncated rows before anything is counted."""
    mask = batch.mask.copy()
    if config.get("mask_truncated_completions"):
        mask[config["truncated_rows"]] = 0
    return mask


def corrects_sampler(batch, config):
    """Returns True if the ratio of old policy to sampler applies."""
    return batch.sampler_logp is not None and config.get("vllm_importance_sampling_correction", True)


def sampler_ratio(config, old_logp, sampler_logp, mask):
    """Computes `vllm_importance_sampling_ratio` as in TRL 1.16 `GRPOTrainer._generate_and_score_completions`, whose lines cannot
    be called alone. [B, T], or [B, 1] in the sequence modes."""
    mode = config["vllm_importance_sampling_mode"]
    low, high = config.get("vllm_importance_sampling_clip_min"), config.get("vllm_importance_sampling_clip_max")
    logps_diff = torch.nan_to_num((old_logp - sampler_logp) * mask, nan=0.0)
    if mode in ("sequence_mask", "sequence_truncate"):
        logps_diff = logps_diff.sum(dim=-1, keepdim=True)
    ratio = torch.exp(logps_diff)
    if mode in ("sequence_truncate", "token_truncate"):
        return torch.clamp(ratio, min=low, max=high)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return ratio.masked_fill((ratio < low) | (ratio > high), value=0.0)


def trainer(batch, config, logp, entropy):
    """The attributes of the trainer that `_compute_loss` reads."""
    get = config.get
    stand_in = SimpleNamespace(
        loss_type=config["loss_type"],
        importance_sampling_level=get("importance_sampling_level", "token"),
        epsilon_low=get("epsilon_low"),
        epsilon_high=get("epsilon_high"),
        beta=get("beta", 0.0),
        top_entropy_quantile=get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=get("off_policy_mask_threshold"),
        max_completion_length=get("max_completion_length"),
        use_vllm=batch.sampler_logp is not None,
        vllm_importance_sampling_correction=corrects_sampler(batch, config),
        current_gradient_accumulation_steps=get("gradient_accumulation_steps", 1),
        entropy_coef=get("entropy_coef", 0.0),
        _entropy_bonus_enabled=get("entropy_coef", 0.0) != 0.0,
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=get("delta"),
            use_bias_correction_kl=get("use_bias_correction_kl", True),
            steps_per_generation=get("steps_per_generation", get("gradient_accumulation_steps", 1)),
            sapo_temperature_pos=get("sapo_temperature_pos", 1.0),
            sapo_temperature_neg=get("sapo_temperature_neg", 1.05),
            vespo_k_pos=get("vespo_k_pos", 2.0),
            vespo_lambda_pos=get("vespo_lambda_pos", 3.0),
            vespo_k_neg=get("vespo_k_neg", 3.0),
            vespo_lambda_neg=get("vespo_lambda_neg", 2.0),
        ),
        # With one process, gathering and reducing have no effect.
        accelerator=SimpleNamespace(
            num_processes=get("num_processes", 1),
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **_: x,
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    stand_in.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, stand_in)
    return stand_in


def loss(batch, config, logp, entropy):
    """Calls `_compute_loss` of the trainer with this loss_type."""
    with float64():
        mask = torch.tensor(effective_mask(batch, config))
        b, t = mask.shape
        num_items = config.get("num_items_in_batch")
        inputs = {
            "prompt_ids": torch.zeros(b, 1, dtype=torch.int64),
            "prompt_mask": torch.ones(b, 1),
            "completion_ids": torch.tensor(batch.targets),
            # Holes are tool outputs, which TRL stores in a separate mask and multiplies.
            "completion_mask": torch.ones(b, t),
            "tool_mask": mask,
            "advantages": torch.tensor(batch.advantages),
            "num_items_in_batch": mask.sum() if num_items is None else torch.tensor(float(num_items)),
        }
        old = logp.detach() if batch.old_logp is None else torch.tensor(batch.old_logp)
        if batch.old_logp is not None:
            inputs["old_per_token_logps"] = old
        if batch.ref_logp is not None:
            inputs["ref_per_token_logps"] = torch.tensor(batch.ref_logp)
        if batch.sampler_logp is not None:
            inputs["sampling_per_token_logps"] = torch.tensor(batch.sampler_logp)
            if corrects_sampler(batch, config):
                inputs["old_per_token_logps"] = old
                ratio = sampler_ratio(config, old, inputs["sampling_per_token_logps"], mask)
                inputs["importance_sampling_ratio"] = ratio
        system = GMPOTrainer if config["loss_type"] == "geo_mean" else GRPOTrainer
        stand_in = trainer(batch, config, logp, entropy)
        return system._compute_loss(stand_in, stand_in.model, inputs)


def bounds(batch, config, logp, entropy, hits=(), one_sided=()):
    """Returns the kinks of `loss`. `hits`: optional kinks that must have values on both sides; `one_sided`: usual kinks that
    need not (for example because the case is on-policy)."""
    mask = effective_mask(batch, config)
    active, found = mask > 0, []
    old = logp if batch.old_logp is None else batch.old_logp
    log_ratio = logp - old
    loss_type, by_sign = config["loss_type"], signs(batch)
    everyone = {"any A": np.ones_like(active)}
    weight = np.ones_like(mask)
    if corrects_sampler(batch, config):
        weight = weight * sampler_ratio(config, *map(torch.tensor, (old, batch.sampler_logp, mask))).numpy()

    def bound(name, values, at, groups, needed=True):
        needed = name in hits or (needed and name not in one_sided)
        values = np.broadcast_to(values, mask.shape)
        # A token that the sampler's mask drops tests no side of a clip.
        groups = {k: g & (weight > 0) if name in ("low", "high", "delta") else g for k, g in groups.items()}
        found.append(Bound(f"{name} {at}", values, at, active, groups if needed else {}))

    sequence = config.get("importance_sampling_level", "token") == "sequence"
    ratio = np.exp(row_mean(log_ratio, mask)) if sequence else np.exp(log_ratio)
    if loss_type in CLIPPED:
        bound("low", ratio, 1 - config["epsilon_low"], by_sign)
        bound("high", ratio, 1 + config["epsilon_high"], by_sign)
        if config.get("delta") is not None:
            bound("delta", ratio, config["delta"], by_sign)
    elif loss_type == "cispo":
        bound("high", ratio, config["epsilon_high"], by_sign)
    elif loss_type == "geo_mean":
        bound("low", log_ratio, -config["epsilon_low"], by_sign)
        bound("high", log_ratio, config["epsilon_high"], by_sign)
    elif loss_type == "vespo":
        bound("guard low", log_ratio, -20.0, everyone, needed=False)
        bound("guard high", log_ratio, 20.0, everyone, needed=False)
        log_w = (np.clip(log_ratio, -20, 20) * mask).sum(1, keepdims=True)
        log_w += np.log(np.maximum(weight, 1e-8)).sum(1, keepdims=True)
        for at in (np.log(1e-8), 20.0):
            bound("weight", log_w, at, everyone, needed=False)

    if corrects_sampler(batch, config):
        difference = np.nan_to_num((old - batch.sampler_logp) * mask, nan=0.0)
        by_row = config["vllm_importance_sampling_mode"].startswith("sequence")
        ratio = np.exp(difference.sum(1, keepdims=True) if by_row else difference)
        for end in ("clip_min", "clip_max"):
            if config.get(f"vllm_importance_sampling_{end}") is not None:
                bound(end, ratio, config[f"vllm_importance_sampling_{end}"], everyone)
    threshold = config.get("off_policy_mask_threshold")
    if threshold is not None:
        behind = old if batch.sampler_logp is None else batch.sampler_logp
        drift = row_mean(np.nan_to_num(behind - logp, nan=0.0), mask)
        bound("off-policy", drift, threshold, by_sign)
    if config.get("top_entropy_quantile", 1.0) < 1.0:
        at = np.quantile(entropy[active], 1 - config["top_entropy_quantile"])
        bound("entropy", entropy, at, by_sign)
    return found
