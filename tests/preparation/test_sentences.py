"""The sentence splitter on what trips splitters up."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmldlm.preparation.cutting import collapse, sentence_spans, split_paragraphs, split_sentences

CASES = [
    ("It rained. We left.", ["It rained.", "We left."]),
    (
        "Mr. Smith met Gen. Grant on Jan. 5. They talked.",
        ["Mr. Smith met Gen. Grant on Jan. 5.", "They talked."],
    ),
    ("He lives in Washington, D.C. He is old.", ["He lives in Washington, D.C.", "He is old."]),
    ("The U.S. Senate voted.", ["The U.S. Senate voted."]),
    ("J. R. R. Tolkien wrote it.", ["J. R. R. Tolkien wrote it."]),
    ("It was I. The end.", ["It was I.", "The end."]),
    ("It cost $3.50. Then 1.5 million.", ["It cost $3.50.", "Then 1.5 million."]),
    ("No. 5 is alive. No. He left.", ["No. 5 is alive.", "No.", "He left."]),
    ('He said, "Go home." She did.', ['He said, "Go home."', "She did."]),
    ('"Why?" he asked. "No!" Then nothing.', ['"Why?" he asked.', '"No!"', "Then nothing."]),
    ("Wait... what? Well... Then he left.", ["Wait... what?", "Well...", "Then he left."]),
    ("And so . . . the end. Yes.", ["And so . . . the end.", "Yes."]),
    ("1. First of all, we go. We stay.", ["1. First of all, we go.", "We stay."]),
    ("See e.g. Fig. 3 and cf. Sec. 2. Done.", ["See e.g. Fig. 3 and cf. Sec. 2.", "Done."]),
    (
        "At 10 a.m. The meeting began at 10 a.m. on Monday.",
        ["At 10 a.m.", "The meeting began at 10 a.m. on Monday."],
    ),
    ("Really?! Yes!", ["Really?!", "Yes!"]),
    ("Is it (really?) so. (Yes.) Good.", ["Is it (really?) so.", "(Yes.)", "Good."]),
    ("你好。世界！对吗？", ["你好。", "世界！", "对吗？"]),
    ("A heading\n\nA line that\nis wrapped. Next.", ["A heading", "A line that is wrapped.", "Next."]),
    ("one\r\n\r\ntwo", ["one", "two"]),
    ("no end", ["no end"]),
    (" \n\t ", []),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[text[:20] for text, _ in CASES])
def test_split_sentences(text: str, expected: list[str]) -> None:
    assert split_sentences(text) == expected


@given(st.text(alphabet="aB .!?\n\"'…。1", max_size=80))
@settings(max_examples=200, deadline=None)
def test_no_character_is_lost(text: str) -> None:
    assert "".join(split_sentences(text)).replace(" ", "") == "".join(text.split())
    assert "".join(sentence_spans(text)).strip() == text.strip()


def test_paragraphs_are_collapsed() -> None:
    assert split_paragraphs("a\n b\n \n\n  c\td ") == ["a b", "c d"]
    assert collapse("  a \n b ") == "a b"


def test_a_long_paragraph_takes_linear_time() -> None:
    begin = time.perf_counter()
    assert len(split_sentences("Hello there . . . my friend. " * 20_000)) == 20_000
    assert time.perf_counter() - begin < 60
