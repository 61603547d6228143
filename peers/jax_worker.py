"""Peers on JAX, as workers of `grpo bench`: python jax_worker.py base|chunks

base    hidden x head^T, log_softmax, take_along_axis; jax.value_and_grad. Logits are rounded to the inputs' dtype.
chunks  a scan over chunks of tokens, gradients in the forward pass, dW carried in f32
"""

import os
import sys
import warnings

import protocol

warnings.filterwarnings("ignore")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
CHUNK = 256
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))
TN = (((0,), (0,)), ((), ()))


def plan(job):
    # XLA uses as many threads as the process has processors.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np
    from jax import lax

    f32 = jnp.float32
    dtype = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}[job.dtype]
    names = ["logits"] if job.h is None else ["hidden", "lm_head"]
    leaves = [jax.block_until_ready(jnp.array(job.read(name).view(dtype), copy=True)) for name in names]
    targets = jnp.asarray(job.read("targets").astype(np.int32))
    advantages = jnp.asarray(job.per_token("advantages").reshape(-1))
    old = job.per_token("old_logp")
    old = None if old is None else jnp.asarray(old.reshape(-1))

    def losses(logp, old, advantages):
        ratio = jnp.exp(logp - (lax.stop_gradient(logp) if old is None else old))
        return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - job.low, 1 + job.high) * advantages)

    def of_logits(z, targets, old, advantages):
        logp = jnp.take_along_axis(jax.nn.log_softmax(z.astype(f32), -1), targets[:, None], -1)[:, 0]
        return losses(logp, old, advantages).mean()

    def base(h, w, targets, old, advantages):
        z = lax.dot_general(h, w, NT, preferred_element_type=f32).astype(h.dtype)
        return of_logits(z, targets, old, advantages)

    def chunks(h, w, targets, old, advantages):
        chunk = min(CHUNK, job.n)
        if job.n % chunk:
            raise protocol.NotOffered(f"the scan takes chunks of {chunk} tokens: {job.n} are not a multiple")

        def body(dw, part):
            hc, yc, oc, ac = part
            z = lax.dot_general(hc, w, NT, preferred_element_type=f32)
            lse = jax.nn.logsumexp(z, -1)
            logp = jnp.take_along_axis(z, yc[:, None], -1)[:, 0] - lse
            loss, slope = jax.value_and_grad(lambda logp: losses(logp, oc, ac).sum() / job.n)(logp)
            is_target = lax.broadcasted_iota(jnp.int32, z.shape, 1) == yc[:, None]
            dz = jnp.where(is_target, slope[:, None], 0.0) - jnp.exp(z - lse[:, None]) * slope[:, None]
            dz = dz.astype(h.dtype)
            dh = lax.dot_general(dz, w, NN, preferred_element_type=f32).astype(h.dtype)
            return dw + lax.dot_general(dz, hc, TN, preferred_element_type=f32), (loss, dh)

        parts = jax.tree.map(lambda x: x.reshape((-1, chunk) + x.shape[1:]), (h, targets, old, advantages))
        dw, (loss, dh) = lax.scan(body, jnp.zeros(w.shape, f32), parts)
        return loss.sum(), (dh.reshape(h.shape), dw.astype(w.dtype))

    if sys.argv[1] == "chunks":
        program = chunks
    elif job.h is None:
        program = jax.value_and_grad(of_logits, argnums=(0,))
    else:
        program = jax.value_and_grad(base, argnums=(0, 1))
    arguments = (*leaves, targets, old, advantages)
    compiled = jax.jit(program).lower(*arguments).compile()

    def step():
        loss, gradients = jax.block_until_ready(compiled(*arguments))
        return loss, {name: np.asarray(g) for name, g in zip(names, gradients)}

    return step, {name: leaf.nbytes for name, leaf in zip(names, leaves)}, f"jax {jax.__version__}"


if __name__ == "__main__":
    protocol.serve(plan)
