"""SIGKILL at any moment leaves a checkpoint that is whole, and never an older one than was acknowledged."""

import json
import os
import sys
from pathlib import Path

import pytest
from tests import warm

ROOT = Path(__file__).parents[2]


def sweep(*words: str) -> dict:
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = warm.run(
        [sys.executable, "-m", "tests.checkpoint.kill_sweep", *words],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_killed_at_every_call_that_changes_the_disk(quick_folder: Path) -> None:
    seen = sweep("calls", str(quick_folder))
    assert seen["kills"] > 60
    assert seen["states"] == [[1, 0], [2, 0], [2, 1], [3, 0]]  # old and new one of each save were met


def test_killed_at_random_moments(tmp_path: Path) -> None:
    seen = sweep("moments", str(tmp_path), "25")
    assert seen["during_a_save"] > 0  # how many is up to the machine


def test_a_rank_killed_while_all_save(tmp_path: Path) -> None:
    seen = sweep("shards", str(tmp_path), "3")
    assert seen["kills"] == 3
    assert seen["steps"] > 0  # it went on saving in between


@pytest.mark.soak
def test_a_rank_killed_many_times_while_all_save(tmp_path: Path) -> None:
    assert sweep("shards", str(tmp_path), "30")["during_a_save"] > 0


@pytest.mark.soak
def test_killed_at_many_random_moments(tmp_path: Path) -> None:
    assert sweep("moments", str(tmp_path), "500")["during_a_save"] >= 20
