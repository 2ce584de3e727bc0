"""Latent samplers: deterministic paths from the document's noise to a latent.

The path of a noisy latent x = signal * clean + sigma * noise back in time obeys dx = clean dsignal + noise dsigma,
with clean and noise as the network predicts them on the way.

ddim      clean and noise stay as they are during a step: first order
dpmpp_2m  clean goes on as between the last two steps, a straight line in the log signal-to-noise ratio: second order
heun      clean and noise are means of both ends of a step: second order, two passes per step (one in the last)

All three use only the levels and conversions of a process, so they work with any schedule. A new solver is one
function with the signature of `LatentStep` and one line in `LATENT_STEPS`. One step gives the mean of the
latent given the condition. Shapes: N documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmldlm.corruption.joint import LatentProcess
from mmldlm.sampling.pack import LatentMemory, Pack, Step
from mmldlm.sampling.predictor import Predictor, guided_latents


@dataclass(frozen=True)
class Solver:
    """What every step needs besides the latents: the network, the process and how strongly the text guides."""

    predictor: Predictor
    process: LatentProcess
    guidance: float
    mask_id: int

    def clean(self, pack: Pack) -> Tensor:
        """(N, S, C) what the network predicts from the latents of a pack."""
        return guided_latents(self.predictor, pack, self.guidance, self.mask_id)


LatentStep = Callable[[Solver, Pack, Step], Pack]


def ddim_step(solver: Solver, pack: Pack, step: Step) -> Pack:
    """Move the latents to the step's next time."""
    pack = _at(pack, step.time)
    return _moved(pack, solver.process, solver.clean(pack), step.next_time)


def dpmpp_2m_step(solver: Solver, pack: Pack, step: Step) -> Pack:
    """As `ddim_step`, with a clean latent that is half a step ahead of the predicted one.

    Where a step is infinitely long in the log ratio, which is at time 0 and 1 only, there is no line to follow.
    """
    pack = _at(pack, step.time)
    clean = ahead = solver.clean(pack)
    memory = pack.memory
    if memory is not None:
        before, now, after = (
            _log_ratio(solver.process, time) for time in (memory.time, step.time, step.next_time)
        )
        if math.isfinite(before) and math.isfinite(after):
            ahead = clean + (after - now) / (now - before) / 2.0 * (clean - memory.clean)
    return replace(_moved(pack, solver.process, ahead, step.next_time), memory=LatentMemory(clean, step.time))


def heun_step(solver: Solver, pack: Pack, step: Step) -> Pack:
    """Go to the next time as `ddim_step` does, predict again there, and take the mean of both predictions.

    At time 0 there is no noise left, so the last step is that of `ddim_step`.
    """
    pack, process = _at(pack, step.time), solver.process
    clean = solver.clean(pack)
    there = _moved(pack, process, clean, step.next_time)
    if step.next_time == 0:
        return there
    next_clean = solver.clean(there)
    noise, next_noise = _noise(pack, process, clean), _noise(there, process, next_clean)
    (signal, sigma), (next_signal, next_sigma) = (
        process.levels(pack.latent_time),
        process.levels(there.latent_time),
    )
    latents = (
        pack.noisy_latents
        + (next_signal - signal) * (clean + next_clean) / 2.0
        + (next_sigma - sigma) * (noise + next_noise) / 2.0
    )
    return replace(there, noisy_latents=latents)


LATENT_STEPS: dict[str, LatentStep] = {"ddim": ddim_step, "dpmpp_2m": dpmpp_2m_step, "heun": heun_step}


def _at(pack: Pack, time: float) -> Pack:
    return replace(pack, latent_time=torch.full_like(pack.latent_time, time))


def _moved(pack: Pack, process: LatentProcess, clean: Tensor, next_time: float) -> Pack:
    """The latents at the next time, if these are the clean ones: signal(s) * clean + sigma(s) * noise."""
    there = torch.full_like(pack.latent_time, next_time)
    latents = process.corrupt(clean, _noise(pack, process, clean), there)
    return replace(pack, noisy_latents=latents, latent_time=there)


def _noise(pack: Pack, process: LatentProcess, clean: Tensor) -> Tensor:
    """The noise in the latents of a pack; the predictor returns clean latents, whatever its network predicts."""
    as_clean = replace(process, prediction_type="clean")
    return as_clean.to_noise(clean, pack.noisy_latents, pack.latent_time)


def _log_ratio(process: LatentProcess, time: float) -> float:
    """log(signal / sigma), infinite at both ends."""
    signal, sigma = (float(level) for level in process.levels(torch.tensor([time], dtype=torch.float64)))
    if signal <= 0:
        return -math.inf
    return math.log(signal / sigma) if sigma > 0 else math.inf
