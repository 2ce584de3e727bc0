"""Where a decode goes, docs/benchmarks.md: python docs/results/decode_profile.py RUN STORE [N [PRECISION [DEVICE]]]

Latents of the training split into texts, 16 steps, order by margin. On a CPU, one thread: shares of the time of all
operations. On a GPU: kernels, milliseconds, share of the whole call in which the device worked; passes run
plainly in the first call and are recorded in the second, so the third is timed and the fourth profiled.
"""

import sys
import time
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


KERNELS = {
    "attention": ("flash", "sdpa", "tiles", "fmha"),
    "products": ("nvjet", "gemm", "cublas", "cutlass"),
    "norms, modulation, GELU, rows into attention": ("_forward_kernel", "_gelu", "gather_kernel", "index"),
    "best tokens": ("best", "topk", "sort", "softmax", "amax", "argmax", "reduce", "radix"),
    "copies": ("memcpy", "memset", "copy"),
}


def on_gpu(latents: np.ndarray) -> None:
    """Times the third call and profiles the fourth: by then everything is compiled and recorded."""
    for _ in range(2):
        model.decode(latents, **options)
    torch.cuda.synchronize()
    began = time.perf_counter()
    model.decode(latents, **options)
    torch.cuda.synchronize()
    whole = 1e3 * (time.perf_counter() - began)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        model.decode(latents, **options)
        torch.cuda.synchronize()
    kinds: Counter[str] = Counter()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows:
        name = row.key.lower()
        kind = next(
            (kind for kind, words in KERNELS.items() if any(word in name for word in words)), "others"
        )
        kinds[kind] += row.self_device_time_total / 1e3
    print(
        f"{len(latents)} texts in {whole:.1f} ms, kernels {kinds.total():.1f} ms ({kinds.total() / whole:.1%})"
    )
    for kind, milliseconds in kinds.most_common():
        print(f"{kind:50s} {milliseconds:9.2f} ms {milliseconds / kinds.total():6.1%}")
    for row in rows[:12]:
        print(f"  {row.self_device_time_total / 1e3:9.2f} ms {row.count:7d} x  {row.key[:90]}")


torch.set_num_threads(1)
precision = sys.argv[4] if len(sys.argv) > 4 else None
device = sys.argv[5] if len(sys.argv) > 5 else "cpu"
model = mmldlm.load(sys.argv[1], device, precision=precision)
count = int(sys.argv[3]) if len(sys.argv) > 3 else 128
latents = mmldlm.PairStore.open(sys.argv[2]).splits["train"].read(np.arange(count)).latents
options: dict[str, Any] = {"steps": 16, "order": "margin", "temperature": 0, "candidates": 1}
if device != "cpu":
    on_gpu(latents)
    sys.exit()
FrozenDenoiser.__call__ = marked("network", FrozenDenoiser.__call__)  # type: ignore[method-assign]
Hidden.tokens = marked("network", Hidden.tokens)  # type: ignore[method-assign]
orders.best_of_rows = marked("vocabulary", orders.best_of_rows)
model.decode(latents[:16], **options)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    model.decode(latents, **options)
shares: Counter[str] = Counter()
for event in profiler.events():
    shares[part_of(event)] += event.self_cpu_time_total
for part, microseconds in shares.most_common():
    print(f"{part:45s} {microseconds / shares.total():6.1%}")
