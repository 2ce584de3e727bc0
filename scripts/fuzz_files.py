"""Feeds damaged and malicious files to everything that reads files, and counts what comes of it.

    python scripts/fuzz_files.py [SECONDS] [SEED] [--kind NAME ...]

Real exports, runs, pair stores, recipes, tokenizers, logs and text files are made once, then changed at random: bits
and pieces of the bytes, or values inside JSON, headers and tables. Half of the time checksums are computed again, as a
stranger would. Each file is read in a process of its own that may allocate 1 GiB and compute for 20 seconds, with "y"
at its standard input. Allowed are a clean error and a file that loads; anything else is printed, with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_MEMORY, MOST_SECONDS = 2**30, 20
OUTCOMES = (
    "clean error",
    "loaded",
    "long message",
    "traceback",
    "allocation",
    "crash",
    "hang",
    "code executed",
)
_CODES = {0: "loaded", 2: "clean error", 3: "traceback", 4: "allocation", 5: "long message"}
_CODE = "import os, pathlib; pathlib.Path(os.environ['CANARY']).write_text('executed')\n"
ODD: list[Any] = [
    -1, 0, 1, 2**31, 2**53, 2**63, 10**30, 1e308, -1e308, None, True, "", "x" * 100_000, "\0", "\ud800", "nan", "1e999",
    "\x1b[2J\x1b]0;x\x07", "<script>alert(1)</script>", "../../etc/passwd", "/etc/passwd", "builtin:minilm",
    "os:system", "${oc.env:HOME}", "${oc.env:CANARY}", "!!python/object/apply:os.system ['true']", "float16", "I64",
    [], {}, [[[[[[]]]]]], [1] * 1000, {"a": {"b": [{}]}}, [2**40, 2**20], [0, 2**62], {"$float": "x"},
    {"$array": {"dtype": "float64", "shape": [2**40], "base64": ""}},
]  # fmt: skip


class Fuzzer:
    """Base files, and what is done to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.base = folder / "base"
        self.canary = folder / "canary"
        os.environ["CANARY"] = str(self.canary)
        self.kinds: dict[str, Callable[[Path], object]] = {
            "export": read_model, "run": read_model, "store": read_store, "recipe": read_recipe,
            "tokenizer": read_tokenizer, "text": read_text, "log": read_log,
        }  # fmt: skip

    def make_base(self) -> None:
        """A small store, a run of two steps with its export, recipes, tokenizers, and text in every kind of file."""
        import numpy as np
        from tokenizers import Tokenizer, models, pre_tokenizers

        import mmldlm
        from mmldlm.config.recipe import list_recipes

        texts = [f"the {n} words of text {n} over the sea" for n in range(40)]
        vectors = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
        words = sorted({word for text in texts for word in text.split()})
        tokenizer = Tokenizer(
            models.WordLevel({word: n for n, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["[UNK]"])
        (self.base / "tokenizer").mkdir(parents=True)
        tokenizer.save(str(self.base / "tokenizer" / "tokenizer.json"))
        store = mmldlm.prepare((texts, vectors), self.base / "store", tokenizer=str(self.base / "tokenizer"))
        shape = {"model.preset": "tiny", "model.depth": 1, "model.width": 32, "model.latent_width": 16,
                 "model.num_heads": 2, "model.head_width": 8, "model.time_width": 16}  # fmt: skip
        steps = {
            "train.steps": 2,
            "train.checkpoint_every": 2,
            "train.trackers": [],
            "batch.tokens_per_step": 256,
        }
        small = shape | steps | {"train.device": "cpu", "data.num_workers": 0}
        mmldlm.train("laptop", store=store, run=self.base / "run", overrides=small)
        shutil.copytree(self.base / "run" / "export", self.base / "export")
        shutil.rmtree(self.base / "run" / "export")
        auto_map = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["code.Evil", None]}}
        (self.base / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(auto_map))
        (self.base / "tokenizer" / "code.py").write_text(_CODE + "class Evil: pass\n")
        (self.base / "recipe").mkdir()
        shutil.copy(list_recipes()["wordnet"], self.base / "recipe" / "short.yaml")
        shutil.copy(self.base / "run" / "config.yaml", self.base / "recipe" / "whole.yaml")
        (self.base / "log").mkdir()
        shutil.copy(self.base / "run" / "training_log.jsonl", self.base / "log")
        write_texts(self.base / "text", texts, vectors)

    def case(self, kind: str) -> str:
        """Change a copy of the base files of a kind, read it, and say what came of it."""
        place = self.folder / "case" / kind
        shutil.rmtree(place.parent, ignore_errors=True)
        shutil.copytree(self.base / kind, place)
        self.change(place)
        if self.random.random() < 0.5:
            with contextlib.suppress(Exception):  # what cannot be signed again stays as it is
                sign(kind, place)
        self.canary.unlink(missing_ok=True)
        outcome = self.read(kind, place)
        return "code executed" if self.canary.exists() else outcome

    def change(self, place: Path) -> None:
        """One to three changes to one or two files."""
        paths = [path for path in sorted(place.rglob("*")) if path.is_file() and path.stat().st_size]
        for path in self.random.sample(paths, min(len(paths), self.random.choice([1, 1, 1, 2]))):
            for _ in range(self.random.choice([1, 1, 2, 3])):
                ways = [self.change_bytes] * 2 + [self.change_values] * 3
                with contextlib.suppress(Exception):  # what is broken already is not changed again
                    self.random.choice(ways)(path)

    def change_bytes(self, path: Path) -> None:
        """Flip, cut, repeat, insert or overwrite."""
        content, draw = bytearray(path.read_bytes()), self.random
        start = draw.randrange(len(content) + 1)
        size = min(draw.choice([1, 1, 4, 8, 64, 4096]), len(content) - start)
        way = draw.choice(["flip", "flip", "cut", "end", "repeat", "insert", "overwrite", "remove"])
        if way == "flip" and content:
            content[start % len(content)] ^= 1 << draw.randrange(8)
        elif way == "cut":
            del content[start : start + size]
        elif way == "end":
            del content[start:]
        elif way == "repeat":
            content[start:start] = content[start : start + size] * draw.choice([1, 2, 50])
        elif way == "insert":
            content[start:start] = draw.choice(
                [b"[" * 20_000, b"{a: " * 3000, b"9" * 5000, b"\0" * 100, b"&a [*a]", b"\xff\xfe", b"\n\n"]
            )
        elif way == "overwrite":
            content[start : start + size] = draw.randbytes(size)
        path.write_bytes(content)
        if way == "remove" and draw.random() < 0.3:
            path.unlink()

    def change_values(self, path: Path) -> None:
        """Another value, key or nesting inside JSON, the header of safetensors, YAML, a table, an Arrow file."""
        if path.suffix == ".safetensors":
            content = path.read_bytes()
            (size,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8 : 8 + size])
            notes = header.get("__metadata__", {})
            key = self.random.choice(sorted(notes)) if notes and self.random.random() < 0.7 else None
            if key is not None and notes[key][:1] in "{[":
                notes[key] = json.dumps(self.changed(json.loads(notes[key])))
            else:
                header = self.changed(header)
            text = json.dumps(header).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
        elif path.suffix == ".json":
            path.write_text(json.dumps(self.changed(json.loads(path.read_bytes()))))
        elif path.suffix in (".yaml", ".yml"):
            import yaml

            path.write_text(yaml.safe_dump(self.changed(yaml.safe_load(path.read_text()))))
        elif path.suffix == ".jsonl":
            lines = path.read_text().splitlines()
            at = self.random.randrange(len(lines))
            lines[at] = json.dumps(self.changed(json.loads(lines[at])))
            path.write_text("\n".join(lines))
        elif path.suffix == ".npy":
            content = path.read_bytes()
            shape = self.random.choice([b"(99999999999,)", b"(-1,)", b"(0,)", b"(2, 2, 2)"])
            path.write_bytes(content[:10] + content[10:128].replace(b"(40,)", shape) + content[128:])
        else:
            self.change_bytes(path)

    def changed(self, value: Any) -> Any:
        """The value with one odd thing in it, at a random place."""
        value, draw = copy.deepcopy(value), self.random
        parent, key, current = None, None, value
        while isinstance(current, dict | list) and current and (parent is None or draw.random() < 0.8):
            parent, key = (
                current,
                draw.choice(list(current) if isinstance(current, dict) else range(len(current))),
            )
            current = parent[key]
        if parent is None:
            return draw.choice(ODD)
        way = draw.random()
        if way < 0.15:
            del parent[key]
        elif way < 0.25 and isinstance(parent, dict):
            parent[draw.choice(["extra", "", "x.y", "model.depth"])] = draw.choice(ODD)
        else:
            parent[key] = draw.choice([*ODD, [current], {"x": current}, str(current)])
        return value

    def read(self, kind: str, place: Path) -> str:
        """In a process of its own: the outcome; the output of anything but clean ones is shown."""
        output = self.folder / "output"
        child = os.fork()
        if not child:
            run_limited(self.kinds[kind], place, output)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed = os.WTERMSIG(status)
            outcome = "hang" if killed in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL) else "crash"
        else:
            outcome = _CODES.get(os.WEXITSTATUS(status), "crash")
        if outcome not in ("clean error", "loaded"):
            tail = output.read_text("utf-8", "replace")[-1500:]
            print(f"--- {outcome}: {kind}, case kept in {self.keep(kind, place)}\n{tail}", flush=True)
        return outcome

    def keep(self, kind: str, place: Path) -> Path:
        """A copy of a case that went wrong."""
        kept = (
            Path(tempfile.gettempdir())
            / "fuzz-files"
            / f"{kind}-{os.getpid()}-{self.random.randrange(10**6)}"
        )
        shutil.copytree(place, kept)
        return kept


