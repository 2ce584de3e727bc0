"""The lines of one file -> records, whatever program wrote them.

clean -> JSON, document, CSV, box -> message -> bar, table, text -> `Assembler`. A parser belongs to one file, because
most formats need what came before: a header, a bar, the epoch, the step above a block.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from runwatch.assembly import Assembler, Row
from runwatch.bars import Bar, find_bar
from runwatch.ledger import LEDGER, error_file_record, event_record
from runwatch.messages import OWN_ALERT, MessageReader
from runwatch.names import Names, words_of
from runwatch.plans import Plan, make_plan, whole_marks
from runwatch.records import Record
from runwatch.source_code import CodeGuard
from runwatch.steps import Marks, Stepper
from runwatch.structured import (
    HEADER_OF_LOSSES,
    Box,
    Document,
    JsonRows,
    Table,
    find_header,
    is_border,
    number,
    put,
    rows_of,
)
from runwatch.tokens import STAMP, Tokenizer, clean
from runwatch.unread import Unread

_MESSAGE_LETTERS = 600
"""Messages say what they have to say early in a line; numbers may stand anywhere."""
_LONGEST_TEXT = 20_000
_MOST_PLANS = 5000
_SURVIVED_LINES = 40
"""So many lines after a traceback, and the error was handled."""
_RANK = re.compile(r"^\[?(?:rank|default|Rank )(\d+)\]?:?")
_ROUND = re.compile(r"(?:\s*|[A-Z]+:[\w.]+:|.{0,100}\]\s)(?:\[\s*(?:(\d+),\s*)?(\d+)\]|(?<!\S)(\d+):)\s")
_ROUND_RANK = 3
"""Better than a count of batches, worse than a named step."""
_EVALUATION = re.compile(r"(?i)\b(?:eval(?:uation)?|validation|testing) (?:begin|start)(?:s|ed|ing)?\b")
_SETTINGS = re.compile(
    r"(?i)^.{0,40}\b(?:hyper-?param(?:eter)?s|namespace|arguments|settings)\s*[:(=]"
    r"|\s*\d+\s*\|\s*[\w.]+\s*\|\s*\w+\s*\|"  # a row of the summary of a model
)
_TESTING = re.compile(r"(?i)\b(?:eval(?:uat\w+)?|validat\w+|testing)\b")
_STARTING = re.compile(
    r"(?i)\b(?:start|starting|begin|beginning) (?:model )?training\b(?!.*epoch)|\btraining start"
)
_BLOCK_ROLES = frozenset(
    (
        "lr",
        "grad_norm",
        "tokens_per_second",
        "documents_per_second",
        "steps_per_second",
        "step_seconds",
        "mfu",
        "gpu_memory_allocated",
    )
)


class LineParser:
    """Turns the lines of one file into records, in order."""

    def __init__(
        self, rank: int | None = None, *, mapped: Mapping[str, str] | None = None, splits: bool = True
    ) -> None:
        self.rank = rank
        self.names = Names(mapped)
        self.messages = MessageReader()
        self.stepper = Stepper(splits=splits)
        self.unread = Unread()
        self._assembler = Assembler(self.stepper)
        self._tokens = Tokenizer(self.names)
        self._code = CodeGuard()
        self._document: Document | None = None
        self._table: Table | None = None
        self._box = Box()
        self._json = JsonRows(self.names)
        self._pending: Marks | None = None
        """The step above a block of indented lines, or alone on the line before."""
        self._is_alone = False
        self._evaluates = False
        """An evaluation was announced; its lines count up to another total than those of training."""
        self._is_announced = False
        """A line of words spoke of an evaluation; what comes next for the same epoch is its result."""
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._postfix = ""
        self._bar_label = ""
        self._num_lines = 0
        self._lines_to_go = 0

    @property
    def is_document(self) -> bool:
        """Whether the file is one JSON document, which is rewritten as a whole."""
        return self._document is not None

    @property
    def last_step(self) -> int | None:
        return self.stepper.step

    @property
    def total(self) -> int | None:
        return self.stepper.total

    def parse(self, line: str) -> Record | None:
        """What the line says, or None; the last record if it says several things."""
        records = self.records(line)
        return records[-1] if records else None

    def records(self, line: str) -> list[Record]:
        """What the line says; never raises, whatever the line is."""
        if "\x00" in line or "\ufffd" in line:
            line = _as_text(line)
        try:
            records = self._records(clean(line))
        except (ValueError, OverflowError, RecursionError, TypeError):
            return []
        if self.rank is not None:
            for record in records:
                record.rank = self.rank if record.rank is None else record.rank
        return records

    def _records(self, line: str) -> list[Record]:
        if not line or line.isspace():
            return []
        self._num_lines += 1
        first = self._num_lines == 1
        if self._document is not None and not self._document.accepts(line):
            kept, self._document = [*self._document.lines(), line], None
            return [record for text in kept for record in self._line_records(text)]
        if self._document is not None or (first and _opens_document(line)):
            self._document = self._document or Document()
            rows = self._document.add(line)
            self.stepper.splits = self.stepper.splits and not rows  # one document is one run, resumed or not
            return [record for row in rows if (record := self._from_json(row)) is not None]
        return self._line_records(line)

    def _line_records(self, line: str) -> list[Record]:
        if line[0] == "{" or '{"' in line:
            known, record = self._json_line(line)
            if known:
                return [record] if record is not None else []
        record = self._text(line)
        return [record] if record is not None else []

    # --- JSON -------------------------------------------------------------------------------------------------------

    def _json_line(self, line: str) -> tuple[bool, Record | None]:
        """A line of JSON, or one that ends with an object behind a prefix; whether it was one."""
        start = line.find('{"')
        if start < 0:
            return False, None
        content = _load(line[start : line.rfind("}") + 1])
        if content is None and (last := line.rfind('{"')) > start:
            start, content = (
                last,
                _load(line[last:]),
            )  # a line whose end never came, and the next one behind it
        if content is None:
            return line[0] == "{" and line.rstrip()[-1] != "}", None
        record = self._object(content, line[:start])
        return True, record

    def _object(self, content: dict[str, Any], prefix: str) -> Record | None:
        event = content.get("event")
        if isinstance(event, str) and event in LEDGER:
            return event_record(content)
        if isinstance(content.get("message"), dict) and "message" in content["message"]:
            return error_file_record(content["message"], self.rank)
        record = self._from_json(content, prefix)
        if record is None:
            said = content.get("message", content.get("msg", event))
            if isinstance(said, str):
                record = self._text(said)
            elif len(content) > 1:
                rows = [row for row in rows_of(content) if (record := self._from_json(row)) is not None]
                record = record if rows else None
                if not rows:
                    self.unread.add(
                        str(content), [key for key in content if number(content[key]) is not None]
                    )
        return record

    def _from_json(self, content: dict[str, Any], prefix: str = "") -> Record | None:
        row = self._json.row(content)
        if prefix:
            row.is_eval = self._tokens.layout(self._tokens.split(prefix)[0]).is_eval
            if row.time is None and (stamp := STAMP.search(prefix)):
                row.time = self._tokens.seconds(stamp)
        return self._assembler.record(row, needs_proof=row.marks.step is None)

    # --- text -------------------------------------------------------------------------------------------------------

    def _text(self, line: str) -> Record | None:
        if "mmldlm" in line and OWN_ALERT.search(line):
            return None
        rank = _RANK.match(line)
        message = self.messages.read(line[:_MESSAGE_LETTERS])
        record = message or self._numbers(line) or self._after_crash()
        if message is not None and message.event == "crash":
            self._lines_to_go = _SURVIVED_LINES
        elif message is not None and message.event == "finished":
            self.stepper.finish()
        if record is None:
            return None
        if rank and record.rank is None:
            record.rank = int(rank[1])
        if record.time is None and (stamp := STAMP.search(line, 0, 100)):
            record.time = self._tokens.seconds(stamp)
        return record

    def _after_crash(self) -> Record | None:
        """A program that goes on talking after a traceback has survived it."""
        if self._lines_to_go:
            self._lines_to_go -= 1
            if not self._lines_to_go:
                return Record(event="went_on")
        return None

    def _numbers(self, line: str) -> Record | None:
        if not self.messages.is_idle or len(line) > _LONGEST_TEXT:
            return None
        if "0/? [" in line:  # a bar that has not begun, with a line of another behind it
            line = line.rpartition("it/s]")[2]
        if (bar := find_bar(line)) is not None:
            return self._bar(bar)
        texts, numbers = self._tokens.split(line)
        plan = self._plans.get(texts)
        if plan is not None and plan.is_known:
            return self._sentence(line, plan, numbers)
        if "raining" in line and _STARTING.search(line):
            self.stepper.announce()
        if (self._box.is_open() or line.lstrip()[:1] in ("|", "│", "┃")) and self._box.add(line):
            return None
        if is_border(line):
            row = self._box.row(self.names)
            return self._assembler.record(row) if row is not None else None
        if self._code.is_code(line) or _SETTINGS.match(line):
            return None
        may_be_header = not numbers or (self._num_lines <= 3 and line.count(",") > 1)
        if (may_be_header and self._header(line)) or not numbers:
            self._evaluates = self._evaluates or _EVALUATION.search(line) is not None
            self._is_announced = self._is_announced or _TESTING.search(line) is not None
            return None
        if self._table is not None and (row := self._table.row(line)) is not None:
            return self._assembler.record(row)
        return self._sentence(line, self._plan(texts), numbers)

    def _header(self, line: str) -> bool:
        may_hold_loss = self.names.is_mapped or HEADER_OF_LOSSES.search(line)
        table = find_header(line, self.names) if may_hold_loss else None
        if table is None and self._num_lines == 1 and len(names := re.split(r"[,;\t]", line.strip())) > 1:
            self.unread.add(line, [name.strip(" \"'") for name in names])
        self._table = table or self._table
        return table is not None

    def _sentence(self, line: str, plan: Plan, numbers: list[str]) -> Record | None:
        """Names and numbers in a line of words."""
        row = plan.row(numbers)
        if self._evaluates:
            total = row.marks.step_total or (row.marks.counter or (None, None))[1]
            done = row.marks.step or (row.marks.counter or (None, None))[0]
            self._evaluates = total not in (None, self.stepper.inner_total)
            row.is_eval = row.is_eval or self._evaluates
            if self._evaluates and done != total:
                return None  # not all of it yet
        if (
            row.marks.step is None
            and row.marks.counter is None
            and row.values
            and (start := _ROUND.match(line))
        ):
            row.marks.step, row.step_rank = float(start[2] or start[3]), _ROUND_RANK
            row.marks.epoch = float(start[1]) if start[1] else row.marks.epoch
        if self._is_announced and any(name.role == "loss" for name, _ in row.values):
            self._is_announced = False
            row.is_eval = row.is_eval or self.stepper.repeats_epoch(row.marks)
        in_block = False
        if self._pending is not None:
            self._pending = self._pending if line[0] in " \t|" or self._is_alone else None
            self._is_alone = False
            if self._pending is not None and not row.marks.any():
                row.marks = self._pending
                in_block = any(name.role in _BLOCK_ROLES for name, _ in row.values)
        record = self._assembler.record(row, needs_proof=not in_block)
        if record is None:
            self._context(plan, row, line)
        else:
            plan.is_known = True
            if not math.isnan(record.values.get("loss", 0.0)):
                self._code.confirm()
        return record

    def _plan(self, texts: tuple[str, ...]) -> Plan:
        plan = self._plans.get(texts)
        if plan is None:
            if len(self._plans) > _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[texts] = make_plan(self._tokens.layout(texts), self.names)
        return plan

    def _context(self, plan: Plan, row: Row, line: str) -> None:
        """A line without a loss: the epoch or the step that the next ones belong to."""
        fields = plan.layout.fields
        whole = {
            field.name.role
            for field in fields
            if field.name is not None and " ".join(words_of(field.key)) == field.name.key
        }
        epoch = whole_marks(row.marks)
        if "epoch" in whole and len(fields) <= 3 and not row.is_eval and epoch is not None:
            self._assembler.enter(epoch)
        is_counted = ("step" in whole and row.marks.step is not None) or row.marks.counter is not None
        if is_counted and len(fields) <= 8:
            self._pending, self._is_alone = row.marks, len(fields) == 1
        self.unread.add(line, [field.key for field in fields])

    # --- bars -------------------------------------------------------------------------------------------------------

    def _bar(self, bar: Bar) -> Record | None:
        known = self.stepper.inner_total
        if bar.is_other:
            return None
        if bar.counts_epochs:
            self._assembler.enter(Marks(epoch=bar.done, epoch_total=bar.total))
            return None
        if (
            bar.total is not None
            and known is not None
            and bar.total < known
            and not bar.plain_label
            and not bar.has_loss
        ):
            return None  # a bar without a name beside the one of the training, such as an evaluation's
        row = self._bar_numbers(bar)
        has_loss = any(name.role == "loss" for name, _ in row.values)
        if self._bar_label and bar.plain_label != self._bar_label and not has_loss:
            return None
        self._bar_label = bar.plain_label if has_loss else self._bar_label
        row.marks.epoch = bar.epoch if row.marks.epoch is None else row.marks.epoch
        if bar.total is None:
            row.marks.step = bar.done
        else:
            row.marks.counter, row.marks.step = (bar.done, bar.total), None
        put(row, self.names.of("steps_per_second"), bar.steps_per_second)
        return self._assembler.record(row, needs_proof=bar.total is None)

    def _bar_numbers(self, bar: Bar) -> Row:
        """The numbers before and behind a bar. One that is only drawn again repeats them; they count once.

        An epoch behind the bar does not say that the bar is its own; one before it does.
        """
        drawn = bar.label + bar.rest
        redrawn, self._postfix = drawn == self._postfix and "nan" not in drawn.lower(), drawn
        row = Row()
        for part in (bar.label, bar.rest):
            if part and not part.isspace():
                texts, numbers = self._tokens.split(part)
                part_row = self._plan(texts).row(numbers)
                row.values += part_row.values if not redrawn else []
                if part is bar.label:
                    row.marks.epoch, row.marks.epoch_total = part_row.marks.epoch, part_row.marks.epoch_total
        table_row = self._table.row(bar.label.rstrip().rstrip(":")) if self._table is not None else None
        if table_row is not None:
            row.values += table_row.values
            row.marks.epoch, row.marks.epoch_total = table_row.marks.epoch, table_row.marks.epoch_total
        return row


def _as_text(line: str) -> str:
    """A line of UTF-16 without its zeros; nothing if it is no text at all."""
    if "\x00" in line and ("\x00" * (len(line) // 2) in (line[1::2], line[::2][: len(line) // 2])):
        return line.replace("\x00", "").replace("\ufffd", "")
    return "" if "\x00" in line or 10 * line.count("\ufffd") > len(line) else line


def _opens_document(line: str) -> bool:
    """Whether a file that begins so is one JSON document rather than a line of JSON each."""
    text = line.strip()
    if text in ("{", "[") or text.startswith("[{"):
        return True
    return (
        text.startswith('{"') and text[-1] != "}" and text.endswith((",", "{", "[")) and _load(text) is None
    )


def _load(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
