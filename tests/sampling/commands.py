"""Calls of the command line on a small random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mmldlm.cli.main import app
from mmldlm.errors import UserError
from mmldlm.preparation.encoders import SentenceEncoder
from tests.tiny_models import FakeEncoder, make_run, make_store


def use_fake_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder of the model is one that costs nothing."""
    monkeypatch.setattr(
        SentenceEncoder, "reopen", classmethod(lambda cls, spec, device="auto": FakeEncoder())
    )


def make_small_run(folder: Path) -> Path:
    """A run beside its store."""
    return make_run(folder / "run", make_store(folder / "store"))


def call(command: str, *words: Any) -> Result:
    """`mmldlm COMMAND WORDS...`"""
    return CliRunner().invoke(app, [command, *(str(word) for word in words)])


def samples(command: str, *words: Any) -> list[dict[str, Any]]:
    """The records of `--json`."""
    return report(command, *words)["samples"]


def report(command: str, *words: Any) -> dict[str, Any]:
    """The object of `--json`."""
    result = call(command, *words, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout.splitlines()[-1])


def mistake(command: str, *words: Any) -> str:
    """The line that a user reads."""
    result = call(command, *words)
    assert isinstance(result.exception, UserError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)
