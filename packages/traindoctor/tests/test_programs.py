"""Safe fixes applied to running programs: the same losses to the bit, the same exit code.

Programs of Lightning and Accelerate run with the interpreter in TRAINDOCTOR_FRAMEWORKS_PYTHON, or with this one where
it has them; otherwise they are skipped.
"""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from traindoctor import transactions
from traindoctor.engine import audit
from traindoctor.fixing import plan
from traindoctor.options import load_options

from .running_programs import PROGRAMS

QUICK = {"sum-printed", "autocast-imported", "ddp-plain", "old-launcher"}
FRAMEWORKS = {"lightning", "accelerate"}


def _interpreter(name: str) -> str:
    chosen = os.environ.get("TRAINDOCTOR_FRAMEWORKS_PYTHON")
    if name in FRAMEWORKS and chosen is None and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return chosen if name in FRAMEWORKS and chosen is not None else sys.executable


def _run(root: Path, python: str) -> tuple[int, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = dict(
        os.environ, PYTHON=python, PORT=str(port), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"
    )
    environment.pop("PYTHONPATH", None)
    command = ["bash", "run.sh"] if (root / "run.sh").exists() else [python, "train.py"]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, re.sub(r"port \d+", "", done.stdout)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in PROGRAMS],
)
def test_same_losses_and_exit_code_after_safe_fixes(name: str, tmp_path: Path) -> None:
    if "run.sh" in PROGRAMS[name] and shutil.which("bash") is None:
        pytest.skip("no bash")
    python = _interpreter(name)
    for file, text in PROGRAMS[name].items():
        (tmp_path / file).write_text(text)
    before = _run(tmp_path, python)
    options = load_options(tmp_path, external=False)
    changes = plan(audit(tmp_path, options), options, unsafe=False)
    assert changes, "each program holds something that a safe fix changes"
    transactions.apply(tmp_path, changes)
    assert _run(tmp_path, python) == before
    assert before[1] or before[0], "a program shows its losses or an exit code"


def test_at_least_twenty_programs_with_the_three_styles() -> None:
    assert len(PROGRAMS) >= 20
    assert set(PROGRAMS) >= FRAMEWORKS
    assert sum("DistributedDataParallel" in files.get("train.py", "") for files in PROGRAMS.values()) >= 5
