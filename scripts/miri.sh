#!/usr/bin/env bash
# Runs the unit tests of pjrt's C boundary, with its fake plugin, under Miri. It needs the components miri and rust-src of the nightly toolchain.
set -euo pipefail
cd "$(dirname "$0")/.."
# Isolation would hide the clock. The fake plugin leaks its objects, as plugins do.
export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks"
exec cargo +nightly miri test -p grpo-pjrt --lib --locked ffi::
