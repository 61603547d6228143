"""TRL 1.16: every loss_type, level, correction, mask and normalisation that `GRPOTrainer` and `GMPOTrainer` have."""

import math

import numpy as np

from . import trl_system
from .batch import f32, policy_values, random_batch, recorded
from .case import Case
from .kinks import row_groups, row_mean, spread, token_groups, with_row_means

EDGES = {  # of the log-ratio, by loss_type
    "cispo": lambda c: [math.log(c["epsilon_high"])],
    "geo_mean": lambda c: [-c["epsilon_low"], c["epsilon_high"]],
    "sapo": lambda c: [0.0],
    "vespo": lambda c: [0.0],
}


def clip_edges(config):
    edges = [math.log(1 - config["epsilon_low"]), math.log(1 + config["epsilon_high"])]
    return edges + ([math.log(config["delta"])] if config.get("delta") else [])


def defaults(loss_type):
    """Returns the keys that affect a loss_type, with TRL's values."""
    config = {"semantics": "trl", "loss_type": loss_type, "importance_sampling_level": "token"}
    if loss_type == "geo_mean":
        del config["importance_sampling_level"]
        config |= {"epsilon_low": 0.4, "epsilon_high": 0.4}
    elif loss_type == "cispo":
        config |= {"epsilon_high": 1.3}
    elif loss_type == "sapo":
        config |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    elif loss_type == "vespo":
        config |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    else:
        config |= {"epsilon_low": 0.2, "epsilon_high": 0.2}
    if loss_type == "dr_grpo":
        config |= {"max_completion_length": 16}
    return config | {"beta": 0.0, "temperature": 1.0}


def kl(beta=0.05, bias=True):
    return {"beta": beta, "kl_estimator": "k3", "use_bias_correction_kl": bias}


def sampler(mode, high=3.0, low=None):
    return {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": high,
        "vllm_importance_sampling_clip_min": low,
    }


def sampler_logp(rng, batch, config, mask, logp):
    """Returns sampler log-probabilities with some NaN and with values on both sides of all thresholds on them."""
    old = logp if batch.old_logp is None else batch.old_logp
    mode, threshold = config.get("vllm_importance_sampling_mode", ""), config.get("off_policy_mask_threshold")
    limits = [config.get(f"vllm_importance_sampling_clip_{end}") for end in ("min", "max")]
    edges = [math.log(limit) for limit in limits if limit is not None]
    if threshold is not None:
        means = spread(rng, row_groups(batch, mask), [threshold], reach=0.3, margin=0.05)
        out = logp + with_row_means(rng, mask, means)
    elif mode.startswith("sequence"):
        sums = spread(rng, np.where(mask.sum(1) > 0, 0, -1), edges, reach=0.8)
        out = old - with_row_means(rng, mask, sums / np.maximum(mask.sum(1), 1))
    elif config["loss_type"] == "vespo":  # each masked token lowers its row by 18 nats, so few tokens are masked
        out = old - rng.normal(0, 0.25, mask.shape)
    else:
        out = old - spread(rng, np.where(mask > 0, 0, -1), edges)
    out = recorded(out)
    for row in (0, 1):  # one token per row without a sampler log-probability
        tokens = np.flatnonzero(mask[row])
        if tokens.size > 2:
            out[row, tokens[2]] = np.nan
    return out


