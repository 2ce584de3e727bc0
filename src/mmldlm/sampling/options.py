"""What may be chosen about sampling, and what a model was trained for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from mmldlm.checkpoint.load import LoadedModel
from mmldlm.config import SamplingConfig
from mmldlm.config.checks import field_problems
from mmldlm.errors import UserError

ARGUMENTS = {
    "steps": "num_sampling_steps",
    "latent_steps": "num_latent_steps",
    "encode_steps": "num_encode_steps",
    "order": "text_sampler",
    "solver": "latent_sampler",
    "turns": "joint_order",
}
"""Arguments of the library -> settings, where the names differ."""
BATCH_ON_CPU, BATCH_ON_DEVICE = 2048, 32768
"""Tokens and latent slots of a pack, where the options leave it open."""


@dataclass
class SamplingOptions(SamplingConfig):
    """Settings of the samplers, the seed, and how much is sampled at a time."""

    seed: int = 0
    batch_tokens: int | None = None
    """Tokens and latent slots that are sampled at a time; changes speed and memory, never a sample. None: what suits
    the device."""

    def __post_init__(self) -> None:
        self._require_numbers()
        problems = field_problems(self)
        problems += [
            f"{name}={value}: allowed is at least {low}"
            for name, value, low in (("seed", self.seed, 0), ("batch_tokens", self.batch_tokens, 1))
            if value is not None and value < low
        ]
        if problems:
            raise UserError("; ".join(problems))

    def _require_numbers(self) -> None:
        """Reject values that are no numbers, or no whole ones, before they are compared with limits."""
        problems = []
        for item in fields(self):
            value, whole = getattr(self, item.name), str(item.type).startswith("int")
            kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
            may_be_none = str(item.type).endswith("None")
            if item.type != "str" and not isinstance(value, kinds) and not (may_be_none and value is None):
                problems.append(f"{item.name}={value!r}: a {'whole ' if whole else ''}number is needed")
        if problems:
            raise UserError("; ".join(problems))

    def places(self, device: torch.device) -> int:
        """Tokens and slots of a pack: enough to keep an accelerator busy, few enough for the caches of a CPU."""
        if self.batch_tokens is not None:
            return self.batch_tokens
        return BATCH_ON_CPU if device.type == "cpu" else BATCH_ON_DEVICE

    @classmethod
    def from_config(cls, config: SamplingConfig, **changes: Any) -> SamplingOptions:
        """The defaults of a run, some of them changed."""
        return cls(**(asdict(config) | changes))

    @classmethod
    def from_arguments(cls, config: SamplingConfig, *, seed: int = 0, **arguments: Any) -> SamplingOptions:
        """The defaults of a run, changed by the arguments of the library that are not None.

        `order="block:16"` sets the length of a block too.
        """
        changes = {ARGUMENTS.get(name, name): value for name, value in arguments.items() if value is not None}
        order, _, length = str(changes.get("text_sampler", "")).partition(":")
        if length:
            if order != "block" or not length.isdecimal() or int(length) < 1:
                raise UserError(
                    f"order={order}:{length}: a length goes with blocks only, as in order=block:16"
                )
            changes |= {"text_sampler": order, "block_length": int(length)}
        try:
            return cls.from_config(config, **changes, seed=seed)
        except UserError as error:
            message = str(error)
            for name, setting in ARGUMENTS.items():
                message = message.replace(f"{setting}=", f"{'steps' if name == 'encode_steps' else name}=")
            raise UserError(message) from error


def for_joint(config: SamplingConfig) -> SamplingConfig:
    """The settings with which pairs are sampled from nothing."""
    return replace(config, text_sampler=config.joint_sampler, temperature=config.joint_temperature)


def lengths_tried(model: LoadedModel, options: SamplingOptions) -> int:
    """Likely lengths that decoding without a length tries; 1 where the model could not choose between them."""
    can = options.temperature == 0 and model.trained.latent and model.trained.length
    return options.num_lengths if can else 1


def require_trained(model: LoadedModel, *, text: bool = False, latent: bool = False) -> None:
    """Reject a head that training never touched."""
    for wanted, trained, what, mode in (
        (text, model.trained.text, "text", "l2t"),
        (latent, model.trained.latent, "latents", "t2l"),
    ):
        if wanted and not trained:
            raise UserError(
                f"this model was not trained to produce {what}; train one with a weight above 0 for "
                f"corruption.mode_weights.{mode} or .joint, and for that part of the objective"
            )


def require_conditional(model: LoadedModel) -> None:
    """Reject latents where training never had one."""
    if not model.trained.with_latents:
        raise UserError(
            "this model never saw a latent in training (corruption.condition_dropout=1), so it cannot decode one; it "
            "can fill blanks (infill)"
        )


def require_unconditional(model: LoadedModel) -> None:
    """Reject texts without latents where training always had one."""
    if not model.trained.without_latents:
        raise UserError(
            "this model always saw a latent in training, so its texts need one: pass latents, or train with "
            "corruption.condition_dropout or corruption.mode_weights.joint above 0"
        )


def require_guidable(model: LoadedModel, guidance: float) -> None:
    """Reject guidance where training never left the condition out: there is nothing that it could compare with."""
    if guidance != 1.0 and not model.trained.without_condition:
        raise UserError(
            f"guidance={guidance:g}: compares with the prediction without the condition, which was never trained "
            "(no joint mode, and corruption.condition_dropout=0); use 1, or against=... for text, or train with one"
        )
