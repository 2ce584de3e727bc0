"""Files to rows: .txt, .jsonl, .json, .csv, .tsv, .parquet and .arrow, also compressed with gzip.

A row is a text and, where the file has such a field, the latent that belongs to it. What cannot be read is a
`UserError` with file and line. A small file must not fill the memory: lines, texts and unpacked files have limits.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mmldlm.errors import UserError, first_line
from mmldlm.preparation.parts import LinesFrom

USUAL_FIELDS = ("text", "sentence", "content", "document")
LATENT_FIELD = "latent"
MOST_CHARACTERS = 2**23
"""Of one text."""
MOST_LINE = 2**24
"""Bytes of a line of a table or of JSON lines."""
MOST_WHOLE, MOST_UNPACKED = 2**30, 2**28
"""Bytes of a JSON file, and of anything compressed that has to be unpacked as a whole."""
MOST_PACKED = 64
"""Times its size to which a part of a table may unpack; text packs about tenfold."""
OTHER_DELIMITERS = r"[\s,;|]+"
"""In the name of the only column of a table: its columns are divided by another sign, or it has no line of names."""
ROWS_AT_ONCE = 32
"""Of a Parquet file: one long text that is stored once can stand in each of them."""


class Row(NamedTuple):
    """A text as it came, with its latent (C,) or (S, C) if there is one."""

    text: str | None
    latent: np.ndarray | None
    where: str
    """File and line, for messages."""


@dataclass(frozen=True)
class Fields:
    """Which fields of a row are used."""

    text: str | None = None
    """None: the usual one, or the only one that holds text."""
    latent: str | None = LATENT_FIELD
    """None: latents in the files are ignored."""


def read_file(path: Path, fields: Fields, span: tuple[int, int] | None = None) -> Iterator[tuple[Row, int]]:
    """The rows of one file, or of one of its spans, each with the bytes of the file that were read by then."""
    read: Callable[..., Iterator[Row]] = EXTENSIONS[extension_of(path)]
    try:
        with path.open("rb") as raw:
            stream: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            if span is not None and read is _read_parquet:
                read = partial(_read_parquet, groups=range(*span))
            elif span is not None:
                stream = LinesFrom(raw, *span)
            for row in read(stream, path, fields):
                yield row, raw.tell()
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
    except OSError as error:  # a disk or a network
        raise UserError(
            f"{path}: cannot be read ({first_line(error)}); run the same command again"
        ) from error


def extension_of(path: PurePath) -> str:
    """The kind of a file, `.gz` left out."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def parse_row(row: Any, fields: Fields, where: str) -> Row:
    """Text and latent of a row: the named fields, or the usual ones."""
    if isinstance(row, str):
        return Row(whole_characters(row, where), None, where)
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a row must be an object or a text, not {type(row).__name__}")
    if not all(isinstance(name, str) for name in row):  # in memory a name may be a number
        row = {str(name): value for name, value in row.items()}
    latent_path = latent_field(row, fields.latent, where)
    latent = reduce(getitem, latent_path, row) if latent_path else None
    path = choose_field(row, fields.text, where)
    value = reduce(getitem, path, row)
    if isinstance(value, Mapping):
        raise UserError(
            f"{where}: the text field holds fields ({_listed(value)}); choose one of them with "
            f"text_field={'.'.join(path)}.NAME"
        )
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"{where}: the text field holds {type(value).__name__}, not text; choose another with text_field=NAME"
        )
    text = None if value is None else whole_characters(value, where)
    return Row(text, None if latent is None else parse_latent(latent, where), where)


def parse_latent(value: Any, where: str) -> np.ndarray:
    """A latent of a row as float32 (C,) or (S, C)."""
    remedy = "correct it, or ignore the field with latent_field=''"
    if not isinstance(value, list | tuple | np.ndarray):
        raise UserError(
            f"{where}: the latent is {type(value).__name__}, a list of numbers is needed; {remedy}"
        )
    try:
        array = np.array(value)
    except ValueError as error:
        raise UserError(f"{where}: the vectors of the latent have different lengths; {remedy}") from error
    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2) or not array.size:
        raise UserError(
            f"{where}: the latent must be a list of numbers, or of lists of numbers of one length; {remedy}"
        )
    if not np.isfinite(array).all():
        raise UserError(f"{where}: the latent holds NaN or infinite values; {remedy}")
    return array.astype(np.float32)


