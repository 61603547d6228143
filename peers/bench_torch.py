"""Measures the GRPO loss in PyTorch, and in Liger if it is installed, at the shape of a report of `grpo bench`.

    grpo bench configs/bench/fused.yaml --backend pjrt:cuda --out fused.json
    python3 peers/bench_torch.py fused.json --output fused-torch.json

Reads shape, dtype, loss and rounds from the report, measures loss and gradients on the GPU (or the CPU if there is
none), prints a Markdown table and writes the same fields. Inputs have the same distributions as in `grpo bench`: logits of standard deviation
2, ratios on both sides of either clip. Memory is the allocator's peak minus the inputs; it includes gradients, because
PyTorch allocates them in every step.
"""

import argparse
import json
import math
import statistics
import sys
import time

import torch

LOGIT_STD, RATIO_STD = 2.0, 0.15


def grpo(logp, old_logp, advantages, low, high):
    """Returns the mean over sequences of the mean over their tokens."""
    ratio = torch.exp(logp - old_logp)
    clipped = torch.clamp(ratio, 1 - low, 1 + high)
    a = advantages[:, None]
    return -torch.minimum(ratio * a, clipped * a).mean(dim=1).mean()


def logp_of(logits, targets):
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, targets[..., None])[..., 0]


class Problem:
    def __init__(self, config, seed, device):
        shape, loss = config["shape"], config["loss"]
        self.b, self.t, self.v, self.h = shape["batch"], shape["tokens"], shape["vocab"], shape["hidden"]
        self.device = device
        self.dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[config["dtype"]]
        self.low = 0.2 if loss["epsilon_low"] is None else loss["epsilon_low"]  # The default of `grpo`.
        self.high = self.low if loss["epsilon_high"] is None else loss["epsilon_high"]
        plain = loss["loss_type"] == "grpo" and loss["beta"] == 0 and loss["temperature"] == 1 and loss["entropy_coef"] == 0
        if not plain or loss["importance_sampling_level"] not in (None, "token"):
            sys.exit("error: the peers compute the plain grpo loss per token: beta 0, temperature 1, no entropy bonus")
        torch.manual_seed(seed)
        self.targets = torch.randint(self.v, (self.b, self.t), device=device)
        self.advantages = torch.randn(self.b, device=device)
        if self.h is None:
            self.leaves = [self.normal(LOGIT_STD, self.b, self.t, self.v)]
        else:
            self.leaves = [self.normal(1.0, self.b, self.t, self.h), self.normal(LOGIT_STD / math.sqrt(self.h), self.v, self.h)]
        with torch.no_grad():
            rows = [logp_of(self.logits(slice(i, i + 512)), self.targets[:, i : i + 512]) for i in range(0, self.t, 512)]
            self.old_logp = (torch.cat(rows, dim=1) + RATIO_STD * torch.randn(self.b, self.t, device=device)).clamp(max=0)
        for leaf in self.leaves:
            leaf.requires_grad_()

    def normal(self, std, *shape):
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0, std)

    def logits(self, tokens=slice(None)):
        first = self.leaves[0][:, tokens]
        return first if self.h is None else first @ self.leaves[1].T

    def materialised(self):
        return grpo(logp_of(self.logits(), self.targets), self.old_logp, self.advantages, self.low, self.high)


def variants(problem):
    """Returns, by name, constructors of measured functions, which return the loss."""

    def eager():
        return problem.materialised

    def compiled():
        return torch.compile(problem.materialised)

    def liger():
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss = LigerFusedLinearGRPOLoss(
            beta=0.0, use_ref_model=False, epsilon_low=problem.low, epsilon_high=problem.high, loss_type="grpo", temperature=1.0
        )
        mask = torch.ones(problem.b, problem.t, device=problem.device)

        def step():
            hidden, head = problem.leaves
            return loss(
                hidden, head, problem.targets, mask, problem.advantages, old_per_token_logps=problem.old_logp
            )[0]

        return step

    found = {"torch_eager": eager, "torch_compile": compiled}
    if problem.h is not None:
        try:
            import liger_kernel  # noqa: F401

            found["liger_fused_linear_grpo"] = liger
        except ImportError:
            pass
    return found


