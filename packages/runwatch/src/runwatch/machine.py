"""What the machine tells about a run without touching it: its settings, its process, its disk."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any


def disk_space(path: Path) -> tuple[int, int] | None:
    """Free and total bytes of the disk that holds a path; None if they cannot be known."""
    folder = path if path.is_dir() else path.absolute().parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free, usage.total


def newest_checkpoint(folder: Path) -> int | None:
    """The largest step of which a checkpoint lies on the disk."""
    try:
        names = [name.removeprefix("step_") for name in os.listdir(folder) if name.startswith("step_")]
    except OSError:
        return None
    return max((int(name) for name in names if name.isdigit()), default=None)


def file_time(path: Path) -> float:
    """When a file was last written; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def process_alive(lock_file: Path) -> bool | None:
    """Whether the process that signed a lock file exists; None if it cannot be known from this machine."""
    try:
        holder = json.loads(lock_file.read_bytes()[:4096])
        pid, host = int(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if host != socket.gethostname() or pid <= 0:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def heartbeat_age(path: Path, now: float) -> float | None:
    """Seconds since a run said that it is alive; None if it never did, or said that it is over."""
    try:
        beat = json.loads(path.read_bytes()[:4096])
        phase, written = str(beat["phase"]), float(beat["written_at"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return None if phase in ("finished", "stopped") else now - written


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a run, or nothing if there are none that can be read."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def whole(value: Any) -> int | None:
    """A positive whole number, or nothing."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
