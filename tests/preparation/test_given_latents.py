"""Latents that exist already: as an array, as a .npy file, or as a field of each row. Rows stay with their texts."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import mmldlm
from mmldlm.errors import UserError
from tests import warm

TEXTS = [f"Text number {number} of twelve." for number in range(12)]
VECTORS = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
SLOTS = np.random.default_rng(1).normal(size=(12, 3, 2)).astype(np.float32)


def _check(store: mmldlm.PairStore, texts: list[str], latents: np.ndarray) -> None:
    """Every text has the latent that was given with it."""
    expected = latents if latents.ndim == 3 else latents[:, None]
    rows = dict(zip(reversed(texts), expected[::-1], strict=True))  # the first of equal ones
    for text, latent in zip(store.texts, store.latents, strict=True):
        assert np.array_equal(latent, rows[str(text)]), text


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)
    else:
        table = pa.Table.from_pylist(rows)
        new = pa.ipc.new_file if path.stem == "file" else pa.ipc.new_stream
        with new(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=5)
    return path


@pytest.mark.parametrize("vectors", [VECTORS, SLOTS])
def test_texts_with_an_array(tmp_path: Path, vectors: np.ndarray) -> None:
    store = mmldlm.prepare((TEXTS, vectors), tmp_path / "s", latent_dtype="float32", validation=0.3)
    assert len(store) == 12
    _check(store, TEXTS, vectors)
    assert store.manifest.encoder is None
    assert store.manifest.settings["latents"] == "an array"
    assert "no known encoder" in repr(store)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_tensors_of_every_kind(tmp_path: Path, dtype: str) -> None:
    tensor = torch.tensor(VECTORS, requires_grad=True).to(getattr(torch, dtype))
    store = mmldlm.prepare((TEXTS, tensor), tmp_path / "s", latent_dtype="float32", limit=np.int64(12))
    _check(store, TEXTS, tensor.detach().float().numpy())


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "file.arrow", "stream.arrow"])
@pytest.mark.parametrize("vectors", [VECTORS, SLOTS], ids=["one", "slots"])
def test_a_field_of_each_row(tmp_path: Path, name: str, vectors: np.ndarray) -> None:
    rows = [{"text": text, "latent": latent.tolist()} for text, latent in zip(TEXTS, vectors, strict=True)]
    path = _write(tmp_path / name, rows)
    store = mmldlm.prepare(path, tmp_path / "s", latent_dtype="float32")
    assert len(store) == 12
    _check(store, TEXTS, vectors)
    assert store.manifest.settings["latents"] == "in the rows"


def test_a_dataset_and_rows_in_memory(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": text, "latent": latent.tolist()} for text, latent in zip(TEXTS, VECTORS, strict=True)]
    for name, source in (("rows", rows), ("dataset", datasets.Dataset.from_list(rows))):
        _check(mmldlm.prepare(source, tmp_path / name, latent_dtype="float32"), TEXTS, VECTORS)
    plain = datasets.Dataset.from_dict({"text": TEXTS})
    _check(mmldlm.prepare(plain, tmp_path / "p", latents=VECTORS, latent_dtype="float32"), TEXTS, VECTORS)


def test_a_data_frame_is_its_rows(tmp_path: Path) -> None:
    rows = [
        {"body": text, "vec": latent.tolist(), 0: 1.5} for text, latent in zip(TEXTS, VECTORS, strict=True)
    ]
    frame = pandas.DataFrame([*rows, {"body": None, "vec": None}])
    store = mmldlm.prepare(
        frame, tmp_path / "s", text_field="body", latent_field="vec", latent_dtype="float32"
    )
    _check(store, TEXTS, VECTORS)
    assert store.manifest.counts["empty"] == 1
    again = mmldlm.prepare(
        rows, tmp_path / "r", text_field="body", latent_field="vec", latent_dtype="float32"
    )
    assert again.content == store.content
    assert len(mmldlm.prepare((frame[["body"]][:12], VECTORS), tmp_path / "p")) == 12
    with pytest.raises(
        UserError, match="source, row 1: no field 'text'; it has body, vec, 0; choose with text_field"
    ):
        mmldlm.prepare(frame, tmp_path / "f", text_field="text")
    columns = pandas.MultiIndex.from_tuples([("x", "text"), ("x", "other")])
    nested = pandas.DataFrame([["a text", "b"]] * 2, columns=columns)
    with pytest.raises(UserError, match=r"It has \('x', 'text'\), \('x', 'other'\); choose"):
        mmldlm.prepare(nested, tmp_path / "n")
    with pytest.raises(
        UserError, match="validation_source: only files and names of datasets are allowed here"
    ):
        mmldlm.prepare(TEXTS, tmp_path / "v", validation_source=frame)


def test_names_of_fields_that_are_numbers(tmp_path: Path) -> None:
    rows = [{0: text, 1: "other", "latent": [1.0 * number]} for number, text in enumerate(TEXTS)]
    store = mmldlm.prepare(rows, tmp_path / "s", text_field="0", validation=0.0)
    assert store.texts == TEXTS
    with pytest.raises(UserError, match="which field is the text\\? It has 0, 1, latent"):
        mmldlm.prepare(rows, tmp_path / "t")


def test_rows_stay_aligned_where_documents_are_left_out(tmp_path: Path) -> None:
    """Blank lines, duplicates and documents that are too long or too short take their rows with them."""
    lines = ["", *TEXTS[:4], "word " * 40, TEXTS[1], "  ", "Hi", *TEXTS[4:], "with \u2028 inside"]
    vectors = np.random.default_rng(2).normal(size=(len(lines), 4)).astype(np.float32)
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n")
    np.save(tmp_path / "v.npy", vectors)
    words = [
        "prepare", "a.txt", "--latents", "v.npy", "--out", "s", "--max-tokens", "20", "--min-tokens", "2",
        "--latent-dtype", "float32",
    ]  # fmt: skip
    done = warm.run(
        [sys.executable, "-m", "mmldlm", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    store = mmldlm.PairStore.open(tmp_path / "s")
    assert len(store) == 13
    _check(store, lines, vectors)
    counts = store.manifest.counts
    assert (counts["empty"], counts["too_short"], counts["too_long_left_out"], counts["duplicates"]) == (
        2,
        1,
        1,
        1,
    )
    assert "1 too long left out" in done.stdout


def test_normalize_and_dimension_apply_when_asked_for(tmp_path: Path) -> None:
    store = mmldlm.prepare((TEXTS, VECTORS), tmp_path / "s", normalize=True, dimension=2, validation=0.0)
    expected = VECTORS[:, :2] / np.linalg.norm(VECTORS[:, :2], axis=-1, keepdims=True)
    assert np.allclose(store.latents[:, 0], expected, atol=2e-3)
    with pytest.raises(UserError, match="dimension=9: the latents have 4 channels"):
        mmldlm.prepare((TEXTS, VECTORS), tmp_path / "t", dimension=9)


@pytest.mark.parametrize(
    ("latents", "options", "expected"),
    [
        (VECTORS[:11], {}, "latents=an array: 11 rows, but source has 12 documents"),
        (np.concatenate([VECTORS, VECTORS[:1]]), {}, "13 rows, but source has 12 documents"),
        (VECTORS[:, 0], {}, "float32 values of shape (12,)"),
        (np.array([["a"]] * 12), {}, "numbers of shape (documents, channels)"),
        (np.where(np.arange(48).reshape(12, 4) == 29, np.nan, VECTORS), {}, "row 7 holds NaN or infinite"),
        (VECTORS, {"encoder": "builtin:minilm"}, "encoder: the latents are given"),
        (VECTORS, {"cut": "sentences"}, "cut=sentences: a latent belongs to a whole document"),
        (VECTORS, {"derive": 2}, "derive=2: derived texts need an encoder"),
        (VECTORS, {"prompt": "q"}, "prompt='q'"),
        (VECTORS, {"validation_source": "x.txt"}, "belongs to one source"),
        ("nowhere.npy", {}, "latents=nowhere.npy: no such file"),
        (__file__, {}, "not a .npy file of numbers"),
        ([[1.0], [1.0, 2.0]], {}, "latents: not an array of numbers"),
        (VECTORS, {"limit": 2.5}, "limit=2.5: a whole number is needed"),
        (VECTORS, {"seed": "one"}, "seed='one': a whole number is needed"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit(tmp_path: Path, latents: Any, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        mmldlm.prepare(TEXTS, tmp_path / "s", latents=latents, **options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "s" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("latent", "expected"),
    [
        ([1.0, [2.0]], "different lengths"),
        ([[1.0], [2.0, 3.0]], "different lengths"),
        ([1.0, float("nan")], "a.jsonl:3: the latent holds NaN or infinite values"),
        ([1.0, "2"], "must be a list of numbers"),
        ("[1, 2]", "the latent is str, a list of numbers is needed"),
        ([], "must be a list of numbers"),
        ([[[1.0]]], "must be a list of numbers"),
        (None, "a.jsonl:3: has no latent, the first document has one"),
        ([1.0, 2.0, 3.0], "a.jsonl:3: its latent has shape (1, 3) (slots, channels), that of the first document (1,"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit(tmp_path: Path, latent: Any, expected: str) -> None:
    rows: list[dict[str, Any]] = [{"text": text, "latent": [1.0, 2.0]} for text in TEXTS]
    rows[2]["latent"] = latent
    path = _write(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError) as caught:
        mmldlm.prepare(path, tmp_path / "s")
    assert expected in str(caught.value)


def test_a_field_can_be_ignored_and_never_is_by_accident(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", [{"text": text, "latent": "hidden"} for text in TEXTS])
    encode = lambda texts: [[float(len(text))] for text in texts]  # noqa: E731
    with pytest.raises(UserError, match="latent_field=''"):
        mmldlm.prepare(path, tmp_path / "s", encoder=encode)
    assert len(mmldlm.prepare(path, tmp_path / "s", encoder=encode, latent_field=None)) == 12
    path = _write(tmp_path / "b.jsonl", [{"text": text, "latent": [1.0]} for text in TEXTS])
    with pytest.raises(UserError, match=r"nothing is encoded; leave one of the two out.*latent_field=''"):
        mmldlm.prepare(path, tmp_path / "t", encoder=encode)
    with pytest.raises(UserError, match="and latents=an array is given too"):
        mmldlm.prepare(path, tmp_path / "t", latents=VECTORS)
    with open(tmp_path / "c.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text", "latent"], ["a text", "[1, 2]"]])
    with pytest.raises(UserError, match=r"c\.csv:2: the latent is str"):
        mmldlm.prepare(tmp_path / "c.csv", tmp_path / "t")
    for source in (path, TEXTS):
        with pytest.raises(
            UserError, match=r"latent_field=vec: the first document has no latent there; .*encoder"
        ):
            mmldlm.prepare(source, tmp_path / "t", encoder=encode, latent_field="vec")


def test_held_out_sources_carry_latents_of_the_same_shape(tmp_path: Path) -> None:
    rows = [{"text": text, "latent": latent.tolist()} for text, latent in zip(TEXTS, VECTORS, strict=True)]
    train, valid = _write(tmp_path / "t.jsonl", rows[:8]), _write(tmp_path / "v.jsonl", rows[8:])
    store = mmldlm.prepare(train, tmp_path / "s", validation_source=valid, latent_dtype="float32")
    assert len(store.splits["validation"]) == 4
    _check(store, TEXTS, VECTORS)
    other = _write(tmp_path / "o.jsonl", [{"text": "Other text.", "latent": [1.0]}])
    with pytest.raises(UserError, match=r"differ in shape \(slots, channels\): validation_source \(1, 1\)"):
        mmldlm.prepare(train, tmp_path / "u", validation_source=other)


def test_other_vectors_do_not_continue_a_store(tmp_path: Path) -> None:
    mmldlm.prepare((TEXTS, VECTORS), tmp_path / "s")
    assert len(mmldlm.prepare((TEXTS, VECTORS), tmp_path / "s")) == 12
    with pytest.raises(UserError, match="was made with other settings: latents_content"):
        mmldlm.prepare((TEXTS, VECTORS + 1), tmp_path / "s")
    rows = [{"text": text, "latent": [float(number), 1.0]} for number, text in enumerate(TEXTS)]
    mmldlm.prepare(rows, tmp_path / "r")
    assert len(mmldlm.prepare(rows, tmp_path / "r")) == 12
    rows[5]["latent"] = [0.0, 2.0]
    with pytest.raises(UserError, match="was made with other settings: input_files"):
        mmldlm.prepare(rows, tmp_path / "r")


def test_texts_and_files_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("One text.\n\nAnother text.")
    encode = lambda texts: [[float(len(text))] for text in texts]  # noqa: E731
    assert mmldlm.prepare(["a.txt"], "f", encoder=encode).texts == ["One text.\n\nAnother text."]
    assert mmldlm.prepare(["rope", "a sea"], "t", encoder=encode, validation=0.0).texts == ["rope", "a sea"]
    for source, expected in (
        (["a.txt", "not a file"], "does not exist"),
        ([], "is empty"),
        (None, "source=None: give texts, files"),
        (5, "source=5: give texts, files"),
        (["b.txt"], "no such file"),
        ({"text": ["rope", "a sea"]}, "source: is a dict; give a list of texts"),
    ):
        with pytest.raises(UserError, match=expected):
            mmldlm.prepare(source, "u", encoder=encode)


def test_a_folder_that_cannot_be_written_is_reported_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    called: list[int] = []

    def encode(texts: list[str]) -> list[list[float]]:
        called.append(len(texts))
        return [[1.0] for _ in texts]

    with pytest.raises(UserError, match="file"):
        mmldlm.prepare(TEXTS, tmp_path / "file" / "store", encoder=encode)
    assert called == []
