#!/usr/bin/env bash
# Finds and applies the critical fixes to a checkout: shows the difference, asks, backs up, applies, verifies.
#
#   bash scripts/apply_critical_fixes.sh [PATH] [--yes] [--unsafe]
#
# PATH is the checkout (default: the current folder), --yes does not ask, --unsafe also makes fixes that may change
# what the program does. Every change is journalled; the last line says how to take it back.
set -euo pipefail

path=.
yes=0
unsafe=()
for word in "$@"; do
  case "$word" in
    --yes | -y) yes=1 ;;
    --unsafe) unsafe=(--unsafe) ;;
    --help | -h)
      sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    -*)
      echo "apply_critical_fixes.sh: $word: unknown option; --yes, --unsafe and --help are known" >&2
      exit 2
      ;;
    *) path=$word ;;
  esac
done
if [ ! -e "$path" ]; then
  echo "apply_critical_fixes.sh: $path: no such file or folder" >&2
  exit 2
fi

doctor=(traindoctor)
if ! command -v traindoctor >/dev/null 2>&1; then
  doctor=("${PYTHON:-python3}" -m traindoctor)
fi
doctor() { "${doctor[@]}" "$@"; }

status=0
doctor fix "$path" --diff "${unsafe[@]}" || status=$?
if [ "$status" -eq 0 ]; then
  exit 0
elif [ "$status" -ne 1 ]; then
  exit "$status"
fi

if [ "$yes" -eq 0 ]; then
  printf 'apply these changes to %s? [y/N] ' "$path"
  answer=
  read -r answer || true
  case "$answer" in
    y | Y | yes) ;;
    *)
      echo "nothing was changed"
      exit 1
      ;;
  esac
fi

doctor fix "$path" --apply "${unsafe[@]}"

# Every fix was verified to parse before it was written; a second look must find nothing left to fix.
if ! doctor fix "$path" --diff "${unsafe[@]}" >/dev/null 2>&1; then
  echo "apply_critical_fixes.sh: some fixes are left; run it again or see: traindoctor check $path" >&2
  exit 1
fi
echo "verified: no fix is left, every changed file parses"
echo "roll back with: traindoctor undo $path"