def whole_characters(text: str, where: str) -> str:
    """JSON can escape one half of a surrogate pair, which neither tokenizers nor stores accept."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: \\u{ord(text[error.start]):04x} is half of a character and no text; correct or remove it"
        ) from error
    return text


def find_field(row: Mapping[str, Any], name: str, where: str, choose: str) -> tuple[str, ...]:
    """The names that lead to a field, which dots separate unless a field's own name has them; short of a null."""
    path: tuple[str, ...] = ()
    level, rest = row, name
    while rest not in level:
        heads = [rest[:idx] for idx in range(len(rest)) if rest[idx] == "." and rest[:idx] in level]
        inside = f"{'.'.join(path)!r} has no field" if path else "no field"
        if not heads:
            raise UserError(f"{where}: {inside} {rest!r}; it has {_listed(level)}; choose with {choose}=NAME")
        path, rest, level = (*path, heads[-1]), rest[len(heads[-1]) + 1 :], level[heads[-1]]
        if level is None:
            return path
        if not isinstance(level, Mapping):
            raise UserError(
                f"{where}: {'.'.join(path)!r} holds no fields, so there is no {rest!r} in it; choose with {choose}=NAME"
            )
    return (*path, rest)


def latent_field(row: Mapping[str, Any], name: str | None, where: str) -> tuple[str, ...]:
    """The names that lead to the latent; none where the row has no such field, and then the latents are made."""
    if name is None or name in row:
        return () if name is None else (name,)
    if "." not in name or not any(name.startswith(f"{key}.") for key in row):
        return ()
    return find_field(row, name, where, "latent_field")


def choose_field(row: Mapping[str, Any], text_field: str | None, where: str) -> tuple[str, ...]:
    """The names that lead to the field that holds the text."""
    names = [str(name) for name in row]
    if text_field is not None:
        return find_field(row, text_field, where, "text_field")
    strings = [name for name in names if isinstance(row[name], str)]
    usual = [name for name in USUAL_FIELDS if name in row]
    if usual or len(strings) == 1:
        return (usual[0] if usual else strings[0],)
    raise UserError(
        f"{where}: which field is the text? It has {', '.join(names) or 'none'}; choose with text_field=NAME"
    )


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "none"


def bounded(text: str | None, where: str) -> str | None:
    """The text, unless it is too long for one document."""
    if text is not None and len(text) > MOST_CHARACTERS:
        raise UserError(
            f"{where}: a text of {len(text):,} characters without a break; at most {MOST_CHARACTERS:,} are allowed: "
            "divide it into lines or documents (text_unit=part divides text files)"
        )
    return text


def _lines(stream: BinaryIO, path: Path) -> Iterator[str]:
    """Lines of UTF-8, each with its end."""
    number, at_start = 0, stream.tell() == 0
    while line := stream.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            raise UserError(
                f"{path}:{number}: a line of more than {MOST_LINE:,} bytes; divide it into several, "
                "or leave the file out"
            )
        yield line.decode("utf-8-sig" if number == 1 and at_start else "utf-8")


def _whole(stream: BinaryIO, path: Path, most: int | None = None) -> bytes:
    """All of a file."""
    most = MOST_UNPACKED if isinstance(stream, gzip.GzipFile) else most
    pieces, size = [], 0
    while piece := stream.read(2**20):
        pieces.append(piece)
        size += len(piece)
        if most is not None and size > most:
            raise UserError(
                f"{path}: has more than {most:,} bytes once unpacked; unpack it, divide it, or make it .jsonl, "
                "which is read line by line"
            )
    return b"".join(pieces)


def _read_txt(stream: BinaryIO, path: Path, fields: Fields) -> Iterator[Row]:
    encoding = "utf-8-sig" if stream.tell() == 0 else "utf-8"
    text = _whole(stream, path).decode(encoding)
    if "\0" in text:
        raise UserError(f"{path}: holds zero bytes, so it is not plain text; leave the file out")
    yield Row(text, None, str(path))


