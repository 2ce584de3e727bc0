"""What one evaluated run gave: a value for each quantity, and what they are the values of."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.evaluation.quantities import Quantity
from mmldlm.evaluation.report import json_bytes, number_files, publish
from mmldlm.metrics import read_log

RECORD = "record.json"
FORMAT = "mmldlm-ablation-record-1"


@dataclass(frozen=True)
class Value:
    """One number of a run."""

    title: str
    better: str
    value: float


@dataclass(frozen=True)
class Record:
    """One arm with one seed."""

    arm: str
    seed: int
    identity: dict[str, Any]
    """Everything that the numbers depend on; where it has changed, the evaluation is done again."""
    values: dict[str, Value]
    num_parameters: int
    step: int
    train_seconds: float | None
    """In steps, by the run's own log: without validation, checkpoints and the start."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"format": FORMAT} | asdict(self)


def make_record(
    arm: str, seed: int, identity: dict[str, Any], result: dict[str, Any], training_log: Path
) -> Record:
    """From an evaluation; quantities without a finite value are left out."""
    values = {}
    for about in result["documents"].values():
        for name, saved in about["quantities"].items():
            quantity = Quantity.from_json(saved)
            number = float(quantity.statistic(np.arange(len(quantity))[None])[0])
            if math.isfinite(number):
                values[name] = Value(quantity.title, quantity.better, number)
    model = result["model"]
    seconds = seconds_in_steps(training_log)
    return Record(
        arm, seed, identity, values, model["num_parameters"], model["step"], seconds, result["notes"]
    )


def write_record(folder: Path, record: Record, result: dict[str, Any]) -> None:
    """The record and the numbers of the evaluation, all together."""
    _, files = number_files(result)
    publish(folder, files | {RECORD: json_bytes(record.to_json())})


def read_record(folder: Path, identity: dict[str, Any]) -> Record | None:
    """The record in a folder; None where there is none, or one of something else."""
    try:
        saved = json.loads((folder / RECORD).read_bytes())
        if saved["format"] != FORMAT or saved["identity"] != identity:
            return None
        known = {item.name: saved[item.name] for item in fields(Record)}
        return Record(**known | {"values": {name: Value(**one) for name, one in saved["values"].items()}})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def seconds_in_steps(training_log: Path) -> float | None:
    """Time of training by the rates of its log, which goes over interruptions; None where it has none."""
    total, before = 0.0, 0
    for line in read_log(training_log):
        rate, documents = line.get("documents_per_second"), line.get("documents")
        if rate and documents:
            total += max(0, documents - before) / rate
            before = documents
    return total or None
