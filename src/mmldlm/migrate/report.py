"""The migration as a document and as recipes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmldlm.migrate.old_settings import CHANGES
from mmldlm.migrate.repository import Migration
from mmldlm.migrate.translation import Translation, check_recipe, recipe_text


def translation_lines(translation: Translation) -> list[str]:
    """What a person should know about one translated file."""
    lines: list[str] = []
    for title, entries in (
        ("Ignored by the old code", translation.ignored),
        ("Without a counterpart", translation.dropped),
        ("Contradictions", translation.contradictions),
        ("Unknown to both", translation.unknown),
        ("Notes", translation.notes),
        ("Our loader says", check_recipe(translation.recipe)),
    ):
        if entries:
            lines += [f"{title}:", *(f"  - {entry}" for entry in entries)]
    return lines


def report_text(migration: Migration) -> str:
    """The whole report as Markdown."""
    lines = [
        f"# Migration of {migration.root.name}",
        "",
        f"{len(migration.translations)} settings files, {len(migration.commands)} command lines, "
        f"{len(migration.data)} data folders, {len(migration.environment)} remarks on environment variables. "
        "Nothing in the old checkout was changed.",
        "",
        "## What behaves differently",
        "",
        *(f"- **{what}**: {how}" for what, how in CHANGES),
        "",
        "## Data",
        "",
    ]
    if migration.data:
        lines += [f"- `{folder}`: `{command}`" for folder, command in migration.data]
    else:
        lines += [
            "- No `tokens/` and `latents/` folders and no `*_data.jsonl` lie in this checkout. With the data "
            "elsewhere: "
            "`mmldlm data import FOLDER --out store --tokenizer NAME`."
        ]
    lines += ["", "## Command lines", ""]
    for command in migration.commands:
        lines += [
            f"- `{command.script}:{command.line}`",
            f"  - old: `{command.old}`",
            f"  - new: `{command.new}`",
        ]
        lines += [f"  - never had an effect: {entry}" for entry in command.ignored]
        lines += [f"  - has no counterpart: {entry}" for entry in command.dropped]
    lines += ["", "## Environment", ""]
    lines += [f"- `{f.path}:{f.where}` {f.code}: {f.message}" for f in migration.environment] or [
        "- nothing to say"
    ]
    lines += ["", "## Settings", ""]
    for translation in migration.translations:
        lines += [f"### {translation.source}", "", *_as_list(translation_lines(translation)), ""]
    return "\n".join(lines)


def _as_list(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" if not line.startswith("  ") else line for line in lines]


def write_migration(migration: Migration, out: Path) -> list[Path]:
    """Write the report and one recipe per settings file; returns what was written."""
    recipes = out / "recipes"
    recipes.mkdir(parents=True, exist_ok=True)
    written = [out / "migration.md"]
    written[0].write_text(report_text(migration), "utf-8")
    taken: set[str] = set()
    for translation in migration.translations:
        stem = Path(translation.source).stem
        if stem in taken:
            stem = translation.source.removesuffix(".yaml").replace("/", "-")
        taken.add(stem)
        target = recipes / f"{stem}.yaml"
        target.write_text(recipe_text(translation), "utf-8")
        written.append(target)
    return written
