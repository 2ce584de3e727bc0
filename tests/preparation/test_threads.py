"""Stages in threads of their own: the same order, bounded, every error comes out at the caller, no wait is for ever."""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mmldlm.data.store import PairStore
from mmldlm.errors import Interrupted, UserError
from mmldlm.preparation import pipeline, threads
from mmldlm.preparation.cutting import Segmenter
from mmldlm.preparation.pipeline import PrepareSettings, Progress, run
from mmldlm.preparation.threads import Ahead, Behind, StoppedError, many_documents, until
from tests.preparation.fake import FakeEncoder

SHARD = 20


@pytest.fixture(autouse=True)
def _no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pipeline, "load_encoder", FakeEncoder.load)
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("prepare-")]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"Line {number}, which is short; it ends here." for number in range(200)))
    return path


def _prepare(text: Path, out: Path, progress: Progress | None = None, **options: object) -> PairStore:
    settings = {"text_unit": "line", "shard_documents": SHARD, "validation": 0.0} | options
    return run(PrepareSettings(input=(str(text),), **settings), out, progress=progress)  # type: ignore[arg-type]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_items_come_in_order_and_only_so_many_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(50):
            taken.append(number)
            yield number

    with Ahead(items(), 3, threading.Event()) as ahead:
        for expected, item in enumerate(ahead):
            assert item == expected
            assert len(taken) <= item + 1 + 3 + 1  # three wait, one more is in the thread's hand
    assert taken == list(range(50))


def test_what_waits_for_room_or_reads_on_is_stopped() -> None:
    stop = threading.Event()
    endless = until(stop, iter(lambda: time.sleep(0.001), "never"))
    with Ahead(endless, 1, stop) as ahead:
        next(iter(ahead))
    silent, stop = threading.Event(), threading.Event()

    def makes_nothing() -> Iterator[int]:
        try:
            for _ in until(stop, iter(lambda: time.sleep(0.001), "never")):
                pass
        except StoppedError:
            silent.set()
            raise
        yield 0

    with Ahead(makes_nothing(), 1, stop):
        pass
    assert silent.is_set()


def test_a_stage_that_never_answers_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LEAVE_SECONDS", 0.1)
    answer = threading.Event()

    def hanging() -> Iterator[int]:
        yield 1
        answer.wait()

    ahead = Ahead(hanging(), 1, threading.Event())
    with ahead:
        assert next(iter(ahead)) == 1
    assert ahead._thread.is_alive()
    assert ahead._thread.daemon
    answer.set()
    ahead._thread.join(100)


def test_jobs_are_done_in_order_and_their_errors_are_raised() -> None:
    done: list[int] = []
    with Behind() as behind:
        for number in range(20):
            behind.do(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(20))
    with pytest.raises(ZeroDivisionError), Behind() as behind:
        behind.do(lambda: done.append(1 // 0))
    with pytest.raises(KeyError):
        _fail_while_busy(done)
    assert done[-1] == 99


def _fail_while_busy(done: list[int]) -> None:
    """The caller's own error counts, and the job is finished."""
    with Behind() as behind:
        behind.do(lambda: (time.sleep(0.05), done.append(99))[1])
        raise KeyError


def test_python_is_set_up_as_before_afterwards(tmp_path: Path, text: Path) -> None:
    def setup() -> tuple[object, ...]:
        return sys.getswitchinterval(), gc.get_threshold()

    before = setup()
    with many_documents():
        assert setup() != before
    assert setup() == before
    _prepare(text, tmp_path / "s")
    assert setup() == before
    gc.set_threshold(0)
    try:
        with many_documents():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before[1])  # type: ignore[misc]


def test_ctrl_c_while_python_is_set_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getswitchinterval(), gc.get_threshold()
    real, calls = gc.set_threshold, []

    def interrupted(*values: int) -> None:
        calls.append(values)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(*values)

    monkeypatch.setattr(gc, "set_threshold", interrupted)
    with pytest.raises(KeyboardInterrupt), many_documents():
        pass
    assert (sys.getswitchinterval(), gc.get_threshold()) == before


def _fail_in_reading(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    real, calls = Segmenter._finish, []

    def failing(self: Segmenter, batch: list[tuple[str, str]]) -> object:
        calls.append(1)
        if len(calls) > 3:
            raise error
        return real(self, batch)

    monkeypatch.setattr(Segmenter, "_finish", failing)
    monkeypatch.setattr("mmldlm.preparation.cutting.BATCH", SHARD)


def _fail_in_tokenizing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    _fail_at(monkeypatch, FakeEncoder, "tokenize", error)


def _fail_in_encoding(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    _fail_at(monkeypatch, FakeEncoder, "embed", error)


def _fail_in_writing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    _fail_at(monkeypatch, pipeline.StoreWriter, "write_shard", error)


def _fail_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: BaseException) -> None:
    """The fourth call of a method fails."""
    real, calls = getattr(owner, name), []

    def failing(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) > 3:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


FAILURES = (_fail_in_reading, _fail_in_tokenizing, _fail_in_encoding, _fail_in_writing)


@pytest.mark.parametrize("fail", FAILURES)
@pytest.mark.parametrize("derive", [0, 2])
def test_an_error_in_any_stage_ends_the_run_and_finished_shards_stay(
    tmp_path: Path, text: Path, fail: Callable[[pytest.MonkeyPatch, BaseException], None], derive: int
) -> None:
    error = RuntimeError("in this stage")
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, error)
        with pytest.raises(RuntimeError) as caught:
            _prepare(text, tmp_path / "s", derive=derive)
    assert caught.value is error
    finished = len(list((tmp_path / "s").glob("train/shard-*.json")))
    early = fail is _fail_in_reading and derive  # the survey has read all before the first shard
    assert finished == (0 if early else 3)
    FakeEncoder.seen = 0
    store = _prepare(text, tmp_path / "s", derive=derive)
    assert FakeEncoder.seen == len(store.split("train")) - SHARD * finished
    _prepare(text, tmp_path / "whole", derive=derive)
    assert _files(tmp_path / "s") == _files(tmp_path / "whole")


def test_ctrl_c_keeps_what_is_encoded(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard that is being written when the fourth one is interrupted is finished."""
    real = pipeline.StoreWriter.write_shard

    def slow(*args: object, **kwargs: object) -> None:
        time.sleep(0.05)
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline.StoreWriter, "write_shard", slow)
    _fail_in_encoding(monkeypatch, KeyboardInterrupt())
    with pytest.raises(Interrupted, match="run the same command to go on"):
        _prepare(text, tmp_path / "s")
    assert len(list((tmp_path / "s").glob("train/shard-*.json"))) == 3


def test_a_full_disk_names_the_file(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def full(handle: int) -> None:
        if "shard-00002.arrow" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "no space")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"shard-00002\.arrow: no space left on the disk"):
        _prepare(text, tmp_path / "s")
    assert sorted(path.name for path in (tmp_path / "s" / "train").glob("*.json")) == [
        "shard-00000.json",
        "shard-00001.json",
    ]
    assert not list((tmp_path / "s").rglob("*.tmp"))


@pytest.mark.parametrize("options", [{}, {"limit": 150}, {"derive": 3}, {"derive": 2, "limit": 100}])
def test_the_total_is_told_from_the_first_document_on(
    tmp_path: Path, text: Path, options: dict[str, object]
) -> None:
    told: list[tuple[int, int | None]] = []

    store = _prepare(text, tmp_path / "s", lambda done, total: told.append((done, total)), **options)
    assert np.unique([total for _, total in told]).tolist() == [len(store.split("train"))]
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
