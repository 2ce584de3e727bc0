"""A test of a cluster before a run: do the ranks find each other, how fast do they exchange data, do they agree.

Every check ends as a line with a tick or a cross, and a remedy where it failed. Without GPUs the ranks use gloo.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import platform
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmldlm.config import Config
from mmldlm.data.store import PairStore
from mmldlm.distributed.ranks import Ranks
from mmldlm.errors import UserError

MEBIBYTE = 2**20
MOST_SKEW = 1.0
"""Seconds by which clocks may differ: beyond it logs of several machines cannot be compared."""
FREE_GIB, SLOW_DISK = 10.0, 50.0
"""Least free space in GiB; MiB/s below which a checkpoint of a large model takes minutes."""
PACKAGES = ("mmldlm", "torch", "numpy", "pyarrow", "transformers")
FREE_SHARE = 0.9
"""Of a GPU's memory, before a run."""
SLOW_GPU = 0.7
"""Share of the fastest GPU's speed below which one is named."""


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str
    passed: bool
    detail: str
    remedy: str = ""

    def line(self) -> str:
        remedy = f" -> {self.remedy}" if self.remedy and not self.passed else ""
        return f"{'✓' if self.passed else '✗'} {self.name}: {self.detail}{remedy}"


def check_folder(name: str, folder: Path, size: int = 64 * MEBIBYTE) -> Check:
    """Whether a folder can be written to, has room, and is fast enough for checkpoints."""
    probe = folder / f".selftest-{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with open(probe, "wb") as file:
            file.write(os.urandom(MEBIBYTE) * (size // MEBIBYTE))
            file.flush()
            os.fsync(file.fileno())
        rate = size / MEBIBYTE / (time.perf_counter() - began)
        free = shutil.disk_usage(folder).free / 2**30
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space, or choose" if full else "choose"
        return Check(
            name, False, f"{folder}: {error.strerror}", f"{remedy} a folder that all ranks may write to"
        )
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    detail = f"{folder}: {free:,.0f} GiB free, {rate:,.0f} MiB/s written and flushed"
    remedy = "free some space" if free < FREE_GIB else "use a faster disk, or larger train.checkpoint_every"
    return Check(name, free >= FREE_GIB and rate >= SLOW_DISK, detail, remedy)


def check_store(path: Path) -> Check:
    """Whether the pair store is there and its first and last document can be read."""
    try:
        store = PairStore.open(path)
        split = store.split("train")
        split.read(torch.tensor([0, len(split) - 1]).numpy())
    except (UserError, OSError) as error:
        remedy = "put it right" if path.exists() else "make it, or share its folder with this machine"
        return Check("store", False, str(error), remedy)
    return Check("store", True, f"{path}: {len(store):,} documents, fingerprint {store.fingerprint[:12]}")


def check_gpus(wanted: int) -> Check:
    """Whether this machine has the GPUs for its ranks; none at all is not an error, the ranks use the CPU then."""
    count = torch.cuda.device_count()
    if not count:
        return Check("GPUs", True, "none here; ranks use the CPU and gloo")
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    detail = f"{count} x {', '.join(names)} for {wanted} ranks"
    if count < wanted:
        return Check("GPUs", False, detail, f"use at most {count} ranks per node")
    for index in range(wanted):
        free, total = torch.cuda.mem_get_info(index)
        if free < FREE_SHARE * total:
            taken = f"; GPU {index} has {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
            return Check(
                "GPUs", False, detail + taken, "end the other processes on it (nvidia-smi lists them)"
            )
    return Check("GPUs", True, detail)


def check_ranks(ranks: Ranks, store: Path | None, run: Path, megabytes: int = 16) -> list[Check]:
    """All checks, called by all ranks together; the same list on every rank."""
    machines = len(set(_gather(ranks, socket.gethostname())))
    checks = [
        _worst(ranks, check_gpus(ranks.local_world_size)),
        Check("rendezvous", True, f"{ranks.world_size} ranks on {machines} machines"),
    ]
    checks.append(_check_same(ranks, "versions", _versions(), "install the same versions on all machines"))
    checks.append(_check_same(ranks, "variables", _variables(), "export the same on all machines"))
    checks.append(_check_clock(ranks))
    checks += _check_bandwidth(ranks, megabytes)
    checks.append(_check_speed(ranks))
    if store is not None:
        checks.append(_worst(ranks, check_store(store)))
        if checks[-1].passed:  # on all ranks
            content = PairStore.open(store).content
            checks.append(
                _check_same(ranks, "store content", content, "copy the store again: it differs by machine")
            )
    checks.append(_worst(ranks, check_folder("disk", run)))
    return checks


def _gather(ranks: Ranks, value: Any) -> list[Any]:
    values: list[Any] = [None] * ranks.world_size
    if not ranks.several:
        return [value]
    dist.all_gather_object(values, value, group=ranks.host)
    return values


def _versions() -> str:
    names = [f"python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            names.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = torch.version.cuda
    return ", ".join([*names, f"CUDA {cuda}" if cuda else "no CUDA"])


def _variables() -> str:
    """Environment variables that change how ranks talk to each other."""
    names = sorted(
        name
        for name in os.environ
        if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_")) and not name.endswith("_IFNAME")
    )  # a network card has a name of its own on each machine
    return ", ".join(f"{name}={os.environ[name]}" for name in names) or "none set"


def _check_same(ranks: Ranks, name: str, value: str, remedy: str) -> Check:
    """Whether all ranks have the same; otherwise the first one that differs is shown."""
    values = _gather(ranks, value)
    others = [(rank, other) for rank, other in enumerate(values) if other != values[0]]
    if not others:
        return Check(name, True, f"the same on all ranks: {values[0][:160]}")
    rank, other = others[0]
    return Check(name, False, f"rank {rank} has {other[:160]}, rank 0 has {values[0][:160]}", remedy)


def _check_clock(ranks: Ranks) -> Check:
    ranks.barrier()
    times = _gather(ranks, time.time())
    skew = max(times) - min(times)
    return Check(
        "clocks", skew < MOST_SKEW, f"within {skew * 1000:.0f} ms", "start a time service such as chrony"
    )


def _check_bandwidth(ranks: Ranks, megabytes: int) -> list[Check]:
    if not ranks.several:
        return [Check("exchange", True, "one rank exchanges nothing")]
    words = torch.ones(megabytes * MEBIBYTE // 4, device=ranks.device)
    parts = [torch.empty_like(words) for _ in range(ranks.world_size)]
    share = (ranks.world_size - 1) / ranks.world_size
    size = words.numel() * 4 / 1e9
    reduced = _timed(ranks, lambda: dist.all_reduce(words.fill_(1.0)))
    right = bool((words == ranks.world_size).all())
    gathered = _timed(ranks, lambda: dist.all_gather(parts, words))
    detail = f"{2 * share * size / reduced:.2f} GB/s per rank for {megabytes} MiB ({dist.get_backend()})"
    remedy = "the sum is wrong: check the network cards and NCCL_SOCKET_IFNAME"
    return [
        Check("all-reduce", right, detail, remedy),
        Check("all-gather", True, f"{share * size * ranks.world_size / gathered:.2f} GB/s per rank"),
    ]


def _timed(ranks: Ranks, exchange: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds of the fastest of some exchanges, after one to warm up."""
    best = float("inf")
    for attempt in range(repeats + 1):
        ranks.barrier()
        began = time.perf_counter()
        exchange()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        if attempt:
            best = min(best, time.perf_counter() - began)
    return best


def _check_speed(ranks: Ranks) -> Check:
    """A matrix product on every rank: a faulty device is slow or wrong."""
    on_gpu = ranks.device.type == "cuda"
    size = 4096 if on_gpu else 512
    matrix = torch.ones(size, size, device=ranks.device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    product = matrix @ matrix
    right = bool((product == size).all())
    seconds = _timed(ranks, lambda: matrix @ matrix)
    rates = _gather(ranks, (2.0 * size**3 / seconds / 1e12) if right else 0.0)
    slowest = min(range(len(rates)), key=rates.__getitem__)
    healthy = rates[slowest] >= SLOW_GPU * max(rates) if on_gpu else rates[slowest] > 0
    detail = f"{min(rates):.3g} to {max(rates):.3g} TFLOP/s"
    what = "computes wrong results" if rates[slowest] == 0 else "is slow"
    return Check(
        "devices", healthy, detail, f"rank {slowest} {what}: look at it with nvidia-smi, leave it out"
    )


def _worst(ranks: Ranks, check: Check) -> Check:
    """The check of the first rank that failed, with its number, or that of rank 0."""
    checks = _gather(ranks, check)
    for rank, other in enumerate(checks):
        if not other.passed:
            return Check(other.name, False, f"rank {rank}: {other.detail}", other.remedy)
    return checks[0]


def selftest_config() -> Config:
    """Settings under which ranks join for a test; a rank that is missing is given up after two minutes."""
    config = Config()
    config.distributed.timeout_minutes = 2.0
    return config
