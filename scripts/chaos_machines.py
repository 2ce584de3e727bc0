"""For `chaos.py`: disks that are full, read-only or frozen, small shared memory, ranks and nodes that are killed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from chaos_world import RECIPE, STEPS, Command, World, curve, finish, state, steps_done, train


@contextlib.contextmanager
def mounted(world: World, kind: str, size: int) -> Iterator[Path]:
    """A small file system: in memory, or ext4 in a file."""
    place = world.fresh()
    place.mkdir()
    if kind == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", place], check=True)
    else:
        image = place.with_suffix(".img")
        with open(image, "wb") as file:
            file.truncate(size * 1024)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=False)


def one_line(command: Command, *parts: str) -> bool:
    lines = [line for line in command.said.splitlines() if line.startswith("mmldlm: error")]
    return (
        command.code == 2
        and len(lines) == 1
        and "Traceback" not in command.said
        and all(part in lines[0] for part in parts)
    )


def full_disks(world: World, count: int) -> None:
    """Too small for what the run wants to keep, in any degree; then there is room again."""
    needed = sum(path.stat().st_size for path in (world.root / "whole").rglob("*") if path.is_file()) // 1024
    for idx in range(count):
        if idx % 3 == 2:  # a limit on the size of one file, as a quota might be
            run = world.fresh()
            command = world.run(*train(run), LIMIT=str(world.chance.randrange(2_000, 200_000)))
            judge_full(world, command, run)
            continue
        with mounted(world, "tmpfs", world.chance.randrange(needed // 8, needed)) as disk:
            command = world.run(*train(disk / "run"))
            subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
            judge_full(world, command, disk / "run")


def judge_full(world: World, command: Command, run: Path) -> None:
    kind, events = "full disk, or a limit on the size of files", run / "events.jsonl"
    ended = events.read_text().splitlines()[-1] if events.exists() and events.stat().st_size else ""
    if "Traceback" in command.said or command.code not in (0, 2):
        world.note(kind, "lost", f"{command.err}: code {command.code}")
    elif (
        command.code == 2
        and '"finished"' in ended
        and not (run / "checkpoints" / f"step_{STEPS:08d}").exists()
    ):
        world.note(kind, "silent", f"{command.err}: the ledger says finished")
    else:
        finish(world, kind, train(run), lambda: state(run) == world.whole)


def read_only(folder: Path) -> bool:
    try:
        (folder / "probe").touch()
    except OSError as error:
        return error.errno == errno.EROFS
    return False


def failing_disks(world: World, count: int) -> None:
    """Read-only from the start, read-only in the middle, frozen for a while."""
    for idx in range(count):
        with mounted(world, "tmpfs", 64 * 1024) as disk:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            command = world.run(*train(disk / "run"))
            good = one_line(command, str(disk / "run"))
            world.note(
                "read-only disk at the start",
                "reported" if good else "lost",
                f"{command.err}: {command.code}",
            )
        with mounted(world, "ext4", 64 * 1024) as disk:
            run = disk / "run"
            command = world.start(*train(run))
            while steps_done(run) < 3 + idx % 5 and command.poll() is None:
                time.sleep(0.002)
            subprocess.run(["mount", "-o", "remount,abort", disk], check=False)
            code, kind = command.wait(), "disk that becomes read-only"
            assert read_only(disk), "the disk is not read-only"
            if code != 2 or "Traceback" in command.said or f"{run}" not in command.said.split("read-only")[0]:
                world.note(kind, "lost", f"{command.err}: code {code}")
                continue
            subprocess.run(["umount", disk], check=False)
            subprocess.run(["fsck.ext4", "-fy", disk.with_suffix(".img")], check=False, capture_output=True)
            subprocess.run(["mount", "-o", "loop", disk.with_suffix(".img"), disk], check=True)
            finish(world, kind, train(run), lambda run=run: state(run) == world.whole)


def frozen_disks(world: World, count: int) -> None:
    for idx in range(count):
        with mounted(world, "ext4", 64 * 1024) as disk:
            run, kind = disk / "run", "frozen disk"
            command = world.start(*train(run))
            while steps_done(run) < 3 + 2 * idx and command.poll() is None:
                time.sleep(0.002)
            subprocess.run(["fsfreeze", "-f", disk], check=True)
            deadline = time.monotonic() + 60
            while "the disk has not answered" not in command.said and time.monotonic() < deadline:
                time.sleep(0.5)
            reported = "the disk has not answered" in command.said
            subprocess.run(["fsfreeze", "-u", disk], check=True)
            code = command.wait()
            if not reported or code or "Traceback" in command.said:
                world.note(kind, "lost", f"{command.err}: code {code}, reported {reported}")
            else:
                world.note(kind, "survived" if state(run) == world.whole else "silent", str(command.err))


def small_shared_memory(world: World, count: int) -> None:
    """A mount of one's own over /dev/shm, as a container has; processes of their own, because of the mount."""
    for idx in range(count):
        words = " ".join(train("/tmp/chaos-shm-run", f"data.num_workers={1 + idx % 2}"))
        inner = f"mount -t tmpfs -o size={8 << idx % 2}k tmpfs /dev/shm && exec {sys.executable} -m mmldlm {words}"
        shutil.copytree(world.root / "store", "/tmp/chaos-shm/store", dirs_exist_ok=True)
        Path("/tmp/chaos-shm/chaos.yaml").write_text(RECIPE.format(store="/tmp/chaos-shm/store"))
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", inner],
            cwd="/tmp/chaos-shm",
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        said = [line for line in done.stderr.splitlines() if line.startswith("mmldlm: error")]
        good = (
            done.returncode == 2
            and len(said) == 1
            and "/dev/shm" in said[0]
            and "Traceback" not in done.stderr
        )
        world.note("small /dev/shm", "reported" if good else "lost", done.stderr[-400:])
        for path in ("/tmp/chaos-shm", "/tmp/chaos-shm-run"):
            shutil.rmtree(path, ignore_errors=True)


