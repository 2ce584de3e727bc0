"""Data that rots is noticed where it is read: single bits of every file of a store, and values that cannot be."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest

from mmldlm.data.files import BLOCK
from mmldlm.data.format import Manifest
from mmldlm.data.store import PairStore
from mmldlm.errors import UserError
from mmldlm.evaluation.validation import make_validation
from tests.runs import make_trainer
from tests.stores import relist, write_store


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "s"
    write_store(path, num_train=300, num_channels=32, shard_documents=150)
    return path


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "s"))


@pytest.fixture
def older(store: Path) -> Path:
    """A store from before there were checksums of blocks."""
    manifest = Manifest.load(store)
    for name in [name for name in manifest.files if name.endswith(".crc32")]:
        (store / name).unlink()
        del manifest.files[name]
    manifest.save(store)
    return store


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def everything(path: Path) -> list[object]:
    """All that a store gives its readers."""
    store = PairStore.open(path)
    values: list[object] = [store.token_counts("train").tolist(), store.tokenizer_path()]
    for split in store.splits.values():
        documents = split.read(np.arange(len(split)))
        values += [
            documents.tokens.tolist(),
            documents.latents.tobytes(),
            documents.ids.tolist(),
            split.texts,
        ]
    return values


def test_no_flipped_bit_of_a_shard_is_silent(store: Path) -> None:
    expected, path, rng = everything(store), store / "train" / "shard-00001.arrow", np.random.default_rng(0)
    noticed = 0
    for bit in rng.integers(0, 8 * path.stat().st_size, 110).tolist():
        flip(path, bit)
        try:
            assert everything(store) == expected, f"bit {bit}"  # only padding may change nothing
        except UserError as error:
            noticed += str(error).startswith(f"{path}: damaged shard")
        flip(path, bit)
    assert noticed >= 105
    assert everything(store) == expected


def test_flipped_bits_of_older_stores_are_noticed(older: Path) -> None:
    everything(older)
    flip(older / "train" / "shard-00000.arrow", 8 * 9000)
    with pytest.raises(UserError, match=r"shard-00000\.arrow: damaged shard \(checksum differs"):
        everything(older)


@pytest.mark.parametrize("name", ["token_counts.npy", "lengths.npy", "shard-00000.crc32"])
def test_small_files_are_compared_before_they_are_used(store: Path, name: str) -> None:
    path = store / "train" / name
    for bit in np.random.default_rng(1).integers(0, 8 * path.stat().st_size, 5).tolist():
        flip(path, bit)
        with pytest.raises(UserError, match=r"damaged.*prepare the store again"):
            everything(store)
        flip(path, bit)
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        everything(store)


def test_a_tokenizer_is_compared_before_it_is_used(tmp_path: Path) -> None:
    import mmldlm

    store = mmldlm.prepare(
        ["a coil of rope"], tmp_path / "s", encoder=lambda texts: [[1.0]] * len(texts), validation=0
    )
    flip(tmp_path / "s" / "tokenizer" / "tokenizer.json", 8 * 5000)
    with pytest.raises(UserError, match=r"tokenizer\.json: damaged file \(checksum differs"):
        PairStore.open(store.path).tokenizer_path()


def test_only_what_is_read_is_verified_and_only_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zlib

    checked: list[int] = []

    def counted(data: object, *start: int) -> int:
        checked.append(1)
        return real(data, *start)  # type: ignore[arg-type]

    real = zlib.crc32
    monkeypatch.setattr("mmldlm.data.files.zlib.crc32", counted)
    split = PairStore.open(store).split("train")
    size = (store / "train" / "shard-00000.arrow").stat().st_size
    flip(store / "train" / "shard-00001.arrow", 8 * size // 2)
    split.read(np.array([3]))
    first = len(checked)
    assert 0 < first <= 5 < size // BLOCK, (first, size // BLOCK)
    split.read(np.array([3, 4]))
    assert len(checked) <= first + 1
    split.read(np.arange(150))
    before = len(checked)
    assert before <= size // BLOCK + 1
    split.read(np.arange(150))
    assert len(checked) == before
    with pytest.raises(UserError, match=r"shard-00001\.arrow: damaged shard \(bytes \d+ to \d+ differ"):
        split.read(np.arange(300))


def test_processes_share_what_they_know(store: Path) -> None:
    split = PairStore.open(store).split("train")
    reader = multiprocessing.get_context("fork").Process(target=split.read, args=(np.arange(300),))
    reader.start()
    reader.join()
    assert reader.exitcode == 0
    assert split._flags.mean() > 0.5


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_flipped_bit_ends_a_run_with_one_line(store: Path, tmp_path: Path, num_workers: int) -> None:
    path = store / "train" / "shard-00000.arrow"
    flip(path, 4 * path.stat().st_size)
    trainer = make_trainer(tmp_path / "train", store, f"data.num_workers={num_workers}")
    with pytest.raises(UserError, match=rf"{path}: damaged shard \(bytes"):
        trainer.fit()


def test_a_flipped_bit_ends_a_validation_with_one_line(store: Path, tmp_path: Path) -> None:
    path = store / "validation" / "shard-00000.arrow"
    flip(path, 4 * path.stat().st_size)
    with pytest.raises(UserError, match=rf"{path}: damaged shard \(bytes"):
        make_validation(make_trainer(tmp_path / "valid", store).setup)


def rewrite_latents(store: Path, name: str, row: int, value: float) -> None:
    """As a faulty encoder or a stranger would have it: the checksums agree."""
    path = store / name
    content = bytearray(path.read_bytes())
    split = PairStore.open(store).split(name.partition("/")[0])
    latent = split.read(np.array([row])).latents.tobytes()
    place = content.index(latent)
    content[place : place + 4] = np.float32(value).tobytes()
    path.write_bytes(content)
    manifest = Manifest.load(store)
    del manifest.files[name.replace(".arrow", ".crc32")]
    manifest.save(store)
    relist(store, name)


@pytest.mark.parametrize("value", [1e30, np.nan, np.inf])
def test_impossible_latents_are_reported_with_document_and_file(store: Path, value: float) -> None:
    name = "validation/shard-00000.arrow"
    rewrite_latents(store, name, 7, value)
    with pytest.raises(
        UserError, match=rf"{name}: document 7 of the split 'validation' \(id \d+\) has a latent of"
    ):
        PairStore.open(store).split("validation").read(np.arange(40))


def test_lengths_of_normalised_latents_are_known(store: Path) -> None:
    relist(store, encoder={"name": "unit", "normalize": True})
    with pytest.raises(UserError, match=r"document \d+ of the split 'train'.* at most 1\.1;"):
        PairStore.open(store).split("train").read(np.arange(300))


def test_no_latent_of_a_training_split_is_called_impossible(tmp_path: Path) -> None:
    """The worst case: one document far from all others, which are equal."""
    from mmldlm.data.writer import StoreWriter

    writer = StoreWriter(tmp_path / "s", vocab_size=5, num_slots=1, num_channels=2, latent_dtype="float32")
    latents = np.zeros((5000, 1, 2), np.float32)
    latents[17] = 1e9
    writer.add("train", [[1]] * 5000, latents)
    assert writer.finish().split("train").latents.max() == np.float32(1e9)
