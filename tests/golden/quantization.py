"""Writes quantization.json: matrices that bitsandbytes quantises on the CPU, in nf4 and row-wise int8.

    pip install torch==2.13.0 && pip install --no-deps bitsandbytes==0.50.2
    python tests/golden/quantization.py

The same rules in a few lines of torch must give the same results. Values are float32 numbers. A matrix has blocks across the
ends of rows, a block and a row of zeros, values halfway between two codes, and an odd number of values.
"""

import json
from importlib.metadata import version
from pathlib import Path

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type, int8_vectorwise_quant, quantize_4bit

BLOCK = 64
CODES = get_4bit_type("nf4", device="cpu")


def nf4(values):
    """Codes and scales of a flat tensor."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    scaled = blocks * torch.where(scales > 0, 1 / scales, 0)[:, None]
    codes = (scaled[..., None] > (CODES[:-1] + CODES[1:]) / 2).sum(-1).flatten()[: len(values)]
    return codes, scales


def int8(matrix):
    largest = matrix.abs().amax(1)
    factors = torch.where(largest > 0, 127 / largest, 0)
    return (matrix * factors[:, None]).round().to(torch.int8), largest / 127


def case(matrix):
    rows, columns = matrix.shape
    # As one row, because the CPU kernel of dequantize_4bit begins a block in every row, unlike its kernels for GPUs.
    packed, state = quantize_4bit(matrix.reshape(1, -1), blocksize=BLOCK, quant_type="nf4")
    packed, count = packed.flatten(), rows * columns
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[:count]
    own, scales = nf4(matrix.flatten())
    assert torch.equal(codes.long(), own) and torch.equal(state.absmax, scales)
    dequantized = dequantize_4bit(packed.view(-1, 1), state).flatten()
    assert torch.equal(dequantized, CODES[own] * scales.repeat_interleave(BLOCK)[:count])
    of_rows, largest, _ = int8_vectorwise_quant(matrix.clone())
    own, row_scales = int8(matrix)
    assert torch.equal(of_rows, own) and torch.equal(largest / 127, row_scales)
    return {
        "shape": [rows, columns],
        "values": matrix.flatten().tolist(),
        "nf4": {"codes": packed.tolist(), "scales": scales.tolist(), "dequantized": dequantized.tolist()},
        "int8": {"codes": of_rows.flatten().tolist(), "scales": row_scales.tolist()},
    }


torch.manual_seed(5)
matrix = torch.randn(6, 96) * torch.tensor([0.02, 1, 30, 1e-3, 0.5, 2])[:, None]
matrix.view(-1)[128:192] = 0
matrix[3] = 0
# Halfway between codes: the largest value of the block is 1.
matrix.view(-1)[512:576] = 0.1
matrix.view(-1)[512:527] = (CODES[:-1] + CODES[1:]) / 2
matrix.view(-1)[530] = -1
cases = [case(matrix), case(torch.randn(3, 21))]
result = {"bitsandbytes": version("bitsandbytes"), "table": CODES.tolist(), "cases": cases}
Path(__file__).with_suffix(".json").write_text(json.dumps(result) + "\n")
print(bitsandbytes.__name__, version("bitsandbytes"), "agrees")