def measure(problem, make, rounds):
    cuda = problem.device.type == "cuda"

    def step():
        for leaf in problem.leaves:
            leaf.grad = None
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        loss = function()
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began, loss

    began = time.perf_counter()
    function = make()
    step()
    first = time.perf_counter() - began
    memory = None
    if cuda:
        for leaf in problem.leaves:
            leaf.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        memory = {"before": before, "step": torch.cuda.max_memory_allocated() - before}
    for _ in range(rounds["warmup"]):
        step()
    loss, times = None, []
    for _ in range(rounds["steps"]):
        seconds, loss = step()
        times.append(seconds)
    n = problem.b * problem.t
    flops = 0 if problem.h is None else 3 * 2 * n * problem.v * problem.h
    ordered = sorted(times)
    quantile = lambda q: ordered[max(math.ceil(q * len(ordered)), 1) - 1]  # noqa: E731
    seconds = None
    if times:
        seconds = {"min": ordered[0], "p50": quantile(0.5), "p90": quantile(0.9), "mean": statistics.fmean(times), "all": times}
    return {
        "status": "measured",
        "loss": None if loss is None else loss.item(),
        "first_call_seconds": first,
        "seconds": seconds,
        "tokens_per_second": seconds and n / seconds["p50"],
        "useful_flops": flops,
        "useful_flops_per_second": seconds and flops / seconds["p50"],
        "device_bytes": memory,
    }


def table(document):
    yield f"{document['device']}, torch {document['torch']}, liger {document['liger']}"
    yield ""
    yield "| peer | min | p50 | p90 | mean | tokens/s | TFLOP/s | x floor | high water with gradients | first call |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name, v in document["variants"].items():
        if v["status"] != "measured" or v["seconds"] is None:
            yield f"| {name} | {v['status']} | | | | | | | | |"
            continue
        ms = " | ".join(f"{1e3 * v['seconds'][k]:.2f} ms" for k in ("min", "p50", "p90", "mean"))
        rate = f"{v['useful_flops_per_second'] / 1e12:.2f}" if v["useful_flops"] else "-"
        floor = "-" if v["times_floor"] is None else f"{v['times_floor']:.2f}"
        memory = "-" if v["device_bytes"] is None else f"{v['device_bytes']['step'] / 1e9:.3f} GB"
        yield f"| {name} | {ms} | {v['tokens_per_second']:.0f} | {rate} | {floor} | {memory} | {v['first_call_seconds']:.1f} s |"
    for name, v in document["variants"].items():
        if "error" in v:
            yield f"\n{name}: {v['error']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", help="JSON document of `grpo bench`")
    parser.add_argument("--output", help="write the JSON document to this file")
    args = parser.parse_args()
    with open(args.report) as file:
        report = json.load(file)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    if len(report["cases"]) != 1:
        sys.exit("error: the report has several problems: measure them one by one")
    report = report["cases"][0]
    problem = Problem(report["config"], report["config"]["inputs"]["seed"], device)
    floor = report["floors"].get("floor_logits" if problem.h is None else "floor_hidden_lm_head") or {}
    try:
        from importlib.metadata import version

        liger = version("liger_kernel")
    except ImportError:
        liger = "-"
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    document = {"device": name, "torch": torch.__version__, "liger": liger, "config": report["config"], "variants": {}}
    for name, make in variants(problem).items():
        print(f"measuring {name} ...", file=sys.stderr)
        try:
            result = measure(problem, make, report["rounds"])
            floor_p50 = (floor.get("step_ms") or {}).get("p50")
            result["times_floor"] = 1e3 * result["seconds"]["p50"] / floor_p50 if floor_p50 and result["seconds"] else None
        except Exception as error:  # A variant that fails is reported, and the others run.
            result = {"status": "failed", "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
        document["variants"][name] = result
        for leaf in problem.leaves:
            leaf.grad = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.output:
        with open(args.output, "w") as file:
            json.dump(document, file, indent=2)
    print("\n".join(table(document)))
    return 1 if any(v["status"] == "failed" for v in document["variants"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
