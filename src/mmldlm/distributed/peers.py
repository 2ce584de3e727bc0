"""What ranks know of each other without an agreement: their names, whether they are alive, and why one left.

All of it goes through the key-value store by which the ranks meet: torchrun's own, or one in the process of rank 0. So
it works before there is a process group, and after one has broken.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mmldlm.errors import UserError

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0
"""After so long without a sign of life a rank is named."""
_WAITING_SECONDS = 30.0
"""How long a start waits for the other ranks before it logs a warning."""
_LAST_SECONDS = 10.0
"""How long the rank that keeps the store stays for the others."""
_MOST_SHOWN = 8
_START_ALIKE = "start all of them with the same command, the same installation and the same data"


class Peers:
    """The ranks of one attempt. `start` shows the others that this one lives, and watches them."""

    def __init__(self, store: Any, rank: int, world_size: int, *, own_store: bool = True) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.own_store = own_store
        """Whether the store is in the process of rank 0, and ends with it."""
        self._exchanged: Counter[str] = Counter()
        self.names = [
            f"rank {idx} on {host}" for idx, host in enumerate(self.exchange("host", socket.gethostname()))
        ]
        self.on_silent: Callable[..., None] | None = None
        """Writes into the ledger."""
        self._line = store.clone()  # a client serves one thread at a time
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._send_beats, self._watch_others)
        ]
        self._answered = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._silent: set[int] = set()
        self._cause = ""

    def exchange(self, key: str, text: str) -> list[str]:
        """The texts of all ranks, in order; to be called by all of them, for each key as often."""
        self._exchanged[key] += 1  # texts of an earlier run of these processes are still in the store
        key = f"{key}/{self._exchanged[key]}"
        self.store.set(f"{key}/{self.rank}", text)
        texts = [self.store.get(f"{key}/{idx}").decode() for idx in range(self.world_size)]
        self.store.add(f"{key}/read", 1)
        deadline = time.monotonic() + 10.0
        while self.rank == 0 and self.store.add(f"{key}/read", 0) < self.world_size:
            if time.monotonic() > deadline:  # rank 0 may end next, and the store with it
                break
            time.sleep(0.01)
        return texts

    def compare(self, key: str, facts: Mapping[str, object], remedy: str = _START_ALIKE) -> None:
        """Raise `UserError` on all ranks unless all have the same facts; the main rank lists what differs."""
        own = {name: str(value) for name, value in facts.items()}
        every = [json.loads(text) for text in self.exchange(key, json.dumps(own))]
        names = list(dict.fromkeys(name for each in every for name in each))
        different = [name for name in names if len({each.get(name) for each in every}) > 1]
        if not different:
            return
        if self.rank:
            raise UserError(f"{self.names[self.rank]}: the ranks differ; the output of rank 0 lists how")
        shown = [self._describe(name, [each.get(name) for each in every]) for name in different[:_MOST_SHOWN]]
        more = f" and {len(different) - _MOST_SHOWN} more" if len(different) > _MOST_SHOWN else ""
        raise UserError(f"the ranks differ: {'; '.join(shown)}{more}; {remedy}")

    def _describe(self, name: str, values: Sequence[str | None]) -> str:
        groups: dict[str | None, list[int]] = {}
        for idx, value in enumerate(values):
            groups.setdefault(value, []).append(idx)
        parts = [
            f"{'not set' if value is None else value} on {self._list(who)}" for value, who in groups.items()
        ]
        return f"{name} is {', '.join(parts)}"

    def _list(self, ranks: Sequence[int]) -> str:
        if len(ranks) == 1:
            return self.names[ranks[0]]
        shown = ", ".join(str(idx) for idx in ranks[:_MOST_SHOWN])
        return f"ranks {shown}{' ...' if len(ranks) > _MOST_SHOWN else ''}"

    def start(self) -> None:
        """From now on the others see that this rank is alive, and a rank that falls silent is reported."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads. Python would abort the process if it ended a thread inside a call of the store."""
        self._end.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(BEAT_SECONDS)

    def leave(self, error: BaseException) -> None:
        """Tell the others why this rank leaves them; it must not wait for them."""
        self.close()
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left/{self.rank}", json.dumps([type(error).__name__, reason]))
            if self.own_store and self.rank == 0:
                self._wait_for_others()

    def _wait_for_others(self) -> None:
        """The store ends with this process: wait a moment until those that live have read what they need."""
        deadline, quiet = time.monotonic() + _LAST_SECONDS, time.monotonic()
        beats = self._beats()
        while time.monotonic() < min(deadline, quiet + 3 * BEAT_SECONDS):
            time.sleep(BEAT_SECONDS / 10)
            if all(self._reason(idx) for idx in range(self.world_size)):
                return
            now = self._beats()
            quiet, beats = (quiet if now == beats else time.monotonic()), now

    def _send_beats(self) -> None:
        count = 0
        with contextlib.suppress(RuntimeError):  # the store has ended; `_watch_others` reports it
            while not self._end.wait(BEAT_SECONDS):
                count += 1
                self._line.set(f"alive/{self.rank}", str(count))
                self._cause_is_known()
                if self.rank == 0 and count % 5 == 0:
                    self._read_beats(range(1, self.world_size))
                elif self.rank == 1:
                    self._read_beats([0])
                self._answered = time.monotonic()

    def _read_beats(self, ranks: Sequence[int]) -> None:
        for idx in ranks:
            key, now = f"alive/{idx}", time.monotonic()
            beat = self._line.get(key) if self._line.check([key]) else b""
            before, since = self._seen.get(idx, (None, now))
            self._seen[idx] = (beat, since if beat == before else now)

    def _watch_others(self) -> None:
        """Report ranks that fall silent, and those that are back. Uses no request, which might hang."""
        last = time.monotonic()
        while not self._end.wait(BEAT_SECONDS):
            now = time.monotonic()
            if now - last > SILENT_SECONDS / 3:  # this process itself was stopped; the others had no chance
                self._seen, self._answered = {idx: (beat, now) for idx, (beat, _) in self._seen.items()}, now
            last = now
            silent = {idx for idx, (_, since) in self._seen.items() if now - since > SILENT_SECONDS}
            if self.own_store and self.rank == 1 and now - self._answered > SILENT_SECONDS:
                silent.add(0)
            for idx in silent - self._silent:
                log.error(
                    "%s has given no sign of life for %.0f s: it is stopped, overloaded or cut off; the others wait "
                    "for it", self.names[idx], SILENT_SECONDS,
                )  # fmt: skip
                if self.on_silent is not None:
                    self.on_silent("rank_silent", rank=idx, name=self.names[idx], seconds=SILENT_SECONDS)
            for idx in self._silent - silent:
                log.warning("%s is back", self.names[idx])
            self._silent = silent

    def why_lost(self) -> str:
        """After a connection has broken: which rank is gone, or why it left; empty if that is not known."""
        try:
            if self._cause_is_known():
                return self._cause
            first = self._beats()
            time.sleep(2.5 * BEAT_SECONDS)
            left = {idx: reason for idx in range(self.world_size) if (reason := self._reason(idx))}
            still = [idx for idx, beat in enumerate(self._beats()) if beat == first[idx] and idx != self.rank]
        except RuntimeError:
            return self._cause or (f"{self.names[0]} is gone" if self.own_store and self.rank else "")
        causes = [
            f"{self.names[idx]} failed: {text}"
            for idx, (kind, text) in left.items()
            if kind != "LostRankError"
        ]
        gone = [f"{self.names[idx]} is gone" for idx in still if idx not in left]
        cause = "; ".join([*gone, *causes][:_MOST_SHOWN])
        with contextlib.suppress(RuntimeError):
            self.store.set("cause", cause)
        return cause

    def _cause_is_known(self) -> bool:
        """Whether another rank has already found out which rank was lost."""
        if not self._cause and self._line.check(["cause"]):
            self._cause = self._line.get("cause").decode()
        return bool(self._cause)

    def _beats(self) -> list[bytes]:
        keys = [f"alive/{idx}" for idx in range(self.world_size)]
        return [self.store.get(key) if self.store.check([key]) else b"" for key in keys]

    def _reason(self, idx: int) -> list[str] | None:
        key = f"left/{idx}"
        reason: list[str] | None = json.loads(self.store.get(key)) if self.store.check([key]) else None
        return reason


