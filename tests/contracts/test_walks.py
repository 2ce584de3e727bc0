"""The two walks of docs/architecture.md: how many files one training step and one decode pass through, measured.

A file counts where a function of it runs; a module that is only imported does not.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mmldlm
from tests.runs import write_recipe

SOURCE = Path(mmldlm.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
MOST = {"step": 25, "decode": 20}


def files_run(work: Callable[[], object]) -> set[str]:
    """Files of the package in which a function was called while the work was done."""
    seen: set[str] = set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    inside = (Path(name) for name in seen if name.startswith(str(SOURCE)))
    return {str(path.relative_to(SOURCE)) for path in inside}


def named_in(heading: str) -> set[str]:
    """Files that a walk of the page names."""
    section = PAGE.read_text().split(f"## {heading}")[1].split("\n## ")[0]
    return set(re.findall(r"`([a-z_/]+\.py)`", section))


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("walk")
    return mmldlm.train(str(write_recipe(folder, store)), run=folder / "run")


def test_a_decode_passes_through_few_files(run):
    model = mmldlm.load(run)
    latents = np.zeros((2, model.num_slots, model.num_channels), np.float32)
    model.decode(latents, lengths=[4, 5])  # what is done once is done
    files = files_run(lambda: model.decode(latents, lengths=[4, 5], steps=4))
    assert len(files) <= MOST["decode"], sorted(files)
    assert files == named_in("One decode"), "docs/architecture.md names other files"
