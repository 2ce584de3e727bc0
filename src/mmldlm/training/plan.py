"""What a run will be, before anything is spent: sizes, memory, documents and steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmldlm.config import MODES, PARTS, Config
from mmldlm.corruption.times import describe_modes, mode_weights_at
from mmldlm.model.weights import parameter_groups
from mmldlm.training.lr import lr_at
from mmldlm.training.setup import Setup

_MOST_POINTS = 2000


def describe(setup: Setup) -> dict[str, Any]:
    """Numbers for `--dry-run`."""
    split = setup.store.manifest.splits[setup.train_split.name]
    mean_length = split["num_tokens"] / split["num_documents"]
    documents = min(setup.shape.documents_per_step, setup.shape.tokens_per_step / mean_length)
    parts = parameter_counts(setup)
    steps_per_epoch = split["num_documents"] / documents
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
        "steps_per_epoch": round(steps_per_epoch, 1),
        "epochs": round(setup.config.train.steps / steps_per_epoch, 2),
        "modes": describe_modes(setup.config.corruption),
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
    """Share of each mode."""


def course_of(setup: Setup) -> Course:
    """From the first step to the last."""
    config, steps = setup.config, _chosen_steps(setup.config)
    shapes = [setup.plan.at(step) for step in steps]
    documents = [min(s.documents_per_step, s.tokens_per_step / setup.lengths.mean) for s in shapes]
    epochs = _epochs(steps, documents, setup.order.num_documents)
    weights = [mode_weights_at(config.corruption, *when) for when in zip(steps, epochs, strict=True)]
    totals = [sum(getattr(at, mode) for mode in MODES) for at in weights]
    return Course(
        steps=steps,
        lr=[lr_at(step, config.train.steps, config.optim) for step in steps],
        tokens=[count * setup.lengths.mean for count in documents],
        documents=documents,
        modes={
            mode: [getattr(at, mode) / total for at, total in zip(weights, totals, strict=True)]
            for mode in MODES
        },
    )


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
    if setup.denoiser.kernels.attention in ("sdpa", "rows") and not setup.lengths.equal:
        width = caps.max_length + setup.data_shape.num_slots
        cells = width * min(caps.num_documents, 2 * -(-(caps.num_tokens + slots) // width) + 1)
        activations += blocks * 4 * cells * inner * size
    return int(weights + activations + _logits_memory(setup))


def _logits_memory(setup: Setup) -> int:
    """A chunk of logits and two temporary copies; without chunks, all logits and what their gradient needs."""
    rows, tokens = setup.config.speed.chunk_rows, setup.shape.caps.num_tokens
    copies = 3 * min(rows, tokens) if setup.config.speed.scored_rows else 5 * tokens
    return copies * setup.data_shape.vocab_size * 4
