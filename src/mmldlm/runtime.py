"""The machine under a run: device, precision, threads, and what is logged about them once.

CUDA GPUs have the fast path. Other accelerators (`mps` of a Mac, `xpu`) run the plain one: attention by rows, fp32
unless `speed.precision` says otherwise, no compilation, no Triton kernels, no recorded graphs. Nothing of `torch.cuda`
is called for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.util
import json
import logging
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmldlm.config import ACCELERATORS, DEVICE_NAME, Config, resolve_model
from mmldlm.durable import replace_file
from mmldlm.errors import UserError

log = logging.getLogger(__name__)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""By precision. What fp8 is not used for is bf16."""


@dataclass(frozen=True)
class Runtime:
    """What the automatic settings came to on this machine."""

    device: torch.device
    precision: str
    compile: bool
    attention: str
    """auto where the fastest has still to be measured."""
    fused: bool
    constant_shapes: bool
    """Few shapes of scored rows, because each is compiled or recorded."""
    num_workers: int
    pin_memory: bool

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Matrix products in the chosen type, weights stay fp32."""
        return autocast(self.device, self.precision)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """Inside, matrix products are computed in the given type."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def choose_device(device: str | torch.device = "auto", *, option: str = "train.device") -> torch.device:
    """The device of this name: auto (an accelerator if there is one), cpu, cuda, mps, xpu, with an index as cuda:1.

    `option` is the setting, argument or option that error messages name.
    """
    if isinstance(device, torch.device):
        device = str(device)
    present = _accelerator()
    if device == "auto":
        return torch.device(present or "cpu")
    setting = f"{option} {device}" if option.startswith("-") else f"{option}={device}"
    if not isinstance(device, str) or not DEVICE_NAME.fullmatch(device):
        raise UserError(f"{setting}: allowed are auto, cpu, {', '.join(ACCELERATORS)}, or cuda:1")
    if device == "cpu":
        return torch.device("cpu")
    kind, _, index = device.partition(":")
    if kind != present:
        others = f"this machine has {present}" if present else "no accelerator was found"
        raise UserError(f"{setting}: not available, {others}; use auto or cpu, or check the driver")
    if index and int(index) >= torch.accelerator.device_count():
        raise UserError(f"{setting}: this machine has {torch.accelerator.device_count()}, counted from 0")
    return torch.device(device)


def _accelerator() -> str | None:
    """The kind of accelerator that is present and that we run on."""
    present = torch.accelerator.current_accelerator(check_available=True)
    return present.type if present is not None and present.type in ACCELERATORS else None


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give memory that is held in reserve back to the device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Record a CUDA graph. Only this thread is watched: another one may take page-locked memory meanwhile.

    Garbage waits: an old graph that is destroyed during a recording would spoil it.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collected:
            gc.enable()


def flash_runs(device: torch.device, precision: str, head_width: int) -> bool:
    """Whether flash attention is there for this device, number type and width of a head."""
    recent = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    return recent and precision in ("bf16", "fp16", "fp8") and head_width % 8 == 0 and head_width <= 256


TILE_WIDTHS = (16, 32, 64, 128)
"""Widths of a head that our own attention kernel takes."""


def choose_attention(
    wanted: str, device: torch.device, precision: str, layout: str = "packed", head_width: int = 64
) -> str:
    """The attention that is wanted, rejected where it cannot run; auto stays auto where there is a choice."""
    flash = flash_runs(device, precision, head_width)
    if wanted in ("tiles", "varlen", "split") and not flash:
        raise UserError(
            f"speed.attention={wanted}: needs a GPU of the Ampere generation or newer, bf16 or fp16, and a head width "
            f"that is a multiple of 8 up to 256, here it is {device.type} with {precision} and {head_width}; "
            f"use speed.attention=rows"
        )
    if wanted in ("tiles", "split") and head_width not in TILE_WIDTHS:
        raise UserError(
            f"speed.attention={wanted}: needs model.head_width in {', '.join(map(str, TILE_WIDTHS))}, here it is "
            f"{head_width}; use speed.attention=varlen"
        )
    if wanted != "auto":
        return wanted
    return "auto" if flash and layout == "packed" else plain_attention(device)


def plain_attention(device: torch.device) -> str:
    """The attention of a device without flash attention."""
    return "sdpa" if device.type in ("cpu", "cuda") else "rows"


def start_runtime(config: Config, world_size: int = 1, device: torch.device | None = None) -> Runtime:
    """Settle everything that was left to the machine. What PyTorch holds for the whole process is set here alone.

    `world_size` ranks share this machine; `device` is that of this rank, if it is chosen already.
    """
    device = device or choose_device(config.train.device)
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    if device.type == "cuda":
        _set_allocator()
        torch.cuda.set_stream(torch.cuda.Stream(device))  # work on the default stream could not be recorded
        torch.set_float32_matmul_precision("high" if config.speed.tf32 else "highest")
    if device.type == "cpu":
        _keep_pages()
    return settle_runtime(config, device, world_size)


