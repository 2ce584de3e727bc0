#!/usr/bin/env bash
# Measures the plain training path against the optimised one: tokens/s, memory, and whether the loss stays the same.
#
#   bash scripts/benchmark_training.sh [option of mmldlm benchmark ...] [section.key=value ...]
#
# Every option can also be given as an environment variable:
#   RECIPE    recipe by name or file (small on a GPU, laptop without one)
#   STORE     pair store (default: random documents)
#   LENGTH    tokens of every random document     LENGTHS   shortest:longest random document (4:64)
#   STEPS     timed steps (20)                    WARMUP    steps before the clock starts (5)
#   REPEATS   processes per arm (3)               LADDER    short, full or none (short)
#   GATE      steps of the loss gate (10)         OUT       folder of the report (a new one under TMPDIR)
# Nothing in the repository is changed.
set -euo pipefail

case "${1:-}" in
  --help | -h)
    sed -n '2,13p' "$0" | sed 's/^# \{0,1\}//'
    exit 0
    ;;
esac

mmldlm=(mmldlm)
if ! command -v mmldlm >/dev/null 2>&1; then
  mmldlm=("${PYTHON:-python3}" -m mmldlm.cli.main)
fi

options=(--out "${OUT:-${TMPDIR:-/tmp}/mmldlm-benchmark-$(date +%Y%m%d-%H%M%S)}")
add() {
  if [ -n "$2" ]; then
    options+=("$1" "$2")
  fi
}
add --recipe "${RECIPE:-}"
add --store "${STORE:-}"
add --length "${LENGTH:-}"
add --lengths "${LENGTHS:-}"
add --steps "${STEPS:-}"
add --warmup "${WARMUP:-}"
add --repeats "${REPEATS:-}"
add --ladder "${LADDER:-}"
add --gate-steps "${GATE:-}"

PYTHONDONTWRITEBYTECODE=1 exec "${mmldlm[@]}" benchmark "${options[@]}" "$@"
