"""Independent verification of the files: losses in numpy, computed only from their formulas and the file's configuration,
and gradients by central differences. This module calls no other system and does not read `Case`."""

import json
import math

import numpy as np

from .files import read

STEP = 1e-5
LOSS_TOLERANCE = 1e-11
GRADIENT_TOLERANCE = 1e-6
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "vanilla", "gspo", "clip_cov")


class Frozen:
    """Stop-gradient: stores a value at the first evaluation and returns it in later ones."""

    def __init__(self):
        self.kept = {}

    def __call__(self, name, value):
        return self.kept.setdefault(name, value)


class Objective:
    """Returns the loss of one file as a function of (hidden, lm_head)."""

    def __init__(self, metadata, tensors):
        self.c = json.loads(metadata["loss"])
        self.x = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in tensors.items()}
        self.verl = self.c["semantics"] == "verl"
        self.seed = self.c["semantics"] == "mllm_jax"
        self.sg = Frozen()

    def policy(self, hidden, lm_head):
        z = hidden @ lm_head.T * self.c.get("logit_scale", 1.0)
        cap = self.c.get("final_logit_softcapping")
        z = z if cap is None else cap * np.tanh(z / cap)
        t = np.asarray(self.x.get("temperatures", self.c.get("temperature", 1.0)))
        t = t[:, None] if t.ndim == 1 else t
        scale_logprobs = self.c.get("temperature_mode") == "scale_logprobs" or self.seed
        z = z if scale_logprobs else z / t[..., None]
        kept = self.kept(z.shape)
        z_kept = np.where(kept, z, -math.inf)
        lse = np.log(np.exp(z_kept - z_kept.max(-1, keepdims=True)).sum(-1)) + z_kept.max(-1)
        p = np.exp(z_kept - lse[..., None])
        y = np.take_along_axis(z, np.maximum(self.x["targets"], 0)[..., None], -1)[..., 0] - lse
        return (y / t if scale_logprobs else y), lse - (p * z).sum(-1)

    def kept(self, shape):
        """Returns the mask [B, T, V] of the ids that the sampler kept."""
        kept = np.ones(shape, bool)
        if "sampling_mask.offsets" in self.x:
            offsets = self.x["sampling_mask.offsets"]
            for row, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
                if begin < end:
                    kept.reshape(-1, shape[-1])[row] = np.isin(
                        np.arange(shape[-1]), self.x["sampling_mask.ids"][begin:end]
                    )
        return kept

    def masks_and_weights(self, old):
        """Returns the active tokens and the weight of the sampler's mismatch per token."""
        c, m, s = self.c, self.x["mask"].copy(), self.x.get("sampler_logp")
        if c.get("mask_truncated_completions"):
            m[c["truncated_rows"]] = 0
        w = np.ones_like(m)
        if s is None or c["loss_type"] == "flash_reinforce":
            return m, w
        d = np.where(np.isnan(s) | (m == 0), 0, old - s)
        if self.verl:
            return self.verl_rejection(d, m), self.verl_weights(d, m)
        if c.get("vllm_importance_sampling_correction", True):
            mode = c["vllm_importance_sampling_mode"]
            low, high = c["vllm_importance_sampling_clip_min"], c["vllm_importance_sampling_clip_max"]
            low, high = -math.inf if low is None else low, math.inf if high is None else high
            w = np.exp(d.sum(1, keepdims=True) + 0 * d if mode.startswith("sequence") else d)
            inside = (w >= low) & (w <= high)
            w = np.clip(w, low, high) if mode.endswith("truncate") else w * inside
        return m, w

    def verl_weights(self, d, m):
        c = self.c
        if not c.get("rollout_is"):
            return np.ones_like(m)
        by_row = c["rollout_is"] == "sequence"
        w = np.exp(np.clip(d.sum(1, keepdims=True) + 0 * d if by_row else d, -20, 20))
        ends = [float(x) for x in str(c["rollout_is_threshold"]).split("_")]
        w = np.minimum(w, ends[0]) if len(ends) == 1 else w * ((w >= ends[0]) & (w <= ends[1]))
        if c["rollout_is_batch_normalize"]:
            rows = m.sum(1) > 0
            w = w / (w[rows, 0].mean() if by_row else w[m > 0].mean())
        return w

    def verl_rejection(self, d, m):
        if not self.c.get("rollout_rs"):
            return m
        options, limits = (str(self.c[k]).split(",") for k in ("rollout_rs", "rollout_rs_threshold"))
        keep, n = m > 0, np.maximum(m.sum(1, keepdims=True), 1)
        for option, limit in zip(options, limits, strict=True):
            kind = option[-2:]
            k = {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - 1 - d}[kind] * m
            row = {"seq_sum": k.sum(1), "seq_mean": k.sum(1) / n[:, 0], "seq_max": k.max(1)}.get(option[:-3])
            k = k if row is None else row[:, None]
            ends = [math.log(float(x)) for x in limit.split("_")] if kind == "k1" else [-math.inf, float(limit)]
            keep = keep & (k >= ends[0]) & (k <= ends[1])
        return m * keep

    def per_token(self, l, o, m, w):
        """Returns the policy term per token and the ratio that bias-corrects the KL."""
        c, sg, a = self.c, self.sg, self.a
        kind, level = c["loss_type"], c.get("importance_sampling_level", "token")
        n = np.maximum(m.sum(1, keepdims=True), 1)
        d = l - o
        if self.verl and kind in ("vanilla", "dppo_tv", "dppo_kl", "sapo", "cispo"):
            d = np.clip(d, -20, 20)
        if level == "sequence":
            d = (d * m).sum(1, keepdims=True) / n + 0 * d
        elif level == "sequence_token":
            d = np.minimum(l - sg("l", l) + sg("mean", (d * m).sum(1, keepdims=True) / n), 10)
        r = np.exp(d)
        if kind in CLIPPED:
            clipped = np.clip(r, 1 - c["epsilon_low"], 1 + c["epsilon_high"])
            out = np.maximum(-a * np.minimum(r, c.get("delta") or math.inf), -a * clipped)
            if kind == "vanilla":
                out = np.where(a < 0, np.minimum(out, -a * c["clip_ratio_c"]), out)
            if kind == "clip_cov":
                free = (m > 0) & ~(-a * clipped > -a * r)
                cov = (a - a[m > 0].mean()) * (l - l[m > 0].mean())
                out = out * ~sg("hit", free & (cov > c["clip_cov_lb"]) & (cov < c["clip_cov_ub"]))
        elif kind == "cispo":
            low, high = (1 - c["epsilon_low"], 1 + c["epsilon_high"]) if self.verl else (-math.inf, c["epsilon_high"])
            out = -sg("weight", np.clip(r, low, high)) * a * l
        elif kind == "sapo":
            tau = np.where(a > 0, c["sapo_temperature_pos"], c["sapo_temperature_neg"])
            out = -4 / tau / (1 + np.exp(-tau * (r - 1))) * a
        elif kind == "vespo":
            lw = (np.clip(l - o, -20, 20) * m).sum(1, keepdims=True) + np.log(np.maximum(w, 1e-8)).sum(1, keepdims=True)
            lw = np.clip(lw, math.log(1e-8), 20)
            k = np.where(a >= 0, c["vespo_k_pos"], c["vespo_k_neg"])
            lam = np.where(a >= 0, c["vespo_lambda_pos"], c["vespo_lambda_neg"])
            out = -sg("phi", np.exp(lam + k * lw - lam * np.exp(lw))) * a * l
        elif kind in ("gpg", "reinforce"):
            out = -a * l
        elif kind == "dro":
            out = -(l * a - 0.5 * c["dro_beta"] * (l - o) ** 2)
        elif kind == "kl_cov":
            cov = np.where(m > 0, (a - a[m > 0].mean()) * (l - l[m > 0].mean()), -math.inf)
            top = np.sort(cov.ravel())[-max(1, int(m.sum() * c["kl_cov_ratio"]))]
            out = -a * r + c["ppo_kl_coef"] * np.abs(l - o) * sg("top", cov >= top)
        elif kind == "flash_reinforce":
            s = self.x.get("sampler_logp", o)
            s = np.where(np.isnan(s), o, s)
            p, q = np.clip(np.exp(s), 1e-6, 1 - 1e-6), np.clip(np.exp(l), 1e-6, 1 - 1e-6)
            kl = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
            far = (kl * m).sum(1, keepdims=True) / n > c["sequence_kl_threshold"]
            out = -sg("weight", np.exp(l - s) * ~far) * a * l
        elif kind == "cfpo":
            out = 0.5 / c["epsilon_low"] * np.abs(a) * (r - 1) ** 2 - r * a
        elif kind in ("prime_rl", "ipo"):
            change = sg("change", np.exp(l) - np.exp(o))
            above, below = change > c["epsilon_high"], change < -c["epsilon_low"]
            keep = ~(above | below) if kind == "ipo" else ~np.where(a > 0, above, below)
            out = c["kl_tau"] * (l - o) ** 2 - keep * c["adv_tau"] * a * r
        elif kind.startswith("dppo"):
            p, po = np.exp(l), np.exp(o)
            if kind == "dppo_tv":
                valid = np.where(a > 0, p - po <= c["epsilon_high"], p - po >= -c["epsilon_low"])
            else:
                kl = po * (o - l) + (1 - po) * np.log((1 - po + 1e-8) / (1 - p + 1e-8))
                up, down = (kl <= c["epsilon_high"]) | (p <= po), (kl <= c["epsilon_low"]) | (p >= po)
                valid = np.where(a > 0, up, down)
            out = -a * sg("weight", np.minimum(r, c["clip_ratio_c"]) * valid) * l
        return out, r

    def kl(self, l, q, r):
        """Returns the KL estimate per token, with its gradient."""
        kind = self.c["kl_estimator"]
        base, d = kind.removesuffix("+"), q - l
        value = {"k1": -d, "kl": -d, "abs": np.abs(d), "k2": d * d / 2, "mse": d * d / 2}.get(base)
        if value is None:
            value = np.exp(d) - d - 1
            value = np.minimum(value, 10) if self.verl else value
        if kind.endswith("+"):
            value = d * d / 2 - self.sg("k2", d * d / 2) + self.sg("base", value)
        return value * r if self.c.get("use_bias_correction_kl", not self.verl and not self.seed) else value

    def aggregate(self, x, m, mode=None):
        """Sums over tokens, with the denominators of the system."""
        c, n = self.c, m.sum(1)
        if self.verl:
            mode = mode or c["loss_agg_mode"]
            dp, rows = c.get("dp_size", 1), c.get("global_batch_size", (n > 0).sum())
            total = (x * m).sum()
            if mode == "token-mean":
                return total / c.get("batch_num_tokens", n.sum()) * dp
            if mode == "token-sum":
                return total * dp
            if mode == "seq-mean-token-mean":
                return ((x * m).sum(1) / np.maximum(n, 1)).sum() / rows * dp
            norm = c.get("loss_scale_factor", m.shape[1]) if mode.endswith("norm") else 1
            return total / rows * dp / norm
        kind, ga = c["loss_type"], c.get("gradient_accumulation_steps", 1)
        if kind in ("grpo", "sapo", "geo_mean", "cfpo", "flash_reinforce"):
            return ((x * m).sum(1) / np.maximum(n, 1)).mean() / ga
        if kind in ("bnpo", "prime_rl", "ipo"):
            return (x * m).sum() / max(n.sum(), 1) / ga
        if kind == "dr_grpo":
            return (x * m).sum() / (len(m) * c["max_completion_length"]) / ga
        if kind == "luspo":
            return (x * m).sum(1).mean() / ga
        tokens = max(c.get("num_items_in_batch", n.sum()), 1) / c.get("num_processes", 1)
        return (x * m).sum() / (tokens * ga / c.get("steps_per_generation", ga))

    def geo_mean(self, l, o, m, w, keep):
        """GMPO: mean over all rows of -A exp(mean of sign-aware clipped log-ratios)."""
        c, a, used = self.c, self.a, m * keep
        n = np.maximum(used.sum(1), 1)
        d, clipped = l - o, np.clip(l - o, -c["epsilon_low"], c["epsilon_high"])
        chosen = np.where(a > 0, np.minimum(d, clipped), np.maximum(d, clipped)) * (a != 0)
        # TRL counts an empty row with ratio 1, verl with advantage 0.
        row_a = (a * m).sum(1) / np.maximum(m.sum(1), 1) if self.verl else a[:, 0]
        row = np.exp((chosen * used).sum(1) / n) * row_a
        if self.verl and c.get("rollout_is"):
            row = row * np.exp((np.log(w + 1e-10) * m).sum(1) / n)
        return -row.mean() / c.get("gradient_accumulation_steps", 1)

    def __call__(self, hidden, lm_head):
        c, sg, x = self.c, self.sg, self.x
        l, h = self.policy(hidden, lm_head)
        self.a = x["advantages"][:, None] + 0 * l if x["advantages"].ndim == 1 else x["advantages"]
        o = x.get("old_logp", sg("old", l))
        m, w = self.masks_and_weights(o)
        keep = np.ones_like(m)
        rho = c.get("top_entropy_quantile", 1.0)
        if rho < 1:
            keep = sg("entropy", h >= np.quantile(h[m > 0], 1 - rho))
        if c["loss_type"] == "geo_mean":
            total, r = self.geo_mean(l, o, m, w, keep), 1.0
        else:
            out, r = self.per_token(l, o, m, w)
            threshold = c.get("off_policy_mask_threshold")
            if threshold is not None:
                drift = np.nan_to_num(x.get("sampler_logp", o) - sg("now", l), nan=0.0) * m
                drift = drift.sum(1, keepdims=True) / np.maximum(m.sum(1, keepdims=True), 1)
                out = out * ((self.a >= 0) | (drift <= threshold))
            out = out * keep * (1 if c["loss_type"] == "vespo" else w)
            sapo = self.verl and c["loss_type"] == "sapo"
            total = self.aggregate(out, m, "seq-mean-token-mean" if sapo else None)
        if c["beta"] != 0:
            total = total + c["beta"] * self.aggregate(self.kl(l, x["ref_logp"], r), m)
        coef = c.get("entropy_coef", 0.0)
        if coef != 0 and self.verl:
            total = total - coef * self.aggregate(h, m)
        elif coef != 0:
            used = m * keep
            total = total - coef * (h * used).sum() / max(used.sum(), 1) / c.get("gradient_accumulation_steps", 1)
        return total


