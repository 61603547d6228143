"""verl's own loss functions, combined as in `verl/workers/utils/losses.py::ppo_loss`, and their kinks."""

import importlib.machinery
import math
import sys
import types

import numpy as np
import torch

from .case import made_with
from .kinks import Bound, Rejected, row_mean, signs


class Absent(types.ModuleType):
    """A stub of ray, which verl's package imports for its workers and the loss functions do not use. Attributes are empty classes."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


if importlib.util.find_spec("ray") is None:
    for module in ("ray", "ray.util", "ray.util.scheduling_strategies", "ray.exceptions"):
        sys.modules[module] = Absent(module)
        sys.modules[module].__spec__ = importlib.machinery.ModuleSpec(module, None)

from verl.trainer.ppo import core_algos  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import (  # noqa: E402
    compute_rollout_correction_and_rejection_mask,
)
from verl.workers.config import ActorConfig, PolicyLossConfig  # noqa: E402

ROLLOUT = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
GUARDED = ("vanilla", "dppo_tv", "dppo_kl", "sapo", "cispo")


def source(config):
    """Returns the functions that evaluate a configuration."""
    function = f"compute_policy_loss_{config['loss_type']}"
    terms = ["agg_loss"]
    if config["beta"] != 0.0:
        terms.append("kl_penalty")
    if any(config.get(key) for key in ("rollout_is", "rollout_rs")):
        terms.append("compute_rollout_correction_and_rejection_mask")
    return made_with("verl", f"core_algos.{function} with {', '.join(terms)}, composed as in ppo_loss")


def actor(config):
    """Returns the configuration under verl's names."""
    policy_loss = PolicyLossConfig(
        loss_mode=config["loss_type"],
        clip_cov_ratio=config.get("clip_cov_ratio", 2e-4),
        clip_cov_lb=config.get("clip_cov_lb", 1.0),
        clip_cov_ub=config.get("clip_cov_ub", 5.0),
        kl_cov_ratio=config.get("kl_cov_ratio", 2e-4),
        ppo_kl_coef=config.get("ppo_kl_coef", 0.1),
        dro_beta=config.get("dro_beta"),
    )
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=config.get("epsilon_low", 0.2),
        clip_ratio_high=config.get("epsilon_high", 0.2),
        clip_ratio_c=config.get("clip_ratio_c", 3.0),
        tau_pos=config.get("sapo_temperature_pos", 1.0),
        tau_neg=config.get("sapo_temperature_neg", 1.05),
        loss_agg_mode=config["loss_agg_mode"],
        policy_loss=policy_loss,
        global_batch_info={
            "dp_size": config.get("dp_size", 1),
            "batch_num_tokens": config.get("batch_num_tokens"),
            "global_batch_size": config.get("global_batch_size"),
            "loss_scale_factor": config.get("loss_scale_factor"),
        },
    )


def corrected(batch, config, logp):
    """Returns (weights or None, mask) as numpy, after verl's rollout correction. Without `old_logp` the recorded policy is the
    current one, which is verl's bypass mode."""
    if not any(config.get(key) for key in ("rollout_is", "rollout_rs")):
        return None, batch.mask
    old = logp if batch.old_logp is None else batch.old_logp
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=torch.tensor(old),
        rollout_log_prob=torch.tensor(batch.sampler_logp),
        response_mask=torch.tensor(batch.mask).long(),
        **{key: config[key] for key in ROLLOUT if key in config},
    )
    return None if weights is None else weights.batch["rollout_is_weights"].numpy(), mask.double().numpy()


def loss(batch, config, logp, entropy):
    """Computes pg - entropy_coeff * entropy + kl_loss_coef * kl."""
    weights, mask = corrected(batch, config, logp.detach().numpy())
    weights = None if weights is None else torch.tensor(weights)
    settings = actor(config)
    response_mask = torch.tensor(mask).bool()
    old = logp.detach() if batch.old_logp is None else torch.tensor(batch.old_logp)
    inputs = {
        "log_prob": logp,
        "advantages": torch.tensor(batch.advantages_bt().copy()),
        "response_mask": response_mask,
        "loss_agg_mode": config["loss_agg_mode"],
        "config": settings,
        "rollout_is_weights": weights,
    }
    if config["loss_type"] == "reinforce":
        sampler = old if batch.sampler_logp is None else torch.tensor(batch.sampler_logp)
        total, _ = core_algos.compute_policy_loss_reinforce(rollout_log_prob=sampler, **inputs)
    else:
        total, _ = core_algos.get_policy_loss_fn(config["loss_type"])(old_log_prob=old, **inputs)

    def aggregated(values):
        mode = config["loss_agg_mode"]
        return core_algos.agg_loss(values, response_mask, loss_agg_mode=mode, **settings.global_batch_info)

    if config["entropy_coef"] != 0.0:
        total = total - config["entropy_coef"] * aggregated(entropy)
    if config["beta"] != 0.0:
        kl = core_algos.kl_penalty(logp, torch.tensor(batch.ref_logp), config["kl_estimator"])
        total = total + config["beta"] * aggregated(kl)
    return total


