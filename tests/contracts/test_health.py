"""The trainer judges itself with the monitor's detectors; its ledger and the monitor agree."""

import json
import subprocess
import sys

from tests.runs import write_recipe

MMLDLM = [sys.executable, "-m", "mmldlm"]


def train(folder, store, *words):
    """A run of a real process; its alerts as (code, what) and those that the monitor finds afterwards."""
    folder.mkdir()
    recipe, run = write_recipe(folder, store), folder / "run"
    words = [
        "train.steps=120",
        "train.log_every=1",
        "train.valid_every=0",
        "train.checkpoint_every=50",
        *words,
    ]
    command = [*MMLDLM, "train", "--recipe", str(recipe), "--run", str(run), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ledger = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    watch = [*MMLDLM, "monitor", str(run), "--once", "--json"]
    seen = json.loads(subprocess.run(watch, capture_output=True, text=True, check=False).stdout)
    return done, [event for event in ledger if event["event"] == "alert"], seen


def codes_of(seen):
    return {alert["code"] for run in seen["runs"] for alert in run["alerts"]}


def test_a_healthy_run_has_no_alert_in_its_ledger(store, tmp_path):
    done, alerts, seen = train(tmp_path / "healthy", store)
    assert done.returncode == 0, done.stderr
    # a machine that does other things makes the rate unsteady, and that is told rightly
    assert {alert["code"] for alert in alerts if not alert["code"].startswith("M3")} == set()
    assert {code for code in codes_of(seen) if not code.startswith("M3")} == set()


def test_a_run_that_diverges_says_so_while_it_runs(store, tmp_path):
    _, alerts, seen = train(
        tmp_path / "ill", store, "optim.lr=30", "optim.clip_norm=0", "optim.warmup_steps=60"
    )
    found = {alert["code"] for alert in alerts if alert["what"] == "opened"}
    assert found
    assert found <= codes_of(seen)
    first = alerts[0]
    assert first["advice"]
    assert first["evidence"]
    assert first["step"] >= first["first_step"]
