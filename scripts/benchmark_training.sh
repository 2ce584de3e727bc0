#!/usr/bin/env bash
# Measures the plain training path against the optimised one: tokens/s, memory, and whether the loss stays the same.
#
#   bash scripts/benchmark_training.sh [option of mmldlm benchmark ...] [section.key=value ...]
#
# Every option of the command is also an environment variable, in capitals: RECIPE, STORE, LENGTH, LENGTHS, VOCABULARY,
# CHANNELS, DOCUMENTS, STEPS, WARMUP, BLOCK, REPEATS, GATE_STEPS, TOLERANCE, TIMEOUT, MEMORY_LIMIT, SEED, LADDER, ARM, ONLY,
# BASELINE, FAIL_IF, SWEEP, UNIT, OUT; FIND_BATCH=1 searches for the batch. What they mean: mmldlm benchmark --help
# The report goes to a new folder under TMPDIR unless OUT names another. Nothing in the repository is changed.
set -euo pipefail

case "${1:-}" in
  --help | -h)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if command -v mmldlm >/dev/null 2>&1; then
  mmldlm=(mmldlm)
elif [ -x "$root/.venv/bin/mmldlm" ]; then
  mmldlm=("$root/.venv/bin/mmldlm")
else
  export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
  mmldlm=("${PYTHON:-python3}" -m mmldlm)
fi

OUT=${OUT:-${TMPDIR:-/tmp}/mmldlm-benchmark-$(date +%Y%m%d-%H%M%S)}
options=()
for name in RECIPE STORE LENGTH LENGTHS VOCABULARY CHANNELS DOCUMENTS STEPS WARMUP BLOCK REPEATS GATE_STEPS TOLERANCE TIMEOUT \
  MEMORY_LIMIT SEED LADDER ARM ONLY BASELINE FAIL_IF SWEEP UNIT OUT; do
  if [ -n "${!name:-}" ]; then
    option=${name,,}
    options+=("--${option//_/-}" "${!name}")
  fi
done
if [ "${FIND_BATCH:-0}" != 0 ]; then
  options+=(--find-batch)
fi

PYTHONDONTWRITEBYTECODE=1 exec "${mmldlm[@]}" benchmark "${options[@]}" "$@"
