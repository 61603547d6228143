"""AdamW with 8-bit moments, by torch: `pip install torch==2.13.0 safetensors; python generate.py` writes steps.safetensors.

Every tensor takes four steps. Weights and gradients are exact functions of their index, so only results are stored: the weights, and codes and scales
of both moments (f32 moments of the small tensor). Blocks have 256 values of a row; the last block of a row may be shorter.
"""

import pathlib

import torch
from safetensors.torch import save_file

BLOCK, FEWEST, STEPS = 256, 4096, 4
LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-2, 0.9, 0.99, 1e-8, 0.1
SHAPES = {"rows": [20, 300], "joined_rows": [66, 64], "vector": [4100], "small": [8, 8]}


def dynamic_map(signed):
    """`bitsandbytes.functional.create_dynamic_map`, with 7 exponent bits of 8 bits."""
    data = [0.0, 1.0]
    for i in range(7):
        boundaries = torch.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1, dtype=torch.float64)
        means = (boundaries[:-1] + boundaries[1:]) / 2
        data += (10.0 ** (i - 6) * means).tolist()
        if signed:
            data += (-(10.0 ** (i - 6)) * means).tolist()
    assert len(data) == 256
    return torch.tensor(sorted(data), dtype=torch.float64).float()


def numbers(shape, step):
    """Values in [-1, 1) with magnitudes down to 2^-20, some of them 0, and one large value in the first block."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    values = ((i * 40503 + step * 30011) % 65536 - 32768).float() / 32768 * 2.0 ** -((i * 7 + step) % 21).float()
    values[(i * 5 + step) % 11 == 0] = 0
    values[17] = 64.0
    # A block that is 0.
    values[256:300] = 0
    return values.reshape(shape)


def rows_of(tensor):
    """The rows of blocks: the last dimension, and dimensions before it until a row has a block."""
    row, shape = 1, list(tensor.shape)
    while row < BLOCK:
        row *= shape.pop()
    return tensor.reshape(-1, row)


def quantize(tensor, book):
    rows = rows_of(tensor)
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).reshape(rows.shape[0], -1, BLOCK)
    scales = padded.abs().amax(-1)
    unit = torch.where(scales[..., None] > 0, padded / scales[..., None], 0.0)
    codes = torch.bucketize(unit, (book[1:] + book[:-1]) / 2).reshape(rows.shape[0], -1)[:, : rows.shape[1]]
    return codes.to(torch.uint8).reshape(tensor.shape).contiguous(), scales


def dequantize(codes, scales, book):
    rows = rows_of(codes)
    wide = scales.repeat_interleave(BLOCK, -1)[:, : rows.shape[1]]
    return (book[rows.long()] * wide).reshape(codes.shape)


books, results = [dynamic_map(True), dynamic_map(False)], {}
for name, shape in SHAPES.items():
    weight = numbers(shape, 99)
    moments = [torch.zeros(shape), torch.zeros(shape)]
    stored = [quantize(moment, book) for moment, book in zip(moments, books)] if weight.numel() >= FEWEST else None
    for step in range(1, STEPS + 1):
        gradient = numbers(shape, step)
        if stored:
            moments = [dequantize(*state, book) for state, book in zip(stored, books)]
        first, second = moments
        beta1, beta2 = torch.tensor(BETA1), torch.tensor(BETA2)
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient * gradient
        rate, root = LR / (1 - BETA1**step), (1 - BETA2**step) ** 0.5
        weight = weight * (1 - LR * WEIGHT_DECAY) - rate * first / (second.sqrt() / root + EPS)
        moments = [first, second]
        if stored:
            stored = [quantize(moment, book) for moment, book in zip(moments, books)]
    results[f"{name}.weight"] = weight
    for moment, values in zip(["exp_avg", "exp_avg_sq"], stored or moments):
        if stored:
            results[f"{name}.{moment}_codes"], results[f"{name}.{moment}_scales"] = values
        else:
            results[f"{name}.{moment}"] = values
save_file(results, pathlib.Path(__file__).with_name("steps.safetensors"))