def draw(rng, config, options):
    """Returns a batch for `config` (see `trl`)."""
    rows = options.get("rows", 4)
    masked_row = options.get("masked_row")
    batch = random_batch(
        rng,
        rows,
        options.get("tokens", 8),
        int(rng.integers(8, 11)),
        int(rng.integers(17, 24)),
        masked_row=masked_row,
        advantages=options.get("advantages", "row"),
    )
    if options.get("all_masked"):
        batch.mask[:] = 0
    if options.get("zero_advantage"):
        batch.advantages[-1] = 0.0
    if options.get("ignored_labels"):
        batch.targets[batch.mask == 0] = -100
    shape = options.get("temperatures")
    if shape is not None:
        batch.temperatures = f32(rng.uniform(0.6, 1.4, (rows,) if shape == "row" else batch.mask.shape))
    if options.get("balanced"):
        batch.targets[:2] = (batch.hidden[:2] @ batch.lm_head.T).argmin(-1)
    mask = trl_system.effective_mask(batch, config)
    logp, _ = policy_values(batch, config)
    if not options.get("on_policy"):
        edges = EDGES.get(config["loss_type"], clip_edges)(config)
        off_policy = config.get("off_policy_mask_threshold") if not options.get("sampler") else None
        if config.get("importance_sampling_level") == "sequence":
            means = spread(rng, row_groups(batch, mask), edges, reach=0.3)
            log_ratio = with_row_means(rng, mask, means)
        else:
            log_ratio = spread(rng, token_groups(batch, mask), edges)
        if off_policy is not None:  # only the row means are constrained, not the side of each token
            means = -spread(rng, row_groups(batch, mask), [off_policy], reach=0.3, margin=0.05)
            log_ratio = log_ratio * 1.5 - row_mean(log_ratio * 1.5, mask) + means[:, None]
        if "huge" in options:  # log-ratios that overflow f32's exp, for both signs
            for sign in (0, 1):
                tokens = np.argwhere(token_groups(batch, mask) == sign)
                for (row, token), value in zip(rng.permutation(tokens), options["huge"], strict=False):
                    log_ratio[row, token] = value
        if options.get("balanced"):  # one log-ratio above 20, which the others outweigh if it is clamped to 20
            for row in (0, 1):
                first, *rest = np.flatnonzero(mask[row])
                log_ratio[row, rest] -= 20 / len(rest)
                log_ratio[row, first] = 25
        batch.old_logp = recorded(logp - log_ratio)
    if config["beta"] != 0.0:
        batch.ref_logp = recorded(logp + rng.normal(0, 0.5, mask.shape))
    if options.get("sampler"):
        batch.sampler_logp = sampler_logp(rng, batch, config, mask, logp)
    return batch


def trl(name, loss_type, config=None, zero_gradient=False, hits=(), one_sided=(), **options):
    """Returns one case. options: rows, tokens, masked_row, all_masked, zero_advantage, advantages ("row" | "token"), sampler,
    on_policy, huge, balanced, ignored_labels, temperatures ("row" | "token")."""
    config = defaults(loss_type) | (config or {})
    if options.get("on_policy") or options.get("all_masked"):
        one_sided = ("low", "high", "delta", *one_sided)
    source = trl_system.source(config)
    if options.get("sampler") and config.get("vllm_importance_sampling_correction"):
        source += ", sampler ratio as in _generate_and_score_completions"
    if options.get("temperatures"):
        source += ", log-probabilities with a temperature per token or row"
    return Case(
        f"trl_{name}",
        config,
        source,
        draw=lambda rng: draw(rng, config, options),
        bounds=lambda batch, logp, entropy: trl_system.bounds(batch, config, logp, entropy, hits, one_sided),
        loss=lambda batch, logp, entropy: trl_system.loss(batch, config, logp, entropy),
        zero_gradient=zero_gradient,
    )


SEQUENCE = {"importance_sampling_level": "sequence"}
DAPO = {"epsilon_high": 0.28}
WINDOW = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_processes": 2, "num_items_in_batch": 173}
TOKEN_A = {"advantages": "token"}
BY_ROW = {"rows": 7, "tokens": 6}


