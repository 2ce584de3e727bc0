"""For `chaos.py`: commands as processes, and what undisturbed ones leave on the disk.

Loading PyTorch takes seconds, so one server process loads it once and forks a process for each command.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TIMED = {"time", "documents_per_second", "tokens_per_second", "flops_per_second", "mfu", "data_wait"}
STEPS = 8
RECIPE = """
name: chaos
data: {{store: {store}}}
batch: {{tokens_per_step: 192}}
model: {{preset: tiny, depth: 1, width: 32, latent_width: 16, num_heads: 2, head_width: 8, time_width: 16}}
optim: {{lr: 3.0e-3, warmup_steps: 3, ema_decay: 0.9}}
train: {{steps: 8, log_every: 1, valid_every: 4, valid_samples: 0, checkpoint_every: 2, trackers: [], device: cpu}}
"""
SERVER = """
import json, os, resource, signal, sys, threading, traceback
import torch, torch._dynamo, mmldlm.cli.main, mmldlm.api.train, mmldlm.api.evaluate, mmldlm.api.prepare
import mmldlm.evaluation.run, mmldlm.preparation.pipeline, torch.distributed
for name in open(sys.argv[1]).read().split() if os.path.exists(sys.argv[1]) else []:
    with __import__("contextlib").suppress(Exception):
        __import__(name)
torch.set_num_threads(1)

def become(order):
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    for fd, path in ((1, order["out"]), (2, order["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    if order["limit"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"], order["limit"]))
    sys.argv = ["mmldlm", *order["words"]]
    code = 1
    try:
        mmldlm.cli.main.main()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    with __import__("contextlib").suppress(Exception):
        threading._shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        if order["learn"]:
            open(order["learn"], "a").write("\\n".join([*sys.modules, ""]))
    os._exit(code)

