"""The walks of docs/architecture.md, measured: the files that one training step and one decode pass through.

A file counts where a function of it runs; a module that is only imported does not.
"""

import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mmldlm
from tests.runs import make_trainer
from tests.tiny_models import make_run, make_store

SOURCE = Path(mmldlm.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def files_run(work: Callable[[], object]) -> set[str]:
    """Files of the package in which a function was called while the work was done."""
    seen: set[str] = set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

    before = sys.getprofile()
    gc.collect()  # what other tests left behind is not cleared away meanwhile: that would count too
    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    inside = (Path(name) for name in seen if name.startswith(str(SOURCE)))
    return {path.relative_to(SOURCE).as_posix() for path in inside}


def named_between(start: str, end: str) -> tuple[set[str], int]:
    """Files that a part of the page names, and how many it says they are."""
    part = PAGE.read_text().split(start)[1].split(end)[0]
    count = re.search(r"(\d+) files", part)
    assert count is not None
    return set(re.findall(r"`([a-z_/]+\.py)`", part)), int(count[1])


@pytest.fixture(scope="module")
def step_walks(store, tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("walk"), store)
    trainer.train_step(*trainer.next_batch())  # what is done once is done
    batches = []
    documents = files_run(lambda: batches.append(trainer.next_batch()))
    update = files_run(lambda: trainer.train_step(*batches[0]))
    trainer.close()
    return documents, update


def test_the_documents_of_a_step(step_walks):
    files, count = named_between("**The documents**", "**The update**")
    assert step_walks[0] == files
    assert len(files) == count <= 20


def test_the_update_of_a_step(step_walks):
    files, count = named_between("**The update**", "\nEvery `log_every`")
    assert step_walks[1] == files
    assert len(files) == count <= 25


def test_both_halves_of_a_step(step_walks):
    assert f"{len(step_walks[0] | step_walks[1])} different ones" in PAGE.read_text()
    assert len(step_walks[0] | step_walks[1]) <= 25


def test_a_decode(tmp_path):
    model = mmldlm.load(make_run(tmp_path / "run", make_store(tmp_path / "store")))
    latents = np.zeros((2, model.num_slots, model.num_channels), np.float32)
    model.decode(latents, lengths=3)  # what is done once is done
    files, count = named_between("## One decode", "## Ten changes")
    assert files_run(lambda: model.decode(latents, lengths=3, steps=4)) == files
    assert len(files) == count <= 20
