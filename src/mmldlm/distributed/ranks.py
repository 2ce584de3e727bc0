"""The processes of a run: how they agree, and what one rank does about a failure of another.

Agreement goes through the hosts (gloo), never through the GPU, so it does not wait for what the device still computes.
With one rank nothing is sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmldlm.distributed.peers import Peers
from mmldlm.distributed.straggler import OwnTime
from mmldlm.errors import UserError

OUT_OF_MEMORY, COMPILER, FAILED = 1, 2, 3
"""Kinds of failure in a step."""


class LostRankError(UserError):
    """Another rank died, failed, or did not answer in time."""


@dataclass(frozen=True)
class Ranks:
    """Who this process is among the others. All methods but properties are to be called by all ranks together."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Ranks on this machine."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host: Any = None
    """The group for agreement; None for one rank."""
    timeout_minutes: float = 30.0
    peers: Peers | None = None
    """Who the others are; None for one rank."""
    own: OwnTime = field(default_factory=OwnTime, compare=False)

    @property
    def main(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.world_size > 1

    @property
    def joined(self) -> bool:
        """Whether there is a group of processes, if only of one."""
        return self.several or self.host is not None

    def largest(self, value: int) -> int:
        """The largest value that any rank gives."""
        return int(self._agreed(torch.tensor([value]), dist.ReduceOp.MAX)) if self.several else value

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        return bool(self.largest(int(flag)))

    def all_equal(self, value: object) -> bool:
        """Whether all ranks give the same value, compared by its `repr`."""
        if not self.several:
            return True
        digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "little")
        both = self._agreed(torch.tensor([digest, -digest]), dist.ReduceOp.MAX)
        return bool(both[0] == -both[1])

    def compare(self, what: str, facts: Mapping[str, object]) -> None:
        """Reject ranks that do not have the same facts, with names, values and hosts."""
        # the store knows what differs, but there a rank that is gone would be waited for
        if self.peers is not None and not self.all_equal({name: str(fact) for name, fact in facts.items()}):
            self.peers.compare(what, facts)

    def compare_weights(self, digest: Tensor, step: int, compared: int) -> None:
        """Reject replicas whose weights differ after a step; they were last compared after step `compared`."""
        own = int(digest.item())
        if self.peers is None or self.all_equal(own):
            return
        self.peers.compare(
            f"weights/{step}",
            {f"hash of the weights after step {step}": f"{own & 2**64 - 1:016x}"},
            f"they were equal after step {compared}; a device, its memory or a library on one of them is faulty: leave "
            f"it out; the same command resumes from the last checkpoint",
        )

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.largest(0)

    def total(self, value: float) -> float:
        """The sum over ranks of a number on the host."""
        if not self.several:
            return value
        return float(self._agreed(torch.tensor([value], dtype=torch.float64), dist.ReduceOp.SUM))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of a tensor on the device, which nothing waits for; begun when all ranks are here."""
        if not self.several:
            return tensor
        self.barrier()
        summed = tensor.clone()
        with self.exchange():
            dist.all_reduce(summed)
        return summed

    def from_main(self, word: str) -> str:
        """What the main rank gives, on all ranks; at most 64 bytes."""
        if not self.several:
            return word
        padded = (word if self.main else "").encode().ljust(64, b"\0")
        letters = self._agreed(torch.tensor(list(padded)), dist.ReduceOp.MAX)
        return bytes(letters.tolist()).rstrip(b"\0").decode()

    def tensor_from_each(self, tensor: Tensor) -> Tensor:
        """On the host, where each rank has filled its own part of zeros."""
        return self._agreed(tensor, dist.ReduceOp.SUM) if self.several else tensor

    def own_seconds(self) -> tuple[list[float], float]:
        """Seconds that each rank spent by itself since the last call, and how many have passed."""
        self.own.arrive()
        seconds = torch.zeros(self.world_size, dtype=torch.float64)
        seconds[self.rank], elapsed = self.own.take()
        return self.tensor_from_each(seconds).tolist(), elapsed

    def name_of(self, rank: int) -> str:
        """A rank with its host."""
        return self.peers.names[rank] if self.peers is not None else f"rank {rank}"

    def _agreed(self, values: Tensor, how: Any) -> Tensor:
        self.own.arrive()
        with self.exchange():
            dist.all_reduce(values, how, group=self.host)
        self.own.leave()
        return values

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Around everything that is sent between ranks: what fails in there names the rank that was lost."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.lost(str(error)) from error

    def lost(self, reason: str) -> LostRankError:
        """The error of a rank that cannot go on without the others."""
        who = (self.peers.why_lost() if self.peers is not None else "") or (
            f"another rank is gone, or did not answer within {self.timeout_minutes:g} minutes "
            f"(distributed.timeout_minutes)"
        )
        return LostRankError(
            f"rank {self.rank} of {self.world_size}: {who}; its own output says why; the same command resumes from the "
            f"last checkpoint ({_brief(reason)})"
        )


def _brief(reason: str) -> str:
    """The first sentence, without the place in somebody's source code."""
    line = reason.strip().splitlines()[0] if reason.strip() else "no reason known"
    return re.sub(r"^\[[^\]]*\]\s*", "", line).split(". ")[0][:160]


def is_of_exchange(error: Exception) -> bool:
    """Whether an exchange was broken off, because a rank is gone or too late."""
    if isinstance(error, torch.OutOfMemoryError) or is_compiler_error(error):  # whatever their messages list
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and bool(re.search(r"gloo|nccl|connection (closed|reset)", str(error), re.IGNORECASE))
    )


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
        f"the same command resumes from the last checkpoint"
    )


class Muted:
    """Stands on the other ranks where the main one has its log, ledger, saver and reporter; it does nothing."""

    last_saved: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None
