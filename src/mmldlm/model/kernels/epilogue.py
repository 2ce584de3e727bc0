"""Products of cuBLASLt that apply GELU, or its gradient, before they write: it takes no pass of its own.

The library is the copy that PyTorch has loaded. It counts matrices by columns, so rows times the transpose of a weight,
(M, D) x (E, D)', are for it the weight times the rows, (E, D) x (D, M), and a bias runs along its rows. Its GELU is the
form with tanh, taken of values that are not rounded yet. Which of its algorithms is the fastest is measured when a
shape comes first, and remembered in a file; within the recording of a graph, which allows no measurement, an unknown
shape gets the first guess of the library. Numbers of attributes are those of cublasLt.h.
Shapes: M rows, D width of the stream, E width inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from ctypes import POINTER, byref, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmldlm.runtime import recall, remember

_COMPUTE_FP32, _FP32, _BF16 = 68, 0, 14
_TRANSPOSE_A, _EPILOGUE, _BIAS, _AUX, _AUX_WIDTH = 3, 7, 8, 11, 12
_MAX_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
_WORKSPACE = 32 << 20
_CANDIDATES, _REPEATS = 8, 4
_SLEEP = 2_000_000
"""Cycles of the device, about a millisecond."""
_FEWEST_ROWS = 1024
"""With fewer, a pass of its own takes no time."""
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class CallError(RuntimeError):
    """The library did not do what it was called for."""


class Kind(NamedTuple):
    """What is applied to a product, and whether the weight is (E, D) and not (D, E)."""

    name: str
    epilogue: int
    transposed: bool


GELU, SLOPE = Kind("gelu", 164, True), Kind("slope", 192, False)


class Candidate(ctypes.Structure):
    """An algorithm that the library proposes."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("status", c_int), ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


_ARGUMENTS: dict[str, list[Any]] = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    "cublasLtMatmulAlgoGetHeuristic": [*[c_void_p] * 7, c_int, POINTER(Candidate), POINTER(c_int)],
    "cublasLtMatmul": [*[c_void_p] * 14, c_size_t, c_void_p],
}


@cache
def library() -> Any:
    """The copy of cuBLASLt in this process, or None."""
    if torch.version.cuda is None:
        return None
    names = [f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"]
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as maps:
            names += sorted({line.split(maxsplit=5)[5].strip() for line in maps if "/libcublasLt.so" in line})
    for name in names:
        try:
            found = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
            for function, arguments in _ARGUMENTS.items():
                getattr(found, function).argtypes = arguments
        except (OSError, AttributeError):
            continue
        return found
    return None


def _call(function: str, *arguments: Any) -> None:
    if status := getattr(library(), function)(*arguments):
        raise CallError(f"{function} returned {status}")


def _created(function: str, *arguments: Any) -> c_void_p:
    made = c_void_p()
    _call(function, byref(made), *arguments)
    return made


@cache
def _handle(device: int) -> c_void_p:
    """Of the current device, which must be this one."""
    return _created("cublasLtCreate")


class Plan:
    """A product of one kind, shape and alignment on one device, and the algorithms that can do it."""

    def __init__(self, kind: Kind, sizes: tuple[int, ...], alignment: int, device: int) -> None:
        rows, width, inner = sizes
        self._key = (
            f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {kind.name}, "
            f"{rows} x {width} x {inner}, aligned to {alignment}"
        )
        self._handle = _handle(device)
        self._lock = threading.Lock()  # the pointers of a product are part of its description
        self._description = _created("cublasLtMatmulDescCreate", _COMPUTE_FP32, _FP32)
        self._pointers = (c_uint64(), c_uint64())
        self._places = tuple(byref(one) for one in self._pointers)
        shape = (width, inner) if kind.transposed else (inner, width)
        self._weight = _created("cublasLtMatrixLayoutCreate", _BF16, *shape, shape[0])
        self._x = _created("cublasLtMatrixLayoutCreate", _BF16, width, rows, width)
        self._out = _created("cublasLtMatrixLayoutCreate", _BF16, inner, rows, inner)
        self._set(_TRANSPOSE_A, c_int32(kind.transposed))
        self._set(_EPILOGUE, c_uint32(kind.epilogue))
        self._set(_AUX_WIDTH, c_int64(inner))
        self._point(0 if kind == SLOPE else alignment, alignment)  # proposals look at their alignment only
        self.candidates = self._proposals(alignment)
        """None where the library cannot do this product."""
        best = int(recall("epilogue", self._key).get("best", -1))
        self._best = best if 0 <= best < len(self.candidates) else None

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        _call("cublasLtMatmulDescSetAttribute", self._description, attribute, byref(value), size)

    def _point(self, bias: int, aux: int) -> None:
        write = library().cublasLtMatmulDescSetAttribute
        self._pointers[0].value, self._pointers[1].value = bias, aux
        for attribute, place in zip((_BIAS, _AUX), self._places, strict=True):
            if write(self._description, attribute, place, 8):
                raise CallError("cuBLASLt does not take a pointer")

    def _proposals(self, alignment: int) -> list[Candidate]:
        """Of the library, the most promising first."""
        limits = _created("cublasLtMatmulPreferenceCreate")
        most, least, count = c_uint64(_WORKSPACE), c_uint32(alignment), c_int()
        _call("cublasLtMatmulPreferenceSetAttribute", limits, _MAX_WORKSPACE, byref(most), 8)
        for attribute in _ALIGNMENTS:
            _call("cublasLtMatmulPreferenceSetAttribute", limits, attribute, byref(least), 4)
        proposed = (Candidate * _CANDIDATES)()
        status = library().cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._description, self._weight, self._x, self._out, self._out, limits,
            _CANDIDATES, proposed, byref(count),
        )  # fmt: skip
        _call("cublasLtMatmulPreferenceDestroy", limits)
        return [] if status else [one for one in proposed[: count.value] if not one.status]

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, aux: Tensor, out: Tensor) -> bool:
        """With the fastest algorithm: measured on these tensors, unless it was before or a graph is being recorded.

        False, and nothing is written, where none of them runs here.
        """
        tensors = (x, weight, bias, aux, out)
        if self._best is None and _measuring and not torch.cuda.is_current_stream_capturing():
            times = [self._time(one, tensors) for one in self.candidates]
            working = [number for number, seconds in enumerate(times) if seconds < float("inf")]
            if not working:
                self.candidates = []
                return False
            self._best = min(working, key=times.__getitem__)
            remember("epilogue", self._key, {"best": float(self._best)})
        try:
            self._start(self.candidates[self._best or 0], *tensors)
        except CallError:
            self.candidates = []
        return bool(self.candidates)

    def _start(
        self, one: Candidate, x: Tensor, weight: Tensor, bias: Tensor | None, aux: Tensor, out: Tensor
    ) -> None:
        """With this algorithm, on the current stream of the current device."""
        room = torch.empty(one.workspace, dtype=torch.uint8, device=x.device)
        place, stream = out.data_ptr(), torch.cuda.current_stream().cuda_stream
        with self._lock:
            self._point(0 if bias is None else bias.data_ptr(), aux.data_ptr())
            _call(
                "cublasLtMatmul", self._handle, self._description, byref(_ONE), weight.data_ptr(), self._weight,
                x.data_ptr(), self._x, byref(_ZERO), place, self._out, place, self._out,
                byref(one), room.data_ptr(), one.workspace, stream,
            )  # fmt: skip

    def _time(self, one: Candidate, tensors: tuple[Any, ...]) -> float:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
        try:
            self._start(one, *tensors)
            torch.cuda._sleep(_SLEEP)  # so that no product waits for its launch
            for mark in marks:
                mark.record()
                self._start(one, *tensors)
        except CallError:
            return float("inf")
        marks[-1].synchronize()
        return min(before.elapsed_time(after) for before, after in pairwise(marks))


