#!/usr/bin/env bash
# Trains latent to text on English text with Qwen's tokens (recipe qwen-english), on the GPUs of one node or several.
#
#   NNODES=1 NPROC_PER_NODE=2 bash scripts/train_qwen_english_l2t_stable.sh [--dry-run] [section.key=value ...]
#
# Machines       NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR, MASTER_PORT, BASE_WORLD_SIZE
# Data           L2T_STORE (a pair store), or TOKEN_DIR and LATENT_DIR (FOLDER/tokens/train and FOLDER/latents/train)
#                with TOKENIZER, which are imported into it; LATENT_DIM is compared with it
# Batch          L2T_TRAIN_BS (per GPU, documents of the longest length), GRAD_ACCUM_STEPS, L2T_EVAL_BS, DATA_WORKERS
# Rate           LEARNING_RATE, WARMUP_STEPS, GRAD_CLIP_NORM, LATENT_LOSS_WEIGHT
# Length         L2T_BASE_STEPS, L2T_BASE_SAVE_FREQ, L2T_BASE_LOG_FREQ, L2T_BASE_EVAL_FREQ, on BASE_WORLD_SIZE ranks
# Run            L2T_CONFIG (a recipe), L2T_RUN_NAME, L2T_SAVE_DIR, DTYPE, L2T_COMPILE
# L2T_PRESET     conservative, balanced (the default) or aggressive: memory, learning rate, clipping
#
# What is not set follows from the machine; --dry-run explains each value and stops. The output also goes to
# train_logs/train_<time>_node<rank>.log in the current folder. The exit code is that of the training; 75 means that
# it stopped in order and the same command resumes it.
set -euo pipefail

dry_run=()
settings=()
for word in "$@"; do
  case "$word" in
    --help | -h)
      sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    --dry-run) dry_run=(--dry-run) ;;
    *=*) settings+=("$word") ;;
    *)
      echo "train_qwen_english_l2t_stable.sh: $word: unknown; --dry-run, --help and section.key=value are known" >&2
      exit 2
      ;;
  esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if command -v mmldlm >/dev/null 2>&1; then
  mmldlm=(mmldlm)
elif [ -x "$root/.venv/bin/mmldlm" ]; then
  mmldlm=("$root/.venv/bin/mmldlm")
else
  packages="$root/src:$root/packages/runwatch/src:$root/packages/traindoctor/src"
  export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
  mmldlm=("${PYTHON:-python3}" -m mmldlm)
fi

if [ "${#dry_run[@]}" -gt 0 ]; then
  exec "${mmldlm[@]}" launch --from-variables --dry-run -- ${settings[@]+"${settings[@]}"}
fi

mkdir -p train_logs
log=train_logs/train_$(date +%Y%m%d_%H%M%S)_node${NODE_RANK:-0}.log
echo "log: $log"
# a signal to this script reaches the training, which saves a checkpoint; tee ends when the training does
"${mmldlm[@]}" launch --from-variables --log-dir "${log%.log}" -- ${settings[@]+"${settings[@]}"} > >(trap '' INT TERM USR1 && tee "$log") 2>&1 &
training=$!
trap 'kill -TERM "$training" 2>/dev/null || true' TERM
trap 'kill -INT "$training" 2>/dev/null || true' INT
trap 'kill -USR1 "$training" 2>/dev/null || true' USR1
status=0
wait "$training" || status=$?
while kill -0 "$training" 2>/dev/null; do # the wait was ended by a signal
  status=0
  wait "$training" || status=$?
done
echo "exit code $status; log: $log"
exit "$status"
