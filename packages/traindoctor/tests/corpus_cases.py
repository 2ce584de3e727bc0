"""The corpus: small projects as they look in real life, each with a rule that must or must not speak."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from traindoctor.engine import audit
from traindoctor.options import load_options

CORPUS = Path(__file__).parent / "corpus"
GOLDEN = CORPUS / "golden"
FINDINGS = CORPUS / "findings.json"
"""Case -> everything that any rule says about it: code, file, line and column, label of the fix."""


@dataclass(frozen=True)
class Case:
    """One small project."""

    name: str
    code: str
    bad: bool
    files: tuple[tuple[str, str], ...]

    def write(self, root: Path) -> Path:
        for relative, text in self.files:
            target = root / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, "utf-8")
        return root


def load_cases() -> list[Case]:
    """Every case of every family file, in order."""
    cases: list[Case] = []
    for source in sorted(CORPUS.glob("*.txt")):
        for block in re.split(r"^##### ", source.read_text("utf-8"), flags=re.MULTILINE)[1:]:
            head, body = block.split("\n", 1)
            kind, code = head.split()
            parts = re.split(r"^@@ (.+)\n", body, flags=re.MULTILINE)[1:]
            files = tuple(zip(parts[::2], parts[1::2], strict=True))
            number = sum(1 for case in cases if case.code == code and case.bad == (kind == "bad"))
            cases.append(Case(f"{code}-{kind}-{number}", code, kind == "bad", files))
    return cases


def all_findings(case: Case) -> list[str]:
    """What all rules together say about a case: `OPT001 train.py:3:7 unsafe`."""
    with tempfile.TemporaryDirectory() as folder:
        root = case.write(Path(folder))
        report = audit(root, load_options(root, external=False))
    labels = {None: "", True: " safe", False: " unsafe"}
    return [f"{f.code} {f.path}:{f.where}{labels[f.fix.safe if f.fix else None]}" for f in report.findings]
