"""The ladder of the users' plan: their steps in their order, each on top of the one before, with what they expected.

The baseline is how the research code trained: padded, eager, every logit, bf16 on a GPU, no loader processes, a step in
four micro-batches. No step changes what is trained, so every arm passes through the loss gate. Steps that this machine
cannot run keep their row, which says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmldlm.benchmark.arms import BASELINE, Arm, Expected
from mmldlm.config import BatchConfig
from mmldlm.runtime import spare_workers

_SEVERAL = "not run: needs several devices"
"""An arm runs on one."""


@dataclass(frozen=True)
class Step:
    """One line of the plan's table of expected gains."""

    name: str
    off: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    expected: Expected | None = None
    """Of all steps so far, as shares of the baseline; None where the plan names no figure."""
    gpu_only: bool = False
    absent: str = ""


def plan_ladder(batch: BatchConfig, longest: int, on_gpu: bool) -> list[Arm]:
    """The arms for a recipe's batch; `longest` is the number of tokens of the longest document."""
    steps = _steps(batch, longest)
    precision = "bf16" if on_gpu else "fp32"
    always = (
        f"speed.precision={precision}",
        "speed.scored_rows=false",
        "speed.fused_kernels=false",
        "speed.cuda_graphs=false",
    )
    on: set[str] = set()

    def settings(more: str = "") -> tuple[str, ...]:
        words = (word for step in steps for word in (step.on if step.name in on | {more} else step.off))
        return (*always, *words)

    arms = [Arm(BASELINE, settings(), "padded, eager, unfused, no loader", expected=Expected(1.0, 1.0))]
    for step in steps:
        change = "+ " + " ".join(step.on)
        arms.append(Arm(step.name, settings(step.name), change, step.gpu_only, step.absent, step.expected))
        if not step.absent and (on_gpu or not step.gpu_only):
            on.add(step.name)
    return [*arms, Arm("defaults", (), "what the recipe gives by itself; the plan ends above")]


def _steps(batch: BatchConfig, longest: int) -> list[Step]:
    small, large = (_micro_batch(batch, longest, parts) for parts in (4, 2))
    few = "not run: a step of this recipe holds too few documents for four micro-batches"
    flash = (
        "speed.layout=packed",
        "speed.attention=varlen",
    )  # document bounds exist in the packed stream only
    loader = ("data.num_workers=0", "data.pin_memory=false", "speed.overlap_copies=false")
    ahead = (
        f"data.num_workers={spare_workers(1)}",
        "data.pin_memory=true",
        "speed.overlap_copies=true",
    )
    return [
        Step("data loading", loader, ahead, Expected(1.1, 1.0)),
        Step(
            "activation checkpointing", ("speed.activation_checkpointing='off'",),
            ("speed.activation_checkpointing=block",), Expected(1.1, 0.65),
        ),
        Step("larger batch", (small,), (large,), Expected(1.3, 0.65), absent=few if small == large else ""),
        Step("DDP", expected=Expected(1.5, 0.65), absent=_SEVERAL),
        Step("fused optimizer", ("speed.fused_optimizer=false",), ("speed.fused_optimizer=true",), Expected(1.8, 0.65)),
        Step("compile", ("speed.compile=false",), ("speed.compile=true",)),
        Step("flash attention", ("speed.layout=padded", "speed.attention=rows"), flash, gpu_only=True),
        Step("accumulation without sync", absent=_SEVERAL),
    ]  # fmt: skip


def _micro_batch(batch: BatchConfig, longest: int, parts: int) -> str:
    """The setting that cuts a step into about so many micro-batches."""
    if batch.tokens_per_step is not None:
        return f"batch.micro_tokens={max(longest, batch.tokens_per_step // parts)}"
    assert batch.documents_per_step is not None, "settings require one of the two"
    return f"batch.micro_documents={max(1, batch.documents_per_step // parts)}"
