"""Chunks: never too long, nothing lost, whole sentences where they fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmldlm.data.tokenizer import Tokenizer
from mmldlm.preparation.cutting import SeenIds, choose_split, cutter, split_chunks, text_id

TOKENIZERS = {name: Tokenizer.load(name) for name in ("builtin:minilm", "builtin:gpt2")}
WORDS = st.sampled_from(
    ["word", "Antidisestablishmentarianism", "is.", "No!", "你好", "x" * 90, "\n\n", "é", "🙂🙂", "a,b;c"]
)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(words=st.lists(WORDS, min_size=1, max_size=60), max_tokens=st.sampled_from([8, 13, 40]))
@settings(max_examples=60, deadline=None)
def test_chunks_fit_and_lose_nothing(name: str, words: list[str], max_tokens: int) -> None:
    text = " ".join(words)
    chunks = split_chunks(text, TOKENIZERS[name], max_tokens)
    assert all(len(tokens) <= max_tokens for tokens in TOKENIZERS[name].encode_batch(chunks))
    assert "".join("".join(chunks).split()) == "".join(text.split())


def test_a_long_text_may_begin_with_what_holds_no_token() -> None:
    """Such as a zero-width space on a line of its own, as web pages have it."""
    text = "\u200b\n\nOne two three four five. Six seven eight nine ten."
    chunks = split_chunks(text, TOKENIZERS["builtin:minilm"], 8)
    assert chunks == ["\u200b\n\nOne two three four five.", "Six seven eight nine ten."]


def test_chunks_end_at_sentences() -> None:
    text = "One two three four. Five six seven eight. Nine ten eleven twelve."
    assert split_chunks(text, TOKENIZERS["builtin:minilm"], 10) == [
        "One two three four. Five six seven eight.",
        "Nine ten eleven twelve.",
    ]


def test_a_long_text_is_cut_in_little_time() -> None:
    chunks = split_chunks("word " * 50_000, TOKENIZERS["builtin:minilm"], 128)
    assert [len(chunk.split()) for chunk in chunks[:-1]] == [128] * (50_000 // 128)


def test_cutters() -> None:
    text = "A b. C d.\n\nE f."
    assert cutter("none")(text) == [text]
    assert cutter("chunks")(" \n") == []
    assert cutter("paragraphs")(text) == ["A b. C d.", "E f."]
    assert cutter("sentences")(text) == ["A b.", "C d.", "E f."]


def test_ids_ignore_whitespace_only() -> None:
    assert text_id(" a  b\n") == text_id("a b") != text_id("a B")
    assert 0 <= text_id("a b") < 2**63


def test_shares_of_splits() -> None:
    splits = [choose_split(f"document {number}", 0.1, 0.2, 0) for number in range(5000)]
    assert splits.count("validation") == pytest.approx(500, abs=80)
    assert splits.count("test") == pytest.approx(1000, abs=100)
    assert splits != [choose_split(f"document {number}", 0.1, 0.2, 1) for number in range(5000)]


@given(st.lists(st.lists(st.integers(0, 40), max_size=20), max_size=20))
@settings(deadline=None)
def test_seen_ids_is_a_set(batches: list[list[int]]) -> None:
    seen, known = SeenIds(), set()
    for batch in batches:
        fresh = seen.add(np.array(batch, np.int64))
        for number, is_fresh in zip(batch, fresh, strict=True):
            assert is_fresh == (number not in known)
            known.add(number)
