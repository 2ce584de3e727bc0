"""What can go wrong in a step on one rank, as a number that the others can be told."""

from __future__ import annotations

import torch

from mmldlm.distributed.ranks import LostRankError, Ranks

OUT_OF_MEMORY, COMPILER, FAILED = 1, 2, 3


class OutOfMemoryElsewhereError(torch.OutOfMemoryError):
    """Another rank ran out of memory; the step is done again by all."""


class CompilerElsewhereError(RuntimeError):
    """The compiler failed on another rank; all go on without it."""


def is_compiler_error(error: BaseException) -> bool:
    """Whether an error comes out of torch.compile, here or on another rank, rather than out of our code."""
    compilers = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")
    return isinstance(error, CompilerElsewhereError) or type(error).__module__.startswith(compilers)


def code_of(error: Exception, ranks: Ranks) -> int:
    """Kind of failure and rank in one number above 0; of several, the largest counts."""
    if isinstance(error, torch.OutOfMemoryError):
        kind = OUT_OF_MEMORY
    else:
        kind = COMPILER if is_compiler_error(error) else FAILED
    return kind * ranks.world_size + ranks.rank


def error_of(code: int, ranks: Ranks) -> Exception:
    """What the other ranks raise."""
    kind, rank = divmod(code, ranks.world_size)
    if kind == OUT_OF_MEMORY:
        return OutOfMemoryElsewhereError(f"rank {rank} ran out of memory")
    if kind == COMPILER:
        return CompilerElsewhereError(f"torch.compile failed on rank {rank}")
    return LostRankError(
        f"rank {ranks.rank} of {ranks.world_size}: rank {rank} failed, and its own output says why; "
        f"the same command goes on from the last checkpoint"
    )
