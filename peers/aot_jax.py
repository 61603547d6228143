"""Compiles a whole GRPO training step, or a rollout, written in JAX, with libtpu: the peer of `grpo aot configs/train/X.yaml`.

    python3.11 -m venv ~/peers-jax && ~/peers-jax/bin/pip install jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.51
    python peers/aot_jax.py CONFIG.json --target v6e:1x1 --batch 8 --length 1024
    python peers/aot_jax.py CONFIG.json --rollout --batch 64 --prompt 256 --length 1024
    python peers/aot_jax.py CONFIG.json --target v6e:2x4 --mesh fsdp=2,tensor=4 --batch 64 --length 1024 --chunk 16384
    python peers/aot_jax.py CONFIG.json --target v6e:2x4 --mesh data=2,tensor=4 --decode --batch 64 --length 1280

CONFIG.json is a model's config.json (Qwen2, Qwen3); no weights and no TPU are needed. Prints one JSON object: bytes, the compiler's time estimate,
and the compile time.

The step follows tunix and MaxText: a scan over layers without residuals, f32 master weights and moments, bf16 products, the head in chunks
of tokens with gradients in the forward pass, AdamW with a clipped norm, all buffers donated. The compiler's estimate counts the body of a
loop once, so the time is extrapolated from unrolled programs of two and three layers.

With --mesh the programs are sharded over all chips of the target: rows over `data` and `fsdp`; weights over `fsdp` and `tensor`; heads, the
MLP and the tokens of the residual stream over `tensor`; the vocabulary over `tensor` and `fsdp`. --decode compiles one step of a
rollout: a token for every row, with a cache of --length columns.
"""

import argparse
import json
import math
import os
import resource
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
VOCAB = ("tensor", "fsdp")


class Config:
    """The shape of a decoder, from config.json, and the mesh of its programs, if any."""

    def __init__(self, path, layers=None, mesh=None):
        self.mesh = mesh
        with open(path) as file:
            c = json.load(file)
        self.vocab, self.hidden, self.mlp = c["vocab_size"], c["hidden_size"], c["intermediate_size"]
        self.layers = layers or c["num_hidden_layers"]
        self.heads, self.kv = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim = c.get("head_dim") or self.hidden // self.heads
        self.theta = (c.get("rope_parameters") or c).get("rope_theta", 1e4)
        self.eps, self.tied = c["rms_norm_eps"], c.get("tie_word_embeddings", False)
        self.qk_norm = c["model_type"] == "qwen3"
        self.bias = c["model_type"] == "qwen2"

    def parameters(self):
        h, q, k = self.hidden, self.heads * self.head_dim, self.kv * self.head_dim
        layers = dict(norm1=(h,), norm2=(h,), q=(h, q), k=(h, k), v=(h, k), o=(q, h))
        layers |= dict(gate=(h, self.mlp), up=(h, self.mlp), down=(self.mlp, h))
        if self.bias:
            layers |= dict(bq=(q,), bk=(k,), bv=(k,))
        if self.qk_norm:
            layers |= dict(nq=(self.head_dim,), nk=(self.head_dim,))
        shapes = dict(embed=(self.vocab, h), norm=(h,), layers={n: (self.layers, *s) for n, s in layers.items()})
        if not self.tied:
            shapes["head"] = (self.vocab, h)
        return shapes

    def shardings(self):
        """Returns the PartitionSpecs of the parameters."""
        rows, columns = P(None, "tensor", "fsdp"), P(None, "fsdp", "tensor")
        of = dict(q=columns, k=columns, v=columns, o=rows, gate=columns, up=columns, down=rows)
        specs = dict(embed=P(VOCAB, None), head=P(VOCAB, None), norm=P())
        specs["layers"] = {name: of.get(name, P()) for name in self.parameters()["layers"]}
        return {name: specs[name] for name in self.parameters()}

    def constrain(self, x, *axes):
        return x if self.mesh is None else lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*axes)))


def struct(shapes, dtype):
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), shapes, is_leaf=lambda x: isinstance(x, tuple))


