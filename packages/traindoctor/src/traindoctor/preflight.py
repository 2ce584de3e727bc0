"""This machine before a run: GPUs, driver, torch build, NCCL, disk, shared memory, limits, variables."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from traindoctor.types import Kind, Severity

GIB = 2**30
OLDEST_TORCH = (2, 11)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: str
    """ok, warn or fail"""
    detail: str
    remedy: str = ""


def run_preflight(folder: Path) -> list[Check]:
    """All checks; `folder` is where the run will write."""
    return [
        *_python(),
        *_torch(),
        *_driver(),
        *_disk(folder),
        *_shared_memory(),
        *_limits(),
        *_cpus(),
        *_port(),
        *_variables(),
    ]


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Check("python", "ok" if good else "fail", version, "" if good else "3.11 to 3.13 is needed")


def _torch() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check("torch", "fail", f"cannot be imported: {error}", "install torch>=2.11")
        return
    numbers = re.findall(r"\d+", torch.__version__)[:2]
    good = tuple(map(int, numbers)) >= OLDEST_TORCH
    yield Check(
        "torch",
        "ok" if good else "fail",
        f"{torch.__version__}, {_build()}",
        "" if good else "2.11 or later is needed",
    )
    if not torch.cuda.is_available():
        why = "this build has no CUDA" if not torch.version.cuda else "CUDA finds no device; see nvidia-smi"
        yield Check("gpu", "warn", f"none: {why}", "training runs on the CPU, slowly")
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    yield Check(
        "bfloat16",
        "ok" if bf16 else "warn",
        "supported" if bf16 else "not supported",
        "" if bf16 else "use fp16",
    )
    yield _nccl()


def _build() -> str:
    import torch

    hip = getattr(torch.version, "hip", None)
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else "CPU build"


def _gpu(index: int) -> Check:
    """One GPU: what it is, how much of its memory is free, and whether a kernel runs on it."""
    import torch

    try:
        props = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        answer = float((torch.ones(8, device=f"cuda:{index}") * 2).sum())
    except (RuntimeError, AssertionError) as error:  # in use exclusively, out of memory, no kernel for it
        problem = " ".join(str(error).split())[:160]
        return Check(
            "gpu", "fail", f"{index}: cannot be used: {problem}", "see nvidia-smi; free it or leave it out"
        )
    room = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    detail = f"{index}: {props.name}, {room}, compute {props.major}.{props.minor}"
    if answer != 16.0:
        return Check(
            "gpu", "fail", f"{detail}, computes wrongly (16 became {answer})", "restart or replace it"
        )
    busy = free < 0.9 * total
    return Check("gpu", "warn" if busy else "ok", detail, "somebody else uses this GPU" if busy else "")


def _nccl() -> Check:
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return Check("nccl", "warn", "not in this build", "several GPUs need it")
    try:
        version = torch.cuda.nccl.version()
    except (RuntimeError, AttributeError) as error:
        return Check("nccl", "warn", f"does not tell its version: {error}", "several GPUs need it")
    return Check("nccl", "ok", ".".join(map(str, version)) if isinstance(version, tuple) else str(version))


def _driver() -> Iterator[Check]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Check("driver", "warn", "nvidia-smi is not installed", "only needed with an NVIDIA GPU")
        return
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        yield Check(
            "driver", "fail", f"nvidia-smi does not answer: {error}", "restart the driver or the machine"
        )
        return
    versions = sorted(set(done.stdout.split()))
    good = done.returncode == 0 and bool(versions)
    yield Check("driver", "ok" if good else "fail", ", ".join(versions) or done.stderr.strip()[:100])


def _disk(folder: Path) -> Iterator[Check]:
    existing = next(place for place in [folder.resolve(), *folder.resolve().parents] if place.exists())
    usage = shutil.disk_usage(existing)
    few = usage.free < 20 * GIB
    yield Check(
        "disk",
        "warn" if few else "ok",
        f"{usage.free / GIB:.0f} GiB free of {usage.total / GIB:.0f} at {existing}",
        "checkpoints need room; free some space" if few else "",
    )
    if not os.access(existing, os.W_OK):
        yield Check("disk", "fail", f"{existing} cannot be written to", "choose another folder")


def _shared_memory() -> Iterator[Check]:
    place = Path("/dev/shm")
    if place.is_dir():
        free = shutil.disk_usage(place).free
        few = free < 1 * GIB
        remedy = (
            "loader workers need it; start the container with --ipc=host or --shm-size=16g" if few else ""
        )
        yield Check(
            "shared memory", "warn" if few else "ok", f"{free / GIB:.2f} GiB free in /dev/shm", remedy
        )


def _limits() -> Iterator[Check]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < 4096
    yield Check("open files", "warn" if few else "ok", _limit(files), "ulimit -n 65536" if few else "")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    small = locked != resource.RLIM_INFINITY and locked < 64 * 2**20
    remedy = "InfiniBand and pinned memory need more: ulimit -l unlimited" if small else ""
    yield Check("locked memory", "warn" if small else "ok", _limit(locked), remedy)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _cpus() -> Iterator[Check]:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    detail = f"{usable} usable of {total}"
    yield Check(
        "cpus", "warn" if usable < 4 else "ok", detail, "loader workers will be few" if usable < 4 else ""
    )


def _port() -> Iterator[Check]:
    port = (
        int(os.environ.get("MASTER_PORT", "29500"))
        if os.environ.get("MASTER_PORT", "29500").isdigit()
        else 29500
    )
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
            yield Check("master port", "ok", f"{port} is free")
        except OSError:
            yield Check(
                "master port", "warn", f"{port} is in use", "set MASTER_PORT, or use torchrun --standalone"
            )


def _variables() -> Iterator[Check]:
    """The doctor's own rules, applied to the environment of this process."""
    from traindoctor.examination import examine
    from traindoctor.registry import all_rules

    wanted = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_")
    lines = [
        f"{k}={v}"
        for k, v in sorted(os.environ.items())
        if k.startswith(wanted) and "\n" not in v and '"' not in v
    ]
    codes = frozenset(code for code in all_rules() if code.startswith("NCC"))
    found = examine(
        "environment", Kind.ENV, "\n".join(lines).encode("utf-8", "surrogateescape"), codes
    ).findings
    for finding in found:
        status = "fail" if finding.severity is Severity.ERROR else "warn"
        yield Check("environment", status, f"{finding.code} {finding.message}")
    if not found:
        yield Check("environment", "ok", "no harmful variables")
