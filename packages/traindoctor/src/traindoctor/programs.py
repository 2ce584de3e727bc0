"""Programs of a tree: an entry point with everything it imports, the settings it reads and the scripts that start it.

Conditions of findings are judged per program, so that what one program does says nothing about another one. A file that
belongs to no program (a library without an entry point) is judged with the facts of the whole tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath

from traindoctor.types import Facts, Kind, Setting

EVALUATES = re.compile(
    r"eval|zero_?shot|infer|sampl|generat|predict|visuali|(^|[_/])(valid|test(_|\.))", re.IGNORECASE
)


@dataclass
class Program:
    """One entry point and the files that belong to it."""

    entry: str
    parts: list[Facts]
    """Facts of its Python files, settings and scripts."""
    files: frozenset[str]
    evaluates: bool = False
    """The entry point is named as an evaluation and trains nothing itself, whatever its libraries can do."""

    @cached_property
    def features(self) -> frozenset[str]:
        """What any of its files does; `inference_only` where it evaluates and never trains."""
        features = frozenset().union(*(part.features for part in self.parts))
        if self.evaluates or ("inference" in features and "training" not in features):
            features |= {"inference_only"}
        return features

    def mentions(self, word: str) -> bool:
        """Whether a name or short string occurs in its code."""
        return any(word in part.words for part in self.parts)

    @cached_property
    def spread(self) -> frozenset[str]:
        """Objects that its code passes on as a whole."""
        return frozenset().union(*(part.spread for part in self.parts))

    @cached_property
    def configs(self) -> frozenset[str]:
        """Names of settings files, and folders that Hydra reads."""
        return frozenset().union(*(part.configs for part in self.parts))


@dataclass
class Project:
    """All facts of a tree, and its programs."""

    parts: list[Facts]
    """Facts of each file."""
    programs: list[Program] = field(default_factory=list)
    prefix: str = ""
    """From the project's folder to the audited root: programs know paths of the project, findings those of the root."""

    @cached_property
    def whole(self) -> Program:
        """The tree as one program, for files that belong to none."""
        return Program("", self.parts, frozenset())

    @cached_property
    def settings(self) -> list[Setting]:
        """Keys of all YAML settings."""
        return [setting for part in self.parts for setting in part.settings]

    @cached_property
    def _by_file(self) -> dict[str, list[Program]]:
        found: dict[str, list[Program]] = {}
        for program in self.programs:
            for path in program.files:
                found.setdefault(path, []).append(program)
        return found

    def programs_of(self, path: str) -> list[Program]:
        """The programs that a file belongs to; the whole tree where it belongs to none.

        An evaluation that others import, or may import at run time, is still one.
        """
        place = f"{self.prefix}{path}"
        programs = self._by_file.get(place, [])
        own = [program for program in programs if program.entry == place and program.evaluates]
        return own or programs or [self.whole]

    def features_of(self, path: str) -> tuple[frozenset[str], ...]:
        """The features of each program that a file belongs to."""
        return tuple(dict.fromkeys(program.features for program in self.programs_of(path)))


def build_project(facts: dict[str, Facts], kinds: dict[str, Kind], prefix: str = "") -> Project:
    """Find the programs of a tree from the facts of its files."""
    code = {path for path, kind in kinds.items() if kind in (Kind.PYTHON, Kind.NOTEBOOK) and path in facts}
    modules = _Modules(code)
    imports = {path: modules.imported(path, facts[path].imports) for path in code}
    started = _started(facts, code)
    imported = set().union(*imports.values()) if imports else set()
    entries = sorted(
        path
        for path in code
        if facts[path].is_entry
        or path in started
        or ("trains_at_import" in facts[path].features and path not in imported)
    )
    reached = {entry: _reach(entry, imports, facts, code) for entry in entries}
    attached = _attach_settings(facts, kinds, reached, started)
    programs = []
    for entry in entries:
        targets = {name for path in attached[entry] for name in facts[path].imports}
        below = [_reach(path, imports, facts, code) for path in modules.imported(entry, targets)]
        files = frozenset(reached[entry].union(*below)) | attached[entry]
        parts = [facts[path] for path in sorted(files)]
        programs.append(Program(entry, parts, files, _evaluates(entry, facts)))
    return Project(list(facts.values()), programs, prefix)