def rms_norm(x, weight, eps):
    y = x.astype(f32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return (y * weight.astype(f32)).astype(x.dtype)


def rotate(x, cos, sin):
    a, b = jnp.split(x.astype(f32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def rope(c, positions):
    frequencies = c.theta ** (-jnp.arange(0, c.head_dim, 2, dtype=f32) / c.head_dim)
    angles = positions[..., None, None].astype(f32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def product(x, w):
    return lax.dot_general(x, w.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=x.dtype)


def queries_keys_values(c, x, w, cos, sin):
    """x [B, T, H] -> q [B, T, K, G, D], k and v [B, T, K, D]."""
    b, t, _ = x.shape
    q, k, v = product(x, w["q"]), product(x, w["k"]), product(x, w["v"])
    if c.bias:
        q, k, v = q + w["bq"].astype(q.dtype), k + w["bk"].astype(q.dtype), v + w["bv"].astype(q.dtype)
    q, k = q.reshape(b, t, c.heads, c.head_dim), k.reshape(b, t, c.kv, c.head_dim)
    if c.qk_norm:
        q, k = rms_norm(q, w["nq"], c.eps), rms_norm(k, w["nk"], c.eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    q, v = q.reshape(b, t, c.kv, c.heads // c.kv, c.head_dim), v.reshape(b, t, c.kv, c.head_dim)
    heads = (ROWS, None, "tensor", None)
    return c.constrain(q, *heads, None), c.constrain(k, *heads), c.constrain(v, *heads)


def attention(q, k, v, mask):
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=f32) * q.shape[-1] ** -0.5
    p = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), axis=-1).astype(q.dtype)
    y = jnp.einsum("bkgts,bskd->btkgd", p, v, preferred_element_type=q.dtype)
    return y.reshape(*y.shape[:2], -1)


def mlp(c, x, w):
    gate, up = (c.constrain(product(x, w[name]), ROWS, None, "tensor") for name in ("gate", "up"))
    return product(jax.nn.silu(gate.astype(f32)).astype(gate.dtype) * up, w["down"])


def hidden_states(c, layers, norm, x, segments, unrolled):
    b, t, _ = x.shape
    at = jnp.arange(t)
    segments = c.constrain(segments, ROWS, None)
    residual = lambda x: c.constrain(x, ROWS, "tensor", None)
    mask = (segments[:, :, None] == segments[:, None, :]) & (at[:, None] >= at[None, :])
    cos, sin = rope(c, jnp.broadcast_to(at, (b, t)))

    def layer(x, w):
        w = {name: value.astype(bf16) for name, value in w.items()}
        q, k, v = queries_keys_values(c, rms_norm(x, w["norm1"], c.eps), w, cos, sin)
        x = residual(x + product(attention(q, k, v, mask), w["o"]))
        return residual(x + mlp(c, rms_norm(x, w["norm2"], c.eps), w))

    kept = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=unrolled)
    if unrolled:
        for i in range(c.layers):
            x = kept(x, {name: value[i] for name, value in layers.items()})
    else:
        x, _ = lax.scan(lambda x, w: (kept(x, w), None), x, layers)
    return rms_norm(x, norm, c.eps)


def head_loss(hidden, head, batch, chunk, unrolled, axes=()):
    """Returns the clipped loss and its gradients with respect to hidden states [N, H] and head [V, H], in chunks of tokens.

    With mesh `axes`, N and V are the tokens and vocabulary entries of a device. It gathers the chunks of all devices, and computes logits of
    its entries.
    """
    n, head16 = hidden.shape[0] // chunk, head.astype(hidden.dtype)
    first = lax.axis_index(axes) * head.shape[0] if axes else 0
    on_mesh = lambda collective: lambda x: collective(x) if axes else x
    gather = on_mesh(lambda x: lax.all_gather(x, axes, tiled=True))
    total, most = on_mesh(lambda x: lax.psum(x, axes)), on_mesh(lambda x: lax.pmax(x, axes))
    scatter = on_mesh(lambda x: lax.psum_scatter(x, axes, tiled=True))

    def body(dhead, part):
        h, target, old, advantage, weight = map(gather, part)
        logits = lax.dot_general(h, head16, (((1,), (1,)), ((), ())), preferred_element_type=f32).astype(bf16).astype(f32)
        largest = most(jnp.max(logits, -1))
        lse = largest + jnp.log(total(jnp.sum(jnp.exp(logits - largest[:, None]), -1)))
        hit = lax.broadcasted_iota(i32, logits.shape, 1) + first == target[:, None]
        ratio = jnp.exp(total(jnp.sum(jnp.where(hit, logits, 0.0), -1)) - lse - old)
        free, clipped = ratio * advantage, jnp.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage
        slope = jnp.where(clipped >= free, -free, 0.0) * weight
        d = ((hit.astype(f32) - jnp.exp(logits - lse[:, None])) * slope[:, None]).astype(h.dtype)
        dh = scatter(lax.dot_general(d, head16, (((1,), (0,)), ((), ())), preferred_element_type=h.dtype))
        dhead = dhead + lax.dot_general(d, h, (((0,), (0,)), ((), ())), preferred_element_type=f32)
        return dhead, (jnp.sum(-jnp.minimum(free, clipped) * weight), dh)

    parts = [x.reshape(n, chunk, *x.shape[1:]) for x in (hidden, *batch)]
    dhead, (loss, dh) = lax.scan(body, jnp.zeros(head.shape, f32), tuple(parts), unroll=n if unrolled else 1)
    return loss.sum(), dh.reshape(hidden.shape), dhead


def whole_head_loss(c, hidden, head, batch, chunk, unrolled):
    """Like `head_loss`, for hidden states [B, T, H] and columns [B, T]; `chunk` counts the tokens of all devices."""

    def of_device(hidden, head, *batch):
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        axes, devices = ((), 1) if c.mesh is None else (VOCAB, c.mesh.size)
        loss, dh, dhead = head_loss(flat(hidden), head, list(map(flat, batch)), chunk // devices, unrolled, axes)
        return loss, dh.reshape(hidden.shape), dhead

    if c.mesh is None:
        return of_device(hidden, head, *batch)
    tokens = P(ROWS, "tensor")
    specs = (tokens, P(VOCAB, None), *[tokens] * 4), (P(), tokens, P(VOCAB, None))
    return jax.shard_map(of_device, mesh=c.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)(hidden, head, *batch)


def train_step(c, chunk, unrolled, params, state, batch):
    x = c.constrain(params["embed"][batch["ids"]].astype(bf16), ROWS, "tensor", None)
    states = lambda layers, norm, x: hidden_states(c, layers, norm, x, batch["segments"], unrolled)
    hidden, pullback = jax.vjp(states, params["layers"], params["norm"], x)
    head = params["embed"] if c.tied else params["head"]
    tokens = [batch[name] for name in ("targets", "old", "advantages", "weights")]
    loss, dh, dhead = whole_head_loss(c, hidden, head, tokens, chunk, unrolled)
    dlayers, dnorm, dx = pullback(dh)
    grads = dict(layers=dlayers, norm=dnorm)
    if c.tied:
        grads["embed"] = dhead.at[batch["ids"]].add(dx.astype(f32))
    else:
        dembed = jnp.zeros(head.shape, f32).at[batch["ids"]].add(dx.astype(f32))
        grads |= dict(head=dhead, embed=c.constrain(dembed, VOCAB, None))
    params, state, norm = adamw(params, state, grads)
    return params, state, dict(loss=loss, grad_norm=norm)


def adamw(params, state, grads, lr=1e-6, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.01, max_norm=1.0):
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(f32))) for g in jax.tree.leaves(grads)))
    scale, step = jnp.minimum(1.0, max_norm / (norm + 1e-6)), state["step"] + 1
    c1, c2 = 1 - beta1 ** step.astype(f32), 1 - beta2 ** step.astype(f32)

    def update(p, g, m, v):
        g = g.astype(f32) * scale
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        return p - lr * (m / c1 / (jnp.sqrt(v / c2) + eps) + decay * p), m, v

    new = jax.tree.map(update, params, grads, state["m"], state["v"])
    pick = lambda i: jax.tree.map(lambda x: x[i], new, is_leaf=lambda x: isinstance(x, tuple))
    return pick(0), dict(m=pick(1), v=pick(2), step=step), norm


