"""The examples in the docstrings of the library run."""

import doctest
import importlib

import pytest

import mmldlm

RESULTS = {"mmldlm.errors", "mmldlm.evaluation.results", "mmldlm.evaluation.compare"}
"""Modules of what functions raise and return."""
PARTS = {"mmldlm.api.hub", "mmldlm.api.scoring", "mmldlm.api.trace", "mmldlm.latents"}
MODULES = sorted({*mmldlm._PUBLIC.values(), *PARTS} - RESULTS)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, request):
    trains = name in ("mmldlm.api.runs", "mmldlm.api.train")
    names = request.getfixturevalue("example_runs" if trains else "example_model")
    result = doctest.testmod(importlib.import_module(name), extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0
