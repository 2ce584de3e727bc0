"""Objects of JSON that are events: the ledger of MM-LDLM's trainer, and torchrun's error files."""

from __future__ import annotations

import datetime
import math
from typing import Any

from runwatch.messages import cause_of
from runwatch.records import Record

LEDGER = frozenset(
    ("started", "resumed", "finished", "stopped", "saved", "save_failed", "checkpoint", "skipped", "rolled_back",
     "out_of_memory", "grown", "alert", "hung_step", "straggler", "rank_silent", "loader_failed", "interrupted",
     "modes", "loss_spike", "lr_reduced", "compile", "crash", "killed", "restored", "validated")
)  # fmt: skip
"""Events of MM-LDLM's events.jsonl."""


def event_record(content: dict[str, Any]) -> Record:
    """An event of the ledger."""
    record = Record(event=content.pop("event"), facts=content)
    step, at = content.get("step"), content.get("at", content.get("time"))
    if isinstance(step, int | float) and math.isfinite(step):
        record.step = int(step)
    if isinstance(at, str):
        try:
            record.time = datetime.datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
        except ValueError:
            record.time = None
    elif isinstance(at, int | float):
        record.time = float(at)
    record.text = str(content.get("reason", ""))[:300]
    peer_gone = (
        record.text.startswith("LostRankError") and "by peer" in record.text
    )  # a death, no bad network
    if record.event == "stopped" and not peer_gone and (cause := cause_of(record.text)):
        content["cause"] = cause
    return record


def error_file_record(message: dict[str, Any], rank: int | None) -> Record:
    """torchrun's error.json: the exception that ended one rank, with its time."""
    text = str(message["message"])[:300]
    extra = message.get("extraInfo")
    stamp = extra.get("timestamp") if isinstance(extra, dict) else None
    record = Record(event="crash", rank=rank, text=text, facts={"traceback": True, "cause": cause_of(text)})
    if isinstance(stamp, int | float) or (isinstance(stamp, str) and stamp.isdigit()):
        record.time = (
            float(stamp) + 1.0
        )  # it was cut to whole seconds, and comes after the lines of its second
    return record