print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if "words" in order:
        pid = os.fork()
        if not pid:
            become(order)
        print(json.dumps(pid), flush=True)
    else:
        pid, status = os.waitpid(order["pid"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
"""


class Server:
    """Forks a process for each command. The first ones teach it which modules to load beforehand."""

    def __init__(self, modules: Path, *, learning: bool = False) -> None:
        self.learn = str(modules) if learning else ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(modules)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def ask(self, **order: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


class Command:
    """A command under way."""

    def __init__(self, world: World, words: Sequence[str], **env: str) -> None:
        world.count += 1
        limit = int(env.pop("LIMIT", "0"))
        self.server, self.code = world.server, None
        self.out, self.err = (world.logs / f"{world.count}.{kind}" for kind in ("out", "err"))
        self.pid: int = self.server.ask(
            words=list(words),
            cwd=str(world.root),
            env=env,
            out=str(self.out),
            err=str(self.err),
            limit=limit,
            learn=self.server.learn,
        )

    def poll(self) -> int | None:
        """The exit code (below 0: a signal), once it has ended."""
        if self.code is None:
            self.code = self.server.ask(pid=self.pid)
        return self.code

    def wait(self, seconds: float = 240.0) -> int:
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise TimeoutError(f"{self.err}: did not end within {seconds:.0f} s")
            time.sleep(0.01)
        assert self.code is not None
        return self.code

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def said(self) -> str:
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")


class World:
    """The folder, the undisturbed results, and what came of each try."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.logs = root.absolute(), root.absolute() / "logs"
        self.logs.mkdir(parents=True)
        self.chance, self.count = random.Random(seed), 0
        self.results: dict[str, Counter[str]] = {}
        self.failures: list[str] = []
        self.server = Server(self.logs / "modules", learning=True)

    def run(self, *words: str, **env: str) -> Command:
        command = Command(self, words, **env)
        command.wait()
        return command

    def start(self, *words: str, **env: str) -> Command:
        return Command(self, words, **env)

    def note(self, kind: str, outcome: str, why: str = "") -> None:
        self.results.setdefault(kind, Counter())[outcome] += 1
        if outcome in ("lost", "silent"):
            self.failures.append(f"{kind}: {outcome}: {why}")
            print(self.failures[-1], file=sys.stderr, flush=True)

    def fresh(self) -> Path:
        """A new name for a folder."""
        self.count += 1
        return self.root / f"try{self.count}"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def curve(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "training_log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMED} for line in lines]


def state(run: Path) -> Any:
    """All that a run must end with: weights, averages, moments and the curve, beside a whole export."""
    last = run / "checkpoints" / f"step_{STEPS:08d}"
    assert (run / "export" / "manifest.json").is_file()
    return [digest(last / f"{name}.safetensors") for name in ("model", "ema", "optimizer")], curve(run)


def tree(folder: Path) -> dict[str, str]:
    """Every file of a folder, and its checksum; times in a manifest do not count."""
    return {
        str(path.relative_to(folder)): digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", ".lock", "settings.json")
    }


def set_up(world: World) -> None:
    """Text, latents, a tokenizer; and what undisturbed commands make of them."""
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers

    root, chance = world.root, random.Random(7)
    words = [f"w{number}" for number in range(90)]
    lines = [" ".join(chance.choices(words, k=chance.randint(3, 20))) for _ in range(110)]
    (root / "text.txt").write_text("\n".join(lines) + "\n")
    np.save(root / "latents.npy", np.random.default_rng(0).normal(size=(len(lines), 8)).astype(np.float32))
    vocabulary = {word: idx for idx, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (root / "words").mkdir()
    tokenizer.save(str(root / "words" / "tokenizer.json"))
    (root / "words" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}'
    )
    (root / "chaos.yaml").write_text(RECIPE.format(store=root / "store"))
    assert world.run(*prepare("store")).code == 0, "prepare"
    began = time.monotonic()
    trained = world.run(*train("whole"))
    assert trained.code == 0, trained.said
    world.seconds = time.monotonic() - began
    world.whole = state(root / "whole")
    again = world.run(*train("again"))
    assert again.code == 0, again.said
    assert state(root / "again") == world.whole, "two undisturbed runs differ"
    half = world.start(*train("half"))
    stop_after(half, root / "half", 5)
    assert half.code == 75, half.said
    assert world.run(*use("whole", root / "used")).code == 0
    world.used = tree(root / "used")
    assert world.run(*use("half", root / "used_half")).code == 0
    world.used_half = tree(root / "used_half")
    world.server.process.kill()
    world.server = Server(world.logs / "modules")
    began = time.monotonic()
    assert world.run(*train("third")).code == 0
    world.seconds = time.monotonic() - began


def prepare(out: str) -> list[str]:
    made = ["--latents", "latents.npy", "--tokenizer", "words", "--text-unit", "line", "--validation", "0.2"]
    return ["prepare", "--input", "text.txt", *made, "--out", out]


def train(run: str | Path, *words: str) -> list[str]:
    return ["train", "--recipe", "chaos.yaml", "--run", str(run), *words]


def use(model: str | Path, out: Path) -> list[str]:
    """Decode latents with a trained model into files."""
    Path(out).mkdir(exist_ok=True)
    return [
        "decode",
        str(model),
        "--in",
        "latents.npy",
        "--out",
        f"{out}/decoded.jsonl",
        "--steps",
        "2",
        "--length",
        "6",
    ]


def steps_done(run: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(json.loads((run / "training_log.jsonl").read_bytes().splitlines()[-1])["step"])
    return 0


def stop_after(command: Command, run: Path, step: int, number: int = signal.SIGTERM) -> None:
    while steps_done(run) < step and command.poll() is None:
        time.sleep(0.002)
    command.send(number)
    command.wait()


def finish(world: World, kind: str, words: Sequence[str], same: Callable[[], bool], **env: str) -> None:
    """The same command again must end as the undisturbed one."""
    command = world.run(*words, **env)
    if command.code or "Traceback" in command.said:
        world.note(kind, "lost", f"{command.err}: code {command.code}: {command.said[-300:]}")
    elif not same():
        world.note(kind, "silent", f"{command.err}: another result")
    else:
        world.note(kind, "survived")
