"""Writing and comparing `grpo-batch/1` files."""

import json

import numpy as np
from safetensors import safe_open

NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float64): "F64", np.dtype(np.int64): "I64"}


def tensors(golden):
    """Returns the tensors of the file by name, in its dtypes."""
    batch = golden.batch
    stored = {
        name: np.asarray(value, np.float32)
        for name, value in vars(batch).items()
        if value is not None and name not in ("targets", "sampling_mask")
    }
    stored["targets"] = batch.targets
    for name, value in stored.items():
        same = np.array_equal(value.astype(np.float64), getattr(batch, name), equal_nan=name != "targets")
        assert same, f"{golden.case.name}: {name} loses digits in {value.dtype}"
    if batch.sampling_mask is not None:
        kept = batch.sampling_mask.reshape(-1, batch.sampling_mask.shape[-1])
        # A token without ids has the whole vocabulary.
        kept = kept & ~kept.all(-1, keepdims=True)
        stored["sampling_mask.offsets"] = np.cumsum([0, *kept.sum(-1)]).astype(np.int64)
        stored["sampling_mask.ids"] = np.nonzero(kept)[1].astype(np.int64)
    return stored | {f"expected.{name}": value for name, value in golden.expected.items()}


def to_bytes(golden):
    """Returns the bytes of the file. safetensors' own writer orders `__metadata__` by a hash that differs from run to run,
    but equal golden files should have equal bytes."""
    case = golden.case
    metadata = {"format": "grpo-batch/1", "loss": json.dumps(case.config), "name": case.name, "source": case.source}
    header, data = {"__metadata__": metadata}, b""
    # Widest elements first, because the format requires every tensor to be aligned to its element size.
    for name, value in sorted(tensors(golden).items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        raw = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def read(path):
    """Returns (metadata, tensors) of a file."""
    with safe_open(path, "np") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}


def differences(golden, path):
    """Returns the differences of the file at `path` as lines; empty if it agrees. Expected values may differ by the
    rounding of another CPU's matrix product; everything else must be equal."""
    if not path.exists():
        return [f"{path.name} does not exist"]
    metadata, found = read(path)
    wanted, lines = tensors(golden), []
    if json.loads(metadata["loss"]) != golden.case.config or metadata["source"] != golden.case.source:
        lines.append(f"{path.name}: the configuration or the source differs")
    if found.keys() != wanted.keys():
        return [*lines, f"{path.name}: holds {sorted(found)}, expected {sorted(wanted)}"]
    for name, value in wanted.items():
        if name.startswith("expected."):
            scale = max(np.abs(value).max(initial=0), 1e-3)
            same = found[name].shape == value.shape and np.abs(found[name] - value).max(initial=0) <= 1e-12 * scale
        else:
            same = np.array_equal(found[name], value, equal_nan=value.dtype != np.int64)
        if not same:
            lines.append(f"{path.name}: {name} differs")
    return lines
