"""A block for a bug report: versions, hardware and the variables that matter, without names, hosts or secrets."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import socket
import sys
from pathlib import Path

from traindoctor import __version__

_PACKAGES = (
    "torch",
    "numpy",
    "omegaconf",
    "transformers",
    "tokenizers",
    "sentence-transformers",
    "datasets",
    "pyarrow",
    "libcst",
)
_PREFIXES = (
    "CUDA_",
    "NCCL_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "GLOO_",
    "SLURM_JOB_NUM",
    "SLURM_NNODES",
    "SLURM_NTASKS",
)
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE")
_SECRET = re.compile(r"key|token|secret|password|passwd|credential|auth", re.IGNORECASE)


def redact(text: str) -> str:
    """Without the user's home, name and host."""
    home = str(Path.home())
    text = text.replace(home, "~") if len(home) > 1 else text
    for private, shown in ((_user(), "<user>"), (socket.gethostname(), "<host>")):
        if len(private) > 2:
            text = re.sub(rf"(?<![\w.-]){re.escape(private)}(?![\w-])", shown, text)
    return re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "<address>", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def describe_environment() -> str:
    """The block, as Markdown."""
    lines = [
        f"traindoctor: {__version__}",
        f"python: {platform.python_version()} ({platform.python_implementation()})",
        f"platform: {platform.system()} {platform.release()} {platform.machine()}",
        f"cpus: {os.cpu_count()}",
        *(f"{name}: {_version(name)}" for name in _PACKAGES),
        *_torch_lines(),
        *(f"{name}={value}" for name, value in sorted(os.environ.items()) if _is_shown(name)),
        f"executable: {sys.executable}",
    ]
    return "\n".join(["```", *(redact(line) for line in lines), "```"])


def _is_shown(name: str) -> bool:
    return (name.startswith(_PREFIXES) or name in _NAMES) and not _SECRET.search(
        name.replace("TOKENIZERS", "")
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch_lines() -> list[str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [f"torch: cannot be imported ({error})"]
    lines = [f"torch CUDA: {torch.version.cuda}", f"cuDNN: {torch.backends.cudnn.version()}"]
    if torch.cuda.is_available():
        lines += [f"NCCL: {_nccl_version()}", *map(_gpu_line, range(torch.cuda.device_count()))]
    return lines


def _nccl_version() -> str:
    import torch

    try:
        version = torch.cuda.nccl.version()
    except (RuntimeError, AttributeError) as error:
        return f"unknown ({error})"
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _gpu_line(index: int) -> str:
    import torch

    try:
        props = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError) as error:
        return f"gpu {index}: cannot be used ({' '.join(str(error).split())[:120]})"
    return f"gpu {index}: {props.name}, {props.total_memory / 2**30:.0f} GiB, {props.major}.{props.minor}"
