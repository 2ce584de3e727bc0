"""Train language models that diffuse text and its latent (a sentence embedding) together.

Names are loaded when they are first used, so `import mmldlm` is quick and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Comparison": "mmldlm.evaluation.compare",
    "Corruption": "mmldlm.corruption.joint",
    "Denoiser": "mmldlm.model.denoiser",
    "Encoder": "mmldlm.preparation.encoders",
    "Evaluation": "mmldlm.evaluation.results",
    "Model": "mmldlm.api.model",
    "Objective": "mmldlm.objective.joint",
    "PackedBatch": "mmldlm.types",
    "PairStore": "mmldlm.data.store",
    "Run": "mmldlm.api.runs",
    "Split": "mmldlm.data.store",
    "UserError": "mmldlm.errors",
    "compare": "mmldlm.api.evaluate",
    "evaluate": "mmldlm.api.evaluate",
    "list_runs": "mmldlm.api.runs",
    "load": "mmldlm.api.model",
    "prepare": "mmldlm.api.prepare",
    "sample_latents": "mmldlm.sampling.chain",
    "sample_text": "mmldlm.sampling.chain",
    "train": "mmldlm.api.train",
    "validate": "mmldlm.benchmark.validation",
}
"""Public name -> module that defines it."""

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mmldlm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_PUBLIC])
