"""Exponential average of the weights: what is evaluated, sampled from and exported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor, nn


class Ema:
    """Keeps an average of every parameter. Early on the average is short, so that it never lags the start."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(module.named_parameters())
        self.average = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.follow(frozenset(self.parameters), {})

    def follow(self, names: Set[str], rows: Mapping[str, slice]) -> None:
        """From now on only these averages move, and of some of them only these rows."""
        self._rows = {name: rows.get(name, slice(None)) for name in self.parameters if name in names}

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor) -> None:
        """After update number `step`, counted from 1; where `skipped` is 1, no bit moves, and nothing waits to know.

        A step of gradient descent on |average - weight|^2 / 2, average -= (1 - decay) (average - weight), written so
        that PyTorch's fused kernel does it: it looks at the flag on the device, and needs no memory for differences.
        """
        decay = min(self.decay, (1.0 + step) / (10.0 + step))
        averages = [self.average[name][rows] for name, rows in self._rows.items()]
        weights = [self.parameters[name][rows] for name, rows in self._rows.items()]
        torch._fused_sgd_(
            averages, weights, [],
            lr=1.0 - decay, weight_decay=1.0, maximize=True, found_inf=skipped,
            momentum=0.0, dampening=0.0, nesterov=False, is_first_step=False,
        )  # fmt: skip

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore saved averages."""
        for name, tensor in tensors.items():
            self.average[name].copy_(tensor)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the module has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.data, self.average[name] = self.average[name], parameter.data
