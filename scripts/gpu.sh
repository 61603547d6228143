#!/usr/bin/env bash
# Measures everything on an NVIDIA GPU in one command: installs the CUDA plugin and its libraries,
# checks parity on the golden files in f32 and bf16, measures every shape for accelerators against the materialised
# baseline and a floor of bare products, then PyTorch and Liger if python3 can import them, then whole GRPO steps (rollout and
# training) of a decoder in the shape of Qwen2.5-0.5B, and the same of TRL and JAX if python3 can import them, and prints a Markdown report
# for BENCHMARKS.md.
#
#   scripts/gpu.sh                          # needs an NVIDIA driver, python3 with pip, and cargo or --grpo
#   scripts/gpu.sh --fetch-wheels DIR       # on a machine with a network: downloads the wheels for the next line
#   scripts/gpu.sh --wheels DIR --grpo PATH # on a machine without a network
#
# Options:
#   --grpo PATH       a built `grpo`, instead of building one with cargo
#   --wheels DIR      take every Python wheel from DIR; no network
#   --fetch-wheels DIR  put the wheels for --wheels into DIR (2 GB) and exit
#   --plugin FILE     use this plugin, such as that of an installed JAX; nothing is installed
#   --no-runtime      CUDA's libraries are on LD_LIBRARY_PATH already
#   --out DIR         reports: bench.md, parity-DTYPE.txt, NAME.json (default: gpu-report)
#   --parity FILE     check parity on this batch file; repeatable (default: a dozen of tests/golden)
#   --config FILE     measure this shape; repeatable (default: fused and logits-* of configs/bench)
#   --set A.B=VALUE   set a key of every configuration; repeatable
#   --steps N, --warmup N   timed steps (default 20) and untimed steps before them (default 5)
#   --no-peers        without PyTorch, Liger, TRL and JAX
#   --no-bench        without the shapes
#   --no-step         without whole steps
#   --shape FIELD=NUMBER  set a number in config.json of the measured decoder; repeatable
#   --train A.B=VALUE set a key of the measured run (scripts/gpu_step.yaml); repeatable
#   --peak-tflops N   the GPU's peak in bf16, for the utilisation (an H200: 989)
#   --backend NAME    another PJRT backend, to try this script where there is no GPU (default: pjrt:cuda)
#
# The exit code is 0 on success, 1 if parity or a measurement failed (the report is printed nevertheless), 2
# for bad usage or a missing requirement.
set -euo pipefail

# The plugin's wheels as pinned by `grpo plugin install cuda`; an offline machine needs them by name.
PLUGIN_WHEELS=("jax-cuda13-pjrt==0.10.2" "nvidia-cuda-nvcc==13.5.37" "nvidia-nvvm==13.5.37")

command_line="scripts/gpu.sh${*:+ $*}"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
grpo="" backend=pjrt:cuda out=gpu-report steps=20 warmup=5 peers=yes runtime=yes wheels="" fetch="" bench=yes step=yes peak="" plugin=""
library_path=${LD_LIBRARY_PATH:-} cuda_libraries=$root/scripts/cuda-libraries.txt
files=() configs=() settings=() shape=() train=()

die() {
    echo "error: $*" >&2
    exit 2
}

say() {
    echo "== $*" >&2
}

while (($#)); do
    case $1 in
    --no-peers) peers=no ;;
    --no-runtime) runtime=no ;;
    --no-bench) bench=no ;;
    --no-step) step=no ;;
    --grpo | --backend | --plugin | --out | --steps | --warmup | --wheels | --fetch-wheels | --parity | --config | --set | --shape | --train | --peak-tflops)
        (($# > 1)) || die "$1 needs a value"
        case $1 in
        --grpo) grpo=$2 ;;
        --backend) backend=$2 ;;
        --plugin) plugin=$2 ;;
        --out) out=$2 ;;
        --steps) steps=$2 ;;
        --warmup) warmup=$2 ;;
        --wheels) wheels=$2 ;;
        --fetch-wheels) fetch=$2 ;;
        --parity) files+=("$2") ;;
        --config) configs+=("$2") ;;
        --set) settings+=(--set "$2") ;;
        --shape) shape+=(--set "$2") ;;
        --train) train+=(--set "$2") ;;
        --peak-tflops) peak=$2 ;;
        esac
        shift
        ;;
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *) die "unknown option $1: see scripts/gpu.sh --help" ;;
    esac
    shift
