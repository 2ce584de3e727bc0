"""A line of text -> numbers with their names.

A line is split at its numbers; the texts between them hold the unit of the number before and the name of the
number behind. A log repeats these texts for ever, so each is understood once and then looked up: that is what makes
one reader fast enough for every format.
"""

from __future__ import annotations

import datetime
import itertools
import math
import re
from dataclasses import dataclass, replace

from runwatch.names import DISCRIMINATOR, GENERATOR, VALIDATION, Name, Names, words_of

_CONTROL = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # DCS, SOS, PM, APC
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[ -/]*[0-~]|[\x00-\x08\x0b-\x1f\x7f\u200b\ufeff]"
)
NUMBER = re.compile(
    r"(?<![\w.@])([-+]?(?:1\.#(?:QNAN|SNAN|IND|INF)\w*|\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d|,\d)|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?"
    r"|(?:[nN][aA][nN]|[iI][nN][fF](?:inity)?)(?![\w\-/'])"
    r"(?!\s+(?:iterations?|values?|gradients?|loss(?:es)?|counts?|grads?|batch(?:es)?|steps?|detected|found|in|or|and)\b)))"
)
_CLOCK = re.compile(r"(?:\d+ days?, *)?(?<![\w.])\d+:\d\d(?::\d\d)*(?:[.,]\d+)?(?![\w:])")
_DAY = re.compile(r"(?<!\d)(?:\d{4}[-/]\d\d[-/]\d\d|\d\d[./]\d\d[./]\d\d(?:\d\d)?)(?=[ T|_-]@|[ T]?$|\])")
STAMP = re.compile(r"(\d{4}[-/]\d\d[-/]\d\d)[ T_](\d\d:\d\d):(\d\d(?:[.,]\d{1,6})?)(Z|[+-]\d\d:?\d\d)?")
_UNIT = re.compile(
    r"\s?((?:%|ms(?![\w/])|us(?![\w/])|s(?![\w/])|secs?\b(?!/)|seconds?\b(?!/)|GiB|GB\b|MiB|MB\b|[GMKk](?![\w/])|KiB|KB\b)"
    r"|[kKM]?\s?(?:tokens|token|toks|tok|words|samples|sample|imgs|img|images|image|examples|ex|seqs|seq|sents|sentences|docs"
    r"|it|its|iters|iter|iterations|steps|step|batches|batch|updates)?\s?/\s?(?:s|sec|second)\b(?:/\w+)?"
    r"|(?:ms|s|sec|seconds)\s?/\s?(?:it|iter|iteration|step|batch)\b)(?!\s*=|:)"
)
_FACTORS = {
    "%": 0.01, "ms": 1e-3, "us": 1e-6, "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "gib":
    2.0**30, "g": 2.0**30, "gb": 1e9, "mib": 2.0**20, "m": 2.0**20, "mb": 1e6, "kib": 1024.0, "kb": 1e3, "k": 1024.0,
}  # fmt: skip
_DECIMAL = {"k": 1e3, "m": 1e6, "g": 1e9}
_SPLIT_KEY = re.compile(r"[,;|\t{}\[\]<>~•│┃║]|\s{2,}|\s[-–—*]+\s|\)\s|:\s(?=\S)|^[-\s]+")
_END = re.compile(
    r"(?:[\s:=|\"'\[(>@│┃║~≈]|\b(?:tensor|array|(?:np|numpy|jnp|torch)\.\w+|Decimal)\(|\b(?:is|was|are|equals)\s+$|->|→)+$"
)
_TRAILING = re.compile(
    r"-?(epoch|batch|iter|it|step)(?=:\s?\w|[,\]|]|\s\()|\s(avg loss|loss)\s?(?=[,|;])|%?\s(?:[\w]+ )?(MFU)\b"
)
_EVAL_WORD = re.compile(
    rf"(?:^|[\s\[(|:*#>])(?:{'|'.join(sorted(VALIDATION))}|validated|evaluated)(?=[\s:\])|=,*#-]|$|_(?:epoch|step|set))",
    re.I,
)
_TRAIN_WORD = re.compile(
    r"(?:^|[\s\[(|:*#>_])(?:train|training|train_inner|learn)(?=[\s:\])|=,*#-]|$|_(?:epoch|step))", re.I
)
_SECTION = re.compile(
    rf"(?:^|[|;,/\])]|\s{{2,}}|\s-+)\s*(?:(?P<eval>{'|'.join(sorted(VALIDATION))})|train(?:ing)?)"
    r"(?: set)?\s*:\s*(?=[A-Za-z])",
    re.I,
)
"""`Train: loss = 1 | Val: loss = 2`: a word before several names."""
_LOSS_AFTER = re.compile(
    r"(?i)(?P<key>[\w ]*\bloss|(?:.* )?score(?= at iter)) (?:after|at|in|for) ?"
    r"(?P<counter>epoch|iteration|iter|step|batch)?"
)
_COUNTED = re.compile(
    r"(?i)\s*(?P<counter>epoch|iteration|iter|step|batche?)?s?\s*(?:[:=]|\bis\b|\bwas\b)\s*"
)
_BLOCKS = re.compile(r"[▏▎▍▌▋▊▉█░▒▓━╸╺─=#>.\-]{3,}")