def _read_jsonl(stream: BinaryIO, path: Path, fields: Fields) -> Iterator[Row]:
    for number, line in enumerate(_lines(stream, path), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield parse_row(_parse(line, where), fields, where)


def _read_json(stream: BinaryIO, path: Path, fields: Fields) -> Iterator[Row]:
    """One JSON list; a file with one object per line is read as such."""
    text = _whole(stream, path, MOST_WHOLE).decode("utf-8-sig")
    if not text.lstrip().startswith("["):
        if _is_one_object(text):
            raise UserError(f"{path}: holds one JSON object; a list of rows, or one row per line, is needed")
        yield from _read_jsonl(io.BytesIO(text.encode()), path, fields)
        return
    for number, row in enumerate(_parse(text, str(path)), start=1):
        yield parse_row(row, fields, f"{path}, item {number}")


def _is_one_object(text: str) -> bool:
    """Whether a text of several lines is one JSON object, such as a list of rows inside another object."""
    if "\n" not in text.strip():
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}); correct or remove it") from error
    except RecursionError as error:
        raise UserError(f"{where}: JSON nested too deeply to be read; correct or remove it") from error


def _read_csv(stream: BinaryIO, path: Path, fields: Fields, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(MOST_CHARACTERS)
    rows = csv.DictReader(_lines(stream, path), delimiter=delimiter, strict=True)
    begins = 1
    try:
        names = rows.fieldnames or [""]
        if fields.text is None and len(names) == 1 and len(re.split(OTHER_DELIMITERS, names[0].strip())) > 1:
            raise UserError(  # else that line would be lost
                f"{path}:1: {names[0][:60]!r} would be the name of its only column; put {delimiter!r} between "
                "columns, begin the file with a line of names such as text, choose with text_field=NAME, or let a "
                "file of plain lines end in .txt"
            )
        begins = rows.line_num + 1
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if None in row:
                raise UserError(
                    f"{where}: more values than the header has columns; put quotes around text that holds a comma"
                )
            yield parse_row(row, fields, where)
            begins = rows.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}:{begins}: not a table ({error}); put quotes around a text that begins with one, and write each "
            "quote inside it twice"
        ) from error


def _read_tsv(stream: BinaryIO, path: Path, fields: Fields) -> Iterator[Row]:
    return _read_csv(stream, path, fields, delimiter="\t")


def _read_parquet(stream: Any, path: Path, fields: Fields, groups: range | None = None) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        packed = isinstance(stream, gzip.GzipFile)
        table = pq.ParquetFile(io.BytesIO(_whole(stream, path)) if packed else stream)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a parquet file ({first_line(error)}); copy it again") from error
    columns = _choose_columns(table.schema_arrow, fields, path)
    groups = groups or range(table.num_row_groups)
    for group in groups:
        for idx in range(table.metadata.num_columns):
            part = table.metadata.row_group(group).column(idx)
            if any(f"{part.path_in_schema}.".startswith(f"{column[0]}.") for column in columns):
                _check_unpacked(part.total_uncompressed_size, part.total_compressed_size, path)
    before = sum(table.metadata.row_group(group).num_rows for group in range(groups.start))
    names = _top(columns)
    batches = table.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=names, use_threads=False)
    return _rows_of_batches(batches, columns, path, before)


def _read_arrow(stream: Any, path: Path, fields: Fields) -> Iterator[Row]:
    """A stream as Hugging Face datasets write them, or an Arrow IPC file, which holds one behind its first 8 bytes."""
    import pyarrow as pa

    whole = pa.py_buffer(_whole(stream, path))
    content = whole[8:] if whole[:6] == b"ARROW1" else whole
    try:
        for message in pa.ipc.MessageReader.open_stream(content):
            if message.type != "schema":
                _check_unpacked(_unpacked_size(message), message.body.size, path)
        reader = pa.ipc.open_stream(content)
    except (pa.ArrowException, OSError, struct.error) as error:
        raise UserError(f"{path}: not an Arrow file ({first_line(error)}); copy it again") from error
    columns = _choose_columns(reader.schema, fields, path)
    return _rows_of_batches((batch.select(_top(columns)) for batch in reader), columns, path)


