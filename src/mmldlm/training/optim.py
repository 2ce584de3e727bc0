"""What turns gradients into weights: the learning rate, AdamW, Muon for matrices, and the average that is evaluated.

The learning rate is a pure function of the step; under `plateau` of the losses recorded so far as well. After a linear
warm-up every schedule gives a level, a share of `optim.lr`.

A parameter without a gradient is passed over: no step, no decay, no momentum. So what is frozen stays in its group with
all that the optimizer remembers of it, also in checkpoints, and continues from there when it is trained again.

`torch._foreach_*` are the operations on lists of tensors that PyTorch documents under these names.

Whether a step is skipped is decided on the device: a tensor `found_inf` of 1 leaves weights, moments and averages as
they are, and the host does not wait to know.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmldlm.checkpoint.state import load_optimizer_tensors, optimizer_tensors
from mmldlm.config import Config, OptimConfig
from mmldlm.model.denoiser import Denoiser
from mmldlm.model.weights import ParameterGroup, parameter_groups
from mmldlm.types import Piece

if TYPE_CHECKING:  # FSDP2 is loaded where it is needed
    from mmldlm.distributed.shards import Shards


def lr_at(step: int, num_steps: int, config: OptimConfig, reduction: float = 1.0) -> float:
    """Learning rate of update number `step`, counted from 0: linear warm-up, then what the schedule says.

    A warm-up longer than the run is allowed; the run then ends before the rate is reached. `reduction` is what the
    plateau schedule has come to; the others do not look at it.
    """
    peak = config.lr
    if config.schedule == "plateau":
        peak = max(config.lr * reduction, min(config.lr, config.plateau_min_lr))
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    return peak * _LEVELS[config.schedule](step, num_steps, config)


def _cosine(step: int, num_steps: int, config: OptimConfig) -> float:
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    return _falling(_half_wave(min(1.0, progress)), config)


def _restarts(step: int, num_steps: int, config: OptimConfig) -> float:
    """Cosine after cosine, number k of `restart_period * restart_factor^k` steps, wherever the run ends."""
    since, length = step - config.warmup_steps, config.restart_period
    if config.restart_factor == 1.0:
        since %= length
    exact = float(length)
    while since >= length:
        since -= length
        exact *= config.restart_factor
        length = round(exact)
    return _falling(_half_wave(since / length), config)


def _wsd(step: int, num_steps: int, config: OptimConfig) -> float:
    """1, and in the last `decay_share` of the steps a straight line down, that ends where the run does."""
    decay_steps = max(1, round(config.decay_share * num_steps))
    begin = max(num_steps - decay_steps, config.warmup_steps)
    return _falling(min(1.0, max(0.0, (num_steps - step) / max(1, num_steps - begin))), config)


def _constant(step: int, num_steps: int, config: OptimConfig) -> float:
    return 1.0


def _half_wave(progress: float) -> float:
    """From 1 to 0 as `progress` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _falling(share: float, config: OptimConfig) -> float:
    """From 1 to `min_lr_ratio` as `share` goes from 1 to 0."""
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share


_LEVELS: dict[str, Callable[[int, int, OptimConfig], float]] = {
    "cosine": _cosine,
    "restarts": _restarts,
    "wsd": _wsd,
    "constant": _constant,
    "plateau": _constant,
}


@dataclass
class Plateau:
    """What the plateau schedule remembers of the losses it was shown; kept in checkpoints."""

    best: float | None = None
    best_step: int = 0
    """Where that was, or where the rate was last reduced: from here on patience is counted."""
    reduction: float = 1.0
    """The rate is multiplied with this."""
    measure: str = ""
    """Name of the loss that was judged; best losses of another kind do not count."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        for name, value in (asdict(Plateau()) | dict(state)).items():
            setattr(self, name, value)

    def judge(self, step: int, measure: str, loss: float, config: OptimConfig) -> bool:
        """Look at the loss after `step` updates; true if the rate is reduced from here on."""
        if not math.isfinite(loss):
            return False
        if measure != self.measure:
            self.measure, self.best = measure, None
        if self.best is None or loss < self.best - config.plateau_threshold * abs(self.best):
            self.best, self.best_step = loss, step
            return False
        if step - max(self.best_step, config.warmup_steps) < config.plateau_patience:
            return False
        if config.lr * self.reduction <= config.plateau_min_lr:
            return False
        self.reduction *= config.plateau_factor
        self.best_step = step
        return True


def judged_loss(config: Config) -> str | None:
    """Name of the logged loss that the plateau schedule is judged on; None under the other schedules."""
    if config.optim.schedule != "plateau":
        return None
    return "valid_loss" if 0 < config.train.valid_every < config.train.steps else "loss"


_FUSED_DEVICES = ("cpu", "cuda")
"""Where PyTorch's fused optimizers are known to look at `found_inf`."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_MOST_GATHERED = 2**28
"""Values that are gathered at a time from all ranks."""


