"""Writes advantages.json: results of verl's and TRL's own code, and of formulas in papers, for small inputs, in float64.

    pip install torch trl==1.16.0 && pip install verl==0.9.1
    python tests/golden/advantages.py

verl's estimators are functions, which this script calls. TRL's are parts of its trainers' methods, so their lines are
cut from the installed files and executed unchanged. Inputs are float32 numbers, so that a reader in float32 sees the
same values.
"""

import ast
import importlib.metadata
import importlib.util
import json
import math
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from omegaconf import OmegaConf
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import nanstd
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import masked_mean

OUT = Path(__file__).with_suffix(".json")
F64 = torch.float64


def package_file(package, path):
    return (Path(importlib.util.find_spec(package).origin).parent / path).read_text()


def cut(source, first, last):
    """Returns the lines from the one that starts with `first` to the next one that starts with `last`."""
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    stop = next(i for i in range(start, len(lines)) if lines[i].strip().startswith(last))
    return textwrap.dedent("\n".join(lines[start : stop + 1]))


def numbers(tensor):
    """Returns a flat list with ten digits, more than float32 has; NaN is null."""
    values = torch.as_tensor(tensor, dtype=F64).flatten().tolist()
    short = (float(f"{v:.10g}") for v in values)
    return [None if math.isnan(v) else int(v) if v.is_integer() else v for v in short]


class Inputs:
    """Seeded random inputs of `groups` x `size` completions of at most `width` tokens."""

    def __init__(self, seed, groups, size, width=5, rewards="normal", inner_mask=False):
        self.generator = np.random.default_rng(seed)
        self.group_size, self.rows, self.width = size, groups * size, width
        lengths = self.generator.integers(1, width + 1, self.rows)
        self.mask = torch.zeros(self.rows, width, dtype=F64)
        for row, length in enumerate(lengths):
            self.mask[row, :length] = 1
            if inner_mask and length > 2:  # tool output: masked, with active tokens on both sides
                self.mask[row, self.generator.integers(1, length - 1)] = 0
        self.last = lengths - 1
        self.index = np.repeat(np.arange(groups), size)
        self.rewards = {"normal": self.normal, "binary": self.binary, "partly_equal": self.partly_equal}[rewards]()

    def tensor(self, values):
        return torch.tensor(np.asarray(values, dtype=np.float32).astype(np.float64))

    def normal(self):
        return self.tensor(self.generator.normal(0.5, 2.0, self.rows))

    def binary(self):
        return self.tensor(self.generator.integers(0, 2, self.rows))

    def partly_equal(self):
        """Returns rewards that are equal in the first group and have no finite binary form."""
        rewards = self.normal()
        rewards[: self.group_size] = rewards.new_tensor(np.float32(0.1))
        return rewards

    def per_token(self, low, high):
        return self.tensor(self.generator.uniform(low, high, (self.rows, self.width)))

    def outcome(self, rewards=None):
        """Returns rewards at the last token, as in verl."""
        tokens = torch.zeros(self.rows, self.width, dtype=F64)
        tokens[torch.arange(self.rows), torch.as_tensor(self.last)] = self.rewards if rewards is None else rewards
        return tokens

    def case(self, name, config, expected, **fields):
        lists = {key: numbers(value) for key, value in fields.items()}
        return {
            "name": name,
            "config": config,
            "group_size": self.group_size,
            "shape": [self.rows, self.width],
            "mask": numbers(self.mask),
            "expected": numbers(expected),
            **lists,
        }


def paper_cases(seed):
    """Estimators of papers, written in torch: MaxRL (arXiv 2602.02710; a group without a success has no advantage, as in
    prime-rl) and FlashREINFORCE (2026; TRL's experimental.flash_reinforce)."""
    shapes = [("binary", dict(groups=6, size=4)), ("large_groups", dict(groups=3, size=16)), ("groups_of_one", dict(groups=5, size=1))]
    for shape, arguments in shapes:
        for kind in ("binary", "normal"):
            seed += 1
            inputs = Inputs(seed, rewards=kind, **arguments)
            if kind == "binary" and inputs.group_size > 1:
                inputs.rewards[: inputs.group_size] = 0
                inputs.rewards[inputs.group_size : 2 * inputs.group_size] = 1
            groups = inputs.rewards.view(-1, inputs.group_size)
            mean = groups.mean(1, keepdim=True)
            max_rl = torch.where(mean > 0, (groups - mean) / mean, 0.0)
            yield inputs.case(f"paper max_rl {kind} {shape}", {"estimator": "max_rl"}, max_rl, rewards=inputs.rewards)
            flash = inputs.rewards - inputs.rewards.mean()
            yield inputs.case(
                f"paper flash_reinforce {kind} {shape}", {"estimator": "flash_reinforce"}, flash, rewards=inputs.rewards
            )


