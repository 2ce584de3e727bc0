"""AdamW and the average of the weights in one pass over memory: each value is read once and written once.

PyTorch's fused AdamW writes the clipped gradient back, and the average reads the weights again: 44 bytes a weight, here
36. Moments, steps and averages stay where optimizer and average keep them, so nothing else knows of this. The kernel
finds the tensors by a table of addresses. Those of gradients change: a table is made for each set of them, and one that
is made while a graph is recorded is copied to the device by the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmldlm.model.kernels.update import ALIGNED, CHUNK, update_tensors
from mmldlm.training.graphs import MOST_RECORDINGS
from mmldlm.training.optim import Ema


@dataclass
class _Work:
    """What is the same for every update of the same tensors."""

    parameters: list[Tensor]
    steps: list[Tensor]
    table: Tensor
    """(tensors, columns) addresses; those of gradients are open."""
    tensors: Tensor
    """Of each program: the tensor that it updates a part of."""
    starts: Tensor
    """Of each program: its first value."""
    decays: Tensor
    """(tensors,)"""
    spare: list[Tensor] = field(default_factory=list)
    """Page-locked tables for recordings, during which no such memory can be had."""
    latest: tuple[list[int], Tensor] | None = None
    """Addresses of gradients outside recordings, and the table on the device that holds them."""


class FusedUpdate:
    """The update of all weights, where all are AdamW's and this process has them as a whole."""

    def __init__(self, adamw: torch.optim.Optimizer, ema: Ema | None) -> None:
        self.adamw, self.ema = adamw, ema
        self._known: tuple[list[tuple[int, ...]], _Work] | None = None
        self._recorded: list[Tensor] = []
        """Tables that recordings copy."""

    def __call__(self, skipped: Tensor, shrink: Tensor | None) -> bool:
        """Update with gradients times `shrink`, or not at all where `skipped` is 1; decided on the device.

        False, and nothing is done, where it is no update for this kernel: not all tensors exist yet, or others are
        averaged than are updated.
        """
        work = self.prepare(skipped, shrink)
        if work is None:
            return False
        torch._foreach_add_(work.steps, [1.0 - skipped] * len(work.steps))
        self._launch(work, skipped, shrink)
        return True

    def _launch(self, work: _Work, skipped: Tensor, shrink: Tensor | None) -> None:
        group, share = self.adamw.param_groups[0], None if self.ema is None else self.ema.share
        addresses = [p.grad.data_ptr() for p in work.parameters if p.grad is not None]
        update_tensors(
            self._table(work, addresses), work.tensors, work.starts, work.decays, group["lr"], share, skipped, shrink,
            betas=group["betas"], eps=group["eps"], wide=not any(address % ALIGNED for address in addresses),
        )  # fmt: skip

    def prepare(self, skipped: Tensor, shrink: Tensor | None) -> _Work | None:
        """Tables for the tensors of now, made again where they are others than before, but not in a recording.

        Then the kernel is launched once with nothing to do, so that no recording has to compile or load it.
        """
        pairs = [
            (p, float(group["weight_decay"]))
            for group in self.adamw.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        averages = {} if self.ema is None else self.ema.followed()
        if not pairs or averages is None or (averages and averages.keys() != {p for p, _ in pairs}):
            return None
        rows = []
        for p, _ in pairs:
            state = self.adamw.state[p]
            if "exp_avg" not in state:
                return None
            parts = [p, state["exp_avg"], state["exp_avg_sq"], averages.get(p, p)]
            if not all(part.dtype == torch.float32 and part.is_contiguous() for part in (*parts, p.grad)):
                return None
            weight, *rest = (part.data_ptr() for part in parts)
            if any(address % ALIGNED for address in (weight, *rest)):
                return None
            rows.append((weight, 0, *rest, state["step"].data_ptr(), p.numel()))
        if self._known is None or self._known[0] != rows:
            if _recording(pairs[0][0]):
                return None
            self._known = (rows, self._make(pairs, rows))
            self._launch(self._known[1], torch.ones_like(skipped), shrink)
        work = self._known[1]
        if not _recording(work.tensors):
            work.spare += [_host_like(work) for _ in range(MOST_RECORDINGS - len(work.spare))]
        return work

    def _make(self, pairs: list[tuple[Tensor, float]], rows: list[tuple[int, ...]]) -> _Work:
        device = pairs[0][0].device
        parts = [(i, start) for i, (p, _) in enumerate(pairs) for start in range(0, p.numel(), CHUNK)]
        table = torch.tensor(rows, dtype=torch.int64)
        return _Work(
            parameters=[p for p, _ in pairs],
            steps=[self.adamw.state[p]["step"] for p, _ in pairs],
            table=table,
            tensors=torch.tensor([i for i, _ in parts], dtype=torch.int32).to(device),
            starts=torch.tensor([start for _, start in parts], dtype=torch.int64).to(device),
            decays=torch.tensor([decay for _, decay in pairs], dtype=torch.float32).to(device),
        )

    def _table(self, work: _Work, gradients: list[int]) -> Tensor:
        """With these addresses, on the device."""
        recording = _recording(work.tensors)
        if recording or work.latest is None or work.latest[0] != gradients:
            host = work.spare.pop() if recording else _host_like(work)
            host.copy_(work.table)
            host[:, 1] = torch.tensor(gradients)
            table = host.to(work.tensors.device, non_blocking=True)
            if recording:
                self._recorded.append(host)
                return table
            work.latest = gradients, table
        return work.latest[1]


def _recording(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _host_like(work: _Work) -> Tensor:
    """Memory of the host for a table, from which it travels to the device while the host goes on."""
    return torch.empty_like(work.table, pin_memory=work.tensors.is_cuda)
