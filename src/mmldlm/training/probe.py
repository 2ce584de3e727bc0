"""Our own denoiser, small, in one mode, for `mmldlm doctor probe mmldlm.training.probe:l2t` (or `t2l`, `joint`).

The probe then lists which parameters a mode leaves without gradient, against what is declared unused.
"""

from __future__ import annotations

from typing import Any

from traindoctor.probe import LossFunction

_LENGTHS = (3, 12, 7, 5)


def own_target(mode: str, device: Any = "cpu") -> tuple[Any, LossFunction]:
    """A tiny denoiser with its objective on four random documents, all in one mode, on a device."""
    import numpy as np
    import torch

    from mmldlm import randomness
    from mmldlm.config import CorruptionConfig, ModelConfig, ModeWeights, ObjectiveConfig
    from mmldlm.corruption.joint import Corruption
    from mmldlm.data.loader import make_batch
    from mmldlm.data.store import Documents
    from mmldlm.model.denoiser import DataShape, Denoiser
    from mmldlm.objective.joint import Objective
    from mmldlm.types import to_device

    shape = DataShape(vocab_size=97, num_slots=2, num_channels=5, max_length=max(_LENGTHS))
    corruption_config = CorruptionConfig(
        mode_weights=ModeWeights(**dict.fromkeys(("l2t", "t2l", "joint"), 0.0) | {mode: 1.0}),
        condition_dropout=0.5,  # of four documents, some have a condition and some have none
    )
    denoiser = Denoiser(ModelConfig(preset="tiny"), shape)
    # Some weights start at zero and hide the gradient of what comes before them.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    rng = np.random.default_rng(0)
    lengths = np.array(_LENGTHS, dtype=np.int64)
    latents = rng.normal(size=(len(lengths), shape.num_slots, shape.num_channels)).astype(np.float32)
    ids = rng.integers(0, 2**62, len(lengths))
    documents = Documents(rng.integers(0, shape.vocab_size, int(lengths.sum())), lengths, latents, ids)
    corruption = Corruption(corruption_config, vocab_size=shape.vocab_size)
    positions = np.arange(len(lengths), dtype=np.int64)
    keys = randomness.make_key(7, ids)
    batch = to_device(corruption.corrupt(make_batch(documents, latents, positions, keys)), device)
    counts = corruption.count(lengths, corruption.times(positions, keys), shape.num_slots)
    objective = Objective(ObjectiveConfig(), corruption)
    denoiser = denoiser.to(device)
    return denoiser, lambda: objective(denoiser, batch, counts).loss


def own_unused(mode: str, denoiser: Any) -> frozenset[str]:
    """Parameters of the denoiser that are declared to get no gradient in a mode."""
    from mmldlm.config import ObjectiveConfig
    from mmldlm.model.weights import unused_parameters
    from mmldlm.objective.joint import Active

    active = Active.of_modes(frozenset({mode}), ObjectiveConfig(), length_modelled=True)
    return unused_parameters(denoiser, **vars(active)).names


def l2t() -> tuple[Any, LossFunction, frozenset[str]]:
    """The target of the probe in mode l2t."""
    return _target("l2t")


def t2l() -> tuple[Any, LossFunction, frozenset[str]]:
    """The target of the probe in mode t2l."""
    return _target("t2l")


def joint() -> tuple[Any, LossFunction, frozenset[str]]:
    """The target of the probe in mode joint."""
    return _target("joint")


def _target(mode: str) -> tuple[Any, LossFunction, frozenset[str]]:
    denoiser, loss = own_target(mode)
    return denoiser, loss, own_unused(mode, denoiser)