class _Modules:
    """Dotted names of the files of a tree, whatever folder is on the import path."""

    def __init__(self, paths: set[str]) -> None:
        self._paths = paths
        self._by_name: dict[str, list[str]] = {}
        self._words: set[str] = set()
        for path in sorted(paths):
            parts = list(PurePosixPath(path).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            self._words.update(parts)
            for start in range(len(parts)):
                self._by_name.setdefault(".".join(parts[start:]), []).append(path)

    def imported(self, path: str, names: Iterable[str]) -> set[str]:
        """The files of the tree that these imported names reach, seen from a file."""
        found: set[str] = set()
        for name in names:
            words = name.lstrip(".").split(".")
            if words[0] not in self._words:
                continue  # another distribution
            # `from a.b import c`: a/b/c.py, a/b.py and the packages around them run.
            for count in range(len(words), 0, -1):
                target = self._find(path, ".".join(words[:count]), exact=name.startswith("."))
                if target is not None:
                    found.add(target)
        return found

    def _find(self, path: str, name: str, *, exact: bool) -> str | None:
        candidates = self._by_name.get(name, [])
        if exact:
            stem = name.replace(".", "/")
            candidates = [c for c in candidates if c in (f"{stem}.py", f"{stem}/__init__.py")]
        return max(candidates, key=lambda candidate: _shared(candidate, path), default=None)


def _shared(first: str, second: str) -> tuple[int, int]:
    """How many folders two paths have in common; the shallower one wins a tie."""
    pairs = zip(first.split("/")[:-1], second.split("/")[:-1], strict=False)
    common = 0
    for one, other in pairs:
        if one != other:
            break
        common += 1
    return common, -first.count("/")


def _reach(entry: str, imports: dict[str, set[str]], facts: dict[str, Facts], code: set[str]) -> set[str]:
    """The files that run when the entry point runs; all of them where a name is imported at run time."""
    reached, todo = {entry}, [entry]
    while todo:
        path = todo.pop()
        if "dynamic_import" in facts[path].features:
            return set(code)
        for target in imports[path] - reached:
            reached.add(target)
            todo.append(target)
    return reached


def _started(facts: dict[str, Facts], code: set[str]) -> dict[str, set[str]]:
    """Python file -> scripts that start it."""
    started: dict[str, set[str]] = {}
    for path, part in facts.items():
        for word in part.launches:
            for target in code:
                if target == word or target.endswith(f"/{word}") or word.endswith(f"/{target}"):
                    started.setdefault(target, set()).add(path)
    return started


def _attach_settings(
    facts: dict[str, Facts],
    kinds: dict[str, Kind],
    reached: dict[str, set[str]],
    started: dict[str, set[str]],
) -> dict[str, frozenset[str]]:
    """Entry point -> the settings files and scripts that belong to it."""
    others = [path for path in facts if kinds[path] not in (Kind.PYTHON, Kind.NOTEBOOK)]
    attached: dict[str, set[str]] = {entry: set(started.get(entry, ())) for entry in reached}
    named = {
        entry: set().union(*(facts[path].configs for path in [*files, *started.get(entry, ())]))
        for entry, files in reached.items()
    }
    scripts = set().union(*started.values()) if started else set()
    for path in others:
        if path in scripts:
            continue
        owners = [entry for entry in reached if _names_file(path, named[entry])]
        if not any(_trains(entry, reached, facts) for entry in owners):
            owners += _nearest(path, reached, facts)
        for entry in owners:
            attached[entry].add(path)
    return {entry: frozenset(paths) for entry, paths in attached.items()}


def _names_file(path: str, configs: set[str]) -> bool:
    """Whether a program names a settings file: by its name, by the folder that Hydra reads, or on a command line."""
    name = path.rsplit("/", 1)[-1]
    return any(
        word.rsplit("/", 1)[-1] == name
        if word.endswith((".yaml", ".yml"))
        else word == "*" or path.startswith(f"{word}/")
        for word in configs
    )


def _nearest(path: str, reached: dict[str, set[str]], facts: dict[str, Facts]) -> list[str]:
    """The entry points in the nearest folders around a file, up to one that trains; all of them where none does."""
    folder, near = path, list[str]()
    while folder:
        folder = folder.rpartition("/")[0]
        near += [entry for entry in reached if entry.rpartition("/")[0] == folder]
        if any(_trains(entry, reached, facts) for entry in near):
            return near
    return list(reached)


def _evaluates(entry: str, facts: dict[str, Facts]) -> bool:
    return bool(EVALUATES.search(entry.rsplit("/", 1)[-1])) and "training" not in facts[entry].features


def _trains(entry: str, reached: dict[str, set[str]], facts: dict[str, Facts]) -> bool:
    return not _evaluates(entry, facts) and any("training" in facts[path].features for path in reached[entry])
