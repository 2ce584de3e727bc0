"""What reading cannot tell: one forward and backward, watched.

Lists parameters without a gradient, host synchronisations, graph breaks and surprising types. The callable given by the
user returns the module and a function without arguments that gives its loss.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traindoctor.errors import UserError

LossFunction = Callable[[], Any]
_SYNCS = {
    "aten::_local_scalar_dense": ".item(), float(), int() or a branch on a tensor",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::unique_dim": "unique",
    "aten::_unique2": "unique",
    "aten::equal": "torch.equal",
    "aten::bincount": "bincount",
}
"""Operations whose result the host must wait for, on any device."""
_CUDA_SYNC = "called a synchronizing CUDA operation"


@dataclass
class ProbeReport:
    """What one forward and backward showed."""

    name: str
    loss: float
    loss_dtype: str
    without_gradient: list[str] = field(default_factory=list)
    zero_gradient: list[str] = field(default_factory=list)
    nonfinite_gradient: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Declared to get no gradient, and they get none."""
    wrongly_declared: list[str] = field(default_factory=list)
    """Declared to get no gradient, but they get one."""
    syncs: dict[str, int] = field(default_factory=dict)
    """Where -> how often."""
    graph_breaks: list[str] | None = None
    """None: not asked for, or compilation is not available."""
    dtypes: list[str] = field(default_factory=list)

    @property
    def problems(self) -> int:
        """How many things are worth a look."""
        found = len(self.without_gradient) + len(self.nonfinite_gradient) + len(self.wrongly_declared)
        found += len(self.syncs) + len(self.dtypes)
        return found + len(self.graph_breaks or [])


def load_target(target: str) -> tuple[Any, LossFunction, frozenset[str]]:
    """Import `module:function` and call it: the module, its loss, names of parameters meant to get no gradient."""
    name, colon, function = target.partition(":")
    if not colon or not name or not function:
        raise UserError(f"{target!r}: write module:function, such as train:probe")
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "probe needs torch, which is not installed in this environment; install it or use another"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        source = _run(target, lambda: importlib.import_module(name))
        maker = getattr(source, function, None)
        if not callable(maker):
            raise UserError(f"{target}: the module has no function {function!r}; name one of its functions")
        result = _run(target, maker)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{target}: cannot be imported from {Path.cwd()}: {error}; run in the folder of the module"
        ) from error
    finally:
        sys.path.pop(0)
    if (
        not isinstance(result, tuple)
        or len(result) not in (2, 3)
        or not callable(result[1])
        or not hasattr(result[0], "named_parameters")
    ):
        raise UserError(
            f"{target}: must return (module, function that gives the loss), not {type(result).__name__}"
        )
    module, loss = result[:2]
    return module, loss, frozenset(result[2]) if len(result) == 3 else frozenset()


def _run(name: str, function: Callable[[], Any]) -> Any:
    """Call foreign code; its errors are told in one line with the place where they arose."""
    try:
        return function()
    except (UserError, ModuleNotFoundError):
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = " ".join(str(error).split())[:300]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise UserError(f"{name}: {type(error).__name__} at {place}: {what}") from error


def probe(
    name: str,
    module: Any,
    loss_function: LossFunction,
    *,
    graph_breaks: bool = True,
    unused: frozenset[str] = frozenset(),
) -> ProbeReport:
    """Run one forward and backward and report; `unused` are parameters that are meant to get no gradient."""
    import torch

    module.zero_grad(set_to_none=True)
    watcher = _make_watcher()
    with _cuda_sync_warnings() as waits, watcher:
        loss = _run(name, loss_function)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UserError(f"{name}: the loss must be a tensor with one element, not {type(loss).__name__}")
        _run(name, loss.backward)
    report = ProbeReport(name, float(loss.detach()), str(loss.dtype).removeprefix("torch."))
    for parameter_name, parameter in module.named_parameters():
        if parameter.requires_grad:
            declared = parameter_name in unused
            _judge_gradient(report, parameter_name, parameter.grad, declared=declared)
    report.syncs = dict(watcher.syncs)
    if len(waits) > watcher.syncs.total():  # CUDA itself saw more than the operations tell
        report.syncs["elsewhere, as CUDA reports"] = len(waits) - watcher.syncs.total()
    report.dtypes = _dtype_surprises(module, watcher, report)
    module.zero_grad(set_to_none=True)
    if graph_breaks:
        report.graph_breaks = _find_breaks(loss_function)
    return report


