"""What a run will be, before anything is spent: sizes, memory, documents and steps."""

from __future__ import annotations

from typing import Any

from mmldlm.config import PARTS
from mmldlm.model.weights import parameter_groups
from mmldlm.train.setup import Setup


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
    }


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
