"""What is summed between two lines of the log. Sums stay on the device; reading them is the only time the host waits.

The clock: on a GPU the host runs ahead, so the time that it waits for the loader costs nothing while the device still
works. Events on the device measure how long it was idle between two steps; of that, at most as long as the host waited
is attributed to data.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmldlm.data.loader import StepBatch, StepRange
from mmldlm.distributed.ranks import Ranks
from mmldlm.objective.losses import NUM_BUCKETS, means
from mmldlm.training.step import StepResult

_SUMS = (
    "loss",
    "text",
    "latent",
    "length",
    "correct",
    "scored",
    "grad_norm",
    "skipped",
    "steps",
    "streak",
    "longest",
    "text_steps",
    "latent_steps",
)
"""The last two: updates whose documents had a text or a latent to score; their losses are means over these."""
_BY_TIME = ("text_by_time", "latent_by_time")


_SAME = ("grad_norm", "skipped", "steps", "streak", "longest", "text_steps", "latent_steps")
"""What all ranks know alike; the other sums are of a rank's own documents."""
_COUNTS = ("all_steps", "documents", "tokens", "places", "extra", "micro_batches")
_REMEMBERED = 1000
"""Steps of which it is known whether they were skipped."""


class LogWindow:
    """Collects steps; `fields` turns them into a line of the log and starts the next window. Kept in checkpoints, so
    that the first line after a resume is complete."""

    def __init__(
        self,
        device: torch.device,
        flops_of: Callable[[StepBatch], float] = lambda batch: 0.0,
        peak_flops: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.flops_of, self.peak_flops = flops_of, peak_flops
        self.clock = StepClock(device)
        self.sums = {name: torch.zeros((), device=device) for name in _SUMS}
        self.sums |= {name: torch.zeros(2, NUM_BUCKETS, device=device) for name in _BY_TIME}
        self.counts = dict.fromkeys(_COUNTS, 0)
        self._recent: deque[tuple[StepRange, Tensor]] = deque(maxlen=_REMEMBERED)
        """Steps since the last line, and whether each was skipped, on the device."""
        self._restart()

    def _restart(self) -> None:
        for name, tensor in self.sums.items():
            if name != "streak":  # continues from line to line
                tensor.zero_()
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.restart_clock()

    def restart_clock(self) -> None:
        """A rate covers what this process did from now on, also when the line began before a resume."""
        self._began, self._documents, self._tokens, self._flops = time.perf_counter(), 0, 0, 0.0

    def add(self, result: StepResult, batch: StepBatch) -> None:
        """One step."""
        terms, updated = result.terms, 1.0 - result.skipped
        self._recent.append((batch.where, result.skipped))
        values = {"grad_norm": result.grad_norm, "correct": terms.correct, "scored": terms.scored}
        values |= {"loss": terms.loss, "text": terms.text, "latent": terms.latent, "length": terms.length}
        values |= {name: getattr(terms, name) for name in _BY_TIME}
        for name, value in values.items():
            self.sums[name] += torch.where(updated > 0, value, torch.zeros_like(value))
        self.sums["skipped"] += result.skipped
        self.sums["streak"].add_(1.0).mul_(result.skipped)
        self.sums["longest"].copy_(torch.maximum(self.sums["longest"], self.sums["streak"]))
        self.sums["steps"] += updated
        for name, count in (("text_steps", batch.counts.tokens), ("latent_steps", batch.counts.slots)):
            self.sums[name] += updated * float(float(count) > 0)
        sizes = (batch.num_documents, batch.num_tokens, batch.num_places, batch.num_extra)
        added = (1, *sizes, len(batch.micro_batches))
        self.counts = {name: self.counts[name] + more for name, more in zip(_COUNTS, added, strict=True)}
        self._documents += batch.num_documents
        self._tokens += batch.num_tokens
        self._flops += self.flops_of(batch)

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint; nothing waits for the device."""
        state = self._over_ranks() | {name: torch.tensor(value) for name, value in self.counts.items()}
        if self._recent:
            places = [[where.start, where.end, where.step] for where, _ in self._recent]
            state["recent_places"] = torch.tensor(places)
            state["recent_skipped"] = torch.stack([flag.reshape(()) for _, flag in self._recent])
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """From a checkpoint."""
        for name, tensor in self.sums.items():
            kept = name if name in state or not name.endswith("_steps") else "steps"
            if kept in state:  # a sum younger than the checkpoint starts at 0
                tensor.copy_(state[kept] if name in _SAME or self.ranks.main else torch.zeros_like(tensor))
        self.counts = {name: int(state[name]) if name in state else 0 for name in _COUNTS}
        self._recent.clear()
        if "recent_places" in state:
            flags = state["recent_skipped"].to(self.sums["steps"].device).unbind()
            for place, flag in zip(state["recent_places"].tolist(), flags, strict=True):
                self._recent.append((StepRange(*place), flag))

    def take_skipped(self, *, wanted: bool) -> list[StepRange]:
        """The steps since the last call whose update was skipped, if wanted, which waits for the device."""
        recent = list(self._recent)
        self._recent.clear()
        if not wanted or not recent:
            return []
        flags = torch.stack([flag.reshape(()) for _, flag in recent]).tolist()
        return [where for (where, _), flag in zip(recent, flags, strict=True) if flag]

    def forget_skips(self) -> None:
        """After a rollback: what was skipped before it must not count again."""
        self._recent.clear()
        for name in ("skipped", "streak", "longest"):
            self.sums[name].zero_()

    def fields(self) -> dict[str, Any]:
        """Means over the steps that updated; nan where every step was skipped."""
        self.sums, self._flops = self._over_ranks(), self.ranks.total(self._flops)
        values = {name: self.sums[name].item() for name in _SUMS}
        lost = self.clock.read()
        counts, seconds = self.counts, max(time.perf_counter() - self._began, 1e-9)
        steps = values["steps"] or float("nan")
        text, latent = (min(steps, max(1.0, values[name])) for name in ("text_steps", "latent_steps"))
        fields: dict[str, Any] = {
            "loss": values["loss"] / steps,
            "text_loss": values["text"] / text,
            "latent_loss": values["latent"] / latent,
            "length_loss": values["length"] / text,
            "text_loss_by_time": means(self.sums["text_by_time"]),
            "latent_loss_by_time": means(self.sums["latent_by_time"]),
            "text_accuracy": values["correct"] / values["scored"] if values["scored"] else float("nan"),
            "grad_norm": values["grad_norm"] / steps,
            "skipped_steps": int(values["skipped"]),
            "longest_skip": int(values["longest"]),
            "batch_size": counts["documents"] // max(1, counts["all_steps"]),
            "documents_per_second": self._documents / seconds,
            "tokens_per_second": self._tokens / seconds,
            "flops_per_second": self._flops / seconds,
            "mfu": self._flops / seconds / self.peak_flops if self.peak_flops else None,
            "data_wait": lost / seconds,
            "fill": counts["tokens"] / max(1, counts["places"]),
            "micro_batches": counts["micro_batches"] / max(1, counts["all_steps"]),
            "extra_micro_batches": counts["extra"],
        }
        self._restart()
        return fields

    def _over_ranks(self) -> dict[str, Tensor]:
        """Each rank has summed over its own documents; these are the sums over all."""
        if not self.ranks.several:
            return self.sums
        own = {name: tensor for name, tensor in self.sums.items() if name not in _SAME}
        flat = self.ranks.sum(torch.cat([tensor.flatten() for tensor in own.values()]))
        parts = flat.split([tensor.numel() for tensor in own.values()])
        return self.sums | {
            name: part.view_as(tensor) for (name, tensor), part in zip(own.items(), parts, strict=True)
        }

    def exclude(self, seconds: float) -> None:
        """Time spent on something else, such as validation, does not count against the rate."""
        self._began += seconds
        self.clock.forget()


@dataclass
class StepClock:
    """`begin` and `end` surround a step; `read` waits for the device, so call it where that is done anyway."""

    device: torch.device
    _steps: list[tuple[float, torch.cuda.Event | None, torch.cuda.Event | None]] = field(default_factory=list)
    _last: torch.cuda.Event | None = None

    def begin(self, waited: float) -> None:
        """A step begins, for whose data the host waited so many seconds."""
        self._steps.append((waited, self._last, self._event()))

    def end(self) -> None:
        """All work of the step is launched."""
        self._last = self._event()

    def forget(self) -> None:
        """What comes between this step and the next is no waiting for data."""
        self._last = None

    def read(self) -> float:
        """Seconds lost to waiting for data since the last call."""
        lost = sum(_lost(*step) for step in self._steps)
        self._steps.clear()
        return lost

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _lost(waited: float, before: torch.cuda.Event | None, begun: torch.cuda.Event | None) -> float:
    if begun is None or before is None:
        return waited if begun is None else 0.0
    begun.synchronize()
    return min(waited, before.elapsed_time(begun) / 1000.0)


def gpu_memory(device: torch.device, recorded: int) -> dict[str, Any]:
    """Peaks since the last line; what recorded graphs use is not allocated again when they are replayed."""
    if device.type != "cuda":
        return {"gpu_memory_allocated": None, "gpu_memory_reserved": None}
    peaks = {
        "gpu_memory_allocated": max(recorded, torch.cuda.max_memory_allocated(device)),
        "gpu_memory_reserved": torch.cuda.max_memory_reserved(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return peaks
