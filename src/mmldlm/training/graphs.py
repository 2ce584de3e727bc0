"""Micro-batches and updates recorded as CUDA graphs: a launch of one graph instead of thousands of kernels.

A graph works on fixed memory, so a micro-batch is copied into the buffer of the recording. Shapes differ only in the
number of chunks of scored rows; each gets a recording of its own, all in one pool. The first of them runs once as it
is, which compiles and loads what it needs; for the others that would only take memory beside that of the recordings.

Where a step is one micro-batch, the backward pass writes its gradients into memory of the recording, and an update that
was recorded with it reads them there: nothing is set to zero or added up, and before the backward pass they take no
memory. Otherwise gradients stay where they are, and recordings add to them.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmldlm.objective.joint import LossTerms
from mmldlm.runtime import recall, recording, remember
from mmldlm.types import MicroBatch, Parcel

log = logging.getLogger(__name__)

Pass = Callable[[MicroBatch], LossTerms]
Update = Callable[[], tuple[Tensor, Tensor]]
"""Returns the norm of the gradient, and whether the update was skipped."""
MOST_RECORDINGS = 32
"""Further shapes run plainly."""
Result = TypeVar("Result")


def _alike(template: Any, other: Any) -> bool:
    """Whether the kernels of both are the same: their micro-batches differ in the number of scored rows alone."""
    first, second = template.noisy, other.noisy
    return bool(first.layout == second.layout and first.tokens == second.tokens)


@dataclass
class Recording:
    """One shape of micro-batch."""

    graph: torch.cuda.CUDAGraph
    parcel: Parcel[MicroBatch]
    terms: LossTerms


@dataclass
class Graphs:
    """Replays micro-batches. A shape is recorded at once where one like it is; else its first one runs plainly."""

    recordings: dict[Any, Recording] = field(default_factory=dict)
    """By the parcel's template: its shapes, and whatever else decides what is computed."""
    seen: set[Any] = field(default_factory=set)
    peak: int = 0
    """Most bytes that were allocated while recording; replays allocate nothing that PyTorch would count."""
    broken: str = ""
    """Why nothing can be recorded, if so."""
    fresh: bool = True
    """Each pass begins without gradients, and an update follows."""
    _pool: Any = None
    _replayed: Any = None
    """Template of the last micro-batch; None where it was not replayed."""
    _updates: dict[Any, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """By the recording whose gradients they read; one for all where gradients stay where they are."""

    def __call__(self, parcel: Parcel[MicroBatch], run: Pass) -> LossTerms:
        """Forward and backward of a micro-batch that is on the device."""
        key = parcel.template
        self._replayed = None
        if key not in self.seen:
            self.seen.add(key)
            if not any(_alike(key, known) for known in self.recordings):
                return run(parcel.open())
        if key not in self.recordings and not self._try_recording(parcel, run):
            return run(parcel.open())
        known = self.recordings[key]
        known.parcel.buffer.copy_(parcel.buffer)
        known.graph.replay()
        self._replayed = key
        return known.terms.copy()

    def update(self, run: Update) -> tuple[Tensor, Tensor]:
        """The update of the weights; recorded after a pass that was, or from the second on where gradients stay."""
        key = self._replayed if self.fresh else "all"
        if self.broken or key is None:
            return run()
        if key not in self.seen:
            self.seen.add(key)
            return run()
        if key not in self._updates:
            try:
                self._updates[key] = self._capture(run, "the update")
            except Exception as error:  # out of memory too: recording has changed nothing yet
                self._give_up(error)
                return run()
        graph, results = self._updates[key]
        graph.replay()
        return results[0].clone(), results[1].clone()

    def _try_recording(self, parcel: Parcel[MicroBatch], run: Pass) -> bool:
        if self.broken or len(self.recordings) >= MOST_RECORDINGS:
            return False
        try:
            self.recordings[parcel.template] = self._record(parcel, run)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        self.broken = str(error).split("\n")[0]
        log.warning("steps cannot be recorded here, continuing without: %s", self.broken)
        self.recordings.clear()
        self._updates.clear()

    def _record(self, parcel: Parcel[MicroBatch], run: Pass) -> Recording:
        own = parcel.with_buffer(parcel.buffer.clone())
        graph, terms = self._capture(lambda: run(own.open()), f"micro-batch {len(self.recordings) + 1}")
        return Recording(graph, own, terms)

    def _capture(self, work: Callable[[], Result], name: str) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Record work that is not done by that; it is done when the graph is replayed."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda.empty_cache()
        with recording(graph, self._pool, torch.cuda.current_stream()):
            result = work()
        self._pool = graph.pool()
        self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        log.info("%s recorded in %.2f s", name, time.perf_counter() - began)
        return graph, result


@dataclass
class LaunchWatch:
    """Whether the host is slower at launching a step than the device at computing it; from a few steps early on.

    On several ranks recorded passes have a price: gradients are summed after them, not beside. There recorded steps are
    timed too, and kept only where the slowest rank gains.
    """

    device: torch.device
    key: str
    """What the share depends on; later runs with the same need not measure it."""
    largest: Callable[[int], int] | None = None
    """Over ranks; None: there is one process."""
    first: int = 4
    """Steps before these compile, or record."""
    steps: int = 5
    share: float = 0.5
    """Launching takes at least this share of a step. A recorded step also needs less time on the device itself, since
    nothing comes between its kernels (docs/bottlenecks.md), so recording pays before the host is too slow."""
    decided: bool = False
    """Nothing remains to be measured."""
    _times: list[tuple[float, float]] = field(default_factory=list)
    """Seconds to launch a step, and until it was done."""
    _done: int = 0
    _plain: int = 0
    """Microseconds of a step that was not recorded."""

    def remembered(self) -> bool | None:
        """The answer, if an earlier run has found it."""
        share = None if self.largest else recall("launching", self.key).get("share")
        return None if share is None else self._decide(share)

    def measure(self, step: Callable[[], Result]) -> tuple[Result, bool | None]:
        """Run a step. Also whether to record from now on, when that is known; None before."""
        self._done += 1
        if self._done <= self.first:
            return step(), None
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        result = step()
        launched = time.perf_counter() - began
        torch.cuda.synchronize(self.device)
        self._times.append((launched, time.perf_counter() - began))
        if len(self._times) < self.steps:
            return result, None
        # the median: a step that compiled or failed does not sway it
        share = statistics.median(launched / whole for launched, whole in self._times)
        micros = round(1e6 * statistics.median(whole for _, whole in self._times))
        if self.largest is None:
            remember("launching", self.key, {"share": share})
            return result, self._decide(share)
        return result, self._decide_together(self.largest(round(1000 * share)) / 1000, self.largest(micros))

    def _decide(self, share: float) -> bool:
        slow, self.decided = share >= self.share, True
        note = "; micro-batches are recorded" if slow else ""
        log.info("launching takes %.0f %% of a step%s", 100 * share, note)
        return slow

    def _decide_together(self, share: float, micros: int) -> bool:
        if not self._plain:
            slow, self._plain = self._decide(share), micros
            self.decided = not slow
            self._times, self._done, self.first = [], 0, 2 * self.first
            return slow
        self.decided, faster = True, micros < self._plain
        note = "" if faster else "; micro-batches are no longer recorded"
        log.info("a recorded step takes %.1f ms, one before %.1f ms%s", micros / 1e3, self._plain / 1e3, note)
        return faster
