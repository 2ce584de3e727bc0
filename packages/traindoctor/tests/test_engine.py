"""Reading a tree: speed, odd files, links, ignores, external tools."""

import contextlib
import cProfile
import os
import pstats
import textwrap
from pathlib import Path

import pytest
from traindoctor import engine
from traindoctor.engine import audit
from traindoctor.examination import examine
from traindoctor.options import load_options
from traindoctor.registry import all_rules
from traindoctor.types import Kind

from .corpus_cases import load_cases


def _codes(root: Path, **choices: object) -> list[str]:
    return [f.code for f in audit(root, load_options(root, external=False, **choices)).findings]  # type: ignore[arg-type]


def test_odd_files_do_not_stop_the_audit(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("print 'hello'\n")
    (tmp_path / "binary.py").write_bytes(b"\0\1\2")
    (tmp_path / "wrong.py").write_bytes(b"x = '\xff\xfe'\n")
    (tmp_path / "cookie.py").write_bytes(b"# coding: no-such-codec\n")
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "deep.py").write_text("x = " + "(" * 300 + "1" + ")" * 300 + "\n")
    (tmp_path / "huge.py").write_text("x = 1\n" * 400_000)
    (tmp_path / "chain.py").write_text("x = " + "+".join(["1"] * 5000) + "\n")
    (tmp_path / "notebook.ipynb").write_text("{}")
    (tmp_path / "template.yaml").write_text("{{ x }}\n- ]")
    (tmp_path / "bad.sh").write_text("echo 'open\n")
    (tmp_path / "cr.py").write_bytes(b"import torch\rx = torch.utils.checkpoint.checkpoint(p)\r")
    (tmp_path / "good.py").write_text("import torch\nx = torch.utils.checkpoint.checkpoint(p)\n")
    found = audit(tmp_path, load_options(tmp_path, external=False)).findings
    assert {f.path for f in found if f.code == "MEM001"} >= {"good.py"}
    unread = {f.path for f in found if f.code == "DOC001"}
    assert {"two.py", "binary.py", "wrong.py", "cookie.py", "bad.sh", "huge.py", "template.yaml"} <= unread


def test_files_of_macos_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "._train.py").write_bytes(b"\0\5\x16\7Mac OS X")
    assert audit(tmp_path, load_options(tmp_path, external=False)).files == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "train.py").write_text("import torch\nx = torch.utils.checkpoint.checkpoint(p)\n")
    root = tmp_path / "root"
    root.mkdir()
    (root / "loop").symlink_to(root)
    (root / "away").symlink_to(outside)
    (root / "file.py").symlink_to(outside / "train.py")
    (root / "gone.py").symlink_to(root / "nowhere")
    assert _codes(root) == []


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert _codes(tmp_path) == ["DOC001"]


def test_ignores_cover_lines_and_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import torch\n"
        "a = torch.utils.checkpoint.checkpoint(p)  # doctor: ignore[MEM001] ours\n"
        "# doctor: ignore[MEM] ours too\n"
        "b = torch.utils.checkpoint.checkpoint(\n    p,\n)\n"
        "c = torch.utils.checkpoint.checkpoint(\n    p,\n)  # doctor: ignore[MEM001] at the end\n"
        "d = torch.utils.checkpoint.checkpoint(p)\n"
    )
    found = audit(tmp_path, load_options(tmp_path, external=False)).findings
    assert [(f.code, f.span.line) for f in found] == [("MEM001", 10)]


def test_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in load_cases():
        if case.bad:
            case.write(tmp_path / case.name)
    alone = audit(tmp_path, load_options(tmp_path, external=False)).findings
    monkeypatch.setattr(engine, "PARALLEL_FROM", 10**9)
    assert audit(tmp_path, load_options(tmp_path, external=False)).findings == alone


def _work(text: str) -> int:
    """Function calls that reading one file takes: a measure of effort that no busy machine changes."""
    profile = cProfile.Profile()
    profile.enable()
    found = examine("train.py", Kind.PYTHON, text.encode(), frozenset(all_rules())).findings
    profile.disable()
    assert len({finding.code for finding in found}) > 40
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined,no-any-return]


def test_effort_grows_with_the_length_of_a_file_and_not_faster() -> None:
    bodies = [case.files[0][1] for case in load_cases() if case.bad and case.files[0][0].endswith(".py")]
    parts = []
    for number, body in enumerate(bodies):
        part = f"def part_{number}():\n" + textwrap.indent(body, "    ")
        with contextlib.suppress(SyntaxError):
            compile(part, "part", "exec")
            parts.append(part)
    half = "\n".join(parts)
    _work(half)  # what is computed once
    assert _work(half * 4) < 2.5 * _work(half * 2)


def test_external_tools_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/bash\ncd $X\npython train.py\n")
    tools = tmp_path / "bin"
    tools.mkdir()
    tool = tools / "shellcheck"
    place = '"file":"./run.sh","line":2,"endLine":2,"column":1,"endColumn":6,"level":"warning"'
    tool.write_text(
        "#!/bin/sh\n"
        f"""echo '[{{{place},"code":2164,"message":"Use cd"}},'\n"""
        f"""echo '{{{place},"code":2154,"message":"X is unset"}}]'\n"""
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    found = {f.code: f.origin for f in audit(tmp_path, load_options(tmp_path)).findings}
    assert found["SC2154"] == "shellcheck"
    assert found["SC2164"] == "shellcheck"
    assert "SC2154" not in {
        f.code for f in audit(tmp_path, load_options(tmp_path, ignore=["SC2154"])).findings
    }
