"""From a run to weights for use: the averaged weights with everything needed to sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmldlm.checkpoint.export import Export
from mmldlm.config import Config
from mmldlm.config.recipe import config_to_dict
from mmldlm.data.store import PairStore
from mmldlm.model.denoiser import DataShape


def describe_data(store: PairStore, shape: DataShape, step: int) -> dict[str, Any]:
    """What made the data, as the export carries it."""
    manifest = store.manifest
    return {
        "fingerprint": store.fingerprint,
        "vocab_size": shape.vocab_size,
        "num_slots": shape.num_slots,
        "num_channels": shape.num_channels,
        "max_length": shape.max_length,
        "normalizer": manifest.normalizer,
        "tokenizer": manifest.tokenizer,
        "encoder": manifest.encoder,
        "step": step,
    }


def make_export(
    weights: dict[str, Tensor], config: Config, store: PairStore, shape: DataShape, step: int
) -> Export:
    """Bundle weights with settings, data description and tokenizer."""
    return Export(
        weights={name: tensor.detach() for name, tensor in weights.items()},
        config=config_to_dict(config),
        data=describe_data(store, shape, step),
        tokenizer_path=store.tokenizer_path(),
    )
