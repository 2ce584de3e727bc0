"""Settings that change how fast a run is and on how many ranks, not what it computes."""

from __future__ import annotations

from dataclasses import dataclass

from mmldlm.config.fields import choice, number


@dataclass
class SpeedConfig:
    """Every speed-up is a switch here; none of them changes the loss beyond rounding."""

    precision: str | None = choice(None, "fp32", "bf16", "fp16")
    """Type of the matrix products, weights stay fp32; null: bf16 where a GPU has it, else fp32."""
    compile: bool | None = None
    """torch.compile per block; null: on with a GPU."""
    attention: str = choice("auto", "auto", "tiles", "varlen", "sdpa", "rows", "reference")
    """auto: the fastest by a short measurement that is remembered; tiles: our kernel for short documents;
    varlen: flash; sdpa: cuDNN or flash on documents of equal length, else rows; rows: padded inside attention only;
    reference: one dense mask."""
    fused_kernels: bool | None = None
    """Triton kernels for norms, modulation and the way into attention; null: on where they run."""
    layout: str = choice("packed", "packed", "padded")
    """packed: one stream without padding; padded: the classic rectangular batch, the honest baseline."""
    activation_checkpointing: str = choice("off", "off", "selective", "block", "budget")
    """What the backward pass computes again to save memory. selective: all but matrix products and attention; block:
    each block; budget: a share of the blocks, see activation_budget."""
    activation_budget: float = number(0.5, 0, 1)
    """Share of the blocks that keep their activations under activation_checkpointing=budget."""
    cuda_graphs: bool | None = None
    """Record the work of a micro-batch once and replay it; null: on with a GPU where launching takes longer than
    computing, which the first steps show."""
    residual: str = choice("fp32", "fp32", "bf16")
    """Type of the residual stream; bf16 takes less memory and time, and rounds after every block."""
    overlap_copies: bool = True
    """Copy the next step to the GPU while the current one is computed."""
    tf32: bool = True
    """Matrix products that stay in fp32 may round their inputs to 19 bits, on a GPU."""
    fused_optimizer: bool = True
    scored_rows: bool = True
    """The output head sees only the tokens that are scored."""
    chunk_rows: int = number(2048, 1)
    """Rows of logits that exist at a time; a compiled run fills its last chunk up, so that all have one shape."""


@dataclass
class DistributedConfig:
    """Several ranks under torchrun; for one rank nothing here matters."""

    backend: str | None = choice(None, "nccl", "gloo")
    """null: nccl on GPUs, gloo on CPUs; gloo also lets several ranks share a GPU."""
    timeout_minutes: float = number(30.0, 0, above=True)
    """A rank that does not answer for so long is given up, and the run ends with a clear line."""
    compression: str = choice("none", "none", "bf16", "fp16")
    """Type in which gradients travel; bf16 and fp16 halve the bytes and round the sum."""
    bucket_mb: float = number(100.0, 0, above=True)
    """Gradients are summed in pieces of this many MiB, beside the backward pass."""
    static_graph: bool = False
    """Let DDP assume that every step uses the same parameters in the same way, which holds here; used where the first
    step has one micro-batch a rank."""
