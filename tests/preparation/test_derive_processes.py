"""Processes that derive give the same store as the one process, report their death, and do not stay behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmldlm.data.store import PairStore
from mmldlm.errors import UserError
from mmldlm.preparation import derive, derive_processes, pipeline
from mmldlm.preparation.derive_processes import _Process
from mmldlm.preparation.pipeline import PrepareSettings, run
from tests.preparation.fake import FakeEncoder
from tests.preparation.test_derive import TEXTS


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[_Process]:
    """The processes that were started: two, however little there is to do."""
    monkeypatch.setattr(pipeline, "load_encoder", FakeEncoder.load)
    monkeypatch.setattr(derive, "BATCH", 20)
    monkeypatch.setattr(derive, "LOT", 7)
    monkeypatch.setattr(derive_processes, "_num_processes", lambda deriver: 2)
    processes: list[_Process] = []
    begin = _Process.__init__
    monkeypatch.setattr(
        _Process, "__init__", lambda self, setup: (processes.append(self), begin(self, setup))[1]
    )
    return processes


def _prepare(folder: Path, name: str) -> PairStore:
    source = folder / "x.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    settings = PrepareSettings(
        input=(str(source),), validation=0.1, derive=3, shard_documents=50, min_tokens=4, max_tokens=24
    )
    return run(settings, folder / name)


def _files(store: PairStore) -> dict[str, bytes]:
    paths = [path for path in store.path.rglob("*") if path.is_file()]
    return {str(path.relative_to(store.path)): path.read_bytes() for path in paths}


def test_the_store_is_that_of_one_process(
    tmp_path: Path, started: list[_Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(derive.Deriver, "draw", None)
        several = _prepare(tmp_path, "several")
    assert len(started) == 2
    assert all(process._process.returncode == 0 for process in started)
    monkeypatch.undo()
    monkeypatch.setattr(pipeline, "load_encoder", FakeEncoder.load)
    monkeypatch.setattr(derive, "BATCH", 20)  # decides the order
    one = _prepare(tmp_path, "one")
    assert several.manifest.counts["derived_too_long"] > 0
    assert several.manifest.counts["derived_too_short"] > 0
    assert _files(several) == _files(one)


def test_the_death_of_a_process_is_reported(
    tmp_path: Path, started: list[_Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = _Process.draw
    monkeypatch.setattr(
        _Process, "draw", lambda self, parents: (self._process.kill(), draw(self, parents))[1]
    )
    with pytest.raises(UserError, match=r"^derive: a process .* ended with code -9; .* run the same command"):
        _prepare(tmp_path, "s")
    assert all(process._process.returncode == -9 for process in started)


def test_no_process_outlives_an_error(
    tmp_path: Path, started: list[_Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, tokenized: object, progress: object = None) -> None:
        raise UserError("the encoder failed")

    monkeypatch.setattr(FakeEncoder, "embed", fail)
    with pytest.raises(UserError, match="the encoder failed") as error:
        _prepare(tmp_path, "s")
    assert error.tb is not None  # who keeps the error keeps its frames, but no process
    assert len(started) == 2
    assert all(process._process.returncode is not None for process in started)


@pytest.mark.parametrize(
    ("num_documents", "cores", "expected"), [(100, 16, 0), (10**6, 1, 0), (10**6, 4, 3), (10**6, 64, 8)]
)
def test_how_many_processes_there_are(
    monkeypatch: pytest.MonkeyPatch, num_documents: int, cores: int, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    settings = PrepareSettings(input=("x",), derive=4)
    tokenizer = pipeline.Tokenizer.load("builtin:minilm")
    deriver = derive.Deriver(
        tokenizer, settings, derive.Survey([], num_documents), pipeline.Segmenter(tokenizer, settings).seen
    )
    assert derive_processes._num_processes(deriver) == expected