VERL = {"eps": 1e-6, "group_of_one": "keep"}
SHAPES = [
    ("groups_of_four", dict(groups=2, size=4)),
    ("binary", dict(groups=2, size=5, rewards="binary")),
    ("one_group_equal", dict(groups=2, size=4, rewards="partly_equal")),
    ("masked_inside", dict(groups=2, size=4, inner_mask=True)),
    ("groups_of_one", dict(groups=5, size=1)),
]


def verl_outcome_cases(seed):
    """Estimators with one reward per completion."""
    by_name = {
        "grpo": ("grpo", {"estimator": "group"}, {}),
        "grpo_without_std": (
            "grpo",
            {"estimator": "group", "scale_rewards": "none"},
            {"norm_adv_by_std_in_grpo": False},
        ),
        "mean_only": ("grpo", {"estimator": "mean_only"}, {"norm_adv_by_std_in_grpo": False}),
        "rloo": ("rloo", {"estimator": "rloo"}, {}),
        "rloo_vectorized": ("rloo_vectorized", {"estimator": "rloo", "group_of_one": "zero"}, {}),
        "opo": ("opo", {"estimator": "opo"}, {}),
        "gpg": ("gpg", {"estimator": "gpg"}, {}),
        "reinforce_plus_plus_baseline": (
            "reinforce_plus_plus_baseline",
            {"estimator": "reinforce_plus_plus_baseline"},
            {},
        ),
        "gdpo_of_one_reward": ("gdpo", {"estimator": "gdpo", "whiten": "tokens"}, {}),
        "grpo_passk": ("grpo_passk", {"estimator": "grpo_passk"}, {"config": OmegaConf.create({})}),
        "grpo_passk_without_std": (
            "grpo_passk",
            {"estimator": "grpo_passk", "scale_rewards": "none"},
            {"config": OmegaConf.create({"norm_adv_by_std_in_grpo": False})},
        ),
    }
    for shape, arguments in SHAPES:
        for name, (function, config, extra) in by_name.items():
            if shape == "groups_of_one" and function == "grpo_passk":
                continue  # verl refuses
            seed += 1
            inputs = Inputs(seed, **arguments)
            estimator = core_algos.get_adv_estimator_fn(function)
            expected, _ = estimator(
                token_level_rewards=inputs.outcome(), response_mask=inputs.mask, index=inputs.index, **extra
            )
            yield inputs.case(f"verl {name} {shape}", VERL | config, expected * inputs.mask, rewards=inputs.rewards)


def verl_gdpo_cases(seed):
    """Three reward functions. verl computes them in float32; during the call torch.float32 is replaced by float64."""
    for shape, arguments in SHAPES:
        seed += 1
        inputs = Inputs(seed, **arguments)
        rewards = torch.stack([inputs.rewards, inputs.normal(), inputs.binary()], dim=1)
        weights = [1.0, 0.5, 2.0]
        lengths = torch.as_tensor(inputs.last + 1)
        batch = {
            "prompts": torch.zeros(inputs.rows, 0),
            "attention_mask": (torch.arange(inputs.width) < lengths[:, None]).long(),
        }
        with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(np, "float32", np.float64):
            expected, _ = core_algos.compute_gdpo_outcome_advantage(
                token_level_rewards=inputs.outcome(),
                response_mask=inputs.mask,
                index=inputs.index,
                config=OmegaConf.create({"gdpo_reward_keys": ["a", "b", "c"], "gdpo_reward_weights": weights}),
                non_tensor_batch={key: rewards[:, k].numpy() for k, key in enumerate("abc")},
                batch=batch,
            )
        config = VERL | {"estimator": "gdpo", "whiten": "tokens", "reward_weights": weights}
        yield inputs.case(f"verl gdpo {shape}", config, expected * inputs.mask, rewards=rewards)


