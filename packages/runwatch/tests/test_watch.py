"""A run under watch: rewinds, rubbish, memory, ledgers, goodput by arithmetic."""

import json
import os
import random
import tracemalloc

import pytest
from runwatch.chart import bars, braille
from runwatch.goodput import TimeLedger
from runwatch.history import Curve, Window
from runwatch.records import Record
from runwatch.settings import MonitorSettings
from runwatch.sources import find_runs
from runwatch.state import run_state
from runwatch.watch import RunWatch


def watch(path, clock=lambda: 2e9):
    return RunWatch(find_runs([str(path)])[0], MonitorSettings(), clock=clock)


def test_a_rewound_log_is_not_counted_twice(tmp_path):
    log = tmp_path / "run" / "training_log.jsonl"
    log.parent.mkdir()
    rows = [json.dumps({"step": step, "time": 1e9 + step, "loss": 2.0}) + "\n" for step in range(1, 51)]
    log.write_text("".join(rows))
    watched = watch(log.parent)
    watched.poll(live=True)
    assert (watched.num_lines, watched.step) == (50, 50)
    rows = rows[:30] + [
        json.dumps({"step": step, "time": 1e9 + 50 + step, "loss": 1.0}) + "\n" for step in range(31, 36)
    ]
    (tmp_path / "staged").write_text("".join(rows))
    os.replace(tmp_path / "staged", log)  # a rollback replaces the file
    watched.poll(live=True)
    assert (watched.num_lines, watched.step) == (55, 35)
    steps, values = watched.curves["loss"].points()
    assert steps == list(range(1, 36))
    assert values == [2.0] * 30 + [1.0] * 5
    watched.close()


def test_rubbish_neither_breaks_it_nor_fills_the_memory(tmp_path):
    noise = random.Random(0)
    path = tmp_path / "train.log"
    piece = (
        noise.randbytes(2**18)
        + b"\nstep=1 loss=2.0\n"
        + b"".join(
            b"step=%d loss=%s grad_norm=1e999 lr=-1\n"
            % (noise.randrange(10**9), noise.choice([b"nan", b"1e400", b"2"]))
            for _ in range(500)
        )
    )
    peaks = []
    for copies in (4, 16):
        path.write_bytes(piece * copies)
        tracemalloc.start()
        watched = watch(path)
        watched.poll(live=False)
        json.dumps(run_state(watched, curves=True), allow_nan=False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        watched.close()
        assert sum(run.num_lines for run in watched.runs()) >= 501 * copies
    assert peaks[1] < 1.5 * peaks[0]


def test_goodput_is_arithmetic():
    """100 s: 10 to start, 8 lines of 10 s in which 10 steps took 9 s (a third waiting), 5 validating, 5 to save."""
    ledger = TimeLedger()
    ledger.event(Record(event="started", step=0, time=1000.0))
    for idx in range(1, 9):
        values = {"loss": 2.0, "tokens": 900.0 * idx, "tokens_per_second": 100.0, "data_wait": 1 / 3}
        ledger.line(Record(step=10 * idx, time=1010.0 + 10 * idx, values=values))
    ledger.line(Record(step=80, time=1095.0, values={"valid_loss": 2.0}))
    ledger.event(Record(event="finished", step=80, time=1100.0))
    seconds = ledger.summary()["seconds"]
    assert seconds["useful"] == pytest.approx(48, abs=0.1)
    assert seconds["data"] == pytest.approx(24, abs=0.1)
    assert seconds["start"] == pytest.approx(11, abs=0.1)  # 10, and what the first line's steps did not take
    assert seconds["evaluation"] == pytest.approx(5, abs=0.1)
    assert seconds["checkpoint"] == pytest.approx(5, abs=0.1)
    assert seconds["other"] == pytest.approx(7, abs=0.1)
    assert sum(seconds.values()) == pytest.approx(100, abs=0.1)


def test_work_done_twice_and_time_between_runs_are_recovery():
    ledger = TimeLedger()
    ledger.event(Record(event="started", step=0, time=0.0))
    for step in range(1, 101):
        ledger.line(Record(step=step, time=float(step), values={"loss": 2.0, "step_seconds": 1.0}))
    ledger.event(Record(event="resumed", step=80, time=150.0))
    ledger.line(Record(step=81, time=151.0, values={"loss": 2.0, "step_seconds": 1.0}))
    seconds = ledger.summary()["seconds"]
    assert seconds["recovery"] == pytest.approx(50 + 20, abs=0.5)
    assert seconds["useful"] == pytest.approx(81, abs=0.5)


def test_a_window_knows_median_and_deviation():
    noise, window = random.Random(1), Window(101)
    for _ in range(5000):
        window.add(noise.gauss(3, 2))
    last = sorted(window.recent)
    assert window.median() == last[50]
    assert window.deviation() == pytest.approx(2, rel=0.3)


def test_a_curve_stays_small_and_keeps_its_shape():
    curve = Curve(most=100)
    for step in range(100_000):
        curve.add(step, 2.0 * step)
    steps, values = curve.points()
    assert len(steps) <= 101
    assert all(value == pytest.approx(2 * step, abs=5000) for step, value in zip(steps, values, strict=True))


def test_braille_draws_a_falling_line_from_corner_to_corner_with_gaps():
    lines = braille([0, 1, 2, 3], [3.0, 2.0, 1.0, 0.0], 4, 2)
    assert lines[0][0] != "\u2800"
    assert lines[1][-1] != "\u2800"
    assert lines[0][-1] == lines[1][0] == "\u2800"
    gap = braille([0, 1, 2, 3], [1.0, None, float("nan"), 1.0], 20, 1)[0]
    assert gap[10] == "\u2800"
    assert bars([1.0, 2.0, None]) == "▁█·"


def test_an_error_that_training_survives_does_not_end_the_watching(tmp_path):
    path, now = tmp_path / "train.log", [2e9]
    trouble = (
        "Traceback (most recent call last):\n  File 'x.py', line 1\nOSError: a picture could not be read\n"
    )
    path.write_text("step=1 loss=2.0\n" + trouble)
    watched = watch(path, clock=lambda: now[0])
    os.utime(path, (now[0], now[0]))
    watched.poll(live=True)
    assert watched.state() == "crashed"
    assert not watched.is_over()
    with path.open("a") as file:
        file.write("step=2 loss=2.0\n")
    os.utime(path, (now[0], now[0]))
    watched.poll(live=True)
    assert watched.state() == "running"
    assert not watched.panel.book.is_open("M502")
    with path.open("a") as file:
        file.write(trouble)
    os.utime(path, (now[0], now[0]))
    now[0] += 31
    watched.poll(live=True)
    assert watched.is_over()
    watched.close()
