"""Signals raise a flag; a scheduler gets the exit code that says "again", a second Ctrl-C leaves at once."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmldlm.run_folder import lock_run
from mmldlm.training import signals
from mmldlm.training.signals import REQUEUE, StopFlag, exit_code
from tests import warm
from tests.runs import make_trainer, write_recipe
from tests.stores import write_store

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130)]
    + [(getattr(signal, f"SIG{name}"), REQUEUE) for name in ("TERM", "HUP", "QUIT", "USR1", "USR2")],
)
def test_each_signal_raises_the_flag_and_has_its_exit_code(number, code):
    before = signal.getsignal(number)
    with StopFlag() as stop:
        os.kill(os.getpid(), number)
        assert stop.received == number
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may send more than one; the save goes on
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.received == number
    assert exit_code(stop.received) == code
    assert signal.getsignal(number) == before


def test_one_press_that_arrives_twice_is_one_press_and_a_second_one_leaves(monkeypatch):
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a launcher passed it on
        assert stop.received == signal.SIGINT
        monkeypatch.setattr(signals, "_ONE_PRESS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_stays_ignored_and_others_work(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            os.kill(os.getpid(), number)
            assert stop.received is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received == signal.SIGTERM
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


SLOW_DISK = """
import sys, time
from mmldlm import durable
from mmldlm.cli.main import main

write = durable.write_file

def slow_write(path, chunks):
    if ".staging-" in str(path) and "step_00000004" not in str(path):
        time.sleep(300)
    return write(path, chunks)

durable.write_file = slow_write
sys.argv = ["mmldlm", *sys.argv[1:]]
main()
"""


def test_a_second_ctrl_c_does_not_wait_for_a_slow_disk_and_damages_nothing(tmp_path):
    store = write_store(tmp_path / "store", num_train=120).path
    recipe = write_recipe(tmp_path, store)
    words = ["train", "--recipe", str(recipe), "--run", str(tmp_path / "run"), "train.valid_samples=0"]
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    process = warm.Popen(
        [sys.executable, "-c", SLOW_DISK, *words, "train.valid_every=0"], env=env, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    checkpoints = tmp_path / "run" / "checkpoints"
    until = time.monotonic() + 200
    while not list(checkpoints.glob(".staging-step_00000008*")) and time.monotonic() < until:
        time.sleep(0.02)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.8)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert re.search("mmldlm: left at once", err)
    assert [path.name for path in checkpoints.glob("step_*")] == ["step_00000004"]
    again = make_trainer(tmp_path, store)
    again.fit()
    assert again.step == 12
    assert not [name for name in os.listdir(checkpoints) if name.startswith(".")]


EARLY = """
import importlib, os, signal, sys
from mmldlm.cli.main import main

module, name = sys.argv[1].split(":")
place = importlib.import_module(module)
call = getattr(place, name)

def signalled(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    return call(*args, **kwargs)

setattr(place, name, signalled)
sys.argv = ["mmldlm", *sys.argv[2:]]
main()
"""


def test_sigterm_during_the_start_leaves_nothing_that_blocks_the_next_one(store, tmp_path):
    words = ["train", "--recipe", str(write_recipe(tmp_path, store)), "--run", str(tmp_path / "run")]
    words += ["train.steps=2", "train.valid_every=0", "train.valid_samples=0", "train.valid_documents=2"]
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}

    def start(where):
        command = [sys.executable, "-c", EARLY, where, *words]
        return warm.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)

    # before anything is written the default action is right: the process is gone, and there is no folder
    assert start("mmldlm.config.recipe:load_recipe").returncode == -signal.SIGTERM
    assert not (tmp_path / "run").exists()
    # from there on the signal is kept until the run can stop in order
    told = start("mmldlm.api.train:set_up")
    assert (told.returncode, "stopped before the first step" in told.stderr) == (REQUEUE, True), told.stderr
    assert "Traceback" not in told.stderr
    again = make_trainer(tmp_path, store, "train.steps=2")
    with lock_run(again.run, patience=0.0):
        again.fit()
    assert again.step == 2


def test_a_closed_terminal_stops_the_run_with_a_checkpoint_and_its_exit_code(tmp_path):
    store = write_store(tmp_path / "store", num_train=120).path
    recipe, run = write_recipe(tmp_path, store), tmp_path / "run"
    words = ["train", "--recipe", str(recipe), "--run", str(run), "train.steps=100000", "train.log_every=1"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
        os.execv(sys.executable, [sys.executable, "-m", "mmldlm", *words, "train.valid_every=0"])
    deadline, log = time.monotonic() + 200, run / "training_log.jsonl"
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == REQUEUE
    assert list((run / "checkpoints").glob("step_*"))