def clean(line: str) -> str:
    """A line without colours, titles, links and other control sequences."""
    return _CONTROL.sub("", line) if not line.isprintable() else line


@dataclass(slots=True)
class Piece:
    """What a text between two numbers means."""

    factor: float = 1.0
    """Unit of the number before."""
    suffix: str = ""
    """K, M or G behind the number before: binary for memory, else decimal."""
    unit_role: str = ""
    """Role that the unit of the number before tells by itself, such as `tok/s`."""
    trailing: Name | None = None
    """Name of the number before that follows it."""
    name: Name | None = None
    key: str = ""
    """The name of the number behind, as it stands there."""
    is_of: bool = False
    """The number behind is the total of the one before: `10/100`."""
    brackets: bool = False
    """The number behind opens a bracket, as counters do."""
    split: str = ""
    """eval or train, whichever word stands first."""
    section: str = ""
    """eval or train, where that word stands before several names: `| Val: loss = 1`."""
    has_colon: bool = False
    """The name is tied to its number by a colon or an equals sign."""


@dataclass(slots=True)
class Field:
    """Where a number of a line stands among its numbers, and what the texts around it tell."""

    idx: int
    name: Name | None
    key: str
    unit_role: str = ""
    total_idx: int | None = None
    """Where its total stands: `10/100`."""
    in_brackets: bool = False
    factor: float = 1.0


@dataclass(slots=True)
class Layout:
    """What lines with the same texts have in common."""

    fields: list[Field]
    is_eval: bool = False


