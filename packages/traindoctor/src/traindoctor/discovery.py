"""Which files below a root are read, and as what."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
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


def discover(root: Path, exclude: tuple[str, ...] = ()) -> tuple[Path, list[Found]]:
    """The folder that paths are relative to, and the files to read, sorted.

    Links are not followed below the root, so that no file is read twice, a loop cannot trap the walk and nothing
    outside the root is ever edited. A link that is given as the root itself is read at its target.
    """
    if not root.exists():
        raise UserError(f"{root}: no such file or folder; give a file or folder to audit")
    if root.is_file():
        kind = kind_of(root)
        if kind is None:
            raise UserError(
                f"{root}: not a Python, notebook, shell, SLURM, YAML, Dockerfile or .env file; nothing to audit"
            )
        return root.parent, [Found(root, root.name, kind)]
    found = []
    for path in _walk(root):
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


def ignored_by_git(root: Path, relative: str) -> bool:
    """Whether a .gitignore in the file's folder or above, up to the repository's top, names the file."""
    path = (root / relative).resolve()
    for folder in path.parents:
        try:
            lines = (folder / ".gitignore").read_text("utf-8", "replace").splitlines()
        except OSError:
            lines = []
        patterns = [line.strip().removeprefix("**/").lstrip("/") for line in lines]
        inside = path.relative_to(folder).as_posix()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in (path.name, inside)):
            return True
        if (folder / ".git").exists():
            return False
    return False


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path