done

if ((${#files[@]} == 0)); then
    # One file per kind of dependency between tokens: all files would compile hundreds of programs.
    files=("$root"/tests/golden/{c*,s01*,trl_gmpo_default,trl_grpo_top_entropy,trl_vespo_sampler_token_mask}.safetensors)
fi

if [[ -n $fetch ]]; then
    say "fetching wheels into $fetch"
    python3 -m pip download --no-deps --only-binary=:all: --dest "$fetch" --python-version 3.11 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_25_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 "${PLUGIN_WHEELS[@]}" --requirement "$cuda_libraries" >&2
    exit 0
fi

((${#configs[@]})) || configs=("$root"/configs/bench/{fused,logits-*}.yaml)
[[ $bench == yes ]] || configs=()
for config in ${configs[@]+"${configs[@]}"}; do
    [[ -f $config ]] || die "there is no configuration $config"
done
if [[ -n $wheels ]]; then
    [[ -d $wheels ]] || die "there is no folder $wheels"
    wheels=$(cd "$wheels" && pwd)
    # pip reads these variables everywhere, also in `grpo plugin install`.
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$wheels
fi

device="no GPU asked for" driver="-"
if [[ $backend == pjrt:cuda ]]; then
    command -v nvidia-smi >/dev/null || die "there is no nvidia-smi: install NVIDIA's driver, or try --backend pjrt:cpu"
    device=$(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | sed 's/^ *//' | paste -sd ',')
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
fi

if [[ -z $grpo ]]; then
    say "building grpo"
    (cd "$root" && cargo build --release --quiet --bin grpo)
    grpo=${CARGO_TARGET_DIR:-$root/target}/release/grpo
fi
[[ -x $grpo ]] || die "there is no program $grpo"

if [[ -n $plugin ]]; then
    [[ -f $plugin ]] || die "there is no plugin $plugin"
    export GRPO_PJRT_PLUGIN=$plugin
else
    say "installing the plugin of $backend"
    "$grpo" plugin install "${backend#pjrt:}" >&2
fi

if [[ $backend == pjrt:cuda && $runtime == yes ]]; then
    libraries=${XDG_CACHE_HOME:-$HOME/.cache}/grpo/cuda-runtime
    if [[ ! -f $libraries/complete ]]; then
        say "installing CUDA's libraries into $libraries"
        rm -rf "$libraries"
        # One call: a second one would not merge its files into the shared folder `nvidia`.
        python3 -m pip install --quiet --no-deps --only-binary=:all: --target "$libraries" --requirement "$cuda_libraries" >&2
        touch "$libraries/complete"
    fi
    for folder in "$libraries"/nvidia/*/lib; do
        library_path=$folder${library_path:+:$library_path}
    done
fi

# Only `grpo` uses this path: PyTorch has its own libraries.
run_grpo() {
    LD_LIBRARY_PATH=$library_path "$grpo" "$@"
}

mkdir -p "$out"
status=0
worst() {
    (($1 <= status)) || status=$1
}

for dtype in f32 bf16; do
    say "parity in $dtype"
    code=0
    run_grpo parity "${files[@]}" \
        --backend "$backend" --implementation all --dtype "$dtype" \
        >"$out/parity-$dtype.txt" || code=$?
    # A command that could not run also fails.
    ((code == 0)) || echo "FAIL: exit code $code, see $out/parity-$dtype.txt" >>"$out/parity-$dtype.txt"
    worst "$((code > 0))"
done

for config in ${configs[@]+"${configs[@]}"}; do
    name=$(basename "$config" .yaml)
    say "measuring $name"
    rm -f "$out/$name".{json,md} "$out/$name-torch".{json,md}
    code=0
    run_grpo bench "$config" --backend "$backend" --steps "$steps" --warmup "$warmup" --out "$out/$name.json" \
        --markdown ${settings[@]+"${settings[@]}"} >"$out/$name.md" || code=$?
    ((code < 2)) || echo "$name could not be measured (exit code $code)" >>"$out/$name.md"
    worst "$((code > 0))"
    # A separate process, after grpo has freed the GPU's memory.
    if [[ $peers == yes && -f $out/$name.json ]] && python3 -c "import torch" 2>/dev/null; then
        say "measuring PyTorch at $name"
        code=0
        python3 "$root/peers/bench_torch.py" "$out/$name.json" --output "$out/$name-torch.json" >"$out/$name-torch.md" || code=$?
        ((code == 0)) || echo "PyTorch could not be measured (exit code $code)" >>"$out/$name-torch.md"
        worst "$((code > 0))"
    fi
done

if [[ $step == yes ]]; then
    say "measuring whole steps"
    rm -rf "$out/model" "$out/run" "$out"/step{.md,-trl.json,-jax.json}
    declare -A needs=([TRL]="trl, datasets" [JAX]="jax; jax.devices()")
    weights=$(python3 "$root/scripts/random_model.py" "$out/model" ${shape[@]+"${shape[@]}"} | tee /dev/stderr | tr -d , | cut -d ' ' -f 1)
    code=0
    run_grpo train "$root/scripts/gpu_step.yaml" --quiet --run-dir "$out/run" --set "model=$out/model" \
        --set "data.files=$out/model/prompts.jsonl" --set "policy.device=$backend" ${train[@]+"${train[@]}"} >&2 || code=$?
    ((code == 0)) || echo "whole steps could not be measured (exit code $code)" >"$out/step.md"
    worst "$((code > 0))"
    if [[ $code == 0 ]]; then
        # The sizes of the run, including changes by --train.
        same=$(python3 - "$out/run/config.yaml" <<'PYTHON'
import re, sys
text = open(sys.argv[1]).read()
number = lambda key: re.search(rf"^ +{key}: (\d+)", text, re.M).group(1)
print("--prompts", number("prompts_per_step"), "--generations", number("num_generations"), "--length", number("max_completion_length"),
      "--micro-batches", number("gradient_accumulation_steps"))
PYTHON
        )
        for peer in TRL JAX; do
            name=step-${peer,,}
            # `aot_jax.py` asks for JAX's CPU unless this variable names another platform.
            if [[ $peers == no ]] || ! JAX_PLATFORMS=${backend#pjrt:} python3 -c "import ${needs[$peer]}" 2>/dev/null; then
                continue
            fi
            if [[ $peer == JAX && $same != *"--micro-batches 1" ]]; then
                echo "JAX was not measured: its program takes a step as one micro-batch" >>"$out/step.md"
                continue
            fi
            say "measuring $peer's steps"
            # shellcheck disable=SC2086 # each option with its number
            JAX_PLATFORMS=${backend#pjrt:} python3 "$root/peers/gpu_step.py" "${peer,,}" "$out/model" "$out/model/prompts.jsonl" $same --out "$out/$name.json" \
                >"$out/$name.log" 2>&1 || {
                echo "$peer could not be measured: see $name.log" >>"$out/step.md"
                worst 1
            }
        done
        python3 "$root/peers/gpu_step.py" table "$out/run" --parameters "$weights" --peer "TRL=$out/step-trl.json" \
            --peer "JAX=$out/step-jax.json" ${peak:+--peak-tflops "$peak"} >>"$out/step.md" || worst 1
    fi
    rm -rf "$out/model"
fi

{
    echo "# $backend: $device"
    echo
    echo "\`$command_line\`, $(date -u +%Y-%m-%d), driver $driver, $("$grpo" --version)"
    for dtype in f32 bf16; do
        echo
        echo "Parity on ${#files[@]} files in $dtype: $(tail -n 1 "$out/parity-$dtype.txt")"
    done
    for config in ${configs[@]+"${configs[@]}"}; do
        name=$(basename "$config" .yaml)
        printf '\n## %s\n\n' "$name"
        cat "$out/$name.md"
        if [[ -f $out/$name-torch.md ]]; then
            echo
            cat "$out/$name-torch.md"
        fi
    done
    if [[ $step == yes ]]; then
        printf '\n## Whole steps\n\n'
        cat "$out/step.md"
    fi
} >"$out/bench.md"
cat "$out/bench.md"
exit "$status"
