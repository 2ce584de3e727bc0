"""The denoiser on every rank: DistributedDataParallel, and a step that all ranks finish or none (see `lockstep`).

The exchanges are the sums of buckets of gradients, which have the same order on all ranks. After a step that one rank
failed in all of them wrap the denoiser again, because DDP does not survive a backward pass that was cut off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from mmldlm.config import DistributedConfig
from mmldlm.distributed.lockstep import Exchange, GivenUpError, Lockstep
from mmldlm.distributed.ranks import LostRankError, Ranks

T = TypeVar("T")
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Applied(nn.Module):
    """A network and whatever is computed with it: DDP has to surround the loss too, which uses the heads."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, compute: Callable[[Any], T]) -> T:
        return compute(self.network)


class Replicas:
    """Runs the passes of a step so that gradients end up summed over ranks."""

    def __init__(self, network: nn.Module, ranks: Ranks, config: DistributedConfig) -> None:
        self.module, self.ranks, self.config = Applied(network), ranks, config
        self.ddp: DistributedDataParallel | None = None
        self.unreached: list[str] | None = None
        """Parameters that the loss does not depend on, such as those after the last use of a stream; found once."""
        self.lockstep = Lockstep(ranks)
        self._lost: LostRankError | None = None
        self._works: list[Any] = []
        self._laid: list[tuple[Tensor, nn.Parameter]] = []
        """Where passes run without DDP: the buckets, and the first parameter of each."""
        torch._dynamo.config.optimize_ddp = False  # blocks are compiled one by one; they need no further cuts

    def __call__(self, compute: Callable[[Any], T]) -> T:
        """Compute with the network, under DDP where it is wrapped."""
        result: T = (self.module if self.ddp is None else self.ddp)(compute)
        return result

    def run(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """All passes of a step, forward and backward each; the last one adds up the gradients of all ranks."""
        self._lost = None

        def work() -> list[T]:
            wrapped = self._wrapped(passes)
            with wrapped.no_sync():
                done = [each() for each in passes[:-1]]
            done.append(passes[-1]())
            if self._lost is not None:
                raise self._lost
            return done

        done = self.lockstep.run(len(passes), work, self._unwrap)
        self._works.clear()
        return done

    def summed(self, work: Callable[[], Tensor]) -> Tensor:
        """What each rank computes for itself, without DDP, summed over ranks in place: by all of them or by none."""
        local = self.lockstep.run("summed", work)
        with self.ranks.exchange():
            dist.all_reduce(local)
        return local

    def run_apart(self, passes: Callable[[], T], trial: Callable[[], object]) -> T:
        """Passes without DDP, as recorded graphs; gradients lie in buckets, which are summed after the last pass.

        `trial` is one pass, which shows what the loss reaches.
        """
        self._unwrap()

        def work() -> tuple[T, list[tuple[Tensor, Tensor]]]:
            self._lay_out_gradients(trial)
            done = passes()
            # here, because a rank that runs out of memory after the agreement would leave the others waiting
            return done, [(bucket, packed(bucket, self.config.compression)) for bucket, _ in self._laid]

        done, buckets = self.lockstep.run("apart", work)
        with self.ranks.exchange():
            sums = [sum_bucket(bucket, sent)[1] for bucket, sent in buckets]
            for summed in sums:
                summed.wait()
        return done

    def _lay_out_gradients(self, trial: Callable[[], object]) -> None:
        """Zeros to add gradients to, side by side in buckets; they stay where they are until they are dropped."""
        if self._laid and self._laid[0][1].grad is not None:
            return
        if self.unreached is None:
            self.unreached = self._find_unreached(trial)
        named, unreached = self.module.named_parameters(), set(self.unreached)
        reached = [p for name, p in named if p.requires_grad and name not in unreached]
        self._laid = []
        for bucket in _buckets(reached, self.config.bucket_mb):
            sizes = [parameter.numel() for parameter in bucket]
            flat = torch.zeros(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
            for parameter, part in zip(bucket, flat.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            self._laid.append((flat, bucket[0]))

    def _reduce(self, buffer: Tensor) -> Future[Tensor]:
        """The communication hook, called for each bucket in turn when its gradients are ready."""
        if self._lost is not None:
            return unchanged(buffer)
        try:
            self.lockstep.begin(self._exchange(buffer))
            work, summed = sum_bucket(buffer, packed(buffer, self.config.compression))
        except GivenUpError:
            return unchanged(buffer)  # raised after the backward pass, which it could only cut off
        except LostRankError as error:
            self._lost = error
        except RuntimeError as error:
            self._lost = self.ranks.lost(str(error))
        else:
            self._works.append(work)
            return summed
        return unchanged(buffer)

    def _exchange(self, buffer: Tensor) -> Exchange:
        size, kind, device = buffer.numel(), buffer.dtype, buffer.device

        def take_part() -> None:
            zeros = torch.zeros(size, dtype=kind, device=device)
            sum_bucket(zeros, packed(zeros, self.config.compression))[1].wait()

        return Exchange((size, kind), take_part)

    def _wrapped(self, passes: Sequence[Callable[[], T]]) -> DistributedDataParallel:
        if self.ddp is None:
            if self.unreached is None:
                self.unreached = self._find_unreached(passes[0])
            self._laid = []
            # a static graph is learned in the first backward pass, which has to be one that adds up
            self.ddp = self._wrap(self.unreached, static=self.config.static_graph and len(passes) == 1)
        return self.ddp

    def _find_unreached(self, one_pass: Callable[[], object]) -> list[str]:
        """Try a pass: DDP would wait for ever for gradients that never come."""
        one_pass()
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        names = [name for name, parameter in trained if parameter.grad is None]
        for _, parameter in trained:
            parameter.grad = None
        self.lockstep.agree()
        if not self.ranks.all_equal(names):
            raise RuntimeError("the loss reaches other parameters on other ranks")
        return names

    def _wrap(self, unreached: list[str], *, static: bool) -> DistributedDataParallel:
        # the only way to name parameters that DDP must not wait for; searching for them takes a pass a step
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.module, unreached)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # a newer name for broadcast_buffers, unknown to PyTorch 2.11
            wrapped = DistributedDataParallel(
                self.module, bucket_cap_mb=self.config.bucket_mb, gradient_as_bucket_view=True,
                broadcast_buffers=False, find_unused_parameters=False, static_graph=static, init_sync=False,
            )  # fmt: skip
        wrapped.register_comm_hook(None, lambda state, bucket: self._reduce(bucket.buffer()))
        return wrapped

    def reset(self) -> None:
        """Other parameters are trained from now on: take DDP off, and look again for what the loss leaves out."""
        self._unwrap()
        self.lockstep.forget()
        self.unreached, self._laid = None, []

    def _unwrap(self) -> None:
        """Take DDP off, after the sums in flight, which write into its memory. The next DDP may have other buckets."""
        for work in self._works:
            work.wait()
        self._works.clear()
        if self.ddp is not None:
            # DDP has no public way to take itself off a module that is to be wrapped again
            self.ddp._remove_autograd_hooks()
            self.ddp = None
            self.lockstep.forget()


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def weights_digest(parameters: Iterable[Tensor]) -> Tensor:
    """A whole number that one changed bit of a weight changes; computed on the device, which nothing waits for."""
    bits = [p.contiguous().view(_SAME_SIZE[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
    sums = torch.stack(bits)
    return (sums * (2 * torch.arange(len(bits), device=sums.device) + 1)).sum()


def packed(buffer: Tensor, compression: str) -> Tensor:
    """What a rank sends of a bucket: the bucket itself, or its share of the mean in half the bytes.

    The sum could exceed what fp16 holds; the mean does not.
    """
    if compression == "none":
        return buffer
    return buffer.to(KINDS[compression]).div_(dist.get_world_size())


def sum_bucket(buffer: Tensor, sent: Tensor) -> tuple[Any, Future[Tensor]]:
    """Begin the sum over ranks of a bucket, of which `sent` is `packed`; the work, and the future of the sum.

    DDP by itself would take the mean. Every part of our loss is a local sum over a global count, so the sum is the
    gradient of the step.
    """
    work: Any = dist.all_reduce(sent, async_op=True)
    if sent is buffer:
        return work, work.get_future().then(lambda future: future.value()[0])
    share = dist.get_world_size()
    return work, work.get_future().then(lambda future: buffer.copy_(future.value()[0]).mul_(share))


def _buckets(parameters: Sequence[nn.Parameter], megabytes: float) -> list[list[nn.Parameter]]:
    """The parameters in turn, in lists of so many MiB each."""
    buckets: list[list[nn.Parameter]] = [[]]
    room = megabytes * 2**20
    for parameter in parameters:
        if buckets[-1] and parameter.nbytes > room:
            buckets.append([])
            room = megabytes * 2**20
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return [bucket for bucket in buckets if bucket]


def unchanged(buffer: Tensor) -> Future[Tensor]:
    """The buffer as it is, where the step was abandoned."""
    future: Future[Tensor] = Future()
    future.set_result(buffer)
    return future
