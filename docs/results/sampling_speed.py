"""Table "Sampling from files" of docs/benchmarks.md: python docs/results/sampling_speed.py RUN STORE [N [PRECISION]]

Latents and texts of the training split, from a file into a file, each three times: the first call compiles, and the
second still records passes whose size occurred once in the first. Seconds of the CPU measure a CPU that others use too.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mmldlm
from mmldlm.api.files import process_file
from mmldlm.cli.records import text_records

precision = {"precision": sys.argv[4]} if len(sys.argv) > 4 else {}
model, count = mmldlm.load(sys.argv[1], **precision), int(sys.argv[3]) if len(sys.argv) > 3 else 24576
split = mmldlm.PairStore.open(sys.argv[2]).splits["train"]
folder = Path(tempfile.mkdtemp())
np.save(folder / "in.npy", split.read(np.arange(count)).latents)
lines = [" ".join(str(text).split()) for text in split.read_texts(np.arange(count))]
(folder / "in.txt").write_text("\n".join(lines) + "\n")
options = {"steps": 16, "order": "margin", "temperature": 0}


def decode(inputs: Any, progress: Any) -> Any:
    """Latents to texts, one length each."""
    texts = model.decode(inputs.latents, ids=inputs.ids, progress=progress, candidates=1, **options)
    return text_records(texts)


def encode(inputs: Any, progress: Any) -> Any:
    """Texts to latents."""
    return model.encode(inputs.texts, ids=inputs.ids, progress=progress, steps=16)


def through(source: str, act: Callable[..., Any], kind: str) -> Callable[[int], Any]:
    """A file through the model, into a new file."""
    return lambda turn: process_file(model, folder / source, folder / f"{turn}{kind}", act, [kind])


for name, call in (
    ("latents to texts", through("in.npy", decode, ".jsonl")),
    ("texts to latents", through("in.txt", encode, ".npy")),
    (
        "both from nothing",
        lambda turn: model.generate(count, latent_steps=16, turns="interleaved", **options),
    ),
):
    for turn in range(3):
        began, busy = time.perf_counter(), time.process_time()
        call(turn)
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        speeds = {"texts per second": round(count / seconds, 1), "per CPU second": round(count / busy, 1)}
        print(json.dumps({"what": name, "call": turn + 1, **speeds}), flush=True)
