"""The curve "How much text one needs" of docs/results.md: python docs/results/curve.py CORPUS OUT [key=value ...]

CORPUS is the folder that `curve_corpus.py` has written. Of its sentences the first 10,000, 30,000 and so on, in one
fixed random order, become pair stores; on each a model is trained for the same number of steps of the same size, with
the settings of recipe `wordnet` and those given here, and judged on the same held-out sentences. Arms may share a GPU
(--jobs): compute is counted in steps, so the curve does not depend on it. Written are OUT/curve.json and OUT/curve.png.

    python docs/results/curve.py corpus saved/curve --steps 2000 --jobs 3
    python docs/results/curve.py corpus saved/curve-derived --steps 2000 --jobs 3 --derive 4 --sizes 10000 30000 100000
"""

import argparse
import json
import lzma
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from curve_corpus import order
from judge import judge, rounded

import mmldlm

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
PLOTTED = ("true length: tokens right", "own length: BLEU", "text bound", "t2l: cosine")


def sentences(path: Path) -> list[str]:
    """In their fixed random order."""
    return sorted(lzma.decompress(path.read_bytes()).decode().splitlines(), key=order)


def train_one(words: argparse.Namespace, size: int) -> dict[str, Any]:
    """Prepare, train and judge one arm."""
    folder = words.out / str(size)
    folder.mkdir(parents=True, exist_ok=True)
    texts = sentences(words.corpus / "train.txt.xz")[:size]
    (folder / "train.txt").write_text("\n".join(texts))
    (folder / "validation.txt").write_text("\n".join(sentences(words.corpus / "validation.txt.xz")))
    began = time.perf_counter()
    store = mmldlm.prepare(
        folder / "train.txt", folder / "store", validation_source=folder / "validation.txt", text_unit="line",
        max_tokens=64, derive=words.derive,
    )  # fmt: skip
    prepared = time.perf_counter()
    overrides = [f"train.steps={words.steps}", "train.valid_every=0", f"train.checkpoint_every={words.steps}"]
    run = mmldlm.train(
        "wordnet",
        store=store,
        run=folder / "run",
        overrides=[*overrides, "train.trackers=[]", *words.settings],
    )
    trained = time.perf_counter()
    result = judge(mmldlm.load(run), store.splits["validation"], generated=0)
    return {
        "sentences": len(texts), "words": sum(len(text.split()) for text in texts),
        "pairs": len(store.splits["train"]), "derive": words.derive,
        "steps": words.steps, "seconds to prepare": round(prepared - began, 1),
        "seconds to train": round(trained - prepared, 1),
    } | rounded(result)  # fmt: skip


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Four pictures over the number of sentences."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(16, 3.6))
    for axis, name in zip(axes, PLOTTED, strict=True):
        axis.plot([row["sentences"] for row in rows], [row[name] for row in rows], marker="o")
        axis.set(xscale="log", xlabel="different training sentences", title=name)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(words: argparse.Namespace) -> None:
    """Run all arms, some at a time, each in a process of its own."""
    words.out.mkdir(parents=True, exist_ok=True)
    waiting, running = sorted(words.sizes, reverse=True), []  # the longest first
    while waiting or running:
        while waiting and len(running) < words.jobs:
            line = [sys.executable, *sys.argv, "--one", str(waiting.pop(0))]
            running.append(subprocess.Popen(line, stdout=subprocess.DEVNULL))
        time.sleep(0.5)
        running = [process for process in running if process.poll() is None]
    rows = [json.loads(path.read_text()) for path in words.out.glob("*.arm.json")]
    rows.sort(key=lambda row: row["sentences"])
    (words.out / "curve.json").write_text(json.dumps(rows, indent=1))
    plot(rows, words.out / "curve.png")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="*", default=[], help="such as model.preset=tiny")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--derive", type=int, default=0)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    words = parser.parse_intermixed_args()
    if words.one is None:
        main(words)
    else:
        (words.out / f"{words.one}.arm.json").write_text(json.dumps(train_one(words, words.one)))