_plans: dict[tuple[Any, ...], Plan | None] = {}
_measuring = True


@contextlib.contextmanager
def without_measuring() -> Iterator[None]:
    """Inside, an unknown shape gets the library's first guess: beside others on the device, times mean nothing."""
    global _measuring
    _measuring = False
    try:
        yield
    finally:
        _measuring = True


def _plan(kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None, aux: Tensor) -> Plan | None:
    """For these tensors, made at the first call; None where it is not for the library."""
    parts = [x, weight, aux, *([] if bias is None else [bias])]
    if library() is None or len(x) < _FEWEST_ROWS:
        return None
    if not all(part.is_cuda and part.is_contiguous() and part.dtype == torch.bfloat16 for part in parts):
        return None
    places = 256
    for part in parts:
        places |= part.data_ptr()
    alignment, sizes = places & -places, (*x.shape, aux.shape[1])
    if alignment < 16 or any(size % 8 for size in sizes[1:]):
        return None
    key = (kind, sizes, alignment, x.device.index)
    if key not in _plans:
        try:
            with torch.cuda.device(x.device):
                _plans[key] = Plan(kind, sizes, alignment, x.device.index)
        except CallError:
            _plans[key] = None
    plan = _plans[key]
    return plan if plan is not None and plan.candidates else None


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor] | None:
    """(M, D), weight (E, D) and bias (E,) -> the hidden rows (M, E) and GELU of them, or None."""
    hidden = x.new_empty((x.shape[0], weight.shape[0]))
    plan = _plan(GELU, x, weight, bias, hidden)
    if plan is None:
        return None
    active = torch.empty_like(hidden)
    with torch.cuda.device(x.device):
        done = plan.run(x, weight, bias, hidden, active)
    return (hidden, active) if done else None


def product_with_slope(grad: Tensor, weight: Tensor, hidden: Tensor) -> Tensor | None:
    """(M, D) x (D, E), times the slope of GELU at `hidden` (M, E); None: it cannot be done so."""
    grad = grad.contiguous()
    plan = _plan(SLOPE, grad, weight, None, hidden)
    if plan is None:
        return None
    out = torch.empty_like(hidden)
    with torch.cuda.device(grad.device):
        return out if plan.run(grad, weight, None, hidden, out) else None
