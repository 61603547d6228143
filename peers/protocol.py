"""The worker's side of `grpo bench`: one JSON value per line, requests on standard input, replies on standard output.

A peer of the loss is a function from a Job to a step; a step returns the loss and its gradients by name, after they are computed. This
module measures time and memory, and replies, for all peers. Only the loss needs numpy.
"""

import gc
import json
import math
import os
import sys
import time

# Replies have a separate channel, because libraries print to standard output.
_replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


class NotOffered(Exception):
    """A combination that a peer does not support."""


class Job:
    """The problem: sizes, the loss's options, and the tensors as numpy arrays (bf16 as uint16)."""

    def __init__(self, request):
        config = request["config"]
        shape, loss = config["shape"], config["loss"]
        self.b, self.t, self.v, self.h = shape["batch"], shape["tokens"], shape["vocab"], shape["hidden"]
        self.n = self.b * self.t
        self.threads = request["threads"] or os.cpu_count()
        self.files = request["tensors"]
        self.dtype = self.files["logits" if self.h is None else "hidden"]["dtype"]
        if config["layout"] != "vocab_hidden":
            raise NotOffered("the peers take the head as [V, H]")
        plain = loss["beta"] == 0 and loss["entropy_coef"] == 0 and loss["delta"] is None and loss["temperature"] == 1
        # Sequences have equal lengths, so the mean over sequences of means over tokens is the mean over tokens.
        token = loss["importance_sampling_level"] in (None, "token") and loss["loss_type"] in ("grpo", "bnpo")
        if not (plain and token):
            raise NotOffered("the peers compute the loss `grpo` or `bnpo` per token: beta 0, temperature 1, no entropy bonus")
        self.low, self.high = loss["epsilon_low"], loss["epsilon_high"]

    def read(self, name):
        """Returns the tensor `name`, or None."""
        import numpy as np

        if name not in self.files:
            return None
        file = self.files[name]
        dtype = {"f32": np.float32, "bf16": np.uint16, "i64": np.int64}[file["dtype"]]
        return np.fromfile(file["path"], dtype).reshape(file["shape"])

    def per_token(self, name):
        """Returns advantages or log-probabilities as [B, T]; advantages of sequences are repeated."""
        import numpy as np

        values = self.read(name)
        if values is None:
            return None
        per_sequence = values.size == self.b != self.n
        return np.repeat(values[:, None], self.t, 1) if per_sequence else values.reshape(self.b, self.t)


def status(key):
    """Returns VmRSS or VmHWM without pages of programs and other files."""
    with open("/proc/self/status") as file:
        sizes = {words[0]: int(words[1]) * 1024 for words in map(str.split, file) if words[-1] == "kB"}
    return sizes[key + ":"] - sizes["RssFile:"] - sizes["RssShmem:"]


def reset_high_water():
    """Resets VmHWM to VmRSS; returns False if the kernel does not support it."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return True
    except OSError:
        return False


class _Measured:
    """A peer, and measurements of its memory."""

    def __init__(self, job, plan):
        began = time.perf_counter()
        self.step, leaves, self.version = plan(job)
        self.seconds = time.perf_counter() - began
        self.inputs = sum(leaves.values())
        # Gradients have the dtype of their tensors; logp and other per-token results are small.
        self.outputs = self.inputs
        gc.collect()
        # Existing objects are excluded from garbage collection, which would take longer than a step.
        gc.freeze()
        self.resident = status("VmRSS")

    def planned(self):
        size = {"inputs": self.inputs, "outputs": self.outputs, "workspace": None}
        return {"planned": {"plan_seconds": self.seconds, "bytes": size, "version": self.version}}

    def stepped(self, check):
        can_reset = reset_high_water()
        began = time.perf_counter()
        loss, gradients = self.step()
        seconds = time.perf_counter() - began
        # Gradients are allocated in every step: they are part of the peak, but no workspace.
        high = status("VmHWM") - self.resident - self.outputs if can_reset else None
        reply = {
            "seconds": seconds,
            "loss": float(loss),
            "high_water": None if high is None else max(high, 0),
            "resident_before": self.resident,
            "resident_after": status("VmRSS"),
        }
        if check:
            reply["grad_norms"] = {name: _norm(gradient) for name, gradient in gradients.items()}
        return {"stepped": reply}


def _norm(gradient):
    """Computes the norm in pieces, because an f64 copy of the tensor would exceed the peak memory of the step."""
    import numpy as np

    rows = gradient.reshape(-1, gradient.shape[-1])
    piece = max(1, (1 << 22) // rows.shape[-1])
    return math.sqrt(sum(float((rows[i : i + piece].astype(np.float64) ** 2).sum()) for i in range(0, len(rows), piece)))


def serve(plan):
    """Answers requests about the loss. `plan(job)` returns a function for a step, the bytes of the inputs by
    name, and the version; a step returns the loss and a dict of gradients, as arrays with reshape and
    astype."""
    peer = None

    def reply(request):
        nonlocal peer
        if "plan" in request:
            peer = _Measured(Job(request["plan"]), plan)
            return peer.planned()
        if "step" in request:
            return peer.stepped(request["step"]["check"])
        raise NotOffered("the peers score no inputs")

    answer(reply)


def answer(reply):
    """Answers requests with `reply(request)` until there are no more."""
    for line in sys.stdin:
        try:
            answered = reply(json.loads(line))
        except Exception as error:  # noqa: BLE001: after any error, the other jobs run.
            words = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            answered = {"failed": {"error": words, "not_offered": isinstance(error, NotOffered)}}
        _replies.write(json.dumps(answered) + "\n")
        _replies.flush()
