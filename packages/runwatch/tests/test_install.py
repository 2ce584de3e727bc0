"""The distribution in an environment of its own: installed from this folder, started, quick."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new virtual environment that holds runwatch and what it requires, nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    install = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        PACKAGE,
    ]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(install, capture_output=True, text=True, env=clean, timeout=240, check=False)
    if "No matching distribution" in done.stderr or "Could not fetch" in done.stderr:
        pytest.skip("no package index can be reached from here")
    assert done.returncode == 0, done.stderr
    return folder / "bin", clean


def run(environment, *words):
    folder, clean = environment
    return subprocess.run(
        [folder / words[0], *words[1:]], capture_output=True, text=True, env=clean, check=False
    )


def test_it_needs_only_three_packages_and_judges_a_log(environment, tmp_path):
    names = run(environment, "python", "-m", "pip", "list", "--format", "freeze").stdout.lower()
    assert not {"torch", "numpy", "mmldlm", "pyarrow"} & {line.split("==")[0] for line in names.splitlines()}
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {step} loss {2 + 1 / step:.4f}\n" for step in range(1, 40)))
    done = run(environment, "runwatch", "--once", str(log))
    assert done.returncode == 0, done.stderr
    assert "train: fine" in done.stdout
    mistake = run(environment, "runwatch", "--once", str(tmp_path / "missing.log"))
    assert (mistake.returncode, mistake.stdout) == (2, "")
    assert mistake.stderr.startswith("runwatch: error: ")
    assert mistake.stderr.count("\n") == 1


def test_help_answers_at_once(environment):
    """In 0.3 s, or on a slow machine in a few times what the library of its command line takes."""

    def least(*words):
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            done = run(environment, *words)
            assert done.returncode == 0, done.stderr
            seconds.append(time.perf_counter() - began)
        return min(seconds), done.stdout

    seconds, output = least("runwatch", "--help")
    assert "--once" in output
    assert seconds < 0.3 or seconds < 4 * least("python", "-c", "import typer")[0]


def test_the_script_runs_from_the_checkout_and_reports_what_is_missing(environment, tmp_path):
    script = str(PACKAGE.parents[1] / "scripts" / "monitor_training.py")
    if not Path(script).exists():
        pytest.skip("not a checkout of the whole project")
    assert "Exit codes" in run(environment, "python", script, "--help").stdout
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=120
    )
    bare = subprocess.run(
        [tmp_path / "bare" / "bin" / "python", script, "--help"], capture_output=True, text=True, env=environment[1],
        check=False,
    )  # fmt: skip
    assert bare.returncode != 0
    assert bare.stderr.count("\n") == 1
    assert "pip install" in bare.stderr
