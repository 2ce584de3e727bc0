"""Who may write into a run folder, and what is told to those who may not."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mmldlm
from mmldlm.errors import UserError
from mmldlm.json_lines import read_lines
from mmldlm.run_folder import RunFolder, existing_run, lock_run

HOLD = """
import os, sys, time
from pathlib import Path
from mmldlm.run_folder import RunFolder, lock_run
with lock_run(RunFolder(Path(sys.argv[1]))):
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(30)  # a loader process that outlives its parent for a while
    print(os.getpid(), flush=True)
    time.sleep(30)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "saved" / "demo")
    folder.create()
    return folder


def hold(run: RunFolder, how: str = "plain") -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(Path(mmldlm.__file__).parents[1])}
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path), how],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip().isdigit()
    return child


def test_layout(run: RunFolder) -> None:
    assert run.checkpoints.is_dir()
    assert run.reports.is_dir()
    names = {
        "config.yaml",
        "training_log.jsonl",
        "train.log",
        "samples.jsonl",
        "events.jsonl",
        "tensorboard",
        "export",
    }
    paths = (
        run.config,
        run.training_log,
        run.train_log,
        run.samples,
        run.events,
        run.tensorboard,
        run.export,
    )
    assert {path.name for path in paths} == names
    assert sorted(os.listdir(run.path)) == ["checkpoints", "reports"]  # the trial file is gone
    run.create()


def test_a_second_run_is_refused_in_one_line_that_names_the_first(run: RunFolder) -> None:
    child = hold(run)
    try:
        with pytest.raises(UserError) as caught, lock_run(run, patience=0.1):
            pass
        assert re.search(rf"process {child.pid} on \S+ since \d{{4}}-", str(caught.value))
        assert "choose another run folder" in str(caught.value)
        assert "\n" not in str(caught.value)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_the_lock_is_free_after_kill_9_even_if_children_live_on(run: RunFolder, how: str) -> None:
    child = hold(run, how)
    child.kill()
    child.wait()
    try:
        began = time.monotonic()
        with lock_run(run):
            assert json.loads(run.lock_file.read_text())["pid"] == os.getpid()
        assert time.monotonic() - began < 20
    finally:
        if how == "fork":
            os.killpg(child.pid, signal.SIGKILL)


def test_the_lock_is_free_after_leaving_and_after_an_error(run: RunFolder) -> None:
    with pytest.raises(RuntimeError), lock_run(run):
        raise RuntimeError("a crash that Python sees")
    with lock_run(run, patience=0), pytest.raises(UserError, match="another run"), lock_run(run, patience=0):
        pass
    with lock_run(run, patience=0):
        pass


def test_half_written_files_of_a_crash_are_gone_once_the_folder_is_locked(run: RunFolder) -> None:
    (run.path / ".new-config.yaml-0123456789ab").write_text("half")
    (run.path / ".staging-export-0123456789ab").mkdir()
    (run.path / ".aside-export-0123456789ab").mkdir()
    with lock_run(run):
        assert sorted(os.listdir(run.path)) == [".lock", "checkpoints", "export", "reports"]


def test_a_lock_file_full_of_rubbish_does_no_harm(run: RunFolder) -> None:
    run.lock_file.write_bytes(b"\xff\x00 rubbish" * 1000)
    with lock_run(run, patience=0):
        run.lock_file.write_bytes(b"\xff\xff")
        with pytest.raises(UserError, match="names no process"), lock_run(run, patience=0):
            pass


def test_a_file_in_the_way_and_a_folder_without_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=r"file.*choose another run folder"):
            RunFolder(path).create()
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    if os.geteuid() == 0:  # rights do not stop root

        def refuse(*args: object, **kwargs: object) -> int:
            raise PermissionError(13, "Permission denied", str(locked))

        monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UserError, match=r"locked.*you may not write there"):
        RunFolder(locked / "run").create()


@pytest.mark.parametrize(("number", "words"), [(30, "read-only"), (28, "no space left"), (122, "quota")])
def test_read_only_and_full_disks_show_before_the_first_step(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(UserError, match=f"^run folder {run.path}: .*{words}"):
        run.create()
    with pytest.raises(UserError, match=words):
        run.write_config("a: 1\n")
    assert not run.config.exists()
    assert sorted(os.listdir(run.path)) == ["checkpoints", "reports"]


def test_config_is_replaced_in_one_stroke(run: RunFolder) -> None:
    run.write_config("a: 1\n")
    run.write_config("a: ü\n")
    assert run.config.read_text("utf-8") == "a: ü\n"
    assert sorted(os.listdir(run.path)) == ["checkpoints", "config.yaml", "reports"]


def test_the_ledger_only_grows_and_survives_a_torn_end(run: RunFolder) -> None:
    events = run.open_events()
    events.record("start", step=0)
    events.close()
    with open(run.events, "ab") as file:
        file.write(b'{"event": "to')
    events = run.open_events()
    events.record("rollback", step=5, loss=float("nan"), path=run.path)
    events.close()
    assert [record["event"] for record in read_lines(run.events)] == ["start", "rollback"]
    assert run.events.read_bytes().count(b"\n") == 3


def test_only_a_run_is_taken_for_one(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run"):
        existing_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a run"):
        existing_run(tmp_path)
    run.write_config("a: 1\n")
    assert existing_run(run.path) == run


def test_a_deleted_lock_file_admits_no_second_writer(run: RunFolder) -> None:
    child = hold(run)
    try:
        run.lock_file.unlink()
        deleted = pytest.raises(UserError, match="its lock file was deleted, but it still runs")
        with deleted, lock_run(run, patience=0.1):
            pass
    finally:
        child.kill()
        child.wait()
