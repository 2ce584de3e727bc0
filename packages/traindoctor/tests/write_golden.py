"""Rewrite the golden files and the list of findings: `python -m tests.write_golden`; then read the difference."""

import json
import shutil
import tempfile
from pathlib import Path

from traindoctor.engine import audit
from traindoctor.fixing import plan
from traindoctor.options import load_options
from traindoctor.registry import all_rules

from tests.corpus_cases import FINDINGS, GOLDEN, all_findings, load_cases


def main() -> None:
    """Write what the fixes give now."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    findings = {case.name: all_findings(case) for case in load_cases()}
    lines = [f"{json.dumps(name)}: {json.dumps(entries)}" for name, entries in findings.items()]
    FINDINGS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
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
