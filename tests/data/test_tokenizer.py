"""Tokenizers by name and folder: plain ids, the same wherever the files lie."""

from __future__ import annotations

import random
import unicodedata
from base64 import b64decode
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from mmldlm.data import tokenizer
from mmldlm.data.tokenizer import PROBE, QWEN_WORDS, Tokenizer
from mmldlm.errors import UserError


@pytest.fixture(scope="module")
def minilm() -> Tokenizer:
    return Tokenizer.load("builtin:minilm")


def test_plain_ids_without_padding_or_truncation(minilm: Tokenizer) -> None:
    short, long = minilm.encode_batch(["Hello world", "word " * 1000])
    assert short == [7592, 2088]
    assert len(long) == 1000
    arrays = minilm.encode_arrays(["Hello world", "", "word"])
    assert [array.tolist() for array in arrays] == [[7592, 2088], [], [2773]]
    assert {array.dtype.name for array in arrays} == {"uint32"}
    assert minilm.encode_arrays([]) == []
    assert minilm.vocab_size == 30522
    assert minilm.decode_batch([[101, *short, 102, 0]]) == ["hello world"]


def test_the_table_of_words_gives_the_ids_of_whole_texts(
    minilm: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands beside a space: other white space, control characters, accents, marks, special tokens."""
    draws = random.Random(0)
    pieces = [
        *"aB3'-.,([#é中Σİ",
        *"\t\n\r\v\f\x1c\x85\xa0\u200b\u2028\u3000\u0301\u0327",
        "[MASK]",
        "[UNK]",
        "word",
    ]
    texts = ["".join(draws.choices([*pieces, *" " * 9], k=draws.randrange(30))) for _ in range(4000)]
    texts += ["".join(map(chr, draws.choices([32, *range(33, 0xD800)], k=20))) for _ in range(2000)]
    assert minilm._words is not None
    monkeypatch.setattr(tokenizer, "MOST_KNOWN_CHARACTERS", 20000)
    for start in range(0, len(texts), 500):
        some = texts[start : start + 500]
        assert [array.tolist() for array in minilm.encode_arrays(some)] == minilm.encode_batch(some)


def test_a_tokenizer_whose_tokens_hold_spaces_has_no_table_of_words(
    minilm: Tokenizer, tmp_path: Path
) -> None:
    gpt2 = Tokenizer.load("builtin:gpt2")
    assert gpt2._words is None
    assert [array.tolist() for array in gpt2.encode_arrays(["a b", ""])] == gpt2.encode_batch(["a b", ""])
    minilm.save(tmp_path)
    other = Tokenizer.load(tmp_path)
    other.backend.add_tokens(["new york"])
    assert other._words is None
    assert len(other.encode_arrays(["in new york"])[0]) == 2


@pytest.mark.parametrize("content", ["new\tyork", "new\nyork"])
def test_a_tab_in_an_added_token_is_a_space(minilm: Tokenizer, tmp_path: Path, content: str) -> None:
    minilm.save(tmp_path)
    other = Tokenizer.load(tmp_path)
    other.backend.add_tokens([AddedToken(content, normalized=True)])
    texts = ["in new york", "in new", "york"]
    assert [array.tolist() for array in other.encode_arrays(texts)] == other.encode_batch(texts)


def test_a_text_that_cannot_be_encoded_leaves_the_table_of_words_as_it_should_be(minilm: Tokenizer) -> None:
    with pytest.raises(TypeError):
        minilm.encode_arrays(["a good word and \ud800"])
    assert [array.tolist() for array in minilm.encode_arrays(["a word"])] == minilm.encode_batch(["a word"])


def test_long_words_of_few_ids_do_not_fill_the_memory(
    minilm: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "MOST_KNOWN_CHARACTERS", 100_000)
    for number in range(30):
        assert len(minilm.encode_arrays([f"{number}" + "a" * 20_000])[0]) == 1
    assert minilm._words is not None
    assert sum(map(len, minilm._words._numbers)) <= 120_000


def test_pieces_of_ids_make_the_text_that_the_decoder_makes(minilm: Tokenizer, tmp_path: Path) -> None:
    """Special tokens, ids of no token, punctuation, endings of words and tokens added later, wherever they stand."""
    minilm.save(tmp_path)
    other = Tokenizer.load(tmp_path)
    other.backend.add_tokens(["new york", "##ful", " ."])
    draws = random.Random(0)
    common = [0, 100, 101, 102, 103, 999, 30521, 40000, *range(1000, 1060), *range(30522, 30525)]
    words = other.encode_batch(["isn't it, (he's) 3.5 ; do not i'm we've unwillingness . ! ? #", "new york"])
    ids = [*common, *(token for text in words for token in text)]
    lists = [draws.choices(ids, k=draws.randrange(12)) for _ in range(5000)]
    lists += [draws.choices(range(30522), k=30) for _ in range(500)]
    expected = other.backend.decode_batch(lists, skip_special_tokens=True)
    assert other._pieces is not None
    assert other.decode_batch(lists) == expected
    assert other.decode_batch([np.array(text, np.int64) for text in lists]) == expected
    assert other.decode_batch([list(np.array(text, np.uint32)) for text in lists]) == expected


def test_a_decoder_of_bytes_has_no_pieces() -> None:
    gpt2 = Tokenizer.load("builtin:gpt2")
    assert gpt2._pieces is None
    ids = gpt2.encode_batch(["你好 🙂"])
    assert gpt2.decode_batch([np.array(ids[0])]) == ["你好 🙂"]


def test_special_ids_leave_the_unknown_token_alone(minilm: Tokenizer) -> None:
    assert minilm.special_ids() == {0, 101, 102, 103}


def test_text_outside_the_vocabulary_is_known_as_such(minilm: Tokenizer) -> None:
    assert minilm.unknown_id == 100
    assert minilm.unknown_words("the naïve 🎉🎉 boat 日本 " + "a" * 120) == ["🎉🎉", "a" * 120]
    assert Tokenizer.load("builtin:gpt2").unknown_id is None
    unigram = Tokenizer(Backend(models.Unigram([("a", -1.0), ("<unk>", 0.0)], unk_id=1)), "unigram")
    assert unigram.unknown_id == 1
    assert unigram.unknown_words("aba") == ["b"]


def test_gpt2_is_lossless() -> None:
    tokenizer = Tokenizer.load("builtin:gpt2")
    text = "  Hello,\n\tWörld 🙂 don't"
    assert tokenizer.vocab_size == 50257
    assert tokenizer.decode_batch(tokenizer.encode_batch([text])) == [text]
    assert tokenizer.encode_batch(["Hello world"]) == [[15496, 995]]


def test_saved_and_loaded_is_the_same(minilm: Tokenizer, tmp_path: Path) -> None:
    minilm.save(tmp_path / "t")
    again = Tokenizer.load(tmp_path / "t")
    assert again.sha256 == minilm.sha256 != Tokenizer.load("builtin:gpt2").sha256
    assert Tokenizer.load(tmp_path / "t" / "tokenizer.json").encode_batch(["a b"]) == minilm.encode_batch(
        ["a b"]
    )


def test_a_change_of_rules_changes_the_identity(minilm: Tokenizer, tmp_path: Path) -> None:
    minilm.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"lowercase":true', '"lowercase":false'))
    assert Tokenizer.load(tmp_path).sha256 != minilm.sha256


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in (tmp_path, "builtin:nothing", tmp_path / "missing", "no-such-name-anywhere"):
        with pytest.raises(UserError, match="tokenizer") as caught:
            Tokenizer.load(name)
        assert "\n" not in str(caught.value)


def test_qwen_cuts_text_as_its_own_library_does() -> None:
    tiktoken, dashscope = pytest.importorskip("tiktoken"), find_spec("dashscope")
    if dashscope is None or dashscope.origin is None:
        pytest.skip("dashscope is not installed")
    lines = (Path(dashscope.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    own = tiktoken.Encoding("qwen", pat_str=QWEN_WORDS, mergeable_ranks=ranks, special_tokens={})
    ours = Tokenizer.load("builtin:qwen")
    texts = [
        PROBE,
        "  two  spaces\n\n\n and lines\r\n",
        "a" * 22,
        "日本語の文章 12345",
        "I'LL say it's we've",
    ]
    texts = [unicodedata.normalize("NFC", text) for text in texts]
    assert ours.encode_batch(texts) == [own.encode_ordinary(text) for text in texts]
    assert ours.decode_batch(ours.encode_batch(texts)) == texts
    assert (ours.vocab_size, ours.special_ids()) == (151_646, {151_643, 151_644, 151_645})
