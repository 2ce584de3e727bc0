"""Files to texts: .txt, .jsonl, .json, .csv, .tsv and .parquet, also compressed with gzip.

Each reader yields (text or None, bytes of the file read so far). What cannot be read is a `UserError` with
file and line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mmldlm.errors import UserError

Texts = Iterator[tuple[str | None, int]]
USUAL_FIELDS = ("text", "sentence", "content", "document")
MAX_FIELD_CHARACTERS = 2**30


def read_file(path: Path, text_field: str | None) -> Texts:
    """The texts of one file."""
    extension = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    read = EXTENSIONS[extension.lower()]
    try:
        with open(path, "rb") as raw:
            stream: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            for text in read(stream, path, text_field):
                yield text, raw.tell()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text (byte 0x{error.object[error.start]:02x}); convert it with iconv, "
            "or leave the file out"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error}); copy or compress it again") from error
    except PermissionError as error:
        raise UserError(f"{path}: you may not read this file; check its permissions") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder, a file was expected") from error


def text_of_row(row: Any, text_field: str | None, where: str) -> str | None:
    """The text of a row: the named field, or the usual one, or the only one that holds text."""
    if isinstance(row, str):
        return _no_half_characters(row, where)
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a row must be an object or a text, found {type(row).__name__}")
    value = row[choose_field(row, text_field, where)]
    if value is None:
        return None
    if isinstance(value, str):
        return _no_half_characters(value, where)
    raise UserError(
        f"{where}: the text field holds {type(value).__name__}, not text; choose another with --text-field"
    )


def _no_half_characters(text: str, where: str) -> str:
    """JSON can escape one half of a surrogate pair; no tokenizer and no store takes that."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: \\u{ord(text[error.start]):04x} is half of a character and no text; correct or remove it"
        ) from error
    return text


def choose_field(row: Mapping[str, Any], text_field: str | None, where: str) -> str:
    """The field that holds the text."""
    names = [str(name) for name in row]
    if text_field is not None:
        if text_field not in row:
            raise UserError(
                f"{where}: no field {text_field!r}; it has {', '.join(names)}; choose with --text-field"
            )
        return text_field
    strings = [name for name in names if isinstance(row[name], str)]
    usual = [name for name in USUAL_FIELDS if name in row]
    if usual or len(strings) == 1:
        return usual[0] if usual else strings[0]
    raise UserError(
        f"{where}: which field is the text? It has {', '.join(names)}; choose with --text-field NAME"
    )


def _decoded(stream: BinaryIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")


def _read_txt(stream: BinaryIO, path: Path, text_field: str | None) -> Iterator[str | None]:
    text = stream.read().decode("utf-8-sig")
    if "\0" in text:
        raise UserError(f"{path}: holds zero bytes, so it is not plain text; leave the file out")
    yield text


def _read_jsonl(stream: BinaryIO, path: Path, text_field: str | None) -> Iterator[str | None]:
    for number, line in enumerate(_decoded(stream), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield text_of_row(_parse(line, where), text_field, where)


def _read_json(stream: BinaryIO, path: Path, text_field: str | None) -> Iterator[str | None]:
    """One JSON list; a file with one object per line is read as such."""
    text = stream.read().decode("utf-8-sig")
    if not text.lstrip().startswith("["):
        yield from _read_jsonl(io.BytesIO(text.encode()), path, text_field)
        return
    for number, row in enumerate(_parse(text, str(path)), start=1):
        yield text_of_row(row, text_field, f"{path}, item {number}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}); correct or remove it") from error


def _read_csv(
    stream: BinaryIO, path: Path, text_field: str | None, delimiter: str = ","
) -> Iterator[str | None]:
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    rows = csv.DictReader(_decoded(stream), delimiter=delimiter)
    try:
        for row in rows:
            yield text_of_row(_whole(row, f"{path}:{rows.line_num}"), text_field, f"{path}:{rows.line_num}")
    except csv.Error as error:
        raise UserError(f"{path}:{rows.line_num}: not a table ({error}); correct or remove it") from error


def _whole(row: dict[Any, Any], where: str) -> dict[str, Any]:
    if None in row:
        raise UserError(
            f"{where}: more values than the header has columns; put quotes around text that holds a comma"
        )
    return row


def _read_tsv(stream: BinaryIO, path: Path, text_field: str | None) -> Iterator[str | None]:
    return _read_csv(stream, path, text_field, delimiter="\t")


def _read_parquet(stream: Any, path: Path, text_field: str | None) -> Iterator[str | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(io.BytesIO(stream.read()) if isinstance(stream, gzip.GzipFile) else stream)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UserError(f"{path}: not a parquet file ({error}); copy it again") from error
    names = {field.name: "" if _is_text(field.type) else None for field in table.schema_arrow}
    field = choose_field(names, text_field, str(path))
    if names[field] is None:
        raise UserError(f"{path}: the column {field!r} does not hold text; choose another with --text-field")
    for batch in table.iter_batches(batch_size=4096, columns=[field]):
        yield from batch.column(0).to_pylist()


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


EXTENSIONS: dict[str, Callable[[Any, Path, str | None], Iterator[str | None]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