def verl_token_cases(seed):
    """Estimators with rewards per token: at the last token only, or at every token (a KL penalty)."""
    for shape, arguments in SHAPES:
        for dense in (False, True):
            if dense and shape in ("binary", "one_group_equal"):
                continue
            seed += 1
            inputs = Inputs(seed, **arguments)
            tokens = inputs.outcome() + (inputs.per_token(-0.2, 0.2) * inputs.mask if dense else 0.0)
            tokens = inputs.tensor(tokens) * inputs.mask
            given = {"token_rewards": tokens} if dense else {"rewards": inputs.rewards}
            kind = f"{'dense' if dense else 'outcome'} {shape}"
            common = dict(token_level_rewards=tokens, response_mask=inputs.mask)

            for gamma in (1.0, 0.9):
                expected, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
                    **common, config=OmegaConf.create({"gamma": gamma})
                )
                config = VERL | {"estimator": "reinforce_plus_plus", "whiten": "tokens", "gamma": gamma}
                yield inputs.case(f"verl reinforce_plus_plus gamma {gamma} {kind}", config, expected, **given)

            greedy = inputs.normal()
            expected, _ = core_algos.compute_remax_outcome_advantage(**common, reward_baselines=greedy)
            config = VERL | {"estimator": "remax"}
            yield inputs.case(f"verl remax {kind}", config, expected * inputs.mask, greedy_rewards=greedy, **given)

            values = inputs.per_token(-1, 1)
            for gamma, lam in ((1.0, 1.0), (0.95, 0.9)):
                expected, targets = core_algos.compute_gae_advantage_return(tokens, values, inputs.mask, gamma, lam)
                yield inputs.case(
                    f"verl gae gamma {gamma} lambda {lam} {kind}",
                    VERL | {"estimator": "gae", "gamma": gamma, "lam": lam},
                    expected * inputs.mask,
                    value_targets=targets * inputs.mask,
                    values=values,
                    **given,
                )

            old_logp, squares = inputs.per_token(-3, -0.1), inputs.per_token(0.05, 0.9)
            weights = inputs.per_token(0.5, 2)
            for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
                for correction in (None, weights):
                    expected, _ = core_algos.get_adv_estimator_fn(name)(
                        **common,
                        index=inputs.index,
                        old_log_probs=old_logp,
                        sum_pi_squared=squares,
                        rollout_is_weights=correction,
                    )
                    extra = {} if correction is None else {"rollout_is_weights": correction}
                    yield inputs.case(
                        f"verl {name} {'plain' if correction is None else 'weighted'} {kind}",
                        VERL | {"estimator": name},
                        expected,
                        old_logp=old_logp,
                        sum_pi_squared=squares,
                        **extra,
                        **given,
                    )


TRL_GRPO = cut(
    package_file("trl", "trainer/grpo_trainer.py"),
    "unscorable_mask = torch.isnan",
    "advantages = torch.nan_to_num",
)
TRL_RLOO = cut(
    package_file("trl", "trainer/rloo_trainer.py"), "if self.reward_clip_range:", "advantages = torch.nan_to_num"
)


def with_missing(inputs, functions):
    """Returns rewards [B, K], of which a quarter is missing, one row completely and one group except for one reward."""
    rewards = torch.stack([inputs.rewards] + [inputs.normal() for _ in range(functions - 1)], dim=1)
    rewards[torch.tensor(inputs.generator.uniform(size=rewards.shape) < 0.25)] = math.nan
    rewards[0] = math.nan
    rewards[-inputs.group_size : -1] = math.nan
    rewards[-1, 0] = 1.5
    return rewards


def trl_cases(seed):
    for shape, arguments in SHAPES:
        for functions in (1, 3):
            for missing in (False, True):
                seed += 1
                inputs = Inputs(seed, **arguments)
                rewards = torch.stack([inputs.rewards] + [inputs.normal() for _ in range(functions - 1)], dim=1)
                if missing:
                    rewards = with_missing(inputs, functions)
                weights = [1.0, 0.25, 2.0][:functions]
                kind = f"{functions} rewards{' with missing ones' if missing else ''} {shape}"
                for aggregation, scale in [
                    ("sum_then_normalize", "group"),
                    ("sum_then_normalize", "batch"),
                    ("sum_then_normalize", "none"),
                    ("normalize_then_sum", None),
                ]:
                    trainer = SimpleNamespace(
                        multi_objective_aggregation=aggregation,
                        scale_rewards=scale,
                        reward_weights=torch.tensor(weights, dtype=F64),
                        reward_funcs=weights,
                    )
                    scope = dict(
                        torch=torch,
                        nanstd=nanstd,
                        self=trainer,
                        device="cpu",
                        num_generations=inputs.group_size,
                        rewards_per_func=rewards.clone(),
                    )
                    exec(TRL_GRPO, scope)
                    config = {"reward_weights": weights}
                    config |= {"scale_rewards": scale} if scale else {"estimator": "gdpo"}
                    name = f"trl {aggregation} {scale} {kind}"
                    yield inputs.case(name, config, scope["advantages"], rewards=rewards)

                if functions == 1:
                    yield from trl_rloo_cases(inputs, rewards[:, 0], kind)


