"""The distribution by itself: installed into a clean environment, it runs and brings no torch."""

import ast
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from traindoctor import __version__

PACKAGE = Path(__file__).parents[1]


def test_nothing_imports_the_trainer() -> None:
    for path in (PACKAGE / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in ("mmldlm", "runwatch") for name in names), path


@pytest.mark.timeout(300)
def test_clean_installation_checks_fixes_and_undoes(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    folder = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*words: str, expect: int) -> str:
        done = subprocess.run(
            words, capture_output=True, text=True, env=clean, cwd=tmp_path, check=False, timeout=240
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    source = tmp_path / "source"
    subprocess.run(["cp", "-r", str(PACKAGE), str(source)], check=True)  # a build writes into the folder
    run(str(folder / "python"), "-m", "pip", "install", "--quiet", str(source), expect=0)
    installed = run(str(folder / "python"), "-m", "pip", "list", expect=0)
    assert "libcst" in installed
    assert "torch" not in installed.replace("torchfix", "")
    program = str(folder / "traindoctor")
    assert run(program, "--version", expect=0) == f"traindoctor {__version__}\n"
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "run.sh").write_text("export TORCH_NCCL_ENABLE_MONITORING=0\n")
    assert "NCC005" in run(program, "check", "p", expect=1)
    assert "NCC005" in run(str(folder / "python"), "-m", "traindoctor", "rule", "NCC005", expect=0)
    wrong = run(program, "check", "nowhere", expect=2)
    assert wrong.startswith("traindoctor: error: nowhere: no such file")
    assert wrong.count("\n") == 1
    assert "needs torch" in run(program, "probe", "a:b", expect=2)


def test_python_of_the_tests_runs_the_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "traindoctor", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"traindoctor {__version__}\n"
