#!/usr/bin/env bash
# Builds the source distribution and, from it, the wheel with the program `grpo`, and tries the wheel in a new environment.
#
#   scripts/wheel.sh [FOLDER]    # writes both files to FOLDER (default: target/wheels)
#
# Needs cargo, and python3 with pip and venv. The wheel's platform tag names the glibc of which it needs symbols, so build on the oldest
# system that the wheel should support. Nothing is uploaded.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1:-target/wheels}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# maturin unpacks the source distribution into a temporary folder; dependencies are built here, once.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}

python3 -m venv "$work/tools"
PATH=$work/tools/bin:$PATH
pip install --quiet --disable-pip-version-check maturin==1.16.0 auditwheel==6.8.2
rm -f "$out"/grpo-*
# `check` fails if the program needs libraries that other systems may not have.
maturin build --release --sdist --auditwheel check --out "$out"
wheel=$(echo "$out"/grpo-*.whl)
auditwheel show "$wheel"
[[ $wheel == *manylinux* ]] || { echo "error: $wheel has no tag manylinux" >&2; exit 1; }

python3 -m venv "$work/new"
"$work/new/bin/pip" install --quiet --disable-pip-version-check "$wheel"
scripts/try_binary.sh "$work/new/bin/grpo"
ls -lh "$out"/grpo-*
