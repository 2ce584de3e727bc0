"""Latent samplers with the exact denoiser of a mixture: the density they reach, and how fast they get there."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from mmldlm.corruption.joint import CosineLatent, LatentProcess, LatentSchedule, LinearLatent
from mmldlm.layout import Layout
from mmldlm.sampling.decode import encode_tokens, generate
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack, Step, document_keys, latent_noise, make_steps
from mmldlm.sampling.predictor import Prediction
from mmldlm.sampling.solvers import LATENT_STEPS, Solver
from tests.sampling.sampling_oracles import TEXTS, oracle_model, random_model, spy, toy_distribution

TYPES = ("clean", "noise", "velocity")
SECOND_ORDER = ("dpmpp_2m", "heun")


@dataclass(frozen=True)
class Straight:
    """signal 1 - t, sigma t: not variance-preserving."""

    def signal(self, time: Tensor) -> Tensor:
        return 1.0 - time

    def noise(self, time: Tensor) -> Tensor:
        return time


CENTRES = torch.tensor([[-1.2, 0.3], [0.9, 0.8], [0.4, -1.0]], dtype=torch.float64)
SHARES = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
SPREAD = 0.35


@dataclass
class MixturePredictor:
    """The mean of a mixture of three Gaussians given a noisy latent, in float64."""

    process: LatentProcess
    num_calls: int = 0

    def predict(
        self, noisy_tokens: Tensor, noisy_latents: Tensor, text_time: Tensor, latent_time: Tensor,
        layout: Layout,
    ) -> Prediction:  # fmt: skip
        self.num_calls += 1
        signal, sigma = self.process.levels(latent_time)
        variance = (signal * SPREAD) ** 2 + sigma**2
        residual = noisy_latents - signal * CENTRES
        weight = (SHARES.log() - 0.5 * (residual**2 / variance).sum(-1)).softmax(-1)
        clean = CENTRES + signal * SPREAD**2 / variance * residual
        mean = (weight[..., None] * clean).sum(1, keepdim=True)
        return Prediction(lambda rows: torch.zeros(0, 1), lambda: mean)

    def length_logits(self, noisy_latents: Tensor, latent_time: Tensor) -> Tensor:
        raise NotImplementedError


def solve(
    sampler: str, schedule: LatentSchedule, num_steps: int, num: int, steps: list[Step] | None = None
) -> tuple[Tensor, int]:
    process = LatentProcess(schedule, "clean")
    predictor = MixturePredictor(process)
    keys, lengths = document_keys(3, num), np.ones(num, np.int64)
    ones = torch.ones(num, dtype=torch.float64)
    pack = Pack(
        torch.zeros(num, dtype=torch.int64), latent_noise(keys, (1, 2)).double(), ones, ones, lengths, keys
    )
    for step in steps or make_steps("latent", num_steps):
        pack = LATENT_STEPS[sampler](Solver(predictor, process, 1.0, 1), pack, step)
    assert pack.latent_time.tolist() == [steps[-1].next_time if steps else 0.0] * num
    return pack.noisy_latents[:, 0], predictor.num_calls


def inner_steps(num_steps: int) -> list[Step]:
    """Equal steps of the log ratio of signal to noise, away from the ends, for signal 1 - t and sigma t."""
    times = torch.sigmoid(-torch.linspace(-3.0, 3.0, num_steps + 1, dtype=torch.float64)).tolist()
    return [Step("latent", *pair, idx) for idx, pair in enumerate(itertools.pairwise(times))]


def test_order_of_convergence_inside() -> None:
    reference, _ = solve("heun", Straight(), 0, 100, inner_steps(200))
    order = {}
    for sampler in LATENT_STEPS:
        found = [solve(sampler, Straight(), 0, 100, inner_steps(n))[0] for n in (20, 40)]
        coarse, fine = (float((each - reference).norm(dim=-1).mean()) for each in found)
        order[sampler] = np.log2(coarse / fine)
    assert order["ddim"] == pytest.approx(1.0, abs=0.15)
    assert order["dpmpp_2m"] == pytest.approx(2.0, abs=0.25)
    assert order["heun"] == pytest.approx(2.0, abs=0.25)


@pytest.mark.parametrize("schedule", [CosineLatent(), Straight()], ids=["cosine", "straight"])
def test_order_of_convergence_from_end_to_end(schedule: LatentSchedule) -> None:
    """In equal steps of time, the log ratio has long steps at both ends, which costs dpmpp_2m a part of its order."""
    reference, _ = solve("heun", schedule, 400, 100)
    errors = {}
    for sampler in LATENT_STEPS:
        found = [solve(sampler, schedule, n, 100)[0] for n in (10, 80)]
        errors[sampler] = [float((each - reference).norm(dim=-1).mean()) for each in found]
    order = {name: np.log2(coarse / fine) / 3 for name, (coarse, fine) in errors.items()}
    assert order["ddim"] == pytest.approx(1.0, abs=0.1)
    assert order["heun"] == pytest.approx(2.0, abs=0.15)
    assert order["dpmpp_2m"] > 1.5
    assert errors["dpmpp_2m"][1] < 0.15 * errors["ddim"][1]


@pytest.mark.parametrize(
    "schedule", [CosineLatent(), LinearLatent(), Straight()], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("sampler", sorted(LATENT_STEPS))
def test_samples_follow_the_mixture(sampler: str, schedule: LatentSchedule) -> None:
    num = 6000
    found = solve(sampler, schedule, 80, num)[0]
    nearest = torch.cdist(found, CENTRES).argmin(1)
    draws = np.random.default_rng(0)
    kind = draws.choice(3, size=num, p=SHARES.numpy())
    exact = CENTRES[kind] + SPREAD * torch.from_numpy(draws.normal(size=(num, 2)))
    share = torch.cdist(exact, CENTRES).argmin(1).bincount(minlength=3) / num
    assert nearest.bincount(minlength=3) / num == pytest.approx(share, abs=0.03)
    assert found.mean(0) == pytest.approx(SHARES @ CENTRES, abs=0.06)
    assert torch.cov(found.T) == pytest.approx(torch.cov(exact.T), abs=0.06)
    for angle in np.linspace(0, np.pi, 5)[:-1]:  # distances between what both look like from some side
        side = torch.tensor([np.cos(angle), np.sin(angle)])
        gap = ((found @ side).sort().values - (exact @ side).sort().values).abs().mean()
        assert float(gap) < 0.06


@pytest.mark.parametrize("prediction_type", TYPES)
@pytest.mark.parametrize("sampler", SECOND_ORDER)
def test_every_prediction_type_reaches_the_density(sampler: str, prediction_type: str) -> None:
    joint, centres = toy_distribution(2, seed=4), np.array([[-1.5, 0.0], [1.0, 0.5]])
    model = oracle_model(joint, centres, spread=0.3, prediction_type=prediction_type)
    given = joint / joint.sum(0)
    index = int(np.abs(given[0] - 0.3).argmin())
    num, options = 3000, SamplingOptions(num_encode_steps=24, latent_sampler=sampler, batch_tokens=10**6)
    latents = encode_tokens(model, [TEXTS[index]] * num, options, keys=document_keys(7, num))[:, 0]
    first = latents[:, 0] < -0.25
    assert first.mean() == pytest.approx(given[0, index], abs=0.035)
    for chosen, centre in ((first, centres[0]), (~first, centres[1])):
        assert latents[chosen].mean(0) == pytest.approx(centre, abs=0.06)
        assert latents[chosen].std(0) == pytest.approx([0.3, 0.3], rel=0.12)


@pytest.mark.parametrize("sampler", sorted(LATENT_STEPS))
def test_cost_and_the_first_step(sampler: str) -> None:
    assert solve(sampler, CosineLatent(), 7, 2)[1] == (13 if sampler == "heun" else 7)
    one = solve(sampler, CosineLatent(), 1, 50)[0]
    assert one == pytest.approx((SHARES @ CENTRES).expand(50, 2), abs=1e-12)  # the mean of all


@pytest.mark.parametrize("sampler", SECOND_ORDER)
def test_latent_does_not_depend_on_its_batch(sampler: str) -> None:
    model, keys = random_model(), document_keys(5, 6)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 50, length) for length in rng.integers(1, 13, 6)]
    options = SamplingOptions(num_encode_steps=4, latent_sampler=sampler, guidance=1.5)
    together = encode_tokens(model, tokens, options, keys=keys)
    small = SamplingOptions(num_encode_steps=4, latent_sampler=sampler, guidance=1.5, batch_tokens=15)
    assert encode_tokens(model, tokens[::-1], small, keys=keys[::-1])[::-1] == pytest.approx(
        together, abs=1e-4
    )


@pytest.mark.parametrize(
    ("order", "times"),
    [
        ("latent_first", [(1.0, 1.0), (1.0, 0.5), (1.0, 0.0), (0.5, 0.0)]),
        ("text_first", [(1.0, 1.0), (0.5, 1.0), (0.0, 1.0), (0.0, 0.5)]),
    ],
)
def test_joint_order(order: str, times: list[tuple[float, float]]) -> None:
    model = random_model()
    record = spy(model)
    options = SamplingOptions(
        text_sampler="ancestral", num_sampling_steps=2, num_latent_steps=2, joint_order=order
    )
    generate(model, 1, options, lengths=np.array([12]), keys=document_keys(0, 1))
    assert [(float(call.text_time[0]), float(call.latent_time[0])) for call in record] == times
