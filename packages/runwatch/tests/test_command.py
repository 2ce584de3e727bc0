"""The command as users and scripts meet it: exit codes, JSON, mistakes, real run folders."""

import http.client
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runwatch.errors import UserError
from runwatch.sinks import describe, webhook_sink
from typer.testing import CliRunner

from mmldlm.cli.main import app


def call(*words):
    return CliRunner().invoke(app, ["monitor", *map(str, words)])


def write_log(path, losses, **more):
    lines = [json.dumps({"step": i + 1, "time": 1e9 + i, "loss": x, **more}) for i, x in enumerate(losses)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run of ours, trained to its end."""
    from tests.runs import make_trainer  # imports torch, which most of these tests do not need
    from tests.stores import write_store

    folder = tmp_path_factory.mktemp("own")
    store = write_store(folder / "store")
    trainer = make_trainer(folder / "made", store.path, "train.steps=24", "train.log_every=1")
    trainer.fit()
    return trainer.run.path


def test_a_real_run_is_read_whole(run):
    done = call(
        "--once", "--json", run
    )  # a busy machine may earn it a warning, nothing should earn it an error
    state = json.loads(done.stdout)["runs"][0]
    assert done.exit_code == 0
    assert (state["state"], state["step"], state["total_steps"], state["num_lines"]) == (
        "finished",
        24,
        24,
        28,
    )
    assert math.isfinite(state["values"]["loss"])
    assert {alert["level"] for alert in state["alerts"]} <= {"info", "warn"}
    assert sum(state["goodput"]["shares"].values()) == pytest.approx(1, abs=0.01)


def test_exit_codes_follow_the_level(tmp_path):
    spike = write_log(tmp_path / "spike.jsonl", [2 + 0.01 * math.sin(i) for i in range(50)] + [9.0, 2.0, 2.0])
    assert call("--once", spike).exit_code == 0
    assert call("--once", "--fail-on", "warn", spike).exit_code == 1
    assert call("--once", "--fail-on", "warn", "--set", "spike_rise=5", spike).exit_code == 0
    bad = write_log(tmp_path / "bad.jsonl", [2.0, float("nan"), 2.0])
    assert call("--once", bad).exit_code == 1


def test_a_log_full_of_nan_is_ill(tmp_path):
    path = tmp_path / "train.log"
    bars = [
        f"Training:  1%|x| {i}/1000 [00:01<01:00, 9it/s, Loss=nan, Text=nan, Latent=nan]" for i in range(99)
    ]
    path.write_text("\r".join(bars))
    state = json.loads(call("--once", "--json", path).stdout)["runs"][0]
    assert state["health"] == "ill"
    assert state["alerts"][0]["code"] == "M101"


def test_serve_may_stand_alone(tmp_path):
    log = write_log(tmp_path / "train.jsonl", [2.0, 2.0])
    assert call("--serve", "--once", log).exit_code == 0
    assert call("--once", "--serve", log).exit_code == 0
    assert call("--once", "--serve", "localhost:0", log).exit_code == 0


MISTAKES = [
    ([], "nothing to watch"),
    (["--once", "no/such/file.log"], "no/such/file.log"),
    (["--once", "later.log"], "later.log: does not exist; --once"),
    (["--fail-on", "fatal", "x.log"], "--fail-on fatal: allowed are info, warn, error"),
    (["--interval", "0", "x.log"], "--interval 0"),
    (["--set", "spike_zz=3", "x.log"], "did you mean spike_z"),
    (["--set", "spike_z=many", "x.log"], "spike_z=many: a number from 1"),
    (["--set", "history_lines=8.5", "x.log"], "a whole number"),
    (["--settings", "missing.yaml", "x.log"], "--settings missing.yaml"),
    (["--explain", "M999"], "--explain M999"),
    (["--report", __file__, "x.log"], "is a file; give a folder"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES)
def test_mistakes_are_told_in_one_line(words, told):
    done = call(*words)
    assert isinstance(done.exception, UserError)
    assert told in str(done.exception)
    assert "\n" not in str(done.exception)


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
    alive = json.loads(call("--once", "--json", copy).stdout)["runs"][0]
    assert "M502" not in [alert["code"] for alert in alive["alerts"]]
    child.send_signal(signal.SIGKILL)
    child.wait()
    dead = json.loads(call("--once", "--json", copy).stdout)["runs"][0]
    assert [alert["code"] for alert in dead["alerts"]] == ["M502"]
    assert dead["state"] == "crashed"


def test_the_old_entry_point_reads_the_old_format(tmp_path):
    logs = tmp_path / "train_logs"
    logs.mkdir()
    for name, loss in (("a", "2.5000"), ("b", "nan")):
        bars = [
            f"Training: 1%|x| {i}/50 [00:01<00:05, 9it/s, Epoch=0/3, Loss={loss}, Text={loss}]"
            for i in range(51)
        ]
        (logs / f"train_{name}.log").write_text("BF16 optimizations enabled\n" + "\r".join(bars) + "\n")
        os.utime(logs / f"train_{name}.log", (time.time() - 60, time.time() - 60))
    script = Path(__file__).parents[3] / "scripts" / "monitor_training.py"
    paths = sorted(map(str, logs.iterdir()))
    done = subprocess.run(
        [sys.executable, script, *paths, "--interval", "10"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "train_a: fine, finished, step 50 of 50" in done.stdout
    assert "train_b: ill" in done.stdout


@pytest.mark.parametrize(("word", "name"), [("all", "codes.md"), ("settings", "settings.md")])
def test_the_pages_in_the_docs_are_what_the_command_prints(word, name):
    page = Path(__file__).parents[3] / "docs" / "monitor" / name
    assert call("--explain", word).stdout == page.read_text(), (
        f"run: mmldlm monitor --explain {word} > {page}"
    )


def test_watching_needs_no_torch(tmp_path):
    log = write_log(tmp_path / "train.jsonl", [2.0] * 30)
    code = (
        "import sys\nfrom mmldlm.cli.main import app\n"
        f"try:\n    app(['monitor', '--once', '--report', {str(tmp_path / 'out')!r}, {str(log)!r}])\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'datasets', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", [["--once", "--json"], ["--once"], ["--interval", "0.1"]])
def test_a_closed_pipe_is_no_error(tmp_path, options):
    log = tmp_path / "a.jsonl"
    log.write_text("".join(f'{{"step": {step}, "loss": 2.5}}\n' for step in range(1, 30)))
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", "from mmldlm.cli.main import main; main()", "monitor", str(log), *options]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "address",
    ["http://[::1/SECRET", "http://host:99999/SECRET", "http://me:SECRET@host/", "http://host/SEC RET"],
)
def test_a_wrong_webhook_is_told_without_its_secret(address):
    with pytest.raises(UserError) as caught:
        webhook_sink(address, "auto")
    assert "--webhook" in str(caught.value)
    assert "SEC" not in str(caught.value)
    assert describe(http.client.InvalidURL("/SECRET")) == "InvalidURL"
