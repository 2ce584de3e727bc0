#!/usr/bin/env bash
# Entry of the pre-commit hooks: installs this folder alone (no torch) into an environment beside it, once, and runs it.
#
# pre-commit's own `language: python` would install the root of the repository, which is another distribution.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
environment=$here/.environment
if [ ! -f "$environment/complete" ]; then # a killed installation leaves no such file and starts again
  rm -rf "$environment"
  "${PYTHON:-python3}" -m venv "$environment" >&2
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$here" >&2
  touch "$environment/complete"
fi
exec "$environment/bin/traindoctor" "$@"
