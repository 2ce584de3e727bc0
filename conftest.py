"""Names that the examples in docstrings use: `pytest --doctest-modules src/mmldlm/api` runs them."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def example_names(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """`model` is a small model, `run` the folder it comes from, `tmp` a folder to write to.

    Examples of training have a pair `store` and a `folder` with a run named demo.
    """
    if not isinstance(request.node, pytest.DoctestItem):
        return
    trains = request.node.name.startswith(("mmldlm.api.runs", "mmldlm.api.train"))
    doctest_namespace.update(request.getfixturevalue("example_runs" if trains else "example_model"))


@pytest.fixture(scope="session")
def example_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run on disk and its model."""
    from tests.tiny_models import FakeEncoder, make_run, make_store

    from mmldlm.api.model import load

    root: Path = tmp_path_factory.mktemp("example")
    run = make_run(root / "run", make_store(root / "store"))
    model = load(run)
    model.encoder = FakeEncoder()
    return {"model": model, "load": load, "run": run, "tmp": root}


@pytest.fixture(scope="session")
def example_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A folder with a run of two steps."""
    from tests.stores import write_store

    import mmldlm

    root: Path = tmp_path_factory.mktemp("examples")
    store = write_store(root / "store", num_train=120)
    settings = {"train.steps": 2, "train.trackers": [], "batch.tokens_per_step": 256, "model.depth": 1}
    mmldlm.train("laptop", store=store, run=root / "runs" / "demo", overrides=settings)
    return {"mmldlm": mmldlm, "store": store, "folder": root / "runs"}
