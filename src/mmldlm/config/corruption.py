"""Settings of the forward process: modes, times, noise."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmldlm.config.fields import choice, number

MODES = ("l2t", "t2l", "joint")


@dataclass
class ModeWeights:
    """Share of documents in each mode; a recipe that names some modes gives the others no share."""

    l2t: float = number(1.0, 0)
    t2l: float = number(1.0, 0)
    joint: float = number(1.0, 0)


@dataclass
class StageWeights:
    """Share of documents in each mode during a stage; modes that are not named have none."""

    l2t: float = number(0.0, 0)
    t2l: float = number(0.0, 0)
    joint: float = number(0.0, 0)


@dataclass
class ModeStage:
    """The modes of a part of a run."""

    until: int | None = number(None, 1)
    """The stage covers the steps before this one that no earlier stage covers."""
    until_epoch: float | None = number(None, 0, above=True)
    """The same in passes over the documents; all stages are counted one way or the other."""
    mode_weights: StageWeights = field(default_factory=StageWeights)
    ramp: bool = False
    """Go over to the modes of the next stage little by little, in a straight line, instead of at its end."""
    frozen: list[str] = field(default_factory=list)
    """Parts of the denoiser that get no update meanwhile, as in train.frozen."""


@dataclass
class CorruptionConfig:
    """The forward process: which modes, which times, which noise."""

    mode_weights: ModeWeights = field(default_factory=ModeWeights)
    condition_dropout: float = number(0.1, 0, 1)
    """Share of l2t and t2l documents whose condition is replaced by pure noise, for guidance. 1, with l2t alone: a
    model of text that never sees a latent, to compare with."""
    text_schedule: str = choice("linear", "linear", "cosine")
    latent_schedule: str = choice("cosine", "cosine", "linear", "flow")
    """cosine, linear: the variance of the noisy latent stays that of the data; flow: a straight line from the latent to
    the noise, as in flow matching."""
    latent_time_power: float = number(1.0, 0, above=True)
    """Latent times are u^power for even u; below 1 more of them are near 1, where the text alone tells the latent."""
    prediction_type: str = choice("clean", "clean", "noise", "velocity")
    """What the latent side predicts. velocity: signal * noise - sigma * clean, with the flow schedule noise - clean."""
    mode_choice: str = choice("document", "document", "batch")
    """Who draws a mode by these weights: each document, or each step for all of its documents."""
    mode_schedule: list[ModeStage] = field(default_factory=list)
    """Stages before the weights above hold, such as [{until: 1000, mode_weights: {l2t: 1}}]."""
    mode_repeat: bool = False
    """Begin again with the first stage after the last one, for ever: the modes take turns."""


def weights_in_force(config: CorruptionConfig) -> list[ModeWeights | StageWeights]:
    """The weights that some part of a run has: those of its stages, and of what follows them unless they repeat."""
    stages: list[ModeWeights | StageWeights] = [stage.mode_weights for stage in config.mode_schedule]
    return stages if stages and config.mode_repeat else [*stages, config.mode_weights]


def leaves_condition_out(config: CorruptionConfig) -> bool:
    """Whether training ever shows one side without the other; guidance compares with what is said then."""
    return config.condition_dropout > 0 or any(weights.joint > 0 for weights in weights_in_force(config))
