"""Mistakes are told in one line before any work is done; progress is told while it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmldlm.config import SamplingConfig
from mmldlm.errors import UserError
from mmldlm.sampling.decode import decode_latents, document_keys, encode_tokens, generate
from mmldlm.sampling.options import SamplingOptions
from tests.sampling.sampling_oracles import random_model


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"num_sampling_steps": 0}, "num_sampling_steps=0"),
        ({"num_latent_steps": -2}, "num_latent_steps=-2"),
        ({"guidance": float("nan")}, "guidance=nan"),
        ({"text_sampler": "random"}, "text_sampler=random: allowed are confidence, ancestral"),
        ({"seed": -1}, "seed=-1"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        SamplingOptions(**changes)
    assert str(caught.value).startswith(told)
    assert "\n" not in str(caught.value)


def test_options_come_from_the_run_and_may_be_changed() -> None:
    config = SamplingConfig(text_sampler="ancestral", temperature=0.3)
    options = SamplingOptions.from_config(config, temperature=0.5, seed=4)
    assert (options.text_sampler, options.temperature, options.seed) == ("ancestral", 0.5, 4)
    assert SamplingOptions.from_config(SamplingConfig()) == SamplingOptions()


@pytest.mark.parametrize(
    ("latents", "told"),
    [
        (np.zeros((2, 3)), r"shape \(2, 3\).*\(documents, 2, 3\)"),
        (np.zeros((2, 2, 4)), "2 slot"),
        (np.array([[[0.0] * 3] * 2, [[np.nan] * 3] * 2]), "1 of 2 hold NaN.*index 1"),
        (np.full((1, 2, 3), "x"), "numbers are needed"),
    ],
)
def test_bad_latents_are_refused(latents: np.ndarray, told: str) -> None:
    with pytest.raises(UserError, match=told):
        decode_latents(random_model(), latents, SamplingOptions(), keys=document_keys(0, len(latents)))


def test_bad_texts_and_lengths_are_refused() -> None:
    model, keys, options = random_model(), document_keys(0, 2), SamplingOptions()
    with pytest.raises(UserError, match="index 1 is empty"):
        encode_tokens(model, [np.array([1]), np.array([], np.int64)], options, keys=keys)
    for token in (50, -1):
        with pytest.raises(UserError, match=f"token {token}: .* 0 to 49"):
            encode_tokens(model, [np.array([1]), np.array([2, token])], options, keys=keys)
    for lengths in ([3], [3, 0]):
        with pytest.raises(UserError, match="lengths"):
            generate(model, 2, options, lengths=np.array(lengths), keys=keys)


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    options = SamplingOptions(num_sampling_steps=3, batch_tokens=10)
    decode_latents(
        random_model(), np.zeros((4, 2, 3), np.float32), options, lengths=np.array([4, 5, 6, 4]),
        keys=document_keys(0, 4), progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen[-1] == (12, 12)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
