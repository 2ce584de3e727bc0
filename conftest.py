"""Names that the examples in docstrings use: `pytest --doctest-modules src/mmldlm/api` runs them."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def example_names(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """`model` is a small model, `run` the folder it comes from, `tmp` a folder to write to."""
    if isinstance(request.node, pytest.DoctestItem):
        doctest_namespace.update(request.getfixturevalue("example_model"))


@pytest.fixture(scope="session")
def example_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run on disk and its model."""
    from tests.tiny_models import FakeEncoder, make_run, make_store

    from mmldlm.api.model import load

    root: Path = tmp_path_factory.mktemp("example")
    run = make_run(root / "run", make_store(root / "store"))
    model = load(run)
    model.encoder = FakeEncoder()
    return {"model": model, "run": run, "tmp": root}
