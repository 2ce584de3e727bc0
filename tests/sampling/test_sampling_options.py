"""Options are checked when they are made; progress is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmldlm.config import SamplingConfig
from mmldlm.errors import UserError
from mmldlm.sampling.decode import decode_latents
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import document_keys
from tests.sampling.sampling_oracles import random_model


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_values_out_of_range_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        SamplingOptions(**changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_options_come_from_the_run_and_may_be_changed() -> None:
    config = SamplingConfig(text_sampler="ancestral", temperature=0.3)
    options = SamplingOptions.from_config(config, temperature=0.5, seed=4)
    assert (options.text_sampler, options.temperature, options.seed) == ("ancestral", 0.5, 4)
    assert SamplingOptions.from_config(SamplingConfig()) == SamplingOptions()


def test_arguments_of_the_library_are_settings_under_shorter_names() -> None:
    options = SamplingOptions.from_arguments(SamplingConfig(), seed=4, steps=3, order="block:5", top_p=None)
    assert (options.num_sampling_steps, options.text_sampler, options.block_length) == (3, "block", 5)
    assert (options.seed, options.top_p) == (4, 1.0)
    for arguments, message in (
        ({"steps": 0}, "steps=0"),
        ({"encode_steps": 0}, "steps=0"),
        ({"order": "random"}, "order=random: allowed are confidence"),
        ({"order": "block:x"}, "order=block:x"),
        ({"solver": "euler"}, "solver=euler"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            SamplingOptions.from_arguments(SamplingConfig(), **arguments)


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    options = SamplingOptions(num_sampling_steps=3, batch_tokens=10)
    decode_latents(
        random_model(), np.zeros((4, 2, 3), np.float32), options, lengths=np.array([4, 5, 6, 4]),
        keys=document_keys(0, 4), progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen[-1] == (12, 12)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
