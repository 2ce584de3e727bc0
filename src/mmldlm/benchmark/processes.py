"""A fresh Python process for a piece of work: started in a session of its own, ended with all it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_TAIL = 2**16
"""Bytes of a log that are searched for its last line."""


@dataclass(frozen=True)
class Failure:
    """Why a process has no result."""

    kind: str
    """memory, settings, error, timeout or killed."""
    reason: str


def start(
    module: str, words: list[str], log: IO[bytes], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """`python -m module words`; all it says goes to the log, and no signal of our terminal reaches it."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        start_new_session=True, env=dict(os.environ) | dict(environment or {}),
    )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever it started, which may outlive it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def explain_death(code: int, log_path: Path) -> Failure:
    """What an exit code says where there is no result."""
    if code == -signal.SIGKILL:
        return Failure("memory", "killed by the system (signal 9), most likely because memory ran out")
    if code < 0:
        return Failure("killed", f"killed by signal {-code}; see {log_path}")
    return Failure("error", f"ended with code {code} and no result; see {log_path}")


def last_line(log_path: Path) -> str:
    """The last line of a log that says something."""
    try:
        with open(log_path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
            lines = log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
