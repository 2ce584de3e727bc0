"""Closed-form cases of what is measured about generated pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm.errors import UserError
from mmldlm.evaluation.context import ReferenceLM
from mmldlm.evaluation.generation import (
    distinct,
    find_verbatim,
    frechet_distance,
    main_directions,
    repeats,
    self_bleu,
)
from tests.stores import write_store

CPU = torch.device("cpu")


def texts(*rows: tuple[int, ...]) -> list[np.ndarray]:
    return [np.array(row) for row in rows]


def test_distinct_counts_different_ngrams_of_all_texts_together() -> None:
    some = texts((1, 2, 3), (1, 2, 4, 4))
    assert distinct(some, 1).value == pytest.approx(4 / 7)
    assert distinct(some, 2).value == pytest.approx(4 / 5)  # 12 23 | 12 24 44
    assert distinct(texts((5, 6), (5, 6), (5, 6)), 2).value == pytest.approx(1 / 3)
    assert np.isnan(distinct(texts((1,), (2,)), 2).value)


def test_the_jackknife_leaves_out_one_text_at_a_time() -> None:
    rng = np.random.default_rng(0)
    some = [rng.integers(0, 30, rng.integers(2, 9)) for _ in range(12)]
    found = distinct(some, 2)
    without = np.array([distinct(some[:i] + some[i + 1 :], 2).value for i in range(12)])
    error = np.sqrt(11 / 12 * ((without - without.mean()) ** 2).sum())
    assert found.standard_error == pytest.approx(error)


def test_repeats_are_counted_inside_a_text_only() -> None:
    repeated, total = repeats(texts((1, 1, 1, 1), (1, 2, 3), (7,)), 2)
    assert repeated.tolist() == [2, 0, 0]
    assert total.tolist() == [3, 2, 0]


def test_self_bleu_of_copies_is_100_and_of_strangers_small() -> None:
    copies = ["the cat sat on the mat today"] * 3
    assert self_bleu(copies) == pytest.approx([100.0] * 3)
    assert self_bleu(["a b c d e", "f g h i j", "k l m n o"]).max() < 5.0


def test_frechet_distance_of_known_normals() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(4000, 3))
    base = (base - base.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(base.T))).T  # exactly standard
    scale, shift = np.array([2.0, 0.5, 1.0]), np.array([1.0, 0.0, -2.0])
    # diagonal covariances: |shift|^2 + sum (1 - scale)^2
    assert frechet_distance(base, base * scale + shift) == pytest.approx(5.0 + 1.0 + 0.25, abs=1e-6)
    assert frechet_distance(base, base) == pytest.approx(0.0, abs=1e-6)
    few, more = rng.normal(size=(5, 40)), rng.normal(size=(7, 40)) * 2  # fewer documents than dimensions
    a, b = np.cov(few.T), np.cov(more.T)
    values = np.linalg.eigvals(a @ b).real.clip(0)
    expected = ((few.mean(0) - more.mean(0)) ** 2).sum() + np.trace(a + b) - 2 * np.sqrt(values).sum()
    assert frechet_distance(few, more) == pytest.approx(expected, rel=1e-3)
    assert np.abs(main_directions(base * [1.0, 9.0, 1.0], 1)[:, 0]) == pytest.approx([0, 1, 0], abs=0.01)


def test_memorised_texts_are_found_whole_and_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmldlm.evaluation.generation._DOCUMENTS_AT_ONCE", 7)
    split = write_store(tmp_path / "store", num_train=30, num_valid=2, vocab_size=300).split("train")
    documents = split.read(np.arange(30))
    pieces = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])
    long = max(pieces, key=len)
    seeking = [pieces[3], pieces[29], long[1:-1], np.concatenate([pieces[0], pieces[1]]), long[::-1].copy()]
    whole, inside = find_verbatim(seeking, split)
    assert whole.tolist() == [True, True, False, False, False]
    assert inside.tolist() == [True, True, True, False, False]
    assert find_verbatim([], split)[0].shape == (0,)


def test_memorised_texts_are_those_that_a_search_token_by_token_finds(tmp_path: Path) -> None:
    split = write_store(tmp_path / "store", num_train=60, num_valid=2, vocab_size=5).split("train")
    documents, rng = split.read(np.arange(60)), np.random.default_rng(0)
    pieces = [piece.tolist() for piece in np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])]
    seeking = [rng.integers(0, 5, size).tolist() for size in rng.integers(1, 6, 200)] + pieces[:5]

    def part_of(text: list[int], piece: list[int]) -> bool:
        return any(piece[i : i + len(text)] == text for i in range(len(piece)))

    whole, inside = find_verbatim([np.array(text) for text in seeking], split)
    assert whole.tolist() == [text in pieces for text in seeking]
    assert inside.tolist() == [any(part_of(text, piece) for piece in pieces) for text in seeking]
    assert 0 < inside.sum() < len(seeking)


@pytest.fixture(scope="module")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of two narrow layers with random weights, and a tokenizer of ten words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("lm")
    words = {word: idx for idx, word in enumerate(["<s>", "<unk>", *"abcdefgh"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=10, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_a_reference_model_that_knows_nothing_pays_the_logarithm_of_its_vocabulary(tiny_gpt2: Path) -> None:
    reference = ReferenceLM.load(str(tiny_gpt2), CPU)
    for parameter in reference.model.parameters():
        parameter.zero_()
    costs = reference.score(["a b c", "d", "a a a a a a a a a a a a"])
    assert costs.num_tokens.tolist() == [3, 1, 7]  # the start is given; the last is cut to eight with it
    assert costs.num_cut == 1
    np.testing.assert_allclose(costs.nats, costs.num_tokens * np.log(10), rtol=1e-5)


def test_the_cost_of_a_text_does_not_depend_on_its_neighbours(tiny_gpt2: Path) -> None:
    reference = ReferenceLM.load(str(tiny_gpt2), CPU)
    some = ["a b c d e", "f", "g h", "b b b"]
    together = reference.score(some).nats
    np.testing.assert_allclose(together, [reference.score([text]).nats[0] for text in some], rtol=1e-5)
    ids = torch.tensor([[0, *reference.tokenizer.encode("a b c d e", add_special_tokens=False)]])
    loss = reference.model(input_ids=ids, labels=ids).loss  # as transformers has it: mean over five tokens
    assert together[0] == pytest.approx(5 * float(loss), rel=1e-5)


def test_a_folder_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reference_lm=") as caught:
        ReferenceLM.load(str(tmp_path), CPU)
    assert "\n" not in str(caught.value)
