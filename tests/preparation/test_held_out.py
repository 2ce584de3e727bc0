"""Sources that are held out as a whole: every kind of them, and what happens to texts found twice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmldlm.data.store import PairStore
from mmldlm.errors import UserError
from mmldlm.preparation import pipeline
from mmldlm.preparation.pipeline import PrepareSettings, run
from tests.preparation.fake import FakeEncoder

TRAIN = [f"Training text {number} is here." for number in range(40)]
HELD = [f"Held-out text {number} is here." for number in range(6)]


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "load_encoder", FakeEncoder.load)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return _jsonl(tmp_path / "train.jsonl", TRAIN)


def _jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def _prepare(source: object, out: Path, **options: object) -> PairStore:
    return run(PrepareSettings(input=(str(source),), **options), out)  # type: ignore[arg-type]


def _texts(store: PairStore) -> dict[str, list[str | None]]:
    splits = {name: store.split(name) for name in store.manifest.splits}
    return {name: split.read_texts(np.arange(len(split))) for name, split in splits.items()}


def _sources(folder: Path) -> dict[str, str]:
    """The same texts as every kind of source."""
    datasets = pytest.importorskip("datasets")
    (folder / "h.txt").write_text("\n".join(HELD))
    (folder / "h.csv").write_text("\n".join(["text", *HELD]))
    pq.write_table(pa.table({"text": HELD}), folder / "h.parquet")
    _jsonl(folder / "many" / "h.jsonl", HELD)
    datasets.Dataset.from_dict({"text": HELD}).save_to_disk(str(folder / "saved"))
    names = ("h.txt", "h.csv", "h.parquet", "many", "many/*.jsonl", "saved")
    return {name: str(folder / name) for name in names}


def test_every_kind_of_source_is_held_out_as_a_whole(tmp_path: Path, source: Path) -> None:
    for number, (name, held) in enumerate(_sources(tmp_path).items()):
        store = _prepare(source, tmp_path / str(number), validation_input=(held,), text_unit="line")
        assert _texts(store) == {"train": TRAIN, "validation": HELD}, name


def test_one_dataset_gives_all_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": TRAIN, "validation": HELD[:2], "test": HELD[2:4], "dev": HELD[4:]}
    made = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
    saved = str(tmp_path / "saved")
    datasets.DatasetDict(made).save_to_disk(saved)
    found = _texts(_prepare(saved, tmp_path / "s", validation_input=(saved,), test_input=(saved,)))
    assert found == {"train": TRAIN, "validation": HELD[:2], "test": HELD[2:4]}
    named = _prepare(saved, tmp_path / "n", validation_input=(saved,), validation_dataset_split="dev")
    assert _texts(named) == {"train": TRAIN, "validation": HELD[4:]}
    for split, said in (("train", "is given by test_source too"), ("nope", "test_dataset_split")):
        with pytest.raises(UserError, match=said):
            _prepare(saved, tmp_path / "bad", test_input=(saved,), test_dataset_split=split)


def test_shares_hold_for_the_other_sources_if_asked_for(tmp_path: Path, source: Path) -> None:
    held = _jsonl(tmp_path / "held.jsonl", HELD)
    found = _texts(_prepare(source, tmp_path / "s", validation_input=(str(held),), validation=0.3, test=0.2))
    assert found["validation"][: len(HELD)] == HELD
    by_share = found["validation"][len(HELD) :]
    assert by_share
    assert found["test"]
    assert sorted(map(str, [*found["train"], *by_share, *found["test"]])) == sorted(TRAIN)


def test_a_text_found_twice_stays_held_out(tmp_path: Path, source: Path) -> None:
    """As always the first one stays; held-out sources come first, validation before test."""
    valid = _jsonl(tmp_path / "valid.jsonl", [HELD[0], "Training  text 0 is here.", HELD[1]])
    test = _jsonl(tmp_path / "test.jsonl", [HELD[1], HELD[2], TRAIN[7]])
    store = _prepare(source, tmp_path / "s", validation_input=(str(valid),), test_input=(str(test),))
    assert _texts(store) == {
        "validation": [HELD[0], "Training  text 0 is here.", HELD[1]],
        "test": [HELD[2], TRAIN[7]],
        "train": [text for text in TRAIN if text not in (TRAIN[0], TRAIN[7])],
    }
    assert store.manifest.counts["duplicates"] == 3
    assert store.manifest.counts["source_documents"] == 46


def test_a_limit_leaves_held_out_sources_whole(tmp_path: Path, source: Path) -> None:
    held = _jsonl(tmp_path / "held.jsonl", HELD)
    found = _texts(_prepare(source, tmp_path / "s", validation_input=(str(held),), limit=5))
    assert found["validation"] == HELD
    assert len(found["train"]) == 5


def test_other_held_out_sources_are_other_settings(tmp_path: Path, source: Path) -> None:
    held = _jsonl(tmp_path / "held.jsonl", HELD)
    _prepare(source, tmp_path / "s", validation_input=(str(held),))
    _prepare(source, tmp_path / "s", validation_input=(str(held),))
    _prepare(source, tmp_path / "t", validation=0.0)
    with pytest.raises(UserError, match="validation_input None there"):
        _prepare(source, tmp_path / "t", validation_input=(str(held),))
    _jsonl(held, [*HELD, "One more."])
    with pytest.raises(UserError, match="validation_input_files"):
        _prepare(source, tmp_path / "s", validation_input=(str(held),))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"derive": -1}, "derive=-1: allowed is 0 (nothing) to 16"),
        ({"derive": 17}, "derive=17: allowed is 0 (nothing) to 16"),
        ({"validation_input": ("nope.txt",)}, "validation_source=nope.txt: no such file or folder"),
        ({"test_input": ("*.nope",)}, "test_source=*.nope: no file matches"),
        ({"validation_input": ("",)}, "validation_source: one is empty"),
        ({"test_input": ("builtin:moby",)}, "test_source=builtin:moby: the only built-in text"),
        ({"validation_input": ("empty.jsonl",)}, "validation_source=empty.jsonl: there is no text in it"),
        ({"validation_input": ("train.jsonl",)}, "train.jsonl is given by validation_source too"),
        ({"validation_input": ("h.jsonl",), "test_input": ("./h.jsonl",)}, "h.jsonl is given by validation_source"),
        ({"validation_dataset_split": "dev"}, "validation_dataset_split=dev: there is no validation_source"),
        ({"test_dataset_split": "dev"}, "test_dataset_split=dev: there is no test_source"),
        ({"test_input": ("h.jsonl",), "min_tokens": 7}, "test_source=h.jsonl: no text came out (1 source"),
        ({"test_input": ("all.jsonl",)}, "source=train.jsonl: no text came out (40 source documents, 40 duplicates)"),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_line(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _jsonl(tmp_path / "h.jsonl", ["Short one."])
    _jsonl(tmp_path / "all.jsonl", TRAIN)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError) as caught:
        _prepare(source.name, tmp_path / "s", **options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("shard-*"))
