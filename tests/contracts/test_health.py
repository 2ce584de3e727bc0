"""The trainer judges itself with the monitor's detectors; its ledger and the monitor agree."""

import contextlib
import json
import sys

import mmldlm
from tests import warm
from tests.runs import write_recipe


def train(folder, store, **settings):
    """A run; its alerts, and what the monitor finds afterwards."""
    usual = {"train.steps": 120, "train.log_every": 1, "train.valid_every": 0, "train.checkpoint_every": 50}
    folder.mkdir()
    with contextlib.suppress(mmldlm.UserError):  # one that diverges may end early
        mmldlm.train(write_recipe(folder, store), run=folder / "run", overrides=usual | settings)
    ledger = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    watch = [sys.executable, "-m", "mmldlm", "monitor", str(folder / "run"), "--once", "--json"]
    seen = json.loads(warm.run(watch, capture_output=True, text=True, check=False).stdout)
    return [event for event in ledger if event["event"] == "alert"], seen, ledger[-1]["event"]


def codes_of(seen):
    return {alert["code"] for run in seen["runs"] for alert in run["alerts"]}


def test_a_healthy_run_has_no_alert_in_its_ledger(store, tmp_path):
    alerts, seen, last = train(tmp_path / "healthy", store)
    assert last == "finished"
    # a machine that does other things makes the rate unsteady, and that is told rightly
    assert {alert["code"] for alert in alerts if not alert["code"].startswith("M3")} == set()
    assert {code for code in codes_of(seen) if not code.startswith("M3")} == set()


def test_a_run_that_diverges_says_so_while_it_runs(store, tmp_path):
    hot = {"optim.lr": 30, "optim.clip_norm": 0, "optim.warmup_steps": 60}
    alerts, seen, _ = train(tmp_path / "ill", store, **hot)
    found = {alert["code"] for alert in alerts if alert["what"] == "opened"}
    assert found
    assert found <= codes_of(seen)
    first = alerts[0]
    assert first["advice"]
    assert first["evidence"]
    assert first["step"] >= first["first_step"]