def cases():
    """Returns all cases."""
    yield trl("grpo_default", "grpo", zero_advantage=True, rows=5)
    yield trl("grpo_asymmetric_masked_row", "grpo", DAPO | {"epsilon_low": 0.15}, masked_row=2, rows=5)
    yield trl("grpo_on_policy", "grpo", on_policy=True)
    yield trl("grpo_on_policy_kl", "grpo", kl(), on_policy=True)
    yield trl("grpo_delta", "grpo", {"delta": 1.5}, rows=5)
    yield trl("grpo_delta_kl_bias", "grpo", {"delta": 1.5} | kl(), rows=5)
    yield trl("grpo_kl", "grpo", kl(bias=False), masked_row=3)
    yield trl("grpo_kl_bias_t07", "grpo", kl(0.1) | {"temperature": 0.7})
    yield trl("grpo_token_advantages", "grpo", kl(), **TOKEN_A)
    yield trl("grpo_accumulation", "grpo", kl() | {"gradient_accumulation_steps": 2, "steps_per_generation": 4})
    yield trl("grpo_ignored_labels", "grpo", kl(), ignored_labels=True)
    yield trl(
        "grpo_logit_scale_softcap_t07",
        "grpo",
        {"logit_scale": 1.5, "final_logit_softcapping": 4.0, "temperature": 0.7} | kl(),
    )
    yield trl("grpo_temperature_per_row", "grpo", kl(), temperatures="row")
    yield trl("dapo_temperature_per_token_entropy", "dapo", DAPO | {"entropy_coef": 0.02}, temperatures="token")
    yield trl("grpo_delta_huge_ratio", "grpo", {"delta": 2.0}, huge=(95.0, 120.0), rows=5)
    yield trl("dapo_delta_huge_ratio_sequence", "dapo", SEQUENCE | {"delta": 2.0}, huge=(95.0, 120.0), rows=8, tokens=6)
    yield trl("grpo_all_masked", "grpo", kl(), all_masked=True, zero_gradient=True, rows=2, tokens=4)
    yield trl("dapo_all_masked", "dapo", DAPO, all_masked=True, zero_gradient=True, rows=2, tokens=4)
    yield trl("bnpo_default", "bnpo", masked_row=1, rows=5)
    yield trl("bnpo_delta_kl_bias_accumulation", "bnpo", {"delta": 1.6, "gradient_accumulation_steps": 3} | kl())
    yield trl("dr_grpo_delta_kl", "dr_grpo", {"delta": 1.6} | kl(bias=False), masked_row=0, rows=5)
    yield trl("dr_grpo_token_advantages_t07", "dr_grpo", {"temperature": 0.7, "max_completion_length": 11}, **TOKEN_A)
    yield trl("dapo_default", "dapo", DAPO, masked_row=4, rows=5)
    yield trl("dapo_window", "dapo", DAPO | WINDOW)
    yield trl("dapo_kl_bias_window", "dapo", DAPO | WINDOW | kl(), **TOKEN_A)
    yield trl("luspo_sequence", "luspo", SEQUENCE, masked_row=6, **BY_ROW)
    yield trl(
        "luspo_sequence_kl_bias_accumulation", "luspo", SEQUENCE | kl() | {"gradient_accumulation_steps": 2}, **BY_ROW
    )
    yield trl("luspo_token", "luspo")
    yield trl("luspo_token_advantages_sequence", "luspo", SEQUENCE, **TOKEN_A)
    yield trl("cispo_default", "cispo", masked_row=3)
    yield trl("cispo_kl_bias_window", "cispo", kl() | WINDOW)
    yield trl("cispo_sequence", "cispo", SEQUENCE | {"epsilon_high": 1.1} | kl(), **BY_ROW)
    yield trl("sapo_default", "sapo", zero_advantage=True, rows=5)
    yield trl("sapo_temperatures_kl_bias", "sapo", {"sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.7} | kl())
    yield trl("sapo_sequence_accumulation", "sapo", SEQUENCE | {"gradient_accumulation_steps": 2}, **BY_ROW)
    yield trl("vespo_default", "vespo", masked_row=3)
    yield trl(
        "vespo_parameters_kl_bias_window",
        "vespo",
        {"vespo_k_pos": 1.5, "vespo_lambda_pos": 1.0, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.2} | kl() | WINDOW,
    )
    yield trl("vespo_token_advantages", "vespo", **TOKEN_A)
    yield trl("vespo_sampler_token_truncate", "vespo", sampler("token_truncate", 1.2), sampler=True)
    yield trl("vespo_guard", "vespo", balanced=True, hits=("guard high",), rows=5)
    yield trl("vespo_sampler_token_mask", "vespo", sampler("token_mask", 1.5), sampler=True, rows=5, tokens=5)
    yield trl("grpo_sequence", "grpo", SEQUENCE, masked_row=6, **BY_ROW)
    yield trl("grpo_sequence_delta_kl_bias", "grpo", SEQUENCE | {"delta": 1.5} | kl(0.1), rows=8, tokens=5)
    yield trl("grpo_sequence_token_advantages", "grpo", SEQUENCE | kl(), **TOKEN_A)
    yield trl("bnpo_sequence_kl", "bnpo", SEQUENCE | kl(bias=False), **BY_ROW)
    yield trl("dr_grpo_sequence", "dr_grpo", SEQUENCE | {"epsilon_high": 0.25}, **BY_ROW)
    yield trl("dapo_sequence_kl_bias_window", "dapo", SEQUENCE | DAPO | kl() | WINDOW, **BY_ROW)
    for mode, high, low in [
        ("token_truncate", 1.3, None),
        ("token_truncate", 1.3, 0.8),
        ("token_mask", 1.3, 0.8),
        ("sequence_truncate", 1.5, None),
        ("sequence_truncate", 1.5, 0.6),
        ("sequence_mask", 3.0, None),
        ("sequence_mask", 1.5, 0.6),
    ]:
        name = f"grpo_sampler_{mode}" + ("" if low is None else "_min")
        yield trl(name, "grpo", sampler(mode, high, low) | kl(), sampler=True, rows=5, tokens=7)
    yield trl(
        "dapo_sampler_token_mask_sequence", "dapo", SEQUENCE | DAPO | sampler("token_mask", 1.3), sampler=True, **BY_ROW
    )
    yield trl(
        "luspo_sampler_sequence_mask",
        "luspo",
        SEQUENCE | sampler("sequence_mask", 1.6, 0.5),
        sampler=True,
        rows=9,
        tokens=6,
    )
    yield trl("cispo_sampler_sequence_truncate", "cispo", sampler("sequence_truncate", 1.5), sampler=True)
    yield trl("sapo_sampler_token_truncate", "sapo", sampler("token_truncate", 1.3), sampler=True)
    yield trl("grpo_sampler_on_policy", "grpo", sampler("token_truncate", 1.3), sampler=True, on_policy=True)
    yield trl("grpo_sampler_not_corrected", "grpo", {"vllm_importance_sampling_correction": False}, sampler=True)
    yield trl("grpo_off_policy_old", "grpo", {"off_policy_mask_threshold": 0.1} | kl(), rows=6, tokens=7)
    yield trl(
        "grpo_off_policy_sampler",
        "grpo",
        {"off_policy_mask_threshold": 0.1} | kl() | sampler("token_truncate", 1.4),
        sampler=True,
        rows=6,
        tokens=7,
    )
    yield trl(
        "dapo_off_policy_token_advantages",
        "dapo",
        DAPO | {"off_policy_mask_threshold": 0.1, "vllm_importance_sampling_correction": False},
        sampler=True,
        rows=5,
        **TOKEN_A,
    )
    yield trl("grpo_entropy", "grpo", {"entropy_coef": 0.05})
    yield trl("dapo_entropy_window", "dapo", DAPO | WINDOW | {"entropy_coef": 0.05, "temperature": 0.8}, masked_row=3)
    yield trl("grpo_top_entropy", "grpo", {"top_entropy_quantile": 0.4} | kl())
    yield trl("dapo_top_entropy_entropy_kl", "dapo", DAPO | {"top_entropy_quantile": 0.4, "entropy_coef": 0.05} | kl())
    yield trl("luspo_top_entropy_sequence", "luspo", SEQUENCE | {"top_entropy_quantile": 0.6}, **BY_ROW)
    truncated = {"mask_truncated_completions": True, "truncated_rows": [1, 3]}
    yield trl("grpo_truncated", "grpo", truncated | kl(), rows=6)
    yield trl("dapo_truncated_entropy", "dapo", DAPO | truncated | {"entropy_coef": 0.05}, rows=6)
    yield trl("gmpo_default", "geo_mean", rows=5)
    yield trl(
        "gmpo_kl_accumulation",
        "geo_mean",
        kl(bias=False) | {"epsilon_high": 0.3, "gradient_accumulation_steps": 2},
        rows=5,
    )
    yield trl("gmpo_top_entropy", "geo_mean", {"top_entropy_quantile": 0.5} | kl(bias=False), rows=5)
    yield trl(
        "dapo_everything",
        "dapo",
        DAPO
        | WINDOW
        | kl()
        | sampler("token_mask", 1.4, 0.7)
        | {
            "delta": 1.7,
            "top_entropy_quantile": 0.6,
            "entropy_coef": 0.03,
            "temperature": 0.8,
            "off_policy_mask_threshold": 0.1,
        },
        sampler=True,
        rows=6,
        tokens=8,
        masked_row=4,
    )