def fresh_store(store: Any, rank: int, world_size: int, timeout: float) -> Any:
    """The part of a store that belongs to the processes alive now, whatever earlier attempts left in it.

    torchrun starts ranks again after a failure and keeps its store; an agent that joins later counts attempts from 0.
    So the ranks agree on a fresh name: each greets with a number of its own, rank 0 proposes a name for these numbers,
    and it holds when every rank has found its own number in the proposal.
    """
    own, began, warned = uuid.uuid4().hex, time.monotonic(), False
    store.set(f"mmldlm/hello/{rank}", own)
    name = ""
    greeted: list[str] = []
    while True:
        if rank == 0:
            numbers = [_read(store, f"mmldlm/hello/{idx}") for idx in range(world_size)]
            if "" not in numbers and numbers != greeted:
                name, greeted = uuid.uuid4().hex, numbers
                store.set("mmldlm/proposal", json.dumps([name, numbers]))
            if name and store.check([f"mmldlm/{name}/ready/{idx}" for idx in range(1, world_size)]):
                store.set(f"mmldlm/{name}/go", "1")
                return dist.PrefixStore(f"mmldlm/{name}", store)
            missing = [idx for idx, number in enumerate(numbers) if not number]
        else:
            name, numbers = json.loads(_read(store, "mmldlm/proposal") or '["", []]')
            missing = [0]
            if own in numbers:
                store.set(f"mmldlm/{name}/ready/{rank}", "1")
                if store.check([f"mmldlm/{name}/go"]):
                    return dist.PrefixStore(f"mmldlm/{name}", store)
        waited = time.monotonic() - began
        if waited > timeout:
            raise UserError(_explain_missing(rank, world_size, missing, timeout))
        if waited > _WAITING_SECONDS and not warned:
            warned = True
            log.warning("rank %d of %d still waits for %s", rank, world_size, _ranks(missing))
        time.sleep(min(0.2, 0.01 + waited / 20))


def _read(store: Any, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""


def _ranks(missing: Sequence[int]) -> str:
    return "rank " + ", ".join(map(str, missing[:_MOST_SHOWN])) if missing else "the others"


def _explain_missing(rank: int, world_size: int, missing: Sequence[int], timeout: float) -> str:
    return (
        f"rank {rank} of {world_size}: {_ranks(missing)} did not join within {timeout / 60:g} minutes "
        f"(distributed.timeout_minutes) at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}; "
        f"check that all were started and reach that address"
    )
