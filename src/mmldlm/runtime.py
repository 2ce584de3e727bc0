"""The machine under a run: device, precision, threads, and what to say about them once."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
from dataclasses import dataclass

import torch

from mmldlm.config import Config
from mmldlm.errors import UserError

log = logging.getLogger(__name__)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """What the automatic settings came to on this machine."""

    device: torch.device
    precision: str
    compile: bool
    attention: str
    num_workers: int
    pin_memory: bool

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Matrix products in the chosen type, weights stay fp32."""
        return autocast(self.device, self.precision)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """Inside, matrix products are computed in the given type."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def choose_device(name: str = "auto") -> torch.device:
    """cpu, cuda, or whichever is there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "train.device=cuda: no usable GPU was found; use train.device=cpu, or check the driver"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_attention(wanted: str, device: torch.device, precision: str, layout: str = "packed") -> str:
    """The fastest attention that the device and the number type have, or the one that is wanted."""
    recent = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    flash = recent and precision in ("bf16", "fp16")
    if wanted == "varlen" and not flash:
        raise UserError(
            f"speed.attention=varlen: needs a GPU of the Ampere generation or newer and bf16 or fp16, "
            f"here it is {device.type} with {precision}; use speed.attention=rows"
        )
    if wanted != "auto":
        return wanted
    return "varlen" if flash and layout == "packed" else "rows"


def start_runtime(config: Config, world_size: int = 1) -> Runtime:
    """Settle everything that was left to the machine."""
    device = choose_device(config.train.device)
    on_gpu = device.type == "cuda"
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    precision = config.speed.precision or best_precision(device)
    if precision == "fp16" and not on_gpu:
        raise UserError("speed.precision=fp16: needs a GPU; on a CPU use fp32")
    workers = config.data.num_workers
    if workers is None:
        workers = min(8, (os.cpu_count() or 1) // world_size) if on_gpu else 0
    return Runtime(
        device=device,
        precision=precision,
        compile=on_gpu if config.speed.compile is None else config.speed.compile,
        attention=choose_attention(config.speed.attention, device, precision, config.speed.layout),
        num_workers=workers,
        pin_memory=on_gpu if config.data.pin_memory is None else config.data.pin_memory and on_gpu,
    )


def best_precision(device: torch.device) -> str:
    """bf16 where a GPU has it, else fp32."""
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


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
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def versions() -> dict[str, str]:
    """What a result depends on besides the code."""
    from mmldlm import __version__

    found = {"mmldlm": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda or "", "gpu": torch.cuda.get_device_name()}
    return found
