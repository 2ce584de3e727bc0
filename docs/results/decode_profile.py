"""Where a decode on a CPU goes, docs/benchmarks.md: python docs/results/decode_profile.py RUN STORE [N [PRECISION]]

Latents of the training split into texts, 16 steps, order by margin, one thread. Shares of the time of all operations.
"""

import sys
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import mmldlm
from mmldlm.model.frozen import FrozenDenoiser, Hidden
from mmldlm.sampling import orders

KINDS = {
    "products": ("mkldnn::_linear_pointwise", "aten::addmm", "aten::mm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "softmax and best values": ("aten::_softmax", "aten::amax", "aten::topk"),
}


def marked(name: str, function: Any) -> Any:
    """The function, seen by the profiler."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return call


def part_of(event: Any) -> str:
    """Network, vocabulary or rest, and what kind of operation."""
    kind = next((kind for kind, names in KINDS.items() if event.name in names), "other operations and Python")
    while event is not None and event.name not in ("network", "vocabulary"):
        event = event.cpu_parent
    return f"{event.name}: {kind}" if event is not None else "choosing, planning, tokenizer"


torch.set_num_threads(1)
precision = sys.argv[4] if len(sys.argv) > 4 else None
model = mmldlm.load(sys.argv[1], "cpu", precision=precision)
count = int(sys.argv[3]) if len(sys.argv) > 3 else 128
latents = mmldlm.PairStore.open(sys.argv[2]).splits["train"].read(np.arange(count)).latents
FrozenDenoiser.__call__ = marked("network", FrozenDenoiser.__call__)  # type: ignore[method-assign]
Hidden.tokens = marked("network", Hidden.tokens)  # type: ignore[method-assign]
orders.best_of_rows = marked("vocabulary", orders.best_of_rows)
options: dict[str, Any] = {"steps": 16, "order": "margin", "temperature": 0, "candidates": 1}
model.decode(latents[:16], **options)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    model.decode(latents, **options)
shares: Counter[str] = Counter()
for event in profiler.events():
    shares[part_of(event)] += event.self_cpu_time_total
for part, microseconds in shares.most_common():
    print(f"{part:45s} {microseconds / shares.total():6.1%}")
