"""Random stores are what was asked for, the same every time, and made once."""

import dataclasses

import numpy as np
import pytest

from mmldlm.benchmark.arms import Synthetic, describe, make_store
from mmldlm.data.store import PairStore
from mmldlm.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_lengths_span_the_range_around_the_geometric_middle():
    store = PairStore.open(make_store(describe(None, "4:64", 500, 8, 4000, seed=1)))
    lengths = np.asarray(store.split("train").lengths)
    assert (lengths.min(), lengths.max(), len(lengths)) == (4, 64, 4000)
    assert np.median(lengths) == pytest.approx(16, abs=1)
    assert (store.manifest.vocab_size, store.manifest.num_channels) == (500, 8)


def test_one_length_means_every_document():
    store = PairStore.open(make_store(describe(37, None, 100, 4, 300, seed=0)))
    assert set(np.asarray(store.split("train").lengths)) == {37}


def test_the_same_description_is_made_once_and_another_one_elsewhere(tmp_path):
    described = Synthetic(3, 9, 50, 4, 200, 0)
    path = make_store(described)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert make_store(described) == path
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
    other = make_store(dataclasses.replace(described, seed=1))
    assert other != path
    assert PairStore.open(other).content != PairStore.open(path).content


def test_the_content_is_a_function_of_the_description(tmp_path, monkeypatch):
    described = Synthetic(3, 9, 50, 4, 200, 7)
    first = PairStore.open(make_store(described)).content
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert PairStore.open(make_store(described)).content == first


@pytest.mark.parametrize("text", ["64", "64:4", "0:9", "a:b", "4:64:8"])
def test_lengths_that_make_no_sense_are_refused(text):
    with pytest.raises(UserError, match=f"--lengths {text}: write the shortest and the longest"):
        describe(None, text, 100, 4, None, 0)


def test_two_kinds_of_lengths_are_refused():
    with pytest.raises(UserError, match="--length 5 and --lengths 4:64: give one of the two"):
        describe(5, "4:64", 100, 4, None, 0)
