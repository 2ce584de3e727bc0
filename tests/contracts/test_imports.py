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
        "trackers",
        "statistics",
        "reports",
        "untrusted",
        "__init__",
    },
    {"corruption", "model", "data"},
    {"objective", "checkpoint", "metrics", "sampling", "run_folder", "distributed"},
    {"training", "evaluation", "preparation"},
    {"api"},
    {"benchmark", "launch", "migrate", "service"},
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


def test_help_answers_without_torch():
    commands = (
        "", "prepare", "data", "train", "launch", "selftest", "encode", "decode", "generate", "infill", "interpolate",
        "paraphrase", "eval", "compare", "export", "doctor", "benchmark", "validate", "ablate", "monitor",
    )  # fmt: skip
    code = (
        "import sys\nfrom mmldlm.cli.main import app\n"
        f"for command in {commands!r}:\n"
        "    try:\n        app([*command.split(), '--help'])\n"
        "    except SystemExit as stop:\n        assert not stop.code, command\n"
        "    heavy = {'torch', 'transformers', 'pyarrow', 'datasets', 'matplotlib', 'libcst'} & set(sys.modules)\n"
        "    assert not heavy, (command, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == len(commands)


def test_only_the_command_line_prints_or_exits():
    for path in MODULES:
        if part_of(path) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("print", "exit", "sys.exit", "quit"), f"{path}:{node.lineno}"


def module_name(path: Path) -> str:
    parts = ("mmldlm", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, names: set[str]) -> set[str]:
    """Modules of the package that a module imports anywhere, `TYPE_CHECKING` included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (whole & names) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & names - {module_name(path)}


def test_no_modules_import_each_other_in_a_circle():
    paths = {module_name(path): path for path in MODULES}
    waiting = {name: imported_modules(path, set(paths)) for name, path in paths.items()}
    while free := [name for name, others in waiting.items() if not others & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert sorted(waiting) == [], "these import each other, or what does"


def test_no_command_function_is_long():
    for path in (SOURCE / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= 60, f"{path.name}: {node.name} has {lines} lines"


@pytest.mark.parametrize("package", ["runwatch", "traindoctor"])
def test_the_packages_need_neither_mmldlm_nor_torch(package):
    """torch only inside functions that are asked about it, such as a probe."""
    for path in (SOURCE.parents[1] / "packages" / package / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            roots = {name.split(".")[0] for name in names}
            assert "mmldlm" not in roots, path
            assert "torch" not in roots or node not in tree.body, path
