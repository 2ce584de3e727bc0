"""Tests run beside each other on few cores: one thread each, and nothing is fetched from anywhere."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mmldlm.training.fit import Trainer

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process that is started compiles the package again
MEMORY, ROOM = "/dev/shm", 4 * 2**30
"""Where temporary folders are, if there is room for them."""


def pytest_configure(config: pytest.Config) -> None:
    """Temporary folders in memory: runs flush all they write, and on a busy disk the suite would mostly wait for that.

    pytest removes the folders of tests that passed (`tmp_path_retention_policy`); --basetemp puts them elsewhere. And
    tests press Ctrl-C and close terminals, which must work also where the suite runs in the background.
    """
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
    own = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, handler in own.items():
        if (
            signal.getsignal(number) == signal.SIG_IGN
        ):  # nohup, or a background job of a script: children inherit it
            signal.signal(number, handler)


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where possible: what a killed process leaves is the same there, flushing costs nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pair store that no test changes; modules that need another have their own."""
    from tests.stores import write_store

    return write_store(tmp_path_factory.mktemp("store"), num_train=120).path


@pytest.fixture(scope="session")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> "Trainer":
    """A run over that store that nothing disturbed, to compare with."""
    from tests.runs import make_trainer

    trainer = make_trainer(tmp_path_factory.mktemp("whole"), store)
    trainer.fit()
    return trainer


@pytest.fixture(scope="module")
def quick_pictures() -> Iterator[dict[str, Any]]:
    """Plots are drawn but not laid out and rendered, which takes a second a report; yields what would do that."""
    from mmldlm import reports

    rendering = {name: getattr(reports, name) for name in ("_to_svg", "_to_png")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "_to_svg", lambda figure: '<svg role="img"></svg>')
        patch.setattr(reports, "_to_png", lambda figure: b"\x89PNG\r\n\x1a\n")
        yield rendering
