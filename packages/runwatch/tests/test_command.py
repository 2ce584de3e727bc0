"""The command as users and scripts meet it: exit codes, JSON, mistakes, real run folders."""

import http.client
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runwatch.cli import main
from runwatch.errors import UserError
from runwatch.sinks import describe, webhook_sink


def write_log(path, losses, **more):
    lines = [json.dumps({"step": i + 1, "time": 1e9 + i, "loss": x, **more}) for i, x in enumerate(losses)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_exit_codes_follow_the_level(call, tmp_path):
    spike = write_log(tmp_path / "spike.jsonl", [2 + 0.01 * math.sin(i) for i in range(50)] + [9.0, 2.0, 2.0])
    assert call("--once", spike).exit_code == 0
    assert call("--once", "--fail-on", "warn", spike).exit_code == 1
    assert call("--once", "--fail-on", "warn", "--set", "spike_rise=5", spike).exit_code == 0
    bad = write_log(tmp_path / "bad.jsonl", [2.0, float("nan"), 2.0])
    assert call("--once", bad).exit_code == 1


def test_a_log_full_of_nan_is_failing(call, tmp_path):
    path = tmp_path / "train.log"
    bars = [
        f"Training:  1%|x| {i}/1000 [00:01<01:00, 9it/s, Loss=nan, Text=nan, Latent=nan]" for i in range(99)
    ]
    path.write_text("\r".join(bars))
    state = json.loads(call("--once", "--json", path).stdout)["runs"][0]
    assert state["health"] == "failing"
    assert state["alerts"][0]["code"] == "M101"


def test_serve_may_stand_alone(call, tmp_path):
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
    (["--command", "no_such_program now", "x.log"], "there is no program no_such_program"),
    (["--report", __file__, "x.log"], "is a file; give a folder"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES)
def test_mistakes_are_told_in_one_line(call, words, told):
    done = call(*words)
    assert isinstance(done.exception, UserError)
    assert told in str(done.exception)
    assert "\n" not in str(done.exception)


@pytest.mark.parametrize("words", [["--bogus", "x.log"], ["--interval", "soon", "x.log"], ["--once"]])
def test_every_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["runwatch", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("runwatch: error: ")
    assert told.count("\n") == 1


def test_the_old_entry_point_reads_the_old_format(tmp_path):
    logs = tmp_path / "train_logs"
    logs.mkdir()
    for name, loss in (("a", "2.5000"), ("b", "nan")):
        bars = [
            f"Training: 1%|x| {i}/50 [00:01<00:05, 9it/s, Epoch=0/3, Loss={loss}, Text={loss}]"
            for i in range(51)
        ]
        (logs / f"train_{name}.log").write_text("BF16 optimizations enabled\n" + "\r".join(bars) + "\n")
        os.utime(logs / f"train_{name}.log", (time.time() - 3600, time.time() - 3600))
    script = Path(__file__).parents[3] / "scripts" / "monitor_training.py"
    paths = sorted(map(str, logs.iterdir()))
    done = subprocess.run(
        [sys.executable, script, *paths, "--interval", "10"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert "train_a: fine, finished, step 50 of 50" in done.stdout
    assert "train_b: failing" in done.stdout


@pytest.mark.parametrize(("word", "name"), [("all", "codes.md"), ("settings", "settings.md")])
def test_the_pages_in_the_docs_are_what_the_command_prints(call, word, name):
    page = Path(__file__).parents[1] / "docs" / name
    assert call("--explain", word).stdout == page.read_text(), f"run: runwatch --explain {word} > {page}"


def test_watching_loads_nothing_heavy(tmp_path):
    log = write_log(tmp_path / "train.jsonl", [2.0] * 30)
    words = ["--once", "--report", str(tmp_path / "out"), str(log)]
    code = (
        f"import sys\nfrom runwatch.cli import main\nsys.argv[1:] = {words!r}\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'mmldlm', 'matplotlib', 'numpy'} & set(sys.modules)\n"
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
    words = [sys.executable, "-m", "runwatch", str(log), *options]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, timeout=200, check=False)
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


def test_files_of_a_folder_that_are_no_logs_are_named_in_one_line(call, tmp_path):
    (tmp_path / "train.log").write_text("".join(f"step {step} loss 2.5\n" for step in range(1, 9)))
    (tmp_path / "config.yaml").write_text("lr: 0.1\n")
    (tmp_path / "package.json").write_text('{"a": 1}\n')
    (tmp_path / "empty.log").touch()
    done = call("--once", tmp_path)
    assert done.exit_code == 0
    assert done.stdout.startswith("train: fine")
    last = "no loss in 2 other files of this folder: empty.log, package.json"
    assert done.stdout.splitlines()[-1] == last
    assert call("--once", tmp_path / "empty.log").stdout.splitlines()[-1].strip() == "the file is empty"