def sample(c, params, x, key):
    """Returns tokens and their log-probabilities [B] after the residual stream x [B, H]."""
    head = params["embed"] if c.tied else params["head"]
    logits = lax.dot_general(rms_norm(x, params["norm"], c.eps), head, (((1,), (1,)), ((), ())), preferred_element_type=f32)
    logits = c.constrain(logits, ROWS, "tensor")
    token = jnp.argmax(logits + jax.random.gumbel(key, logits.shape, f32), -1).astype(i32)
    hit = lax.broadcasted_iota(i32, logits.shape, 1) == token[:, None]
    return token, jnp.sum(jnp.where(hit, logits, 0.0), -1) - jax.nn.logsumexp(logits, -1)


def next_token(c, unrolled, params, keys, values, token, at, first, key):
    """Returns token and log-probability [B] after `token` [B], and the caches [L, B, S, K, D] with its keys and values in column `at`."""
    columns = jnp.arange(keys.shape[2])
    mask = ((columns[None] >= first[:, None]) & (columns[None] <= at))[:, None]
    cos, sin = rope(c, (at - first)[:, None])

    def layer(carry, part):
        x, keys, values = carry
        w, l = part
        q, k, v = queries_keys_values(c, rms_norm(x, w["norm1"], c.eps), w, cos, sin)
        keys = lax.dynamic_update_slice(keys, k[None], (l, 0, at, 0, 0))
        values = lax.dynamic_update_slice(values, v[None], (l, 0, at, 0, 0))
        mine = [lax.dynamic_index_in_dim(cache, l, 0, False) for cache in (keys, values)]
        x = c.constrain(x + product(attention(q, *mine, mask), w["o"]), ROWS, None, None)
        x = c.constrain(x + mlp(c, rms_norm(x, w["norm2"], c.eps), w), ROWS, None, None)
        return (x, keys, values), None

    carry = (c.constrain(params["embed"][token][:, None], ROWS, None, None), keys, values)
    if unrolled:
        for l in range(c.layers):
            carry, _ = layer(carry, ({name: value[l] for name, value in params["layers"].items()}, l))
    else:
        carry, _ = lax.scan(layer, carry, (params["layers"], jnp.arange(c.layers)))
    x, keys, values = carry
    return *sample(c, params, x[:, 0], key), keys, values


