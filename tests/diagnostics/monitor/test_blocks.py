"""Many lines at once say what they would say one by one, however they come in."""

import json
import math
import random

import pytest

from mmldlm.diagnostics.monitor.blocks import Block, rolling_medians
from mmldlm.diagnostics.monitor.formats import LineParser
from mmldlm.diagnostics.monitor.history import Curve, Window
from mmldlm.diagnostics.monitor.settings import MonitorSettings
from mmldlm.diagnostics.monitor.sources import find_runs
from mmldlm.diagnostics.monitor.watch import RunWatch


def rows(seed, count=1500):
    """A run with some of everything: a spike, a slow part, a rate that restarts, a step that goes back, a nan."""
    noise = random.Random(seed)
    step, clock, lr = 0, 1.7e9, 1e-3
    for idx in range(count):
        step = step - 40 if idx == 900 else step + 1
        slow = 3.0 if 500 <= idx < 540 else 1.0
        clock += 0.5 * slow * noise.uniform(0.7, 1.4)
        lr = 1e-3 if idx == 1200 else lr * 0.999
        loss = 1.5 + 4 * math.exp(-idx / 300) + noise.gauss(0, 0.15)
        row = {"step": step, "time": clock, "loss": loss * (4 if idx == 700 else 1), "lr": lr}
        row |= {"grad_norm": noise.uniform(0.8, 1.6) * (40 if 1000 <= idx < 1006 else 1)}
        row |= {"tokens_per_second": 9e4 / slow * noise.uniform(0.7, 1.3), "tokens": 9e4 * max(step, 1)}
        row |= {"data_wait": 0.4 if 1100 <= idx < 1150 else 0.01, "batch_size": noise.choice((60, 64, 70))}
        row |= {"skipped_steps": int(idx == 800)}
        if seed == 2:  # another stage of the modes, with other losses
            row |= {"mode_stage": int(idx >= 630), "loss": row["loss"] + 5 * (idx >= 630)}
        yield row | ({"loss": math.nan} if idx == 1300 else {})


def as_json(row):
    return json.dumps(row)


def as_text(row):
    kept = {name: row[name] for name in ("loss", "lr", "grad_norm")}
    words = " ".join(f"{name}={value:.5f}" for name, value in kept.items())
    return f"INFO step {row['step']}/5000 {words} tokens/s={row['tokens_per_second']:,.1f}"


def state_of(run):
    alerts = [alert.as_dict() for alert in run.panel.book.alerts.values()]
    curves = {name: curve.points() for name, curve in run.curves.items()}
    return alerts, curves, run.ledger.summary(), run.latest, run.num_lines


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[3:] == other[3:]
    for name, (steps, values) in one[1].items():
        assert other[1][name][0] == steps
        assert other[1][name][1] == pytest.approx(values, nan_ok=True)
    assert (one[2] is None) == (other[2] is None)
    if one[2] is not None:
        assert other[2]["seconds"] == pytest.approx(one[2]["seconds"], abs=0.2)


@pytest.mark.parametrize("form", [as_json, as_text])
@pytest.mark.parametrize("seed", range(3))
def test_a_whole_file_a_followed_file_and_single_lines_give_the_same(tmp_path, monkeypatch, form, seed):
    lines = [form(row) + "\n" for row in rows(seed)]
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text("".join(lines))

    def watch(file):
        return RunWatch(find_runs([str(file)])[0], MonitorSettings(), clock=lambda: 1.7e9)

    whole = watch(path)
    news = whole.poll(live=False)
    assert {change.alert.code for change in news} >= {"M101", "M102", "M202"}
    other.write_text("")
    live, noise, at, told = watch(other), random.Random(seed), 0, []
    while at < len(lines):
        until = at + noise.choice((1, 5, 30, 200))
        with other.open("a") as file:
            file.write("".join(lines[at:until]))
        # the first look of a follower gives no time to lines that have none, as a single look does
        live._polls, at = 0, until
        told += live.poll(live=False)
    assert_same(state_of(whole), state_of(live))
    assert [(c.what, c.alert.code, c.step, c.evidence) for c in told] == [
        (c.what, c.alert.code, c.step, c.evidence) for c in news
    ]
    monkeypatch.setattr(LineParser, "parse_many", lambda self, some: filter(None, map(self.parse, some)))
    single = watch(path)
    single.poll(live=False)
    assert_same(state_of(whole), state_of(single))


def test_plain_lines_become_blocks_and_others_do_not():
    lines = [as_json(row) for row in rows(0, 100)]
    torn = [*lines[:40], lines[40][:30], '{"a": [{"x": 1}', '{"b": 1}]}', *lines[41:]]
    for given in (lines, [as_text(row) for row in rows(0, 100)]):
        found = list(LineParser().parse_many(given))
        assert any(isinstance(item, Block) for item in found)
    records = [item for item in LineParser().parse_many(torn) if not isinstance(item, Block)]
    assert [record.step for record in records] == [*range(1, 41), *range(42, 101)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("step=12 loss=2.5 lr=1e-3", "step=13 loss=nan lr=1e-3"),
        ("step=12 loss=2.5 eta 11:02", "step=13 loss=2.25 eta 1:2"),
        ("2025-11-02 10:00:01 step=12 loss=2.5", "2025-11-02 10:00:02 step=113 loss=12.25"),
        ("at 2025-1-2 1:00:01 step=12 loss=2.5", "at 2025-11-02 10:00:02 step=13 loss=2.25"),
        ("step 12/90 loss 2.5", "step 13/95 loss 2.25"),
        ("step 1,200: loss: 2.5, tps: 9,999", "step 1,201: loss: 2.25, tps: 10,001"),
    ],
)
def test_a_pattern_finds_what_the_long_way_finds(first, second):
    learned = LineParser()
    found = list(learned.parse_many([first] * 3 + [second] * 20))
    records = [
        item.record(idx) if isinstance(item, Block) else item
        for item in found
        for idx in range(len(item) if isinstance(item, Block) else 1)
    ]
    expected = LineParser().parse(second)
    assert repr(records[-20:]) == repr([expected] * 20)


def test_windows_and_curves_taken_in_at_once():
    noise = random.Random(1)
    values = [noise.gauss(0, 1) for _ in range(300)]
    window, other, curve, slow = Window(9), Window(9), Curve(20), Curve(20)
    window.extend(values[:9])
    medians = rolling_medians(values[:9], values[9:])
    for idx, value in enumerate(values):
        other.add(value)
        slow.add(idx, value)
        if idx >= 8:
            assert medians[idx - 8] == other.median()
    window.extend(values[9:])
    assert (window.recent, window.median()) == (other.recent, other.median())
    for start in range(0, 300, 60):
        curve.extend(list(range(start, start + 60)), values[start : start + 60])
    assert curve.points()[0] == slow.points()[0]
    assert curve.points()[1] == pytest.approx(slow.points()[1])
