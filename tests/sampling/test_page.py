"""The Python of docs/sampling.md runs as written, and its commands exist with their options."""

import re
import shlex
from pathlib import Path

import mmldlm
from tests.sampling.commands import call
from tests.tiny_models import FakeEncoder

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()


def test_python_blocks(example_model, monkeypatch):
    model = example_model["model"]
    model.encoder = FakeEncoder()
    monkeypatch.setattr(mmldlm, "load", lambda source: model)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(block, "docs/sampling.md", "exec"), names)
    assert len(names["tokens"][0]) == 6
    assert names["again"].shape == (1, 1, 4)


def test_commands_and_options_exist():
    lines = re.findall(r"^mmldlm .*$", PAGE.split("```bash")[1].split("```")[0], flags=re.MULTILINE)
    assert len(lines) >= 9
    for line in lines:
        command, *words = shlex.split(line, comments=True)[1:]
        known = call(command, "--help").stdout
        assert all(word in known for word in words if word.startswith("-")), line
