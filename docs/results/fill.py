"""How full batches counted in documents are, docs/speed.md: python docs/results/fill.py TEXTS.jsonl.gz [LONGEST]

2,000 random steps of the texts (objects with `text`), cut at LONGEST tokens (64), with one size of micro-batch and with
several.
"""

import gzip
import json
import sys
from dataclasses import replace

import numpy as np

from mmldlm.config import BatchConfig
from mmldlm.data.packing import Lengths, StepShape, pack, plan_shape
from mmldlm.data.tokenizer import Tokenizer


def fill(steps: list[np.ndarray], shape: StepShape) -> float:
    """Tokens over the room of all micro-batches."""
    sums = [int(step[part].sum()) for step in steps for part in pack(step, shape)]
    return sum(sums) / sum(shape.caps_for(tokens).num_tokens for tokens in sums)


longest = int(sys.argv[2]) if len(sys.argv) > 2 else 64
with gzip.open(sys.argv[1], "rt", encoding="utf-8") as lines:
    texts = [json.loads(line)["text"] for line in lines]
lengths = np.array([len(ids) for ids in Tokenizer.load("builtin:minilm").encode_batch(texts)]).clip(
    1, longest
)
print(f"{len(lengths)} texts, {lengths.mean():.1f} tokens on average, deviation {lengths.std():.1f}")
random = np.random.default_rng(0)
for documents in (4, 8, 32, 128, 512, 2048):
    batch = BatchConfig(tokens_per_step=None, documents_per_step=documents)
    shape = plan_shape(batch, Lengths.of(lengths, int(lengths.max())))
    steps = [random.choice(lengths, documents) for _ in range(2000)]
    one, several = fill(steps, replace(shape, sizes=())), fill(steps, shape)
    print(
        f"{documents} documents a step: {100 * one:.1f} % with one size, {100 * several:.1f} % with several"
    )
