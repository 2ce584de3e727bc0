"""Processes that derive documents, where many are to be derived: Python draws on one core at a time.

Run as `python -m mmldlm.preparation.derive_processes`: reads what a `Deriver` is made of from its input, then lots of
documents, and answers each with what is drawn from them. It ends with its input, so with the process that started it.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.preparation.cutting import SeenIds
from mmldlm.preparation.derive import Begin, Deriver, Drawn, Parent, Survey
from mmldlm.preparation.threads import many_documents

FEWEST_DOCUMENTS = 200_000
"""For fewer derived documents no process is worth its start."""
MOST_PROCESSES = 8
"""So many draw faster than the process that started them takes what they draw."""
LEAVE_SECONDS = 20.0
"""A process that has not ended by then is killed."""


@contextmanager
def drawing(deriver: Deriver) -> Iterator[Begin | None]:
    """What begins to draw in another process; None: there is too little to do for that, or there is one core."""
    count = _num_processes(deriver)
    if count < 1:
        yield None
        return
    idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()

    def draw(parents: list[Parent]) -> Drawn:
        process = idle.get()
        try:
            return process.draw(parents)
        finally:
            idle.put(process)

    with ExitStack() as stack:
        setup = pickle.dumps(
            (deriver.tokenizer.backend, deriver.tokenizer.name, deriver.options, deriver.survey.partners)
        )
        for _ in range(count):
            process = _Process(setup)
            stack.callback(process.end)
            idle.put(process)
        pool = ThreadPoolExecutor(count, thread_name_prefix="prepare-derive")
        stack.callback(pool.shutdown, cancel_futures=True)
        yield lambda parents: pool.submit(draw, parents).result


def _num_processes(deriver: Deriver) -> int:
    if deriver.survey.num_documents * deriver.options.derive < FEWEST_DOCUMENTS or not sys.executable:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_PROCESSES, cores - 1)


class _Process:
    """One of them, seen from outside."""

    def __init__(self, setup: bytes) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        quiet = {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mmldlm.preparation.derive_processes"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths} | quiet, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._setup, self._lots, self._answers = setup, self._process.stdin, self._process.stdout

    def draw(self, parents: list[Parent]) -> Drawn:
        """As `Deriver.draw`."""
        try:
            self._lots.write(self._setup + pickle.dumps(parents))
            self._lots.flush()
            self._setup = b""
            drawn: Drawn = pickle.load(self._answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(
                f"derive: a process that derives documents ended with code {self.end()}; free memory if that ran "
                "out, and run the same command to go on"
            ) from error
        return drawn

    def end(self) -> int:
        """Have it end; returns its exit code."""
        with suppress(OSError):
            self._lots.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        self._process.kill()
        self._answers.close()
        return self._process.wait()


def answer(lots: IO[bytes], answers: IO[bytes]) -> None:
    """The work of a process, until there are no more lots."""
    with suppress(EOFError, BrokenPipeError), many_documents():
        backend, name, options, partners = pickle.load(lots)
        deriver = Deriver(Tokenizer(backend, name), options, Survey(partners, 0), SeenIds())
        while True:
            answers.write(pickle.dumps(deriver.draw(pickle.load(lots)), pickle.HIGHEST_PROTOCOL))
            answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever is printed goes elsewhere
        answer(sys.stdin.buffer, answers)
