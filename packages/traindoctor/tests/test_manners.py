"""What people expect of a linter: several paths, standard input, .gitignore, baseline, ignores, formats, cache."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from traindoctor import cache as cache_module
from traindoctor.cache import Cache
from traindoctor.cli import app
from traindoctor.engine import audit
from traindoctor.errors import UserError
from traindoctor.options import load_options
from typer.testing import CliRunner, Result

LOAD = "import torch\nstate = torch.utils.checkpoint.checkpoint(path)\n"
AMP = "import torch\nwith torch.cuda.amp.autocast():\n    y = model(x)\n"


def _run(*words: object, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def _places(*words: object) -> set[tuple[str, str, int]]:
    report = json.loads(
        _run("check", *words, "--output-format", "json", "--no-cache", "--no-external").stdout
    )
    return {(f["code"], f["path"], f["line"]) for f in report["findings"]}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "one.py").write_text(LOAD)
    (tmp_path / "b" / "two.py").write_text(LOAD)
    (tmp_path / "three.py").write_text(LOAD)
    return tmp_path


def test_several_paths_are_read_once_each(project: Path) -> None:
    expected = {("MEM001", "a/one.py", 2), ("MEM001", "b/two.py", 2)}
    assert _places(project / "a", project / "b", project / "a" / "one.py") == expected
    done = _run("fix", project / "a", project / "b", "--apply", "--unsafe")
    assert f"traindoctor undo {project}" in done.stdout
    assert "use_reentrant=False" in (project / "b" / "two.py").read_text()
    assert _run("undo", project).exit_code == 0
    assert (project / "b" / "two.py").read_text() == LOAD


def test_standard_input_is_checked_and_fixed(project: Path) -> None:
    name = project / "new.py"
    checked = _run("check", "-", "--stdin-filename", name, "--no-cache", stdin=AMP)
    assert checked.exit_code == 1
    assert "new.py:2:6: AMP001" in checked.stdout
    fixed = _run("fix", "-", "--stdin-filename", name, stdin=AMP)
    assert fixed.stdout == AMP.replace("cuda.amp.autocast()", 'amp.autocast("cuda")')
    assert fixed.exit_code == 0
    assert not name.exists()
    assert _run("fix", "-", "--stdin-filename", name, stdin=LOAD).stdout == LOAD
    with pytest.raises(UserError, match="--stdin-filename"):
        _run("check", "-", stdin=AMP)


def test_a_part_is_judged_with_the_rest_of_the_project_in_view(project: Path) -> None:
    train = "from torch.nn.parallel import DistributedDataParallel as DDP\nfrom steps import clear\nmodel = DDP(net)\n"
    (project / "train.py").write_text(train)
    (project / "steps.py").write_text("def clear(p):\n    return p.grad\n")
    assert "gradient_as_bucket_view" not in _run("fix", project / "train.py").stdout
    assert "gradient_as_bucket_view" in _run("fix", project / "train.py", "--unsafe").stdout
    (project / "steps.py").write_text("def clear(p):\n    return p\n")
    assert "gradient_as_bucket_view" in _run("fix", project / "train.py").stdout


def test_what_git_ignores_is_left_out(project: Path) -> None:
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / ".gitignore").write_text("b/\nthree.py\n")
    assert _places(project) == {("MEM001", "a/one.py", 2)}
    assert len(_places(project, "--no-respect-gitignore")) == 3
    assert _places(project / "b") == {("MEM001", "two.py", 2)}, "asked for by name"
    assert _places(project / "three.py") == {("MEM001", "three.py", 2)}


def test_patterns_are_relative_to_pyproject(project: Path) -> None:
    ignores = '{"a/*" = ["MEM001"], "three.py" = ["MEM"]}'
    section = f'[tool.traindoctor]\nexclude = ["b/two.py"]\nper-file-ignores = {ignores}\n'
    (project / "pyproject.toml").write_text(section)
    for path in (project, project / "a", project / "b", project / "three.py"):
        assert _places(path) == set()


def test_baseline_hides_what_is_known_and_no_more(project: Path) -> None:
    known = project / "known.json"
    assert _run("check", project, "--write-baseline", known, "--no-cache").exit_code == 0
    assert _run("check", project, "--baseline", known, "--no-cache").exit_code == 0
    (project / "three.py").write_text("\n\n" + LOAD + "other = torch.utils.checkpoint.checkpoint(path)\n")
    found = json.loads(
        _run("check", project, "--baseline", known, "--output-format", "json", "--no-cache").stdout
    )["findings"]
    assert [(f["path"], f["line"]) for f in found] == [("three.py", 5)]
    known.write_text("{}")
    with pytest.raises(UserError, match="not a baseline"):
        _run("check", project, "--baseline", known)
    with pytest.raises(UserError, match="--write-baseline"):
        _run("check", project, "--baseline", project / "nowhere")


def test_ignores_are_added_where_they_change_nothing_and_can_be_undone(tmp_path: Path) -> None:
    files = {
        "plain.py": LOAD,
        "call.py": "import torch\nstate = torch.utils.checkpoint.checkpoint(\n    path,\n)\n",
        "string.py": 'import torch\nx = f("""a\n""", torch.utils.checkpoint.checkpoint(p))\n',
        "run.sh": "export NCCL_DEBUG=INFO\nexport \\\n  NCCL_P2P_DISABLE=1\n",
        "job.yaml": "env:\n  NCCL_DEBUG: INFO\n",
        "Dockerfile": "FROM a:1\nENV NCCL_DEBUG=INFO\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = _places(tmp_path)
    assert len(before) == 7
    _run("check", tmp_path, "--add-ignore", "known since 2024", "--no-cache")
    assert "# doctor: ignore[MEM001] known since 2024" in (tmp_path / "plain.py").read_text()
    left = _places(tmp_path)
    assert len(left) <= 1, left  # a continued line of a script has no place for a comment
    for name in files:
        if name.endswith(".py"):
            compile((tmp_path / name).read_text(), name, "exec")
    _run("undo", tmp_path)
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_exit_zero(project: Path) -> None:
    assert _run("check", project, "--exit-zero", "--no-cache").exit_code == 0


def test_colour_only_when_asked(project: Path) -> None:
    assert "\x1b[" in _run("check", project, "--color", "always", "--no-cache").stdout
    assert "\x1b[" not in _run("check", project, "--no-cache").stdout
    with pytest.raises(UserError, match="auto, always, never"):
        _run("check", project, "--color", "blue")


def test_gitlab_and_junit(project: Path) -> None:
    entries = json.loads(_run("check", project, "--output-format", "gitlab", "--no-cache").stdout)
    assert {entry["location"]["lines"]["begin"] for entry in entries} == {2}
    assert len({entry["fingerprint"] for entry in entries}) == 3
    tree = ElementTree.fromstring(_run("check", project, "--output-format", "junit", "--no-cache").stdout)
    assert tree.get("tests") == "3"
    assert [suite.get("failures") for suite in tree] == ["1", "1", "1"]


def test_sarif_carries_fixes_that_give_the_same_text(project: Path) -> None:
    (project / "three.py").write_text(AMP)
    report = json.loads(_run("check", project / "three.py", "--output-format", "sarif", "--no-cache").stdout)
    (result,) = report["runs"][0]["results"]
    (replacement,) = result["fixes"][0]["artifactChanges"][0]["replacements"]
    region, lines = replacement["deletedRegion"], AMP.splitlines(keepends=True)
    assert region["startLine"] == region["endLine"] == 2
    line = lines[1]
    new = (
        line[: region["startColumn"] - 1]
        + replacement["insertedContent"]["text"]
        + line[region["endColumn"] - 1 :]
    )
    assert new == 'with torch.amp.autocast("cuda"):\n'


def test_cache_gives_the_same_and_sees_changes(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_RECENT_SECONDS", 0.0)
    folder, options = project.parent / "cache", load_options(project, external=False)

    def run() -> tuple[list[str], int]:
        cache = Cache(folder, project)
        examined: list[str] = []
        monkeypatch.setattr(
            cache,
            "put",
            lambda found, *rest, put=cache.put: (examined.append(found.relative), put(found, *rest)),
        )
        report = audit(project, options, cache=cache)
        cache.save()
        return [f"{f.code} {f.path}:{f.where}" for f in report.findings], len(examined)

    first = run()
    assert first[1] == 3
    assert run() == (first[0], 0)
    (project / "three.py").write_text(LOAD + LOAD)
    assert run()[1] == 1
    next(folder.iterdir()).write_bytes(b"broken")
    assert len(run()[0]) == 4


def test_cache_folder_lies_outside_the_project(project: Path) -> None:
    words = [sys.executable, "-m", "traindoctor", "check", str(project), "--no-external"]
    home = project.parent / "home"
    environment = {"XDG_CACHE_HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    before = {path.name for path in project.iterdir()}
    for path in project.rglob("*.py"):
        os.utime(path, (1e9, 1e9))
    subprocess.run(words, env=environment, capture_output=True, check=False)
    assert {path.name for path in project.iterdir()} == before
    assert list((home / "traindoctor").iterdir())
