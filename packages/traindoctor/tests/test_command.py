"""The command line: exit codes, formats, choices, the old script."""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from traindoctor.cli import app
from traindoctor.errors import UserError
from traindoctor.registry import all_rules
from typer.testing import CliRunner

from .corpus_cases import load_cases
from .sarif_schema import problems

REPOSITORY = Path(__file__).parents[3]
BAD = (
    "import torch\nstate = torch.utils.checkpoint.checkpoint(path)\n"
    "with torch.cuda.amp.autocast():\n    opt = torch.optim.AdamW(p())\n"
)
GOOD = BAD.replace("cuda.amp.autocast()", 'amp.autocast("cuda")')


def _run(*words: object, expect: int | None = None) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if expect is not None:
        assert result.exit_code == expect, result.output
    return result.output


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(BAD)
    return tmp_path


def test_exit_codes(project: Path) -> None:
    assert "MEM001" in _run("check", project, expect=1)
    assert "no findings" in _run("check", project, "--select", "SHL", expect=0)
    with pytest.raises(UserError, match="no such file"):
        _run("check", project / "nowhere")
    with pytest.raises(UserError, match="is not a rule code"):
        _run("check", project, "--select", "XYZ")
    with pytest.raises(UserError, match="allowed are text, json, sarif, github, gitlab, junit"):
        _run("check", project, "--output-format", "xml")


