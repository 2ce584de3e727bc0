"""What `--explain` prints: a section per code, the page of all codes, the table of all thresholds."""

from __future__ import annotations

import ast
import inspect
import itertools

from runwatch import settings
from runwatch.catalogue import BY_CODE, KINDS, Kind
from runwatch.errors import UserError


def explain(word: str) -> str:
    """A code, `all` codes, or the `settings`."""
    if word == "all":
        return pages()
    if word == "settings":
        return settings_page()
    if word.upper() not in BY_CODE:
        raise UserError(f"--explain {word}: allowed are all, settings, {', '.join(BY_CODE)}")
    return page(BY_CODE[word.upper()])


def page(kind: Kind) -> str:
    """The section about one kind, as Markdown."""
    lines = [f"## {kind.code}", "", f"**{kind.name}** · {kind.level}. {kind.meaning}", ""]
    lines += [f"*When:* {kind.rule}.", ""]
    if kind.settings:
        lines += [f"*Settings:* {', '.join(f'`{name}`' for name in kind.settings)}.", ""]
    ends = "when it has not occurred for `resolve_lines` lines" if kind.passing else "when its cause is gone"
    return "\n".join([*lines, f"*Over:* {ends}.", "", f"*What to do:* {kind.advice}", "", *_own(kind)])


def _own(kind: Kind) -> list[str]:
    return [f"*In a run of MM-LDLM:* {kind.own_advice}", ""] if kind.own_advice else []


def pages() -> str:
    """The page of all codes."""
    head = [
        "# What the monitor finds",
        "",
        "`runwatch --explain CODE` prints one of these sections.",
        "",
    ]
    table = ["| code | name | level | meaning |", "|---|---|---|---|"]
    table += [f"| [{k.code}](#{k.code.lower()}) | {k.name} | {k.level} | {k.meaning} |" for k in KINDS]
    return "\n".join([*head, *table, "", *(page(kind) for kind in KINDS)])


def settings_page() -> str:
    """The table of all thresholds, with what stands under each in the source."""
    lines = [
        "# Thresholds",
        "",
        "Change them with `--set key=value` or `--settings FILE.yaml`; `runwatch --explain settings`",
    ]
    lines += ["prints this page.", "", "| key | default | meaning |", "|---|---|---|"]
    defaults = settings.MonitorSettings()
    for name, meaning in _documented():
        lines.append(f"| `{name}` | {getattr(defaults, name):g} | {meaning} |")
    return "\n".join([*lines, ""])


def _documented() -> list[tuple[str, str]]:
    """Names of the fields with the text under them."""
    body = next(
        node.body
        for node in ast.parse(inspect.getsource(settings)).body
        if isinstance(node, ast.ClassDef) and node.name == "MonitorSettings"
    )
    documented = []
    for item, below in itertools.pairwise(body):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            assert isinstance(below.value, ast.Constant), "every setting has its meaning under it"
            documented.append((item.target.id, str(below.value.value)))
    return documented
