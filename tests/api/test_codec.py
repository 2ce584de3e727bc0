"""`Codec.tokenize`: the ids of the tokenizer itself, whatever the texts hold."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mmldlm.api.values import FEW_TEXTS, Codec, text_list
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError

ODD = [
    "Ünïcode çafé — 你好 мир 🙂 don't",
    "  spaces   everywhere  ",
    "tabs\tand\r\nlines\n",
    "[MASK] [SEP][CLS] [UNK]",
    "in new york, newyork",
    "e\u0301 \u0301x \ufb01 \u200b \xa0y",
    "antidisestablishmentarianism " * 3,
    "word " * 3000,
    "x" * 5000,
    "\x00\x01 control \x7f",
    "x",
]


def codec_of(folder: Path, max_length: int = 10_000) -> Codec:
    """The codec of a model with this tokenizer, of which nothing else exists."""
    shape = SimpleNamespace(num_slots=1, num_channels=4, max_length=max_length, vocab_size=10**6)
    model = SimpleNamespace(tokenizer_path=folder, denoiser=SimpleNamespace(shape=shape))
    return Codec(cast(Any, model))


@pytest.mark.parametrize("added", [[], ["newyork"], ["new york"]])
@pytest.mark.parametrize("name", ["builtin:minilm", "builtin:gpt2"])
def test_odd_texts_have_the_ids_of_the_tokenizer(name: str, added: list[str], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(name)
    tokenizer.backend.add_tokens(added)
    tokenizer.save(tmp_path)
    expected = [
        tokenizer.backend.encode(text, add_special_tokens=False).ids for text in ODD
    ]  # one by one, without any table
    codec = codec_of(tmp_path)
    many = FEW_TEXTS // len(ODD) + 1
    for texts, lists in (
        (ODD * many, expected * many),
        (ODD[::-1] * many, expected[::-1] * many),
        (ODD, expected),
    ):
        tokens = codec.tokenize(texts)
        assert [ids.tolist() for ids in tokens] == lists
        assert {ids.dtype for ids in tokens} == {np.dtype(np.int64)}
    assert codec.tokenize([]) == []
    assert codec.texts_of(codec.tokenize(ODD)) == tokenizer.backend.decode_batch(expected)


def test_what_was_looked_up_is_left_out_of_copies() -> None:
    tokenizer = Tokenizer.load("builtin:minilm")
    texts = ["a coil of rope", "the open sea"] * FEW_TEXTS
    expected = [ids.tolist() for ids in tokenizer.encode_arrays(texts)]
    assert tokenizer.decode_batch(expected) == texts
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert [ids.tolist() for ids in other.encode_arrays(texts)] == expected
        assert other.decode_batch(np.array(expected[:1], np.float32)) == texts[:1]


def test_the_first_text_without_a_token_is_named(tmp_path: Path) -> None:
    Tokenizer.load("builtin:minilm").save(tmp_path)
    codec = codec_of(tmp_path)
    for text in ("", " ", "\u200b"):
        with pytest.raises(UserError) as caught:
            codec.tokenize(["a word", text, "more", ""])
        assert str(caught.value) == f"texts[1]={text!r}: holds no token"


def test_long_texts_are_kept_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Tokenizer.load("builtin:minilm").save(tmp_path)
    with caplog.at_level(logging.WARNING):
        tokens = codec_of(tmp_path, max_length=3).tokenize(["a b c d", "a b c"])
    assert [len(ids) for ids in tokens] == [4, 3]
    assert "texts of more than 3 tokens, the most in training: 1 of 2" in caplog.text


@pytest.mark.parametrize("text", ["half \ud800", "\udfff", "é\udc00"])
def test_half_a_character_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match=r"texts\[1\]: holds half of a surrogate pair"):
        text_list(["\ud7ff and \ue000 are characters", text])
