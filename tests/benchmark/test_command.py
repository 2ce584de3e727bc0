"""The command as people type it: real processes, files, exit codes, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmldlm.benchmark import measuring
from mmldlm.cli.main import app
from mmldlm.errors import UserError
from tests import warm
from tests.benchmark.measurements import measurement
from tests.runs import write_recipe
from tests.stores import write_store

COMMAND = [
    sys.executable,
    "-m",
    "mmldlm",
    "benchmark",
    "--steps",
    "4",
    "--block",
    "2",
    "--warmup",
    "1",
]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    store = write_store(folder / "store").path
    return ["--recipe", str(write_recipe(folder, store)), "--store", str(store), "train.device=cpu"]


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    return warm.run([*COMMAND, *words], capture_output=True, text=True, check=False, cwd=cwd, env=ENVIRONMENT)


def test_arms_are_compared_gated_and_judged(words, tmp_path):
    done = run(
        *words, "--repeats", "1", "--gate-steps", "2",
        "--arm", "packed: speed.layout=packed", "--out", "report",
        "--fail-if", "loss_difference(packed)>1e-4", "--fail-if", "memory(packed)>1KiB", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    result = json.loads((tmp_path / "report" / "result.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["packed", "packed again"]
    assert (rows["packed"]["gate"], rows["packed"]["failure"]) == ("pass", None)
    assert [outcome["failed"] for outcome in result["conditions"]] == [False, True]
    assert (result["noise"] is None) == rows["packed"]["verdict"].startswith("not measured")
    assert "before the clock: " in done.stdout
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "result.json", "table.md", "chart.png", "report.html", "logs",
    }  # fmt: skip
    assert "packed" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_baseline_that_fails_is_told_by_the_exit_code(words, tmp_path):
    done = run(
        *words, "--repeats", "1", "--gate-steps", "0", "--arm", "narrow: batch.tokens_per_step=8",
        "--arm", "wide: batch.tokens_per_step=256", "--out", "report", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "mmldlm: narrow, the baseline, failed" in done.stderr
    rows = json.loads((tmp_path / "report" / "result.json").read_text())["rows"]
    assert [row["failure"] is None for row in rows] == [False, False, True]


@pytest.mark.parametrize(("rates", "code"), [([99.0, 101.0], 0), ([60.0, 140.0], 1)])
def test_a_baseline_that_varies_too_much_gives_the_exit_code_of_one_that_fails(
    rates, code, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "run_job", lambda job, log_path, timeout: measurement(rates))
    arms = ["--gate-steps", "0", "--arm", "a: speed.layout=packed", "--arm", "b: speed.layout=padded"]
    done = CliRunner().invoke(app, ["benchmark", *words, *arms])
    assert done.exit_code == code, done.output
    assert ("a, the baseline, was not measured: it varies by 80.0 %" in done.stderr) == bool(code)
    assert "before the clock: 3.0 s in each process" in done.stdout


def test_ctrl_c_ends_the_process_under_way_and_leaves_a_partial_report(words, tmp_path):
    with warm.Popen(
        [*COMMAND, *words, "--gate-steps", "0", "--steps", "4", "--arm", "a: speed.layout=packed",
         "--arm", "b: train.log_every=9", "--out", "report"],
        cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        result = tmp_path / "report" / "result.json"
        logs = tmp_path / "report" / "logs"
        ends = time.monotonic() + 200
        while not (result.is_file() and len(list(logs.iterdir())) == 2):
            assert process.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=200)
    assert process.returncode == 130, told
    assert "what was measured is in report" in told
    assert "Traceback" not in told
    found = json.loads(result.read_text())
    assert found["partial"]
    assert [row["failure"] for row in found["rows"]] == [None, "not measured", "not measured"]
    assert "Partial" in (tmp_path / "report" / "table.md").read_text()


@pytest.mark.parametrize(("extra", "told"), [
    (["--arm", "x: speed.fly=1"], "arm 'x': command line: unknown setting speed.fly"),
    (["data.store=x"], "data.store=x: a benchmark takes its store from --store x"),
    (["--ladder", "none"], "--ladder none: nothing is left to measure"),
    (["--ladder", "tall"], "--ladder tall: allowed are full, short, plan, none"),
    (["--only", "x"], "no arm is called 'x'; the arms are baseline"),
    (["--baseline", "bf16"], "--baseline bf16: this arm needs a GPU"),
    (["--fail-if", "speedup(x,baseline)<1"], "no arm is called 'x'"),
    (["--find-batch"], "give a limit, such as --memory-limit 4GiB"),
    (["--find-batch", "--memory-limit", "much"], "--memory-limit much: write a number with a unit"),
    (["--memory-limit", "3"], "--memory-limit 3: is 3 bytes; at least 64MiB are needed, such as 80GiB"),
    (["--memory-limit", "80KB"], "--memory-limit 80KB: is 80,000 bytes"),
    (["--steps", "5", "--block", "5"], "is one timed block, which says nothing about noise; give at least two"),
    (["--steps", "8"], "--steps 8 --block 5: is one timed block"),
    (["--steps", "1", "--block", "1"], "such as --steps 2"),
    (["--find-batch", "--memory-limit", "4GiB", "--ladder", "full"], "--ladder: has no use together with --find-batch"),
    (["--sweep", "speed.fly=1,2"], "unknown setting speed.fly"),
    (["--sweep", "length=8,16"], "length needs a synthetic store; leave out --store"),
])  # fmt: skip
def test_a_mistake_is_told_before_anything_is_measured(extra, told, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["benchmark", *words, *extra])
    assert isinstance(done.exception, UserError)
    assert told in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_the_script_passes_variables_and_words_on(tmp_path):
    fake = tmp_path / "mmldlm"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    script = Path(__file__).parents[2] / "scripts" / "benchmark_training.sh"
    given = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TMPDIR": "/somewhere",
        "FIND_BATCH": "1",
        "STEPS": "7",
    }
    given |= {"MEMORY_LIMIT": "80GiB", "ARM": "a: speed.compile=true"}
    done = subprocess.run(
        ["bash", str(script), "--seed", "3", "optim.lr=1"],
        env=given,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    out = words.pop(words.index("--out") + 1)
    assert out.startswith("/somewhere/mmldlm-benchmark-")
    assert words == [
        "benchmark", "--steps", "7", "--memory-limit", "80GiB", "--arm", "a: speed.compile=true", "--out",
        "--find-batch", "--seed", "3", "optim.lr=1",
    ]  # fmt: skip
