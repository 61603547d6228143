#!/usr/bin/env bash
# Tries an installed `grpo` in an empty folder: its version, a short training, the CPU plugin, and a step on the plugin's device.
#
#   scripts/try_binary.sh PATH    # the program; pip downloads 90 MB into a temporary folder
set -euo pipefail

[[ $# == 1 && -x $1 ]] || { echo "usage: scripts/try_binary.sh PATH, of an installed program grpo" >&2; exit 2; }
grpo=$(realpath -s "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# An empty cache, so that the plugin is downloaded.
export XDG_CACHE_HOME=$work/cache

"$grpo" --version
short=(--quiet --set model.num_hidden_layers=1 --set warmup.steps=2 --set grpo.max_steps=2 --set grpo.prompts_per_step=4)
"$grpo" train "${short[@]}" --run-dir on-this-cpu
"$grpo" plugin install cpu
"$grpo" train "${short[@]}" --set policy.device=pjrt:cpu --run-dir on-the-plugin
for run in on-this-cpu on-the-plugin; do
    [[ -s $run/summary.json ]] || { echo "$grpo wrote no $run/summary.json" >&2; exit 1; }
done
