"""Saving beside training: a true picture of one moment, flat memory, short pauses, harmless errors."""

import errno
import itertools
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm

import mmldlm
from mmldlm import durable
from mmldlm.checkpoint.load import load_latest
from mmldlm.checkpoint.save import SaveError, Saver
from mmldlm.checkpoint.state import Snapshot


def raise_it(error: Exception) -> None:
    raise error


def fail(message: str) -> None:
    pytest.fail(message)


def snapshot(step: int, size: int = 1000) -> Snapshot:
    return Snapshot(step, {"model": {"w": torch.full((size,), float(step))}}, {"step": step})


def slow_down(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    write_file = durable.write_file

    def slow(path: Path, chunks: Any) -> durable.Written:
        gate.wait(100)
        return write_file(path, chunks)

    monkeypatch.setattr(durable, "write_file", slow)


def test_the_saved_state_is_that_of_the_moment_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    slow_down(monkeypatch, gate)
    saver = Saver(tmp_path, on_error=raise_it)
    taken = snapshot(7)
    saver.save(taken)
    taken.tensors["model"]["w"].fill_(-1)  # training goes on at once
    taken.meta["step"] = -1
    assert saver.last_saved is None
    gate.set()
    saver.close()
    found = load_latest(tmp_path, report=fail)
    assert found is not None
    assert found.meta == {"step": 7}
    assert torch.equal(found.tensors["model"]["w"], torch.full((1000,), 7.0))


def test_one_save_is_under_way_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, order = threading.Event(), []
    slow_down(monkeypatch, gate)
    saver = Saver(
        tmp_path, on_error=raise_it, on_saved=lambda step, path, seconds: order.append((step, path.name))
    )
    saver.save(snapshot(1))
    assert sum(thread.name == "checkpoint-saver" for thread in threading.enumerate()) == 1
    threading.Timer(0.1, gate.set).start()
    began = time.perf_counter()
    saver.save(snapshot(2))
    assert time.perf_counter() - began > 0.05
    saver.wait()
    assert order == [(1, "step_00000001"), (2, "step_00000002")]
    assert saver.last_saved == 2


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_costs_only_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    errors: list[Exception] = []
    saver = Saver(tmp_path, on_error=errors.append)
    saver.save(snapshot(1), wait=True)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        saver.save(snapshot(2), wait=True)
    assert len(errors) == 1
    assert isinstance(errors[0], SaveError)
    assert isinstance(errors[0].__cause__, OSError)
    assert "step 2 was not saved" in str(errors[0])
    assert "no space left" in str(errors[0])
    assert "train.keep_checkpoints" in str(errors[0])
    assert "step_00000001 is still the newest" in str(errors[0])
    found = load_latest(tmp_path, report=fail)
    assert found is not None
    assert found.step == 1
    saver.save(snapshot(3), wait=True)  # there is room again
    found = load_latest(tmp_path, report=fail)
    assert found is not None
    assert found.step == 3
    assert len(errors) == 1
    saver.close()
    Saver(tmp_path, on_error=raise_it).close()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000001", "step_00000003"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs rights that are not there")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_truly_full_disk(small_disk: Path) -> None:
    errors: list[Exception] = []
    folder = small_disk / "checkpoints"
    saver = Saver(folder, on_error=errors.append)
    saver.save(snapshot(1, size=100_000), wait=True)
    for step in (2, 3, 4):  # one more of 400 kB fits; for further ones the oldest has to go
        saver.save(snapshot(step, size=100_000), wait=True)
    assert not errors
    assert sorted(os.listdir(folder)) == ["latest", "step_00000003", "step_00000004"]
    saver.save(snapshot(5, size=900_000), wait=True)  # does not fit at all; the newest stays
    assert [error.step for error in errors if isinstance(error, SaveError)] == [5]
    assert load_latest(folder, report=fail).step == 4  # type: ignore[union-attr]
    assert not [name for name in os.listdir(folder) if name.startswith(".")]  # its room was given back
    saver.save(snapshot(6, size=100), wait=True)
    found = load_latest(folder, report=fail)
    assert found is not None
    assert found.step == 6


