"""The list of rules: what each one is called, why it exists, what it costs, and which function finds it.

A rule module declares its rules with `rule(...)`; the decorated function yields findings. Functions get one parsed
file (`PythonFile`, `ShellFile`, `YamlFile`, `DockerFile` or `EnvFile`, by kind) and know nothing of other files:
what depends on the project is said in `Finding.condition` or done by a project rule after all files were read.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from traindoctor.errors import UserError
from traindoctor.program import program
from traindoctor.types import Condition, Finding, Fix, Kind, Severity, Span

FAMILIES = {
    "NCC": "communication and allocator variables",
    "DAT": "data loading",
    "DDP": "distributed training",
    "OPT": "optimizer",
    "AMP": "precision",
    "CMP": "compilation",
    "ATT": "attention",
    "MEM": "memory",
    "SYN": "host synchronisation in the step",
    "LOS": "loss and stability",
    "LRS": "learning-rate schedules",
    "CKP": "checkpoints and resume",
    "MET": "metrics and logs",
    "PTH": "paths",
    "SHL": "launch scripts",
    "SLM": "SLURM",
    "DKR": "containers",
    "CFG": "settings",
    "DOC": "the doctor's own remarks",
}
"""Prefix of the codes -> what the family is about."""

LEFT = {
    "SEC001": "gitleaks or trufflehog look for secrets, in the history too",
    "CKP002": "bandit reports torch.load that may run code from the file (B614)",
    "DKR002": "hadolint reports a base image without version (DL3006, DL3007)",
    "DKR003": "hadolint reports packages that pip installs without version (DL3013)",
    "DKR004": "hadolint reports CMD and ENTRYPOINT in shell form (DL3025)",
    "SHL004": "shellcheck reports fractions in integer arithmetic (SC2079, SC2072)",
    "SHL008": "shellcheck reports $? behind another command (SC2320)",
    "SHL010": "shellcheck reports a cd that may fail (SC2164)",
}
"""Rules of earlier versions that other tools own -> where to find them now."""

RULE_MODULES = (
    "nccl",
    "loading",
    "copies",
    "datasets",
    "ddp",
    "process_group",
    "optimizer",
    "precision",
    "deprecated",
    "compilation",
    "attention",
    "memory",
    "activation",
    "syncs",
    "loss",
    "entropy",
    "latent_loss",
    "accumulation",
    "schedules",
    "checkpoints",
    "resuming",
    "saving",
    "paths",
    "launch",
    "slurm",
    "containers",
    "settings",
    "remarks",
)


@dataclass(frozen=True)
class Rule:
    """One rule with everything its page says."""

    code: str
    name: str
    severity: Severity
    summary: str
    why: str
    effect: str
    source: str
    kinds: tuple[Kind, ...]
    fix: str = ""
    """'', 'safe' or 'unsafe', or 'safe or unsafe' where it depends on the place."""
    remedy: str = ""
    bad: str = ""
    good: str = ""

    @property
    def family(self) -> str:
        """The letters of the code."""
        return self.code[:3]

    def at(
        self,
        path: str,
        span: Span,
        message: str,
        fix: Fix | None = None,
        *,
        severity: Severity | None = None,
        needs: Iterable[str] = (),
        unless: Iterable[str] = (),
        nowhere: Iterable[str] = (),
    ) -> Finding:
        """A finding of this rule."""
        condition = Condition(frozenset(needs), frozenset(unless), frozenset(nowhere))
        return Finding(self.code, severity or self.severity, path, span, message, fix, condition)


Check = Callable[[Any, Rule], Iterator[Finding]]

_RULES: dict[str, Rule] = {}
_CHECKS: dict[Kind, list[tuple[Rule, Check]]] = {kind: [] for kind in Kind}
_PROJECT_CHECKS: list[tuple[Rule, Check]] = []
_loaded = False


def rule(*kinds: Kind, project: bool = False, **about: Any) -> Callable[[Check], Check]:
    """Declare a rule; the decorated function finds it in files of these kinds, or in the merged facts."""

    def register(check: Check) -> Check:
        # What reads Python reads notebooks.
        declared = Rule(kinds=tuple(kind for kind in kinds if kind is not Kind.NOTEBOOK), **about)
        if declared.code in _RULES or declared.family not in FAMILIES:
            raise AssertionError(f"{declared.code} is declared twice or belongs to no family")
        _RULES[declared.code] = declared
        if project:
            _PROJECT_CHECKS.append((declared, check))
        else:
            for kind in declared.kinds:
                _CHECKS[kind].append((declared, check))
        return check

    return register


def _load() -> None:
    global _loaded
    if not _loaded:
        for module in RULE_MODULES:
            importlib.import_module(f"traindoctor.rules.{module}")
        _loaded = True


def all_rules() -> dict[str, Rule]:
    """Every rule by code, in order of the codes."""
    _load()
    return {code: _RULES[code] for code in sorted(_RULES)}


def checks_for(kind: Kind) -> list[tuple[Rule, Check]]:
    """The checks that read files of this kind."""
    _load()
    return _CHECKS[Kind.PYTHON if kind is Kind.NOTEBOOK else kind]


def project_checks() -> list[tuple[Rule, Check]]:
    """The checks that read the merged facts of all files."""
    _load()
    return _PROJECT_CHECKS


def get_rule(code: str) -> Rule:
    """The rule of this code or name."""
    rules = all_rules()
    wanted = code.strip()
    for declared in rules.values():
        if wanted.upper() == declared.code or wanted.lower() == declared.name:
            return declared
    if wanted.upper() in LEFT:
        raise UserError(f"{wanted.upper()} was removed: {LEFT[wanted.upper()]}")
    names = [*rules, *(declared.name for declared in rules.values())]
    near = difflib.get_close_matches(wanted.upper(), names, 1) or difflib.get_close_matches(
        wanted.lower(), names, 1
    )
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"no rule {code!r}: {hint}'{program()} rule' without a code lists all {len(rules)}")


def resolve_codes(words: Iterable[str], origin: str) -> set[str]:
    """The codes that a list of codes, names and prefixes stands for; `ALL` is every code."""
    rules = all_rules()
    chosen: set[str] = set()
    for word in (part.strip() for entry in words for part in entry.split(",")):
        if not word:
            continue
        matched = {
            code
            for code, declared in rules.items()
            if word.upper() == "ALL" or code.startswith(word.upper()) or declared.name == word.lower()
        }
        if word.upper() in LEFT or word.upper() == "SEC":
            continue  # settings that name a rule of an earlier version stay valid
        if not matched and not word.upper().startswith(("SC", "TOR")):
            raise UserError(
                f"{origin}: {word!r} is not a rule code, name or family prefix; the families are {', '.join(FAMILIES)}"
            )
        chosen |= matched or {word.upper()}
    return chosen