def trl_rloo_cases(inputs, rewards, kind):
    old_logp, ref_logp = inputs.per_token(-3, -0.1), inputs.per_token(-3, -0.1)
    for normalize in (False, True):
        for beta in (0.0, 0.05):
            trainer = SimpleNamespace(reward_clip_range=None, beta=beta, normalize_advantages=normalize)
            scope = dict(
                torch=torch,
                nanstd=nanstd,
                gather=lambda kl: kl,
                self=trainer,
                num_generations=inputs.group_size,
                rewards=rewards.clone(),
                old_per_token_logps=old_logp,
                ref_per_token_logps=ref_logp,
                completion_mask=inputs.mask,
            )
            exec(TRL_RLOO, scope)
            config = {"estimator": "rloo", "whiten": "sequences" if normalize else "none"}
            extra = dict(old_logp=old_logp, ref_logp=ref_logp)
            case = inputs.case(
                f"trl rloo {'normalized ' if normalize else ''}beta {beta} {kind}",
                config,
                scope["advantages"],
                rewards=rewards,
                **(extra if beta else {}),
            )
            yield case | ({"kl_in_reward": {"penalty": "k1", "beta": beta}} if beta else {})


def verl_function(path, name):
    """Returns a function of a module that is too large to import."""
    tree = ast.parse(package_file("verl", path))
    node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    scope = dict(torch=torch, core_algos=core_algos, masked_mean=masked_mean, DataProto=object)
    exec(compile(ast.Module([node], []), path, "exec"), scope)
    return scope[name]


def kl_in_reward_cases(seed):
    apply_kl_penalty = verl_function("trainer/ppo/ray_trainer.py", "apply_kl_penalty")

    class Batch(dict):
        @property
        def batch_size(self):
            return self["response_mask"].shape

    for shape, arguments in SHAPES:
        for penalty in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"):
            seed += 1
            inputs = Inputs(seed, **arguments)
            old_logp, ref_logp = inputs.per_token(-3, -0.1), inputs.per_token(-3, -0.1)
            old_logp[0, 0], ref_logp[1, 0] = -40.0, -30.0  # beyond both of verl's bounds
            data = SimpleNamespace(
                batch=Batch(
                    response_mask=inputs.mask,
                    token_level_scores=inputs.outcome(),
                    old_log_probs=old_logp,
                    ref_log_prob=ref_logp,
                )
            )
            controller = core_algos.AdaptiveKLController(0.05, target_kl=0.1, horizon=100)
            data, metrics = apply_kl_penalty(data, controller, penalty)
            yield inputs.case(
                f"verl {penalty} {shape}",
                {"type": "adaptive", "kl_coef": 0.05, "target_kl": 0.1, "horizon": 100.0},
                data.batch["token_level_rewards"] * inputs.mask,
                rewards=inputs.rewards,
                old_logp=old_logp,
                ref_logp=ref_logp,
            ) | {"penalty": penalty, "kl": metrics["actor/reward_kl_penalty"], "next_kl_coef": controller.value}


def entropy_controller_case():
    source = package_file("trl", "trainer/grpo_trainer.py")
    apply = cut(source, "apply_coef = self.entropy_coef if", "apply_coef")
    update = cut(source, "world_entropy = (", "self._last_world_entropy = world_entropy")
    bounds = dict(entropy_coef_min=0.001, entropy_coef_max=0.012, entropy_coef_delta=0.005, entropy_target=0.2)
    trainer = SimpleNamespace(entropy_coef=0.004, _last_world_entropy=math.inf, args=SimpleNamespace(**bounds))
    windows = [[30.0, 100], [15.0, 100], [20.0, 100], [10.0, 100], [25.0, 100], [90.0, 100], [9.0, 10], [1.0, 10]]
    steps = []
    for window in windows:
        exec(apply, scope := dict(self=trainer))
        exec(update, dict(self=trainer, window_stats=torch.tensor(window, dtype=F64)))
        steps.append({"window": window, "applied": scope["apply_coef"], "next_coef": trainer.entropy_coef})
    return {"config": bounds | {"entropy_coef": 0.004}, "steps": steps}


def overlong_case():
    lengths = [0, 79, 80, 81, 90, 99, 100, 101, 500]
    punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    return {
        "config": {"max_completion_len": 100, "soft_punish_cache": 20},
        "lengths": lengths,
        "expected": punish([[1] * length for length in lengths]),
    }


def main():
    golden = {
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "trl", "verl")},
        "advantages": [
            *verl_outcome_cases(1000),
            *verl_gdpo_cases(2000),
            *verl_token_cases(3000),
            *trl_cases(4000),
            *paper_cases(6000),
        ],
        "kl_in_reward": list(kl_in_reward_cases(5000)),
        "entropy_controller": entropy_controller_case(),
        "overlong": overlong_case(),
    }
    compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    lines = []  # one case per line
    for key, value in golden.items():
        cases = "[\n%s\n]" % ",\n".join(map(compact, value)) if isinstance(value, list) else compact(value)
        lines.append(f'"{key}":{cases}')
    OUT.write_text("{\n%s\n}\n" % ",\n".join(lines))
    print({key: len(value) for key, value in golden.items() if isinstance(value, list)}, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