def _check_unpacked(unpacked: int, packed: int, path: Path) -> None:
    if unpacked > MOST_UNPACKED and unpacked > MOST_PACKED * packed:
        raise UserError(
            f"{path}: {packed:,} bytes would unpack to {unpacked:,}, more than {MOST_PACKED} times as many; "
            "no ordinary text does; write it uncompressed if you trust it"
        )


def _unpacked_size(message: Any) -> int:
    """What the compressed buffers of an Arrow message say they unpack to: 8 bytes at the head of each."""
    meta, body = memoryview(message.metadata), memoryview(message.body)

    def place(table: int, field: int) -> int:
        """Where a field of a flatbuffers table lies, 0 where the table has none."""
        fields = table - struct.unpack_from("<i", meta, table)[0]
        slot = 4 + 2 * field
        if slot >= struct.unpack_from("<H", meta, fields)[0]:
            return 0
        offset: int = struct.unpack_from("<H", meta, fields + slot)[0]
        return table + offset if offset else 0

    def target(position: int) -> int:
        return position + int(struct.unpack_from("<I", meta, position)[0])

    batch = target(place(target(0), 2))
    if message.type == "dictionary":
        batch = target(place(batch, 1))
    if not place(batch, 3):  # no compression
        return 0
    buffers = target(place(batch, 2))
    count = struct.unpack_from("<I", meta, buffers)[0]
    places = (struct.unpack_from("<qq", meta, buffers + 4 + 16 * idx) for idx in range(count))
    return sum(max(0, struct.unpack_from("<q", body, offset)[0]) for offset, length in places if length >= 8)


def _choose_columns(schema: Any, fields: Fields, path: Path) -> list[tuple[str, ...]]:
    """The column of the text and, if there is one, of the latent, each with the fields inside it that lead there."""
    names = _outline(schema)
    chosen = choose_field(names, fields.text, str(path))
    kind = reduce(getitem, chosen, names)
    if isinstance(kind, Mapping):
        raise UserError(
            f"{path}: the column {'.'.join(chosen)!r} holds fields ({_listed(kind)}); choose one of them with "
            f"text_field={'.'.join(chosen)}.NAME"
        )
    if not isinstance(kind, str):
        raise UserError(
            f"{path}: the column {'.'.join(chosen)!r} does not hold text; choose another with text_field=NAME"
        )
    latent = latent_field(names, fields.latent, str(path))
    return [chosen, latent] if latent else [chosen]


def _outline(fields: Any) -> dict[str, Any]:
    """Of a schema or a struct: fields inside fields, a str for text, 0 for anything else."""
    import pyarrow as pa

    def kind(field: Any) -> Any:
        if pa.types.is_struct(field.type):
            return _outline(field.type)
        return "" if _is_text(field.type) else 0

    return {field.name: kind(field) for field in fields}


def _top(columns: list[tuple[str, ...]]) -> list[str]:
    return list(dict.fromkeys(column[0] for column in columns))


def _values(batch: Any, column: tuple[str, ...]) -> list[Any]:
    """The values of a column, or of a field inside it; nothing inside a null is null."""
    import pyarrow.compute as pc

    values = batch.column(column[0])
    return (pc.struct_field(values, list(column[1:])) if column[1:] else values).to_pylist()


def _rows_of_batches(
    batches: Any, columns: list[tuple[str, ...]], path: Path, number: int = 0
) -> Iterator[Row]:
    for batch in _whole_batches(batches, path):
        texts = _values(batch, columns[0])
        latents = _values(batch, columns[1]) if len(columns) > 1 else [None] * len(texts)
        for text, latent in zip(texts, latents, strict=True):
            number += 1
            where = f"{path}, row {number}"
            yield Row(text, None if latent is None else parse_latent(latent, where), where)


def _whole_batches(batches: Any, path: Path) -> Iterator[Any]:
    """The batches; what is damaged or made up in one of them would otherwise be read as memory."""
    import pyarrow as pa

    try:
        for batch in batches:
            batch.validate(full=True)
            yield batch
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged file ({first_line(error)}); copy it again") from error


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


EXTENSIONS: dict[str, Callable[[Any, Path, Fields], Iterator[Row]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
