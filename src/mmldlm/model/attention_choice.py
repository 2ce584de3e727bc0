"""Which attention is fastest for a layout: measured once on the device at hand, then remembered in a file."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
from pathlib import Path

import torch
from torch import Tensor

from mmldlm.durable import replace_file
from mmldlm.layout import Layout
from mmldlm.model.attention import attend
from mmldlm.runtime import TILE_WIDTHS

log = logging.getLogger(__name__)
_WARM_UPS, _REPEATS = 3, 9


def candidates(layout: Layout, head_width: int, *, kernels: bool) -> list[str]:
    """The backends that are worth a try on a GPU with flash attention."""
    found = ["varlen"]
    if kernels and head_width in TILE_WIDTHS:
        found.append("tiles")
    if layout.full:
        found.append("sdpa")
    return found


def choose_attention_for(
    layout: Layout, num_heads: int, head_width: int, dtype: torch.dtype, names: list[str]
) -> str:
    """The fastest of these backends for forward and backward; `layout` is on the device."""
    if len(names) == 1:
        return names[0]
    key, memory = _key(layout, num_heads, head_width, dtype), _recall()
    known = memory.get(key, {})
    if set(known) != set(names):
        known = {name: _measure(layout, num_heads, head_width, dtype, name) for name in names}
        if all(math.isfinite(ms) for ms in known.values()):  # what failed may work when memory is free
            _remember(key, known)
    best = min(known, key=lambda name: known[name])
    times = ", ".join(f"{name} {known[name]:.2f} ms" for name in sorted(known, key=lambda name: known[name]))
    log.info("attention: %s (forward and backward of one block: %s)", best, times)
    return best


def _measure(layout: Layout, num_heads: int, head_width: int, dtype: torch.dtype, name: str) -> float:
    """Median milliseconds of a forward and backward pass; infinite where the backend fails."""
    places = len(layout.segment)
    generator = torch.Generator(layout.segment.device).manual_seed(0)
    shape = (places, 3, num_heads, head_width)
    qkv = torch.randn(shape, device=layout.segment.device, dtype=dtype, generator=generator).requires_grad_()
    try:
        return statistics.median(_times(qkv, layout, name))
    except Exception as error:
        log.warning("attention %s cannot be used here: %s", name, str(error).split("\n")[0])
        return float("inf")


def _times(qkv: Tensor, layout: Layout, name: str) -> list[float]:
    found = []
    for repeat in range(_WARM_UPS + _REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out = attend(qkv, layout, name)
        out.backward(out.detach())
        end.record()
        torch.cuda.synchronize()
        if repeat >= _WARM_UPS:
            found.append(begin.elapsed_time(end))
    return found


def _key(layout: Layout, num_heads: int, head_width: int, dtype: torch.dtype) -> str:
    """What the times depend on; mean length in steps of a quarter, so that every batch of a run agrees."""
    lengths = layout.lengths[layout.lengths > 0].float()
    mean = 2.0 ** (torch.log2(lengths.mean()).mul(4).round().div(4).item())
    kind = "equal" if layout.full else "packed"
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {kind}, {len(layout.segment)} places, "
        f"mean {mean:.0f}, longest {layout.max_segment}, {num_heads} x {head_width}, {str(dtype).split('.')[-1]}"
    )


def memory_file() -> Path:
    """Where measurements are remembered."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mmldlm" / "attention.json"


def _recall() -> dict[str, dict[str, float]]:
    try:
        content = json.loads(memory_file().read_text())
        return {key: {name: float(ms) for name, ms in times.items()} for key, times in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(key: str, times: dict[str, float]) -> None:
    content = _recall() | {key: {name: round(ms, 4) for name, ms in times.items()}}
    try:
        memory_file().parent.mkdir(parents=True, exist_ok=True)
        replace_file(memory_file(), (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        log.info("%s: cannot be written (%s); attention is measured again next time", memory_file(), error)
