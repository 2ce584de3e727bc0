"""kill -9 at any moment of a run: the same command ends with bit-identical weights and curve."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]


def sweep(folder: Path, moments: int, saves: int) -> dict:
    command = [sys.executable, "-m", "tests.training.kill_sweep", str(folder), str(moments), str(saves)]
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = warm.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_killed_at_a_few_moments_and_while_saving(quick_folder):
    seen = sweep(quick_folder, 3, 3)
    assert seen["kills"] == 6
    assert seen["during_a_save"] >= 3


@pytest.mark.soak
def test_killed_at_fifty_moments_fifteen_of_them_while_saving(tmp_path):
    seen = sweep(tmp_path, 35, 15)
    assert seen["kills"] == 50
    assert seen["during_a_save"] >= 15
