"""Import of the old layout: padding and special tokens go, bad files are named, nothing becomes zeros."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mmldlm.cli.data import app
from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.preparation.old_layout import import_old_layout

SENTENCES = ["hello world", "a dog runs", "the cat sat on the mat", "rain falls", "we go home now"]
TOKENIZER = Tokenizer.load("builtin:minilm")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 1)):
        for side in ("tokens", "latents"):
            (folder / side / split).mkdir(parents=True)
        for number in range(count):
            ids = [101, *TOKENIZER.encode_batch([SENTENCES[number + (4 if split == "val" else 0)]])[0], 102]
            mask = np.arange(16) < len(ids)
            padded = np.array(ids + [0] * (16 - len(ids)))
            np.savez(folder / "tokens" / split / f"doc{number}.npz", input_ids=padded, attention_mask=mask)
            np.save(
                folder / "latents" / split / f"doc{number}.npy", rng.normal(size=(1, 8)).astype(np.float32)
            )
    entries = [
        {"tokens": f"tokens/train/doc{n}.npz", "latent_path": f"latents/train/doc{n}.npy"} for n in range(4)
    ]
    (folder / "manifest.json").write_text(json.dumps({"version": 1, "train": entries}))
    return folder


def _texts(store: PairStore, split: str = "train") -> list[str | None]:
    return store.split(split).read_texts(np.arange(len(store.split(split))))


def test_import_removes_padding_and_special_tokens(tmp_path: Path, old: Path) -> None:
    store, report = import_old_layout(old, tmp_path / "s", TOKENIZER, encoder={"name": "e5", "prompt": ""})
    assert _texts(store) == SENTENCES[:4]
    assert _texts(store, "validation") == SENTENCES[4:]
    assert report.num_special == 10
    read = store.split("train").read(np.array([2]))
    assert read.tokens.tolist() == TOKENIZER.encode_batch([SENTENCES[2]])[0]
    assert np.allclose(read.latents[0], np.load(old / "latents/train/doc2.npy"), atol=1e-3)
    assert store.manifest.encoder == {"name": "e5", "prompt": "", "dimension": 8}
    kept, _ = import_old_layout(old, tmp_path / "kept", TOKENIZER, keep_special=True)
    assert kept.split("train").read(np.array([0])).tokens.tolist() == [101, 7592, 2088, 102]


def test_files_of_one_name_in_two_splits_keep_their_own_texts(tmp_path: Path, old: Path) -> None:
    entries = [
        {"latents": f"latents/{split}/doc0.npy", "tokens": f"tokens/{split}/doc0.npz", "text": f"Of {split}."}
        for split in ("train", "val")
    ]
    (old / "manifest.json").write_text(json.dumps(entries))
    store, _ = import_old_layout(old, tmp_path / "s", TOKENIZER)
    assert _texts(store)[:2] == ["Of train.", SENTENCES[1]]
    assert _texts(store, "validation") == ["Of val."]
    for entry in entries:
        del entry["tokens"]
    (old / "manifest.json").write_text(json.dumps(entries))
    store, _ = import_old_layout(old, tmp_path / "t", TOKENIZER)
    assert (_texts(store)[0], _texts(store, "validation")) == ("Of train.", ["Of val."])
    entries[0]["text"] = "half of one: \ud83d"
    (old / "manifest.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match=r"manifest\.json, text of latents/train/doc0\.npy: \\ud83d is half"):
        import_old_layout(old, tmp_path / "u", TOKENIZER)


def test_a_share_is_held_out_where_there_is_a_training_split_alone(tmp_path: Path, old: Path) -> None:
    with pytest.raises(UserError, match=r"validation=0\.3: .* has a validation split already"):
        import_old_layout(old, tmp_path / "s", TOKENIZER, validation=0.3)
    for side in ("tokens", "latents"):
        shutil.rmtree(old / side / "val")
    with pytest.raises(UserError, match=r"validation=1\.5: a share"):
        import_old_layout(old, tmp_path / "s", TOKENIZER, validation=1.5)
    store, _ = import_old_layout(old, tmp_path / "s", TOKENIZER, validation=0.5)
    assert sorted(_texts(store) + _texts(store, "validation")) == sorted(SENTENCES[:4])
    assert _texts(store)
    assert _texts(store, "validation")
    again, _ = import_old_layout(old, tmp_path / "again", TOKENIZER, validation=0.5)
    assert _texts(again, "validation") == _texts(store, "validation")


def test_several_slots_and_several_documents_per_file(tmp_path: Path, old: Path) -> None:
    for path in old.glob("*/*/*.np?"):
        path.unlink()
    (old / "manifest.json").unlink()
    ids = np.array([[101, 7592, 102, 0], [101, 2088, 2088, 102]])
    np.savez(old / "tokens/train/batch.npz", input_ids=ids, attention_mask=ids != 0)
    latents = np.random.default_rng(0).normal(size=(2, 3, 8))
    np.save(old / "latents/train/batch.npy", latents)
    store, _ = import_old_layout(old, tmp_path / "s", TOKENIZER, latent_dtype="float32")
    read = store.split("train").read(np.array([0, 1]))
    assert read.lengths.tolist() == [1, 2]
    assert np.allclose(read.latents, latents, atol=1e-6)


def _bad(name: str) -> Callable[[Path], None]:
    def broken_npz(folder: Path) -> None:
        (folder / "tokens/train/doc1.npz").write_bytes(b"PK\x03\x04 not really")

    def nan(folder: Path) -> None:
        np.save(folder / "latents/train/doc1.npy", np.full((1, 8), np.nan, np.float32))

    def other_shape(folder: Path) -> None:
        np.save(folder / "latents/train/doc1.npy", np.zeros((1, 9), np.float32))

    def missing(folder: Path) -> None:
        (folder / "latents/train/doc1.npy").unlink()

    def empty(folder: Path) -> None:
        (folder / "latents/train/doc1.npy").write_bytes(b"")

    def padding_only(folder: Path) -> None:
        np.savez(
            folder / "tokens/train/doc1.npz", input_ids=np.zeros(4, int), attention_mask=np.zeros(4, int)
        )

    def other_vocabulary(folder: Path) -> None:
        np.savez(
            folder / "tokens/train/doc1.npz", input_ids=np.full(4, 99999), attention_mask=np.ones(4, int)
        )

    def no_mask(folder: Path) -> None:
        np.savez(folder / "tokens/train/doc1.npz", input_ids=np.ones(4, int))

    return locals()[name]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken_npz", "cannot be read"),
        ("nan", "not finite"),
        ("other_shape", r"shape \(1, 9\)"),
        ("missing", "missing"),
        ("empty", "cannot be read"),
        ("padding_only", "no tokens are left"),
        ("other_vocabulary", "token id 99999"),
        ("no_mask", "attention_mask"),
    ],
)
def test_a_bad_file_stops_the_import_or_is_left_out(
    tmp_path: Path, old: Path, name: str, reason: str
) -> None:
    _bad(name)(old)
    with pytest.raises(UserError, match=rf"doc1\.np.*{reason}.*--skip-bad"):
        import_old_layout(old, tmp_path / "s", TOKENIZER)
    store, report = import_old_layout(old, tmp_path / "skipped", TOKENIZER, skip_bad=True)
    assert _texts(store) == [SENTENCES[0], *SENTENCES[2:4]]
    assert any("doc1" in line for line in report.bad_files)
    assert store.manifest.counts["bad_files"] == len(report.bad_files) > 0


def test_the_command_lists_what_it_left_out(tmp_path: Path, old: Path) -> None:
    _bad("nan")(old)
    words = ["import", str(old), "--out", str(tmp_path / "s"), "--tokenizer", "builtin:minilm", "--skip-bad"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "left out" in result.output
    assert "doc1.npy" in result.output
    assert "special tokens removed" in result.output


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the old layout"):
        import_old_layout(tmp_path, tmp_path / "s", TOKENIZER)
