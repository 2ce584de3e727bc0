"""Pages about rules: what `rule CODE` prints; `rule --write FOLDER` writes one page for each and a table."""

from __future__ import annotations

from pathlib import Path

from traindoctor.program import program
from traindoctor.registry import FAMILIES, Rule, all_rules

_LANGUAGE = {"python": "python", "shell": "bash", "yaml": "yaml", "dockerfile": "dockerfile", "env": "bash"}


def rule_page(rule: Rule) -> str:
    """Everything about one rule, as Markdown."""
    language = _LANGUAGE[rule.kinds[0].value if len(rule.kinds) < 5 else "shell"]
    fix = {"": "by hand", "safe": f"safe, made by `{program()} fix --apply`"}.get(
        rule.fix, f"{rule.fix}, see below"
    )
    if rule.fix == "unsafe":
        fix = f"made with `{program()} fix --apply --unsafe`"
    kinds = ", ".join(kind.value for kind in rule.kinds)
    lines = [
        f"# {rule.code}: {rule.name}",
        "",
        f"{rule.summary}.",
        "",
        "| family | severity | files | fix |",
        "|---|---|---|---|",
        f"| {FAMILIES[rule.family]} | {rule.severity.value} | {kinds} | {fix} |",
        "",
        f"**Why.** {rule.why}",
        "",
        f"**Effect.** {rule.effect}",
        "",
        f"**Source.** {rule.source}.",
        "",
    ]
    if rule.remedy:
        lines += [f"**Remedy.** {rule.remedy}", ""]
    lines += ["```" + language, rule.bad, "```", "", "better:", "", "```" + language, rule.good, "```", ""]
    lines += [f"Silence one place with `# doctor: ignore[{rule.code}] reason`.", ""]
    return "\n".join(lines)


def rule_index() -> str:
    """The table of all rules."""
    rules = all_rules()
    lines = [
        f"# The {len(rules)} rules",
        "",
        "Written by `traindoctor rule --write FOLDER`; a test keeps it current. "
        "Fix: S safe, U with `--unsafe`, S/U depends on the place.",
        "",
    ]
    for family, about in FAMILIES.items():
        lines += [f"## {family}: {about}", "", "| code | rule | severity | fix |", "|---|---|---|---|"]
        for rule in rules.values():
            if rule.family == family:
                mark = {"": "", "safe": "S", "unsafe": "U"}.get(rule.fix, "S/U")
                lines.append(
                    f"| [{rule.code}]({rule.code}.md) | {rule.summary} | {rule.severity.value} | {mark} |"
                )
        lines.append("")
    return "\n".join(lines)


def all_pages() -> dict[str, str]:
    """File name -> content of every page."""
    return {"index.md": rule_index(), **{f"{code}.md": rule_page(rule) for code, rule in all_rules().items()}}


def write_pages(folder: Path) -> int:
    """Write all pages; returns how many changed."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = 0
    for name, content in all_pages().items():
        target = folder / name
        if not target.is_file() or target.read_text("utf-8") != content:
            target.write_text(content, "utf-8")
            changed += 1
    for stale in folder.glob("[A-Z][A-Z][A-Z][0-9][0-9][0-9].md"):
        if stale.name not in all_pages():
            stale.unlink()
            changed += 1
    return changed
