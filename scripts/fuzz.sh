#!/usr/bin/env bash
# scripts/fuzz.sh TARGET SECONDS: fuzzes a target of fuzz/Cargo.toml with its seeds. A finding is a file in fuzz/artifacts/TARGET.
# It needs the nightly toolchain, a C++ compiler and `cargo install cargo-fuzz`.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$1 seconds=$2
arguments=(-max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=4096 -print_final_stats=1)
dictionary=fuzz/dictionaries/$target.dict
if [ -e "$dictionary" ]; then arguments+=(-dict="$dictionary"); fi
# Without a sanitizer, several times as many inputs are tried: these parsers have no unsafe code. Overflows of integers panic.
exec cargo +nightly fuzz run --sanitizer none "$target" -- "${arguments[@]}"
