"""One line of anybody's log -> Record: JSON, tqdm, nanoGPT, Lightning, Hugging Face, torchtitan, key=value.

A parser belongs to one file, because some lines need what came before: a Hugging Face dict has no step, a Lightning bar
starts again at every epoch.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from runwatch.blocks import MOST_LINES, Block
from runwatch.bucket_lists import cut_lists
from runwatch.follow import Lines
from runwatch.json_rows import line_blocks
from runwatch.messages import MessageReader, cause_of, may_hold_message
from runwatch.pairs import Pair, contains_any, find_pairs, read_pairs, values_of
from runwatch.records import CANONICAL, LARGEST, OLDEST_TIME, Record, put_value
from runwatch.templates import Template, Templates

_MOST_FIELDS = 200
_FIRST_ALONE = 1000
"""So many lines of JSON are read one by one: a short log is not worth loading what decodes long ones."""
_MESSAGE_LETTERS = 600
"""Messages say what they have to say early in a line; numbers may stand anywhere."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(r"^\[?(?:rank|default|Rank )(\d+)\]?:?")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d):(\d\d(?:[.,]\d{1,6})?)(Z|[+-]\d\d:\d\d)?")
_BAR = re.compile(
    r"(\d{1,3})%\|[^|]*\|\s*(\d+)/(\d+)\s*\[([\d:]+)<([\d:?]+)(?:,\s*([\d.]+)\s*(it/s|s/it|\w+/s|s/\w+))?(.*)"
)
_OTHER_BAR = re.compile(
    r"valid|eval|test|sanity|load|download|map|tokeniz|generat|sampl|predict|shard|fetch", re.I
)
_EPOCH_BAR = re.compile(r"epoch\D{0,3}(\d+)", re.I)
_COUNT = re.compile(r"(\d+)it \[")
_OF = re.compile(r"\b(?:step|iter(?:ation)?)[ :=\[]+(\d+)\s*/\s*(\d+)", re.I)
_HINTS = ("oss", "OSS", "grad", "Grad", "Text", "Latent", "norm")
_WORTH = {"loss", "valid_loss", "grad_norm", "text_loss", "latent_loss"}


