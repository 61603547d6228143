"""verl 0.9.1: every loss_mode, aggregation, KL estimator and rollout correction."""

import math

import numpy as np

from . import verl_system
from .batch import policy_values, random_batch, recorded
from .case import Case
from .kinks import row_groups, spread, token_groups, with_row_means


def defaults(loss_type):
    """Returns the keys that affect a loss_mode, with verl's values."""
    config = {"semantics": "verl", "loss_type": loss_type}
    if loss_type in ("vanilla", "gspo", "cispo", "clip_cov", "geo_mean", "dppo_tv", "dppo_kl"):
        config |= {"epsilon_low": 0.2, "epsilon_high": 0.2}
    if loss_type in ("vanilla", "dppo_tv", "dppo_kl"):
        config |= {"clip_ratio_c": 3.0}
    if loss_type == "gspo":
        config |= {"importance_sampling_level": "sequence_token"}
    if loss_type == "sapo":
        config |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    if loss_type == "clip_cov":
        config |= {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    if loss_type == "kl_cov":
        config |= {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0}
    if loss_type == "dro":
        config |= {"dro_beta": 0.3}
    return config | {"beta": 0.0, "entropy_coef": 0.0, "loss_agg_mode": "token-mean", "temperature": 1.0}


def edges(config):
    """Returns the bounds that divide the range of log-ratios."""
    loss_type = config["loss_type"]
    if loss_type == "geo_mean":
        return [-config["epsilon_low"], config["epsilon_high"]]
    if loss_type.startswith("dppo"):
        return [-0.4, 0.4]
    if loss_type in ("vanilla", "cispo", "clip_cov", "gspo"):
        cuts = [math.log(1 - config["epsilon_low"]), math.log(1 + config["epsilon_high"])]
        return cuts + ([math.log(config["clip_ratio_c"])] if config.get("clip_ratio_c", 1e9) < 1e9 else [])
    return [0.0]


def draw(rng, config, options):
    """Returns a batch for `config` (see `verl`)."""
    batch = random_batch(
        rng,
        options.get("rows", 4),
        options.get("tokens", 8),
        int(rng.integers(8, 11)),
        int(rng.integers(17, 24)),
        masked_row=options.get("masked_row"),
        advantages=options.get("advantages", "row"),
    )
    if options.get("zero_advantage"):
        batch.advantages[-1] = 0.0
    mask = batch.mask
    logp, _ = policy_values(batch, config)
    if not options.get("no_old"):
        if config["loss_type"] == "gspo":
            log_ratio = with_row_means(rng, mask, spread(rng, row_groups(batch, mask), edges(config), reach=0.3))
        else:
            reach = 0.9 if config["loss_type"].startswith("dppo") else 0.45
            log_ratio = spread(rng, token_groups(batch, mask), edges(config), reach=reach)
        if "huge" in options:  # log-ratios beyond the guard, for both signs
            for sign in (0, 1):
                tokens = np.argwhere(token_groups(batch, mask) == sign)
                for (row, token), value in zip(rng.permutation(tokens), options["huge"], strict=False):
                    log_ratio[row, token] = value
        if "huge_rows" in options:
            log_ratio[:2] += options["huge_rows"]
        batch.old_logp = recorded(logp - log_ratio)
    if config["beta"] != 0.0:
        d = rng.normal(0, 0.6, mask.shape)
        if options.get("far_reference"):  # k3 reaches its output clamp at d = 2.61 and at d = -10.99
            far = rng.random(mask.shape)
            d = np.where(far < 0.2, 3.5, np.where(far < 0.4, -13.0, d)) + rng.uniform(-0.5, 0.5, mask.shape)
        batch.ref_logp = recorded(logp + d)
    if options.get("sampler"):
        noise = rng.normal(0, options["sampler"], mask.shape) + rng.normal(0, options["sampler"], (len(mask), 1))
        batch.sampler_logp = recorded((logp if batch.old_logp is None else batch.old_logp) + noise)
    return batch


def verl(name, loss_type, config=None, hits=(), one_sided=(), **options):
    """Returns one case. options: rows, tokens, masked_row, zero_advantage, advantages ("row" | "token"), no_old, huge,
    huge_rows, far_reference, sampler (standard deviation of its log-probabilities)."""
    config = defaults(loss_type) | (config or {})
    return Case(
        f"verl_{name}",
        config,
        verl_system.source(config),
        draw=lambda rng: draw(rng, config, options),
        bounds=lambda batch, logp, entropy: verl_system.bounds(batch, config, logp, entropy, hits, one_sided),
        loss=lambda batch, logp, entropy: verl_system.loss(batch, config, logp, entropy),
    )


GLOBAL = {"dp_size": 2, "batch_num_tokens": 61, "global_batch_size": 9}
TOKEN_A = {"advantages": "token"}
BY_ROW = {"rows": 7, "tokens": 6}


def kl(estimator, beta=0.05):
    return {"beta": beta, "kl_estimator": estimator}


def weights(level, threshold, normalize=False):
    return {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize}


def reject(options, threshold):
    return {"rollout_rs": options, "rollout_rs_threshold": threshold}


def cases():
    """Returns all cases."""
    yield verl("vanilla_default", "vanilla", zero_advantage=True, rows=6)
    yield verl(
        "vanilla_asymmetric_token_advantages", "vanilla", {"epsilon_high": 0.28, "clip_ratio_c": 2.0}, rows=5, **TOKEN_A
    )
    yield verl(
        "vanilla_on_policy_t07", "vanilla", {"temperature": 0.7}, no_old=True, one_sided=("low", "high", "dual clip")
    )
    yield verl("vanilla_guard", "vanilla", huge=(25.0, 21.0), hits=("guard high",), rows=5)
    yield verl(
        "vanilla_guard_no_dual_clip",
        "vanilla",
        {"clip_ratio_c": 1e12},
        huge=(25.0, 21.0),
        hits=("guard high",),
        one_sided=("dual clip",),
        rows=5,
    )
    modes = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
    for mode in modes:
        name, agg = mode.replace("-", "_"), {"loss_agg_mode": mode}
        extra = {"entropy_coef": 0.02} | kl("low_var_kl")
        yield verl(f"vanilla_{name}_entropy_kl", "vanilla", agg | extra, masked_row=2, rows=6)
        factor = {"loss_scale_factor": 12} if mode.endswith("norm") else {}
        yield verl(f"vanilla_{name}_global", "vanilla", agg | GLOBAL | factor, masked_row=3, rows=6)
    for estimator in ("kl", "abs", "mse", "k3", "k1+", "abs+", "k3+"):
        name = estimator.replace("+", "_straight_through")
        far = estimator.startswith("k3")
        yield verl(
            f"gpg_{name}",
            "gpg",
            kl(estimator, 0.2),
            no_old=True,
            far_reference=far,
            masked_row=1,
            hits=("k3 above", "k3 below") if far else (),
            rows=5,
        )
    yield verl("gspo_default", "gspo", {"loss_agg_mode": "seq-mean-token-mean"}, masked_row=6, **BY_ROW)
    yield verl(
        "gspo_token_mean_token_advantages",
        "gspo",
        {"epsilon_low": 0.1, "epsilon_high": 0.15} | kl("k3"),
        rows=5,
        **TOKEN_A,
    )
    yield verl("gspo_clamp", "gspo", huge_rows=12.0, hits=("gspo clamp",), rows=8, tokens=6)
    yield verl("geo_mean_default", "geo_mean", masked_row=3, rows=6)
    yield verl(
        "geo_mean_kl_entropy",
        "geo_mean",
        {"epsilon_low": 0.4, "epsilon_high": 0.3, "entropy_coef": 0.02} | kl("k2"),
        rows=5,
    )
    yield verl("geo_mean_token_advantages_rollout", "geo_mean", weights("token", 1.5), sampler=0.3, rows=5, **TOKEN_A)
    yield verl("cispo_default", "cispo", huge=(25.0, 21.0), hits=("guard high",), rows=5)
    yield verl(
        "cispo_kl_seq_mean_token_mean",
        "cispo",
        {"epsilon_high": 1.5, "loss_agg_mode": "seq-mean-token-mean"} | kl("k3"),
        rows=5,
        masked_row=4,
    )
    yield verl(
        "sapo_default", "sapo", huge=(25.0, 21.0), hits=("guard high",), masked_row=1, zero_advantage=True, rows=6
    )
    yield verl(
        "sapo_token_mean_entropy_kl", "sapo", {"sapo_temperature_neg": 1.6, "entropy_coef": 0.02} | kl("k3"), rows=5
    )
    yield verl("dppo_tv_default", "dppo_tv", {"epsilon_low": 0.08, "epsilon_high": 0.1}, rows=5, zero_advantage=True)
    yield verl(
        "dppo_tv_truncated",
        "dppo_tv",
        {"epsilon_low": 0.1, "epsilon_high": 0.06, "clip_ratio_c": 1.7},
        hits=("truncation", "guard high"),
        huge=(25.0, 21.0),
        rows=6,
        **TOKEN_A,
    )
    yield verl("dppo_kl_default", "dppo_kl", {"epsilon_low": 0.03, "epsilon_high": 0.04}, rows=7)
    yield verl(
        "dppo_kl_truncated",
        "dppo_kl",
        {"epsilon_low": 0.04, "epsilon_high": 0.03, "clip_ratio_c": 1.7},
        hits=("truncation",),
        rows=7,
        **TOKEN_A,
    )
    yield verl("dro_default", "dro")
    yield verl(
        "dro_rollout_entropy", "dro", {"dro_beta": 0.8, "entropy_coef": 0.02} | weights("token", 1.4), sampler=0.3
    )
    yield verl("clip_cov_default", "clip_cov", one_sided=("low",), hits=("cov low",), **TOKEN_A)
    yield verl(
        "clip_cov_several",
        "clip_cov",
        {"clip_cov_ratio": 0.15, "clip_cov_lb": 0.4, "clip_cov_ub": 1.2} | kl("k3"),
        hits=("cov high",),
        rows=5,
    )
    yield verl("kl_cov_default", "kl_cov", one_sided=("|l-o|",))
    yield verl("kl_cov_several", "kl_cov", {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.3}, masked_row=2, rows=6, **TOKEN_A)
    yield verl("gpg_default", "gpg", no_old=True, **TOKEN_A)
    yield verl("reinforce_default", "reinforce", {"loss_agg_mode": "seq-mean-token-sum"}, no_old=True, masked_row=1)
    yield verl("reinforce_rollout", "reinforce", weights("token", 1.4), sampler=0.3)
    yield verl(
        "reinforce_bypass",
        "reinforce",
        weights("token", 1.4) | reject("token_k1", "0.5_2.0"),
        no_old=True,
        sampler=0.4,
        rows=5,
    )
    yield verl("vanilla_rollout_token", "vanilla", weights("token", 1.4), sampler=0.3, rows=5)
    yield verl("vanilla_rollout_token_icepop", "vanilla", weights("token", "0.7_1.4") | kl("k3"), sampler=0.3, rows=5)
    yield verl(
        "vanilla_rollout_token_normalized", "vanilla", weights("token", 1.4, True), sampler=0.3, rows=5, masked_row=3
    )
    yield verl("vanilla_rollout_sequence", "vanilla", weights("sequence", 2.0), sampler=0.15, rows=5)
    yield verl("gspo_rollout_sequence_icepop", "gspo", weights("sequence", "0.5_2.0"), sampler=0.1, **BY_ROW)
    yield verl(
        "cispo_rollout_sequence_normalized", "cispo", weights("sequence", 1.5, True), sampler=0.15, rows=5, masked_row=3
    )
    yield verl(
        "vanilla_reject_token_k1",
        "vanilla",
        reject("token_k1", "0.6_1.6") | {"entropy_coef": 0.02} | kl("k3"),
        sampler=0.4,
        rows=6,
    )
    yield verl("vanilla_reject_token_k2", "vanilla", reject("token_k2", 0.06), sampler=0.3, rows=6)
    yield verl(
        "vanilla_reject_seq_sum_k1",
        "vanilla",
        reject("seq_sum_k1", "0.5_2.0") | {"loss_agg_mode": "seq-mean-token-mean"},
        sampler=0.15,
        rows=9,
        tokens=6,
    )
    yield verl(
        "vanilla_reject_seq_mean_k3",
        "vanilla",
        reject("seq_mean_k3", 0.04) | {"loss_agg_mode": "seq-mean-token-sum"},
        sampler=0.2,
        rows=8,
        tokens=6,
    )
    yield verl("cispo_reject_seq_max_k2", "cispo", reject("seq_max_k2", 0.15), sampler=0.3, rows=8, tokens=6)
    yield verl(
        "vanilla_reject_two_and_weights",
        "vanilla",
        reject("token_k1,seq_mean_k3", "0.5_2.0,0.08") | weights("token", 1.3, True),
        sampler=0.3,
        rows=8,
        tokens=6,
    )
