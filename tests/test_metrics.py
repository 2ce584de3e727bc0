"""The log of a run: strict JSON, exact after a resume, readable whatever happened to it."""

import errno
import io
import json
import logging
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from mmldlm.metrics import TrainingLog, read_log, rich_console, text_log
from mmldlm.trackers import TrackedRun, Tracker, open_trackers


def write_steps(path: Path, first: int, last: int, resume_step: int | None) -> None:
    log = TrainingLog(path, resume_step=resume_step)
    for step in range(first, last + 1):
        log.write(step, loss=1 / step, time=0.0)
    log.close()


def strict(line: str) -> Any:
    return json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_line_holds_what_was_given(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "log.jsonl", resume_step=None)
    log.write(
        1, loss=torch.tensor(0.5), lr=np.float32(0.25), batch_size=np.int64(3), fill=None, buckets=[1.0, 2.0]
    )
    record = strict((tmp_path / "log.jsonl").read_text())
    assert record.pop("time") > 1e9
    assert record == {
        "step": 1,
        "loss": 0.5,
        "lr": 0.25,
        "batch_size": 3,
        "fill": None,
        "buckets": [1.0, 2.0],
    }
    log.close()


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = TrainingLog(path, resume_step=None)
    log.write(1, loss=math.nan, grad_norm=torch.tensor(math.inf), lr=0.1, buckets={"a": [1.0, -math.inf]})
    log.close()
    record = strict(path.read_text())
    assert record["loss"] is None
    assert record["nonfinite"] == ["loss", "grad_norm", "buckets.a.1"]
    (read,) = read_log(path)
    assert math.isnan(read["loss"])
    assert math.isnan(read["buckets"]["a"][1])
    assert read["nonfinite"] == ["loss", "grad_norm", "buckets.a.1"]
    assert read["lr"] == 0.1


def test_bare_nan_of_other_programs_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": NaN, "lr": -Infinity, "x": null}\n')
    (read,) = read_log(path)
    assert math.isnan(read["loss"])
    assert read["lr"] == -math.inf
    assert read["x"] is None
    assert read["nonfinite"] == ["loss", "lr"]


def test_a_field_called_nonfinite_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "nonfinite": 3}\n')
    assert list(read_log(tmp_path / "log.jsonl")) == [{"step": 1, "nonfinite": 3}]


def test_a_resumed_log_is_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "log.jsonl"
    write_steps(whole, 1, 20, None)
    good = whole.read_bytes()
    ends = [idx + 1 for idx, byte in enumerate(good) if byte == ord("\n")]
    for killed in range(ends[9], len(good) + 1, 7):  # torn anywhere after the checkpoint of step 10
        path.write_bytes(good[:killed])
        write_steps(path, 11, 20, 10)
        assert path.read_bytes() == good
    assert sorted(os.listdir(tmp_path)) == ["log.jsonl", "whole.jsonl"]


def test_the_last_line_without_its_end_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_steps(path, 1, 3, None)
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    TrainingLog(path, resume_step=3).close()
    assert path.read_bytes() == good


def test_rubbish_is_cut_out_and_what_was_good_stays(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(
        b'{"step": 1}\n\x00\x00\xff\n[1]\n{"step": 2}\n{"note": "x"}\n{"step": 3}\n{"note": "y"}\n{"st'
    )
    TrainingLog(path, resume_step=2).close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"note": "x"}\n'


def test_a_new_curve_never_overwrites_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "training_log.jsonl"
    for _ in range(3):
        write_steps(path, 1, 2, None)
    assert sorted(os.listdir(tmp_path)) == [
        "training_log.1.jsonl",
        "training_log.2.jsonl",
        "training_log.jsonl",
    ]


def test_rewind_forgets_what_was_rolled_back(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "log.jsonl", resume_step=None)
    for step in (1, 2, 3):
        log.write(step)
    log.rewind(1)
    log.write(2, again=True)
    log.close()
    assert [(r["step"], r.get("again")) for r in read_log(log.path)] == [(1, None), (2, True)]


def test_a_full_disk_delays_lines_and_tears_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = TrainingLog(tmp_path / "log.jsonl", resume_step=None)
    log.write(1)
    write = os.write

    def nearly_full(fd: int, data: bytes) -> int:
        return write(fd, data[:5])

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", nearly_full)
        log.write(2)
        patch.setattr(os, "write", full)
        log.write(3)
    assert [record["step"] for record in read_log(log.path)] == [1]
    assert len(caplog.records) == 1  # told once, not at every line
    assert "no space left" in caplog.text
    log.write(4)
    log.close()
    assert [record["step"] for record in read_log(log.path)] == [1, 2, 3, 4]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.binary(max_size=60)
        | st.sampled_from([b'{"step": 1}', b'{"step": NaN}', b'{"nonfinite": 3}', b"[" * 5000])
    )
)
def test_reading_and_cutting_survive_anything(tmp_path: Path, pieces: list[bytes]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n".join(pieces))
    before = [record for record in read_log(path) if record.get("step") == 1]
    TrainingLog(path, resume_step=1).close()
    assert [record for record in read_log(path) if record.get("step") == 1] == before


def test_reading_needs_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"step": 1}\n' + b"x" * 30_000_000 + b'\n{"step": 2}\n')
    tracemalloc.start()
    steps = [record["step"] for record in read_log(path)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert steps == [1, 2]
    assert peak < 5_000_000


def test_no_log_reads_as_nothing(tmp_path: Path) -> None:
    assert list(read_log(tmp_path / "none.jsonl")) == []


def test_tensorboard_mirrors_numbers_and_hides_what_was_rolled_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def opened(resume_step: int | None) -> list[Tracker]:
        return open_trackers(["tensorboard"], TrackedRun(tmp_path, "mine", {}, resume_step))

    log = TrainingLog(tmp_path / "log.jsonl", resume_step=None, trackers=opened(None))
    for step in (1, 2, 3):
        log.write(step, loss=torch.tensor(float(step)), valid_loss=0.5, note="words", fill=None)
    log.close()
    resumed = TrainingLog(tmp_path / "log.jsonl", resume_step=1, trackers=opened(1))
    resumed.write(2, loss=20.0)
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 20.0)]
    assert "valid/loss" in events.Tags()["scalars"]
    assert "train/note" not in events.Tags()["scalars"]


def test_text_log_goes_to_file_and_console_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("mmldlm.somewhere")
    before = list(logging.getLogger("mmldlm").handlers)
    with text_log(tmp_path / "train.log", console=logging.StreamHandler()):
        logger.info("hello %d [not markup]", 5)
        logger.debug("too fine")
    logger.info("too late")
    text = (tmp_path / "train.log").read_text()
    assert text.count("\n") == 1
    assert text.rstrip().endswith("INFO    mmldlm.somewhere: hello 5 [not markup]")
    assert "hello 5" in capsys.readouterr().err
    assert logging.getLogger("mmldlm").handlers == before


@pytest.mark.parametrize("terminal", [True, False])
def test_messages_are_drawn_by_rich_only_on_a_terminal(tmp_path: Path, terminal: bool) -> None:
    screen = io.StringIO()
    handler = rich_console(Console(file=screen, force_terminal=terminal, color_system=None, width=60))
    with text_log(tmp_path / "train.log", console=handler):
        logging.getLogger("mmldlm").warning("[bold] stays as it is, %s", "and is " + "long " * 20)
    assert "[bold] stays as it is" in screen.getvalue()
    assert (screen.getvalue().count("\n") == 1) != terminal