def _judge_gradient(report: ProbeReport, name: str, gradient: Any, *, declared: bool) -> None:
    if gradient is None:
        (report.unused if declared else report.without_gradient).append(name)
        return
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if not bool(values.isfinite().all()):
        report.nonfinite_gradient.append(name)
    elif not bool(values.any()):
        (report.unused if declared else report.zero_gradient).append(name)
    elif declared:
        report.wrongly_declared.append(name)


@contextlib.contextmanager
def _cuda_sync_warnings() -> Iterator[list[str]]:
    """The host waits that the CUDA allocator and kernels report themselves; nothing without a GPU."""
    import torch

    found: list[str] = []
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            found += [str(entry.message) for entry in caught if _CUDA_SYNC in str(entry.message)]
    for entry in caught:
        if _CUDA_SYNC not in str(entry.message):
            warnings.warn_explicit(entry.message, entry.category, entry.filename, entry.lineno)


def _make_watcher() -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watcher(TorchDispatchMode):
        """Sees every operation of the forward and backward."""

        supports_higher_order_operators = True  # FlexAttention is one

        def __init__(self) -> None:
            super().__init__()
            self.syncs: Counter[str] = Counter()
            self.double: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            wait = _wait_of(func.name().split(".")[0], args, kwargs, result)
            if wait:
                self.syncs[f"{_caller()}: {wait}"] += 1
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                self.double[_caller()] += 1
            return result

    return Watcher()


def _wait_of(operation: str, args: Any, kwargs: Any, result: Any) -> str:
    """Why the host has to wait for an operation, or ''."""
    if operation in _SYNCS:
        return _SYNCS[operation]
    if operation in ("aten::index", "aten::index_put", "aten::index_put_"):
        return "a boolean index" if _is_boolean_index(operation, args) else ""
    if operation == "aten::repeat_interleave" and kwargs.get("output_size") is None and len(args) < 2:
        return "repeat_interleave without output_size"
    if operation == "aten::_to_copy" and _device(args[0]) != "cpu" and _device(result) == "cpu":
        return "" if kwargs.get("non_blocking") else "copy to the host"
    if operation == "aten::copy_" and _device(args[1]) != "cpu" and _device(args[0]) == "cpu":
        return "" if kwargs.get("non_blocking") or (len(args) > 2 and args[2]) else "copy to the host"
    return ""


def _is_boolean_index(operation: str, args: Any) -> bool:
    """A mask as an index needs its count on the host; only assigning one number is done without."""
    masks = [
        index for index in args[1] if index is not None and str(index.dtype) in ("torch.bool", "torch.uint8")
    ]
    one_number = operation != "aten::index" and len(args[1]) == 1 and args[2].numel() == 1
    return bool(masks) and not one_number


def _device(value: Any) -> str:
    return getattr(getattr(value, "device", None), "type", "cpu")


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
    import torch._dynamo

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch._dynamo.reset()
            explanation = torch._dynamo.explain(loss_function)()
    except Exception as error:  # the tracer raises many kinds; that it failed is the finding
        return [f"cannot be traced: {' '.join(str(error).split())[:200]}"]
    finally:
        torch._dynamo.reset()
    breaks: Counter[str] = Counter()
    for reason in explanation.break_reasons:
        frame = reason.user_stack[-1] if getattr(reason, "user_stack", None) else None
        place = f"{Path(frame.filename).name}:{frame.lineno}: " if frame else ""
        breaks[place + " ".join(str(reason.reason).split())[:160]] += 1
    return [f"{text} (x{count})" if count > 1 else text for text, count in breaks.items()]
