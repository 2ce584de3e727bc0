"""A mode is only a distribution over two times. This is the one module that knows the modes.

l2t pins the latent to time 0 and produces the text; t2l pins the text and produces the latent; joint draws both
times and produces both. With some probability the condition is dropped: its time becomes 1, and it is not scored.
Which modes there are may change over a run, stage by stage: a pure function of its step and epoch.

Derived documents, fragments and chance combinations that `prepare` makes of others, are pairs to decode and to encode,
but no samples of the text. What is generated from nothing is learned from whole documents alone: derived ones are
never in mode joint (unless a whole step has one mode), and keep their condition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from mmldlm import randomness
from mmldlm.config import MODES, CorruptionConfig, ModeStage, ModeWeights, StageWeights, weights_in_force
from mmldlm.types import Times, When

_MODE_AXIS, _TEXT_AXIS, _LATENT_AXIS = range(randomness.LOW_DISCREPANCY_DIMENSIONS)
_START = When()
MOST_JOINT = 0.5
"""Share of whole documents that joint takes at most, beside derived ones: the others are decoded and encoded."""
Weights = ModeWeights | StageWeights


def draw_times(
    positions: np.ndarray,
    keys: np.ndarray,
    config: CorruptionConfig,
    seed: int,
    when: When = _START,
    derived: np.ndarray | None = None,
    derived_share: float = 0.0,
) -> Times:
    """Times of the documents at these positions of the order, evenly spread over any run of positions.

    `derived` (N,) says which documents are derived, `derived_share` how many of all documents of the split.
    """
    modes = _draw_modes(positions, config, seed, when, derived, derived_share)
    dropped = randomness.uniform(keys, randomness.CONDITION, np.zeros_like(keys)) < config.condition_dropout
    if derived is not None and config.condition_dropout < 1:
        dropped &= ~derived
    return times_of_modes(
        modes,
        randomness.low_discrepancy(positions, _TEXT_AXIS, seed),
        randomness.low_discrepancy(positions, _LATENT_AXIS, seed) ** np.float32(config.latent_time_power),
        dropped,
    )


def times_of_modes(
    modes: np.ndarray, text_time: np.ndarray, latent_time: np.ndarray, dropped: np.ndarray
) -> Times:
    """Pin the conditions of each mode (index into MODES) to their times."""
    l2t, t2l = modes == MODES.index("l2t"), modes == MODES.index("t2l")
    condition_time = np.where(dropped, np.float32(1.0), np.float32(0.0))
    return Times(
        text_time=np.where(t2l, condition_time, text_time).astype(np.float32),
        latent_time=np.where(l2t, condition_time, latent_time).astype(np.float32),
        text_is_target=~t2l,
        latent_is_target=~l2t,
    )


def _draw_modes(
    positions: np.ndarray,
    config: CorruptionConfig,
    seed: int,
    when: When,
    derived: np.ndarray | None,
    derived_share: float,
) -> np.ndarray:
    weights = mode_weights_at(config, when.step, when.epoch)
    if config.mode_choice == "batch":
        key = randomness.make_key(seed)
        draw = randomness.uniform(key, randomness.MODE, np.asarray(when.step))
        return _modes_at(np.full(positions.shape, draw), weights)
    draw = randomness.low_discrepancy(positions, _MODE_AXIS, seed)
    if derived is None:
        return _modes_at(draw, weights)
    of_whole, of_derived = weights_beside_derived(weights, derived_share)
    return np.where(derived, _modes_at(draw, of_derived), _modes_at(draw, of_whole))


def _modes_at(draw: np.ndarray, weights: Weights) -> np.ndarray:
    """The mode (index into MODES) of each draw from [0, 1)."""
    values = np.array([getattr(weights, mode) for mode in MODES], dtype=np.float64)
    edges = np.cumsum(values / values.sum())
    edges[-1] = np.inf if values[-1] > 0 else edges[-1]
    # the last mode with a weight takes what rounding leaves over
    return np.minimum(np.searchsorted(edges, draw, side="right"), int(np.flatnonzero(values)[-1]))


def weights_beside_derived(weights: Weights, derived_share: float) -> tuple[Weights, Weights]:
    """Weights of the whole and of the derived documents, where some are derived.

    Whole documents take over the share of joint, as far as `MOST_JOINT` allows. Where joint is the only mode there is
    nothing else for derived documents, so they are like all others.
    """
    l2t, t2l, joint = _shares(weights)
    if derived_share == 0 or joint in (0.0, 1.0):
        return weights, weights
    wanted = joint / max(1.0 - derived_share, joint)
    of_whole = min(wanted, max(MOST_JOINT, joint))
    rest = (1.0 - of_whole) / (l2t + t2l)
    return ModeWeights(l2t * rest, t2l * rest, of_whole), ModeWeights(l2t, t2l, 0.0)


@dataclass(frozen=True)
class Stage:
    """A stretch of a run in which the same parts of the denoiser are trained."""

    number: int
    """Counted from 0, through all repetitions."""
    begin: float
    """In steps or epochs, as the stages are counted, since the first stage of this turn."""
    end: float
    weights: Weights
    towards: Weights | None = None
    """Where the weights go in a straight line, if they do."""
    frozen: tuple[str, ...] = ()

    @property
    def modes(self) -> frozenset[str]:
        """All that are trained somewhere in the stage."""
        ends = (self.weights,) if self.towards is None else (self.weights, self.towards)
        return frozenset(mode for mode in MODES for weights in ends if getattr(weights, mode) > 0)

    def weights_at(self, time: float) -> ModeWeights:
        """Those that hold at a time from begin to end."""
        if self.towards is None:
            return ModeWeights(*(getattr(self.weights, mode) for mode in MODES))
        share = (time - self.begin) / (self.end - self.begin)
        here, there = _shares(self.weights), _shares(self.towards)
        return ModeWeights(*((1.0 - share) * a + share * b for a, b in zip(here, there, strict=True)))


def mode_weights_at(config: CorruptionConfig, step: int, epoch: float = 0.0) -> ModeWeights:
    """The weights of a step, counted from 0, that begins when so many passes over the documents are done."""
    return stage_at(config, step, epoch).weights_at(_clock(config, step, epoch)[1])


def stage_at(config: CorruptionConfig, step: int, epoch: float = 0.0) -> Stage:
    """The stage of that step; without a schedule, or after it, one without end."""
    stages, (turn, time) = config.mode_schedule, _clock(config, step, epoch)
    begin = 0.0
    for number, stage in enumerate(stages):
        if time < _end(stage):
            towards = _next(config, number) if stage.ramp else None
            number += turn * len(stages)
            return Stage(number, begin, _end(stage), stage.mode_weights, towards, tuple(stage.frozen))
        begin = _end(stage)
    return Stage(len(stages), begin, math.inf, config.mode_weights)


def _clock(config: CorruptionConfig, step: int, epoch: float) -> tuple[int, float]:
    """How often all stages were gone through, and the time since then, in what the stages are counted in."""
    stages = config.mode_schedule
    time = epoch if stages and stages[0].until is None else float(step)
    if not (stages and config.mode_repeat):
        return 0, time
    turn, rest = divmod(time, _end(stages[-1]))
    return int(turn), rest


def _end(stage: ModeStage) -> float:
    end = stage.until if stage.until is not None else stage.until_epoch
    assert end is not None
    return float(end)


def _next(config: CorruptionConfig, number: int) -> Weights:
    stages = config.mode_schedule
    if number + 1 < len(stages):
        return stages[number + 1].mode_weights
    return stages[0].mode_weights if config.mode_repeat else config.mode_weights


def _shares(weights: Weights) -> list[float]:
    """They add up to 1, so that two sets of weights can be compared."""
    values = (weights.l2t, weights.t2l, weights.joint)
    return [value / sum(values) for value in values]


def modes_of_run(config: CorruptionConfig) -> ModeWeights:
    """The mean share of each mode over the stages of a run, each stage counted once: what the whole run is about."""
    if not config.mode_schedule:
        return config.mode_weights
    shares = [_shares(weights) for weights in weights_in_force(config)]
    return ModeWeights(*(sum(values) / len(shares) for values in zip(*shares, strict=True)))


def drawn_shares(weights: Weights, config: CorruptionConfig, derived_share: float) -> dict[str, float]:
    """The share of all documents, whole and derived, that each mode takes under these weights."""
    parts = _beside(weights, config, derived_share)
    of_whole, of_derived = (_shares(part) for part in parts)
    shares = [
        (1.0 - derived_share) * a + derived_share * b for a, b in zip(of_whole, of_derived, strict=True)
    ]
    return dict(zip(MODES, shares, strict=True))


def _beside(weights: Weights, config: CorruptionConfig, derived_share: float) -> tuple[Weights, Weights]:
    """Weights of whole and of derived documents; where a step has one mode, all have it."""
    return weights_beside_derived(weights, 0.0 if config.mode_choice == "batch" else derived_share)


def describe_modes(config: CorruptionConfig, derived_share: float = 0.0) -> str:
    """The share of each mode, and what derived documents change, for people; each stage is counted once."""
    stages = weights_in_force(config)
    shares = [drawn_shares(weights, config, derived_share) for weights in stages]
    mean = {mode: sum(share[mode] for share in shares) / len(stages) for mode in MODES}
    listed = ", ".join(f"{mode} {100 * share:.0f} %" for mode, share in mean.items())
    text = f"{listed} of the documents{', on average over the stages' if config.mode_schedule else ''}"
    parts = [_beside(weights, config, derived_share) for weights in stages]
    of_whole = [_shares(whole)[-1] for whole, _ in parts]
    if any(whole != derived for whole, derived in parts):
        among = ", in stages that have other modes too" if config.mode_schedule else ""
        text += f"; joint takes whole documents alone{among or f', {100 * of_whole[0]:.0f} % of them'}"
    if derived_share and 0 < config.condition_dropout < 1 and (conditioned := 1.0 - mean["joint"]) > 0:
        droppable = (1.0 - derived_share) * sum(1.0 - joint for joint in of_whole) / len(stages)
        rate = 100 * config.condition_dropout * droppable / conditioned
        text += f"; conditions are dropped in whole documents alone, in {rate:.2g} % of l2t and t2l"
    return text


def sees_latents(config: CorruptionConfig) -> bool:
    """Whether the text was ever trained with a latent that is not pure noise."""
    return config.condition_dropout < 1 or modes_of_run(config).joint > 0


def without_schedule(config: CorruptionConfig) -> CorruptionConfig:
    """The modes of the whole run at all times, drawn by each document: one yardstick for held-out losses."""
    return replace(
        config, mode_weights=modes_of_run(config), mode_choice="document", mode_schedule=[], mode_repeat=False
    )
