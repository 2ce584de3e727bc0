"""What stands on the other ranks where the main one has its log, ledger, saver and progress."""

from __future__ import annotations

from typing import Any


class Unheard:
    """Takes everything and keeps nothing; only the main rank writes."""

    last_saved: int | None = None

    def write(self, step: int, **fields: Any) -> None:
        """As a log."""

    def record(self, event: str, **fields: Any) -> None:
        """As a ledger."""

    def save(self, snapshot: Any, *, wait: bool = False) -> None:
        """As a saver of checkpoints."""

    def start(self, step: int, num_steps: int) -> None:
        """As a reporter."""

    def update(self, step: int, fields: dict[str, Any]) -> None:
        """As a reporter."""

    def sync(self) -> None:
        """As a log."""

    def rewind(self, step: int) -> None:
        """As a log."""

    def leave(self) -> None:
        """As a saver."""

    def wait(self) -> None:
        """As a saver."""

    def close(self) -> None:
        """As any of them."""


def unheard() -> Any:
    """In the place of any of these."""
    return Unheard()
