"""What a run will be, before anything is spent: sizes, memory, documents and steps."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmldlm.config import MODES, PARTS, Config
from mmldlm.corruption.times import describe_modes, drawn_shares, mode_weights_at
from mmldlm.data.packing import StepShape
from mmldlm.distributed.ranks import Muted
from mmldlm.model.denoiser import step_flops
from mmldlm.model.weights import parameter_groups
from mmldlm.run_folder import RunFolder
from mmldlm.runtime import DTYPES
from mmldlm.training.fit import Trainer
from mmldlm.training.optim import lr_at
from mmldlm.training.setup import Hooks, Setup

_MOST_POINTS = 2000
_TIMED_STEPS = 2
_LONGEST_STEP = 20.0
"""Seconds that a step may be expected to take if it is to be tried."""
_REACHED = 0.3
"""Share of the speed of a matrix product that a step reaches: a guess, for steps that take too long to try."""


def describe(setup: Setup) -> dict[str, Any]:
    """Numbers for `--dry-run`."""
    split, steps = setup.store.manifest.splits[setup.train_split.name], setup.config.train.steps
    mean_length = split["num_tokens"] / split["num_documents"]
    documents = _expected_documents(setup.shape, mean_length)
    parts, course = parameter_counts(setup), course_of(setup)
    epochs = _epochs([*course.steps, steps], [*course.documents, 0.0], split["num_documents"])[-1]
    return {
        "device": str(setup.runtime.device),
        "precision": setup.runtime.precision,
        "attention": setup.denoiser.kernels.attention,
        "fused_kernels": setup.runtime.fused,
        "compile": setup.runtime.compile,
        "num_workers": setup.runtime.num_workers,
        "parameters": parts,
        "parameters_total": sum(parts.values()),
        "memory_bytes": estimate_memory(setup),
        "documents": split["num_documents"],
        "tokens": split["num_tokens"],
        "documents_per_step": round(documents, 1),
        "tokens_per_step": round(documents * mean_length),
        "micro_batches_per_step": setup.shape.num_micro,
        "micro_batch_tokens": setup.shape.caps.num_tokens,
        "micro_batch_documents": setup.shape.caps.num_documents,
        "steps_per_epoch": round(split["num_documents"] / documents, 1),
        "epochs": round(epochs, 2),
        "modes": describe_modes(setup.config.corruption, setup.train_split.derived_share),
    }


@dataclass(frozen=True)
class Course:
    """What changes over the steps of a run, as far as the settings alone decide it."""

    steps: list[int]
    """Counted from 0; all of them, or about two thousand."""
    lr: list[float]
    """Under the plateau schedule as it is before any reduction."""
    tokens: list[float]
    """Expected in a step."""
    documents: list[float]
    """Expected in a step."""
    modes: dict[str, list[float]]
    """Share of the documents that each mode takes."""


def course_of(setup: Setup) -> Course:
    """From the first step to the last."""
    config, steps = setup.config, _chosen_steps(setup.config)
    documents = [_expected_documents(setup.plan.at(step), setup.lengths.mean) for step in steps]
    epochs = _epochs(steps, documents, setup.order.num_documents)
    weights = [mode_weights_at(config.corruption, *when) for when in zip(steps, epochs, strict=True)]
    shares = [drawn_shares(at, config.corruption, setup.train_split.derived_share) for at in weights]
    return Course(
        steps=steps,
        lr=[lr_at(step, config.train.steps, config.optim) for step in steps],
        tokens=[count * setup.lengths.mean for count in documents],
        documents=documents,
        modes={mode: [at[mode] for at in shares] for mode in MODES},
    )


def _expected_documents(shape: StepShape, mean_length: float) -> float:
    """Of a step."""
    return min(shape.documents_per_step, shape.tokens_per_step / mean_length)


def _epochs(steps: list[int], documents: list[float], num_documents: int) -> list[float]:
    """Passes over the documents that are expected to be done when each of the steps begins."""
    sizes = np.diff(steps) * np.array(documents[:-1])
    return (np.concatenate([[0.0], np.cumsum(sizes)]) / num_documents).tolist()


def _chosen_steps(config: Config) -> list[int]:
    """Evenly spread, with the ends of the stages of batch and modes."""
    last = config.train.steps - 1
    chosen = set(np.linspace(0, last, min(_MOST_POINTS, last + 1)).round().astype(int).tolist())
    ends = [stage.until for stage in config.batch.schedule]
    ends += [stage.until for stage in config.corruption.mode_schedule if stage.until is not None]
    chosen |= {step for end in ends for step in (end - 1, end)}
    return sorted(step for step in chosen if step <= last)


@dataclass(frozen=True)
class TimeEstimate:
    """How long the steps of a run would take here. Start, validation and checkpoints are not counted."""

    seconds_per_step: float
    basis: str
    """What the number rests on."""

    def describe(self, steps: int) -> str:
        """For people."""
        total = self.seconds_per_step * steps
        for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)):
            if total >= 2 * size or unit == "seconds":
                return (
                    f"about {total / size:,.0f} {unit}, {self.seconds_per_step:.3g} s per step; {self.basis}"
                )
        raise AssertionError("the last unit always serves")


def estimate_time(setup: Setup) -> TimeEstimate:
    """From a few real steps on the device; where they would take too long, from operations and a matrix product."""
    operations, rate = _operations(setup), _matmul_rate(setup)
    expected = operations / (_REACHED * rate)
    if expected > _LONGEST_STEP:
        basis = f"computed from {operations:.2g} operations at {_REACHED:.0%} of the speed of a matrix product here"
        return TimeEstimate(expected, basis)
    seconds = time_steps(setup, 1 + _TIMED_STEPS)
    later = "; it may get faster later, when micro-batches are recorded" if _on_gpu(setup) else ""
    mean = sum(seconds[1:]) / len(seconds[1:])
    return TimeEstimate(mean, f"mean of {len(seconds[1:])} steps measured here after the first{later}")


def time_steps(setup: Setup, count: int) -> list[float]:
    """Seconds of each of the first real steps of a run, which leaves nothing behind; the first one compiles."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="mmldlm-plan-") as folder:
        run = RunFolder(Path(folder) / "run")
        run.create()
        trainer = Trainer(setup, run, Hooks(lambda _: {}, lambda _, step: [], Muted()))
        try:
            for _ in range(count):
                began = time.perf_counter()
                trainer.train_step(*trainer.next_batch())
                if setup.runtime.device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
        finally:
            trainer.close()
    return seconds