def test_the_first_save_can_fail_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = []
    saver = Saver(tmp_path, on_error=errors.append)
    monkeypatch.setattr(os, "fsync", lambda fd: raise_it(OSError(errno.EIO, "Input/output error")))
    saver.save(snapshot(1), wait=True)
    assert "there is no checkpoint yet" in str(errors[0])
    assert load_latest(tmp_path, report=fail) is None


def test_callbacks_that_fail_are_not_saves_that_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = []
    saver = Saver(tmp_path, on_error=errors.append, on_saved=lambda *args: raise_it(RuntimeError("no")))
    saver.save(snapshot(1), wait=True)
    assert not errors
    assert saver.last_saved == 1
    assert "callback" in caplog.text


def test_a_program_that_ends_without_closing_still_finishes_its_save(tmp_path: Path) -> None:
    program = """
import sys, threading, time, torch
from pathlib import Path
from mmldlm import durable
from mmldlm.checkpoint.save import Saver
from mmldlm.checkpoint.state import Snapshot
stage = durable.volatile
durable.volatile = lambda *args: (time.sleep(0.3), stage(*args))[1]  # the program is long over when writing begins
Saver(Path(sys.argv[1]), on_error=print).save(Snapshot(4, {"model": {"w": torch.ones(9)}}, {}))
raise RuntimeError("something else went wrong")
"""
    env = os.environ | {"PYTHONPATH": str(Path(mmldlm.__file__).parents[1])}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = warm.run(command, env=env, capture_output=True, text=True, check=False)
    assert "something else went wrong" in done.stderr
    assert done.stdout == ""
    found = load_latest(tmp_path, report=fail)
    assert found is not None
    assert found.step == 4


def test_memory_stays_flat_over_many_saves(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=1, on_error=raise_it)
    state = snapshot(0, size=2_000_000)  # 8 MB

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    sizes = []
    for step in range(12):
        saver.save(Snapshot(step, state.tensors, state.meta), wait=True)
        sizes.append(resident())
    assert max(sizes[4:]) - sizes[3] < 4_000_000
    saver.close()


@pytest.mark.soak  # a busy machine pauses it too
def test_the_interpreter_stays_free_while_the_writer_works(tmp_path: Path) -> None:
    """A busy main thread during a 128 MB save must hardly ever stand still for long."""
    saver = Saver(tmp_path, keep=1, on_error=raise_it)
    saver.save(snapshot(0, size=32_000_000), wait=True)
    ticks: list[float] = []
    saver.save(snapshot(1, size=32_000_000))
    while saver.last_saved != 1:
        ticks.append(time.perf_counter())
        sum(range(200))
    saver.close()
    pauses = sorted(b - a for a, b in itertools.pairwise(ticks))
    assert len(ticks) > 1000
    assert sum(pause for pause in pauses if pause > 0.05) < 0.3 * (ticks[-1] - ticks[0])


def test_what_cannot_be_saved_is_refused_at_the_call(tmp_path: Path) -> None:
    saver = Saver(tmp_path, on_error=raise_it)
    with pytest.raises(TypeError, match=r"value\.counts"):
        saver.save(Snapshot(1, {}, {"counts": {1: 2}}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_copy_is_that_of_the_moment_of_the_call(tmp_path: Path) -> None:
    """Updates are queued right behind the copy, on the same stream; the host does not wait for it."""
    weights = torch.zeros(2**28 // 4, device="cuda")
    saver = Saver(tmp_path, keep=1, on_error=raise_it)
    for step in range(4):
        weights.fill_(step)
        taken = {"w": weights, "tied": weights, "column": weights.view(-1, 64)[:, 3], "n": torch.tensor(step)}
        saver.save(Snapshot(step, {"model": taken}, {}))
        weights.fill_(-1)
        saver.wait()
        found = load_latest(tmp_path, report=fail)
        assert found is not None
        for value in found.tensors["model"].values():
            assert bool((value == step).all())
    assert saver._memory._slabs[0].is_pinned()
    saver.close()
