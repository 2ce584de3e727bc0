"""Lines that are no numbers but mean something: errors, signals, failed collectives, checkpoints, the end."""

from __future__ import annotations

import re
from dataclasses import dataclass

from runwatch.records import Record

_PATTERNS: tuple[tuple[str, str], ...] = (
    (
        "oom",
        r"[Oo]ut of memory|RESOURCE_EXHAUSTED|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|OOM when allocating"
        r"|ResourceExhaustedError|can't allocate memory|oom[-_]kill|OOM Killed",
    ),
    (
        "rendezvous",
        r"Rendezvous\w*Error|RendezvousTimeout|DistNetworkError|DistStoreError|EADDRINUSE|Address already in use"
        r"|server socket has failed|waiting for clients|rendezvous.{0,40}(?:timed out|fail)",
    ),
    (
        "nccl",
        r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|ncclRemoteError|ncclInvalidUsage"
        r"|caught collective operation timeout|NCCL communicator was aborted|Timeout at NCCL work|DistBackendError"
        r"|NCCL operations have failed|connectFullMesh|Connection closed by peer|gloo/transport"
        r"|Timed out waiting \d+ms for (?:recv|send)",
    ),
    ("disk_full", r"No space left on device|Disk quota exceeded|no space left on the disk|disk quota is used up"),
    (
        "killed",
        r"Signal \d+ \(SIG(?:KILL|SEGV|BUS|ABRT|ILL|FPE)\)|^Killed$|Segmentation fault|Bus error|core dumped"
        r"|exited on signal \d|slurmstepd(?:-\S+)?: error: .*(?:CANCELLED|KILLED)|DUE TO (?:TIME LIMIT|PREEMPTION)",
    ),
    ("crash", r"^Exited with exit code [1-9]|exits with return code = [1-9]"),
    (
        "bad_loss",
        r"[Ii]nvalid loss detected|[Ll]oss (?:is|was|became|has become|turned|went) (?:to )?(?:nan|inf|NaN|Inf|not fin)"
        r"|(?:NaN|nan|non-finite|infinite) loss\b(?!\s*[:=])|returned nan values"
        r"|[Ll]oss (?:nan|NaN)[,.!]? (?:stop|abort)",
    ),
    ("bad_gradient", r"NaN gradient|[Ii]nvalid gradient norm|non-finite gradient|gradient (?:is|was) not finite"),
    ("high_gradient", r"[Hh]igh gradient norm"),
    (
        "skipped",
        r"[Gg]radient overflow|OVERFLOW!|[Ss]kipping (?:step|optimizer step|this batch|update)"
        r"|(?<!too many )updates? skipped",
    ),
    ("save_failed", r"(?:[Cc]heckpoint|[Ss]av(?:e|ing)).{0,60}(?:failed|could not be|cannot be written|Error)"),
    (
        "checkpoint",
        r"[Ss]av(?:ing|ed) (?:the |a |model |full )?(?:checkpoint|model)|[Cc]heckpoint \S+ written|[Cc]heckpoint saved"
        r"|Finished saving the checkpoint",
    ),
    (
        "finished",
        r"'?train_runtime'?\W|`Trainer\.fit` stopped|Training (?:is )?complete|[Tt]raining finished|Training done"
        r"|\b[Ff]inish(?:ed)? [Tt]raining\s*(?:[.!:,]|$)",
    ),
    ("compile", r"compiling the model|[Cc]ompiling .*torch\.compile|Compiling each|torch\.compile.*(?:took|start)"),
)  # fmt: skip
_ANY = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _PATTERNS))
_HINTS = (
    "ut of memory", "RESOURCE_EX", "OutOfM",
    "CUBLAS", "allocat", "ResourceEx", "oom", "OOM", "endezvous", "Dist", "EADDR", "Address al",
    "socket", "clients", "NCCL", "nccl", "ollective", "connectFull", "by peer", "gloo", "Timed out",
    "space left", "quota", "Signal", "on signal", "Killed", "fault", "Bus err", "dumped", "slurmstepd", "DUE TO",
    "nvalid",
    "oss is", "oss was", "became", "oss has", "oss turned", "oss went", "turned nan", "nite loss", "oss nan", "oss NaN",
     "NaN", "nan loss", "finite", "igh grad", "verflow", "OVERFLOW", "kipp", "heckpoint",
    "sav", "Sav", "train_runtime", "Trainer.fit", "raining", "ompil", "Traceback", "Root Cause", "exit code",
    "return code", "Exception in thread", "Exception ignored",
)  # fmt: skip
"""Every pattern needs one of these; looking for them first is many times faster than the patterns."""
OWN_ALERT = re.compile(r" mmldlm\.\S+: step \d+: (?:opened|worse|still|resolved) M\d{3} ")
"""What the detectors inside our trainer said about lines that are read here too."""
_LONGEST_REPORT = 200
_PHRASE = "ut of memory"
_NEARBY = 80
_TECHNICAL = re.compile(
    r"(?i:error|exception|warning|critical|fatal|\bcuda|\bhip\b|\brocm|\bgpu|\bdevice|alloc|\bkill|\bprocess\b|\bxla"
    r"|\btpu|\bmps\b|\bworker|\brank\b|\bbatch|\bstep|\bskip|\bOOM\b)|\d\s?(?:[KMGT]i?B|bytes)\b"
)
"""Near a report that memory ran out stands one of these; in captions and stories the words may mean anything."""
_ADVICE = re.compile(r"(?i)\b(?:if|avoid|prevent|may|might|could|would|case of)\b[\w ,']{0,40}$")
_RETRIED = re.compile(r"\b(?:cuda_driver|gpu_driver|\w*allocator\w*)\.cc:\d+\]|not a failure")
"""Allocators of TensorFlow tell of every attempt and then try less; a true end is told by another line."""
_STEP = re.compile(r"\b(?:step|iter(?:ation)?)[ :=]+(\d+)")
_EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure)?(?:\(\w+\))?)(?::|$)"
)
_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]:\s?")


