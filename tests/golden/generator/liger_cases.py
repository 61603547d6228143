"""Liger 0.8.5: the loss types of its fused GRPO kernel. The kernel casts all logits and log-probabilities to
float32, so the expected values are computed by its `ppo_loss_fn` on float64 log-probabilities. The whole kernel in f32
must agree with them, and so must TRL's function: the cases have the same meaning in both."""

import numpy as np
import torch
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction, LigerFusedLinearGRPOLoss

from . import trl_system
from .batch import policy_values
from .case import Case, made_with
from .trl_cases import BY_ROW, DAPO, SEQUENCE, defaults, draw, kl, sampler

SAME_NAMES = (
    "epsilon_low",
    "epsilon_high",
    "beta",
    "loss_type",
    "max_completion_length",
    "importance_sampling_level",
    "delta",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)


def arguments(config):
    """Returns Liger's arguments, which have TRL's names."""
    given = {name: config[name] for name in SAME_NAMES if name in config}
    return given | {"use_bias_correction_kl": config.get("use_bias_correction_kl", False)}


def correction(batch, config, logp, mask):
    """Returns the sampler's ratio, which Liger takes as an argument and TRL computes."""
    if not trl_system.corrects_sampler(batch, config):
        return None
    return trl_system.sampler_ratio(config, torch.tensor(batch.old_logp), torch.tensor(batch.sampler_logp), mask)


def optional(array, dtype=torch.float64):
    return None if array is None else torch.tensor(array, dtype=dtype)


def loss(batch, config, logp, _entropy):
    """Evaluates `ppo_loss_fn` on the whole batch as one chunk, in float64."""
    with trl_system.float64():
        mask = torch.tensor(batch.mask)
        value, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(
            logp,
            mask,
            torch.tensor(batch.advantages),
            mask,
            optional(batch.ref_logp),
            optional(batch.old_logp),
            vllm_is_ratio=correction(batch, config, logp, mask),
            num_items_in_batch=config.get("num_items_in_batch"),
            **arguments(config),
        )
    check(batch, config, logp.detach(), value.detach())
    return value


def check(batch, config, logp, value):
    """Checks the fused kernel in float32 and TRL against the case."""
    single = {"dtype": torch.float32}
    module = LigerFusedLinearGRPOLoss(
        compiled=False, use_ref_model=config["beta"] != 0.0, temperature=config["temperature"], **arguments(config)
    )
    mask = torch.tensor(batch.mask, **single)
    ratio = correction(batch, config, logp, torch.tensor(batch.mask))
    fused, _ = module(
        torch.tensor(batch.hidden, **single),
        torch.tensor(batch.lm_head, **single),
        torch.tensor(batch.targets),
        mask,
        torch.tensor(batch.advantages, **single),
        old_per_token_logps=optional(batch.old_logp, **single),
        ref_per_token_logps=optional(batch.ref_logp, **single),
        vllm_is_ratio=None if ratio is None else ratio.float(),
        num_items_in_batch=config.get("num_items_in_batch"),
    )
    scale = max(1.0, abs(value.item()))
    assert abs(fused.item() - value.item()) < 1e-5 * scale, f"fused kernel: {fused.item()}, ppo_loss_fn: {value.item()}"
    trl = trl_system.loss(batch, config, logp, torch.tensor(policy_values(batch, config)[1]))
    assert np.isclose(trl.item(), value.item(), rtol=1e-12), f"TRL: {trl.item()}, Liger: {value.item()}"


def liger(name, loss_type, config=None, **options):
    """Returns one case; options as in `trl_cases.trl`."""
    config = defaults(loss_type) | (config or {})
    return Case(
        f"liger_{name}",
        config,
        made_with("liger-kernel", "LigerFusedLinearGRPOFunction.ppo_loss_fn"),
        draw=lambda rng: draw(rng, config, options),
        bounds=lambda batch, logp, entropy: trl_system.bounds(batch, config, logp, entropy),
        loss=lambda batch, logp, entropy: loss(batch, config, logp, entropy),
    )


def cases():
    """Returns all cases."""
    yield liger("grpo_kl_t07", "grpo", kl(bias=False) | {"temperature": 0.7}, masked_row=3, rows=5)
    yield liger("grpo_sequence_delta_kl_bias", "grpo", SEQUENCE | {"delta": 1.5} | kl(), rows=8, tokens=6)
    yield liger("bnpo_delta", "bnpo", {"delta": 1.6}, masked_row=1, rows=5)
    yield liger("dr_grpo_kl", "dr_grpo", kl(bias=False))
    yield liger("dapo_kl_num_items", "dapo", DAPO | kl(bias=False) | {"num_items_in_batch": 90})
    yield liger("cispo_kl", "cispo", kl(bias=False), masked_row=2, rows=5)
    yield liger("sapo_sampler", "sapo", sampler("token_truncate", 1.3), sampler=True)
    yield liger("luspo_sequence", "luspo", SEQUENCE, masked_row=6, **BY_ROW)
    yield liger("vespo_default", "vespo", masked_row=3)
