"""Ranks as plain processes, with the variables that torchrun would set."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]


def start_pair(
    *words: str, cwd: Path | None = None, count: int = 2, last: tuple[str, ...] = ()
) -> list[subprocess.Popen[str]]:
    """Two processes of `python -m words`, or more; the last one gets the words `last` besides."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    extra = [()] * (count - 1) + [last]
    return [_start(rank, count, port, (*words, *extra[rank]), cwd) for rank in range(count)]


def _start(
    rank: int, count: int, port: int, words: tuple[str, ...], cwd: Path | None
) -> subprocess.Popen[str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    names = {name: str(value) for name, value in place.items()} | {"MASTER_PORT": str(port)}
    return warm.Popen(
        [sys.executable, "-m", *words],
        cwd=cwd or ROOT,
        env=environment() | names | {"MASTER_ADDR": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def environment() -> dict[str, str]:
    """Of a child process that finds the package and the tests."""
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def end(processes: list[subprocess.Popen[str]], seconds: float = 120) -> list[str]:
    """What they said on stderr, when both are over."""
    try:
        return [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
