"""Many lines at once say what they would say one by one, however they come in."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runwatch import formats
from runwatch.alerts import AlertBook
from runwatch.blocks import Block, Stretch, rolling_medians, stretches
from runwatch.detectors import ALL, losses
from runwatch.detectors.base import RunFacts
from runwatch.follow import Lines
from runwatch.formats import LineParser
from runwatch.history import Curve, Window
from runwatch.records import Record
from runwatch.settings import MonitorSettings
from runwatch.sources import find_runs
from runwatch.watch import RunWatch


@pytest.fixture(autouse=True)
def from_the_first_line_on(monkeypatch):
    monkeypatch.setattr(formats, "_FIRST_ALONE", 0)


SPIKE = 701
"""Step at which the loss jumps."""


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


def as_own(row):
    """Our full log: losses by time, which jump with the loss once but not again, and validations in between."""
    noise, row = random.Random(repr(row)), dict(row)
    base, jump = 1.5 + 4 * math.exp(-row["tokens"] / 9e4 / 300), 4 if row["step"] == SPIKE else 1
    row["loss"] *= 4 if row["step"] in (SPIKE + 80, SPIKE + 330) else 1
    row["text_loss_by_time"] = [base * (1 + bucket) * jump * noise.uniform(0.8, 1.25) for bucket in range(8)]
    row["latent_loss_by_time"] = [
        0.5 * noise.uniform(0.8, 1.25) for _ in range(8 if row["step"] % 300 else 6)
    ]
    for bucket in range(8):
        if noise.random() < 0.1:
            row["text_loss_by_time"][bucket] = noise.choice((None, math.nan))
    row |= {"mfu": None, "mode": "joint", "is_best": True, "betas": [0.9, None]}
    row = {**row, "nonfinite": ["text_accuracy"], "text_accuracy": None} if noise.random() < 0.01 else row
    line = json.dumps(row)
    if row["step"] % 20 == 0:
        valid = {"step": row["step"], "time": row["time"] + 0.1, "valid_loss": base * noise.uniform(0.9, 1.2)}
        valid |= {"valid_text_loss": base, "valid_text_loss_shuffled": base * noise.uniform(0.99, 1.2)}
        line += "\n" + json.dumps(valid)
    return line


def as_damaged(row):
    """The same, on a bad disk: some lines lose or change a few letters."""
    noise, line = random.Random(row["time"]), as_own(row)
    if noise.random() < 0.03:
        at = noise.randrange(len(line))
        line = (
            line[:at]
            + noise.choice(("", "#", "]", '"', "9", "{", ", ", "\ufffd"))
            + line[at + noise.randrange(3) :]
        )
    return line


def as_text(row):
    kept = {name: row[name] for name in ("loss", "lr", "grad_norm")}
    words = " ".join(f"{name}={value:.5f}" for name, value in kept.items())
    return f"INFO step {row['step']}/5000 {words} tokens/s={row['tokens_per_second']:,.1f}"


def state_of(run):
    alerts = [alert.as_dict() for alert in run.panel.book.alerts.values()]
    curves = {name: curve.points() for name, curve in run.curves.items()}
    return (
        alerts,
        curves,
        run.ledger.summary(),
        run.latest,
        run.num_lines,
        run.step,
        repr(run.buckets),
        list(run.pace),
    )


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[3:] == other[3:]
    for name, (steps, values) in one[1].items():
        assert other[1][name][0] == steps
        assert other[1][name][1] == pytest.approx(values, nan_ok=True)
    assert (one[2] is None) == (other[2] is None)
    if one[2] is not None:
        assert other[2]["seconds"] == pytest.approx(one[2]["seconds"], abs=0.2)


@pytest.mark.parametrize("form", [as_json, as_text, as_own, as_damaged])
@pytest.mark.parametrize("seed", range(3))
def test_a_whole_file_a_followed_file_and_single_lines_give_the_same(tmp_path, monkeypatch, form, seed):
    monkeypatch.setattr(losses, "_BUCKET_LINES", 100)
    lines = [form(row) + "\n" for row in rows(seed)]
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text("".join(lines))

    def watch(file):
        return RunWatch(find_runs([str(file)])[0], MonitorSettings(), clock=lambda: 1.7e9)

    whole = watch(path)
    news = whole.poll(live=False)
    assert {change.alert.code for change in news} >= {"M101", "M102", "M202"}
    spikes = whole.panel.book.alerts["M102", ""]
    assert form in (as_json, as_text) or (spikes.first_step, spikes.last_step) == (SPIKE, SPIKE)
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


def records_of(items):
    """Blocks taken apart."""
    for item in items:
        yield from map(item.record, range(len(item))) if isinstance(item, Block) else [item]


def test_plain_lines_become_blocks_and_others_do_not():
    lines = [as_json(row) for row in rows(0, 100)]
    torn = [*lines[:40], lines[40][:30], '{"a": [{"x": 1}', '{"b": 1}]}', *lines[41:]]
    for some in (lines, [as_text(row) for row in rows(0, 100)], torn):
        found = list(LineParser().parse_many(some))
        assert sum(len(item) for item in found if isinstance(item, Block)) > 80
    assert [record.step for record in records_of(found)] == [*range(1, 41), *range(42, 101)]


def test_a_short_log_is_read_line_by_line(monkeypatch):
    monkeypatch.setattr(formats, "_FIRST_ALONE", 60)
    parser, lines = LineParser(), [as_json(row) for row in rows(0, 100)]
    found = [*parser.parse_many(lines[:50]), *parser.parse_many(lines[50:])]
    assert [type(item) for item in found] == [Record] * 60 + [Block]


def test_our_own_log_is_one_stretch_in_spite_of_validations_and_checkpoints():
    lines = "\n".join(as_own(row) for row in rows(0, 300)).split("\n")
    plain = [line for line in lines if "nonfinite" not in line and '"step": 300' not in line]
    items = list(LineParser().parse_many(plain))
    items.insert(len(items) // 2, Record(event="saved", step=100))
    (stretch,) = stretches(items)
    assert isinstance(stretch, Stretch)
    assert len(stretch.whole) == sum("valid_loss" not in line for line in plain)
    assert len(list(stretch.records())) == len(plain) + 1
    assert not stretch.take(Record(event="rolled_back", step=100))
    assert not stretch.take(Record(step=400, values={"loss": 1.0}))


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind.wide])
def test_wide_detectors_do_not_miss_what_stands_between_lines_of_training(kind):
    chosen = MonitorSettings()
    book = AlertBook(chosen)
    seeing, other = (kind(chosen, book, RunFacts()) for _ in range(2))
    for row in rows(0, 90):
        record = LineParser().parse(as_json(row))
        seeing.line(record)
        other.line(record)
        other.line(Record(step=record.step, values={"valid_loss": 2.0, "valid_text_loss": 1.0, "mfu": 0.3}))
        other.event(Record(event="saved", step=record.step))
    states = [repr({key: _plain(value) for key, value in vars(one).items()}) for one in (seeing, other)]
    assert states[0] == states[1]


def _plain(value):
    return {key: _plain(item) for key, item in vars(value).items()} if hasattr(value, "__dict__") else value


FIELD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(width=32),
    st.sampled_from([2**62, 2**70, 1e300, "a", "]", {}]),
)
LISTS = st.lists(
    st.one_of(st.none(), st.floats(width=16), st.integers(0, 3), st.sampled_from(["x", [1]])), max_size=4
)
KEYS = st.sampled_from(
    ["loss", "train/loss", "lr", "time", "dt", "batch_size", "nonfinite", "rank", "valid_loss", "é"]
)
ROW = st.fixed_dictionaries(
    {"step": st.one_of(st.integers(0, 50), FIELD)},
    optional={"text_loss_by_time": LISTS, "latent_loss_by_time": LISTS, "betas": LISTS},
)
SHAPES = st.lists(
    st.tuples(ROW, st.dictionaries(KEYS, FIELD, max_size=4), st.integers(1, 20)), min_size=1, max_size=6
)
DAMAGE = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.integers(0, 3),
        st.sampled_from(["", "{", "}", "]", ",", '"', "1", "\n", "NaN"]),
    ),
    max_size=3,
)


@given(shapes=SHAPES, damage=DAMAGE, compact=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_lines_of_json_say_in_blocks_what_they_say_alone(shapes, damage, compact):
    separators = (",", ":") if compact else (", ", ": ")
    rows = [
        json.dumps(row | more, separators=separators) for row, more, count in shapes for _ in range(count)
    ]
    text = "\n".join(rows)
    for at, width, letters in damage:
        at %= len(text)
        text = text[:at] + letters + text[at + width :]
    lines = Lines([line for line in text.split("\n") if line])
    lines.content = "\n".join(lines).encode()
    together, alone = LineParser(), LineParser()
    found = [vars_of(record) for record in records_of(together.parse_many(lines))]
    assert found == [vars_of(record) for record in filter(None, map(alone.parse, lines))]
    assert together.last_step == alone.last_step


def vars_of(record):
    """What can be compared: nan is nan, and 1 is 1.0."""
    numbers = {name: repr(float(value)) for name, value in record.values.items()}
    return record.step, record.time, numbers, repr(record.lists), record.rank, record.event, record.text


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