@pytest.mark.parametrize("command", ["check", "fix", "undo", "history"])
def test_missing_path_is_wrong_usage(command: str, project: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        _run(command, project / "nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool]\ntraindoctor = 3\n", "a table"),
        ('[tool.traindoctr]\nignore = ["MEM"]\n', "did you mean"),
        ('[tool.traindoctor]\nignor = ["MEM"]\n', "did you mean 'ignore'"),
    ],
)
def test_misspelt_section_is_wrong_usage(text: str, message: str, project: Path) -> None:
    (project / "pyproject.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        _run("check", project)


def test_choices(project: Path) -> None:
    assert "OPT001" not in _run("check", project, "--select", "CKP")
    assert "OPT001" not in _run("check", project, "--ignore", "OPT")
    assert "MEM001" in _run("check", project, "--select", "checkpoint-without-use-reentrant")
    assert "no findings" in _run("check", project, "--min-severity", "error")
    assert "no findings" in _run("check", project, "--exclude", "train.py")


def test_settings_of_the_project(project: Path) -> None:
    section = '[tool.traindoctor]\nignore = ["OPT", "AMP"]\nper-file-ignores = {"train.py" = ["MEM001"]}\n'
    (project / "pyproject.toml").write_text(section)
    _run("check", project, expect=0)
    (project / "pyproject.toml").write_text('[tool.traindoctor]\nselct = ["OPT"]\n')
    with pytest.raises(UserError, match="did you mean 'select'"):
        _run("check", project)


def test_machine_formats(project: Path) -> None:
    found = json.loads(_run("check", project, "--output-format", "json"))["findings"]
    assert {(f["code"], f["line"], f["column"]) for f in found} == {
        ("MEM001", 2, 9),
        ("AMP001", 3, 6),
        ("OPT001", 4, 11),
    }
    sarif = json.loads(_run("check", project, "--output-format", "sarif"))
    run = sarif["runs"][0]
    assert sarif["version"] == "2.1.0"
    assert [r["ruleId"] for r in run["results"]] == ["MEM001", "AMP001", "OPT001"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["locations"][0]["physicalLocation"]["region"]["startLine"] in (2, 3, 4)
    github = _run("check", project, "--output-format", "github").splitlines()
    assert github[0].startswith("::warning file=")
    assert ",line=2,col=9," in github[0]


def test_sarif_keeps_to_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule once, below a folder and in files whose names need escaping."""
    for case in load_cases():
        if case.bad:
            case.write(tmp_path / "a folder" / case.name)
    (tmp_path / "c:1%20ü.py").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    for root in (".", str(tmp_path)):
        report = json.loads(_run("check", root, "--no-external", "--output-format", "sarif"))
        assert problems(report) == []
        run = report["runs"][0]
        ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
        assert len(ids) == len(set(ids)) > 90
        for result in run["results"]:
            assert ids[result["ruleIndex"]] == result["ruleId"]
            region = result["locations"][0]["physicalLocation"]["region"]
            start, end = (
                (region["startLine"], region["startColumn"]),
                (region["endLine"], region["endColumn"]),
            )
            assert start <= end
            place = urlsplit(result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"])
            assert (tmp_path / unquote(place.path)).is_file()


def test_the_schema_refuses_what_sarif_forbids(project: Path) -> None:
    good = json.loads(_run("check", project, "--output-format", "sarif"))
    region = good["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]
    assert problems(good) == []
    region["startColumn"] = 0
    good["runs"][0]["tool"]["driver"].pop("name")
    good["runs"][0]["results"][1]["severity"] = "high"
    assert len(problems(good)) == 3


def test_diff_writes_nothing_and_apply_can_be_undone(project: Path) -> None:
    output = _run("fix", project, "--diff", expect=1)
    assert '+with torch.amp.autocast("cuda"):' in output
    assert (project / "train.py").read_text() == BAD
    assert "AMP001" in _run("fix", project, "--apply", expect=0)
    assert (project / "train.py").read_text() == GOOD
    assert "nothing to fix; 2 more with --unsafe" in _run("fix", project, "--apply", expect=0)
    assert "applied" in _run("history", project, expect=0)
    assert "1 restored" in _run("undo", project, expect=0)
    assert (project / "train.py").read_text() == BAD
    with pytest.raises(UserError, match="nothing to undo"):
        _run("undo", project)


def test_diff_can_be_applied_by_patch(project: Path) -> None:
    diff = CliRunner().invoke(app, ["fix", str(project), "--unsafe"]).stdout
    subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=project, check=True)
    assert "use_reentrant=False" in (project / "train.py").read_text()


def test_unsafe_fixes_only_when_asked(project: Path) -> None:
    assert "use_reentrant" not in _run("fix", project)
    assert "use_reentrant=False" in _run("fix", project, "--unsafe")


def test_pages_can_be_written(tmp_path: Path) -> None:
    _run("rule", "--write", tmp_path, expect=0)
    assert {path.name for path in tmp_path.glob("*.md")} == {
        "index.md",
        *(f"{code}.md" for code in all_rules()),
    }
    assert "0 pages changed" in _run("rule", "--write", tmp_path, expect=0)


def test_rule_explains_itself() -> None:
    assert "138 days" in _run("rule", "NCC001", expect=0)
    assert "OPT001" in _run("rule", "unfused-optimizer")
    with pytest.raises(UserError, match="did you mean"):
        _run("rule", "NCC01")
    with pytest.raises(UserError, match="gitleaks"):
        _run("rule", "SEC001")
    assert len(_run("rule").splitlines()) == len(all_rules()) >= 45


def test_every_rule_is_fully_described() -> None:
    for rule in all_rules().values():
        for text in (rule.summary, rule.why, rule.effect, rule.source, rule.bad, rule.good):
            assert text, rule.code
        assert rule.name == rule.name.lower().replace(" ", "-")
    names = [rule.name for rule in all_rules().values()]
    assert len(set(names)) == len(names)


def test_import_of_the_command_is_light() -> None:
    code = "import sys, traindoctor.cli; print([m for m in ('torch', 'libcst', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_closed_pipe_is_no_error_of_the_program(project: Path) -> None:
    for number in range(300):
        (project / f"m{number}.py").write_text(BAD)  # more text than a pipe holds
    program = "from traindoctor.cli import main; main()"
    command = [sys.executable, "-c", program, "check", str(project), "--no-external"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "m0.py" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""


def _script(*words: object, answer: str = "") -> subprocess.CompletedProcess[str]:
    environment = dict(
        os.environ,
        PYTHON=sys.executable,
        PATH="/usr/bin:/bin",
        PYTHONPATH=str(REPOSITORY / "packages" / "traindoctor" / "src"),
    )
    command = ["bash", str(REPOSITORY / "scripts" / "apply_critical_fixes.sh"), *map(str, words)]
    return subprocess.run(command, input=answer, capture_output=True, text=True, env=environment, check=False)


def test_old_script_asks_applies_and_says_how_to_roll_back(project: Path) -> None:
    refused = _script(project, answer="n\n")
    assert refused.returncode == 1
    assert "nothing was changed" in refused.stdout
    assert (project / "train.py").read_text() == BAD
    done = _script(project, "--yes")
    assert done.returncode == 0, done.stderr
    assert (project / "train.py").read_text() == GOOD
    assert f"roll back with: traindoctor undo {project}" in done.stdout
    _run("undo", project, expect=0)
    assert (project / "train.py").read_text() == BAD
    assert _script(project, "--wrong").returncode == 2
    assert _script(project / "nowhere").returncode == 2
