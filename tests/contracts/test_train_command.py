"""`mmldlm train` as a user meets it: processes where it runs, exit codes, one clear line for each mistake."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from mmldlm.checkpoint.export import read_export
from mmldlm.cli.main import app, main
from mmldlm.cli.runs import export
from mmldlm.metrics import read_log
from tests import warm
from tests.runs import write_recipe
from tests.stores import write_store


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_store(folder / "store", num_train=120)
    write_recipe(folder, folder / "store")
    return folder


def start(place, *words, popen=warm.Popen):
    command = [sys.executable, "-m", "mmldlm", "train", "--recipe", "small.yaml", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": ""}
    return popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(place, *words, popen=warm.Popen):
    process = start(place, *words, popen=popen)
    out, err = process.communicate(timeout=280)
    return process.returncode, out, err


def assert_one_clear_line(code, err, *parts):
    assert code == 2, err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("mmldlm: error: ")]
    assert len(lines) == 1, err
    for part in parts:
        assert part in lines[0]


def test_dry_run_prints_settings_sizes_and_memory_and_draws_the_course_and_writes_nothing_else(place):
    before = set(place.iterdir())
    words = ("--dry-run", "--plot", "course.png", "batch.micro_tokens=100", "optim.schedule=plateau")
    code, out, err = run(place, *words)
    assert code == 0, err
    for part in (
        "tokens_per_step: 256",
        "memory estimate",
        "steps per epoch",
        "documents per step",
        "are drawn in course.png",
    ):
        assert part in out
    assert re.search(r"micro batches per step\W+3\b", out)
    settings, facts = out.split("this run")  # what one wants to see is at the end
    assert "optim:" in settings
    assert facts.count("\n") <= 30
    assert re.search(r"parameters\W+[\d,]+: text [\d,]+, latent", facts)
    assert (place / "course.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert set(place.iterdir()) - before == {place / "course.png"}


@pytest.mark.parametrize(("words", "parts"), [
    (["--plot", "course.png"], ["--plot course.png", "--dry-run"]),
    (["--dry-run", "--plot", "course.pdf"], ["--plot course.pdf", ".png"]),
    (["--dry-run", "--plot", "nowhere/course.png"], ["--plot nowhere/course.png", "there is no folder nowhere"]),
    (["optim.lrr=1", "train.stepz=2"], ["optim.lrr; did you mean optim.lr?", "train.stepz; did you mean train.steps?"]),
    (["data.store=nowhere"], ["nowhere", "mmldlm prepare"]),
    (["data.valid_split=tset"], ["tset", "train, validation"]),
    (["train.device=cuda"], ["train.device=cuda: not available", "use auto or cpu"]),
    (["speed.attention=varlen"], ["speed.attention=varlen", "speed.attention=rows"]),
    (["batch.tokens_per_step=10"], ["batch.tokens_per_step=10", "longest document"]),
])  # fmt: skip
def test_a_mistake_is_one_clear_line_with_exit_code_2(place, words, parts, monkeypatch, capsys):
    if "train.device=cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    device = "train.device=cpu" if words[0] != "train.device=cuda" else "train.seed=0"
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["mmldlm", "train", "--recipe", "small.yaml", *words, device])
    with pytest.raises(SystemExit) as left:
        main()
    assert_one_clear_line(left.value.code, capsys.readouterr().err, *parts)
    assert not (place / "saved").exists()


def test_ctrl_c_saves_says_how_to_go_on_and_the_same_command_does(place):
    words = (
        "--run",
        "interrupted",
        "train.steps=3000",
        "train.log_every=1",
        "train.valid_every=0",
        "train.checkpoint_every=100000",
    )
    process = start(place, *words)
    log = place / "interrupted" / "training_log.jsonl"
    deadline = time.monotonic() + 200
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    stopped = int(
        re.search(r"stopped after step (\d+), checkpoint saved; run the same command to resume", err)[1]
    )
    code, _, err = run(
        place,
        *words[:2],
        f"train.steps={3000}",
        "train.valid_every=0",
        "train.log_every=1",
        "train.checkpoint_every=100000",
        "optim.lr=1",
    )
    assert_one_clear_line(code, err, "optim.lr: 0.003 -> 1.0")
    process = start(place, *words)
    deadline = time.monotonic() + 200
    while (sum(1 for _ in read_log(log)) <= stopped + 1) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    assert f"resuming from step {stopped} of 3000" in err
    steps = [line["step"] for line in read_log(log)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_whole_run_leaves_what_the_docs_say(place, monkeypatch):
    code, _, err = run(
        place, "--run", "whole", "train.valid_samples=0", popen=subprocess.Popen
    )  # a fresh interpreter
    assert code == 0, err
    folder = place / "whole"
    for name in (
        "config.yaml",
        "training_log.jsonl",
        "train.log",
        "checkpoints/latest",
        "export/model.safetensors",
    ):
        assert (folder / name).exists(), name
    lines = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    trained = next(line for line in lines if "loss" in line)
    wanted = {
        "step", "time", "loss", "text_loss", "latent_loss", "text_accuracy", "lr", "grad_norm", "epoch", "batch_size",
        "documents_per_second", "tokens_per_second", "gpu_memory_allocated", "gpu_memory_reserved",
    }  # fmt: skip
    assert wanted <= trained.keys()
    assert any("valid_loss" in line for line in lines)
    monkeypatch.chdir(place)
    words = ["train", "--recipe", "small.yaml", "--run", "whole", "train.valid_samples=0"]
    again = CliRunner().invoke(app, words)  # the same command finds it finished
    assert again.exit_code == 0, again.output
    log = (folder / "train.log").read_text()
    assert "nothing to do: all 12 steps are done; a larger train.steps continues the run" in log
    assert "resuming from" not in log
    assert [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()] == lines


def test_a_run_outlives_the_reader_of_its_output_and_is_exported_without_its_store(tmp_path):
    write_store(tmp_path / "store", num_train=60)
    write_recipe(tmp_path, tmp_path / "store")
    process = start(tmp_path, "--run", "unheard", "train.steps=3", "train.valid_samples=0")
    process.stderr.close()  # as `2>&1 | head -1` does
    assert process.wait(200) == 0
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    export(run=tmp_path / "unheard", out=tmp_path / "export")  # the run folder is whole in itself
    assert read_export(tmp_path / "export").data["step"] == 3


def test_a_second_run_on_the_same_folder_is_refused(place):
    first = start(place, "--run", "busy", "train.steps=100000", "train.valid_every=0")
    deadline = time.monotonic() + 200
    while not (place / "busy" / "training_log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        code, _, err = run(place, "--run", "busy", "train.steps=100000", "train.valid_every=0")
        assert_one_clear_line(code, err, "busy: another run is writing here", "another run folder")
    finally:
        first.kill()
        first.communicate()


def test_a_damaged_shard_is_named_and_nothing_is_lost(tmp_path):
    write_store(tmp_path / "store", num_train=120)
    write_recipe(tmp_path, tmp_path / "store")
    shard = sorted((tmp_path / "store" / "train").glob("*.arrow"))[0]
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    code, _, err = run(tmp_path)
    assert_one_clear_line(code, err, str(shard.name))


def test_a_full_disk_is_told_and_the_weights_are_kept(place, tmp_path):
    def small_disk(size):
        subprocess.run(["umount", str(tmp_path)], check=False, stderr=subprocess.DEVNULL)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path)]
        if subprocess.run(command, check=False).returncode:
            pytest.skip("a small file system cannot be mounted here")

    words = ("--run", str(tmp_path / "run"), "train.valid_samples=0", "model.width=96")
    try:
        small_disk("64m")
        code, _, err = run(place, *words)
        assert code == 0, err
        export = (tmp_path / "run" / "export" / "model.safetensors").stat().st_size
        small_disk(3 * export)  # a checkpoint takes four exports
        code, _, err = run(place, *words)
        assert_one_clear_line(code, err, "MiB are free on its disk", "first checkpoint", "another disk")
        assert not (tmp_path / "run" / "training_log.jsonl").exists()
        small_disk(6 * export)  # room for one checkpoint and the export, not for two
        code, _, err = run(place, *words, "train.checkpoint_every=6")
        assert_one_clear_line(
            code, err, "the checkpoint of step 12 was not saved", "no space left", "free some space"
        )
        assert (tmp_path / "run" / "export" / "model.safetensors").exists()
        last = [
            json.loads(line) for line in (tmp_path / "run" / "training_log.jsonl").read_text().splitlines()
        ][-1]
        assert last["step"] == 12
    finally:
        subprocess.run(["umount", str(tmp_path)], check=False)
