"""The validation checklist: what is right gets ticks, and a broken optimised path, run or file gets a cross."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import mmldlm
from mmldlm.api.train import train_config
from mmldlm.benchmark import validation
from mmldlm.benchmark.arms import reference_settings
from mmldlm.benchmark.checklist import (
    Check,
    Figures,
    check_checkpoints,
    check_course,
    check_ranks,
    check_resumed,
    compare_runs,
    read_figures,
)
from mmldlm.cli.main import app
from mmldlm.config.recipe import load_recipe
from mmldlm.errors import Interrupted, UserError
from mmldlm.model import attention
from mmldlm.run_folder import RunFolder
from mmldlm.training import optim
from tests import warm
from tests.runs import write_recipe
from tests.stores import write_store

SPEED = {"time per step", "memory", "device busy", "no error in the log"}
"""Checks that a slow machine may fail; an alert about it counts as an error."""
COLD = os.environ | {"COLD_CHILDREN": "1"}
"""The command asks the system how much memory its children used."""
STEPS = 40
WORDS = ["train.device=cpu", "train.log_every=2", "train.valid_every=0", f"train.steps={STEPS}"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("validation")
    return write_recipe(folder, write_store(folder / "store").path)


def trained(recipe, path, *words) -> Figures:
    train_config(load_recipe(str(recipe), [*WORDS, *words]), path)
    return read_figures(RunFolder(path), path / "output", None, 2**30)


@pytest.fixture(scope="module")
def plain(recipe):
    return trained(recipe, recipe.parent / "plain", *reference_settings())


def failed(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.passed is False} - SPEED


def see_everything(monkeypatch):
    """Attention that does not stop at the end of a document."""
    monkeypatch.setattr(
        attention, "_allowed", lambda segment: torch.ones(*segment.shape, segment.shape[-1], dtype=torch.bool)
    )


def other_moments(monkeypatch):
    """An optimizer that forgets its momentum."""
    real = optim.AdamW
    monkeypatch.setattr(
        optim, "AdamW", lambda *words, **options: real(*words, **options | {"betas": (0.5, 0.95)})
    )


@pytest.mark.parametrize(
    ("harm", "crosses"),
    [(None, set()), (see_everything, {"loss at the start"}), (other_moments, {"loss curve"})],
)
def test_the_optimised_path_has_the_curve_of_the_plain_one_unless_it_is_broken(
    harm, crosses, recipe, plain, tmp_path, monkeypatch
):
    if harm is not None:
        harm(monkeypatch)
    optimised = trained(recipe, tmp_path / "run")
    checks = compare_runs(plain, optimised, "fp32", on_gpu=False)
    assert crosses <= failed(checks), [check.line() for check in checks]
    assert bool(crosses) == bool(failed(checks))


@pytest.mark.timeout(900)
def test_the_command_runs_all_of_it_and_leaves_figures(recipe, tmp_path):
    done = warm.run(
        [sys.executable, "-m", "mmldlm", "validate", str(recipe), "train.device=cpu", "--steps", "10", "--out", "v"],
        cwd=tmp_path, env=COLD, capture_output=True, text=True, check=False,
    )  # fmt: skip
    result = json.loads((tmp_path / "v" / "validation.json").read_text())
    crosses = {check["name"] for check in result["checks"] if check["passed"] is False}
    assert crosses <= SPEED, done.stdout
    assert done.returncode == (1 if crosses else 0), done.stderr
    assert {"resume", "ranks", "checkpoints", "no NaN"} <= {check["name"] for check in result["checks"]}
    assert done.stdout.count("✓") == sum(check["passed"] is True for check in result["checks"])
    assert result["runs"]["plain"]["steps"] == result["runs"]["optimised"]["steps"]
    assert not list((tmp_path / "v").glob("*/checkpoints")), "only logs and curves stay"


@pytest.mark.timeout(900)
def test_ctrl_c_ends_the_run_at_work_and_keeps_what_is_known(recipe, tmp_path):
    command = [sys.executable, "-m", "mmldlm", "validate", str(recipe), "train.device=cpu", "--steps", "9000"]
    with warm.Popen(
        [*command, "--out", "v"],
        cwd=tmp_path,
        env=COLD,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        ends = time.monotonic() + 200
        while not (tmp_path / "v" / "plain" / "training_log.jsonl").is_file():
            assert process.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=200)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert json.loads((tmp_path / "v" / "validation.json").read_text())["partial"]
    assert mmldlm.list_runs(tmp_path / "v")[0].state != "training"


COURSE = ["loss falls", "no NaN", "device busy", "no error in the log"]


@pytest.mark.parametrize(("stopped", "known"), [
    ("plain", []),
    ("optimised", ["no NaN", "no error in the log"]),
    ("resumed", ["time per step", "memory", "held-out loss", "checkpoints", *COURSE]),
    ("ranks", ["time per step", "memory", "held-out loss", "checkpoints", "resume", *COURSE]),
])  # fmt: skip
def test_an_interruption_keeps_every_check_whose_figures_are_there(
    stopped, known, recipe, tmp_path, monkeypatch
):
    def train(work, name, words, **more):
        if name == stopped:
            raise KeyboardInterrupt
        work.runs[name] = GOOD
        return GOOD

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(validation._Work, "train", train)
    monkeypatch.setattr(validation._Work, "_copy_checkpoint", lambda work, name: 20)
    done = CliRunner().invoke(app, ["validate", str(recipe), "train.device=cpu", "--out", "v"])
    assert isinstance(done.exception, Interrupted)
    assert done.exception.exit_code == 130
    result = json.loads((tmp_path / "v" / "validation.json").read_text())
    names = [check["name"] for check in result["checks"]]
    assert result["partial"]
    assert not result["passed"]  # what was not checked has not passed
    assert set(names) >= set(known), names
    assert bool(names) == bool(known)
    assert all(f" {name}: " in done.stdout for name in names)


@pytest.mark.parametrize(("words", "message"), [
    (["--steps", "9"], "--steps 9: at least 10"),
    (["--long", "--steps", "50"], "--long: has no use together with --steps 50"),
    (["data.store=nowhere"], "nowhere"),
    (["speed.fly=1"], "command line: unknown setting speed.fly"),
    (["--out", "taken"], "--out taken: is not empty"),
    (["--out", "file/v"], "file is a file"),
])  # fmt: skip
def test_a_mistake_costs_nothing(words, message, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, ["validate", str(recipe), *words])
    assert isinstance(done.exception, UserError), done.output
    assert message in str(done.exception)
    assert sorted(tmp_path.rglob("*")) == before


GOOD = Figures(
    seconds_per_step=0.1,
    memory=2**30,
    steps=[2, 4, 6],
    losses={"loss": [3.0, 2.0, 1.0]},
    held_out={"loss": [2.0, 1.5]},
    busy=0.95,
)


@pytest.mark.parametrize(("change", "cross"), [
    ({"losses": {"loss": [3.0, math.nan, 1.0]}}, "no NaN"),
    ({"skipped": 1}, "no NaN"),
    ({"held_out": {"loss": [1.0, 2.0]}}, "loss falls"),
    ({"held_out": {"loss": [1.0]}}, "loss falls"),
    ({"busy": 0.5}, "device busy"),
    ({"errors": ["a disk is full"]}, "no error in the log"),
])  # fmt: skip
def test_each_fault_of_a_run_has_its_cross(change, cross):
    assert all(check.passed for check in check_course({"plain": GOOD, "optimised": GOOD}))
    checks = check_course({"plain": GOOD, "optimised": replace(GOOD, **change)})
    assert [check.name for check in checks if not check.passed] == [cross]


@pytest.mark.parametrize(("change", "cross"), [
    ({"seconds_per_step": 0.2}, "time per step"),
    ({"memory": 2**31}, "memory"),
    ({"losses": {"loss": [3.0003, 2.0, 1.0]}}, "loss at the start"),
    ({"losses": {"loss": [3.0, 2.05, 1.0]}}, "loss curve"),
    ({"losses": {"loss": [3.0, math.nan, 1.0]}}, "loss curve"),
    ({"held_out": {}}, "held-out loss"),
    ({"held_out": {"loss": [2.0, 1.6]}}, "held-out loss"),
    ({"steps": [2, 4]}, "loss curve"),
    ({"failure": "out of memory"}, "both paths"),
])  # fmt: skip
def test_each_difference_from_the_plain_path_has_its_cross(change, cross):
    assert all(check.passed for check in compare_runs(GOOD, GOOD, "fp32", on_gpu=False))
    checks = compare_runs(GOOD, replace(GOOD, **change), "fp32", on_gpu=False)
    assert [check.name for check in checks if not check.passed] == [cross]


def test_a_gpu_is_held_to_the_gains_of_the_plan():
    same = compare_runs(GOOD, GOOD, "bf16", on_gpu=True)
    assert [check.name for check in same if not check.passed] == ["time per step", "memory"]
    better = replace(GOOD, seconds_per_step=0.07, memory=int(0.65 * 2**30))
    assert all(check.passed for check in compare_runs(GOOD, better, "bf16", on_gpu=True))


def test_ranks_are_compared_where_they_trained():
    assert check_ranks(GOOD, replace(GOOD, losses={"loss": [9.0, 2.0, 1.0]}), 2, 2, "fp32").passed
    assert not check_ranks(GOOD, replace(GOOD, losses={"loss": [3.0, 2.0, 1.1]}), 2, 2, "fp32").passed
    assert not check_ranks(GOOD, replace(GOOD, failure="a rank was lost"), 2, 2, "fp32").passed


def test_checkpoints_that_are_missing_too_many_damaged_or_different_are_crosses(recipe, tmp_path):
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    words = ["train.steps=12", "train.checkpoint_every=2", "train.log_every=12"]
    trained(recipe, run.path, *words)
    due = list(range(2, 13, 2))
    assert check_checkpoints(run, due).passed
    assert not check_checkpoints(run, [*due, 14]).passed
    shutil.copytree(run.path, other.path)
    assert check_resumed(run, other, 10, 12).passed
    trained(recipe, tmp_path / "seed", *words, "train.seed=1")
    assert not check_resumed(run, RunFolder(tmp_path / "seed"), 10, 12).passed
    assert not check_resumed(run, RunFolder(tmp_path / "none"), 10, 12).passed
    model = other.checkpoints / "step_00000012" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\xff")
    assert not check_checkpoints(other, due).passed
    shutil.rmtree(run.checkpoints / "step_00000010")
    assert not check_checkpoints(run, due).passed
