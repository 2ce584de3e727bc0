"""What may be wrong with what a user gives to a model, said before any work is done."""

from __future__ import annotations

import numpy as np

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.config import leaves_condition_out
from mmldlm.corruption.times import modes_of_run, sees_latents
from mmldlm.errors import UserError
from mmldlm.objective.joint import Active


def trained_parts(model: LoadedModel) -> Active:
    """Which outputs of the model were trained."""
    config = model.config
    length_modelled = model.denoiser.length_head is not None
    return Active.of(config.corruption, config.objective, length_modelled=length_modelled)


def require_trained(model: LoadedModel, *, text: bool = False, latent: bool = False) -> None:
    """Refuse to use a head that training never touched."""
    active = trained_parts(model)
    for wanted, trained, what, mode in (
        (text, active.text, "text", "l2t"),
        (latent, active.latent, "latents", "t2l"),
    ):
        if wanted and not trained:
            raise UserError(
                f"this model was not trained to produce {what}; train one with a weight above 0 for "
                f"corruption.mode_weights.{mode} or .joint, and for that part of the objective"
            )


def check_latents(model: LoadedModel, latents: np.ndarray) -> np.ndarray:
    """Latents as float32 (n, S, C), or an error that says what is wrong with them."""
    num_slots, num_channels = model.denoiser.shape.num_slots, model.denoiser.shape.num_channels
    if latents.ndim != 3 or latents.shape[1:] != (num_slots, num_channels):
        raise UserError(
            f"latents of shape {latents.shape}: this model needs (documents, {num_slots}, {num_channels}), "
            f"which is {num_slots} slot(s) of {num_channels} channels; use the encoder it was trained with"
        )
    if latents.dtype.kind not in "fiu":
        raise UserError(f"latents of type {latents.dtype}: numbers are needed")
    bad = np.flatnonzero(~np.isfinite(latents).all(axis=(1, 2)))
    if len(bad):
        raise UserError(
            f"latents: {len(bad)} of {len(latents)} hold NaN or infinity, the first at index {bad[0]}"
        )
    return np.ascontiguousarray(latents, dtype=np.float32)


def check_tokens(model: LoadedModel, tokens: list[np.ndarray]) -> np.ndarray:
    """Lengths (n,) of the texts, or an error that says what is wrong with them."""
    lengths = np.array([len(text) for text in tokens], dtype=np.int64)
    if (lengths == 0).any():
        raise UserError(f"the text at index {int(np.argmin(lengths))} is empty: it holds no token")
    vocab_size = model.corruption.vocab_size
    for token in (extreme(text) for text in tokens for extreme in (np.min, np.max)):
        if not 0 <= token < vocab_size:
            raise UserError(
                f"token {token}: the model knows the ids 0 to {vocab_size - 1}; use its own tokenizer"
            )
    return lengths


def check_blanks(model: LoadedModel, tokens: list[np.ndarray]) -> np.ndarray:
    """Lengths (n,) of texts that hold blanks, or an error; a blank has the id after the vocabulary."""
    lengths = np.array([len(text) for text in tokens], dtype=np.int64)
    blank = model.corruption.text.mask_id
    for index, text in enumerate(tokens):
        if not (text == blank).any():
            raise UserError(f"the text at index {index} holds no blank: there is nothing to fill in")
        bad = text[(text < 0) | (text > blank)]
        if len(bad):
            raise UserError(
                f"token {bad[0]}: the model knows the ids 0 to {blank - 1}, and {blank} for a blank; "
                "use its own tokenizer"
            )
    return lengths


def require_conditional(model: LoadedModel) -> None:
    """Refuse to use a latent where training never had one."""
    if not sees_latents(model.config.corruption):
        raise UserError(
            "this model never saw a latent in training (corruption.condition_dropout=1), so it cannot decode one; it "
            "can fill blanks (infill)"
        )


def require_unconditional(model: LoadedModel) -> None:
    """Refuse to leave the latent out where training never did."""
    corruption = model.config.corruption
    weights = modes_of_run(corruption)
    if weights.joint == 0 and (weights.l2t == 0 or corruption.condition_dropout == 0):
        raise UserError(
            "this model always saw a latent in training, so its texts need one: give a latent, or train with "
            "corruption.condition_dropout or corruption.mode_weights.joint above 0"
        )


def require_guidable(model: LoadedModel, guidance: float) -> None:
    """Refuse guidance where training never left the condition out: there is nothing that it could compare with."""
    if guidance != 1.0 and not leaves_condition_out(model.config.corruption):
        raise UserError(
            f"guidance={guidance:g}: compares with what the model says without the condition, which it never learnt "
            "(no joint mode, and corruption.condition_dropout=0); use 1, or against=... for text, or train with one"
        )


def check_lengths(lengths: np.ndarray, count: int) -> np.ndarray:
    """Given lengths as int64 (n,), or an error."""
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.shape != (count,) or (lengths < 1).any():
        raise UserError(f"lengths: one number of at least 1 is needed for each of the {count} documents")
    return lengths
