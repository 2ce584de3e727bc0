"""Which files below a root are read, and as what."""

from __future__ import annotations

import fnmatch
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from traindoctor.errors import UserError
from traindoctor.types import Kind

TRANSACTION_FOLDER = ".traindoctor"
SKIPPED_FOLDERS = frozenset(
    {
        TRANSACTION_FOLDER,
        ".git",
        ".hg",
        ".svn",
        ".venv",
        "venv",
        ".env",
        ".tox",
        ".nox",
        ".eggs",
        "node_modules",
        "__pycache__",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".ipynb_checkpoints",
        "site-packages",
        "wandb",
        "build",
        "dist",
    }
)
"""Never entered below the root; a root with such a name is read."""
PROJECT_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""What the top folder of a project holds."""
_SUFFIXES = {
    ".py": Kind.PYTHON,
    ".ipynb": Kind.NOTEBOOK,
    ".sh": Kind.SHELL,
    ".bash": Kind.SHELL,
    ".slurm": Kind.SHELL,
    ".sbatch": Kind.SHELL,
    ".sub": Kind.SHELL,
    ".yaml": Kind.YAML,
    ".yml": Kind.YAML,
    ".env": Kind.ENV,
    ".dockerfile": Kind.DOCKERFILE,
}


@dataclass(frozen=True)
class Found:
    """A file to read: where it is and its path relative to the root."""

    absolute: Path
    relative: str
    kind: Kind


def kind_of(path: Path) -> Kind | None:
    """The kind of a file by its name, or by its first line where it has no suffix."""
    name = path.name
    if name.startswith("._"):
        return None  # what macOS remembers about a file
    if name.startswith(("Dockerfile", "Containerfile")) and path.suffix not in (
        ".md",
        ".txt",
        ".j2",
        ".jinja",
    ):
        return Kind.DOCKERFILE
    if name == ".env" or name.startswith(".env."):
        return Kind.ENV
    if path.suffix.lower() in _SUFFIXES:
        return _SUFFIXES[path.suffix.lower()]
    if path.suffix:
        return None
    try:
        with path.open("rb") as handle:
            first = handle.readline(200)
    except OSError:
        return None
    if first.startswith(b"#!") and any(shell in first for shell in (b"bash", b"/sh", b"zsh", b"env sh")):
        return Kind.SHELL
    return Kind.PYTHON if first.startswith(b"#!") and b"python" in first else None


def discover(
    root: Path, exclude: tuple[str, ...] = (), *, respect_gitignore: bool = True
) -> tuple[Path, list[Found]]:
    """The folder that paths are relative to, and the files to read, sorted.

    What git ignores is left out, unless it is the root itself.

    Links are not followed below the root, so that no file is read twice, a loop cannot trap the walk and nothing
    outside the root is ever edited. A link that is given as the root itself is read at its target.
    """
    if not root.exists():
        raise UserError(f"{root}: no such file or folder; give a file or folder to audit")
    if root.is_file():
        return root.parent, [named_file(root)]
    found = []
    ignored = _ignored_by_git(root) if respect_gitignore else set()
    for path in _walk(root, ignored):
        relative = path.relative_to(root).as_posix()
        if any(
            fnmatch.fnmatch(relative, pattern) or relative.startswith(pattern.rstrip("/") + "/")
            for pattern in exclude
        ):
            continue
        kind = kind_of(path)
        if kind is not None:
            found.append(Found(path, relative, kind))
    return root, sorted(found, key=lambda file: file.relative)


def named_file(path: Path) -> Found:
    """A file that is given itself, which need not exist where its content comes from elsewhere."""
    kind = kind_of(path)
    if kind is None:
        raise UserError(
            f"{path}: not a Python, notebook, shell, SLURM, YAML, Dockerfile or .env file; nothing to audit"
        )
    return Found(path, path.name, kind)


def discover_all(
    paths: Sequence[Path], exclude: tuple[str, ...] = (), *, respect_gitignore: bool = True
) -> tuple[Path, list[Found]]:
    """The files below several paths, relative to the folder that holds all of them."""
    if len(paths) == 1:
        return discover(paths[0], exclude, respect_gitignore=respect_gitignore)
    parts = [discover(path, exclude, respect_gitignore=respect_gitignore) for path in paths]
    common = os.path.commonpath([folder.resolve() for folder, _ in parts])
    absolute = any(path.is_absolute() for path in paths)
    root = Path(common) if absolute else Path(os.path.relpath(common))
    unique = {found.absolute.resolve(): found.kind for _, files in parts for found in files}
    found = [
        Found(root / path.relative_to(common), path.relative_to(common).as_posix(), k)
        for path, k in unique.items()
    ]
    return root, sorted(found, key=lambda file: file.relative)


def project_around(root: Path, *, whole: bool) -> Path | None:
    """The folder of the project that the root is only a part of, or None where the root is a project or in none."""
    start = root.resolve()
    for folder in [start, *start.parents]:
        if any((folder / mark).exists() for mark in PROJECT_MARKS):
            return None if folder == start and whole else folder
    return None


def _ignored_by_git(root: Path) -> set[str]:
    """Files and folders below the root that git ignores, as git itself lists them; empty without git."""
    command = ["git", "-C", str(root), "ls-files", "-o", "-i", "--exclude-standard", "--directory", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return set()
    if done.returncode:
        return set()
    names = {name for name in done.stdout.decode("utf-8", "surrogateescape").split("\0") if name}
    return set() if "./" in names else names  # the root itself is ignored, and asked for all the same


def _walk(root: Path, ignored: set[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, followlinks=False):
        below = "" if (here := os.path.relpath(folder, root).replace(os.sep, "/")) == "." else f"{here}/"
        folders[:] = sorted(
            name for name in folders if name not in SKIPPED_FOLDERS and f"{below}{name}/" not in ignored
        )
        for name in names:
            path = Path(folder, name)
            if f"{below}{name}" not in ignored and path.is_file() and not path.is_symlink():
                yield path