def run_limited(action: Callable[[Path], object], place: Path, output: Path) -> None:
    """Never returns: reads the files under limits and leaves with a code that names the outcome."""
    code = 3
    try:
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        answer, ask = os.pipe()
        os.write(ask, b"y\n" * 100)
        for fd, target in ((answer, 0), (out, 1), (out, 2)):
            os.dup2(fd, target)
        os.close(ask)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, used + MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(10 * MOST_SECONDS)
        code = outcome_of(action, place)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def outcome_of(action: Callable[[Path], object], place: Path) -> int:
    """Read the files; a clean error is one line."""
    from runwatch.errors import UserError as WatchError

    from mmldlm.errors import UserError

    try:
        action(place)
    except (UserError, WatchError) as error:
        print(error)
        if len(str(error)) <= 2000 and str(error).count("\n") < 2:
            return 2
        print("a long message:", str(error)[:1000])
        return 5
    except BaseException as error:
        traceback.print_exc()
        full = (
            isinstance(error, MemoryError) or "alloc" in str(error).lower() or "memory" in str(error).lower()
        )
        return 4 if full else 3
    return 0


def read_model(place: Path) -> None:
    """As decode does: weights, settings, tokenizer, one text."""
    import mmldlm
    from mmldlm.api.runs import read_run
    from mmldlm.run_folder import RunFolder

    if RunFolder(place).config.exists():
        read_run(place)
    model = mmldlm.load(place, device="cpu")
    model.tokenize(["the words of the sea"])
    model.decode(model.encode(["the sea"], steps=1), lengths=3, steps=1)


