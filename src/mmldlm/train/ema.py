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
    def update(self, step: int) -> None:
        """After update number `step`, counted from 1."""
        decay = min(self.decay, (1.0 + step) / (10.0 + step))
        averages = [self.average[name][rows] for name, rows in self._rows.items()]
        weights = [self.parameters[name][rows] for name, rows in self._rows.items()]
        torch._foreach_lerp_(averages, weights, 1.0 - decay)

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