def contains_any(text: str, words: tuple[str, ...]) -> bool:
    """Whether one of the words is in the text; a plain loop is several times faster here than any other way."""
    for word in words:  # noqa: SIM110
        if word in text:
            return True
    return False


def may_hold_message(line: str) -> bool:
    """Whether it is worth looking for one."""
    return contains_any(line, _HINTS)


@dataclass
class MessageReader:
    """Finds messages in the lines of one file; tracebacks and torchrun's report span several lines."""

    _in_traceback: bool = False
    _is_in_thread: bool = False
    """The traceback is that of a thread, whose end does not end the program."""
    _root_cause: dict[str, str] | None = None
    _root_lines: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether the next line is not a part of something that began before."""
        return self._root_cause is None and not self._in_traceback

    def read(self, line: str) -> Record | None:
        """The message in a line, if there is one."""
        if self._root_cause is not None:
            return self._read_root_cause(line)
        if self._in_traceback:
            return self._read_traceback(line)
        if not may_hold_message(line):
            return None
        if "Traceback (most recent" in line:
            self._in_traceback = True
            return None
        if line.startswith(("Exception in thread", "Exception ignored in")):
            self._is_in_thread = True
            return None
        if "Root Cause (first observed failure)" in line:
            self._root_cause = {}
            return None
        match = _find(line)
        if match is None:
            return None
        return _message(str(match.lastgroup), line, at=match.start())

    def _read_traceback(self, line: str) -> Record | None:
        text = _PREFIX.sub("", line)
        if (
            not text.strip()
            or text[0] in " \t|"
            or text.startswith(("During handling", "The above exception"))
        ):
            return None
        self._in_traceback = "Traceback (most recent" in text
        match = _EXCEPTION.match(text)
        if match is None or self._in_traceback:
            return None
        if "KeyboardInterrupt" in match[1] or text.rstrip().endswith("got signal: 2"):
            return _message("interrupted", text)
        facts = {"cause": cause_of(text), "traceback": True, "in_thread": self._is_in_thread}
        self._is_in_thread = False
        return Record(event="crash", text=text[:300], facts=facts)

    def _read_root_cause(self, line: str) -> Record | None:
        facts = self._root_cause
        assert facts is not None, "only called inside the report"
        text = _PREFIX.sub("", line)
        key, colon, value = text.strip().partition(":")
        if colon and key.strip() in ("rank", "exitcode", "host", "time", "error_file"):
            facts[key.strip()] = value.strip()
        elif re.match(r"  [A-Za-z_][\w.]*(?:Error|Exception)\b", text):
            facts["reason"] = text.strip()[:200]
        self._root_lines += 1
        if not text.startswith("=====") and self._root_lines < _LONGEST_REPORT:
            return None
        self._root_cause, self._root_lines = None, 0
        return _root_cause(facts)


def _root_cause(facts: dict[str, str]) -> Record:
    rank = facts.get("rank", "").split(" ")[0]
    reason = f": {facts['reason']}" if "reason" in facts else ""
    text = f"rank {rank or '?'} failed first, exitcode {facts.get('exitcode', '?')}{reason}"
    number = int(rank) if rank.isdigit() else None
    if facts.get("exitcode", "").startswith("-2 "):  # SIGINT: somebody pressed Ctrl-C
        return Record(event="interrupted", rank=number, text=text, facts={"root_cause": True})
    return Record(event="crash", rank=number, text=text, facts={"root_cause": True, **facts})


def cause_of(text: str) -> str:
    """Which known kind of message an exception is; empty if it is another."""
    match = _find(text)
    return str(match.lastgroup) if match else ""


def _find(text: str) -> re.Match[str] | None:
    match = _ANY.search(text)
    while match is not None and match.lastgroup == "oom" and not _is_report(text, match):
        match = _ANY.search(text, match.end())
    return match


def _is_report(text: str, match: re.Match[str]) -> bool:
    """Whether words about memory are the report of a program, not prose, advice or an attempt that is repeated."""
    if not match[0].endswith(_PHRASE):
        return True
    before, behind = text[: match.start()], text[match.end() :]
    if _RETRIED.search(text):
        return False
    if _ADVICE.search(before) and "Error" not in before:
        return False
    opens = match[0][0] == "O" and (not before.strip() or before.rstrip()[-1] in ":]|")
    return opens or _TECHNICAL.search(before[-_NEARBY:] + " " + behind[:_NEARBY]) is not None


def _message(event: str, line: str, at: int = 0) -> Record:
    """The record of a message; of a long line with another's text in front, the part that says it."""
    match = _STEP.search(line)
    text = line.strip() if at < 200 else f"... {line[at - 80 :].strip()}"
    return Record(event=event, text=text[:300], step=int(match[1]) if match else None)
