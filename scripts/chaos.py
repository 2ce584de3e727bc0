"""Chaos against the command line: kills, flipped bits, full, read-only and frozen disks, signals, lost ranks.

    python scripts/chaos.py FOLDER                       # all of it; about an hour on one core
    python scripts/chaos.py FOLDER --only flips --flips 20

Nothing of mmldlm is imported here: commands are started as processes, and what they leave on the disk is compared,
byte by byte, with what undisturbed ones left. Every try ends in one of these:

    survived  by itself, or after the same command again, everything is as in the undisturbed run
    reported  one line names the file: the command stopped and changed nothing, or used what was not damaged
    lost      the command failed otherwise: a traceback, a hang, a result that could not be completed
    silent    exit code 0, no word, and another result

Writes FOLDER/chaos.json and prints a table. Disks need root (they are small file systems of their own).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from chaos_world import (
    RECIPE,
    STEPS,
    Command,
    World,
    curve,
    prepare,
    set_up,
    state,
    steps_done,
    stop_after,
    train,
    tree,
    use,
)


def finish(world: World, kind: str, words: Sequence[str], same: Callable[[], bool], **env: str) -> None:
    """The same command again must end as the undisturbed one."""
    command = world.run(*words, **env)
    if command.code or "Traceback" in command.said:
        world.note(kind, "lost", f"{command.err}: code {command.code}: {command.said[-300:]}")
    elif not same():
        world.note(kind, "silent", f"{command.err}: another result")
    else:
        world.note(kind, "survived")


def leftovers(run: Path) -> bool:
    folder = run / "checkpoints"
    return folder.is_dir() and any(path.name.startswith(".") for path in folder.iterdir())


def kill_saves(world: World, count: int) -> None:
    """SIGKILL while a checkpoint is being written: its staging folder is there."""
    done = 0
    while done < count:
        run = world.fresh()
        command, wanted = world.start(*train(run)), world.chance.randint(1, 5)
        seen: set[str] = set()
        look = time.monotonic()
        while len(seen) < wanted:
            with contextlib.suppress(OSError):
                seen |= {name for name in os.listdir(run / "checkpoints") if name.startswith(".staging")}
            if time.monotonic() > look:
                look += 0.05
                if command.poll() is not None:
                    break
            time.sleep(0.0005)
        time.sleep(world.chance.uniform(0, 0.004))
        command.send(signal.SIGKILL)
        killed, torn = command.wait() == -signal.SIGKILL, leftovers(run)
        if killed and torn:
            done += 1
            finish(
                world,
                "SIGKILL inside a save",
                train(run),
                lambda run=run: state(run) == world.whole and not leftovers(run),
            )
        shutil.rmtree(run, ignore_errors=True)


def kill_runs(world: World, count: int) -> None:
    done = 0
    while done < count:
        run = world.fresh()
        command = world.start(*train(run))
        time.sleep(world.chance.uniform(0, world.seconds))
        command.send(signal.SIGKILL)
        if command.wait() == -signal.SIGKILL:
            done += 1
            finish(
                world, "SIGKILL of train at any moment", train(run), lambda run=run: state(run) == world.whole
            )
        shutil.rmtree(run, ignore_errors=True)


def kill_others(world: World, count: int) -> None:
    """`prepare`, `export` and `eval`, killed and done again."""
    evaluation = [
        "eval",
        "whole",
        "--num",
        "8",
        "--num-decoded",
        "2",
        "--num-generated",
        "2",
        "--steps",
        "2",
        "--no-encoder",
        "--device",
        "cpu",
    ]
    jobs: dict[str, Callable[[Path], list[str]]] = {
        "prepare": lambda out: prepare(str(out)),
        "export": lambda out: ["export", "whole", "--out", str(out)],
        "eval": lambda out: [*evaluation, "--out", str(out)],
    }
    for name, words in jobs.items():
        whole, began = world.fresh(), time.monotonic()
        first = world.run(*words(whole))
        assert first.code == 0, first.said
        seconds, wanted = time.monotonic() - began, comparable(whole)
        done = 0
        while done < count:
            out = world.fresh()
            command = world.start(*words(out))
            time.sleep(world.chance.uniform(0, seconds))
            command.send(signal.SIGKILL)
            if command.wait() == -signal.SIGKILL:
                done += 1
                finish(
                    world,
                    f"SIGKILL of {name}",
                    words(out),
                    lambda out=out, wanted=wanted: comparable(out) == wanted,
                )
            shutil.rmtree(out, ignore_errors=True)


def comparable(folder: Path) -> dict[str, str]:
    """Files whose bytes depend on nothing but the input; pictures and pages show the time."""
    return {
        name: value
        for name, value in tree(folder).items()
        if name.endswith((".arrow", ".npy", ".safetensors", ".jsonl"))
    }


def send_signals(world: World, count: int) -> None:
    names = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2")
    for idx in range(count):
        run, name = world.fresh(), names[idx % len(names)]
        command = world.start(*train(run))
        stop_after(command, run, world.chance.randint(1, STEPS - 2), getattr(signal, f"SIG{name}"))
        wanted = 130 if name == "INT" else 75
        kind = f"signals: {', '.join(names)}"
        if command.code not in (0, wanted) or "Traceback" in command.said:
            world.note(kind, "lost", f"SIG{name}: {command.err}: code {command.code}")
        elif command.code and not list((run / "checkpoints").glob("step_*")):
            world.note(kind, "lost", f"SIG{name}: {command.err}: no checkpoint")
        else:
            finish(world, kind, train(run), lambda run=run: state(run) == world.whole)
        shutil.rmtree(run, ignore_errors=True)


def flip(world: World, path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = world.chance.randrange(len(content))
    content[place] ^= 1 << world.chance.randrange(8)
    path.write_bytes(content)


def flips(world: World, count: int) -> None:
    """One bit of one file, in the store, a checkpoint, an export, settings or logs."""
    kinds = {
        "store: shards of the training split": ("store", ["train/*.arrow"]),
        "store: shards of the validation split": ("store", ["validation/*.arrow"]),
        "store: lengths and token counts": ("store", ["*/*.npy"]),
        "store: manifest with the normaliser, tokenizer": ("store", ["*.json", "tokenizer/*"]),
        "checkpoints: tensors": ("half", ["checkpoints/step_*/*.safetensors"]),
        "checkpoints: manifest, meta": ("half", ["checkpoints/step_*/*.json"]),
        "run: settings, data description, tokenizer": ("half", ["config.yaml", "data.json", "tokenizer/*"]),
        "run: logs, ledger, heartbeat": ("half", ["*.jsonl", "train.log", "heartbeat.json"]),
        "export: weights, settings, tokenizer": ("export", ["*", "tokenizer/*"]),
    }
    for idx in range(count):
        kind = list(kinds)[idx % len(kinds)]
        base, patterns = kinds[kind]
        flip_once(world, f"one bit: {kind}", base, patterns)


def flip_once(world: World, kind: str, base: str, patterns: Sequence[str]) -> None:
    source = world.root / "whole" / "export" if base == "export" else world.root / base
    folder = world.fresh()
    shutil.copytree(source, folder, symlinks=True)
    files = sorted(
        path
        for pattern in patterns
        for path in folder.glob(pattern)
        if path.is_file() and path.stat().st_size
    )
    target = world.chance.choice([path for path in files if path.name != ".lock"])
    flip(world, target)
    out = world.fresh()
    if base == "export":
        jobs = [(use(folder, out), lambda: tree(out) == world.used)]
    elif base == "half":
        jobs = [
            (use(folder, out), lambda: tree(out) == world.used_half),
            (train(folder), lambda: state(folder) == world.whole),
        ]
    else:
        jobs = [(train(out, f"data.store={folder}"), lambda: state(out) == world.whole)]
    outcomes = [judge_flip(world, world.run(*words), target, same) for words, same in jobs]
    worst = max(outcomes, key=lambda pair: ("survived", "reported", "lost", "silent").index(pair[0]))
    world.note(kind, worst[0], f"{target.relative_to(world.root)}: {worst[1]}")
    if worst[0] not in ("lost", "silent"):
        for path in (folder, out):
            shutil.rmtree(path, ignore_errors=True)


def judge_flip(world: World, command: Command, target: Path, same: Callable[[], bool]) -> tuple[str, str]:
    said = command.said
    named = target.name in said
    if "Traceback" in said or command.code not in (0, 2):
        return "lost", f"{command.err}: code {command.code}"
    if command.code == 2:
        return ("reported", "") if named else ("lost", f"{command.err}: does not name the file")
    if same():
        return "survived", ""
    return ("reported", "") if named else ("silent", f"{command.err}")


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
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True)
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
            if code not in (0, 2) or "Traceback" in command.said or str(run) not in command.said:
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
                os.killpg(agents[1].pid, signal.SIGKILL)
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
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *place, "--max-restarts", "3", "-m", "mmldlm", *words],
        cwd=world.root, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip


def children(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in listed.stdout.split()]


PARTS: dict[str, tuple[Callable[[World, int], None], int]] = {
    "saves": (kill_saves, 60),
    "kills": (kill_runs, 110),
    "others": (kill_others, 10),
    "signals": (send_signals, 30),
    "ranks": (ranks, 18),
    "flips": (flips, 306),
    "full": (full_disks, 12),
    "failing": (failing_disks, 5),
    "frozen": (frozen_disks, 2),
    "memory": (small_shared_memory, 2),
    "torchrun": (torchrun, 4),
}


def table(world: World) -> str:
    rows = ["| what | tries | survived | reported | lost | silent |", "|---|---|---|---|---|---|"]
    outcomes = ("survived", "reported", "lost", "silent")
    for kind, counts in world.results.items():
        rows.append(
            f"| {kind} | {sum(counts.values())} | "
            + " | ".join(str(counts[name]) for name in outcomes)
            + " |"
        )
    total = sum(world.results.values(), Counter())
    rows.append(
        f"| all | {sum(total.values())} | " + " | ".join(str(total[name]) for name in outcomes) + " |"
    )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    for name, (_, count) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"tries (default {count})")
    options = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "COLUMNS": "200",
    }
    world, began = World(options.folder, options.seed), time.monotonic()
    set_up(world)
    print(f"an undisturbed run takes {world.seconds:.1f} s", flush=True)
    for name in options.only or PARTS:
        PARTS[name][0](world, getattr(options, name))
        seconds = round(time.monotonic() - began)
        results = {kind: dict(counts) for kind, counts in world.results.items()}
        report = {"seconds": seconds, "results": results, "failures": world.failures}
        (options.folder / "chaos.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"{name}: {seconds} s since the start", flush=True)
    print(table(world))
    world.server.process.kill()
    return int(bool(world.failures))


if __name__ == "__main__":
    sys.exit(main())
