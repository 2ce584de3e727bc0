"""The latent bound against Gaussian worlds, whose densities and bounds are known in closed form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from mmldlm.config import EvaluationConfig
from mmldlm.corruption.joint import LATENT_SCHEDULES
from mmldlm.errors import UserError
from mmldlm.evaluation.bounds import Bounds
from mmldlm.evaluation.compare import Evaluated, compare_results
from mmldlm.evaluation.context import Context, Selection
from mmldlm.evaluation.latent_bound import (
    LatentErrors,
    latent_errors,
    measure_latent_bounds,
    normal_nats,
    time_of_snr,
)
from mmldlm.latents import Normalizer
from tests.evaluation.empty_results import empty_evaluation
from tests.evaluation.toys import draw_gaussian_documents, gaussian_model

MEANS = np.array([[1.5, -0.5], [-1.0, 1.0]])
DEVIATION = 0.4


def errors_of(model, documents, text: str, snr: float = 100.0, draws: int = 64) -> LatentErrors:
    return latent_errors(
        model, documents, text=text, largest_snr=snr, num_draws=draws, batch_tokens=10_000, seed=3
    )


def exact_nats(latents: np.ndarray, means: np.ndarray, variance: float, snr: float) -> np.ndarray:
    """The bound of the exact denoiser of a normal distribution, by hand: see `normal_nats` for mean 0, variance 1."""
    growth = 1.0 + snr * variance
    squares = ((latents - means) ** 2).sum(1)
    dimensions = latents.shape[1]
    spread = squares * snr / growth + dimensions * (np.log(growth) - snr * variance / growth)
    return 0.5 * dimensions * np.log(2 * np.pi * np.e / snr) + 0.5 * spread


@pytest.mark.parametrize("schedule", sorted(LATENT_SCHEDULES))
@pytest.mark.parametrize("prediction_type", ["clean", "noise", "velocity"])
def test_the_oracle_pays_the_closed_form_for_each_latent(prediction_type: str, schedule: str) -> None:
    documents = draw_gaussian_documents(MEANS, DEVIATION, 200)
    model = gaussian_model(MEANS, DEVIATION, prediction_type=prediction_type, schedule=schedule)
    found = errors_of(model, documents, "right").nats()
    kind = documents.tokens.reshape(-1, 3)[:, 0]
    exact = exact_nats(documents.latents[:, 0], MEANS[kind], DEVIATION**2, 100.0)
    # 64 stratified draws each: what is left is the noise of the draws, which the mean over documents removes
    assert np.abs(found - exact).mean() < 0.35
    assert abs((found - exact).mean()) < 4 * (found - exact).std() / np.sqrt(len(exact))
    assert (found - exact).std() / np.sqrt(len(exact)) < 0.03


def test_with_a_large_range_the_bound_is_the_density_given_text_and_the_marginal_one_without() -> None:
    documents = draw_gaussian_documents(MEANS, DEVIATION, 600)
    model = gaussian_model(MEANS, DEVIATION, prediction_type="clean", schedule="cosine")
    latents, kind = documents.latents[:, 0], documents.tokens.reshape(-1, 3)[:, 0]
    log_each = -((latents[:, None] - MEANS) ** 2).sum(-1) / (2 * DEVIATION**2) - np.log(
        2 * np.pi * DEVIATION**2
    )
    exact = {
        "right": -log_each[np.arange(600), kind],
        "none": -np.logaddexp.reduce(log_each, axis=1) + np.log(2),
    }
    costs = {}
    for text, density in exact.items():
        costs[text] = errors_of(model, documents, text, snr=3000.0, draws=32).nats()
        error = costs[text] - density
        assert abs(error.mean()) < 4 * error.std() / np.sqrt(len(error)), text
    wrong = errors_of(model, documents, "shuffled", snr=3000.0, draws=8).nats()
    assert costs["right"].mean() < costs["none"].mean() < wrong.mean()


def test_a_normal_model_has_the_closed_form_that_serves_as_reference() -> None:
    means = np.zeros((2, 2))
    documents = draw_gaussian_documents(means, 1.0, 100)
    latents = documents.latents
    np.testing.assert_allclose(normal_nats(latents, 50.0), exact_nats(latents[:, 0], means[0], 1.0, 50.0))
    model = gaussian_model(means, 1.0, prediction_type="velocity", schedule="cosine")
    found = errors_of(model, documents, "right", snr=50.0).nats()
    assert found.mean() == pytest.approx(normal_nats(latents, 50.0).mean(), abs=0.1)


def test_the_range_ends_where_the_noisy_latent_tells_more_than_the_network() -> None:
    """A network that always says 0 is right up to snr 1 / (mean square), where the noise is as large as its error."""
    documents = draw_gaussian_documents(np.zeros((2, 2)), 1.0, 2000)
    model = gaussian_model(np.zeros((2, 2)), 1e-6, prediction_type="clean", schedule="cosine")
    found = errors_of(model, documents, "right", draws=16)
    parts = found.best_parts()
    assert found.edges[parts - 1] < 1.0 < found.edges[parts + 1]
    assert found.nats(parts).mean() < found.nats().mean()
    np.testing.assert_allclose(found.squared_error, 1.0, rtol=0.1)


@pytest.mark.parametrize("name", sorted(LATENT_SCHEDULES))
def test_time_of_snr_inverts_every_schedule(name: str) -> None:
    schedule = LATENT_SCHEDULES[name]
    snr = np.array([1e-6, 1e-3, 0.5, 1.0, 30.0, 1e4])
    time = torch.from_numpy(time_of_snr(schedule, snr))
    np.testing.assert_allclose(((schedule.signal(time) / schedule.noise(time)) ** 2).numpy(), snr, rtol=1e-6)


def test_packs_leave_no_trace_and_words_are_checked() -> None:
    documents = draw_gaussian_documents(MEANS, DEVIATION, 20)
    model = gaussian_model(MEANS, DEVIATION, prediction_type="clean", schedule="cosine")
    small = latent_errors(
        model, documents, text="right", largest_snr=100.0, num_draws=4, batch_tokens=7, seed=3
    )
    np.testing.assert_allclose(small.parts, errors_of(model, documents, "right", draws=4).parts, rtol=1e-9)
    with pytest.raises(UserError, match="right, shuffled, none"):
        errors_of(model, documents, "left")


def test_nats_of_raw_latents_are_those_of_their_density() -> None:
    """The exact denoiser of a normal world pays, in raw coordinates, the negative log-density of the raw latents."""
    documents = draw_gaussian_documents(MEANS, DEVIATION, 400)
    model = gaussian_model(MEANS, DEVIATION, prediction_type="clean", schedule="cosine")
    model.normalizer = Normalizer(np.array([30.0, -2.0], np.float32), np.array([3.0, 0.5], np.float32))
    raw = replace(documents, latents=model.normalizer.denormalize(documents.latents))
    selection = Selection(cast(Any, None), np.arange(400), raw, 0)
    config = EvaluationConfig(num_draws=64, latent_snr=3000.0)
    found = measure_latent_bounds(Context(model, config, selection, 0, lambda *event: None, None, None))
    assert found is not None
    kind, deviation = documents.tokens.reshape(-1, 3)[:, 0], DEVIATION * model.normalizer.scale
    centred = raw.latents[:, 0] - (MEANS[kind] * model.normalizer.scale + model.normalizer.mean)
    exact = 0.5 * (centred / deviation) ** 2 + np.log(deviation) + 0.5 * np.log(2 * np.pi)
    assert found.right.nats_per_dimension_raw == pytest.approx(float(exact.mean()), abs=0.05)


def test_bounds_of_latents_that_are_normalised_in_other_ways_are_not_compared() -> None:
    """With twice the scale normalised latents are smaller, and nats fewer by log 2, however bad a model is."""
    documents = draw_gaussian_documents(MEANS, DEVIATION, 100)

    def result(label: str, scale: float, *, wrong: float = 1.0) -> Evaluated:
        model = gaussian_model(
            MEANS / scale, wrong * DEVIATION / scale, prediction_type="clean", schedule="cosine"
        )
        model.normalizer = Normalizer(np.zeros(2, np.float32), np.full(2, scale, np.float32))
        selection = Selection(cast(Any, None), np.arange(100), documents, 0)
        config = EvaluationConfig(num_draws=8, latent_snr=100.0)
        context = Context(model, config, selection, 0, lambda *event: None, None, None)
        bounds = Bounds(None, measure_latent_bounds(context))
        return Evaluated(
            label, replace(empty_evaluation(label, context.documents()), bounds=bounds), Path(label)
        )

    exact, rough, other = (
        result("exact", 1.0),
        result("rough", 1.0, wrong=1.5),
        result("other", 2.0, wrong=1.5),
    )
    assert compare_results([exact, rough])["latent_bound/right"].verdict == "exact is better"
    comparison = compare_results([exact, other])
    assert comparison.pairs[0].rows == []
    (note,) = comparison.notes
    assert note.startswith("bounds on latents, normalised in other ways, are left out: ")
    assert note.endswith(".log_scale is 0 in exact, 0.6931 in other")
