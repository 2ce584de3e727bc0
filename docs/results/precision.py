"""What bf16 changes on a CPU, docs/benchmarks.md: python docs/results/precision.py MODEL SENTENCES.jsonl[.gz] [N]

The first N sentences (objects with `text`) through encoder and model, in bf16 and in fp32.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import mmldlm

path, num = Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 600
content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
texts = [json.loads(line)["text"] for line in content.splitlines()[:num]]
results: dict[str, list[Any]] = {}
for precision in ("bf16", "fp32"):
    model = mmldlm.load(sys.argv[1], "cpu", precision=precision)
    latents, original = model.embed(texts), model.tokenize(texts)
    lengths = [len(text) for text in original]
    results[precision] = [
        original, model.decode(latents, lengths=lengths), model.decode(latents), model.encode(texts)
    ]  # fmt: skip
    encoded = results[precision][3]
    norms = np.linalg.norm(encoded, axis=-1) * np.linalg.norm(latents, axis=-1)
    print(precision, "t2l cosine", round(float(((encoded * latents).sum(-1) / norms).mean()), 5), flush=True)


def compare(name: str, ours: list[Any], theirs: list[Any]) -> None:
    """How many texts are the same, and how many tokens in their places."""
    pairs = [
        (np.asarray(getattr(a, "tokens", a)), np.asarray(getattr(b, "tokens", b)))
        for a, b in zip(ours, theirs, strict=True)
    ]
    same = sum(np.array_equal(a, b) for a, b in pairs)
    tokens = sum(int((a[: len(b)] == b[: len(a)]).sum()) for a, b in pairs) / sum(len(b) for _, b in pairs)
    print(f"{name}: {same} of {len(pairs)} texts the same, {tokens:.2%} of their tokens")


for place, length in ((1, "length known"), (2, "length unknown")):
    for precision, parts in results.items():
        compare(f"{length}, {precision} against the sentences", parts[place], parts[0])
    compare(f"{length}, bf16 against fp32", results["bf16"][place], results["fp32"][place])