def read_store(place: Path) -> None:
    """As `data inspect` and training do."""
    import numpy as np

    from mmldlm.data.store import PairStore
    from mmldlm.data.tokenizer import Tokenizer

    store = PairStore.open(place)
    store.summary()
    for split in store.splits.values():
        split.read(np.arange(len(split)))
        split.read_texts(np.arange(len(split)))
        store.token_counts(split.name)
    folder = store.tokenizer_path()
    if folder is not None:
        Tokenizer.load(folder)


def read_recipe(place: Path) -> None:
    """As `train` does, and as saved settings are read."""
    from mmldlm.config.recipe import config_from_dict, load_recipe, read_mapping
    from mmldlm.errors import UserError

    problems = []
    for path in sorted(place.iterdir()):
        for read in (
            lambda path: load_recipe(str(path)),
            lambda path: config_from_dict(read_mapping(path, "settings")),
        ):
            try:
                config = read(path)
                if (
                    os.environ["CANARY"] in repr(config)
                    and read is not None
                    and "CANARY" not in path.read_text()
                ):
                    raise RuntimeError("the environment was read")
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise UserError(problems[0])


def read_tokenizer(place: Path) -> None:
    """With and without tokenizer.json, beside which lies code."""
    from mmldlm.data.tokenizer import Tokenizer

    Tokenizer.load(place).encode_batch(["the words of the sea", "", "\0"])