def ranks(world: World, count: int) -> None:
    """Two to four ranks; one is killed, all are started again, as an elastic launcher does."""
    alone = [line["loss"] for line in world.whole[1] if "loss" in line]
    for idx in range(count):
        run, size, kind = world.fresh(), 2 + idx % 3, "SIGKILL of a rank of 2 to 4"
        group = start_ranks(world, run, size)
        victim, step = world.chance.randrange(size), world.chance.randint(1, STEPS - 2)
        while steps_done(run) < step and group[0].poll() is None:
            time.sleep(0.002)
        group[victim].send(signal.SIGKILL)
        try:
            codes = [command.wait(90) for command in group]
        except TimeoutError as error:
            world.note(kind, "lost", str(error))
            continue
        others = [command.said for rank, command in enumerate(group) if rank != victim]
        host = f"rank {victim} on {socket.gethostname()} is gone"
        if codes[victim] == -signal.SIGKILL and not all(
            host in said and "Traceback" not in said for said in others
        ):
            world.note(kind, "lost", f"rank {victim} of {size}: {[str(command.err) for command in group]}")
            continue
        for command in start_ranks(world, run, size):
            command.wait()
        losses = [line["loss"] for line in curve(run) if "loss" in line]
        near = len(losses) == len(alone) and all(
            abs(a - b) <= 1e-5 * abs(b) for a, b in zip(losses, alone, strict=True)
        )
        world.note(kind, "survived" if near else "silent", str(run))
        shutil.rmtree(run, ignore_errors=True)


def start_ranks(world: World, run: Path, size: int) -> list[Command]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [world.start(*train(run), **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(size)]


def torchrun(world: World, count: int) -> None:
    """Restarts by torchrun itself: ranks of one node, or a whole node of two."""
    alone = [line["loss"] for line in world.whole[1] if "loss" in line]
    for idx in range(count):
        run, nodes, kind = (
            world.fresh(),
            1 + idx % 2,
            f"torchrun: {'a rank' if idx % 2 == 0 else 'a node of two'} killed, goes on",
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        agents = [start_agent(world, run, nodes, port, node) for node in range(nodes)]
        for step in (3, 7) if nodes == 1 else (4,):
            while steps_done(run) < step and agents[0].poll() is None:
                time.sleep(0.01)
            if nodes == 1:
                workers = children(agents[0].pid)
                os.kill(world.chance.choice(workers), signal.SIGKILL)
            else:
                for pid in [agents[1].pid, *children(agents[1].pid)]:
                    os.kill(pid, signal.SIGKILL)
                agents[1].wait()
                agents[1] = start_agent(world, run, nodes, port, 1)
        try:
            codes = [agent.wait(240) for agent in agents]
        except subprocess.TimeoutExpired:
            world.note(kind, "lost", f"{run}: did not end")
            for agent in agents:
                os.killpg(agent.pid, signal.SIGKILL)
            continue
        losses = [line["loss"] for line in curve(run) if "loss" in line] if not any(codes) else []
        near = len(losses) == len(alone) and all(
            abs(a - b) <= 1e-5 * abs(b) for a, b in zip(losses, alone, strict=True)
        )
        world.note(kind, "survived" if near else "lost", f"{run}: codes {codes}")


def start_agent(world: World, run: Path, nodes: int, port: int, node: int) -> subprocess.Popen[bytes]:
    place = ["--standalone", "--nproc-per-node", "2"] if nodes == 1 else [
        "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
        "--rdzv-id", "chaos", "--rdzv-conf", f"is_host={int(node == 0)}",
    ]  # fmt: skip
    words = ["train", "--recipe", "chaos.yaml", "--run-folder", str(run)]
    log = os.open(world.logs / f"{run.name}.{node}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # else torchrun keeps its first address to itself, and a node that comes later never learns it (PyTorch 2.13)
    env = os.environ | ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if nodes > 1 else {})
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *place, "--max-restarts", "3", "-m", "mmldlm", *words],
        env=env, cwd=world.root, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip


def children(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in listed.stdout.split()]
