"""Micro-batches recorded as CUDA graphs: a launch of one graph instead of thousands of kernels.

A graph works on fixed memory, so a micro-batch is copied into the buffer of the recording, and gradients are added in
place. Shapes differ only in the number of chunks of scored rows; each gets a recording of its own, all in one pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mmldlm.objective.joint import LossTerms
from mmldlm.types import MicroBatch, Parcel, Slot

log = logging.getLogger(__name__)

Pass = Callable[[MicroBatch], LossTerms]


@dataclass
class Recording:
    """One shape of micro-batch."""

    graph: torch.cuda.CUDAGraph
    parcel: Parcel[MicroBatch]
    terms: LossTerms


@dataclass
class Graphs:
    """Replays a micro-batch; the first of each shape runs plainly, which also compiles, the second is recorded."""

    recordings: dict[tuple[Slot, ...], Recording] = field(default_factory=dict)
    seen: set[tuple[Slot, ...]] = field(default_factory=set)
    peak: int = 0
    """Most bytes that were allocated while recording; replays allocate nothing that PyTorch would count."""
    broken: str = ""
    """Why nothing can be recorded, if so."""
    _pool: Any = None

    def __call__(self, parcel: Parcel[MicroBatch], run: Pass) -> LossTerms:
        """Forward and backward of a micro-batch that is on the device."""
        if parcel.slots not in self.seen:
            self.seen.add(parcel.slots)
            return run(parcel.open())
        if parcel.slots not in self.recordings and not self._try_recording(parcel, run):
            return run(parcel.open())
        recording = self.recordings[parcel.slots]
        recording.parcel.buffer.copy_(parcel.buffer)
        recording.graph.replay()
        return recording.terms.copy()

    def _try_recording(self, parcel: Parcel[MicroBatch], run: Pass) -> bool:
        if self.broken:
            return False
        try:
            self.recordings[parcel.slots] = self._record(parcel, run)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.broken = str(error).split("\n")[0]
            log.warning("micro-batches cannot be recorded here, going on without: %s", self.broken)
            self.recordings.clear()
            return False
        return True

    def _record(self, parcel: Parcel[MicroBatch], run: Pass) -> Recording:
        own = parcel.with_buffer(parcel.buffer.clone())
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # only this thread is watched: the loader's thread may take page-locked memory meanwhile
        mode, stream = "thread_local", torch.cuda.current_stream()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=mode):
            terms = run(own.open())
        self._pool = graph.pool()
        self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        return Recording(graph, own, terms)


@dataclass
class LaunchWatch:
    """Whether the host is slower at launching a step than the device at computing it; from a few steps early on."""

    device: torch.device
    first: int = 4
    """Steps before these compile."""
    steps: int = 3
    share: float = 0.85
    """Launching takes at least this share of a step."""
    shares: list[float] = field(default_factory=list)
    _done: int = 0

    def measure(self, step: Callable[[], object]) -> bool | None:
        """Run a step. True or false once it is known, None before and after."""
        self._done += 1
        if not self.first < self._done <= self.first + self.steps:
            step()
            return None
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        step()
        launched = time.perf_counter() - began
        torch.cuda.synchronize(self.device)
        self.shares.append(launched / (time.perf_counter() - began))
        if self._done < self.first + self.steps:
            return None
        return sorted(self.shares)[len(self.shares) // 2] >= self.share