def read_text(place: Path) -> None:
    """As `prepare` does, all but the encoder."""
    from mmldlm.errors import UserError
    from mmldlm.preparation.settings import PrepareSettings
    from mmldlm.preparation.sources import resolve

    problems = []
    for path in sorted(place.iterdir()):
        try:
            sum(1 for _ in resolve(PrepareSettings((str(path),))))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError(problems[0])


def read_log(place: Path) -> None:
    """As the monitor does, with its page."""
    from runwatch import cli

    sys.argv = ["runwatch", str(place), "--once"]
    with contextlib.suppress(SystemExit):
        cli.main()


def sign(kind: str, place: Path) -> None:
    """Compute the checksums again."""
    from mmldlm.checkpoint.files import Entry, Manifest, write_manifest
    from mmldlm.data.files import block_sums, file_entry
    from mmldlm.data.format import checksum
    from mmldlm.durable import read_digest

    if kind == "store":
        for path in place.rglob("*.arrow"):
            path.with_suffix(".crc32").write_bytes(block_sums(path.read_bytes()))
        body = json.loads((place / "manifest.json").read_bytes())
        body.pop("checksum", None)
        for name in body["files"]:
            body["files"][name] = file_entry(place / name)
        for split in body["splits"].values():
            for shard in split["shards"]:
                shard.update(file_entry(place / shard["file"]))
        (place / "manifest.json").write_text(json.dumps(body | {"checksum": checksum(body)}))
    for path in place.rglob("manifest.json") if kind in ("export", "run") else ():
        body = json.loads(path.read_bytes())["manifest"]
        files = []
        for item in body["files"]:
            digest = read_digest(path.parent / item["name"])
            files.append(Entry(item["name"], item["group"], digest.size, digest.sha256))
        path.unlink()
        write_manifest(path.parent, Manifest(**(body | {"files": tuple(files)})))


def write_texts(folder: Path, texts: list[str], vectors: Any) -> None:
    """The same rows as every kind of file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    rows = [{"text": text, "latent": vector.tolist()} for text, vector in zip(texts, vectors, strict=True)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = pa.table({"text": texts, "latent": [row["latent"] for row in rows]})
    (folder / "a.txt").write_text("\n".join(texts))
    (folder / "b.jsonl").write_text(lines)
    (folder / "c.json").write_text(json.dumps(rows))
    (folder / "d.csv").write_text("text,other\n" + "".join(f'"{text}",1\n' for text in texts))
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(table, folder / "f.parquet")
    with pa.ipc.new_file(folder / "g.arrow", table.schema) as out:
        out.write_table(table)
    with pa.ipc.new_stream(folder / "h.arrow", table.schema) as out:
        out.write_table(table)


def main() -> None:
    """Fuzz until the time is over; a line a minute, a table at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seconds", nargs="?", type=float, default=60.0)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--kind", action="append")
    words = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), words.seed)
        fuzzer.make_base()
        for (
            kind,
            read,
        ) in fuzzer.kinds.items():  # whatever is imported now is not imported by every process again
            if outcome_of(read, fuzzer.base / kind):
                raise SystemExit(f"{kind}: cannot be read before it is changed")
        kinds, began, shown = words.kind or list(fuzzer.kinds), time.monotonic(), 0.0
        while time.monotonic() - began < words.seconds:
            kind = kinds[sum(map(Counter.total, counts.values())) % len(kinds)]
            counts.setdefault(kind, Counter())[fuzzer.case(kind)] += 1
            if time.monotonic() - shown > 60:
                shown = time.monotonic()
                print(f"{shown - began:6.0f} s  {dict(sum(counts.values(), Counter()))}", flush=True)
    print("| kind | tries | " + " | ".join(OUTCOMES) + " |\n|" + "---|" * (len(OUTCOMES) + 2))
    for name, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        print(
            f"| {name} | {count.total()} | " + " | ".join(str(count[outcome]) for outcome in OUTCOMES) + " |"
        )
    bad = sum(count[outcome] for count in counts.values() for outcome in OUTCOMES[2:])
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