class Tokenizer:
    """Splits lines and remembers the texts it has understood."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self._pieces: dict[str, Piece] = {}
        self._day = ("", 0.0)

    def split(self, line: str) -> tuple[tuple[str, ...], list[str]]:
        """The texts and the numbers of a line; clock times and dates are no numbers."""
        if ":" in line:
            line = _CLOCK.sub("@", line)
            if "@" in line:
                line = _DAY.sub("@", line)
        parts = NUMBER.split(line)
        return tuple(parts[::2]), parts[1::2]

    def layout(self, texts: tuple[str, ...]) -> Layout:
        """What a line with these texts between its numbers is about."""
        fields: list[Field] = []
        piece = self._pieces.get(texts[0]) or self._understand(texts[0])
        split, section = piece.split, ""
        for idx, text in enumerate(texts[1:]):
            after = self._pieces.get(text) or self._understand(text)
            if piece.is_of and fields and fields[-1].total_idx is None:
                fields[-1].total_idx = idx
            else:
                name, factor = piece.name or after.trailing, after.factor
                if text.startswith(", shape"):
                    name = None  # `crf_loss/kernel:0, shape = (768, 10)` is a tensor
                if after.suffix and (name is None or not name.role.startswith("gpu_memory")):
                    factor = _DECIMAL[after.suffix]
                elif name is not None and name.role in ("step", "epoch", "loss", "valid_loss", "lr"):
                    factor = 1.0
                if section == "eval" and name is not None:
                    name = _of_validation(name)
                fields.append(Field(idx, name, piece.key, after.unit_role, None, piece.brackets, factor))
            has_loss = any(field.name is not None and field.name.role == "loss" for field in fields)
            if after.section and has_loss:
                section, split = after.section, split or "train"
            if not (has_loss and VALIDATION & set(words_of(after.key))):  # `loss: 0.5, val acc: 0.9`
                split = split or after.split
            piece = after
        self._name_counted(fields, texts)
        if not any(field.name is not None and field.name.role in ("loss", "valid_loss") for field in fields):
            self._name_adversaries(fields)
        return Layout(fields, split == "eval")

    def _name_counted(self, fields: list[Field], texts: tuple[str, ...]) -> None:
        """`Loss after 5 epochs: 0.1`, `Validation loss at step 100: 0.2`: the loss is the second number."""
        for counter, value in itertools.pairwise(fields):
            if value.idx != counter.idx + 1 or value.name is not None:
                continue
            ends, between = _LOSS_AFTER.fullmatch(counter.key), _COUNTED.fullmatch(texts[value.idx])
            if ends and between and (word := ends["counter"] or between["counter"]):
                word = "batch" if word.lower() == "batche" else word
                counter.name, value.name, value.key = (
                    self.names.of(word),
                    self.names.of(ends["key"]) or Name("loss", "score", 4),
                    ends["key"],
                )

    def _name_adversaries(self, fields: list[Field]) -> None:
        """`d: 0.1; gen: 0.2`: single letters are losses where both adversaries stand side by side.

        Each may have several numbers: `D: 0.1, 0.2 | G: 0.3, 0.4`.
        """
        for one, other in itertools.pairwise([field for field in fields if field.key]):
            sides = [
                next((n for n, side in enumerate(_ADVERSARIES) if f.key.lower() in side), None)
                for f in (one, other)
            ]
            if None not in sides and sides[0] != sides[1] and one.name is None and other.name is None:
                one.name, other.name = (
                    Name("loss", f"{item.key.lower()} loss", 11 - (side or 0))
                    for item, side in ((one, sides[0]), (other, sides[1]))
                )

    def _understand(self, text: str) -> Piece:
        if len(self._pieces) > 10_000:
            self._pieces.clear()
        piece = self._pieces[text] = self._piece(text)
        return piece

    def _piece(self, text: str) -> Piece:
        piece = Piece(split=_split(text))
        for mark in _SECTION.finditer(text):
            piece.section = "eval" if mark["eval"] else "train"
        rest = text
        if unit := _UNIT.match(text):
            piece.factor, piece.unit_role = _unit(unit[1])
            piece.suffix = unit[1].lower() if unit[1] in "GMKk" else ""
            rest = text[unit.end() :]
        if word := _TRAILING.match(text):
            piece.trailing = self.names.of(word[1] or word[2] or word[3])
            rest = text[word.end() :]
        if re.fullmatch(r"\s*(?:/|\bof\b|\\)\s*", text):
            piece.is_of = True
            return piece
        piece.brackets = text.rstrip().endswith(("[", "("))
        bare = _END.sub("", rest)
        piece.has_colon = any(mark in rest[len(bare) :] for mark in ":=|")
        piece.key = _SPLIT_KEY.split(_BLOCKS.sub("  ", bare))[-1].strip(" .\"'*`#\\/")
        is_money = rest.endswith(("$", "€", "£"))
        piece.name = self._name(piece.key, piece.has_colon) if not is_money else None
        if piece.name is None and piece.key.endswith(")"):
            name = self._name(piece.key.partition("(")[0].strip(), piece.has_colon)
            piece.name = name if name is None or name.role not in ("step", "epoch") else None
        return piece

    def _name(self, key: str, has_colon: bool) -> Name | None:
        """The whole phrase, else its last words: `INFO step`, `and kl`."""
        if not key or len(key) > 80:
            return None
        words = key.split()
        if len(words) > 1 and _NOT_NOW & {word.lower() for word in words[-3:-1]}:
            return None  # `Best Loss` is no point of the curve
        for count in range(min(len(words), 6), 0, -1):
            name = self.names.of(" ".join(words[-count:]))
            if name is not None and (has_colon or _stands_alone(name, count)):
                return name if count == len(words) or name.rank < 10 else None
            if name is not None:
                return None
        return None

    def seconds(self, stamp: re.Match[str]) -> float:
        """A date and time as seconds since 1970."""
        day, minute, second, zone = (
            stamp[1].replace("/", "-"),
            stamp[2],
            stamp[3].replace(",", "."),
            stamp[4] or "",
        )
        base = f"{day} {minute}{zone}"
        if self._day[0] != base:
            moment = datetime.datetime.fromisoformat(f"{day} {minute}:00{zone.replace('Z', '+00:00')}")
            self._day = base, moment.timestamp()
        return self._day[1] + float(second)


_ADVERSARIES = (DISCRIMINATOR | {"critic"}, GENERATOR)


def _of_validation(name: Name) -> Name | None:
    """What a name means in the part of a line that tells of validation."""
    if name.role == "loss":
        return replace(name, role="valid_loss", key=f"val {name.key}")
    return None if name.role in ("text_accuracy", "bare_loss") else name


_NOT_NOW = frozenset(
    ("best", "lowest", "min", "minimum", "target", "previous", "prev", "old", "initial", "smallest")
)
_NEEDS_COLON = (
    "text_loss",
    "latent_loss",
    "gpu_memory_allocated",
    "bare_loss",
    "bare_valid",
    "text_accuracy",
    "data_seconds",
)


def _stands_alone(name: Name, count: int) -> bool:
    """Whether a name without a colon or equals sign behind it is one: `loss 2.5`, but not `text 5`."""
    if name.rank >= 10 and count > 1:
        return False
    return name.role not in _NEEDS_COLON or (name.role == "text_accuracy" and count == 1)


def to_float(text: str) -> float:
    """A number as it stands in a line."""
    try:
        return float(text)
    except ValueError:
        return _odd_number(text)


def _odd_number(text: str) -> float:
    """Thousands with commas, and how old C libraries print nan."""
    return math.nan if "#" in text else float(text.replace(",", ""))


def _split(text: str) -> str:
    """Whether a text speaks of evaluation or of training, by the word that stands first."""
    evaluation, training = _EVAL_WORD.search(text), _TRAIN_WORD.search(text)
    if evaluation and (training is None or evaluation.start() < training.start()):
        return "eval"
    return "train" if training else ""


def _unit(text: str) -> tuple[float, str]:
    """The factor of a unit, and the role that it tells by itself."""
    word = text.replace(" ", "")
    if "/" not in word:
        return _FACTORS[word.lower()], ""
    subject = word.partition("/")[0]
    if subject in ("ms", "s", "sec", "seconds"):
        return _FACTORS[subject], "step_seconds"
    factor = 1.0
    if subject[:1] in ("k", "K", "M") and subject.lower() not in ("img",):
        factor, subject = (1e6 if subject[0] == "M" else 1e3), subject[1:]
    if subject in ("tokens", "token", "toks", "tok", "words"):
        return factor, "tokens_per_second"
    if subject in (
        "it",
        "its",
        "iters",
        "iter",
        "iterations",
        "steps",
        "step",
        "batches",
        "batch",
        "updates",
    ):
        return factor, "steps_per_second"
    return factor, "documents_per_second"
