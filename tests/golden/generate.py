"""Generates the golden files. See README.md in this folder.

python generate.py [OUT]      write all cases (default: this folder), print a table
python generate.py --check    compare freshly made values with the files of this folder
python generate.py --verify   compare the files with formulas written again in numpy, and with finite differences
"""

import argparse
import importlib
import sys
from pathlib import Path

import numpy as np
import torch

from generator import case, files, verify

HERE = Path(__file__).parent
SYSTEMS = ("trl", "verl", "liger", "seed", "paper", "replay")


def all_cases(prefix):
    """Returns the cases whose name starts with `prefix`; imports a system only if one of its cases may be among them."""
    for system in SYSTEMS:
        if system.startswith(prefix) or prefix.startswith(system):
            for one in importlib.import_module(f"generator.{system}_cases").cases():
                if one.name.startswith(prefix):
                    yield one


def verify_all(folder, prefix):
    """Compares every file of this generator with `generator/verify.py`."""
    paths = sorted(path for name in SYSTEMS for path in folder.glob(f"{name}_*.safetensors"))
    paths = [path for path in paths if path.name.startswith(prefix)]
    loss, gradient = np.array([verify.verify(path) for path in paths]).max(0)
    print(f"{len(paths)} files agree with the formulas: loss to {loss:.1e}, gradients to {gradient:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=HERE, help="folder to write to")
    parser.add_argument("--check", action="store_true", help="compare with the files in OUT, write nothing")
    parser.add_argument("--verify", action="store_true", help="check the files in OUT against formulas, write nothing")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only cases whose name starts with this")
    arguments = parser.parse_args()
    if arguments.verify:
        verify_all(arguments.out, arguments.only)
        return 0
    torch.set_num_threads(1)  # the order of summation, and so the bytes, must not depend on the machine's load

    wrong, written = [], 0
    print(f"{'case':48} {'loss':>12} {'|grad_hidden|':>14} {'|grad_lm_head|':>14} {'bytes':>7}")
    for one in all_cases(arguments.only):
        golden = case.evaluate(one)
        path, data = arguments.out / f"{one.name}.safetensors", files.to_bytes(golden)
        if arguments.check:
            wrong += files.differences(golden, path)
        else:
            path.write_bytes(data)
        norms = [np.linalg.norm(golden.expected[name]) for name in ("grad_hidden", "grad_lm_head")]
        print(f"{one.name:48} {golden.expected['loss']:12.6f} {norms[0]:14.6f} {norms[1]:14.6f} {len(data):7}")
        written += 1
    print(f"{written} cases")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