def rollout(c, length, stop, params, prompts, lengths, key):
    """prompts [B, P], left-padded, of `lengths` [B] -> tokens and log-probabilities [B, length]."""
    params = jax.tree.map(lambda x: x.astype(bf16), params)
    b, p = prompts.shape
    first = p - lengths
    column = jnp.arange(p)
    there = column[None] >= first[:, None]
    mask = there[:, None, :] & (column[:, None] >= column[None, :])[None]
    cos, sin = rope(c, jnp.maximum(column[None] - first[:, None], 0))

    def prefill(x, w):
        q, k, v = queries_keys_values(c, rms_norm(x, w["norm1"], c.eps), w, cos, sin)
        x = x + product(attention(q, k, v, mask), w["o"])
        return x + mlp(c, rms_norm(x, w["norm2"], c.eps), w), (k, v)

    x, (keys, values) = lax.scan(prefill, params["embed"][prompts], params["layers"])
    grown = lambda cache: jnp.pad(cache, ((0, 0), (0, 0), (0, length), (0, 0), (0, 0)))

    key, begin = jax.random.split(key)
    token, logp = sample(c, params, x[:, -1], begin)
    tokens = jnp.full((b, length), stop, i32).at[:, 0].set(token)
    logps = jnp.zeros((b, length), f32).at[:, 0].set(logp)

    def turn(state):
        i, token, keys, values, ended, tokens, logps, key = state
        key, now = jax.random.split(key)
        token, logp, keys, values = next_token(c, False, params, keys, values, token, p + i - 1, first, now)
        token, logp = jnp.where(ended, stop, token), jnp.where(ended, 0.0, logp)
        tokens = lax.dynamic_update_slice(tokens, token[:, None], (0, i))
        logps = lax.dynamic_update_slice(logps, logp[:, None], (0, i))
        return i + 1, token, keys, values, ended | (token == stop), tokens, logps, key

    begin = (jnp.int32(1), token, grown(keys), grown(values), token == stop, tokens, logps, key)
    state = lax.while_loop(lambda s: (s[0] < length) & ~jnp.all(s[4]), turn, begin)
    return state[5], state[6], state[0]


def compiled(function, arguments, donate, out_shardings=None):
    """Returns bytes and estimates of a program; `arguments` have shardings."""
    processor = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    lowered = jax.jit(function, donate_argnums=donate, out_shardings=out_shardings).lower(*arguments)
    began, used = time.time(), processor()
    program = lowered.compile(compiler_options={"xla_tpu_scoped_vmem_limit_kib": "98304"})
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, (list, tuple)) else cost
    return dict(
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        optimal_seconds=cost.get("optimal_seconds"),
        compile_seconds=round(time.time() - began, 2),
        compile_processor_seconds=round(processor() - used, 2),
        program_bytes=len(lowered.as_text()),
    )


