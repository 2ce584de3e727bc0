"""Everything that must survive a restart, as named tensors and plain JSON. Nothing is ever pickled.

A run is a list of named parts, each with `state_dict` and `load_state_dict`. Of a part's state the tensors become a
group of the checkpoint (a file) and the rest an entry of its `meta`, both under the part's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from mmldlm.errors import UserError

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a dotted name that data parallelism, compilation or activation checkpointing put in."""

META = "meta.json"
_MOST_NAMED = 8
"""Tensors that a message names."""
META_GROUP = "meta"

_ELEMENTWISE = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer"})
"""Optimizer tensors that have one value for each value of the parameter."""


@dataclass
class Snapshot:
    """The state of a run after `step` updates."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    """Group -> name -> tensor; each group (`model`, `ema`, `optimizer`, ...) becomes one safetensors file."""
    meta: dict[str, Any] = field(default_factory=dict)
    """JSON: position in the data, settings, fingerprint, versions, schedules, counters."""


class Part(Protocol):
    """Something that a run has to remember."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors, and values that JSON can hold."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Put back what `state_dict` returned."""
        ...


class ModuleWeights:
    """The weights of a module as a part of a run."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_weights(self.module, state, source="the checkpoint")


class HeldWeights:
    """The rows of the weights that this rank holds, as a part of a run."""

    def __init__(self, held: Mapping[str, nn.Parameter]) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.held.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_fit(self.held, state, whose="the model", source="the checkpoint")
        for name, parameter in self.held.items():
            parameter.copy_(state[name])


def take_snapshot(parts: Mapping[str, Part], step: int, about: Mapping[str, Any]) -> Snapshot:
    """The state of all parts after `step` updates; `about` describes the run in the meta of the checkpoint."""
    tensors: dict[str, dict[str, Tensor]] = {}
    meta = dict(about)
    for name, part in parts.items():
        state = part.state_dict()
        if held := {key: value for key, value in state.items() if isinstance(value, Tensor)}:
            tensors[name] = held
        meta[name] = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    return Snapshot(step, tensors, meta)


def restore_snapshot(parts: Mapping[str, Part], snapshot: Snapshot) -> None:
    """Put all parts back; one that is younger than the checkpoint stays as it is."""
    for name, part in parts.items():
        state = {**snapshot.tensors.get(name, {}), **snapshot.meta.get(name, {})}
        if state:
            part.load_state_dict(state)


def plain_name(name: str) -> str:
    """The name without what wrappers put in, anywhere: `module.a._orig_mod.b` -> `a.b`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _plain_names(names: Iterable[str], source: str) -> dict[str, str]:
    """Plain name -> original name; two names that become the same are an error."""
    by_plain: dict[str, str] = {}
    for name in names:
        plain = plain_name(name)
        if plain in by_plain:
            raise UserError(
                f"{source}: {by_plain[plain]} and {name} are both {plain} without their wrapper prefixes"
            )
        by_plain[plain] = name
    return by_plain


def load_weights(module: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy the tensors into the module; every key must fit. `source` says in errors where they come from."""
    wanted, offered = require_fit(module.state_dict(), tensors, whose=type(module).__name__, source=source)
    module.load_state_dict({wanted[name]: tensors[offered[name]] for name in wanted}, strict=True)


def require_fit(
    state: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, whose: str, source: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Plain name -> name in the state, and in the tensors; `UserError` unless names and shapes are the same."""
    wanted, offered = _plain_names(state, whose), _plain_names(tensors, source)
    problems = {
        "missing": sorted(wanted.keys() - offered.keys()),
        "unexpected": sorted(offered.keys() - wanted.keys()),
        "wrong shape": [
            f"{name} {tuple(tensors[offered[name]].shape)} instead of {tuple(state[wanted[name]].shape)}"
            for name in sorted(wanted.keys() & offered.keys())
            if tensors[offered[name]].shape != state[wanted[name]].shape
        ],
    }
    _reject(problems, f"{source} does not fit the model", "use the settings that the weights were made with")
    return wanted, offered


def _reject(problems: dict[str, list[str]], what: str, remedy: str) -> None:
    listed = []
    for kind, names in problems.items():
        more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        listed += [f"{kind}: {', '.join([*names[:_MOST_NAMED], *more])}"] if names else []
    if listed:
        raise UserError(f"{what}: {'; '.join(listed)}; {remedy}")


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> dict[str, Tensor]:
    """All that the optimizer keeps for each parameter, tensors alone, as `exp_avg.<name>`, `step.<name>` and so on.

    Learning rates and betas are settings, not state, and stay with the settings.
    """
    return {
        f"{key}.{plain_name(names[cast(nn.Parameter, parameter)])}": tensor
        for parameter, state in optimizer.state.items()
        for key, tensor in state.items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: Mapping[str, Tensor]
) -> None:
    """Put the optimizer back bit by bit into the state it was saved in; all that does not fit is named.

    A parameter that never had a gradient has no state, and loses what it had gained since. One that has a
    part of what its parameter group keeps is damaged, and rejected.
    """
    states = _by_parameter(tensors)
    groups = [{plain_name(names[p]): p for p in group["params"]} for group in optimizer.param_groups]
    known = {name for group in groups for name in group}
    problems: dict[str, list[str]] = {
        "missing": [],
        "unexpected": sorted(f"{key}.{name}" for name in states.keys() - known for key in states[name]),
        "wrong shape": [],
    }
    for group in groups:
        _compare(group, states, problems)
    _reject(
        problems, "the saved optimizer state does not fit the model", "resume with the settings of the run"
    )
    for group, options in zip(groups, optimizer.param_groups, strict=True):
        for name, parameter in group.items():
            _restore(optimizer, parameter, states.get(name, {}), options)


def _by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    states: dict[str, dict[str, Tensor]] = {}
    for label, tensor in tensors.items():
        key, _, name = label.partition(".")
        states.setdefault(plain_name(name), {})[key] = tensor
    return states


def _compare(
    group: Mapping[str, nn.Parameter],
    states: Mapping[str, Mapping[str, Tensor]],
    problems: dict[str, list[str]],
) -> None:
    """Parameters of a group keep the same things."""
    present = {name: states[name] for name in group if name in states}
    expected = {key for state in present.values() for key in state}
    for name, state in present.items():
        problems["missing"] += sorted(f"{key}.{name}" for key in expected - state.keys())
        for key in sorted(_ELEMENTWISE & state.keys()):
            if state[key].shape != group[name].shape:
                shapes = f"{tuple(state[key].shape)} instead of {tuple(group[name].shape)}"
                problems["wrong shape"].append(f"{key}.{name} {shapes}")


def _restore(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    state: Mapping[str, Tensor],
    options: Mapping[str, Any],
) -> None:
    if not state:
        optimizer.state.pop(parameter, None)
        return
    # The count of steps lives on the host unless the optimizer runs wholly on the device; types stay as saved
    on_device = options.get("capturable") or options.get("fused")
    home = parameter.device if on_device else torch.device("cpu")
    optimizer.state[parameter] = {
        key: value.detach().to(home if key == "step" else parameter.device, copy=True)
        for key, value in state.items()
    }
