"""Runs of our own trainer as the command meets them: finished, killed, and ranks under torchrun."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from runwatch.session import Session
from runwatch.settings import MonitorSettings
from runwatch.sources import find_runs

from tests import warm
from tests.health.process_corpus import run_ranks
from tests.runs import make_trainer
from tests.stores import write_store


def read(path):
    """What `runwatch --once --json` reports about a run, and its exit code."""
    done = warm.run(
        [sys.executable, "-m", "runwatch", "--once", "--json", str(path)], capture_output=True, text=True
    )
    return json.loads(done.stdout)["runs"][0], done.returncode


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run of ours, trained to its end."""
    folder = tmp_path_factory.mktemp("own")
    store = write_store(folder / "store")
    trainer = make_trainer(folder / "made", store.path, "train.steps=24", "train.log_every=1")
    trainer.fit()
    return trainer.run.path


def test_a_real_run_is_read_whole(run):
    state, code = read(run)  # a busy machine may earn it a warning, nothing should earn it an error
    assert code == 0
    assert (state["state"], state["step"], state["total_steps"], state["num_lines"]) == (
        "finished",
        24,
        24,
        28,
    )
    assert math.isfinite(state["values"]["loss"])
    assert {alert["level"] for alert in state["alerts"]} <= {"info", "warn"}
    assert sum(state["goodput"]["shares"].values()) == pytest.approx(1, abs=0.01)


def test_a_killed_run_is_a_crash(run, tmp_path):
    """The lock is signed by a process that is gone, and the ledger has no last word."""
    copy = tmp_path / "killed"
    copy.mkdir()
    lines = (run / "training_log.jsonl").read_text().splitlines(keepends=True)
    (copy / "training_log.jsonl").write_text("".join(lines[:10]))
    (copy / "events.jsonl").write_text((run / "events.jsonl").read_text().splitlines(keepends=True)[0])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (copy / ".lock").write_text(json.dumps({"pid": child.pid, "host": os.uname().nodename, "since": ""}))
    long_ago = time.time() - 20
    for path in copy.iterdir():
        os.utime(path, (long_ago, long_ago))
    alive = read(copy)[0]
    assert "M502" not in [alert["code"] for alert in alive["alerts"]]
    child.send_signal(signal.SIGKILL)
    child.wait()
    dead = read(copy)[0]
    # a busy machine may have earned it a warning about its rate
    assert [alert["code"] for alert in dead["alerts"] if not alert["code"].startswith("M3")] == ["M502"]
    assert dead["state"] == "crashed"


def test_the_rank_that_failed_first_is_named_from_real_logs_of_torchrun(tmp_path):
    session = Session(find_runs([str(run_ranks(tmp_path / "ranks", "crash"))]), MonitorSettings())
    session.look(live=False)
    session.close()
    alert = session.runs[0].panel.book.alerts["M502", ""]
    assert alert.evidence == "rank 1: ValueError: a batch that cannot be read"
    assert session.runs[0].state() == "crashed"
