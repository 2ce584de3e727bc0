"""A step that hangs is told with all stacks; compiling, validating and saving are no hung step."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from mmldlm.run_folder import RunFolder
from mmldlm.training import watchdog
from mmldlm.training.watchdog import HUNG, Watchdog
from tests import warm
from tests.runs import make_trainer
from tests.stores import write_store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def wait_for(condition, seconds=120.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def test_a_hung_step_is_told_once_with_the_stacks_of_all_threads(run):
    told, release = [], threading.Event()

    def where_it_hangs():
        release.wait(30)

    other = threading.Thread(target=where_it_hangs)
    other.start()
    with Watchdog(run, 0.2, lambda *facts: told.append(facts)) as watchdog:
        watchdog.at(41, "step")
        wait_for(lambda: told)
        time.sleep(0.5)
        assert [(step, file) for step, _, file in told] == [(42, "stacks.txt")]
        assert told[0][1] >= 0.2
        watchdog.at(42, "step")
        wait_for(lambda: len(told) == 2)
    release.set()
    other.join()
    text = run.stacks.read_text()
    assert "step 42 has taken" in text
    assert "where_it_hangs" in text
    assert "test_a_hung_step_is_told_once" in text


def test_phases_that_are_no_step_may_take_long(run):
    told = []
    with Watchdog(run, 0.5, lambda *facts: told.append(facts)) as watchdog:
        watchdog.at(1, "step")
        for name in ("validation", "save"):
            with watchdog.phase(name):
                time.sleep(0.8)
        assert told == []
        wait_for(lambda: told)
    assert run.stacks.exists()


def test_compiling_takes_as_long_as_it_takes(run):
    told = []
    text = "import time\ndef compile_frame(seconds):\n    time.sleep(seconds)\n"
    code = compile(text, "/x/torch/_dynamo/convert_frame.py", "exec")
    compiler: dict = {}
    exec(code, compiler)
    with Watchdog(run, 0.4, lambda *facts: told.append(facts)) as watchdog:
        watchdog.at(1, "step")
        compiler["compile_frame"](1.0)
        assert told == []


def test_the_names_of_the_compilers_files_are_those_of_this_pytorch():
    import torch

    from mmldlm.training.watchdog import _COMPILERS

    for name in _COMPILERS[:3]:
        assert (Path(torch.__file__).parent / name).exists(), name


def test_the_heartbeat_is_whole_at_any_time_and_tells_how_it_ended(run):
    with Watchdog(run, 0.0, lambda *facts: None) as watchdog:
        watchdog.at(7, "step")
        wait_for(run.heartbeat.exists)
        assert json.loads(run.heartbeat.read_text())["pid"] == os.getpid()
    ended = json.loads(run.heartbeat.read_text())
    assert (ended["step"], ended["phase"]) == (7, "finished")
    assert abs(ended["time"] - time.time()) < 60
    assert not run.stacks.exists()
    assert not [name for name in os.listdir(run.path) if name.startswith(".new")]
    with pytest.raises(RuntimeError), Watchdog(run, 0.0, lambda *facts: None):
        raise RuntimeError
    assert json.loads(run.heartbeat.read_text())["phase"] == "stopped"


def test_a_clock_that_jumps_is_no_hung_step(run, monkeypatch):
    told = []
    with Watchdog(run, 5.0, lambda *facts: told.append(facts)) as watchdog:
        watchdog.at(1, "step")
        monkeypatch.setattr(time, "time", lambda: 4e9)
        watchdog._check()
        monkeypatch.setattr(time, "time", lambda: 1.0)
        watchdog._check()
    assert told == []


SCRIPT = """
import sys, time
from pathlib import Path
from tests.runs import make_trainer

trainer = make_trainer(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
run = trainer.train_step

def one_step(batch, waited):
    if trainer.step == 5:
        trainer.watchdog.timeout = 0.5  # a busy machine may need longer for a step that does not hang
        time.sleep(90)
    run(batch, waited)

trainer.train_step = one_step
trainer.fit()
"""


def test_a_run_leaves_with_its_own_exit_code_and_goes_on_later(tmp_path):
    store = write_store(tmp_path / "store", num_train=120).path
    words = ("train.step_timeout=100", "train.step_timeout_action=exit")
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(store), *words]
    done = warm.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == HUNG, done.stderr
    assert "one_step" in (tmp_path / "run" / "stacks.txt").read_text()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["left"]) for event in events if event["event"] == "hung_step"] == [
        (6, True)
    ]
    again = make_trainer(tmp_path, store)
    again.fit()
    assert again.step == 12


def test_a_disk_that_hangs_is_reported_on_stderr_and_does_not_hold_the_watchdog(run, monkeypatch, capfd):
    hangs, told = threading.Event(), []
    monkeypatch.setattr(watchdog, "DISK_SECONDS", 0.3)
    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "_LAST_SECONDS", 0.5)
    monkeypatch.setattr(Path, "write_text", lambda *args, **kwargs: hangs.wait(30))
    left: list[int] = []
    with Watchdog(run, 1.0, lambda *facts: told.append(facts), leave=left.append) as watched:
        watched.at(6, "step")
        wait_for(lambda: left)
        assert left == [HUNG]  # although the stacks could not be written
        assert told == []
        hangs.set()
        wait_for(lambda: told)
        time.sleep(0.5)
    said = capfd.readouterr().err.splitlines()
    assert said[0] == (
        f"mmldlm: {run.path}: the disk has not answered for 0 s, step 6, step; the run waits for it. "
        "Checkpoints that are there stay as they are"
    )
    assert "step 7 has taken 1 s" in said[1]
    assert said[2].endswith("the disk answers again")
