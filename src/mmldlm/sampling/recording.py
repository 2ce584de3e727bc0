"""Passes of the network recorded as CUDA graphs: one launch instead of hundreds.

A graph works on fixed memory, so inputs are copied into the buffers of a recording, and results out of them. Layouts
are filled up to a few sizes, each of which gets a recording; all share one pool of memory. The first pass of a shape
runs plainly, which also compiles kernels; the second is recorded.
Shapes: N documents, T tokens, S latent slots, C latent channels, D width.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmldlm import runtime
from mmldlm.layout import Caps, Layout, packed_layout
from mmldlm.types import map_tensors

log = logging.getLogger(__name__)
MOST_RECORDINGS = 64
"""Further shapes run plainly."""
_SMALLEST = 64


@dataclass(frozen=True)
class PassInputs:
    """What the network reads, filled up to the layout's sizes."""

    tokens: Tensor
    """(T,)"""
    latents: Tensor
    """(N, S, C)"""
    text_time: Tensor
    """(N,)"""
    latent_time: Tensor
    """(N,)"""


Outputs = tuple[Tensor, Tensor]
"""Hidden states (T, D) and the latent prediction (N, S, C)."""
Pass = Callable[[PassInputs, Layout], Outputs]


def rounded_layout(lengths: np.ndarray, num_slots: int) -> Layout:
    """A layout of sizes that many packs share.

    The number of tokens is rounded up to an eighth of a power of two, that of documents to a quarter.
    """
    longest = 1 << max(int(lengths.max()) - 1, 15).bit_length()
    caps = Caps(_round(int(lengths.sum()), 8), _round(len(lengths), 4), longest)
    return packed_layout(lengths, num_slots, caps, with_rows=False)


def _round(count: int, parts: int) -> int:
    count = max(count, _SMALLEST)
    step = max((1 << (count.bit_length() - 1)) // parts, 1)
    return -(-count // step) * step


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: PassInputs
    layout: Layout
    outputs: Outputs
    present: Layout | None = None
    """Whose numbers are in the buffer."""


@dataclass
class Recordings:
    """Runs passes, recorded where that is possible. Threads may share it."""

    recordings: dict[Any, _Recording] = field(default_factory=dict)
    """By the sizes of layout and latents."""
    seen: set[Any] = field(default_factory=set)
    broken: str = ""
    """Why nothing can be recorded, if so."""
    _pool: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, run: Pass, inputs: PassInputs, layout: Layout) -> Outputs:
        """One pass. The results have the sizes of the layout and are the caller's own."""
        with self._lock:
            recording = self._find(run, inputs, layout)
            if recording is None:
                return run(_filled(inputs, layout), layout)
            if recording.present is not layout:
                _copy(layout, recording.layout)
                recording.present = layout
            _copy(inputs, recording.inputs)
            recording.graph.replay()
            hidden, latents = recording.outputs
            return hidden.clone(), latents.clone()

    def _find(self, run: Pass, inputs: PassInputs, layout: Layout) -> _Recording | None:
        sizes = (layout.num_tokens, layout.num_documents, len(layout.bounds), layout.max_segment)
        key = (*sizes, inputs.latents.shape[1:])
        if key in self.recordings:
            return self.recordings[key]
        if key not in self.seen:
            self.seen.add(key)
            return None
        if self.broken or len(self.recordings) >= MOST_RECORDINGS:
            return None
        try:
            self.recordings[key] = self._record(run, inputs, layout)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.broken = str(error).split("\n")[0]
            log.warning("passes cannot be recorded here, continuing without: %s", self.broken)
            return None
        return self.recordings[key]

    def _record(self, run: Pass, inputs: PassInputs, layout: Layout) -> _Recording:
        own = map_tensors(layout, Tensor.clone)
        filled = map_tensors(_filled(inputs, layout), Tensor.clone)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with runtime.recording(graph, self._pool, stream):
            outputs = run(filled, own)
        self._pool = graph.pool()
        return _Recording(graph, filled, own, outputs)


def _filled(inputs: PassInputs, layout: Layout) -> PassInputs:
    """The inputs in tensors of the layout's sizes; what fills them up is never read."""
    num_tokens, num_documents = layout.num_tokens, layout.num_documents
    if len(inputs.tokens) == num_tokens and len(inputs.text_time) == num_documents:
        return inputs
    filled = PassInputs(
        inputs.tokens.new_zeros(num_tokens),
        inputs.latents.new_zeros(num_documents, *inputs.latents.shape[1:]),
        inputs.text_time.new_zeros(num_documents),
        inputs.latent_time.new_zeros(num_documents),
    )
    _copy(inputs, filled)
    return filled


def _copy(source: PassInputs | Layout, goal: PassInputs | Layout) -> None:
    """Every tensor into the beginning of its twin."""
    for item in fields(source):
        values = getattr(source, item.name)
        if isinstance(values, Tensor):
            getattr(goal, item.name)[: len(values)].copy_(values)
