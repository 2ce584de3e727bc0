"""The examples run as they stand, with fewer steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load_example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of an example, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_own_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_right = load_example("own_encoder", monkeypatch).main(tmp_path, steps=40)
    assert share_right > 0.6
