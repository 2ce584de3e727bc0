"""Derived documents are what they say they are, the same in any order and after a kill. The encoder is a stand-in."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mmldlm.data.store import PairStore
from mmldlm.preparation import cutting, derive, pipeline
from mmldlm.preparation.cutting import Segment, text_id
from mmldlm.preparation.derive import Survey, boundaries, draw_spans, draw_splices, draw_swaps
from mmldlm.preparation.pipeline import PrepareSettings, run
from tests import warm
from tests.preparation.fake import FakeEncoder

ROOT = Path(__file__).parents[2]
NAMES = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay"]
TEXTS = [
    f"{a}: the {a} of field {number}, which met {b}; then it {'slept' if number % 3 else 'ran. Much later'} alone"
    for number, (a, b) in enumerate((a, b) for a in NAMES for b in NAMES if a < b)
] + ["no boundary in here", "two words", "one"]


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "load_encoder", FakeEncoder.load)


def _write(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def _prepare(source: Path, out: Path, **options: object) -> PairStore:
    settings = {"input": (str(source),), "validation": 0.0, "shard_documents": 50, "derive": 2} | options
    return run(PrepareSettings(**settings), out)  # type: ignore[arg-type]


def _rows(store: PairStore, split: str = "train") -> list[dict[str, object]]:
    shards = store.manifest.splits[split]["shards"]
    files = [pa.ipc.open_file(pa.memory_map(str(store.path / shard["file"]))) for shard in shards]
    return [row for file in files for row in file.get_batch(0).to_pylist()]


def _made_from(made_of: str, texts: dict[int, str]) -> str:
    """The text that an origin stands for, by the words of the documentation."""
    kind, *numbers = made_of.split()
    first, *rest = map(int, numbers)
    if kind == "swap":
        pieces = re.split(r"(\w[\w'-]*)", texts[first])
        assert 1 <= len(rest) // 3 <= len(pieces) // 2 // 3
        for place, other, word in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            pieces[2 * place + 1] = re.findall(r"\w[\w'-]*", texts[other])[word]
        return "".join(pieces)
    if kind == "span":
        start, end = rest
        assert 2 <= end - start < len(texts[first].split())
        return " ".join(texts[first].split()[start:end])
    end, second, start = rest
    assert kind == "splice"
    assert first != second
    head, tail = texts[first][:end], texts[second][start:]
    assert head[-1] in ":;,.!?"
    assert texts[first][end].isspace()
    assert texts[second][start - 1] in ":;,.!?"
    assert tail[0].isspace()
    return f"{head} {tail.strip()}"


def test_spans_are_even_in_length_and_place() -> None:
    text, draws = "a b c d e", 12_000
    found = Counter(span.text for id in range(draws // 16) for span in draw_spans(id, text, 3, 16))
    runs = {text[2 * start : 2 * (start + n) - 1]: n for n in (2, 3, 4) for start in range(6 - n)}
    assert set(found) == set(runs)
    for run_text, length in runs.items():
        expected = draws / 3 / (6 - length)
        assert abs(found[run_text] - expected) < 5 * expected**0.5, run_text
    assert draw_spans(1, "a b", 0, 16) == []
    assert draw_spans(1, text, 0, 4) == draw_spans(1, text, 0, 16)[:4]
    assert draw_spans(1, text, 0, 8) != draw_spans(1, text, 1, 8)


def test_splices_are_even_in_partner_and_boundaries() -> None:
    partners = [(10, "p: q; r"), (20, "s, t"), (30, "u. v")]
    found = Counter(
        splice.text for id in range(750) for splice in draw_splices(id, "x, y! z", 3, 16, partners)
    )
    shares = {"q; r": 1 / 6, "r": 1 / 6, "t": 1 / 3, "v": 1 / 3}
    assert set(found) == {f"{head} {tail}" for head in ("x,", "x, y!") for tail in shares}
    for text, count in found.items():
        expected = 12_000 / 2 * shares[text.removeprefix("x, ").removeprefix("y! ").removeprefix("x, ")]
        assert abs(count - expected) < 5 * expected**0.5, text
    own = draw_splices(20, "s, t", 0, 16, partners)
    assert own
    assert all(splice.made_of.split()[3] != "20" for splice in own)
    assert draw_splices(20, "s, t", 0, 4, [(20, "s, t")]) == []
    assert draw_splices(5, "no boundary", 0, 4, partners) == []


def test_swaps_are_even_in_number_place_and_word() -> None:
    partners, draws = [(10, "p: q"), (20, "s, t u v")], 12_000
    chosen = [
        one for id in range(draws // 16) for one in draw_swaps(id, "a-b c! d'e (f) g h", 3, 16, partners)
    ]
    changes = [one.made_of.split()[2:] for one in chosen]
    single = [change for change in changes if len(change) == 3]
    # one of two draws asks for one place, and a second place is the first again in one of six cases
    assert len(single) == pytest.approx(draws * (1 / 2 + 1 / 12), rel=0.05)
    places = Counter(change[0] for change in single)
    assert sorted(places) == list("012345")
    assert all(count == pytest.approx(len(single) / 6, rel=0.15) for count in places.values())
    words = Counter(tuple(change[1:]) for change in single)
    assert words[("10", "1")] == pytest.approx(len(single) / 4, rel=0.15)
    assert words[("20", "3")] == pytest.approx(len(single) / 8, rel=0.2)
    assert {one.text for one in chosen} >= {"p c! d'e (f) g h", "a-b c! d'e (v) g h"}
    assert draw_swaps(1, "two words", 0, 4, partners) == draw_swaps(1, "a b c", 0, 4, []) == []
    assert draw_swaps(1, "a b c d", 0, 4, partners) == draw_swaps(1, "a b c d", 0, 16, partners)[:4]


@pytest.mark.parametrize(
    ("text", "cuts"),
    [
        ("a: b", ["a:"]),
        ("3.5 of 1,000 at 9:30", []),
        ("end.", []),
        ("Oh! No?\nYes; so", ["Oh!", "Oh! No?", "Oh! No?\nYes;"]),
        ("... and so", []),
        ("well. ...", []),
    ],
)
def test_boundaries(text: str, cuts: list[str]) -> None:
    assert [text[:end] for end in boundaries(text)] == cuts


def test_words_keep_their_vowel_signs_and_accents() -> None:
    text = "नमस्ते दुनिया, cafe\u0301 don't ภาษาไทย well-known"
    words = [text[start:end] for start, end in derive.words_of(text).tolist()]
    assert words == ["नमस्ते", "दुनिया", "cafe\u0301", "don't", "ภาษาไทย", "well-known"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (
            ["今天天气很好，我们去公园。", "机器学习是一个分支。"],
            "no spans and no splices and no swaps came out",
        ),
        (["a coil of rope", "the open blue sea"], "no splices and no swaps came out"),
        (TEXTS, ""),
    ],
)
def test_a_kind_of_which_none_came_out_is_reported(tmp_path: Path, texts: list[str], expected: str) -> None:
    notes: list[str] = []
    settings = PrepareSettings(input=(str(_write(tmp_path / "a.jsonl", texts)),), validation=0.0, derive=2)
    run(settings, tmp_path / "s", note=notes.append)
    assert expected in "; ".join(note for note in notes if note.startswith("derive"))
    assert bool(expected) == any(note.startswith("derive") for note in notes)


def test_partners_are_a_sample_that_no_order_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [
        Segment(f"{number}: x", np.zeros(3, np.uint32), number, "test" if number % 5 == 0 else "train")
        for number in range(200)
    ]
    whole = Survey.of(documents, PrepareSettings(("x.txt",), max_tokens=32))
    assert sorted(id for id, _ in whole.partners) == [number for number in range(200) if number % 5]
    monkeypatch.setattr(derive, "PARTNER_TOKENS", 20 * 32)
    sample = Survey.of(documents, PrepareSettings(("x.txt",), max_tokens=32))
    assert sample.partners == whole.partners[:20]
    assert sample.num_documents == 200
    random.Random(0).shuffle(documents)
    assert Survey.of(iter(documents), PrepareSettings(("x.txt",), max_tokens=32)) == sample


def test_every_derived_document_is_what_it_says(tmp_path: Path) -> None:
    source = _write(tmp_path / "x.jsonl", TEXTS)
    store = _prepare(source, tmp_path / "s", validation=0.3, test=0.1, derive=3)
    rows, counts = _rows(store), store.manifest.counts
    originals = {row["id"]: row["text"] for row in rows if row["made_of"] is None}
    derived = [row for row in rows if row["made_of"] is not None]
    held_out = {row["text"] for split in ("validation", "test") for row in _rows(store, split)}
    assert originals.keys() | {text_id(text) for text in held_out} == {text_id(text) for text in TEXTS}
    for row in derived:  # parents are looked up among the training texts only
        assert row["text"] == _made_from(row["made_of"], originals)  # type: ignore[arg-type]
        assert row["text"] not in held_out
    kinds = Counter(str(row["made_of"]).split()[0] for row in derived)
    assert kinds == {kind: counts[f"derived_{kind}s"] for kind in ("span", "splice", "swap")}
    assert min(kinds.values()) > 50
    assert len({row["id"] for row in rows}) == len(rows) == len(store.split("train"))
    texts = [str(row["text"]) for row in rows]
    assert [row["id"] for row in rows] == [text_id(text) for text in texts]
    tokenizer = pipeline.Tokenizer.load(store.tokenizer_path() or "")
    assert [row["tokens"] for row in rows] == tokenizer.encode_batch(texts)
    documents = store.split("train").read(np.arange(len(rows)))
    assert np.allclose(documents.latents, FakeEncoder({"prompt": ""}).encode(texts), atol=2e-3)
    assert all("made_of" not in row for row in _rows(store, "validation"))


def test_no_order_and_no_size_of_a_batch_changes_what_is_derived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [" ".join(f"{word}{number}{mark}" for word, mark in zip("abcdef", ":.,;  ", strict=True))
             for number in range(40)]  # fmt: skip
    store = _prepare(_write(tmp_path / "x.jsonl", texts), tmp_path / "s")
    monkeypatch.setattr(cutting, "BATCH", 7)
    monkeypatch.setattr(derive, "BATCH", 5)
    mixed = random.Random(1).sample(texts, len(texts))
    other = _prepare(_write(tmp_path / "y.jsonl", mixed), tmp_path / "o", shard_documents=13)
    assert {row["id"]: row for row in _rows(store)} == {row["id"]: row for row in _rows(other)}
    assert store.manifest.counts == other.manifest.counts
    seeded = _prepare(tmp_path / "x.jsonl", tmp_path / "seeded", seed=1)
    assert {row["text"] for row in _rows(seeded)} != {row["text"] for row in _rows(store)}


def test_a_held_out_text_does_not_come_back_as_a_derived_one(tmp_path: Path) -> None:
    """Every span of the training text is drawn, and two of them are held out, one after it in the stream."""
    source = _write(tmp_path / "x.jsonl", ["alpha beta gamma delta", "beta gamma"])
    held = _write(tmp_path / "h.jsonl", ["alpha  beta gamma"])
    store = _prepare(source, tmp_path / "s", validation=0.5, test_input=(str(held),), derive=16)
    assert [row["text"] for row in _rows(store, "validation")] == ["beta gamma"]
    derived = {row["text"] for row in _rows(store) if row["made_of"]}
    assert derived == {"alpha beta", "gamma delta", "beta gamma delta"}
    assert store.manifest.counts["derived_duplicates"] == 16 - 3


def test_lengths_and_limit_hold_for_derived_documents(tmp_path: Path) -> None:
    source = _write(tmp_path / "x.jsonl", TEXTS)
    store = _prepare(source, tmp_path / "s", min_tokens=6, max_tokens=24, derive=4, limit=20)
    lengths = store.split("train").lengths
    assert lengths.min() >= 6
    assert lengths.max() <= 24
    counts, rows = store.manifest.counts, _rows(store)
    assert counts["derived_too_short"] > 0
    assert counts["derived_too_long"] > 0
    originals = {row["id"]: row["text"] for row in rows if row["made_of"] is None}
    assert len(originals) == 20
    assert len(rows) > 60
    for row in rows:
        if row["made_of"] is not None:
            assert row["text"] == _made_from(row["made_of"], originals)  # type: ignore[arg-type]


def test_kill_and_go_on_is_byte_identical(tmp_path: Path) -> None:
    documents = 120
    source, held = _write(tmp_path / "x.jsonl", TEXTS), _write(tmp_path / "h.jsonl", ["held: out", TEXTS[3]])
    words = ["prepare", "--input", source, "--validation-input", held, "--shard-documents", 50, "--derive", 2]
    killed = warm.run(
        [sys.executable, "-m", "tests.preparation.fake", *map(str, words), "--out", str(tmp_path / "s")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "KILL_AFTER": str(documents)}, check=False,
        capture_output=True, timeout=280,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    kept = [json.loads(path.read_text()) for path in (tmp_path / "s").glob("*/shard-*.json")]
    assert documents // 50 - 1 <= len(kept) <= documents // 50  # the last one may not be written yet
    options = {"validation": None, "validation_input": (str(held),)}
    FakeEncoder.seen = 0
    whole = _prepare(source, tmp_path / "whole", **options)
    everything, FakeEncoder.seen = FakeEncoder.seen, 0
    _prepare(source, tmp_path / "s", **options)
    assert FakeEncoder.seen == everything - sum(sidecar["num_documents"] for sidecar in kept)
    names = [path.relative_to(whole.path) for path in whole.path.rglob("*") if path.is_file()]
    assert {
        path.relative_to(tmp_path / "s") for path in (tmp_path / "s").rglob("*") if path.is_file()
    } == set(names)
    assert all((tmp_path / "s" / name).read_bytes() == (whole.path / name).read_bytes() for name in names)


def test_without_it_a_store_is_as_before(tmp_path: Path) -> None:
    store = _prepare(_write(tmp_path / "x.jsonl", TEXTS), tmp_path / "s", derive=0)
    assert set(_rows(store)[0]) == {"id", "tokens", "latents", "text"}
    assert not [key for key in store.manifest.counts if "derived" in key]
    new = {"derive", "validation_input", "test_input", "validation_dataset_split", "test_dataset_split"}
    assert not new & set(store.manifest.settings)
