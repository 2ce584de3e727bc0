"""Imports point one way, and the command line answers without loading the heavy parts."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "mmldlm"
TIERS = [
    {
        "errors",
        "latents",
        "config",
        "randomness",
        "layout",
        "types",
        "runtime",
        "durable",
        "json_lines",
        "statistics",
        "tables",
        "pictures",
        "pages",
        "plain_values",
        "__init__",
    },
    {"corruption", "model", "data"},
    {"objective", "checkpoint", "metrics", "sampling", "run_folder", "distributed"},
    {"training", "evaluation", "preparation"},
    {"api"},
    {"benchmark", "migrate"},
    {"ablation"},
    {"cli"},
    {"__main__"},
]
TIER_OF = {part: number for number, tier in enumerate(TIERS) for part in tier}
MODULES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_parts(path: Path) -> set[str]:
    """Parts of the package that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mmldlm":
            words = node.module.split(".")
            found |= {words[1]} if len(words) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("mmldlm.")}
    return found & TIER_OF.keys()


def test_every_part_has_a_place():
    assert {part_of(path) for path in MODULES} - TIER_OF.keys() == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    here = part_of(path)
    for other in imported_parts(path) - {here}:
        if TIER_OF[here] == 0:
            assert TIER_OF[other] == 0, f"{path} imports {other}"
        elif here in ("checkpoint", "sampling", "run_folder", "metrics", "objective", "cli"):
            assert TIER_OF[other] <= TIER_OF[here], f"{path} imports {other}"
        else:
            assert TIER_OF[other] < TIER_OF[here], f"{path} imports {other}"


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["prepare"],
        ["data"],
        ["train"],
        ["encode"],
        ["decode"],
        ["generate"],
        ["infill"],
        ["interpolate"],
        ["paraphrase"],
        ["eval"],
        ["compare"],
        ["export"],
        ["doctor"],
        ["benchmark"],
        ["ablate"],
        ["monitor"],
    ],
)
def test_help_answers_without_torch(command):
    code = (
        "import sys\nfrom mmldlm.cli.main import app\n"
        f"try:\n    app({[*command, '--help']!r})\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'datasets', 'matplotlib', 'libcst'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_only_the_command_line_prints_or_exits():
    for path in MODULES:
        if part_of(path) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("print", "exit", "sys.exit", "quit"), f"{path}:{node.lineno}"
