"""Labelled logs that need processes of their own: runs of our trainer, and ranks under torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests import warm
from tests.health.judging import Label
from tests.runs import write_recipe
from tests.stores import write_store

SCRIPT = Path(__file__).with_name("rank_training.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def process_logs(folder: Path) -> Iterator[tuple[Label, Path]]:
    """Run everything and give each log with its label."""
    yield from own_runs(folder / "own_runs")
    for mode, expected, also in (
        ("healthy", (), ()),
        ("crash", ("M502",), ("M602",)),
        ("straggler", ("M601",), ("M301",)),
        ("hang", ("M502", "M602"), ()),
    ):
        case = Label(f"ranks_{mode}", expected, delay=25, also=also, from_step=29)
        yield case, run_ranks(folder / "ranks" / mode, mode)
    case = Label("rendezvous", ("M603", "M502"))
    yield case, run_lonely_node(folder / "rendezvous.log")


def own_runs(folder: Path) -> Iterator[tuple[Label, Path]]:
    """Our trainer: a healthy run, one with a learning rate far too high, one that is killed."""
    folder.mkdir(parents=True)
    store = write_store(folder / "store", num_train=8000, vocab_size=8, min_length=2, max_length=4)
    recipe = write_recipe(folder, store.path)
    long = ["train.steps=300", "train.log_every=2", "train.valid_every=100", "train.checkpoint_every=100"]
    quiet = ("M301", "M302", "M303")  # its steps take milliseconds on a machine that others use too
    run_own(recipe, folder / "fine", *long)
    yield Label("trained_fine", also=quiet), folder / "fine"
    hot = ["optim.lr=30", "optim.warmup_steps=100", "optim.clip_norm=0"]
    run_own(recipe, folder / "hot", *long, *hot)
    extra = (*quiet, "M101", "M102", "M201", "M202", "M203", "M205", "M502", "M801", "M803")
    yield Label("trained_hot", ("M103",), delay=300, also=extra), folder / "hot"
    words = ("train.steps=100000", "train.log_every=2")
    run_own(recipe, folder / "killed", *words, kill_after="training_log.jsonl")
    killed_at = json.loads((folder / "killed" / "training_log.jsonl").read_bytes().splitlines()[-1])["step"]
    case = Label("trained_killed", ("M502",), also=quiet, from_step=killed_at)
    case.real_clock = True
    yield case, folder / "killed"


def run_own(recipe: Path, run: Path, *settings: str, kill_after: str = "") -> None:
    """`mmldlm train` in a process; with `kill_after`, killed once that file has some lines."""
    words = [
        sys.executable,
        "-m",
        "mmldlm",
        "train",
        "--recipe",
        str(recipe),
        "--run",
        str(run),
        *settings,
    ]
    process = warm.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while kill_after and process.poll() is None:
        file = run / kill_after
        if file.exists() and file.stat().st_size > 20_000:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.1)
    process.wait(timeout=300)
    if kill_after:
        old = time.time() - 60  # the monitor gives a run some seconds to say its last word
        for path in run.iterdir():
            os.utime(path, (old, old))


def run_ranks(folder: Path, mode: str) -> Path:
    """Three ranks; the folder of their logs."""
    folder.mkdir(parents=True)
    words = [
        "--nproc-per-node",
        "3",
        "--log-dir",
        str(folder),
        "--redirects",
        "3",
        "--master-port",
        str(_free_port()),
    ]
    _run([*TORCHRUN, *words, str(SCRIPT), mode])
    return folder


def run_lonely_node(path: Path) -> Path:
    """One node that waits in vain for a second; what torchrun prints."""
    words = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-conf",
        "join_timeout=3",
    ]
    done = _run([*TORCHRUN, *words, "--rdzv-endpoint", f"localhost:{_free_port()}", str(SCRIPT), "healthy"])
    path.write_bytes(done)
    return path


def _run(words: list[str]) -> bytes:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, timeout=280
    )
    return done.stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
