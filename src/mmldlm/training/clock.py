"""How long the device stood still between steps, and how much of that was waiting for data.

On a GPU the host runs ahead, so the time that it waits for the loader costs nothing while the device still works.
Events on the device tell how long it was idle between two steps; of that, at most as long as the host waited is blamed
on data.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


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
