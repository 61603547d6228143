"""Peers on PyTorch, as workers of `grpo bench`: python torch_worker.py eager|compile|chunks|liger|trl_fused|trl_selective

eager          hidden @ head^T, log_softmax in f32, gather; autograd
compile        the same with torch.compile
chunks         hand-written: chunks of tokens, gradients in the forward pass, no autograd
liger          liger_kernel's LigerFusedLinearGRPOLoss
trl_fused      TRL's ChunkedLogProbFunction, vocabulary tiles of 32768 (its GRPOTrainer's default)
trl_selective  TRL's selective_log_softmax on precomputed logits
"""

import sys
import warnings

import protocol
import torch
import torch.nn.functional as F

warnings.filterwarnings("ignore")
CHUNK = 256
VOCAB_TILE = 32768


class Problem:
    def __init__(self, job):
        torch.set_num_threads(job.threads)
        self.job = job
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[job.dtype]
        self.targets = torch.from_numpy(job.read("targets")).view(job.b, job.t)
        self.advantages = torch.from_numpy(job.per_token("advantages").copy())
        old = job.per_token("old_logp")
        self.old_logp = None if old is None else torch.from_numpy(old)
        self.mask = torch.ones(job.b, job.t)
        self.leaves = {}
        for name, shape in [("hidden", (job.b, job.t, -1)), ("lm_head", (job.v, -1)), ("logits", (job.b, job.t, job.v))]:
            if name in job.files:
                self.leaves[name] = torch.from_numpy(job.read(name)).view(dtype).view(shape).requires_grad_()

    def logits(self):
        return self.leaves["logits"] if self.job.h is None else self.leaves["hidden"] @ self.leaves["lm_head"].t()

    def losses(self, logp, old_logp, advantages):
        """Returns the loss of every token."""
        ratio = torch.exp(logp - (logp.detach() if old_logp is None else old_logp))
        clipped = ratio.clamp(1 - self.job.low, 1 + self.job.high)
        return -torch.min(ratio * advantages, clipped * advantages)

    def loss(self, logp):
        return self.losses(logp.float().view(self.job.b, self.job.t), self.old_logp, self.advantages).mean()


def autograd(problem, loss):
    """Returns a step with gradients by automatic differentiation."""
    leaves = list(problem.leaves.values())

    def step():
        value = loss()
        gradients = torch.autograd.grad(value, leaves)
        return value.detach(), {name: Array(g) for name, g in zip(problem.leaves, gradients)}

    return step


class Array:
    """A tensor with the two methods of numpy that norms need; numpy has no bf16."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tensor.shape

    def reshape(self, *shape):
        return Array(self.tensor.reshape(*shape))

    def __len__(self):
        return len(self.tensor)

    def __getitem__(self, rows):
        return Array(self.tensor[rows])

    def astype(self, dtype):
        return self.tensor.float().numpy().astype(dtype)


def eager(problem):
    def loss():
        logp = F.log_softmax(problem.logits().float(), -1).gather(-1, problem.targets[..., None])[..., 0]
        return problem.loss(logp)

    return loss


def trl_selective(problem):
    from trl.trainer.utils import selective_log_softmax

    return lambda: problem.loss(selective_log_softmax(problem.logits(), problem.targets))


def trl_fused(problem):
    from trl.kernels import ChunkedLogProbFunction

    hidden, head, n = problem.leaves["hidden"], problem.leaves["lm_head"], problem.job.n
    outputs = ("log_probs", "entropy")

    def loss():
        flat, targets = hidden.reshape(n, -1), problem.targets.view(n)
        logp, *_ = ChunkedLogProbFunction.apply(flat, head, None, targets, 1.0, VOCAB_TILE, None, 1.0, outputs)
        return problem.loss(logp)

    return loss


def liger(problem):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    job = problem.job
    advantages = problem.advantages[:, 0]
    if not torch.equal(problem.advantages, advantages[:, None].expand(job.b, job.t)):
        raise protocol.NotOffered("Liger takes one advantage per sequence: a batch of 1 has one per token here")
    fused = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, compiled=False, epsilon_low=job.low, epsilon_high=job.high, loss_type="bnpo"
    )
    hidden, head = problem.leaves["hidden"], problem.leaves["lm_head"]

    def loss():
        return fused(hidden, head, problem.targets, problem.mask, advantages, old_per_token_logps=problem.old_logp)[0]

    return loss


def chunks(problem):
    """Returns a hand-written step without autograd."""
    job = problem.job
    hidden, head = problem.leaves["hidden"].detach().view(job.n, -1), problem.leaves["lm_head"].detach()
    targets, advantages = problem.targets.view(-1), problem.advantages.view(-1)
    old = None if problem.old_logp is None else problem.old_logp.view(-1)

    @torch.no_grad()
    def step():
        dhidden, dhead = torch.empty_like(hidden), torch.zeros_like(head)
        loss = torch.zeros(())
        for start in range(0, job.n, CHUNK):
            rows = slice(start, min(start + CHUNK, job.n))
            z = (hidden[rows] @ head.t()).float()
            lse = z.logsumexp(-1)
            logp = z.gather(1, targets[rows, None])[:, 0] - lse
            with torch.enable_grad():
                leaf = logp.requires_grad_()
                part = problem.losses(leaf, None if old is None else old[rows], advantages[rows]).sum() / job.n
                (slope,) = torch.autograd.grad(part, leaf)
            loss += part.detach()
            z.sub_(lse[:, None]).exp_().mul_(-slope[:, None])
            z[torch.arange(len(slope)), targets[rows]] += slope
            z = z.to(hidden.dtype)
            torch.mm(z, head, out=dhidden[rows])
            dhead.addmm_(z.t(), hidden[rows])
        return loss, {"hidden": Array(dhidden), "lm_head": Array(dhead)}

    return step


def plan(job):
    problem = Problem(job)
    which = sys.argv[1]
    version = f"torch {torch.__version__}"
    if which == "chunks":
        step = chunks(problem)
    elif which == "compile":
        step = autograd(problem, torch.compile(eager(problem)))
    else:
        step = autograd(problem, globals()[which](problem))
    # Memory that libraries allocate once and keep is not part of a step.
    dtype = next(iter(problem.leaves.values())).dtype
    small = torch.randn(64, 64, dtype=dtype, requires_grad=True)
    (small @ small).float().log_softmax(-1).sum().backward()
    return step, {name: leaf.numel() * leaf.element_size() for name, leaf in problem.leaves.items()}, version


if __name__ == "__main__":
    protocol.serve(plan)