class LineParser:
    """Turns the lines of one file into records, in order."""

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank
        self.messages = MessageReader()
        self.last_step: int | None = None
        self.total: int | None = None
        self._postfix = ""
        self._names: dict[str, str] = {}
        self._base = ("", 0.0)
        self._pseudo_step = 0
        self._num_json = 0
        self._has_losses = False
        self._templates = Templates()
        self._plain: tuple[list[Pair], tuple[int, int]] | None = None
        """Of the line in hand, if it is only numbers with names: where they stand, and which digits must stay."""

    def parse_many(self, lines: list[str]) -> Iterator[Record | Block]:
        """What the lines say, in order: as blocks where many are alike, else one by one."""
        for is_json, group in groupby(lines, key=_is_object):
            if not is_json or self.rank is not None:
                yield from self._text_lines(group)
                continue
            alike = Lines(group)
            if len(alike) == len(lines) and isinstance(lines, Lines):
                alike = lines
            first = max(0, _FIRST_ALONE - self._num_json)
            self._num_json += len(alike)
            yield from filter(None, map(self.parse, alike[:first]))
            yield from self._json_lines(Lines(alike[first:]) if first else alike)

    def _json_lines(self, lines: Lines) -> Iterator[Record | Block]:
        at = 0
        for count, block in line_blocks(lines, self._name_of):
            if block is not None:
                self.last_step = block.steps[-1]
                yield block
            else:
                yield from filter(None, map(self.parse, lines[at : at + count]))
            at += count

    def _text_lines(self, lines: Iterable[str]) -> Iterator[Record | Block]:
        template: Template | None = None
        kept: list[str] = []
        rows: list[tuple[str, ...]] = []
        for line in lines:
            found = self._match(line)
            if rows and (found is None or found[0] is not template or len(rows) == MOST_LINES):
                yield from self._alike(template, rows, kept)
                kept, rows = [], []
            if found is not None:
                template, numbers = found
                rows.append(numbers)
                kept.append(line)
            elif (record := self.parse(line)) is not None:
                yield record
        if rows:
            yield from self._alike(template, rows, kept)

    def _match(self, line: str) -> tuple[Template, tuple[str, ...]] | None:
        if not self._templates.known or not self.messages.is_idle or self.rank is not None:
            return None
        return self._templates.match(_ANSI.sub("", line) if "\x1b" in line else line)

    def _alike(
        self, template: Template | None, rows: list[tuple[str, ...]], lines: list[str]
    ) -> Iterator[Record | Block]:
        """Lines that followed one pattern."""
        block = (
            template.block(rows, self._stamp_seconds) if template is not None and self.rank is None else None
        )
        if block is not None:
            self.last_step = block.steps[-1]
            yield block
        else:
            yield from filter(None, map(self.parse, lines))

    def parse(self, line: str) -> Record | None:
        """What the line says, or None; never raises, whatever the line is."""
        try:
            record = self._parse(line)
        except (ValueError, OverflowError, RecursionError, TypeError):
            return None
        if record is not None and record.rank is None:
            record.rank = self.rank
        return record

    def _parse(self, line: str) -> Record | None:
        if not _looks_like_json(line):
            return self._text(line)
        record = self._json(line)
        if record is None and (start := line.rfind('{"step"')) > 0:
            record = self._json(line[start:])  # a line whose end never came, and the next one behind it
        return record or self._text(line, whole=_is_object(line) and line.count('{"') == 1)

    def _json(self, line: str) -> Record | None:
        rest, lists = cut_lists(line)
        try:
            content = json.loads(rest)
        except ValueError:
            return None
        if not isinstance(content, dict):
            return None
        if isinstance(content.get("event"), str):
            return _event(content)
        if isinstance(content.get("message"), dict) and "message" in content["message"]:
            return _error_file(content["message"], self.rank)
        return self._fields(content, lists)

    def _fields(self, content: dict[str, Any], lists: dict[str, list[float]]) -> Record | None:
        record, names = Record(lists=lists), self._names
        for name in content.pop("nonfinite", None) or ():
            if isinstance(name, str) and content.get(name) is None:
                content[name] = math.nan
        for key, value in content.items():
            kind = type(value)
            if kind is float or (kind is int and -LARGEST < value < LARGEST):
                record.values[names.get(key) or self._name(key)] = value
            elif value is not None:
                self._other(record, key, value)
        values = record.values
        stamp = values.pop("step_seconds", None) if "time" in content else None
        stamp = stamp if stamp is not None else values.pop("_timestamp", None)
        if stamp is not None and stamp > OLDEST_TIME:
            record.time = float(stamp)
        elif stamp is not None:
            values["step_seconds"] = stamp
        record.rank = int(values.pop("rank")) if "rank" in values else None
        step = values.pop("step", values.pop("_step", None))
        return self._with_step(record, step)

    def _name_of(self, key: str) -> str:
        return self._names.get(key) or self._name(key)

    def _name(self, key: str) -> str:
        name = CANONICAL.get(key) or CANONICAL.get(key.lower(), key)
        if len(self._names) < _MOST_FIELDS:
            self._names[key] = name
        return name

    def _other(self, record: Record, key: str, value: Any) -> None:
        """A list of bucket losses, or a group of numbers such as {"train": {"loss": 1.0}}."""
        if isinstance(value, dict):
            for inner, item in list(value.items())[:_MOST_FIELDS]:
                put_value(record, self._name(f"{key}/{inner}"), item)
        else:
            put_value(record, self._name(key), value)

    def _with_step(self, record: Record, step: float | None) -> Record | None:
        if not record.values and not record.lists:
            return None
        if step is not None and math.isfinite(step):
            record.step = self.last_step = int(step)
        elif self.last_step is not None and not self._pseudo_step:
            record.step = self.last_step
        else:
            self._pseudo_step += 1
            record.step = self.last_step = self._pseudo_step
        return record

    def _text(self, line: str, *, whole: bool = True) -> Record | None:
        """A message or numbers; those of a line that is not `whole` may lack their last digits."""
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        if not line or line.isspace():
            return None
        rank, self._plain = _RANK.match(line), None
        message = self.messages.read(line[:_MESSAGE_LETTERS])
        record = message or (self._numbers(line) if whole else None)
        if record is None:
            return None
        if rank and record.rank is None:
            record.rank = int(rank[1])
        stamp = _STAMP.search(line, 0, 80) if "-" in line[:80] else None
        if stamp:
            record.time = self._seconds(stamp)
        if self._plain is not None and rank is None and not may_hold_message(line):
            self._templates.learn(line, self._plain[0], stamp, self._plain[1])
        return record

    def _stamp_seconds(self, text: str) -> float:
        stamp = _STAMP.fullmatch(text)
        if stamp is None:
            raise ValueError(text)
        return self._seconds(stamp)

    def _seconds(self, stamp: re.Match[str]) -> float:
        minute, second, zone = stamp[1], stamp[2].replace(",", "."), stamp[3] or ""
        if self._base[0] != minute + zone:
            moment = datetime.datetime.fromisoformat(f"{minute}:00{zone.replace('Z', '+00:00')}")
            self._base = (minute + zone, moment.timestamp())
        return self._base[1] + float(second)

    def _numbers(self, line: str) -> Record | None:
        bar = _BAR.search(line) if "%|" in line else None
        if bar:
            return self._bar(line, bar)
        if not contains_any(line, _HINTS):
            return None
        pairs = find_pairs(line)
        values, of = values_of(line, pairs), _OF.search(line)
        if not _WORTH & values.keys():
            return None
        self._plain = _plain_pairs(line, pairs, of)
        if of:
            values["step"], self.total = float(of[1]), int(of[2])
        if "validate" in line and "loss" in values:
            values["valid_loss"] = values.pop("loss")
        if "valid_loss" in values:
            self._drop_what_validation_repeats(values)
        self._has_losses = self._has_losses or ("loss" in values and "valid_loss" not in values)
        count = _COUNT.search(line) if "it [" in line else None
        step = values.pop("step", float(count[1]) if count else None)
        time = values.pop("step_seconds") if values.get("step_seconds", 0.0) > OLDEST_TIME else None
        return self._with_step(Record(time=time, values=values), step)

    def _drop_what_validation_repeats(self, values: dict[str, float]) -> None:
        """Its rate and memory are not those of training; nor is its training loss, if there are lines of that."""
        for name in ("tokens_per_second", "documents_per_second", "gpu_memory_allocated"):
            values.pop(name, None)
        if self._has_losses:
            values.pop("loss", None)

    def _bar(self, line: str, bar: re.Match[str]) -> Record | None:
        label = line[: bar.start()]
        if _OTHER_BAR.search(label):
            return None
        done, total, rest = int(bar[2]), int(bar[3]), bar[8]
        if not label.strip() and self.total is not None and total < self.total:
            return None  # a bar without a name inside the one of the training, such as an evaluation's
        epoch = _EPOCH_BAR.search(label)
        self.last_step = int(epoch[1]) * total + done if epoch else done
        self.total = None if epoch else total
        self._pseudo_step = 0
        record = Record(step=self.last_step)
        if bar[6] and float(bar[6]) > 0:
            record.values["steps_per_second"] = (
                1 / float(bar[6]) if bar[7].startswith("s/") else float(bar[6])
            )
        redrawn, self._postfix = rest == self._postfix, rest
        if not redrawn or "nan" in rest.lower() or "inf" in rest.lower():  # nan twice is bad twice
            found = read_pairs(rest)
            found.pop("step", None)
            record.values |= found
        return record