def rejection_bounds(config, log_ratio, mask):
    """Returns the thresholds of `rollout_rs`, as (name, statistic, threshold)."""
    options = [part.strip() for part in config["rollout_rs"].split(",")]
    limits = [part.strip() for part in str(config["rollout_rs_threshold"]).split(",")]
    limits = limits * len(options) if len(limits) == 1 else limits
    x = np.clip(log_ratio, -20, 20)
    for option, limit in zip(options, limits, strict=True):
        level, kind = option.rsplit("_", 1)
        statistic = {"k1": -x, "k2": 0.5 * x * x, "k3": np.exp(x) - 1 - x}[kind]
        if level == "seq_sum":
            statistic = (statistic * mask).sum(1, keepdims=True)
        elif level == "seq_mean":
            statistic = row_mean(statistic, mask)
        elif level == "seq_max":
            statistic = np.where(mask > 0, statistic, -np.inf).max(1, keepdims=True)
        if kind == "k1":
            ends = limit.split("_") if "_" in limit else (1 / float(limit), limit)
            yield from ((option, statistic, math.log(float(end))) for end in ends)
        else:
            yield option, statistic, float(limit)


def bounds(batch, config, logp, entropy, hits=(), one_sided=()):
    """Returns the kinks of `loss`; `hits` and `one_sided` as in `trl_system.bounds`."""
    weights, mask = corrected(batch, config, logp)
    active, before, found = mask > 0, batch.mask > 0, []
    if not active.any():
        raise Rejected("nothing left of the mask")
    old = logp if batch.old_logp is None else batch.old_logp
    log_ratio, loss_type, by_sign = logp - old, config["loss_type"], signs(batch)
    everyone, a = {"any A": np.ones_like(active)}, batch.advantages_bt()

    def bound(name, values, at, groups, needed=True, where=active):
        needed = name in hits or (needed and name not in one_sided)
        if weights is not None and name in ("low", "high", "dual clip"):  # a weight of 0 tests no side of a clip
            groups = {k: g & (weights > 0) for k, g in groups.items()}
        found.append(Bound(f"{name} {at}", np.broadcast_to(values, mask.shape), at, where, groups if needed else {}))

    low, high = config.get("epsilon_low"), config.get("epsilon_high")
    guarded = np.clip(log_ratio, -20, 20) if loss_type in GUARDED else log_ratio
    if loss_type in GUARDED:
        bound("guard low", log_ratio, -20.0, everyone, needed=False)
        bound("guard high", log_ratio, 20.0, everyone, needed=False)
    ratio = np.exp(guarded)
    if loss_type == "gspo":
        mean = row_mean(log_ratio, mask)
        bound("gspo clamp", mean, 10.0, everyone, needed=False)
        ratio = np.exp(np.minimum(mean, 10.0))
    if loss_type in ("vanilla", "gspo", "cispo", "clip_cov"):
        bound("low", ratio, 1 - low, by_sign)
        bound("high", ratio, 1 + high, by_sign)
    if loss_type == "vanilla":
        bound("dual clip", ratio, config["clip_ratio_c"], {"A<0": by_sign["A<0"]})
    if loss_type == "geo_mean":
        bound("low", log_ratio, -low, by_sign)
        bound("high", log_ratio, high, by_sign)
    if loss_type.startswith("dppo"):
        bound("truncation", ratio, config["clip_ratio_c"], by_sign, needed=False)
        p, p_old = np.exp(logp), np.exp(old)
        positive, negative = active & by_sign["A>0"], active & ~by_sign["A>0"]
        if loss_type == "dppo_tv":
            bound("tv high", p - p_old, high, everyone, where=positive)
            bound("tv low", p - p_old, -low, everyone, where=negative)
        else:
            kl = p_old * (old - logp) + (1 - p_old) * np.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
            bound("kl high", kl, high, {"away": p > p_old, "back": p < p_old}, where=positive)
            bound("kl low", kl, low, {"away": p < p_old, "back": p > p_old}, where=negative)
    if loss_type in ("clip_cov", "kl_cov"):
        n = active.sum()
        cov = (a - a[active].mean()) * (logp - logp[active].mean())
        if loss_type == "clip_cov":
            clipped = -a * np.clip(ratio, 1 - low, 1 + high) > -a * ratio
            free = active & ~clipped
            bound("cov low", cov, config["clip_cov_lb"], everyone, where=free)
            bound("cov high", cov, config["clip_cov_ub"], everyone, where=free, needed=False)
            eligible = free & (cov > config["clip_cov_lb"]) & (cov < config["clip_cov_ub"])
            # If the number of eligible tokens equals the number drawn, verl's random selection has only one outcome.
            if eligible.sum() != max(int(config["clip_cov_ratio"] * n), 1):
                raise Rejected(f"{eligible.sum()} of {n} tokens are candidates")
        else:
            k = max(1, int(n * config["kl_cov_ratio"]))
            order = np.sort(cov[active])[::-1]
            bound("top k", cov, (order[k - 1] + order[k]) / 2, everyone)
            top = active & (cov >= order[k - 1])
            bound("|l-o|", log_ratio, 0.0, everyone, where=top)

    if config.get("rollout_is"):
        raw = np.clip(
            old - batch.sampler_logp
            if config["rollout_is"] == "token"
            else ((old - batch.sampler_logp) * batch.mask).sum(1, keepdims=True),
            -20,
            20,
        )
        for at in str(config["rollout_is_threshold"]).split("_"):
            bound("rollout weight", np.exp(raw), float(at), everyone, where=before)
    if config.get("rollout_rs"):
        for name, statistic, at in rejection_bounds(config, old - batch.sampler_logp, batch.mask):
            bound(name, statistic, at, everyone, where=before)
    if config["beta"] != 0.0:
        kind, d = config["kl_estimator"].removesuffix("+"), batch.ref_logp - logp
        if kind == "abs":
            bound("|l-q|", d, 0.0, everyone)
        if kind in ("k3", "low_var_kl"):
            x = np.clip(d, -20, 20)
            for name, there in (("k3 above", d > 0), ("k3 below", d < 0)):
                bound(name, np.exp(x) - 1 - x, 10.0, everyone, where=active & there, needed=False)
    return found
