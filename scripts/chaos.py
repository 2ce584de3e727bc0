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
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from chaos_machines import failing_disks, frozen_disks, full_disks, ranks, small_shared_memory, torchrun
from chaos_world import STEPS, Command, World, finish, prepare, set_up, state, stop_after, train, tree, use


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
