"""Sums between two lines of the log. They stay on the device; reading them is the only time the host waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmldlm.data.loader import StepBatch
from mmldlm.distributed.ranks import Ranks
from mmldlm.objective.weights import NUM_BUCKETS, means
from mmldlm.training.clock import StepClock
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


class Interval:
    """Collects steps; `fields` turns them into a line of the log and starts anew."""

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
        self._restart()

    def _restart(self) -> None:
        for name, tensor in self.sums.items():
            if name != "streak":  # goes on from line to line
                tensor.zero_()
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.restart_clock()

    def restart_clock(self) -> None:
        """A rate covers what this process did from now on, also when the line began before a resume."""
        self._began, self._documents, self._tokens, self._flops = time.perf_counter(), 0, 0, 0.0

    def add(self, result: StepResult, batch: StepBatch) -> None:
        """One step."""
        terms, updated = result.terms, 1.0 - result.skipped
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

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, so that the first line after a resume is complete."""
        return self._over_ranks() | {name: torch.tensor(value) for name, value in self.counts.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what a checkpoint kept."""
        for name, tensor in self.sums.items():
            kept = name if name in tensors or not name.endswith("_steps") else "steps"
            if kept in tensors:  # a sum younger than the checkpoint starts at 0
                tensor.copy_(tensors[kept] if name in _SAME or self.ranks.main else torch.zeros_like(tensor))
        self.counts = {name: int(tensors[name]) if name in tensors else 0 for name in _COUNTS}

    def forget_skips(self) -> None:
        """After a rollback: what was skipped before it must not count again."""
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
        found: dict[str, Any] = {
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
        return found

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
