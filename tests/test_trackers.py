"""Curves in trackers: the same names everywhere, never a question, and trouble that stays theirs.

Real packages are used where they are installed; the others are replaced by stand-ins that have their calls.
"""

import contextlib
import importlib.machinery
import importlib.util
import json
import logging
import sys
import threading
import time
import types
from types import SimpleNamespace

import pytest

from mmldlm import trackers
from mmldlm.config.recipe import make_config
from mmldlm.errors import UserError
from mmldlm.metrics import TrainingLog
from mmldlm.trackers import Background, TensorBoard, TrackedRun, check_trackers, named_numbers, open_trackers

LINE = {"loss": 2.5, "valid_loss": 3, "note": "words", "fill": None, "on": True, "by_time": [1.0]}
NAMES = {"train/loss": 2.5, "valid/loss": 3}
REAL = {name: importlib.util.find_spec(name) is not None for name in ("wandb", "mlflow", "trackio")}


def stand_in(monkeypatch, name, **members):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def fake_wandb(monkeypatch):
    calls = SimpleNamespace(init=[], logged=[], finished=0)

    def init(**words):
        calls.init.append(words)
        if words["mode"] == "online":
            raise AssertionError("W&B would ask for an account here")
        finish = lambda: setattr(calls, "finished", calls.finished + 1)  # noqa: E731
        return SimpleNamespace(log=calls.logged.append, finish=finish, define_metric=lambda *_, **__: None)

    stand_in(monkeypatch, "wandb", init=init, Settings=lambda **words: words)
    return calls


def fake_mlflow(monkeypatch):
    calls = SimpleNamespace(metrics=[], params=[], created=[], ended=[])

    class Client:
        def __init__(self, tracking_uri):
            calls.address = tracking_uri

        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return "7"

        def create_run(self, number, run_name):
            calls.created.append(run_name)
            return SimpleNamespace(info=SimpleNamespace(run_id=f"run{len(calls.created)}"))

        def log_batch(self, run_id, metrics=(), params=()):
            calls.metrics += [(run_id, *metric) for metric in metrics]
            calls.params += params

        def set_terminated(self, run_id):
            calls.ended.append(run_id)

    stand_in(monkeypatch, "mlflow", MlflowClient=Client)
    entities = {"Metric": lambda *words: words, "Param": lambda *words: words}
    stand_in(monkeypatch, "mlflow.entities", **entities)
    return calls


def fake_trackio(monkeypatch):
    calls = SimpleNamespace(init=[], logged=[])

    def init(**words):
        calls.init.append(words)
        log = lambda numbers, step: calls.logged.append((step, numbers))  # noqa: E731
        return SimpleNamespace(log=log, finish=lambda: None)

    stand_in(monkeypatch, "trackio", init=init)
    return calls


def run_in(folder, resume_step=None):
    return TrackedRun(folder, "mine", {"optim": {"lr": 0.1}, "name": "mine"}, resume_step)


def log_line(tracker_name, folder, step=1, resume_step=None):
    opened = open_trackers([tracker_name], run_in(folder, resume_step))
    log = TrainingLog(folder / "training_log.jsonl", resume_step=resume_step, trackers=opened)
    log.write(step, **LINE)
    log.close()


def test_single_numbers_have_one_name_everywhere():
    assert named_numbers(LINE) == NAMES


