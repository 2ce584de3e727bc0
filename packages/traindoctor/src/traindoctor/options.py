"""Which rules run where: command-line choices over `[tool.traindoctor]` in the audited project's pyproject.toml."""

from __future__ import annotations

import difflib
import fnmatch
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traindoctor.errors import UserError
from traindoctor.registry import all_rules, resolve_codes
from traindoctor.types import Finding, Severity

_KEYS = ("select", "ignore", "exclude", "per-file-ignores", "min-severity", "external", "respect-gitignore")


@dataclass(frozen=True)
class Options:
    """What to look for."""

    codes: frozenset[str]
    """Rules that are on."""
    ignored: frozenset[str] = frozenset()
    """Codes and prefixes that are off, foreign ones included."""
    exclude: tuple[str, ...] = ()
    per_file: tuple[tuple[str, frozenset[str]], ...] = ()
    min_severity: Severity = Severity.INFO
    external: bool = True
    """Whether shellcheck and torchfix are asked where they are installed."""
    selected: frozenset[str] = field(default_factory=frozenset)
    """What `select` named, foreign codes included; empty: everything."""
    respect_gitignore: bool = True
    """Whether files that git ignores are left out."""
    prefix: str = ""
    """From the folder of pyproject.toml to the audited root: patterns of the settings are relative to the former."""

    def wants(self, finding: Finding) -> bool:
        """Whether a finding is to be shown."""
        order = list(Severity)
        if order.index(finding.severity) > order.index(self.min_severity):
            return False
        if finding.origin != "doctor":
            named = not self.selected or any(finding.code.startswith(code) for code in self.selected)
            here = {
                code for pattern, codes in self.per_file for code in codes if self._matches(finding, pattern)
            }
            return named and not any(finding.code.startswith(code) for code in self.ignored | here)
        if finding.code not in self.codes:
            return False
        return not any(
            finding.code in codes and self._matches(finding, pattern) for pattern, codes in self.per_file
        )

    def _matches(self, finding: Finding, pattern: str) -> bool:
        """Whether a pattern means the file: its path from pyproject.toml, or its bare name."""
        path = f"{self.prefix}{finding.path}"
        name = "/" not in pattern and fnmatch.fnmatch(path.rsplit("/", 1)[-1], pattern)
        return name or fnmatch.fnmatch(path, pattern) or path.startswith(pattern.rstrip("/") + "/")


def load_options(
    root: Path,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    exclude: Sequence[str] = (),
    min_severity: str | None = None,
    external: bool | None = None,
    respect_gitignore: bool | None = None,
) -> Options:
    """Command-line choices first, then the project's section, then every rule."""
    section, origin = _read_section(root)
    prefix = _prefix(root, Path(origin).parent)
    chosen = list(select) or section.get("select", [])
    selected = resolve_codes(chosen, "--select" if select else f"{origin}: select") if chosen else set()
    off = resolve_codes(section.get("ignore", []), f"{origin}: ignore") if not select else set()
    off |= resolve_codes(ignore, "--ignore")
    per_file = tuple(
        (pattern, frozenset(resolve_codes(codes, f"{origin}: per-file-ignores")))
        for pattern, codes in section.get("per-file-ignores", {}).items()
    )
    severity = min_severity or section.get("min-severity", Severity.INFO.value)
    if severity not in list(Severity):
        raise UserError(f"min-severity={severity!r}: allowed are {', '.join(Severity)}")
    codes = (selected & set(all_rules()) if selected else set(all_rules())) - off
    return Options(
        frozenset(codes),
        frozenset(off),
        (*(_from_root(pattern, prefix) for pattern in section.get("exclude", [])), *exclude),
        per_file,
        Severity(severity),
        section.get("external", True) if external is None else external,
        frozenset(selected),
        section.get("respect-gitignore", True) if respect_gitignore is None else respect_gitignore,
        prefix,
    )


def _prefix(root: Path, base: Path) -> str:
    """`sub/folder/` from the folder of the settings to the audited folder."""
    folder = root.resolve() if root.is_dir() else root.resolve().parent
    if not folder.is_relative_to(base.resolve()):
        return ""
    inside = folder.relative_to(base.resolve()).as_posix()
    return "" if inside == "." else f"{inside}/"


def _from_root(pattern: str, prefix: str) -> str:
    """A pattern of the settings as seen from the audited folder; bare names hold everywhere."""
    return pattern.removeprefix(prefix)


def _read_section(root: Path) -> tuple[dict[str, Any], str]:
    start = root.resolve()
    for folder in [start if start.is_dir() else start.parent, *start.parents]:
        file = folder / "pyproject.toml"
        if file.is_file():
            try:
                tools = tomllib.loads(file.read_text("utf-8")).get("tool", {})
                # The section had this name when the tool was a part of mmldlm.
                section = tools.get("traindoctor", tools.get("mmldlm", {}).get("doctor", {}))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError) as error:
                raise UserError(f"{file}: not valid TOML ({error}); correct it or remove it") from error
            except OSError as error:
                raise UserError(f"{file}: cannot be read ({error.strerror})") from error
            _check_name(tools, str(file))
            _check_section(section, str(file))
            return section, str(file)
    return {}, "pyproject.toml"


def _check_name(tools: dict[str, Any], origin: str) -> None:
    for key in tools:
        if key != "traindoctor" and difflib.get_close_matches(key, ["traindoctor"], 1, 0.8):
            raise UserError(f"{origin}: [tool.{key}] is read by nothing; did you mean [tool.traindoctor]?")


def _check_section(section: dict[str, Any], origin: str) -> None:
    if not isinstance(section, dict):
        raise UserError(f"{origin}: tool.traindoctor={section!r}: a table [tool.traindoctor] is needed")
    for key, value in section.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{origin}: [tool.traindoctor] has {key!r}, allowed are {', '.join(_KEYS)}{hint}")
        if key in ("select", "ignore", "exclude") and not _is_words(value):
            raise UserError(f"{origin}: [tool.traindoctor] {key}={value!r}: a list of strings is needed")
        if key == "per-file-ignores" and not (
            isinstance(value, dict) and all(map(_is_words, value.values()))
        ):
            raise UserError(
                f"{origin}: [tool.traindoctor] per-file-ignores: a table of pattern = [codes] is needed"
            )
        if key in ("external", "respect-gitignore") and not isinstance(value, bool):
            raise UserError(f"{origin}: [tool.traindoctor] {key}={value!r}: true or false is needed")


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)
