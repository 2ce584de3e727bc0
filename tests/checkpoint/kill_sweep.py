"""Kill a process that saves checkpoints, again and again, and look at what it leaves.

    python -m tests.checkpoint.kill_sweep calls FOLDER        at every system call that changes the disk, in turn
    python -m tests.checkpoint.kill_sweep moments FOLDER N    at N random moments
    python -m tests.checkpoint.kill_sweep shards FOLDER N     one of three ranks that save together, at N random moments

Each child is a fork, so that torch is imported once. Prints a JSON object with what was seen.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tests.kills import die_at, fork

from mmldlm.checkpoint.files import read_latest
from mmldlm.checkpoint.load import load_latest
from mmldlm.checkpoint.save import Saver
from mmldlm.checkpoint.sharded import ShardPlace, ShardSaver
from mmldlm.checkpoint.state import Snapshot
from mmldlm.types import Piece


def snapshot(step: int, version: int, size: int) -> Snapshot:
    weights = torch.full((size,), float(step * 100 + version))
    return Snapshot(step, {"model": {"w": weights}, "ema": {"w": weights + 0.5}}, {"version": version})


def check(found: Snapshot, size: int) -> None:
    wanted = snapshot(found.step, found.meta["version"], size)
    for group, named in wanted.tensors.items():
        assert torch.equal(found.tensors[group]["w"], named["w"])


def acknowledge(fd: int, version: int) -> Callable[[int, Path, float], None]:
    return lambda step, path, seconds: os.pwrite(fd, f"{step} {version}\n".encode().ljust(32), 0) and None


def save_thrice(folder: Path, fd: int, number: int) -> None:
    """A new step, the same step again (as after a rollback), a further one that retires the first."""
    die_at(number)
    for step, version in ((2, 0), (2, 1), (3, 0)):
        saver = Saver(folder, keep=2, on_error=lambda error: os._exit(3), on_saved=acknowledge(fd, version))
        saver.save(snapshot(step, version, 100), wait=True)
    os._exit(7)


def sweep_calls(root: Path) -> dict:
    base = root / "base"
    saver = Saver(base, keep=2, on_error=lambda error: None)
    for step in (0, 1):
        saver.save(snapshot(step, 0, 100), wait=True)
    seen: set[tuple[int, int]] = set()
    for number in range(1, 1000):
        folder, fd = root / f"at{number}", os.open(root / f"ack{number}", os.O_RDWR | os.O_CREAT)
        shutil.copytree(base, folder, symlinks=True)
        _, status = os.waitpid(fork(lambda f=folder, d=fd, n=number: save_thrice(f, d, n)), 0)  # type: ignore[misc]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 7, f"the child failed to save at call {number}"
            return {"kills": number - 1, "states": sorted(seen)}
        seen.add(judge(folder, os.pread(fd, 32, 0).split(), 100, least=(1, 0)))
    raise AssertionError("the child never finished")


def judge(folder: Path, acknowledged: list[bytes], size: int, least: tuple[int, int]) -> tuple[int, int]:
    """What resuming sees must be whole, not older than acknowledged, and the same after cleaning up."""
    promised = (int(acknowledged[0]), int(acknowledged[1])) if acknowledged else least
    messages: list[str] = []
    found = load_latest(folder, report=messages.append)
    assert found is not None
    assert not messages, messages
    check(found, size)
    state = (found.step, found.meta["version"])
    assert state >= promised, (state, promised)
    Saver(folder, keep=2, on_error=lambda error: None).close()
    again = load_latest(folder, report=messages.append)
    assert again is not None
    assert (again.step, again.meta["version"]) == state
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    assert read_latest(folder) == folder / f"step_{found.step:08d}"
    return state


def save_forever(folder: Path, fd: int, size: int) -> None:
    found = load_latest(folder, report=lambda message: os._exit(4))
    saver = Saver(folder, keep=2, on_error=lambda error: os._exit(3), on_saved=acknowledge(fd, 0))
    for step in range(found.step + 1 if found else 0, 10**9):
        saver.save(snapshot(step, 0, size))


def sweep_moments(root: Path, num_kills: int) -> dict:
    folder, size, moments = root / "run", 200_000, random.Random(0)
    fd = os.open(root / "ack", os.O_RDWR | os.O_CREAT)
    torn, steps = 0, []
    for _ in range(num_kills):
        pid, before = fork(lambda: save_forever(folder, fd, size)), os.pread(fd, 32, 0)
        while os.pread(fd, 32, 0) == before:
            assert os.waitpid(pid, os.WNOHANG)[0] == 0, "the child left by itself"
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.06))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"the child left by itself with {os.WEXITSTATUS(status)}"
        torn += any(name.startswith(".") for name in os.listdir(folder))
        steps.append(judge(folder, os.pread(fd, 32, 0).split(), size, least=(0, 0))[0])
    assert steps == sorted(steps)
    return {"kills": num_kills, "during_a_save": torn, "steps": steps[-1]}


RANKS = 3


def shards_of(whole: Snapshot, pieces: dict[str, Piece]) -> Snapshot:
    piece = pieces["w"]
    own = slice(piece.start, piece.start + piece.rows)
    return Snapshot(
        whole.step, {name: {"w": held["w"][own]} for name, held in whole.tensors.items()}, whole.meta
    )


def save_shards_forever(folder: Path, fd: int, size: int, rank: int, meeting: Path) -> None:
    timeout = datetime.timedelta(seconds=60)
    store = dist.FileStore(str(meeting), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    rows = -(-size // RANKS)
    pieces = {"w": Piece(rank * rows, min(rows, size - rank * rows), (size,))}
    newest = load_latest(folder, report=lambda message: os._exit(4))
    dist.barrier()
    place = ShardPlace(pieces, 0, 1, dist.group.WORLD)
    saver = ShardSaver(folder, place, keep=2, on_error=lambda error: None, on_saved=acknowledge(fd, 0))
    for step in range(newest.step + 1 if newest else 0, 10**9):
        saver.save(shards_of(snapshot(step, 0, size), pieces))


def staged(folder: Path) -> bool:
    return any(name.startswith(".staging") for name in os.listdir(folder))


def sweep_shards(root: Path, num_kills: int) -> dict:
    """One rank is killed while a folder is staged; a little later the others, which have lost it."""
    folder, size, moments = root / "run", 200_000, random.Random(0)
    fd = os.open(root / "ack", os.O_RDWR | os.O_CREAT)
    torn, steps = 0, []
    for number in range(num_kills):
        before, meeting = os.pread(fd, 32, 0), root / f"meeting{number}"
        work = [partial(save_shards_forever, folder, fd, size, rank, meeting) for rank in range(RANKS)]
        pids = [fork(each) for each in work]
        while os.pread(fd, 32, 0) == before:
            assert os.waitpid(-1, os.WNOHANG)[0] == 0, "a rank left by itself"
            time.sleep(0.001)
        while not staged(folder):
            time.sleep(0.0005)
        time.sleep(moments.uniform(0, 0.01))
        moments.shuffle(pids)
        os.kill(pids[0], signal.SIGKILL)
        torn += staged(folder)
        time.sleep(moments.uniform(0, 0.2))
        for pid in pids[1:]:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        steps.append(judge(folder, os.pread(fd, 32, 0).split(), size, least=(0, 0))[0])
    assert steps == sorted(steps)
    return {"kills": num_kills, "during_a_save": torn, "steps": steps[-1]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[2])
    sweeps = {"moments": sweep_moments, "shards": sweep_shards}
    told = sweep_calls(place) if sys.argv[1] == "calls" else sweeps[sys.argv[1]](place, int(sys.argv[3]))
    print(json.dumps(told))
