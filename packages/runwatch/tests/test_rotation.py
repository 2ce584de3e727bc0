"""Files that change while they are followed, and readers that leave, tried from outside."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .formats.bars import tqdm_bar
from .test_hostile import COMMAND, codes, curve, lines


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_closes_the_pipe(tmp_path, options):
    (tmp_path / "train.log").write_text(lines(curve(2_000)) + "iter 2000: loss nan, time 1.00ms\n")
    command = " ".join(
        [sys.executable, "-c", "'from runwatch.cli import main; main()'", "train.log", "--once", *options]
    )
    script = f'set -o pipefail; {command} | head -c 1; echo "${{PIPESTATUS[0]}}" >&2'
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr
    assert result.stderr.strip().splitlines()[-1] == "1"


class Follower:
    """`runwatch PATH --json` that follows a file; its looks are read from a file of their own."""

    def __init__(self, path: Path, folder: Path):
        self.output = folder / "looks.jsonl"
        self.errors = folder / "errors.txt"
        with self.output.open("w") as output, self.errors.open("w") as errors:
            command = [*COMMAND, str(path), "--json", "--interval", "0.2"]
            self.process = subprocess.Popen(command, stdout=output, stderr=errors)

    def looks(self) -> list[dict]:
        rows = self.output.read_text().splitlines()
        return [json.loads(row) for row in rows if row.endswith("}")]

    def wait_for_step(self, step: int, seconds: float = 120.0) -> None:
        end = time.time() + seconds
        while time.time() < end:
            looks = self.looks()
            if looks and any(run.get("step") == step for run in looks[-1]["runs"]):
                return
            assert self.process.poll() is None, f"left while the file still grows: {self.errors.read_text()}"
            time.sleep(0.1)
        raise AssertionError(f"step {step} was not seen, last look {self.looks()[-1:]}")

    def stop(self) -> dict:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=120)
        assert "Traceback" not in self.errors.read_text()
        return self.looks()[-1]


@pytest.fixture
def follow(tmp_path):
    followers: list[Follower] = []

    def start(path: Path) -> Follower:
        followers.append(Follower(path, tmp_path))
        return followers[-1]

    yield start
    for follower in followers:
        if follower.process.poll() is None:
            follower.process.kill()
            follower.process.wait()


def test_rotation_loses_no_line(tmp_path, follow):
    path = tmp_path / "train.log"
    losses = curve(200)
    path.write_text(lines(losses[:50]))
    follower = follow(path)
    follower.wait_for_step(49)
    with path.open("a") as log:
        log.write(lines(losses[50:60], 50) + "iter 60: loss nan, time 21.30ms, mfu 17.40%\n")
    path.rename(tmp_path / "train.log.1")
    path.write_text(lines(losses[61:80], 61))
    follower.wait_for_step(79)
    assert "M101" in codes(follower.stop()), "the line before the rotation was lost"


def test_truncation_while_following(tmp_path, follow):
    path = tmp_path / "train.log"
    losses = curve(200)
    path.write_text(lines(losses[:50]))
    follower = follow(path)
    follower.wait_for_step(49)
    with path.open("r+") as log:  # as logrotate's copytruncate does
        log.truncate(0)
        log.write(lines(losses[50:70], 50))
    follower.wait_for_step(69)
    with path.open("a") as log:
        log.write(lines(losses[70:90], 70))
    follower.wait_for_step(89)
    assert not codes(follower.stop())


def test_a_full_bar_does_not_end_the_watching(tmp_path, follow):
    path = tmp_path / "train.log"
    losses = curve(90)
    bars = [
        "\r" + tqdm_bar(idx % 30 + 1, 30, idx, 9.0, f"Epoch {idx // 30}", f"loss={loss:.3f}")
        for idx, loss in enumerate(losses)
    ]
    path.write_text("".join(bars[:30]) + "\n")
    follower = follow(path)
    time.sleep(2.0)
    with path.open("a") as log:
        log.write("".join(bars[30:60]) + "\n")
    time.sleep(2.0)
    assert follower.process.poll() is None, "left a living run because one bar was full"
    with path.open("a") as log:
        log.write("".join(bars[60:75]) + "\r" + tqdm_bar(16, 30, 9, 9.0, "Epoch 2", "loss=nan") + "\n")
    end = time.time() + 15
    while time.time() < end and "M101" not in codes(follower.looks()[-1]):
        time.sleep(0.2)
    assert "M101" in codes(follower.stop())