def _looks_like_json(line: str) -> bool:
    return line.startswith('{"')


def _is_object(line: str) -> bool:
    """Whether it looks like a whole one."""
    return line[-1] == "}" and line[:2] == '{"'


def _plain_pairs(
    line: str, pairs: list[Pair], of: re.Match[str] | None
) -> tuple[list[Pair], tuple[int, int]] | None:
    """The pairs of a line that holds a step and is about training, and the digits that tell the last step, if any."""
    names = {pair.name: pair for pair in pairs}
    if "valid_loss" in names or "validate" in line or "it [" in line or "step" not in names:
        return None
    if "step_seconds" in names and values_of(line, pairs)["step_seconds"] > OLDEST_TIME:
        return None
    if of is None:
        return pairs, (0, 0)
    step = names["step"]
    return (pairs, of.span(2)) if (step.start, step.end) == of.span(1) else None


def _event(content: dict[str, Any]) -> Record:
    record = Record(event=content.pop("event"), facts=content)
    step, at = content.get("step"), content.get("at", content.get("time"))
    if isinstance(step, int | float) and math.isfinite(step):
        record.step = int(step)
    if isinstance(at, str):
        try:
            record.time = datetime.datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
        except ValueError:
            record.time = None
    elif isinstance(at, int | float):
        record.time = float(at)
    record.text = str(content.get("reason", ""))[:300]
    peer_gone = (
        record.text.startswith("LostRankError") and "by peer" in record.text
    )  # a death, and no bad network
    if record.event == "stopped" and not peer_gone and (cause := cause_of(record.text)):
        content["cause"] = cause
    return record


def _error_file(message: dict[str, Any], rank: int | None) -> Record:
    """torchrun's error.json: the exception that ended one rank, with its time."""
    text = str(message["message"])[:300]
    extra = message.get("extraInfo")
    stamp = extra.get("timestamp") if isinstance(extra, dict) else None
    record = Record(event="crash", rank=rank, text=text, facts={"traceback": True, "cause": cause_of(text)})
    if isinstance(stamp, int | float) or (isinstance(stamp, str) and stamp.isdigit()):
        record.time = (
            float(stamp) + 1.0
        )  # it was cut to whole seconds, and comes after the lines of its second
    return record
