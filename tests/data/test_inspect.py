"""`mmldlm data inspect` shows what a store holds, and nothing that a terminal would obey."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

import mmldlm
from mmldlm.cli.data import app

TEXTS = [
    "a \x1b[31mred\x1b[0m one",
    "a \x1b]0;title\x07b\x9b2Jc\x1bcd",
    "left\u202eright",
    "line\r\nbreak",
    "\U0001f469\u200d\U0001f680",
]


def test_inspect_shows_no_control_sequences(tmp_path: Path) -> None:
    store = mmldlm.prepare(
        TEXTS, tmp_path / "s", encoder=lambda texts: [[1.0 + len(text)] for text in texts], validation=0.0
    )
    shown = CliRunner().invoke(app, ["inspect", str(store.path)]).output
    assert not {"\x1b", "\x9b", "\x07", "\r", "\u202e"} & set(shown)
    for line in ("- a red one", "- a bcd", "- leftright", "- line break", "\U0001f469\u200d\U0001f680"):
        assert line in shown
    as_json = CliRunner().invoke(app, ["inspect", str(store.path), "--json"]).output
    assert json.loads(as_json)["examples"] == TEXTS