def verify(path):
    """Returns the relative (loss error, gradient error); raises AssertionError if a file and its formula disagree."""
    metadata, tensors = read(path)
    f = Objective(metadata, tensors)
    at = [f.x["hidden"], f.x["lm_head"]]
    found, expected = f(*at), float(tensors["expected.loss"])
    loss_error = abs(found - expected) / max(1, abs(expected))
    rng, worst = np.random.default_rng(0), 0.0
    gradients = [tensors["expected.grad_hidden"], tensors["expected.grad_lm_head"]]
    for which, gradient in enumerate(gradients):
        for _ in range(3):
            direction = rng.standard_normal(gradient.shape)
            values = []
            for step in (STEP, -STEP):
                moved = list(at)
                moved[which] = at[which] + step * direction
                values.append(f(*moved))
            slope = (values[0] - values[1]) / (2 * STEP)
            noise = abs(expected) * 1e-15 / STEP  # rounding error of the difference of two losses of this size
            error = max(abs(slope - (gradient * direction).sum()) - noise, 0) / max(np.linalg.norm(gradient), 1e-9)
            worst = max(worst, error)
    assert loss_error < LOSS_TOLERANCE, f"{path.name}: loss {found}, the file says {expected}"
    assert worst < GRADIENT_TOLERANCE, f"{path.name}: gradients differ from finite differences by {worst:.1e}"
    return loss_error, worst
