"""A step that all ranks finish or none, although one of them may fail anywhere inside.

An exchange on the device that one rank does not begin leaves the others waiting for ever. So a rank that fails goes on
taking part: it knows from the steps before which exchanges follow, and contributes zeros to each of them. After the
last one all ranks agree on the host, once a step, whether it counts. A step that one rank failed in counts for nobody:
all raise, forget its gradients, and may do it again.

Which exchanges follow is known when two steps in a row had the same ones. Until then, and wherever a step differs from
those before, all ranks agree on the host before each exchange that they have come so far; one that failed answers the
next question with no, and after a no nothing is begun any more. A rank that dies closes its connections, which ends
whatever the others wait for.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from mmldlm.distributed.ranks import LostRankError, Ranks, code_of, error_of, is_of_exchange

T = TypeVar("T")


class GivenUpError(Exception):
    """Another rank failed: leave the step."""


@dataclass(frozen=True)
class Exchange:
    """An exchange that is about to begin; it holds no memory of the device."""

    what: tuple[object, ...]
    """Kind, sizes and types: the same on all ranks."""
    take_part: Callable[[], object] = field(compare=False)
    """The same exchange with zeros from this rank."""


class Lockstep:
    """Runs what all ranks do together. `begin` is to be called before each exchange."""

    def __init__(self, ranks: Ranks, *, foresees: bool = True) -> None:
        """`foresees`: whether exchanges are learned; without it there is an agreement before each."""
        self.ranks, self.foresees = ranks, foresees
        self._no = 0
        """The failure that ended this step, of the rank that it names."""
        self._begun: list[Exchange] = []
        self._ahead: list[Exchange] | None = None
        """Those of the whole step, where they are known."""
        self._seen: dict[Hashable, tuple[list[Exchange], bool]] = {}
        """By kind of step: the exchanges of the last one, and whether the one before had the same."""

    def run(self, kind: Hashable, work: Callable[[], T], give_up: Callable[[], object] = lambda: None) -> T:
        """Work with exchanges, by all ranks; a failure of one is a failure of all, before which `give_up` cleans up.

        Steps of one kind have the same exchanges.
        """
        self._no, self._begun = 0, []
        last, twice = self._seen.get(kind, (None, False))
        self._ahead = last if twice and self.foresees else None
        try:
            done = work()
            self.agree()
        except LostRankError:
            raise
        except GivenUpError:
            error = error_of(self._no, self.ranks)
            if not isinstance(error, LostRankError):
                self._clean_up(give_up)
            raise error from None
        except Exception as error:
            self._fail(error, give_up)
            raise
        self._seen[kind] = (self._begun, self._begun == last)
        return done

    def begin(self, exchange: Exchange) -> None:
        """Before an exchange: raises unless all ranks begin it, or take part in it."""
        self.ranks.own.arrive()
        done = len(self._begun)
        if self._ahead is not None and self._ahead[done : done + 1] != [exchange]:
            self._ahead = None  # on all ranks alike
        if self._ahead is None:
            self.agree()
        self._begun.append(exchange)

    def agree(self) -> None:
        """Whether all ranks have come so far; raises if one failed, and asks nobody any more after that."""
        self._answer(0)
        if self._no:
            raise GivenUpError

    def forget(self) -> None:
        """Other exchanges are to come."""
        self._seen.clear()

    def _answer(self, code: int) -> None:
        self._no = self._no or self.ranks.largest(code)

    def _fail(self, error: Exception, give_up: Callable[[], object]) -> None:
        """Let the others know. One that cannot go on at all leaves, which they notice."""
        code = code_of(error, self.ranks)
        if isinstance(error_of(code, self.ranks), LostRankError):
            if is_of_exchange(error):
                raise self.ranks.lost(str(error)) from error
            with contextlib.suppress(LostRankError):  # the others leave at once; the cause is raised here
                if self._ahead is None:
                    self._answer(code)
            return
        traceback.clear_frames(error.__traceback__)  # they hold the activations
        try:
            self._clean_up(give_up)
            for exchange in self._ahead[len(self._begun) :] if self._ahead else []:
                exchange.take_part()
        except RuntimeError as broken:
            raise self.ranks.lost(str(broken)) from broken
        self._answer(code)

    def _clean_up(self, give_up: Callable[[], object]) -> None:
        self.forget()
        give_up()