def _operations(setup: Setup) -> float:
    """Of an average step, forward and backward."""
    mean = setup.lengths.mean
    documents = _expected_documents(setup.shape, mean)
    tokens = documents * mean
    squares = documents * (mean + setup.data_shape.num_slots) ** 2
    return step_flops(
        setup.denoiser.config, setup.data_shape, tokens=tokens, documents=documents, squares=squares, scored=tokens / 2
    )  # fmt: skip


def _matmul_rate(setup: Setup) -> float:
    """Operations per second of a matrix product in the precision of the run."""
    size, repeats = (4096, 10) if _on_gpu(setup) else (512, 4)
    device, dtype = setup.runtime.device, DTYPES[setup.runtime.precision]
    matrix = torch.randn(size, size, device=device).to(dtype)
    matrix @ matrix
    best = float("inf")
    for _ in range(3):
        _synchronize(setup)
        began = time.perf_counter()
        for _ in range(repeats):
            matrix @ matrix
        _synchronize(setup)
        best = min(best, time.perf_counter() - began)
    return repeats * 2.0 * size**3 / best


def _on_gpu(setup: Setup) -> bool:
    return setup.runtime.device.type == "cuda"


def _synchronize(setup: Setup) -> None:
    if _on_gpu(setup):
        torch.cuda.synchronize(setup.runtime.device)


def parameter_counts(setup: Setup) -> dict[str, int]:
    """Parameters of each part of the denoiser."""
    counts = dict.fromkeys(PARTS, 0)
    for group in parameter_groups(setup.denoiser):
        counts[group.part] += sum(parameter.numel() for parameter in group.parameters.values())
    return counts


def estimate_memory(setup: Setup) -> int:
    """Bytes for weights, gradients, moments and average, plus what the backward pass keeps of one micro-batch.

    The activations are counted from the tensors that autograd keeps in a block; a run that is compiled keeps fewer.
    """
    model, caps = setup.denoiser.config, setup.shape.caps
    copies = 4 + (1 if setup.config.optim.ema_decay > 0 else 0)
    weights = 4 * copies * sum(parameter_counts(setup).values())
    size = 4 if setup.runtime.precision == "fp32" else 2
    inner = model.num_heads * model.head_width
    slots = caps.num_documents * setup.data_shape.num_slots

    def kept(rows: int, width: int) -> float:
        hidden = width * model.mlp_ratio
        if setup.denoiser.kernels.keep == "products":
            return rows * (4 * width + (2 * width + 4 * inner + hidden) * size)
        # fp32: residual stream (2), without fused kernels its norms (4) and modulation (6) too;
        # in the type of the products: their inputs and results, and q, k, v in two orders
        wide = 2 if setup.runtime.fused else 12
        return rows * (wide * width * 4 + (4 * width + 8 * inner + 2 * hidden) * size)

    # a block that is computed again keeps its input, and one at a time all of the rest
    recomputed = len(setup.denoiser.recomputed)
    blocks = model.depth - recomputed + (1 if recomputed else 0)
    activations = blocks * (kept(caps.num_tokens, model.width) + kept(slots, model.latent_width))
    activations += recomputed * caps.num_tokens * model.width * (4 + size)
    if setup.needs_rows:
        width = caps.max_length + setup.data_shape.num_slots
        cells = width * min(caps.num_documents, 2 * -(-(caps.num_tokens + slots) // width) + 1)
        activations += blocks * 4 * cells * inner * size
    return int(weights + activations + _logits_memory(setup))


def _logits_memory(setup: Setup) -> int:
    """A chunk of logits and two temporary copies; without chunks, all logits and what their gradient needs."""
    rows, tokens = setup.config.speed.chunk_rows, setup.shape.caps.num_tokens
    copies = 3 * min(rows, tokens) if setup.config.speed.scored_rows else 5 * tokens
    return copies * setup.data_shape.vocab_size * 4
