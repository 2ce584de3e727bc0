"""Measurements that nobody measured, and a bench whose processes are functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmldlm.benchmark import measuring
from mmldlm.benchmark.measuring import Bench, Block, Failure, Job, Measurement, Memory, Options

Pretended = Callable[[Job], Measurement | Failure]


def measurement(
    rates: list[float],
    *,
    gib: float = 1.0,
    losses: list[float | None] | None = None,
    flops: float = 100.0,
    valid_loss: float | None = None,
) -> Measurement:
    """Blocks of two steps with 50 tokens and 5 documents each, at these tokens per second."""
    blocks = [Block(2, 100 / rate, 10, 100, 200, 2 * flops) for rate in rates]
    memory = Memory(int(gib * 2**30), int(gib * 2**30), 7)
    return Measurement(
        "cuda",
        "bf16",
        "varlen",
        True,
        1.0,
        2.0,
        3.0,
        losses or [],
        valid_loss if valid_loss is not None else (losses or [None])[-1],
        blocks,
        memory,
        data_wait=0.1,
        peak_flops=1000.0,
    )


def pretend(monkeypatch, tmp_path: Path, answer: Pretended, **changes) -> Bench:
    """A bench that asks a function instead of a process."""
    monkeypatch.setattr(measuring, "run_job", lambda job, log_path, timeout: answer(job))
    values = {
        "recipe": "laptop", "settings": (), "store": tmp_path, "steps": 4, "warmup": 1, "block": 2, "repeats": 2,
        "gate_steps": 0, "tolerance": 0.01, "timeout": 5.0, "memory_limit": None, "seed": 0,
    }  # fmt: skip
    return Bench(Options(**values | changes), tmp_path / "logs", lambda text: None, lambda *state: None)