def mesh_of(text, topology):
    """Returns the mesh `axis=size,...` over all devices, with all three axes."""
    sizes = dict(part.split("=") for part in text.split(","))
    if unknown := sizes.keys() - set(AXES):
        raise SystemExit(f"error: --mesh {text}: unknown axes {sorted(unknown)}; expected {', '.join(AXES)}")
    sizes = [int(sizes.get(axis, 1)) for axis in AXES]
    if math.prod(sizes) != len(topology.devices):
        raise SystemExit(f"error: --mesh {text} has {math.prod(sizes)} devices, and the target {len(topology.devices)}")
    return topologies.make_mesh(topology, sizes, AXES)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a model's config.json")
    parser.add_argument("--target", default="v6e:1x1", help="a slice, as libtpu names it; one of its chips is used without --mesh")
    parser.add_argument("--mesh", help="sizes of the axes data, fsdp and tensor over all chips, as in fsdp=4,tensor=2; a step has no data axis")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row, or of a completion, or columns of the cache of --decode")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens per chunk of the head, of all chips")
    parser.add_argument("--rollout", action="store_true")
    parser.add_argument("--decode", action="store_true", help="one step of a rollout")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt of the rollout")
    parser.add_argument("--layers", type=int, help="number of layers, instead of the config's")
    parser.add_argument("--no-estimate", action="store_true", help="only the whole program: no time")
    a = parser.parse_args()
    # With the default level a whole step takes 25 times as long to compile.
    jax.config.update("jax_optimization_level", "O0")
    topology = topologies.get_topology_desc(platform="tpu", topology_name=a.target)
    mesh = mesh_of(a.mesh, topology) if a.mesh else None
    if mesh and (a.rollout or (mesh.shape["data"] > 1 and not a.decode)):
        parser.error("--mesh: expected a step with a mesh of fsdp and tensor, or --decode")
    place = lambda *axes: NamedSharding(mesh, P(*axes)) if mesh else SingleDeviceSharding(topology.devices[0])
    array = lambda dtype, shape, *axes: jax.ShapeDtypeStruct(shape, dtype, sharding=place(*axes))

    def parameters(c, dtype):
        of = lambda s, spec: array(dtype, s, *spec)
        return jax.tree.map(of, c.parameters(), c.shardings(), is_leaf=lambda x: isinstance(x, tuple))

    def step(layers, unrolled):
        c = Config(a.config, layers, mesh)
        params = parameters(c, f32)
        state = dict(m=params, v=params, step=array(i32, ()))
        column = lambda dtype: array(dtype, (a.batch, a.length), ROWS, "tensor")
        batch = {name: column(i32) for name in ("ids", "targets", "segments")}
        batch |= {name: column(f32) for name in ("old", "advantages", "weights")}
        chunk = min(a.chunk, a.batch * a.length)
        function = lambda p, s, b: train_step(c, chunk, unrolled, p, s, b)
        results = (*jax.tree.map(lambda x: x.sharding, (params, state)), place())
        return compiled(function, (params, state, batch), (0, 1), results if mesh else None)

    def sampling():
        c = Config(a.config, a.layers)
        prompts, lengths = array(i32, (a.batch, a.prompt)), array(i32, (a.batch,))
        arguments = (parameters(c, bf16), prompts, lengths, array(jnp.uint32, (2,)))
        return compiled(lambda *x: rollout(c, a.length, 0, *x), arguments, ())

    def decoding(layers, unrolled):
        c = Config(a.config, layers, mesh)
        cache = array(bf16, (c.layers, a.batch, a.length, c.kv, c.head_dim), None, ROWS, None, "tensor", None)
        rows = array(i32, (a.batch,), ROWS)
        arguments = (parameters(c, bf16), cache, cache, rows, array(i32, ()), rows, array(jnp.uint32, (2,)))
        results = (rows.sharding, rows.sharding, cache.sharding, cache.sharding)
        return compiled(lambda *x: next_token(c, unrolled, *x), arguments, (1, 2), results if mesh else None)

    if a.rollout:
        report = sampling()
    else:
        program = decoding if a.decode else step
        report = program(a.layers, False)
        if not a.no_estimate:
            two, three = (program(layers, True)["optimal_seconds"] for layers in (2, 3))
            layers = Config(a.config, a.layers).layers
            report["estimate_seconds"] = two + (layers - 2) * (three - two)
            report["layer_seconds"] = three - two
    report["parameters"] = sum(math.prod(s.shape) for s in jax.tree.leaves(struct(Config(a.config, a.layers).parameters(), f32)))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
