"""What reading cannot tell: one forward and backward, watched.

Lists parameters without a gradient, host synchronisations, graph breaks and surprising types. The callable given by the
user returns the module and a function without arguments that gives its loss.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError

LossFunction = Callable[[], Any]
_SYNCS = {
    "aten::_local_scalar_dense": ".item(), float(), int() or a branch on a tensor",
    "aten::nonzero": "nonzero or a boolean index",
    "aten::masked_select": "masked_select or a boolean index",
    "aten::unique_dim": "unique",
    "aten::_unique2": "unique",
    "aten::equal": "torch.equal",
}
"""Operations whose result the host must wait for, on any device."""


@dataclass
class ProbeReport:
    """What one forward and backward showed."""

    name: str
    loss: float
    loss_dtype: str
    without_gradient: list[str] = field(default_factory=list)
    zero_gradient: list[str] = field(default_factory=list)
    nonfinite_gradient: list[str] = field(default_factory=list)
    syncs: dict[str, int] = field(default_factory=dict)
    """Where -> how often."""
    graph_breaks: list[str] | None = None
    """None: not asked for, or compilation is not available."""
    dtypes: list[str] = field(default_factory=list)

    @property
    def problems(self) -> int:
        """How many things are worth a look."""
        found = len(self.without_gradient) + len(self.nonfinite_gradient) + len(self.syncs) + len(self.dtypes)
        return found + len(self.graph_breaks or [])


def load_target(target: str) -> tuple[Any, LossFunction]:
    """Import `module:function` and call it."""
    name, colon, function = target.partition(":")
    if not colon or not name or not function:
        raise UserError(f"{target!r}: write module:function, such as train:probe")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(name), function)()
    except ModuleNotFoundError as error:
        raise UserError(
            f"{target}: cannot be imported from {Path.cwd()}: {error}; run in the folder of the module"
        ) from error
    except AttributeError as error:
        raise UserError(f"{target}: {error}; name a function of the module") from error
    finally:
        sys.path.pop(0)
    if (
        not isinstance(made, tuple)
        or len(made) != 2
        or not callable(made[1])
        or not hasattr(made[0], "named_parameters")
    ):
        raise UserError(
            f"{target}: must return (module, function that gives the loss), not {type(made).__name__}"
        )
    return made


def probe(name: str, module: Any, loss_function: LossFunction, *, graph_breaks: bool = True) -> ProbeReport:
    """Run one forward and backward and report."""
    import torch

    module.zero_grad(set_to_none=True)
    watcher = _make_watcher()
    with watcher:
        loss = loss_function()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UserError(f"{name}: the loss must be a tensor with one element, not {type(loss).__name__}")
        loss.backward()
    report = ProbeReport(name, float(loss.detach()), str(loss.dtype).removeprefix("torch."))
    for parameter_name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            report.without_gradient.append(parameter_name)
        elif not bool(torch.isfinite(parameter.grad).all()):
            report.nonfinite_gradient.append(parameter_name)
        elif not bool(parameter.grad.any()):
            report.zero_gradient.append(parameter_name)
    report.syncs = dict(watcher.syncs)
    report.dtypes = _dtype_surprises(module, watcher, report)
    module.zero_grad(set_to_none=True)
    if graph_breaks:
        report.graph_breaks = _find_breaks(loss_function)
    return report


def _make_watcher() -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watcher(TorchDispatchMode):
        """Sees every operation of the forward and backward."""

        def __init__(self) -> None:
            super().__init__()
            self.syncs: Counter[str] = Counter()
            self.double: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            operation = func.name().split(".")[0]
            if operation in _SYNCS:
                self.syncs[f"{_caller()}: {_SYNCS[operation]}"] += 1
            elif operation == "aten::_to_copy" and _leaves_gpu(args, result):
                self.syncs[f"{_caller()}: copy to the host"] += 1
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                self.double[_caller()] += 1
            return result

    return Watcher()


def _leaves_gpu(args: Any, result: Any) -> bool:
    source = args[0] if args else None
    return getattr(getattr(source, "device", None), "type", "cpu") != "cpu" and result.device.type == "cpu"


def _caller() -> str:
    """The innermost line of code that belongs neither to torch nor to this module."""
    for frame in reversed(traceback.extract_stack()):
        inside = (
            f"{os.sep}torch{os.sep}" in frame.filename
            or frame.filename == __file__
            or frame.filename.startswith("<")
        )
        if not inside:
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "backward"


def _dtype_surprises(module: Any, watcher: Any, report: ProbeReport) -> list[str]:
    kinds = Counter(str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.requires_grad)
    found = []
    if len(kinds) > 1:
        found.append(
            "trained parameters have several types: " + ", ".join(f"{k} ({n})" for k, n in kinds.items())
        )
    found += [
        f"{count} trained parameters are {kind}: small updates are lost"
        for kind, count in kinds.items()
        if kind in ("bfloat16", "float16")
    ]
    if report.loss_dtype in ("bfloat16", "float16"):
        found.append(f"the loss is {report.loss_dtype}; reduce it in float32")
    found += [f"{place}: {count} results in float64" for place, count in watcher.double.most_common(5)]
    return found


def _find_breaks(loss_function: LossFunction) -> list[str] | None:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch._dynamo.reset()
            explanation = torch._dynamo.explain(loss_function)()
    except Exception as error:  # the tracer raises many kinds; that it failed is the finding
        return [f"cannot be traced: {' '.join(str(error).split())[:200]}"]
    finally:
        torch._dynamo.reset()
    breaks = []
    for reason in explanation.break_reasons:
        frame = reason.user_stack[-1] if reason.user_stack else None
        place = f"{Path(frame.filename).name}:{frame.lineno}: " if frame else ""
        breaks.append(place + " ".join(str(reason.reason).split())[:160])
    return breaks
