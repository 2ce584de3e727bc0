"""What the backward pass keeps of a block and what it computes again."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# nothing in a block works in place, which is what this warning is about
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn" not in record.getMessage()
)

_KEPT = ("mm", "addmm", "attend_tiles", "_varlen_attn", "flex_attention")
"""Matrix products and attention, by the name of the operator; what starts with _scaled_dot_product too."""


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name() if callable(getattr(op, "name", None)) else str(op)
    word = name.split("::")[-1].split(".")[0]
    if word in _KEPT or word.startswith("_scaled_dot_product"):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def keep_products() -> Any:
    """For `checkpoint(context_fn=...)`: keep what is dear to compute; norms, modulation and activations are cheap."""
    return create_selective_checkpoint_contexts(_policy)


def recomputed_blocks(depth: int, share_kept: float) -> set[int]:
    """Which blocks are computed again when only this share of them may keep their activations; spread evenly."""
    count = round(depth * (1.0 - share_kept))
    return {int((i + 0.5) * depth / count) for i in range(count)} if count else set()