@dataclass
class Optimizers:
    """Each parameter belongs to one of them."""

    parts: list[torch.optim.Optimizer]
    names: Mapping[nn.Parameter, str] = field(default_factory=dict)
    """Of the parameters, for checkpoints."""
    still: dict[nn.Parameter, slice] = field(default_factory=dict)
    """Rows that get no update although the rest of their matrix does, because nothing depends on them at present."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def recordable(self) -> bool:
        """Whether a step can be recorded: nothing in it waits for the device."""
        return all(_decides_on_device(part) for part in self.parts)

    def set_lr(self, lr: float) -> None:
        """The same rate for all groups; on a GPU it is a tensor, which a recorded update reads anew."""
        for group in self.param_groups:
            group["lr"] = set_rate(group["lr"], lr)

    def gradients(self) -> list[Tensor]:
        """All that exist."""
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget the gradients, or make them zero where they are."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Take the scale of fp16 out of the gradients."""
        for part in self.parts if scaler.is_enabled() else []:
            scaler.unscale_(part)

    def step(self, scaler: torch.amp.GradScaler, skipped: Tensor, shrink: Tensor | None) -> None:
        """Update with gradients times `shrink`, or not at all where `skipped` is 1; decided on the device."""
        home = self.param_groups[0]["params"][0].device  # the host, where shards are offloaded
        skipped, shrink = skipped.to(home), None if shrink is None else shrink.to(home)
        kept = [(rows, rows.clone()) for rows in self._still_rows()]
        for rows, _ in kept:
            rows.zero_()  # a matrix that is made orthogonal as a whole is made so without them
        for part in self.parts:
            _step(part, skipped, shrink)
        for rows, before in kept:
            rows.copy_(before)
        if scaler.is_enabled():
            scaler.update()

    def _still_rows(self) -> list[Tensor]:
        """Of the parameters themselves and of all that is kept for each of their values; their gradients are 0."""
        values_held = []
        for parameter, rows in self.still.items():
            kept = [value for part in self.parts for value in part.state.get(parameter, {}).values()]
            whole = [value for value in kept if isinstance(value, Tensor) and value.shape == parameter.shape]
            values_held += [tensor.detach()[rows] for tensor in (parameter, *whole)]
        return values_held

    def state_dict(self) -> dict[str, Tensor]:
        """All that the optimizers keep for each parameter."""
        return {
            key: tensor for part in self.parts for key, tensor in optimizer_tensors(part, self.names).items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` returned; what belongs to no parameter is named in the error of the first."""
        rest = dict(state)
        for part in reversed(self.parts):
            mine = {self.names[p] for group in part.param_groups for p in group["params"]}
            if part is not self.parts[0]:
                chosen = {key: value for key, value in rest.items() if key.partition(".")[2] in mine}
            else:
                chosen = rest
            load_optimizer_tensors(part, self.names, dict(chosen))
            rest = {key: value for key, value in rest.items() if key not in chosen}


def set_rate(held: float | Tensor, rate: float) -> float | Tensor:
    """The same tensor with another value, or the value itself where no tensor is held."""
    return held.fill_(rate) if isinstance(held, Tensor) else rate


def _rate_on(device: torch.device, rate: float) -> float | Tensor:
    return torch.tensor(rate, device=device) if device.type == "cuda" else rate


def _decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is skipped without the host knowing."""
    return bool(optimizer.defaults.get("fused")) or isinstance(optimizer, Muon)


def _step(optimizer: torch.optim.Optimizer, skipped: Tensor, shrink: Tensor | None) -> None:
    if _decides_on_device(optimizer):
        # the kernel looks at these: nothing waits for the device, and clipping takes no pass of its own
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.grad_scale = None if shrink is None else shrink.reciprocal()  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():
        if shrink is not None:
            grads = [
                p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            torch._foreach_mul_(grads, shrink)
        optimizer.step()


def build_optimizers(
    denoiser: Denoiser, config: OptimConfig, *, fused: bool, shards: Shards | None = None
) -> Optimizers:
    """Groups with and without decay; the fused kernels are used where the device has them.

    `shards` hold the rows of each parameter that this rank updates; None: all of them.
    """
    held = dict(denoiser.named_parameters()) if shards is None else shards.held
    groups = [
        replace(group, parameters={name: held[name] for name in group.parameters})
        for group in parameter_groups(denoiser)
    ]
    device = next(iter(held.values())).device
    fused = fused and device.type in _FUSED_DEVICES
    rate = _rate_on(device, config.lr) if fused else config.lr
    matrices = [_part(group, config, muon=True) for group in groups] if config.name == "muon" else []
    others = [_part(group, config, muon=False) for group in groups]
    adamw = AdamW(
        [group for group in others if group["params"]],
        lr=rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused,
        capturable=isinstance(rate, Tensor),
    )  # fmt: skip
    matrices = [group for group in matrices if group["params"]]
    names = {parameter: name for name, parameter in held.items()}
    muon = [Muon(matrices, lr=rate, momentum=config.muon_momentum, shards=shards)] if matrices else []
    return Optimizers([adamw, *muon], names)


def _part(group: ParameterGroup, config: OptimConfig, *, muon: bool) -> dict[str, Any]:
    """Parameters of a group that Muon takes (matrices inside blocks), or those that it leaves."""
    taken = config.name == "muon" and group.decay
    chosen = [p for name, p in group.parameters.items() if (taken and name.startswith("blocks.")) == muon]
    decay = config.weight_decay if group.decay else 0.0
    return {"params": chosen, "weight_decay": decay, "part": group.part}


class _Uncompiled(torch.optim.Optimizer):
    """Optimizers of PyTorch import its compiler, which takes 1.2 s, to hide from it. These are never compiled."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(_Uncompiled, torch.optim.AdamW):
    """That of PyTorch."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(_Uncompiled, torch.optim.SGD):
    """That of PyTorch."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class Muon(_Uncompiled):
    """Momentum whose matrices are made orthogonal before they are applied; all of one shape at once. For matrices only.

    Keller Jordan, 2024. The update is scaled as in Moonlight (Liu et al., 2025), so that its size is that of AdamW and
    one learning rate serves both. `torch.optim.Muon` cannot skip a step on the device, and loops over matrices;
    `found_inf` and `grad_scale` are read here as PyTorch's fused AdamW reads them.
    """

    found_inf: Tensor | None = None
    """1 where the step is to change nothing."""
    grad_scale: Tensor | None = None
    """What gradients are divided by first."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor,
        momentum: float = 0.95,
        shards: Shards | None = None,
    ) -> None:
        """With `shards` the matrices are rows of larger ones, which are gathered to be made orthogonal."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.shards = shards
        self._whole: dict[Any, Piece] = {}
        if shards is not None:
            self._whole = {shards.held[name]: piece for name, piece in shards.pieces.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            for parameters in self._by_shape(group["params"]):
                self._update(parameters, **{key: group[key] for key in ("lr", "momentum", "weight_decay")})

    def _update(
        self, parameters: list[Tensor], *, lr: float | Tensor, momentum: float, weight_decay: float
    ) -> None:
        buffers = [self._buffer(parameter) for parameter in parameters]
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.grad_scale is not None:
            grads = list(torch._foreach_div(grads, self.grad_scale))
        keep: float | Tensor = 1.0
        if self.found_inf is not None:
            keep = 1.0 - self.found_inf
            # a gradient equal to its average leaves the average as it is
            grads = [torch.where(self.found_inf > 0, b, g) for b, g in zip(buffers, grads, strict=True)]
        torch._foreach_lerp_(buffers, grads, 1.0 - momentum)
        ahead = torch._foreach_lerp(grads, buffers, momentum)
        updates = self._orthogonal(torch.stack(ahead), parameters[0]).to(parameters[0].dtype)
        size = 0.2 * max(self._shape(parameters[0])) ** 0.5
        torch._foreach_mul_(parameters, 1.0 - lr * weight_decay * keep)
        torch._foreach_sub_(parameters, list((updates * (lr * size * keep)).unbind(0)))

    def _orthogonal(self, matrices: Tensor, parameter: Tensor) -> Tensor:
        """Of the matrices of one shape; where each rank holds some rows, these rows of the result."""
        if self.shards is None:
            return orthogonalize(matrices)
        piece = self._whole[parameter]
        own = slice(piece.start, piece.start + piece.rows)
        few = max(1, _MOST_GATHERED // math.prod(piece.shape))
        parts = [
            orthogonalize(self.shards.gathered(some.bfloat16(), piece))[:, own]
            for some in matrices.split(few)
        ]
        return torch.cat(parts).to(matrices.device)

    def _shape(self, parameter: Tensor) -> tuple[int, ...]:
        piece = self._whole.get(parameter)
        return tuple(parameter.shape) if piece is None else piece.shape

    def _by_shape(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                shapes.setdefault(self._shape(parameter), []).append(parameter)
        return list(shapes.values())

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        assert isinstance(buffer, Tensor)
        return buffer


def orthogonalize(matrices: Tensor) -> Tensor:
    """(n, rows, columns) -> the same singular vectors with singular values near 1, by Newton-Schulz in bf16."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Ema:
    """Keeps an average of every parameter. Early on the average is short, so that it never lags the start."""

    def __init__(
        self, module: nn.Module, decay: float, held: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        """`held` are the rows of each parameter that are averaged here; None: all of them."""
        self.decay = decay
        self.parameters = dict(held or module.named_parameters())
        self.average = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.follow(frozenset(self.parameters), {})

    def follow(self, names: Set[str], rows: Mapping[str, slice]) -> None:
        """From now on only these averages move, and of some of them only these rows."""
        chosen = {name: rows.get(name, slice(None)) for name in self.parameters if name in names}
        self._whole = None if rows else [(self.parameters[name], self.average[name]) for name in chosen]
        averages = [self.average[name][part] for name, part in chosen.items()]
        for average, (name, part) in zip(averages, chosen.items(), strict=True):
            average.grad = self.parameters[name].detach()[part]
        fused = all(average.device.type in _FUSED_DEVICES for average in averages)
        rate = _rate_on(averages[0].device, 1.0) if fused and averages else 1.0
        self._descent = SGD(averages, lr=rate, weight_decay=1.0, maximize=True, fused=fused)

    def followed(self) -> dict[nn.Parameter, Tensor] | None:
        """Parameter -> its average, for all whose average moves; None where of some only a part does."""
        return None if self._whole is None else dict(self._whole)

    @property
    def share(self) -> Tensor:
        """What the next update counts in the average; on a GPU a tensor that a recorded update reads anew."""
        rate: Tensor = self._descent.param_groups[0]["lr"]
        return rate

    def set_step(self, step: int) -> None:
        """The next update is number `step`, counted from 1."""
        group, decay = self._descent.param_groups[0], min(self.decay, (1.0 + step) / (10.0 + step))
        group["lr"] = set_rate(group["lr"], 1.0 - decay)

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """After an update of the weights; where `skipped` is 1, no bit moves, and nothing waits to know.

        A step of gradient descent on |average - weight|^2 / 2, average -= (1 - decay) (average - weight), with the
        weight as the gradient and the average as the decay. PyTorch's fused SGD looks at the flag on the device, and
        needs no memory for differences.
        """
        skipped = skipped.to(next(iter(self.average.values())).device)
        if not self._descent.defaults["fused"]:
            group = self._descent.param_groups[0]
            for average in group["params"]:
                average.lerp_(average.grad, group["lr"] * (1.0 - skipped))
            return
        self._descent.found_inf = skipped  # type: ignore[attr-defined]
        self._descent.step()

    def state_dict(self) -> dict[str, Tensor]:
        """The averages."""
        return self.average

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put averages back."""
        for name, tensor in state.items():
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
            average = self.average[name]
            average.data, parameter.data = parameter.data, average.data
