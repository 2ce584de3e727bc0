"""Rewrite the golden files: `python -m tests.write_golden`; then read the difference."""

import shutil
import tempfile
from pathlib import Path

from traindoctor.engine import audit
from traindoctor.fixing import plan
from traindoctor.options import load_options
from traindoctor.registry import all_rules

from tests.corpus_cases import GOLDEN, load_cases


def main() -> None:
    """Write what the fixes give now."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for case in load_cases():
        if not case.bad or not all_rules()[case.code].fix:
            continue
        with tempfile.TemporaryDirectory() as folder:
            root = case.write(Path(folder))
            options = load_options(root, select=[case.code], external=False)
            for change in plan(audit(root, options), options, unsafe=True):
                if change.after != change.before:
                    # The suffix keeps linters and hooks away from the golden files.
                    target = GOLDEN / case.name / f"{change.path}.golden"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(change.after)


if __name__ == "__main__":
    main()
