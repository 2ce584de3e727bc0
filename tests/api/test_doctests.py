"""The examples in the docstrings of the library run."""

import doctest
import importlib

import pytest

MODULES = [
    "mmldlm.api.evaluate",
    "mmldlm.api.model",
    "mmldlm.api.prepare",
    "mmldlm.corruption.joint",
    "mmldlm.data.store",
    "mmldlm.latents",
    "mmldlm.model.denoiser",
    "mmldlm.objective.joint",
    "mmldlm.preparation.encoders",
    "mmldlm.types",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, example_model):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs=example_model)
    assert result.attempted > 0
    assert result.failed == 0
