"""The machine of a benchmark: what it is, for a reader to judge, and fresh Python processes on it.

A process is started in a session of its own and ended with all that it started.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mmldlm.reports import counted
from mmldlm.runtime import versions

PACKAGES = ("numpy", "triton", "pyarrow", "omegaconf")


def describe_environment() -> dict[str, Any]:
    """Machine, versions, load, commit and the command line of this process."""
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": ["mmldlm", *sys.argv[1:]],
        "versions": _versions(),
        "gpus": _gpus() if torch.cuda.is_available() else [],
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "usable_cores": usable},
        "threads": {"torch": torch.get_num_threads(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "load_average": list(os.getloadavg()),
        "commit": _commit(),
    }


def _versions() -> dict[str, str]:
    used = versions()
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            used[name] = importlib.metadata.version(name)
    return used


def _gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each, from the driver's own tool: no context is opened on a device."""
    lines = _output(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
    )
    keys = ("name", "driver", "memory", "clock")
    return [
        dict(zip(keys, (word.strip() for word in line.split(",")), strict=False))
        for line in (lines or "").splitlines()
    ]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _commit() -> dict[str, Any] | None:
    """Of the checkout that this code runs from; null for an installed package."""
    here = str(Path(__file__).parent)
    commit = _output(["git", "-C", here, "rev-parse", "HEAD"])
    if commit is None:
        return None
    changed = _output(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"])
    return {"id": commit.strip(), "changed_files": len((changed or "").splitlines())}


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def machine_facts(environment: dict[str, Any]) -> dict[str, str]:
    """The same for people: a name and a text for each line."""
    used, cpu, commit = environment["versions"], environment["cpu"], environment["commit"]
    gpus = [f"{gpu['name']} (driver {gpu['driver']}, {gpu['memory']})" for gpu in environment["gpus"]]
    facts = {
        "date": environment["date"],
        "command": f"`{shlex.join(environment['command'])}`",
        "GPU": ", ".join(gpus) or "none",
        "CPU": f"{cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores usable, "
        f"{environment['threads']['torch']} threads, {environment['memory_bytes'] / 2**30:.0f} GiB",
        "load average": ", ".join(f"{load:.2f}" for load in environment["load_average"]),
        "system": environment["system"],
        "versions": ", ".join(f"{name} {version}" for name, version in used.items()),
    }
    if commit:
        changed = f", {counted(commit['changed_files'], 'file')} changed" if commit["changed_files"] else ""
        facts["commit"] = f"{commit['id'][:12]}{changed}"
    return facts


def summary_lines(environment: dict[str, Any]) -> list[str]:
    return [f"{name}: {text}" for name, text in machine_facts(environment).items()]


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
