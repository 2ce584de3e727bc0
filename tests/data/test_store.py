"""The pair store: what is written is what is read, and damage never goes unnoticed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmldlm import randomness
from mmldlm.data.format import Manifest
from mmldlm.data.loader import make_batch
from mmldlm.data.store import PairStore
from mmldlm.data.writer import StoreWriter, store_state
from mmldlm.errors import UserError
from mmldlm.types import DataShape
from tests.stores import relist, write_store


@pytest.fixture
def documents() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, 70_000, rng.integers(1, 30)).tolist() for _ in range(57)]
    return {
        "tokens": tokens,
        "latents": rng.normal(size=(57, 2, 5)).astype(np.float32),
        "texts": [f"text {i} …" if i % 7 else None for i in range(57)],
        "ids": rng.integers(0, 2**63 - 1, 57),
    }


def _write(
    path: Path, documents: dict[str, Any], parts: tuple[int, ...] = (57,), **options: Any
) -> PairStore:
    options = {
        "vocab_size": 70_000,
        "num_slots": 2,
        "num_channels": 5,
        "latent_dtype": "float32",
        "shard_documents": 10,
    } | options
    writer, start = StoreWriter(path, **options), 0
    for size in parts:
        rows = slice(start, start + size)
        writer.add("train", *(documents[key][rows] for key in ("tokens", "latents", "texts", "ids")))
        start += size
    return writer.finish()


def test_a_batch_is_what_the_loader_makes(tmp_path: Path, documents: dict[str, Any]) -> None:
    store = _write(tmp_path / "s", documents)
    split, indices = store.split("train"), np.array([56, 3, 20])
    batch, read = split.batch([56, 3, 20], seed=5, first=7), split.read(indices)
    latents = store.normalizer.normalize(read.latents)
    made = make_batch(read, latents, np.arange(7, 10), randomness.make_key(5, np.arange(7, 10)))
    assert abs(latents - read.latents).max() > 0.01  # it is not the identity
    for name in ("tokens", "latents", "positions", "keys"):
        assert np.array_equal(getattr(batch, name), getattr(made, name)), name
    assert batch.layout.lengths.tolist() == made.layout.lengths.tolist() == read.lengths.tolist()
    assert batch.derived is None
    with pytest.raises(IndexError, match="has 57 documents, asked for"):
        split.batch([57])
    with pytest.raises(UserError, match="at least one text is needed"):
        split.batch([])
    with pytest.raises(UserError, match=r"indices: values of type bool; .* np\.flatnonzero\(mask\)\)"):
        split.batch(split.lengths > 3)


def test_the_shape_has_room_for_the_longest_text_of_any_split(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s", vocab_size=9, num_slots=1, num_channels=2)
    for split, length in (("train", 3), ("validation", 5)):
        latents = np.random.default_rng(0).normal(size=(2, 1, 2))
        writer.add(split, [[1] * length] * 2, latents, [None] * 2, np.arange(2))
    assert writer.finish().shape == DataShape(9, 1, 2, 5)


def test_read_gives_back_what_was_written(tmp_path: Path, documents: dict[str, Any]) -> None:
    split = _write(tmp_path / "s", documents).split("train")
    indices = np.array([56, 3, 3, 20, 0, 19, 45])
    read = split.read(indices)
    assert len(split) == 57
    assert np.array_equal(read.tokens, np.concatenate([documents["tokens"][i] for i in indices]))
    assert read.lengths.tolist() == [len(documents["tokens"][i]) for i in indices]
    assert np.array_equal(read.latents, documents["latents"][indices])
    assert np.array_equal(read.ids, documents["ids"][indices])
    assert (read.tokens.dtype, read.lengths.dtype, read.latents.dtype) == (np.int64, np.int64, np.float32)
    assert split.read_texts(indices) == [documents["texts"][i] for i in indices]
    assert np.array_equal(split.lengths, [len(tokens) for tokens in documents["tokens"]])
    empty = split.read(np.array([], np.int64))
    assert empty.tokens.shape == (0,)
    assert empty.latents.shape == (0, 2, 5)


def test_bytes_depend_on_the_documents_only(tmp_path: Path, documents: dict[str, Any]) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    _write(one, documents)
    _write(other, documents, parts=(1, 30, 4, 22))
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in files)


def test_small_vocabulary_is_stored_in_two_bytes(tmp_path: Path) -> None:
    import pyarrow as pa

    store = write_store(tmp_path / "s", num_train=5, num_valid=0)
    with pa.memory_map(str(tmp_path / "s" / "train" / "shard-00000.arrow")) as file:
        schema = pa.ipc.open_file(file).schema
    assert schema.field("tokens").type.value_type == pa.uint16()
    assert list(store.manifest.splits) == ["train"]


def test_normalizer_is_fitted_on_the_training_split(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", num_slots=3, latent_dtype="float16")
    latents = store.split("train").read(np.arange(200)).latents.astype(np.float64)
    assert np.allclose(store.normalizer.mean, latents.mean(axis=(0, 1)), atol=1e-6)
    assert np.allclose(store.normalizer.scale, latents.std(axis=(0, 1)), atol=1e-6)
    normal = store.normalizer.normalize(latents)
    assert np.allclose(normal.std(axis=(0, 1)), 1, atol=1e-5)
    assert np.allclose(store.normalizer.denormalize(normal), latents, atol=1e-5)


def test_far_from_zero_and_dead_channels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    latents = np.stack([rng.normal(1e4, 1e-1, 300), rng.normal(0, 1, 300), np.full(300, 3.0)], -1)[:, None]
    writer = StoreWriter(
        tmp_path / "s", vocab_size=5, num_slots=1, num_channels=3, latent_dtype="float32", shard_documents=50
    )
    writer.add("train", [[1, 2]] * 300, latents.astype(np.float32))
    store = writer.finish()
    assert store.normalizer.scale[0] == pytest.approx(
        latents[:, 0, 0].astype(np.float32).std(dtype=np.float64), rel=1e-4
    )
    assert 0 < store.normalizer.scale[2] < 1e-2
    assert np.isfinite(store.normalizer.normalize(latents)).all()


def test_token_counts(tmp_path: Path, documents: dict[str, Any]) -> None:
    counts = _write(tmp_path / "s", documents).token_counts()
    expected = np.bincount(np.concatenate(documents["tokens"]), minlength=70_000)
    assert counts.dtype == np.int64
    assert np.array_equal(counts, expected)


def test_fingerprint_follows_what_a_pair_means_and_content_the_pairs(tmp_path: Path) -> None:
    base = write_store(tmp_path / "a")
    other = write_store(tmp_path / "c", seed=1)
    assert other.fingerprint == base.fingerprint
    assert other.content != base.content
    assert write_store(tmp_path / "d").content == base.content
    assert write_store(tmp_path / "e", encoder="another").fingerprint != base.fingerprint
    moved = shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    assert PairStore.open(moved).fingerprint == base.fingerprint
    assert PairStore.open(moved).content == base.content
    manifest = Manifest.load(tmp_path / "a")
    manifest.encoder = {**(manifest.encoder or {}), "prompt": "query: "}
    assert manifest.fingerprint() != base.fingerprint


def test_a_split_travels_to_another_process(tmp_path: Path) -> None:
    split = write_store(tmp_path / "s").split("train")
    before = split.read(np.arange(9))
    copy = pickle.loads(pickle.dumps(split))
    assert np.array_equal(copy.read(np.arange(9)).tokens, before.tokens)


def test_open_files_do_not_pile_up(tmp_path: Path) -> None:
    split = write_store(tmp_path / "s", num_train=300, shard_documents=2).split("train")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    split.read(np.arange(300))
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    assert after - before < 5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_latents_that_are_not_finite_are_refused(
    tmp_path: Path, documents: dict[str, Any], bad: float
) -> None:
    documents["latents"][13, 1, 2] = bad
    with pytest.raises(UserError, match=r"NaN or infinite.*text 13"):
        _write(tmp_path / "s", documents)


def test_latents_too_large_for_float16_are_refused(tmp_path: Path, documents: dict[str, Any]) -> None:
    documents["latents"][13] = 1e6
    with pytest.raises(UserError, match="too large for latent_dtype=float16; use latent_dtype=float32"):
        _write(tmp_path / "s", documents, latent_dtype="float16")


def test_wrong_shapes_and_values_are_refused(tmp_path: Path, documents: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"latents of shape .*2, 5"):
        _write(tmp_path / "a", documents, num_channels=6)
    with pytest.raises(UserError, match="vocabulary has 100"):
        _write(tmp_path / "b", documents, vocab_size=100)
    documents["tokens"][2] = []
    with pytest.raises(UserError, match="without tokens"):
        _write(tmp_path / "c", documents)
    with pytest.raises(UserError, match="allowed are float16, float32"):
        _write(tmp_path / "d", documents, latent_dtype="int8")


def test_missing_foreign_and_unfinished_folders_are_told_apart(
    tmp_path: Path, documents: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=r"no such pair store.*mmldlm prepare"):
        PairStore.open(tmp_path / "nothing")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a pair store"):
        PairStore.open(tmp_path / "foreign")
    with pytest.raises(UserError, match="cannot be made"):
        _write(tmp_path / "foreign" / "thesis.tex" / "s", documents)
    with pytest.raises(UserError, match="is not empty and holds no pair store"):
        _write(tmp_path / "foreign", documents)
    StoreWriter(tmp_path / "begun", vocab_size=5, num_slots=1, num_channels=1).close()
    with pytest.raises(UserError, match="not finished; run the same"):
        PairStore.open(tmp_path / "begun")
    with pytest.raises(UserError, match=r"no split 'dev'; this store has train, validation"):
        write_store(tmp_path / "s").split("dev")
    with pytest.raises(UserError, match=r"no split 'test'.*a larger share for test$"):
        PairStore.open(tmp_path / "s").split("test")


def test_damaged_manifest(tmp_path: Path) -> None:
    write_store(tmp_path / "s")
    manifest = tmp_path / "s" / "manifest.json"
    content = manifest.read_text()
    for broken in ("", content[:100], content.replace('"num_slots": 1', '"num_slots": 2'), "[]", "{}"):
        manifest.write_text(broken)
        with pytest.raises(UserError, match=r"manifest\.json"):
            PairStore.open(tmp_path / "s")
    body = json.loads(content)
    manifest.write_text(json.dumps(body | {"format_version": 99}))
    with pytest.raises(UserError, match="format_version=99"):
        PairStore.open(tmp_path / "s")


@pytest.mark.parametrize(
    "name", ["train/shard-00001.arrow", "train/lengths.npy", "validation/token_counts.npy"]
)
def test_one_flipped_bit_is_found_and_named(tmp_path: Path, name: str) -> None:
    store = write_store(tmp_path / "s")
    assert store.find_damage() == []
    path = tmp_path / "s" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (line,) = store.find_damage()
    assert name in line
    assert "checksum" in line
    path.unlink()
    assert "No such file" in store.find_damage()[0]


def test_truncated_and_garbled_shards_are_refused_when_read(tmp_path: Path) -> None:
    write_store(tmp_path / "s")
    path = tmp_path / "s" / "train" / "shard-00001.arrow"
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for broken in (content[:-100], b"", rng.bytes(len(content))):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"shard-00001\.arrow.*prepare the store again"):
            PairStore.open(tmp_path / "s").split("train").read(np.arange(200))
    assert len(PairStore.open(tmp_path / "s").split("train").read(np.arange(64)).ids) == 64


def test_lengths_that_disagree_with_a_shard_are_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "s")
    path = tmp_path / "s" / "train" / "lengths.npy"
    lengths = np.load(path)
    lengths[70] += 1
    np.save(path, lengths)
    with pytest.raises(UserError, match=r"lengths\.npy: damaged file \(checksum differs"):
        PairStore.open(tmp_path / "s").split("train").read(np.array([70]))
    relist(tmp_path / "s", "train/lengths.npy")
    with pytest.raises(UserError, match=r"lengths\.npy: differs from what the manifest says"):
        PairStore.open(tmp_path / "s").split("train").read(np.array([70]))
    lengths[71] -= 1
    np.save(path, lengths)
    relist(tmp_path / "s", "train/lengths.npy")
    with pytest.raises(UserError, match=r"shard-00001\.arrow.*its lengths differ"):
        PairStore.open(tmp_path / "s").split("train").read(np.array([70]))


def test_no_space_left_keeps_finished_shards(
    tmp_path: Path, documents: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    _write(whole, documents)
    real, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 14:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"no space left.*run the same command again"):
        _write(tmp_path / "s", documents)
    monkeypatch.undo()
    assert (tmp_path / "s" / "train" / "shard-00000.arrow").is_file()
    assert not list((tmp_path / "s").rglob("*.tmp"))
    _write(tmp_path / "s", documents)
    for path in whole.rglob("*.*"):
        assert (tmp_path / "s" / path.relative_to(whole)).read_bytes() == path.read_bytes()


def test_resume_refuses_other_settings_and_other_text(tmp_path: Path, documents: dict[str, Any]) -> None:
    writer = StoreWriter(
        tmp_path / "s", vocab_size=9, num_slots=1, num_channels=1, shard_documents=2, settings={"cut": "none"}
    )
    writer.add("train", [[1], [2]], np.zeros((2, 1, 1)))
    with pytest.raises(UserError, match="another process is writing"):
        StoreWriter(
            tmp_path / "s",
            vocab_size=9,
            num_slots=1,
            num_channels=1,
            shard_documents=2,
            settings={"cut": "none"},
        )
    writer.close()
    with pytest.raises(UserError, match="cut 'none' there, 'chunks' here"):
        store_state(tmp_path / "s", {"cut": "chunks"})
    with pytest.raises(UserError, match="other parts: shape"):
        StoreWriter(
            tmp_path / "s",
            vocab_size=10,
            num_slots=1,
            num_channels=1,
            shard_documents=2,
            settings={"cut": "none"},
        )
    again = StoreWriter(
        tmp_path / "s", vocab_size=9, num_slots=1, num_channels=1, shard_documents=2, settings={"cut": "none"}
    )
    with pytest.raises(UserError, match="the text has changed"):
        again.add("train", [[1], [3]], np.zeros((2, 1, 1)))


def test_a_store_needs_training_documents(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s", vocab_size=9, num_slots=1, num_channels=1)
    writer.add("validation", [[1]], np.ones((1, 1, 1)))
    with pytest.raises(UserError, match="no document fell into the training split"):
        writer.finish()


def test_reserved_places_are_filled_in_any_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shards = [
        (rng.integers(0, 9, (4, 3)), rng.normal(size=(4, 1, 2)), [None] * 4, np.arange(4) + 4 * number)
        for number in range(3)
    ]
    for name, order in (("plain", (0, 1, 2)), ("mixed", (2, 0, 1))):
        writer = StoreWriter(tmp_path / name, vocab_size=9, num_slots=1, num_channels=2, shard_documents=4)
        places = [writer.reserve("train") for _ in shards]
        for number in order:
            writer.write_shard(places[number], *shards[number])
        writer.finish()
    plain, mixed = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("plain", "mixed")
    )
    assert plain == mixed
    assert len([path for path in plain if path.suffix == ".arrow"]) == 3


def test_derived_documents_are_known_in_every_kind_of_shard(tmp_path: Path) -> None:
    """Also where all of a shard are derived, as in most shards of a large store: Arrow then writes no list of nulls."""
    rng = np.random.default_rng(0)
    writer = StoreWriter(tmp_path / "s", vocab_size=9, num_slots=1, num_channels=2, shard_documents=4)
    kinds: list[list[str | None]] = [[None] * 4, ["span"] * 4, [None, "span", "span", None]]
    for number, made_of in enumerate(kinds):
        tokens, latents = rng.integers(0, 9, (4, 3)), rng.normal(size=(4, 1, 2))
        ids = np.arange(4) + 4 * number
        writer.write_shard(writer.reserve("train"), tokens, latents, [None] * 4, ids, None, made_of)
    split = writer.finish({"derived_spans": 6}).split("train")
    expected = np.array([kind is not None for made_of in kinds for kind in made_of])
    assert split.derived(np.arange(12)).tolist() == expected.tolist()
    assert split.derived(np.array([10, 5, 0])).tolist() == [True, True, False]
    assert split.derived_share == 0.5


def _large_store(path: Path, num_shards: int, shard_documents: int) -> int:
    """A store whose shards are links to one file, so that its index is of full size and its disk use is not."""
    rng = np.random.default_rng(0)
    writer = StoreWriter(path, vocab_size=50, num_slots=1, num_channels=2, shard_documents=shard_documents)
    tokens = rng.integers(0, 50, (shard_documents, 4))
    writer.write_shard(
        writer.reserve("train"),
        tokens,
        rng.normal(size=(shard_documents, 1, 2)),
        [None] * shard_documents,
        np.arange(shard_documents),
    )
    first = writer._done["train"][0]
    for shard_idx in range(1, num_shards):
        name = f"train/shard-{shard_idx:05d}.arrow"
        for suffix in (".arrow", ".crc32"):
            os.link((path / first["file"]).with_suffix(suffix), (path / name).with_suffix(suffix))
        writer._done["train"].append({**first, "file": name})
    writer.finish()
    return num_shards * shard_documents


def _measure_open(path: Path, count: int) -> tuple[float, int]:
    begin = time.process_time()
    tracemalloc.start()
    split = PairStore.open(path).split("train")
    picked = np.random.default_rng(0).integers(0, count, 256)
    assert split.read(picked).lengths.sum() == 4 * 256
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(split) == count
    return time.process_time() - begin, peak


def test_a_million_pairs_open_at_once(tmp_path: Path) -> None:
    count = _large_store(tmp_path / "s", num_shards=123, shard_documents=8192)
    seconds, peak = _measure_open(tmp_path / "s", count)
    assert count > 1_000_000
    assert seconds < 10
    assert peak < 20 * 2**20


@pytest.mark.soak
def test_ten_million_pairs_open_at_once(tmp_path: Path) -> None:
    count = _large_store(tmp_path / "s", num_shards=1221, shard_documents=8192)
    seconds, peak = _measure_open(tmp_path / "s", count)
    print(f"{count} pairs: opened and 256 read in {seconds:.2f} s, peak {peak / 2**20:.1f} MiB")
    assert count > 10_000_000
    assert seconds < 10
    assert peak < 20 * 2**20
