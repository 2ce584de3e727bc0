"""What one line of a log says, in one form for all trainers, and the names that trainers give to the same thing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOSSES = (
    "loss",
    "text_loss",
    "latent_loss",
    "length_loss",
    "valid_loss",
    "valid_text_loss",
    "valid_latent_loss",
    "bad_part",
)
RATES = ("tokens_per_second", "documents_per_second", "steps_per_second")
"""What may serve as throughput, best first."""
LARGEST = 2**63
"""A larger whole number is rubbish, and many things cannot be done with it."""
OLDEST_TIME = 1e8
"""A smaller `time` is no date but a duration."""
BUCKETS = ("text_loss_by_time", "latent_loss_by_time")
_MOST_BUCKETS = 256
SHOWN = (
    "loss", "text_loss", "latent_loss", "text_accuracy", "valid_loss", "lr", "grad_norm", "rate", "mfu", "gpu_busy",
    "gpu_memory_allocated", "gpu_memory_reserved", "data_wait", "epoch", "batch_size", "micro_tokens", "disk_free",
    "steps_per_second",
)  # fmt: skip
"""Values whose last state is kept and shown."""


@dataclass(slots=True)
class Record:
    """One line: numbers at a step, an event of the ledger, or a message that means something."""

    step: int | None = None
    time: float | None = None
    """Seconds since 1970, where the line tells it."""
    values: dict[str, float] = field(default_factory=dict)
    """Numbers under our own names; what was not finite is nan or inf."""
    lists: dict[str, list[float]] = field(default_factory=dict)
    """Losses per time bucket."""
    rank: int | None = None
    event: str = ""
    """A word of the ledger (started, finished, skipped ...) or of `messages` (crash, nccl, oom ...)."""
    text: str = ""
    """What an event or message says, for the evidence."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of an event that are no numbers of the curve."""
    new_run: bool = False
    """Another run begins here, in the same file."""
    series: str = ""
    """Under which name the loss stood; another name is another curve."""
    without_loss: bool = False
    """A step of training whose loss is missing, although others have one."""
    total: int | None = None
    """How many steps there will be, where the line tells it."""
    by_epoch: bool = False
    """The step is the number of an epoch."""
    by_lines: bool = False
    """The step is the number of a line, because the log has no counter."""
    begins_epoch: bool = False
    """The counter of steps has started again since the line before."""
    is_played: bool = False
    """Rewards or games stand beside the loss, as in reinforcement learning: its level says little."""
    reward: float | None = None
    """The newest reward, where there are any."""
    has_own_time: bool = True
    """The time stood in the line; else it is when the line was read."""

    def rate(self) -> tuple[str, float] | None:
        """Throughput, and which kind it is."""
        for name in RATES:
            value = self.values.get(name)
            if value is not None and math.isfinite(value):
                return name, value
        seconds = self.values.get("step_seconds")
        return ("steps_per_second", 1.0 / seconds) if seconds and math.isfinite(seconds) else None


def record_of_fields(step: int, fields: Mapping[str, Any], *, time: float | None = None) -> Record:
    """The record of a line that a trainer has in hand, under the names of `training_log.jsonl`."""
    record = Record(step=step, time=time)
    for key, value in fields.items():
        put_value(record, key, value)
    return record


def put_value(record: Record, name: str, value: Any) -> None:
    """Keep a number or a list of numbers; anything else is no part of the curve."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        if isinstance(value, int) and abs(value) > LARGEST:
            return
        record.values[name] = value
    elif isinstance(value, list) and name in BUCKETS:
        record.lists[name] = bucket_losses(value)


def bucket_losses(values: list[Any]) -> list[float]:
    """Losses per time bucket, nan for what is no number; more of them than anybody would have are left out."""
    try:
        return list(map(float, values[:_MOST_BUCKETS]))
    except (TypeError, ValueError):
        return [_number_or_nan(item) for item in values[:_MOST_BUCKETS]]


def _number_or_nan(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