def settle_runtime(config: Config, device: torch.device, world_size: int = 1) -> Runtime:
    """What a run would use on this device; settings that it does not have are rejected. The process stays as it is."""
    on_gpu, plain = device.type == "cuda", device.type not in ("cuda", "cpu")
    precision = _or_bf16(config.speed.precision, device) or best_precision(device)
    if precision == "fp16" and not on_gpu:
        raise UserError(f"speed.precision=fp16: needs a CUDA GPU, here it is {device.type}; use fp32")
    if config.speed.cuda_graphs and not on_gpu:
        raise UserError(
            f"speed.cuda_graphs=true: needs a CUDA GPU, here it is {device.type}; use speed.cuda_graphs=null"
        )
    if config.speed.compile and plain:
        raise UserError(f"speed.compile=true: not used on {device.type}; use speed.compile=null")
    if plain:
        log.info(
            "%s: the plain path is used (%s, attention by rows, nothing compiled)", device.type, precision
        )
    workers = config.data.num_workers
    if workers is None:
        workers = 0 if device.type == "cpu" else spare_workers(world_size)
    compiled = on_gpu if config.speed.compile is None else config.speed.compile
    head_width = resolve_model(config.model).head_width
    attention = choose_attention(config.speed.attention, device, precision, config.speed.layout, head_width)
    return Runtime(
        device=device,
        precision=precision,
        compile=compiled,
        attention=attention,
        fused=_fused(config.speed.fused_kernels, device),
        constant_shapes=compiled or (on_gpu and config.speed.cuda_graphs is not False),
        num_workers=workers,
        pin_memory=on_gpu if config.data.pin_memory is None else config.data.pin_memory and on_gpu,
    )


def spare_workers(world_size: int) -> int:
    """Loader processes for each of so many ranks on this machine."""
    return min(8, max(1, (os.cpu_count() or 1) // world_size))


def _set_allocator() -> None:
    """Segments that grow, else pieces of other sizes pile up when shapes change. What the user set stays."""
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        # private, but the only way inside a process that has imported torch: PYTORCH_ALLOC_CONF is read before that
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of glibc's mallopt."""


def _keep_pages() -> None:
    """Pages of tensors that were freed stay with the process. What the user set stays.

    By itself glibc returns large blocks to the system, which clears fresh pages for the same tensors in every step.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if platform.libc_ver()[0] == "glibc" and not chosen:
        for parameter, value in ((_TRIM_THRESHOLD, -1), (_TOP_PAD, 2**26), (_MMAP_MAX, 0)):
            ctypes.CDLL(None).mallopt(parameter, value)


def return_pages() -> None:
    """Give the system the memory that the process no longer uses, at the end of a run."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def kernels_run_on(device: torch.device) -> bool:
    """Whether our Triton kernels work: on a GPU with Triton, or anywhere under Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def _fused(wanted: bool | None, device: torch.device) -> bool:
    possible = kernels_run_on(device)
    if wanted and not possible:
        raise UserError(
            f"speed.fused_kernels=true: needs Triton and a GPU of the Ampere generation or newer, here it is "
            f"{device.type}; use speed.fused_kernels=null"
        )
    if wanted is None and device.type == "cuda" and not possible:
        log.info("the fused kernels need Triton and a GPU of the Ampere generation; plain ones are used")
    return device.type == "cuda" and possible if wanted is None else wanted


def _or_bf16(wanted: str | None, device: torch.device) -> str | None:
    """The precision that is wanted; bf16 instead of fp8 where the device lacks it."""
    if wanted != "fp8" or (
        kernels_run_on(device)
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 9)
    ):
        return wanted
    log.warning(
        "speed.precision=fp8: needs Triton and an NVIDIA GPU of the Ada or Hopper generation or newer, here it is %s; "
        "bf16 is used", device.type,
    )  # fmt: skip
    return "bf16"


def best_precision(device: torch.device) -> str:
    """bf16 where a CUDA GPU has it, else fp32."""
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


@functools.cache
def sampling_precision(device: torch.device) -> str:
    """bf16 where the device multiplies it faster than fp32: some GPUs, and CPUs with instructions for it."""
    if device.type != "cpu":
        return best_precision(device)
    has = torch.cpu._is_avx512_bf16_supported()  # PyTorch 2.11 has no public name for it
    precision, why = ("bf16", "; precision=fp32 is slower and more exact") if has else ("fp32", "")
    log.info("products in %s: this CPU has %sinstructions for bf16%s", precision, "" if has else "no ", why)
    return precision


_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Dense bf16 operations a second, from the makers' data sheets."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """What the device could do at best in this type; None where that is not known."""
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if re.search(rf"\b{part}\b", name)), None)


def recall(what: str, key: str) -> dict[str, float]:
    """What an earlier run of the same code measured on this machine; empty where it is not known."""
    try:
        content = json.loads(_measurements(what).read_text())
        if content["code"] != code_digest():
            return {}
        return {name: float(value) for name, value in content[key].items()}
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return {}


def remember(what: str, key: str, values: dict[str, float]) -> None:
    """Keep a measurement for later runs, where that is possible; those of other code are dropped."""
    path, code = _measurements(what), code_digest()
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        content = {}
    if not isinstance(content, dict) or content.get("code") != code:
        content = {"code": code}
    content[key] = {name: round(value, 4) for name, value in values.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        log.info("%s: cannot be written (%s); %s is measured again next time", path, error, what)


def _measurements(what: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmldlm" / f"{what}.json"


@functools.cache
def code_digest() -> str:
    """A short hash of the source code of this package: two installations of one version may differ."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Versions and hardware that a result depends on."""
    from mmldlm import __version__

    versions_used = {"mmldlm": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        versions_used |= {"cuda": torch.version.cuda or "", "gpu": torch.cuda.get_device_name()}
    return versions_used