def test_wandb_without_an_account_is_off_line_and_goes_on_under_the_same_id(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    calls = fake_wandb(monkeypatch)
    monkeypatch.setattr("time.time", lambda: 1e9)  # runs of a sweep may begin at once
    log_line("wandb", tmp_path)
    log_line("wandb", tmp_path, step=2, resume_step=1)
    first, second = calls.init
    assert first["mode"] == "offline"
    assert first["config"] == {"optim.lr": 0.1, "name": "mine"}
    assert first["id"] == second["id"]
    assert calls.logged == [{"step": 1, **NAMES}, {"step": 2, **NAMES}]
    assert calls.finished == 2
    log_line("wandb", tmp_path)  # a new run in the folder
    assert calls.init[2]["id"] != first["id"]


def test_wandb_with_an_account_is_on_line(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert trackers._has_wandb_key()
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert trackers._has_wandb_key()


def test_mlflow_writes_into_the_run_folder_and_resumes_its_run(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    calls = fake_mlflow(monkeypatch)
    log_line("mlflow", tmp_path)
    log_line("mlflow", tmp_path, step=2, resume_step=1)
    assert calls.address == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert calls.created == ["mine"]
    assert [(run, key, step) for run, key, _, _, step in calls.metrics if key == "train/loss"] == [
        ("run1", "train/loss", 1),
        ("run1", "train/loss", 2),
    ]
    assert ("optim.lr", "0.1") in calls.params
    assert calls.ended == ["run1", "run1"]


def test_trackio_gets_the_same_names(tmp_path, monkeypatch):
    calls = fake_trackio(monkeypatch)
    log_line("trackio", tmp_path)
    assert calls.logged == [(1, NAMES)]
    assert calls.init[0]["resume"] == "never"


def test_a_tracker_that_fails_is_named_once_and_the_log_goes_on(tmp_path, monkeypatch, caplog):
    calls = fake_wandb(monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(
        sys.modules["wandb"], "init", lambda **_: (_ for _ in ()).throw(SystemExit("no network"))
    )
    opened = open_trackers(["wandb"], run_in(tmp_path))
    log = TrainingLog(tmp_path / "log.jsonl", resume_step=None, trackers=opened)
    with caplog.at_level(logging.WARNING, logger="mmldlm"):
        for step in (1, 2, 3):
            log.write(step, loss=1.0)
        log.close()
    assert [record.message for record in caplog.records] == [
        "wandb stopped (no network); the log continues without it"
    ]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3
    assert calls.logged == []


def test_a_tracker_that_hangs_holds_nothing_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trackers, "TAIL_SECONDS", 0.2)
    never = threading.Event()
    tracker = Background("hung", lambda run: never.wait(), run_in(tmp_path))
    began = time.monotonic()
    for step in range(1000):
        tracker.write(step, NAMES)
    tracker.close()
    assert time.monotonic() - began < 60
    assert "hung did not finish" in caplog.text
    never.set()


def test_a_missing_package_and_an_unknown_name_are_one_clear_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"train\.trackers: mlflow is not installed; pip install mlflow"):
        check_trackers(["mlflow"])
    with pytest.raises(UserError, match=r"train\.trackers: 'wandbb': allowed are tensorboard, wandb"):
        make_config("laptop", ["train.trackers=[wandbb]"])
    with pytest.raises(UserError, match=r"unknown setting train\.tensorboard; did you mean train\.trackers"):
        make_config("laptop", ["train.tensorboard=false"])


def test_nothing_is_imported_that_is_not_asked_for(tmp_path):
    before = set(sys.modules)
    assert open_trackers([], run_in(tmp_path)) == []
    assert not {"wandb", "mlflow", "trackio"} & (set(sys.modules) - before)


@pytest.mark.skipif(not REAL["wandb"], reason="wandb is not installed")
def test_the_real_wandb_writes_off_line(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setattr(trackers, "TAIL_SECONDS", 60.0)
    log_line("wandb", tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 120
    while b"train/loss" not in file.read_bytes():  # its own process writes it
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.skipif(not REAL["mlflow"], reason="mlflow is not installed")
def test_the_real_mlflow_writes_a_local_file(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(trackers, "TAIL_SECONDS", 60.0)
    log_line("mlflow", tmp_path)
    log_line("mlflow", tmp_path, step=2, resume_step=1)
    from mlflow import MlflowClient

    identity = json.loads((tmp_path / "tracker_mlflow.json").read_text())["id"]
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert [metric.step for metric in client.get_metric_history(identity, "train/loss")] == [1, 2]
    assert client.get_run(identity).data.params["optim.lr"] == "0.1"


@pytest.mark.skipif(not REAL["trackio"], reason="trackio is not installed")
def test_the_real_trackio_writes_a_local_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr(trackers, "TAIL_SECONDS", 60.0)
    log_line("trackio", tmp_path)
    import sqlite3

    (file,) = (tmp_path / "trackio").glob("*.db")
    rows = sqlite3.connect(file).execute("select * from metrics").fetchall()
    assert any("train/loss" in str(row) for row in rows)


def test_a_disk_that_fails_under_tensorboard_is_one_line_and_no_traceback(
    tmp_path, capfd, caplog, monkeypatch
):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    mirror = TensorBoard(TrackedRun(tmp_path, "run", {}, None))
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.unlink()
    (tmp_path / "tensorboard").rmdir()
    (tmp_path / "tensorboard").write_text("no folder any more")
    for step in range(200):
        mirror.write(step, {"train/loss": 1.0})
        with contextlib.suppress(OSError, AttributeError):
            mirror._writer.flush()
        if "TensorBoard stopped" in caplog.text:
            break
        time.sleep(0.02)
    mirror.close()
    assert "TensorBoard stopped" in caplog.text
    assert "Traceback" not in capfd.readouterr().err
