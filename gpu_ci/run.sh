#!/usr/bin/env bash
# Everything that needs CUDA: the tests of this folder, a short training run, ratios for benchmarks/LOG.md.
# bash gpu_ci/run.sh [arguments of pytest]; PYTHON is .venv/bin/python if there, else python3. Stops at what fails first.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/kernels:$PWD/gpu_ci${PYTHONPATH:+:$PYTHONPATH}"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$PYTHON" - >"$scratch/devices" <<'PYTHON_END' || exit 1
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("gpu_ci: there is no CUDA device here, and nothing of this folder runs without")
try:
    import mcore_dsa.patches
except ImportError as error:
    sys.exit(f"gpu_ci: {error}; accepted: mcore_dsa installed, as by python -m pip install --no-deps --editable .")
devices = range(torch.cuda.device_count())
names = ", ".join(torch.cuda.get_device_name(device) for device in devices)
nccl = ".".join(map(str, torch.cuda.nccl.version()))
print(f"gpu_ci: {names}; torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}", file=sys.stderr)
print(len(devices))
PYTHON_END
devices=$(cat "$scratch/devices")

fail() {
    echo "gpu_ci: FAILED: $1" >&2
    exit 1
}

# In the order of docs/gpu.md: what rests on nothing else first.
tests=(triton_selection triton_attention sanitizer one_device attention megatron_one_device nccl transformer_engine)
files=("${tests[@]/#/gpu_ci/test_}")
"$PYTHON" -m pytest "${files[@]/%/.py}" -x -q -rs --durations=8 "$@" || fail tests

# Over NCCL: two tensor-parallel ranks where there are two devices, and then the same steps with the flag off.
ranks=1 compare=--compare_unsharded=false
[ "$devices" -ge 2 ] && ranks=2 compare=--compare-unsharded
SKYRL_DSA_INDEXER_TP_SHARD=1 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    -m mcore_dsa.train --config configs/tiny_tp2.yaml --run_dir "$scratch/run" --parallel.tensor "$ranks" \
    --training.steps 20 --training.dtype bf16 --logging.progress false "$compare" || fail training

"$PYTHON" gpu_ci/measure.py || fail measurements
"$PYTHON" gpu_ci/measure_attention.py || fail "measurements of attention"
echo "gpu_ci: passed on $devices device(s)"
